"""Which nodes of a workflow run again when it is retried: pure, so that a dry run and a retry decide by the same code."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final
from uuid import UUID

from msgspec import Struct

_BAD: Final = frozenset({"FAILED", "CANCELLED", "EXPIRED"})


class EndedNode(Struct, frozen=True, kw_only=True):
    """A node as it stands before a retry. `makes_members`: its members are made at run time, from a list that another node returns.
    `follows`: it was SKIPPED because of what it waits for, not by a cancel."""

    number: int
    name: str
    kind: str
    state: str
    member_of: int | None = None
    has_members: bool = False
    makes_members: bool = False
    has_task: bool = True
    follows: bool = False
    child: UUID | None = None
    child_state: str | None = None


class Reopening(Struct, frozen=True, kw_only=True):
    """What a retry does to one workflow. `states`: the new states, by number. `emptied`: maps whose members are deleted and made anew.
    `children`: the workflows of nodes that are retried themselves, by number.

    `again`: nodes that ended and run again; `completed`: those of them that had COMPLETED; `kept`: nodes downstream of one that runs
    again, which do not run again.
    """

    states: dict[int, str]
    emptied: frozenset[int]
    children: dict[int, UUID]
    again: Sequence[int]
    completed: Sequence[int]
    kept: Sequence[int]


def reopened(
    nodes: Sequence[EndedNode],
    edges: Iterable[tuple[int, int]],
    *,
    keep: bool = False,
    first: Collection[int] = (),
) -> Reopening:
    """Decide which nodes begin again: those that ended badly, those of `first`, and all that are downstream of one of them.

    `keep`: nodes that COMPLETED stay as they are, but for those of `first`.
    """
    return _Walk(nodes, edges, keep=keep, first=frozenset(first)).reopening()


class _Walk:
    """A walk from the nodes that begin again along the edges. A node is `anew` if its input may change."""

    def __init__(
        self,
        nodes: Sequence[EndedNode],
        edges: Iterable[tuple[int, int]],
        *,
        keep: bool,
        first: frozenset[int],
    ) -> None:
        self._nodes = {node.number: node for node in nodes}
        self._keep = keep
        self._first = first
        self._following: dict[int, list[int]] = {}
        self._members: dict[int, list[int]] = {}
        for parent, child in edges:
            self._following.setdefault(parent, []).append(child)
        for node in nodes:
            if node.member_of is not None:
                self._members.setdefault(node.member_of, []).append(node.number)
        self._again: set[int] = set()
        self._anew: set[int] = set()
        self._kept: set[int] = set()

    def reopening(self) -> Reopening:
        self._walk()
        nodes, again = self._nodes, sorted(self._again)
        emptied = frozenset(
            number for number in self._anew if nodes[number].makes_members and nodes[number].has_members
        )
        dropped = {member for number in emptied for member in self._members.get(number, ())}
        children = {
            number: node.child
            for number in again
            if number not in self._anew
            and (node := nodes[number]).child is not None
            and node.state in _BAD
            and node.child_state in ("FAILED", "CANCELLED")
        }
        states: dict[int, str] = {}
        for number in again:
            goes_on = nodes[number].has_members and number not in emptied
            if number not in dropped and nodes[number].state != "PENDING":
                states[number] = "ENQUEUED" if goes_on or number in children else "PENDING"
        ran = [
            number for number in sorted({*again, *dropped}) if nodes[number].state not in ("PENDING", "READY")
        ]
        return Reopening(
            states=states,
            emptied=emptied,
            children=children,
            again=ran,
            completed=[number for number in ran if nodes[number].state == "COMPLETED"],
            kept=sorted(self._kept - {*again, *dropped}),
        )

    def _walk(self) -> None:
        waiting = [
            (number, number in self._first) for number, node in self._nodes.items() if self._begins(node)
        ]
        seen: set[tuple[int, bool]] = set()
        while waiting:
            place = waiting.pop()
            if place in seen or place[0] not in self._nodes:
                continue
            seen.add(place)
            number, is_anew = place
            if self._stays(self._nodes[number]):
                self._keep_from(number)
                continue
            self._again.add(number)
            if is_anew:
                self._anew.add(number)
            waiting += [(each, True) for each in self._next_of(number, is_anew)]
            if (whole := self._nodes[number].member_of) is not None:
                waiting.append((whole, False))

    def _begins(self, node: EndedNode) -> bool:
        if node.number in self._first:
            return True
        is_bad = node.state in _BAD or (node.state == "SKIPPED" and not node.follows)
        return is_bad and (node.kind != "task" or node.has_task)

    def _stays(self, node: EndedNode) -> bool:
        if node.state == "ENQUEUED":
            return True
        is_lost = node.kind == "task" and not node.has_task
        return is_lost or (self._keep and node.state == "COMPLETED" and node.number not in self._first)

    def _next_of(self, number: int, is_anew: bool) -> list[int]:
        following = self._following.get(number, [])
        # The members of a map over a known list wait for the edges that are their own: only an explicit wish reaches them from the map.
        if is_anew and number in self._first:
            return [*following, *self._members.get(number, ())]
        return following

    def _keep_from(self, number: int) -> None:
        """Notes a node that stays, and what has completed behind it."""
        waiting = [number]
        while waiting:
            one = self._nodes.get(waiting.pop())
            if one is None or one.number in self._kept or one.state not in ("COMPLETED", "ENQUEUED"):
                continue
            # A map that has not ended only waits for its members, which are named themselves.
            if one.state == "COMPLETED" or not one.has_members:
                self._kept.add(one.number)
                waiting += self._following.get(one.number, [])
