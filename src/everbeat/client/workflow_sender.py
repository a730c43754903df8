"""From a graph to a workflow under way: the one statement that stores it, alone or in the user's transaction.

What lives here: `WorkflowSender`. What may not: building and checking a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from everbeat.client.control import Control
from everbeat.client.sender import CallSender
from everbeat.client.task import Task
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.client.workflow_signature import StartOptions
from everbeat.domain.graph import Graph, TaskSpec
from everbeat.errors import SendError
from everbeat.store.plan import Plan, ask
from everbeat.store.statement import Statement
from everbeat.store.workflows import StartedWorkflow, insert

_MOST_TRIES: Final = 20


class WorkflowSender:
    """What the app does for workflows: says how their nodes are sent, and stores them."""

    def __init__(self, control: Control, *, sender: CallSender) -> None:
        self._control = control
        self._sender = sender

    def spec(self, task: Task[..., Any], /) -> TaskSpec:
        """How a node sends this task; raises ConfigurationError."""
        return self._sender.spec(task)

    def start(
        self, graph: Graph, options: StartOptions, *, decode: Callable[[str], Any]
    ) -> WorkflowHandle[Any]:
        """Starts a workflow, or finds the live one of this name and key; `decode` reads its result. Raises BlockingCallInLoop, a DatabaseError."""
        plan = self._stored(graph, options.key)
        started = self._sender.run(
            plan, options.connection, name="start", twin="astart", patience_s=options.patience_s
        )
        return WorkflowHandle(started, control=self._control, decode=decode)

    async def astart(
        self, graph: Graph, options: StartOptions, *, decode: Callable[[str], Any]
    ) -> WorkflowHandle[Any]:
        """The twin of `start`."""
        plan = self._stored(graph, options.key)
        started = await self._sender.arun(
            plan, options.connection, twin="start", patience_s=options.patience_s
        )
        return WorkflowHandle(started, control=self._control, decode=decode)

    def _insert(self, workflow_id: UUID, graph: Graph, key: str | None) -> Statement[StartedWorkflow | None]:
        channel, largest = self._control.door.channel, self._sender.payload_limit
        return insert(workflow_id, graph, channel=channel, key=key, largest=largest)

    def _stored(self, graph: Graph, key: str | None) -> Plan[UUID]:
        workflow_id = self._sender.ids.next()
        for _ in range(_MOST_TRIES):
            started = yield from ask(self._insert(workflow_id, graph, key))
            if started is not None:
                return started.id
        raise SendError(
            f"The key {key!r} of workflow {graph.name!r} was taken and freed again at each of {_MOST_TRIES} tries to start.",
            task_id=workflow_id,
            fix="start again; nothing was stored for it.",
        )
