"""The tasks of one app, by name.

What lives here: registering, refusing a name that is taken, looking one up. What may not: sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from everbeat.client.decorator import make_task
from everbeat.client.sender import CallSender
from everbeat.client.task import AsyncTask, SyncTask, Task
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.gathering import StandIn, attempt
from everbeat.domain.policy import TaskOptions
from everbeat.errors import RegistrationError


class Registry(Mapping[str, TaskDefinition]):
    """What `app.tasks` is: the definitions by name, in the order of registration."""

    def __init__(self, sender: CallSender) -> None:
        self._sender = sender
        self._tasks: dict[str, Task[..., Any]] = {}

    def register(
        self, function: Callable[..., Any], options: TaskOptions
    ) -> SyncTask[..., Any] | AsyncTask[..., Any]:
        """Makes a task of a function. Raises RegistrationError, also for a name that is taken."""
        return attempt(lambda: self._registered(function, options), otherwise=StandIn())

    def _registered(
        self, function: Callable[..., Any], options: TaskOptions
    ) -> SyncTask[..., Any] | AsyncTask[..., Any]:
        task = make_task(function, options=options, sender=self._sender, largest=self._sender.payload_limit)
        where = task.definition.where or None
        other = self._tasks.get(task.name)
        if other is not None:
            raise RegistrationError(
                f"Task {task.name!r} is already registered, by {other.definition.where}.",
                fix="rename the function, or give one of them a name of its own: @app.task(name=...).",
                where=where,
            )
        if options.queue != "default":
            self._sender.require_queue(options.queue, subject=f"queue of task {task.name!r}")
        self._tasks[task.name] = task
        return task

    def task(self, name: str) -> Task[..., Any] | None:
        """The task of this name, if it is registered."""
        return self._tasks.get(name)

    def __getitem__(self, name: str) -> TaskDefinition:
        return self._tasks[name].definition

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)
