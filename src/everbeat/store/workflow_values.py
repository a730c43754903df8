"""Statements that read what the nodes of workflows have come to: how large it is, and the values themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from msgspec import Struct

from everbeat.store.statement import Statement
from everbeat.store.workflows import Place, placed


class Source(Struct, frozen=True):
    """A node whose value others are given, and how large that is as it is stored. `of`: the node that was asked of; itself, or the map
    of which it is a member, at `place_in_map`."""

    workflow_id: UUID
    of: int
    number: int
    place_in_map: int | None
    state: str
    is_map: bool
    stored: int

    @property
    def place(self) -> Place:
        return self.workflow_id, self.number


class Value(Struct, frozen=True):
    """What a node has come to; `place`: of a map's member, its place among them."""

    workflow_id: UUID
    number: int
    place: int | None
    state: str
    result: str | None
    error: str | None
    is_map: bool


def sources(places: Iterable[Place]) -> Statement[list[Source]]:
    """How these nodes ended, and how large what they came to is; of maps their members', too."""
    return Statement("workflow/sources", placed(list(places)), lambda found: [Source(*row) for row in found])


def results(places: Sequence[Place]) -> Statement[Sequence[tuple[UUID, int, str | None, str | None]]]:
    """The results and errors of these nodes, with their places."""
    return Statement("workflow/results", placed(places), lambda found: [(*row,) for row in found])


def values(places: Iterable[Place]) -> Statement[list[Value]]:
    """What these nodes have come to; of maps their members, too."""
    return Statement("workflow/values", placed(list(places)), lambda found: [Value(*row) for row in found])
