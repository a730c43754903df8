"""Workflow handles, which wait for, inspect, pause, cancel and retry workflows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar, overload
from uuid import UUID

import msgspec

from everbeat.client.handle import OutcomeHandle, TaskOperations
from everbeat.client.waiter import Deadline
from everbeat.client.workflow import operations
from everbeat.client.workflow.operations import CompletedNodes as Completing
from everbeat.domain.explain.reasons import WorkflowExplanation
from everbeat.domain.settings.checks import public, sought, switch
from everbeat.domain.task.outcome import Completed, Failed, error_from_json
from everbeat.domain.task.states import TaskState
from everbeat.domain.workflow.graph import Hole, ResultMissing, fill
from everbeat.domain.workflow.states import NodeInfo, NodeState, WorkflowInfo, WorkflowRetry, WorkflowState
from everbeat.errors import (
    RESULT_NOT_AVAILABLE,
    NodeNotEnded,
    TaskError,
    TaskFailed,
    TaskNotFound,
    WaitTimeout,
    WorkflowNotFound,
)
from everbeat.store.advance import known_of
from everbeat.store.plan import Plan, ask
from everbeat.store.tasks import StoredOutcome
from everbeat.store.workflows import values

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)


class NodeOf(Protocol[T_co]):
    """A workflow node with a name and a method that decodes its result."""

    @property
    def name(self) -> str: ...

    def read_result(self, text: str) -> T_co: ...


@public
class WorkflowHandle(OutcomeHandle[R_co]):
    """A reference to one workflow, identified by `id`. Every blocking method has an async counterpart whose name begins with `a`."""

    _kind = "workflow"

    def __init__(
        self,
        workflow_id: UUID,
        *,
        operations: TaskOperations,
        decode: Callable[[str], Any] = msgspec.json.decode,
    ) -> None:
        super().__init__(workflow_id, operations=operations, decode=decode)

    def __repr__(self) -> str:
        return f"<WorkflowHandle {self.id}>"

    def status(self) -> WorkflowState:
        """Return the current state of the workflow. Raises WorkflowNotFound if the workflow does not exist."""
        return self._run("status", operations.status(self.id))

    async def astatus(self) -> WorkflowState:
        """Async version of `status` that does not block the running event loop."""
        return await self._arun(operations.status(self.id))

    def info(self) -> WorkflowInfo:
        """Return the current details of the workflow. Raises WorkflowNotFound if the workflow does not exist."""
        return self._run("info", operations.info(self.id))

    async def ainfo(self) -> WorkflowInfo:
        """Async version of `info` that does not block the running event loop."""
        return await self._arun(operations.info(self.id))

    def nodes(self) -> list[NodeInfo]:
        """Return the current details of all nodes, in the order they were added.

        Raises WorkflowNotFound if the workflow does not exist.
        """
        return self._run("nodes", operations.nodes(self.id))

    async def anodes(self) -> list[NodeInfo]:
        """Async version of `nodes` that does not block the running event loop."""
        return await self._arun(operations.nodes(self.id))

    def pause(self) -> WorkflowState:
        """Prevent further nodes of this workflow and its child workflows from starting, and return the new state.

        Running nodes continue. Raises WorkflowNotFound if the workflow does not exist.
        """
        return self._run("pause", operations.pause(self.id, channel=self._database.channel))

    async def apause(self) -> WorkflowState:
        """Async version of `pause` that does not block the running event loop."""
        return await self._arun(operations.pause(self.id, channel=self._database.channel))

    def resume(self) -> WorkflowState:
        """Resume a paused workflow and return the new state. Raises WorkflowNotFound if the workflow does not exist."""
        return self._run("resume", operations.resume(self.id, channel=self._database.channel))

    async def aresume(self) -> WorkflowState:
        """Async version of `resume` that does not block the running event loop."""
        return await self._arun(operations.resume(self.id, channel=self._database.channel))

    def cancel(self) -> WorkflowState:
        """Cancel the workflow and its child workflows, and return the new state.

        Nodes that have not started are skipped, and running nodes are asked to stop. Raises WorkflowNotFound if the workflow does not
        exist.
        """
        return self._run("cancel", operations.cancel(self.id, channel=self._database.channel))

    async def acancel(self) -> WorkflowState:
        """Async version of `cancel` that does not block the running event loop."""
        return await self._arun(operations.cancel(self.id, channel=self._database.channel))

    def retry(
        self, *, completed: Completing = "rerun", from_node: str | None = None, dry_run: bool = False
    ) -> WorkflowRetry:
        """Rerun the failed nodes and the nodes downstream of them. Their retry and recovery budgets are reset.

        `completed`: "rerun" also reruns completed nodes downstream of a rerun node; "keep" leaves completed nodes as they are.
        `from_node`: also rerun this node, even in a completed workflow. `dry_run`: return the plan without changing anything.
        Raises WorkflowNotRetryable if the workflow cannot be retried, WorkflowNotFound if it does not exist, and UnknownName if it does
        not have the node `from_node`.

        handle.retry(dry_run=True).completed
        """
        return self._run("retry", self._retried(completed, from_node, dry_run))

    async def aretry(
        self, *, completed: Completing = "rerun", from_node: str | None = None, dry_run: bool = False
    ) -> WorkflowRetry:
        """Async version of `retry` that does not block the running event loop."""
        return await self._arun(self._retried(completed, from_node, dry_run))

    def _retried(self, completed: Completing, from_node: str | None, dry_run: bool) -> Plan[WorkflowRetry]:
        switch(dry_run, subject="retry.dry_run")
        return self._retrying(completed, from_node, dry_run)

    def _retrying(self, completed: Completing, from_node: str | None, dry_run: bool) -> Plan[WorkflowRetry]:
        answer = yield from operations.retry(
            self.id,
            channel=self._database.channel,
            completed=completed,
            from_node=from_node,
            dry_run=dry_run,
            largest=self._operations.payload_limit,
        )
        if not dry_run:
            self._seen = None
        return answer

    def explain(self) -> WorkflowExplanation:
        """Return why the workflow has not finished, or how it finished. Raises WorkflowNotFound if the workflow does not exist.

        The reasons include pauses, stuck steps, and nodes that have not finished.

        handle.explain().reasons[0].text
        """
        return self._run("explain", self._operations.explain_workflow(self.id))

    async def aexplain(self) -> WorkflowExplanation:
        """Async version of `explain` that does not block the running event loop."""
        return await self._arun(self._operations.explain_workflow(self.id))

    @overload
    def result_of(self, node: NodeOf[T], /) -> T: ...
    @overload
    def result_of(self, node: str, /) -> Any: ...
    def result_of(self, node: NodeOf[Any] | str, /) -> Any:
        """Return the result of a node. The result of a map is a list. If `node` is a name, the result is decoded as plain JSON.

        Raises TaskFailed if the node did not complete, NodeNotEnded if it has not finished, and UnknownName if it does not exist.

        handle.result_of("pack")
        """
        text = self._run("result_of", self._result_text(_name(node)))
        return msgspec.json.decode(text) if isinstance(node, str) else node.read_result(text)

    @overload
    async def aresult_of(self, node: NodeOf[T], /) -> T: ...
    @overload
    async def aresult_of(self, node: str, /) -> Any: ...
    async def aresult_of(self, node: NodeOf[Any] | str, /) -> Any:
        """Async version of `result_of` that does not block the running event loop."""
        text = await self._arun(self._result_text(_name(node)))
        return msgspec.json.decode(text) if isinstance(node, str) else node.read_result(text)

    def _result_text(self, name: str) -> Plan[str]:
        row = yield from operations.node_task(self.id, name)
        if not NodeState(row.state).is_final:
            raise NodeNotEnded(self.id, name, state=row.state)
        found = yield from ask(values([(self.id, row.number)]))
        known = known_of([found])[self.id]
        if row.state == "COMPLETED":
            with suppress(ResultMissing):
                return fill((Hole(row.number),), known)
        error = known[row.number].error
        raise TaskFailed(
            TaskError(RESULT_NOT_AVAILABLE, f"node {name} ended {row.state}, and its result is not available")
            if error is None
            else error_from_json(error),
            task_id=row.task_id,
        )

    def _end(self, until: Deadline) -> Plan[Completed[R_co] | Failed]:
        try:
            return (yield from super()._end(until))
        except TaskNotFound:
            raise WorkflowNotFound(self.id) from None
        except WaitTimeout as late:
            raise WaitTimeout(self.id, late.waited_s, what="Workflow") from None

    def _is_completed(self, stored: StoredOutcome) -> bool:
        return stored.state is TaskState.COMPLETED and (stored.result is not None or stored.error is None)

    def _error_of(self, stored: StoredOutcome) -> TaskError:
        if stored.error is not None:
            return error_from_json(stored.error)
        return TaskError(f"WORKFLOW_{stored.state}", f"the workflow is {stored.state}")


def _name(node: NodeOf[Any] | str) -> str:
    return sought(node if isinstance(node, str) else getattr(node, "name", node), subject="node")
