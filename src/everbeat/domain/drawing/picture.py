"""Arrange a workflow for drawing: similar nodes share a box, and the boxes are placed in layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Final
from uuid import UUID

from msgspec import Struct, structs

from everbeat.domain.task.gathering import awaited
from everbeat.domain.task.questions import is_answer
from everbeat.domain.workflow.states import NodeInfo, NodeState
from everbeat.errors.wording import some

MOST_DRAWN: Final = 300
"""A drawing with more boxes would be unreadable, so similar boxes are folded, and the last boxes are left out."""
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
    """A box in the drawing, for a single node or for several folded nodes.

    `needs` lists the keys of the boxes on which this box depends, and `blockers` describes those that have not finished.
    `counts` is the number of folded nodes in each state, and is empty for a single node.
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
        """Return the state as text: `RUNNING 12 s, attempt 2`, or `9,812 COMPLETED, 188 RUNNING` for several nodes."""
        if self.counts:
            return tally(self.counts)
        return status_of(self.state, self.seconds, self.attempt)

    @property
    def waiting(self) -> str:
        """Return a phrase that says what an open node is waiting for, or "" if it is not waiting."""
        if self.blockers:
            return f"waits for {some(self.blockers, limit=MOST_NAMED)}"
        if self.counts:
            return ""
        if self.suspended is not None:
            return self.suspended
        if self.state is NodeState.READY:
            return "waits to be enqueued"
        return "waits for a worker" if self.state is NodeState.ENQUEUED and self.kind == "task" else ""

    @property
    def rule(self) -> str | None:
        """Return the conditions other than the completion of dependencies as text, or None if there are no such conditions."""
        return some(self.conditions, limit=MOST_NAMED) if self.conditions else None

    @property
    def child(self) -> str | None:
        """Return text that names the child workflow and its id, or None if the child workflow does not exist yet."""
        return f"workflow {self.task_id}" if self.kind == "workflow" and self.task_id is not None else None


class Picture(Struct, frozen=True, kw_only=True):
    """The boxes of a drawn workflow, in node order, and the number of boxes that were left out."""

    boxes: tuple[Drawn, ...]
    left_out: int = 0


def folded(nodes: Sequence[NodeInfo], *, at: datetime, limit: int) -> list[Drawn]:
    """Return all boxes. The members of a map share the map's box.

    If there are more than `limit` boxes, nodes with the same task, dependencies and dependents also share a box.
    """
    homes = _homes_of_members(nodes)
    boxes = _boxes(nodes, homes, at=at)
    if len(boxes) > limit:
        homes |= _homes_of_twins(nodes, homes)
        boxes = _boxes(nodes, homes, at=at)
    return boxes


def picture(nodes: Sequence[NodeInfo], *, at: datetime, limit: int = MOST_DRAWN) -> Picture:
    """Return up to `limit` boxes, and the number of boxes that were left out."""
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
    """Return how many seconds a node ran or has been running, or None if the node has not started."""
    if node.state.is_final:
        return node.duration_s
    begun = node.started_at if node.kind == "task" else node.enqueued_at
    if begun is None or node.state not in (NodeState.RUNNING, NodeState.ENQUEUED):
        return None
    if node.kind == "task" and node.state is not NodeState.RUNNING:
        return None
    return max(0.0, (at - begun).total_seconds())


def status_of(state: NodeState, seconds: float | None, attempt: int | None) -> str:
    """Return a state with its duration, and with the attempt number unless it is the first attempt."""
    took = "" if seconds is None else f" {spoken(seconds)}"
    again = f", attempt {attempt}" if attempt is not None and attempt > 1 else ""
    return f"{state}{took}{again}"


def spoken(seconds: float) -> str:
    """Format a duration in short form: 850 ms, 1.2 s, 12 s, 5 min, 3.4 h, 2.1 d."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, size in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            amount = seconds / size
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def tally(counts: Mapping[NodeState, int]) -> str:
    """Return the number of nodes in each state as text, final states first."""
    return ", ".join(f"{counts[state]:,} {state}" for state in _ORDER if counts.get(state))


def blockers(node: NodeInfo, by_name: Mapping[str, NodeInfo], *, at: datetime) -> tuple[str, ...]:
    """Describe each open dependency of a node, such as `charge (RUNNING 12 s, attempt 2)`. A map includes its members."""
    if node.state is not NodeState.PENDING:
        return ()
    waits = [by_name[name] for name in node.needs if name in by_name and not by_name[name].state.is_final]
    found: dict[str, str] = {}
    for each in waits:
        home = each if each.member_of is None else by_name.get(each.member_of, each)
        found[home.name] = f"{home.name} ({status_of(home.state, elapsed_s(home, at=at), home.attempt)})"
    return tuple(found.values())


def printable(text: str) -> str:
    """Return the text after replacing all characters that would move the cursor or break the line."""
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
    """Return a phrase that says why a node's task is suspended, or None if it is not suspended."""
    if node.state is not NodeState.ENQUEUED or node.wake_at is None:
        return None
    if is_answer(node.waits_for):
        return "waits for an answer"
    return "sleeps" if node.waits_for is None else f"waits for {awaited(node.waits_for)}"


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
    # A map whose members have all finished is about to finish.
    return node.state if node.kind == "map" and found.is_final else found


def _homes_of_members(nodes: Sequence[NodeInfo]) -> dict[str, str]:
    return {node.name: node.member_of for node in nodes if node.member_of is not None}


def _homes_of_twins(nodes: Sequence[NodeInfo], homes: Mapping[str, str]) -> dict[str, str]:
    """Map each plain node to the first node with the same task, dependencies and dependents."""
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


_SWEEPS: Final = 8
_MOST_PLACES: Final = 4_000
"""If the lines together pass through more layers than this, they are drawn straight from box to box."""


class BoxPlace(Struct, frozen=True):
    """A place in a layer: the box with this `key`, or a bend where a line passes through the layer."""

    key: str
    is_bend: bool = False


class Layers(Struct, frozen=True):
    """The layers with their ordered places, and the places on the line of each edge (parent, child), including its ends."""

    layers: tuple[tuple[BoxPlace, ...], ...]
    lines: Mapping[tuple[str, str], tuple[BoxPlace, ...]]


def depths(needs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the layer of each box, which is one below its deepest dependency. Boxes in a cycle, which no workflow has, get layer 0."""
    waits = {key: len(set(parents)) for key, parents in needs.items()}
    children: dict[str, list[str]] = {}
    for key, parents in needs.items():
        for parent in set(parents):
            children.setdefault(parent, []).append(key)
    found: dict[str, int] = {}
    ready = [key for key, count in waits.items() if count == 0]
    for key in ready:  # the list grows during the loop
        found[key] = max((found[parent] + 1 for parent in needs[key]), default=0)
        for child in children.get(key, ()):
            waits[child] -= 1
            if waits[child] == 0:
                ready.append(child)
    return {key: found.get(key, 0) for key in needs}


def layered(needs: Mapping[str, Sequence[str]]) -> Layers:
    """Arrange boxes in layers so that few lines cross. `needs` maps each box to its dependencies."""
    depth = depths(needs)
    span = sum(depth[key] - depth[parent] - 1 for key, parents in needs.items() for parent in parents)
    bends = span <= _MOST_PLACES
    layers: list[list[BoxPlace]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    boxes = {key: BoxPlace(key) for key in needs}
    for key in needs:
        layers[depth[key]].append(boxes[key])
    lines: dict[tuple[str, str], tuple[BoxPlace, ...]] = {}
    for key, parents in needs.items():
        for parent in dict.fromkeys(parents):
            passed = range(depth[parent] + 1, depth[key]) if bends else ()
            run = [boxes[parent]]
            for layer in passed:
                bend = BoxPlace(f"{parent}\n{key}\n{layer}", is_bend=True)
                layers[layer].append(bend)
                run.append(bend)
            lines[parent, key] = (*run, boxes[key])
    return Layers(tuple(map(tuple, _ordered(layers, lines.values()))), lines)


def neighbours(
    lines: Iterable[tuple[BoxPlace, ...]],
) -> tuple[dict[BoxPlace, list[BoxPlace]], dict[BoxPlace, list[BoxPlace]]]:
    """Return the connected places above each place, and the connected places below each place."""
    above: dict[BoxPlace, list[BoxPlace]] = {}
    below: dict[BoxPlace, list[BoxPlace]] = {}
    for line in lines:
        for upper, lower in pairwise(line):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return above, below


def crossings(layers: Sequence[Sequence[BoxPlace]], below: Mapping[BoxPlace, Sequence[BoxPlace]]) -> int:
    """Return how many pairs of lines between adjacent layers cross."""
    total = 0
    for upper, lower in pairwise(layers):
        order = {place: number for number, place in enumerate(lower)}
        ends = [
            end
            for place in upper
            for end in sorted(order[each] for each in below.get(place, ()) if each in order)
        ]
        total += _inversions(ends, len(lower))
    return total


def spread(
    layers: Sequence[Sequence[BoxPlace]],
    lines: Sequence[tuple[BoxPlace, ...]],
    widths: Mapping[BoxPlace, float],
    *,
    gap: float,
) -> dict[BoxPlace, float]:
    """Return the horizontal center of each place, near its connected places and with a `gap` between neighbors. The left edge is at 0."""
    above, below = neighbours(lines)
    middles: dict[BoxPlace, float] = {}
    for layer in layers:
        edge = 0.0
        for place in layer:
            middles[place] = edge + widths[place] / 2
            edge += widths[place] + gap
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        joined = above if down else below
        for layer in layers if down else reversed(layers):
            ideal = [
                _mean([middles[each] for each in joined.get(place, ())], middles[place]) for place in layer
            ]
            placed = _apart(ideal, [widths[each] for each in layer], gap)
            middles |= dict(zip(layer, placed, strict=True))
    shift = min((middle - widths[place] / 2 for place, middle in middles.items()), default=0.0)
    return {place: middle - shift for place, middle in middles.items()}


def _ordered(layers: list[list[BoxPlace]], lines: Iterable[tuple[BoxPlace, ...]]) -> list[list[BoxPlace]]:
    above, below = neighbours(lines)
    best, fewest = layers, crossings(layers, below)
    current = [list(layer) for layer in layers]
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        down = sweep % 2 == 0
        joined = above if down else below
        rows = range(1, len(current)) if down else range(len(current) - 2, -1, -1)
        for row in rows:
            beside = {place: number for number, place in enumerate(current[row - 1 if down else row + 1])}
            weights = {
                place: _mean(
                    [float(beside[each]) for each in joined.get(place, ()) if each in beside], float(number)
                )
                for number, place in enumerate(current[row])
            }
            current[row].sort(key=weights.__getitem__)
        found = crossings(current, below)
        if found < fewest:
            best, fewest = [list(layer) for layer in current], found
    return best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _apart(ideal: Sequence[float], widths: Sequence[float], gap: float) -> list[float]:
    """Return centers that keep the gap and are near the ideal centers: the mean of pushing all to the right and all to the left."""
    right: list[float] = []
    for number, middle in enumerate(ideal):
        least = right[-1] + (widths[number - 1] + widths[number]) / 2 + gap if right else middle
        right.append(max(middle, least))
    left: list[float] = []
    for number in range(len(ideal) - 1, -1, -1):
        most = left[-1] - (widths[number + 1] + widths[number]) / 2 - gap if left else ideal[number]
        left.append(min(ideal[number], most))
    return [(one + other) / 2 for one, other in zip(right, reversed(left), strict=True)]


def _inversions(ends: Sequence[int], size: int) -> int:
    """Return the number of pairs in the wrong order, counted with a Fenwick tree."""
    tree = [0] * (size + 1)
    total = 0
    for seen, end in enumerate(ends):
        total += seen - _upto(tree, end + 1)
        place = end + 1
        while place <= size:
            tree[place] += 1
            place += place & -place
    return total


def _upto(tree: Sequence[int], place: int) -> int:
    found = 0
    while place > 0:
        found += tree[place]
        place -= place & -place
    return found
