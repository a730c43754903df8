"""The retry of a workflow: decided and written in one transaction, or, as a dry run, only decided."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias
from uuid import UUID, uuid4

from msgspec import Struct

from everbeat.client.workflow_control import advanced, status
from everbeat.domain.checks import one_of
from everbeat.domain.reopening import EndedNode, Reopening, reopened
from everbeat.domain.workflow_info import WorkflowRetry, WorkflowState
from everbeat.errors import UnknownName, WorkflowNotFound, WorkflowNotRetryable
from everbeat.store import workflow_control as store
from everbeat.store.plan import Plan, ask, together

Completed: TypeAlias = Literal["rerun", "keep"]
_MOST_NAMES: Final = 1_000


class _Decided(Struct, frozen=True):
    """What is done to a workflow and to those within it, and the names of nodes to tell of."""

    plans: dict[UUID, Reopening]
    again: tuple[str, ...]
    completed: tuple[str, ...]
    kept: tuple[str, ...]


def retry(
    workflow_id: UUID,
    *,
    channel: str,
    completed: Completed,
    from_node: str | None,
    dry_run: bool,
    largest: int,
) -> Plan[WorkflowRetry]:
    """Begin again what ended badly, and what is downstream of it. `largest`: what a node can be given, if it is more.

    Raises WorkflowNotFound, WorkflowNotRetryable, UnknownName.
    """
    one_of("rerun", "keep")(completed, subject="retry.completed")
    call, decisions = uuid4(), list[_Decided]()

    def make() -> Plan[None]:
        found = yield from ask(store.retry_hold(workflow_id, call=call, from_node=from_node))
        if found is None:
            raise WorkflowNotFound(workflow_id)
        if found.is_done:
            return  # the answer to the first try was lost
        if not found.can:
            raise WorkflowNotRetryable(
                workflow_id, state=found.state, is_child=found.is_child, other=found.other
            )
        decided = yield from _decided(workflow_id, keep=completed == "keep", from_node=from_node)
        decisions.append(decided)
        if not dry_run:
            yield from ask(
                store.retry(workflow_id, decided.plans, call=call, channel=channel, largest=largest)
            )

    yield from together(make)
    if not dry_run:
        yield from advanced(workflow_id, channel)
    decided = decisions[-1]
    state: WorkflowState = yield from status(workflow_id)
    return WorkflowRetry(
        state=state, again=decided.again, completed=decided.completed, kept=decided.kept, dry_run=dry_run
    )


def _decided(root: UUID, *, keep: bool, from_node: str | None) -> Plan[_Decided]:
    plans: dict[UUID, Reopening] = {}
    names: tuple[list[str], list[str], list[str]] = ([], [], [])
    waiting = [(root, "")]
    while waiting:
        one, prefix = waiting.pop()
        nodes = yield from ask(store.retry_nodes(one))
        edges = yield from ask(store.edges(one))
        first = [] if prefix or from_node is None else [_numbered(nodes, from_node)]
        plan = plans[one] = reopened(
            nodes, ((edge.parent, edge.child) for edge in edges), keep=keep, first=first
        )
        named = {node.number: node.name for node in nodes}
        for found, numbers in zip(names, (plan.again, plan.completed, plan.kept), strict=True):
            found += [prefix + named[number] for number in numbers]
        waiting += [
            (child, f"{prefix}{named[number]}/")
            for number, child in plan.children.items()
            if child not in plans
        ]
    again, completed, kept = map(tuple, names)
    return _Decided(plans, again, completed, kept)


def _numbered(nodes: list[EndedNode], name: str) -> int:
    """The number of the node of this name; raises UnknownName."""
    for node in nodes:
        if node.name == name:
            return node.number
    raise UnknownName("node", [name], known=[node.name for node in nodes[:_MOST_NAMES]])
