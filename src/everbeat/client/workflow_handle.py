"""What a start gives back: a way to wait for a workflow, to ask about it and its nodes, to stop it and to let it go on.

What lives here: `WorkflowHandle`. What may not: the questions themselves (`workflow_control`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar, overload
from uuid import UUID

import msgspec

from everbeat.client import workflow_control, workflow_retrying
from everbeat.client.control import Control
from everbeat.client.door import Door
from everbeat.client.twins import awaiting, blocking
from everbeat.client.workflow_retrying import Completed as Completing
from everbeat.domain.duration import Duration
from everbeat.domain.explanation import WorkflowExplanation
from everbeat.domain.failure import error_from_json
from everbeat.domain.graph import Hole, ResultMissing, fill
from everbeat.domain.outcome import RESULT_NOT_AVAILABLE, Completed, Failed, TaskError, TaskFailed
from everbeat.domain.states import TaskState
from everbeat.domain.workflow_info import NodeInfo, NodeState, WorkflowInfo, WorkflowRetry, WorkflowState
from everbeat.errors import NodeNotEnded, TaskNotFound, WaitTimeout, WorkflowNotFound
from everbeat.store.handing_on import known_of
from everbeat.store.plan import Plan, ask
from everbeat.store.tasks import StoredOutcome
from everbeat.store.workflow_values import values

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)


class NodeOf(Protocol[T_co]):
    """A node as it was added: its name, and how its result is read."""

    @property
    def name(self) -> str: ...

    def read_result(self, text: str) -> T_co: ...


class WorkflowHandle(Generic[R_co]):
    """One started workflow, by its `id`; every blocking method has a twin to await, named with a leading `a`."""

    def __init__(
        self,
        workflow_id: UUID,
        *,
        control: Control,
        decode: Callable[[str], Any] = msgspec.json.decode,
    ) -> None:
        self.id = workflow_id
        self._control = control
        self._decode = decode
        self._seen: Completed[R_co] | Failed | None = None

    def __repr__(self) -> str:
        return f"<WorkflowHandle {self.id}>"

    @property
    def door(self) -> Door:
        """The way to the database."""
        return self._control.door

    def result(self, *, timeout: Duration | None = None) -> R_co:
        """The value of the workflow's output; raises TaskFailed if it did not complete, or has none, WaitTimeout after `timeout`.

        handle.result(timeout="5m")
        """
        return self._value(self.outcome(timeout=timeout))

    async def aresult(self, *, timeout: Duration | None = None) -> R_co:
        """As `result`, to await."""
        return self._value(await self.aoutcome(timeout=timeout))

    def outcome(self, *, timeout: Duration | None = None) -> Completed[R_co] | Failed:
        """How the workflow ended; raises WaitTimeout after `timeout`, WorkflowNotFound."""
        if self._seen is None:
            try:
                self._remember(self._control.wait(self.id, timeout=timeout, name="outcome"))
            except TaskNotFound:
                raise WorkflowNotFound(self.id) from None
            except WaitTimeout as late:
                raise WaitTimeout(self.id, late.waited_s, what="Workflow") from None
        assert self._seen is not None
        return self._seen

    async def aoutcome(self, *, timeout: Duration | None = None) -> Completed[R_co] | Failed:
        """As `outcome`, to await."""
        if self._seen is None:
            try:
                self._remember(await self._control.await_end(self.id, timeout=timeout))
            except TaskNotFound:
                raise WorkflowNotFound(self.id) from None
            except WaitTimeout as late:
                raise WaitTimeout(self.id, late.waited_s, what="Workflow") from None
        assert self._seen is not None
        return self._seen

    def _status(self) -> Plan[WorkflowState]:
        """Its state now; raises WorkflowNotFound."""
        return workflow_control.status(self.id)

    def _info(self) -> Plan[WorkflowInfo]:
        """The workflow as it is now; raises WorkflowNotFound."""
        return workflow_control.info(self.id)

    def _nodes(self) -> Plan[list[NodeInfo]]:
        """Its nodes as they are now, in the order they were added; raises WorkflowNotFound."""
        return workflow_control.nodes(self.id)

    def _pause(self) -> Plan[WorkflowState]:
        """Lets nothing more begin, children included; what runs ends. Answers the state now; raises WorkflowNotFound."""
        return workflow_control.pause(self.id, channel=self.door.channel)

    def _resume(self) -> Plan[WorkflowState]:
        """Lets a paused workflow go on. Answers the state now; raises WorkflowNotFound."""
        return workflow_control.resume(self.id, channel=self.door.channel)

    def _cancel(self) -> Plan[WorkflowState]:
        """Skips what has not begun, asks what runs to end, children included. Answers the state now; raises WorkflowNotFound."""
        return workflow_control.cancel(self.id, channel=self.door.channel)

    def _retry(
        self, *, completed: Completing = "rerun", from_node: str | None = None, dry_run: bool = False
    ) -> Plan[WorkflowRetry]:
        """Begins again what ended badly, with fresh budgets, and everything downstream of it. Raises WorkflowNotRetryable, WorkflowNotFound.

        `completed`: "rerun" also runs nodes again that completed and are downstream of one that runs again; "keep" leaves them as they
        are. `from_node`: this node runs again, too, also of a workflow that completed; raises UnknownName. `dry_run`: only says.

        handle.retry(dry_run=True).completed
        """
        answer = yield from workflow_retrying.retry(
            self.id,
            channel=self.door.channel,
            completed=completed,
            from_node=from_node,
            dry_run=dry_run,
            largest=self._control.payload_limit,
        )
        if not dry_run:
            self._seen = None
        return answer

    def _explain(self) -> Plan[WorkflowExplanation]:
        """Why it has not ended, or how it ended: what is paused or stuck, and what its open nodes wait for; raises WorkflowNotFound.

        handle.explain().reasons[0].text
        """
        return self._control.explain_workflow(self.id)

    status = blocking(_status)
    astatus = awaiting(_status)
    info = blocking(_info)
    ainfo = awaiting(_info)
    nodes = blocking(_nodes)
    anodes = awaiting(_nodes)
    pause = blocking(_pause)
    apause = awaiting(_pause)
    resume = blocking(_resume)
    aresume = awaiting(_resume)
    cancel = blocking(_cancel)
    acancel = awaiting(_cancel)
    retry = blocking(_retry)
    aretry = awaiting(_retry)
    explain = blocking(_explain)
    aexplain = awaiting(_explain)

    @overload
    def result_of(self, node: NodeOf[T], /) -> T: ...
    @overload
    def result_of(self, node: str, /) -> Any: ...
    def result_of(self, node: NodeOf[Any] | str, /) -> Any:
        """What this node returned: of a map a list; by its name plain JSON. Raises TaskFailed if it did not complete, NodeNotEnded, UnknownName.

        handle.result_of("pack")
        """
        text = self.door.run(
            self._result_text(_name(node)), name="WorkflowHandle.result_of", twin="WorkflowHandle.aresult_of"
        )
        return msgspec.json.decode(text) if isinstance(node, str) else node.read_result(text)

    @overload
    async def aresult_of(self, node: NodeOf[T], /) -> T: ...
    @overload
    async def aresult_of(self, node: str, /) -> Any: ...
    async def aresult_of(self, node: NodeOf[Any] | str, /) -> Any:
        """As `result_of`, to await."""
        text = await self.door.arun(self._result_text(_name(node)))
        return msgspec.json.decode(text) if isinstance(node, str) else node.read_result(text)

    def _result_text(self, name: str) -> Plan[str]:
        row = yield from workflow_control.node_task(self.id, name)
        if not NodeState(row.state).is_final:
            raise NodeNotEnded(self.id, name, state=row.state)
        found = yield from ask(values([(self.id, row.number)]))
        known = known_of([found])[self.id]
        if row.state == "COMPLETED":
            with suppress(ResultMissing):
                return fill((Hole(row.number),), known)
        error = known[row.number].error
        raise TaskFailed(
            TaskError(RESULT_NOT_AVAILABLE, f"node {name} ended {row.state}, and its result is not there")
            if error is None
            else error_from_json(error),
            task_id=row.task_id,
        )

    def _value(self, outcome: Completed[R_co] | Failed) -> R_co:
        match outcome:
            case Completed(value):
                return value
            case Failed(error):
                raise TaskFailed(error, task_id=self.id, kind="workflow") from error

    def _remember(self, stored: StoredOutcome) -> None:
        if stored.state is TaskState.COMPLETED and (stored.result is not None or stored.error is None):
            self._seen = Completed(self._decode("null" if stored.result is None else stored.result))
        elif stored.error is not None:
            self._seen = Failed(error_from_json(stored.error))
        else:
            self._seen = Failed(TaskError(f"WORKFLOW_{stored.state}", f"the workflow is {stored.state}"))


def _name(node: NodeOf[Any] | str) -> str:
    return node if isinstance(node, str) else node.name
