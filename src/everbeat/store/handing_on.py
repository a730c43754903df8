"""What the nodes of one step are given: results are read a few at a time, within a bound, before they are put into arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final
from uuid import UUID

from everbeat.domain.graph import Hole, Known
from everbeat.domain.size import spelled
from everbeat.store.plan import Plan, ask
from everbeat.store.workflow_values import Source, Value, results
from everbeat.store.workflows import Place

SMALL: Final = 2_000
"""Bytes as stored. PostgreSQL stores larger values apart, and they may be much larger than that when they are read."""
MOST_SMALL: Final = 2_000
MOST_LARGE: Final = 4
"""Of these, results that one statement reads: each can be as large as the app's payload_limit."""
PARTS: Final = 4
"""A node can take parts of results that are together this many times as large as what it can be given."""


class TooMuch(ValueError):
    """A node would be given more than it can be."""


class Handing:
    """The sources of the nodes of a step, and those of their values that were read and are still held."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources: dict[Place, list[Source]] = {}
        for source in sources:
            self._sources.setdefault((source.workflow_id, source.of), []).append(source)
        self._texts: dict[Place, tuple[str | None, str | None]] = {}
        self._large: set[Place] = set()
        self.read = 0
        """Characters of large values that this step has read."""

    def read_small(self) -> Plan[None]:
        """Reads all that is small, of all nodes together."""
        places = {
            source.place: None for each in self._sources.values() for source in each if source.stored < SMALL
        }
        yield from self._take([*places], at_once=MOST_SMALL)

    def known(self, workflow_id: UUID, holes: Collection[Hole], *, largest: int) -> Plan[dict[int, Known]]:
        """What the sources of these holes have come to. Raises TooMuch, if possible before anything is read."""
        whole = {hole.source for hole in holes if not hole.path}
        sources = {
            of: self._sources.get((workflow_id, of), [])
            for of in dict.fromkeys(hole.source for hole in holes)
        }
        stored = {of: sum(each.stored for each in found) for of, found in sources.items()}
        _require(sum(stored[of] for of in whole), sum(stored.values()), largest)
        given = taken = 0
        for of, found in sources.items():
            for first in range(0, len(found), MOST_LARGE):
                places = [each.place for each in found[first : first + MOST_LARGE]]
                self.read += yield from self._take(places, at_once=MOST_LARGE)
                size = sum(map(self._size, places))
                taken += size
                given += size if of in whole else 0
                _require(given, taken, largest)
        return known_of(self._values(found) for found in sources.values()).get(workflow_id, {})

    def release(self, *, beyond: int) -> None:
        """Drops what is large, if it is more than this many characters."""
        if sum(map(self._size, self._large)) > beyond:
            for place in self._large:
                del self._texts[place]
            self._large.clear()

    def _take(self, places: Sequence[Place], *, at_once: int) -> Plan[int]:
        """Reads those that are not held, and answers how many characters that were."""
        missing = [place for place in places if place not in self._texts]
        taken = 0
        for first in range(0, len(missing), at_once):
            found = yield from ask(results(missing[first : first + at_once]))
            for workflow_id, number, result, error in found:
                place = workflow_id, number
                self._texts[place] = result, error
                taken += self._size(place)
                if self._size(place) >= SMALL:
                    self._large.add(place)
        return taken

    def _size(self, place: Place) -> int:
        result, error = self._texts.get(place, (None, None))
        return len(result or "") + len(error or "")

    def _values(self, sources: Iterable[Source]) -> Iterable[Value]:
        for one in sources:
            result, error = self._texts.get(one.place, (None, None))
            yield Value(one.workflow_id, one.of, one.place_in_map, one.state, result, error, one.is_map)


def _require(given: int, taken: int, largest: int) -> None:
    if given > largest:
        raise TooMuch(
            f"the results that it is given are more than {spelled(largest)}, which is the payload_limit of the app that started the"
            " workflow; keep large data elsewhere and hand on where it is, or raise App(payload_limit=...)"
        )
    if taken > PARTS * largest:
        raise TooMuch(
            f"the results that it takes parts of are more than {spelled(PARTS * largest)}, {PARTS} times the payload_limit of the app"
            " that started the workflow; let the tasks return what is wanted of them, or raise App(payload_limit=...)"
        )


def known_of(found: Iterable[Iterable[Value]]) -> dict[UUID, dict[int, Known]]:
    """Values by workflow and node; of maps with their members, in order."""
    known: dict[UUID, dict[int, Known]] = {}
    members: dict[Place, list[tuple[int, Known]]] = {}
    maps: list[Value] = []
    for value in (value for some in found for value in some):
        one = Known(value.state, value.result, value.error)
        if value.place is not None:
            members.setdefault((value.workflow_id, value.number), []).append((value.place, one))
        elif value.is_map:
            maps.append(value)
        else:
            known.setdefault(value.workflow_id, {})[value.number] = one
    for value in maps:
        parts = [
            part for _, part in sorted(members.get((value.workflow_id, value.number), []), key=_by_place)
        ]
        known.setdefault(value.workflow_id, {})[value.number] = Known(
            value.state, None, value.error, parts=parts
        )
    return known


def _by_place(member: tuple[int, Known]) -> int:
    return member[0]
