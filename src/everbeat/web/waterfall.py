"""The waterfall of a workflow: a lane for each node, with its wait and its run, and what an open node waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from everbeat.domain.task.gathering import awaited
from everbeat.domain.task.questions import is_answer
from everbeat.domain.workflow.states import NodeInfo, NodeState
from everbeat.errors.wording import brief_duration, some

_TONES: Final = {
    "COMPLETED": "live",
    "RUNNING": "run",
    "FAILED": "dead",
    "EXPIRED": "late",
    "waits": "sleep",
    "suspended": "sleep",
}
_MOST_NAMED: Final = 3


class NodeLane(Struct, frozen=True, kw_only=True):
    """A node on the common axis. Places are percentages. `wait_left` is where its task became due, and `left` where its code began.

    `mark` is the name of the mark of its state, and `told` says how long it took, or what it waits for.
    """

    name: str
    task_id: str | None
    kind: str
    mark: str
    tone: str
    told: str
    wait_left: float | None = None
    wait_width: float = 0
    left: float | None = None
    width: float = 0


class WaterfallTick(Struct, frozen=True):
    """A moment on the axis."""

    left: float
    at: datetime


class Waterfall(Struct, frozen=True):
    """The lanes in the order of their beginning, those that have not begun last, and the marks of the axis."""

    lanes: Sequence[NodeLane]
    ticks: Sequence[WaterfallTick]


class _Span(Struct, frozen=True):
    since: datetime
    until: datetime

    def place(self, moment: datetime) -> float:
        whole = max((self.until - self.since).total_seconds(), 0.001)
        return round(min(max((moment - self.since).total_seconds() / whole, 0.0), 1.0) * 92 + 4, 2)

    def ticks(self) -> list[WaterfallTick]:
        parts = [self.since + (self.until - self.since) * part / 2 for part in range(3)]
        return [WaterfallTick(self.place(each), each) for each in parts]


def waterfall_of(
    nodes: Sequence[NodeInfo], *, since: datetime, now: datetime, ended_at: datetime | None
) -> Waterfall:
    """Return the nodes on one time axis. Members of maps are left out: their map stands for them."""
    span = _Span(since, max(ended_at or now, since))
    states = {node.name: node.state for node in nodes}
    own = [node for node in nodes if node.member_of is None]
    ordered = sorted(own, key=lambda node: (_begun(node) is None, _begun(node) or since, node.name))
    return Waterfall([_lane(node, span, states) for node in ordered], span.ticks())


def _begun(node: NodeInfo) -> datetime | None:
    return node.started_at or node.enqueued_at


def _lane(node: NodeInfo, span: _Span, states: Mapping[str, NodeState]) -> NodeLane:
    due, began, over = node.enqueued_at, node.started_at, node.ended_at or span.until
    if began is None and node.kind != "task":
        began = due  # a map, or a child workflow
    mark = _mark_of(node)
    left = None if began is None else span.place(began)
    wait_left = None if due is None else span.place(due)
    waited_until = span.place(over) if left is None else left
    return NodeLane(
        name=node.name, task_id=None if node.task_id is None else str(node.task_id), kind=node.kind, mark=mark,
        tone=_TONES.get(mark, "wait"), told=_told(node, span, states), wait_left=wait_left,
        wait_width=0 if wait_left is None else round(max(waited_until - wait_left, 0), 2), left=left,
        width=0 if left is None else round(max(span.place(over) - left, 0.5), 2),
    )  # fmt: skip


def _mark_of(node: NodeInfo) -> str:
    if node.state in (NodeState.ENQUEUED, NodeState.RUNNING):
        if node.waits_for is not None:
            return "waits"
        if node.wake_at is not None:
            return "suspended"
        return "ENQUEUED" if node.started_at is None and node.kind == "task" else "RUNNING"
    return "pending" if node.state is NodeState.PENDING else node.state.value


def _told(node: NodeInfo, span: _Span, states: Mapping[str, NodeState]) -> str:
    if node.state is NodeState.PENDING and (open_ := _open_needs(node, states)):
        return f"for {some(open_, limit=_MOST_NAMED)}"
    if node.ended_at is None and node.waits_for is not None:
        return "for an answer" if is_answer(node.waits_for) else f"for {awaited(node.waits_for)}"
    begun = _begun(node)
    if begun is None:
        return ""
    return brief_duration(max(((node.ended_at or span.until) - begun) / timedelta(seconds=1), 0))


def _open_needs(node: NodeInfo, states: Mapping[str, NodeState]) -> list[str]:
    return [name for name in node.needs if not states.get(name, NodeState.PENDING).is_final]


def answers_of(nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return the nodes that wait for an answer of a person."""
    return [node for node in nodes if node.ended_at is None and is_answer(node.waits_for)]
