"""The batch of a running task, to which the task can add tasks."""

from __future__ import annotations

from typing import Protocol, TypeVar, final
from uuid import UUID

from everbeat.domain.settings.checks import public
from everbeat.domain.task.context_backend import NewChild
from everbeat.domain.task.step_runner import StepPlan, StepRunner

H = TypeVar("H")
H_co = TypeVar("H_co", covariant=True)


class ChildCall(Protocol[H_co]):
    """A call that a running task can send as its child: the result of `task.call(...)`."""

    def _as_child(self) -> NewChild: ...

    def _handle_of(self, task_id: UUID, /) -> H_co: ...


class SendsChildren(Protocol):
    """Sends a child of the running task, which can belong to the batch of the task."""

    def __call__(self, call: ChildCall[H], /, *, in_batch: bool) -> StepPlan[H]: ...


@public
@final
class TaskBatch:
    """The batch of a running task. Returned by `Context.batch`."""

    __slots__ = ("_sent", "_steps")

    def __init__(self, steps: StepRunner, sent: SendsChildren) -> None:
        self._steps = steps
        self._sent = sent

    def send(self, call: ChildCall[H_co], /) -> H_co:
        """Send a child task that belongs to the batch of the running task, and return its Handle.

        The child is sent only once across all attempts, also if the batch is sealed. Raises PayloadError if the running task belongs to no
        batch. Raises the same errors as `Context.send` otherwise.

        handle = ctx.batch.send(load.call(row))
        """
        return self._steps.run("batch.send", self._sent(call, in_batch=True))

    async def asend(self, call: ChildCall[H_co], /) -> H_co:
        """Async version of `send` that does not block the running event loop."""
        return await self._steps.arun(self._sent(call, in_batch=True))
