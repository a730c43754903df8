"""The client's half of an app: what is sent through it, and what is asked of tasks by their ids.

What lives here: `Desk`, which gives each wish to the part that grants it. What may not: registering, and workers.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, TypeVar, Unpack, cast, overload
from uuid import UUID

from everbeat.client.by_name import call_by_name
from everbeat.client.control import CancelResult, Control, to_task_id
from everbeat.client.handle import Handle
from everbeat.client.many import ahandles_of, handles_of
from everbeat.client.options import SendOptions, call_patience
from everbeat.client.registry import Registry
from everbeat.client.sender import CallSender
from everbeat.client.signalling import signalled, to_target
from everbeat.client.task import Call, Task
from everbeat.client.twins import awaiting, blocking
from everbeat.client.workflow import Workflow, WorkflowDecorator, WorkflowDefinition
from everbeat.client.workflow_desk import WorkflowDesk
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.client.workflow_sender import WorkflowSender
from everbeat.domain.duration import Duration, When
from everbeat.domain.explanation import Explanation
from everbeat.domain.gathering import StandIn, attempt
from everbeat.domain.graph import OnError
from everbeat.domain.inspection import TaskInfo
from everbeat.domain.outcome import Completed, Failed
from everbeat.domain.pauses import PauseKind
from everbeat.domain.signature import location_of
from everbeat.errors import RegistrationError
from everbeat.store.plan import Plan

R = TypeVar("R")


class Desk(WorkflowDesk):
    """Sends, signals, cancels, retries; every blocking method has a twin to await, named with a leading `a`."""

    def __init__(
        self, control: Control, *, sender: CallSender, registry: Registry, queue_priorities: Mapping[str, int]
    ) -> None:
        super().__init__(
            control.door, alive_within_ms=control.alive_within_ms, queue_priorities=queue_priorities
        )
        self._control = control
        self._sender = sender
        self._registry = registry
        self._workflow_sender = WorkflowSender(control, sender=sender)
        self._workflows: dict[str, WorkflowDefinition[..., Any]] = {}

    def _names_here(self, kind: PauseKind) -> Collection[str]:
        return super()._names_here(kind) if kind == "queue" else self._registry

    def patience(self, patience: Duration, /) -> AbstractContextManager[None]:
        """Calls in this block go on for this long without a sign of life from the database, instead of `App(patience=...)`.

        with app.patience("30s"):
            app.cancel(handle.id)
        """
        return self.door.patience(call_patience(patience, subject="patience"))

    def send_many(self, calls: Iterable[Call[R]], /) -> list[Handle[R]]:
        """Stores many tasks in one statement: all of them, or none.

        app.send_many(welcome.call(user) for user in users)
        """
        return self._sender.send_many(calls)

    async def asend_many(self, calls: Iterable[Call[R]] | AsyncIterable[Call[R]], /) -> list[Handle[R]]:
        """As `send_many`, to await; takes async iterables, too."""
        return await self._sender.asend_many(calls)

    def workflow(self, name: str, *, on_error: OnError = "fail") -> Workflow:
        """A workflow to add nodes to. Raises ConfigurationError.

        `on_error`: "fail" lets what does not depend on a failed node finish and then fails, "pause" stops at once, "continue" passes over failures.

        wf = app.workflow("order")
        wf.add(pack, wf.add(charge, order).result)
        """
        return Workflow(name, on_error=on_error, backend=self._workflow_sender)

    def define_workflow(self, name: str, *, on_error: OnError = "fail") -> WorkflowDecorator:
        """The decorator of a function that adds the nodes of a workflow; one of a name. Raises RegistrationError, ConfigurationError.

        @app.define_workflow("order")
        def order(wf: Workflow, order_id: int) -> Node[str]:
            return wf.add(pack, wf.add(charge, order_id).result)
        """

        if callable(name):
            reason = (
                f"@app.define_workflow is used without parentheses for {getattr(name, '__name__', name)!r}."
            )
            raise RegistrationError(
                reason, fix='write @app.define_workflow("name").', where=location_of(name)
            )

        def define(function: Callable[..., Any], /) -> object:
            return attempt(lambda: self._define(function, name, on_error), otherwise=StandIn())

        return cast(WorkflowDecorator, define)

    @property
    def workflows(self) -> Mapping[str, WorkflowDefinition[..., Any]]:
        """The defined workflows by name."""
        return MappingProxyType(self._workflows)

    def _define(
        self, function: Callable[..., Any], name: str, on_error: OnError
    ) -> WorkflowDefinition[..., Any]:
        definition = WorkflowDefinition[..., Any](
            function, name=name, on_error=on_error, backend=self._workflow_sender
        )
        other = self._workflows.get(definition.name)
        if other is not None:
            reason = f"Workflow {name!r} is already defined, by {other.where}."
            raise RegistrationError(reason, fix="give one of them another name.", where=definition.where)
        self._workflows[definition.name] = definition
        return definition

    def outcomes(
        self, handles: Iterable[Handle[R]], /, *, timeout: Duration | None = None
    ) -> list[Completed[R] | Failed]:
        """How all of these tasks ended, in their order, looked up together; raises WaitTimeout after `timeout`, TaskNotFound.

        app.outcomes(app.send_many(welcome.call(user) for user in users), timeout="1m")
        """
        return Handle.all_outcomes(handles_of(handles, name="outcomes"), timeout=timeout)

    async def aoutcomes(
        self, handles: Iterable[Handle[R]] | AsyncIterable[Handle[R]], /, *, timeout: Duration | None = None
    ) -> list[Completed[R] | Failed]:
        """As `outcomes`, to await; takes async iterables, too."""
        return await Handle.await_outcomes(await ahandles_of(handles, name="aoutcomes"), timeout=timeout)

    def results(self, handles: Iterable[Handle[R]], /, *, timeout: Duration | None = None) -> list[R]:
        """What all of these tasks returned, in their order; raises TaskFailed for the first that did not complete, once all have ended."""
        given = handles_of(handles, name="results")
        self.outcomes(given, timeout=timeout)
        return [handle.result() for handle in given]

    async def aresults(
        self, handles: Iterable[Handle[R]] | AsyncIterable[Handle[R]], /, *, timeout: Duration | None = None
    ) -> list[R]:
        """As `results`, to await; takes async iterables, too."""
        given = await ahandles_of(handles, name="aresults")
        await self.aoutcomes(given, timeout=timeout)
        return [await handle.aresult() for handle in given]

    def send_by_name(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        when: When | None = None,
        **options: Unpack[SendOptions],
    ) -> Handle[Any]:
        """Stores one task by its name, with arguments by parameter name; the function need not be known here.

        app.send_by_name("mail.welcome", {"user_id": 42}, queue="mail")
        """
        return self._sender.send(self._named_call(name, arguments, when, options))

    async def asend_by_name(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        when: When | None = None,
        **options: Unpack[SendOptions],
    ) -> Handle[Any]:
        """As `send_by_name`, to await."""
        return await self._sender.asend(self._named_call(name, arguments, when, options))

    def _named_call(
        self, name: str, arguments: Mapping[str, Any] | None, when: When | None, options: SendOptions
    ) -> Call[Any]:
        return call_by_name(
            name,
            arguments,
            task=self._registry.task(name),
            largest=self._sender.payload_limit,
            when=when,
            options=options,
        )

    @overload
    def handle(self, task_id: UUID | str, task: Task[..., R], /) -> Handle[R]: ...
    @overload
    def handle(self, task_id: UUID | str, /) -> Handle[Any]: ...
    def handle(self, task_id: UUID | str, task: Task[..., Any] | None = None, /) -> Handle[Any]:
        """The handle of a task that was sent elsewhere or earlier; with its task object results have their type."""
        known = to_task_id(task_id)
        if task is None:
            return Handle(known, name=None, control=self._control)
        decode: Callable[[str], Any] = task.definition.codec.decode_result
        return Handle(known, name=task.name, control=self._control, decode=decode)

    def _cancel(self, task_id: UUID | str, /) -> Plan[CancelResult]:
        """Cancels the task at once if it waits, asks its worker if it runs, and its children with it; raises TaskNotFound."""
        return self._control.cancel(to_task_id(task_id))

    def _signal(
        self, target: UUID | str | Handle[Any] | WorkflowHandle[Any], name: str, value: object = None, /
    ) -> Plan[None]:
        """Tells a task, or all tasks of a workflow, of an event: whoever waits for it goes on, and it is kept for who waits later.

        `target` is a handle or an id; `value` is plain JSON of at most 1 MB. Raises SignalRefused for what has ended, TaskNotFound,
        PayloadError.

        app.signal(handle, "approved", {"by": "ann"})
        """
        return signalled(
            self._control.door, to_target(target), name, value, signal_id=self._sender.ids.next()
        )

    def _retry(self, task_id: UUID | str, /) -> Plan[None]:
        """Runs an ended task again, now and with fresh budgets; raises TaskNotRetryable, TaskNotFound."""
        return self._control.retry(to_task_id(task_id))

    def _info(self, task_id: UUID | str, /) -> Plan[TaskInfo]:
        """Everything about a task, also why it still waits; raises TaskNotFound."""
        return self._control.info(to_task_id(task_id))

    def _explain(self, task_id: UUID | str, /) -> Plan[Explanation]:
        """Why a task is not running, or why it was run again; raises TaskNotFound.

        app.explain(handle.id).reasons[0].text
        """
        return self._control.explain(to_task_id(task_id))

    cancel = blocking(_cancel)
    acancel = awaiting(_cancel)
    signal = blocking(_signal)
    asignal = awaiting(_signal)
    retry = blocking(_retry)
    aretry = awaiting(_retry)
    info = blocking(_info)
    ainfo = awaiting(_info)
    explain = blocking(_explain)
    aexplain = awaiting(_explain)
