"""From a graph to a workflow under way: the one statement that stores it, alone or in the user's transaction.

What lives here: `WorkflowSender`. What may not: building and checking a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from everbeat.client.control import Control
from everbeat.client.sender import TaskIds
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.domain.graph import Graph
from everbeat.errors import SendError
from everbeat.store.joined import arun_joined, run_joined
from everbeat.store.plan import Plan, aperform, ask, perform
from everbeat.store.workflows import insert

_MOST_TRIES: Final = 20


class WorkflowSender:
    """Stores graphs as workflows."""

    def __init__(self, control: Control, *, ids: TaskIds) -> None:
        self._control = control
        self._ids = ids

    def start(
        self, graph: Graph, *, key: str | None, connection: object, decode: Callable[[str], Any]
    ) -> WorkflowHandle[Any]:
        """Starts a workflow, or finds the live one of this name and key; `decode` reads its result. Raises BlockingCallInLoop, a DatabaseError."""
        plan = self._stored(graph, key)
        if connection is None:
            started = self._control.door.run(plan, name="start", twin="astart")
        else:
            schema = self._control.door.address.schema
            started = perform(plan, lambda step: run_joined(connection, step, schema=schema, twin="astart"))
        return WorkflowHandle(started, control=self._control, decode=decode)

    async def astart(
        self, graph: Graph, *, key: str | None, connection: object, decode: Callable[[str], Any]
    ) -> WorkflowHandle[Any]:
        """The twin of `start`."""
        plan = self._stored(graph, key)
        if connection is None:
            started = await self._control.door.arun(plan)
        else:
            schema = self._control.door.address.schema
            started = await aperform(
                plan, lambda step: arun_joined(connection, step, schema=schema, twin="start")
            )
        return WorkflowHandle(started, control=self._control, decode=decode)

    def _stored(self, graph: Graph, key: str | None) -> Plan[UUID]:
        workflow_id = self._ids.next()
        for _ in range(_MOST_TRIES):
            started = yield from ask(insert(workflow_id, graph, channel=self._control.door.channel, key=key))
            if started is not None:
                return started.id
        raise SendError(
            f"The key {key!r} of workflow {graph.name!r} was taken and freed again at each of {_MOST_TRIES} tries to start.",
            task_id=workflow_id,
            fix="start again; nothing was stored for it.",
        )
