"""Nodes to draw, as a database would tell of them at one moment."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from everbeat.domain.workflow_info import NodeInfo, NodeState

AT = datetime(2030, 1, 1, tzinfo=UTC)
CHILD = UUID(int=7)


def node(name: str, *needs: str, state: str = "PENDING", ago_s: float = 12, **more: Any) -> NodeInfo:
    """A node; it began `ago_s` seconds ago, and if it has ended, half a second before now."""
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
    """A map and its members, so many in each state."""
    each = [one for one, count in states.items() for _ in range(count)]
    members = [node(f"{name}[{place}]", *needs, state=one, member_of=name) for place, one in enumerate(each)]
    return [node(name, *needs, state=state, kind="map", attempt=None, started_at=None), *members]
