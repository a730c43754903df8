"""A workflow as it is drawn: its nodes, with those that are alike folded into one, and what is written on each.

What lives here: what is drawn, and the words on it. What may not: where it is drawn (`drawing_layers`), and with what (`drawing_text`,
`drawing_mermaid`, `drawing_svg`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from msgspec import Struct, structs

from everbeat.domain.workflow_info import NodeInfo, NodeState

MOST_DRAWN: Final = 300
"""More than so many boxes nobody reads: those that are alike are folded, and of what is still too much the end is left out."""
MOST_NAMED: Final = 3
_ORDER: Final = (
    NodeState.COMPLETED,
    NodeState.FAILED,
    NodeState.EXPIRED,
    NodeState.CANCELLED,
    NodeState.SKIPPED,
    NodeState.RUNNING,
    NodeState.ENQUEUED,
    NodeState.READY,
    NodeState.PENDING,
)
_TELLING: Final = (
    NodeState.RUNNING,
    NodeState.ENQUEUED,
    NodeState.READY,
    NodeState.PENDING,
    NodeState.FAILED,
    NodeState.EXPIRED,
    NodeState.CANCELLED,
    NodeState.SKIPPED,
    NodeState.COMPLETED,
)


class Drawn(Struct, frozen=True, kw_only=True):
    """One box: a node, or several folded into one. `needs`: the keys of the boxes it waits for; `blockers`: in words, those that keep it.

    `counts`: of those that are folded into it, how many are in which state; empty for a plain node.
    """

    key: str
    label: str
    kind: str
    task: str | None
    task_id: UUID | None
    state: NodeState
    counts: Mapping[NodeState, int]
    attempt: int | None
    seconds: float | None
    needs: tuple[str, ...]
    blockers: tuple[str, ...]
    conditions: tuple[str, ...] = ()
    suspended: str | None = None

    @property
    def status(self) -> str:
        """Its state in words: `RUNNING 12 s, attempt 2`; of a fold `9,812 COMPLETED, 188 RUNNING`."""
        if self.counts:
            return tally(self.counts)
        return status_of(self.state, self.seconds, self.attempt)

    @property
    def waiting(self) -> str:
        """What an open node waits for, in words; "" where it waits for nothing."""
        if self.blockers:
            return f"waits for {named(self.blockers)}"
        if self.counts:
            return ""
        if self.suspended is not None:
            return self.suspended
        if self.state is NodeState.READY:
            return "waits to be enqueued"
        return "waits for a worker" if self.state is NodeState.ENQUEUED and self.kind == "task" else ""

    @property
    def rule(self) -> str | None:
        """What decides whether it runs, where it is more than the completion of all it needs."""
        return named(self.conditions) if self.conditions else None

    @property
    def child(self) -> str | None:
        """Of a workflow in a workflow: the id of the child, once it has one."""
        return f"workflow {self.task_id}" if self.kind == "workflow" and self.task_id is not None else None


class Picture(Struct, frozen=True, kw_only=True):
    """All that is drawn of a workflow, in the order of its nodes, and how many boxes were left out."""

    boxes: tuple[Drawn, ...]
    left_out: int = 0


def folded(nodes: Sequence[NodeInfo], *, at: datetime, limit: int) -> list[Drawn]:
    """All boxes: members of a map as one box with it; above `limit` boxes, nodes of the same task between the same nodes as one, too."""
    homes = _homes_of_members(nodes)
    boxes = _boxes(nodes, homes, at=at)
    if len(boxes) > limit:
        homes |= _homes_of_twins(nodes, homes)
        boxes = _boxes(nodes, homes, at=at)
    return boxes


def picture(nodes: Sequence[NodeInfo], *, at: datetime, limit: int = MOST_DRAWN) -> Picture:
    """What to draw: the boxes, without those that are still too many."""
    boxes = folded(nodes, at=at, limit=limit)
    if len(boxes) <= limit:
        return Picture(boxes=tuple(boxes))
    known = {each.key for each in boxes[:limit]}
    kept = tuple(
        structs.replace(each, needs=tuple(name for name in each.needs if name in known))
        for each in boxes[:limit]
    )
    return Picture(boxes=kept, left_out=len(boxes) - limit)


def elapsed_s(node: NodeInfo, *, at: datetime) -> float | None:
    """Seconds it took, or has run until now; None where nothing runs, or ran."""
    if node.state.is_final:
        return node.duration_s
    begun = node.started_at if node.kind == "task" else node.enqueued_at
    if begun is None or node.state not in (NodeState.RUNNING, NodeState.ENQUEUED):
        return None
    if node.kind == "task" and node.state is not NodeState.RUNNING:
        return None
    return max(0.0, (at - begun).total_seconds())


def status_of(state: NodeState, seconds: float | None, attempt: int | None) -> str:
    """A state with how long it has lasted or took, and the attempt where it is not the first."""
    took = "" if seconds is None else f" {spoken(seconds)}"
    again = f", attempt {attempt}" if attempt is not None and attempt > 1 else ""
    return f"{state}{took}{again}"


def spoken(seconds: float) -> str:
    """A length of time, short: 850 ms, 1.2 s, 12 s, 5 min, 3.4 h, 2.1 d."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, size in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            amount = seconds / size
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def tally(counts: Mapping[NodeState, int]) -> str:
    """How many are in which state: those that have ended first."""
    return ", ".join(f"{counts[state]:,} {state}" for state in _ORDER if counts.get(state))


def blockers(node: NodeInfo, by_name: Mapping[str, NodeInfo], *, at: datetime) -> tuple[str, ...]:
    """What an open node waits for, in words: `charge (RUNNING 12 s, attempt 2)`; members of a map as one."""
    if node.state is not NodeState.PENDING:
        return ()
    waits = [by_name[name] for name in node.needs if name in by_name and not by_name[name].state.is_final]
    found: dict[str, str] = {}
    for each in waits:
        home = each if each.member_of is None else by_name.get(each.member_of, each)
        found[home.name] = f"{home.name} ({status_of(home.state, elapsed_s(home, at=at), home.attempt)})"
    return tuple(found.values())


def named(found: Sequence[str], *, most: int = MOST_NAMED) -> str:
    """The first ones, and how many more there are."""
    more = "" if len(found) <= most else f" and {len(found) - most:,} more"
    return f"{', '.join(found[:most])}{more}"


def printable(text: str) -> str:
    """The text without characters that would move the cursor or end the line."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _boxes(nodes: Sequence[NodeInfo], homes: Mapping[str, str], *, at: datetime) -> list[Drawn]:
    by_name = {node.name: node for node in nodes}
    folded: dict[str, list[NodeInfo]] = {}
    for node in nodes:
        folded.setdefault(homes.get(node.name, node.name), []).append(node)
    return [_box(by_name[key], group, homes, by_name, at=at) for key, group in folded.items()]


def _box(
    node: NodeInfo,
    group: Sequence[NodeInfo],
    homes: Mapping[str, str],
    by_name: Mapping[str, NodeInfo],
    *,
    at: datetime,
) -> Drawn:
    inner = [each for each in group if each is not node] if node.kind == "map" else list(group)
    is_fold = node.kind == "map" or len(inner) > 1
    counts = Counter(each.state for each in inner) if is_fold else Counter()
    needs = dict.fromkeys(homes.get(name, name) for each in group for name in each.needs)
    needs.pop(node.name, None)
    waits = dict.fromkeys(text for each in group for text in blockers(each, by_name, at=at))
    return Drawn(
        key=node.name,
        label=_label(node, inner) if is_fold else node.name,
        kind=node.kind,
        task=node.task or next((each.task for each in inner), None),
        task_id=node.task_id,
        state=_state(node, inner) if is_fold else node.state,
        counts=counts,
        attempt=node.attempt,
        seconds=elapsed_s(node, at=at),
        needs=tuple(name for name in needs if name in by_name),
        blockers=tuple(text for text in waits if not text.startswith(f"{node.name} (")),
        conditions=tuple(dict.fromkeys(text for each in group for text in each.conditions)),
        suspended=_suspended(node),
    )


def _suspended(node: NodeInfo) -> str | None:
    """What a suspended task waits for, in words."""
    if node.state is not NodeState.ENQUEUED or node.wake_at is None:
        return None
    return "sleeps" if node.waits_for is None else f"waits for event {node.waits_for!r}"


def _label(node: NodeInfo, inner: Sequence[NodeInfo]) -> str:
    if node.kind != "map":
        return f"{node.name} … {inner[-1].name}"
    if not inner:
        return f"{node.name}[]"
    return f"{node.name}[0]" if len(inner) == 1 else f"{node.name}[0..{len(inner) - 1}]"


def _state(node: NodeInfo, inner: Sequence[NodeInfo]) -> NodeState:
    if node.kind == "map" and (node.state.is_final or not inner):
        return node.state
    there = {each.state for each in inner}
    found = next(state for state in _TELLING if state in there)
    # A map of which all members have ended is about to end, too.
    return node.state if node.kind == "map" and found.is_final else found


def _homes_of_members(nodes: Sequence[NodeInfo]) -> dict[str, str]:
    return {node.name: node.member_of for node in nodes if node.member_of is not None}


def _homes_of_twins(nodes: Sequence[NodeInfo], homes: Mapping[str, str]) -> dict[str, str]:
    """Plain nodes of one task that wait for the same nodes, and are waited for by the same ones, by the first of them."""
    needed_by: dict[str, set[str]] = {}
    for node in nodes:
        for name in node.needs:
            needed_by.setdefault(homes.get(name, name), set()).add(homes.get(node.name, node.name))
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for node in nodes:
        if node.kind != "task" or node.name in homes:
            continue
        needs = frozenset(homes.get(name, name) for name in node.needs)
        alike = (node.task, needs, frozenset(needed_by.get(node.name, ())))
        home = first.setdefault(alike, node.name)
        if home != node.name:
            found[node.name] = home
    return found
