"""Nodes to draw, as a database would report them at one moment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from everbeat.domain.workflow.states import NodeInfo, NodeState

AT = datetime(2030, 1, 1, tzinfo=UTC)
CHILD = UUID(int=7)


def node(name: str, *needs: str, state: str = "PENDING", ago_s: float = 12, **more: Any) -> NodeInfo:
    """Return a node that started `ago_s` seconds ago; if it has ended, it ended half a second ago."""
    now = NodeState(state)
    begun = AT - timedelta(seconds=ago_s)
    values: dict[str, Any] = {
        "name": name, "kind": "task", "state": now, "task": "work", "task_id": None, "needs": needs, "member_of": None,
        "quorum": None, "attempt": 1, "error": None,
        "enqueued_at": None if now in (NodeState.PENDING, NodeState.READY) else begun,
        "started_at": begun if now is NodeState.RUNNING or now.is_final else None,
        "ended_at": AT - timedelta(seconds=0.5) if now.is_final else None,
    }  # fmt: skip
    return NodeInfo(**(values | more))


def mapped(name: str, *needs: str, states: dict[str, int], state: str = "ENQUEUED") -> list[NodeInfo]:
    """Return a map node and its members, with the given number of members in each state."""
    each = [one for one, count in states.items() for _ in range(count)]
    members = [node(f"{name}[{place}]", *needs, state=one, member_of=name) for place, one in enumerate(each)]
    return [node(name, *needs, state=state, kind="map", attempt=None, started_at=None), *members]
