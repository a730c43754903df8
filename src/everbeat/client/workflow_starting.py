"""The start of a workflow that was built.

What lives here: `Startable`, the types and options of a start. What may not: the graph (`workflow`), storing it (`workflow_sender`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, overload

from everbeat.client.workflow_adding import WorkflowBackend
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.client.workflow_node import Node, Nodes
from everbeat.client.workflow_signature import OWN_TRANSACTION, start_options
from everbeat.domain.duration import Duration
from everbeat.domain.graph import Graph

R = TypeVar("R")


class Startable(ABC):
    """What can be started once it is built."""

    _backend: WorkflowBackend

    @abstractmethod
    def made(self, output: object) -> tuple[Graph, Callable[[str], Any]]:
        """The graph, and how the value of its output is read; raises ConfigurationError."""

    @overload
    def start(
        self,
        *,
        output: Nodes[R],
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowHandle[list[R]]: ...
    @overload
    def start(
        self,
        *,
        output: Node[R],
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowHandle[R]: ...
    @overload
    def start(
        self,
        *,
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowHandle[None]: ...
    def start(
        self,
        *,
        output: Any = None,
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowHandle[Any]:
        """Stores the workflow in one statement, and workers begin it; the value of `output` is its result. May be repeated: each is a new one.

        `key`: of this name at most one workflow with this key lives; starting another finds that one. `connection`: it is part of that
        connection's transaction. `patience`: of this start, instead of the app's; without effect together with `connection`.
        Raises ConfigurationError with everything that is wrong, BlockingCallInLoop, a DatabaseError.

        handle = wf.start(output=packed, key=f"order-{order.id}")
        """
        options = start_options(key=key, connection=connection, patience=patience)
        graph, read = self.made(output)
        return self._backend.start(graph, options, decode=read)

    @overload
    async def astart(
        self,
        *,
        output: Nodes[R],
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowHandle[list[R]]: ...
    @overload
    async def astart(
        self,
        *,
        output: Node[R],
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowHandle[R]: ...
    @overload
    async def astart(
        self,
        *,
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowHandle[None]: ...
    async def astart(
        self,
        *,
        output: Any = None,
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowHandle[Any]:
        """As `start`, to await."""
        options = start_options(key=key, connection=connection, patience=patience)
        graph, read = self.made(output)
        return await self._backend.astart(graph, options, decode=read)
