"""Statements of the message outbox: whose turn it is to publish, what is to be published, what became of it, and what a message is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.delivery import Facts
from everbeat.store.statement import Row, Statement, nothing

WINDOW: Final = 1_000
"""So many messages of a queue are out at most; the others wait in their rows, where they cost the stream nothing."""


class OutboxRow(Struct, frozen=True):
    """One row of the outbox to be published; `reason`: it was taken from a worker that died."""

    id: int
    task_id: UUID
    queue: str
    fence: int
    times: int
    reason: str | None


class Portion(Struct, frozen=True):
    """What is to be published now, how many rows were taken away instead, and in how many ms the next row is due (None: none is).

    `full`: the queues of which as many are out as may be, and more wait, each with the number of the last row that waits.
    """

    rows: tuple[OutboxRow, ...]
    gone: int
    due_in_ms: float | None
    full: Mapping[str, int]


class Doubtful(Struct, frozen=True):
    """One published row whose task waits all the same."""

    id: int
    place: int
    task_id: UUID
    queue: str


class Place(Struct, frozen=True):
    """A place in the outbox to go on from: queue, moment (of publication, or when due), number."""

    queue: str
    at: datetime
    id: int


BEGINNING: Final = Place("", datetime(1970, 1, 1, tzinfo=UTC), 0)


class Walked(Struct, frozen=True):
    """How many rows were looked at and taken away, what is doubtful, and where to go on: None after the last one."""

    seen: int
    gone: int
    doubtful: tuple[Doubtful, ...]
    next: Place | None


def use_messages(*, channel: str) -> Statement[bool]:
    """Turns messages on, for good: what is sent from now on is written to the outbox. Answers whether they had been in use before."""
    return Statement("message/use", {"channel": channel}, lambda found: bool(found[0][0]))


def hold_relay(holder: str, *, taken_ms: int, channel: str) -> Statement[bool]:
    """Takes or keeps the turn to publish, for so many ms; answers whether the caller has it."""
    parameters = {"holder": holder, "taken_ms": taken_ms, "channel": channel}
    return Statement("message/hold", parameters, lambda found: bool(found[0][0]))


def let_relay_go(holder: str) -> Statement[None]:
    """Leaves the turn to others at once; nothing for whoever has it not."""
    return Statement("message/let_go", {"holder": holder}, nothing)


def relay_listens(holder: str, *, listens: bool) -> Statement[None]:
    """Says whether the relay has use for being told of each new row."""
    return Statement("message/listen", {"holder": holder, "listens": listens}, nothing)


def due_messages(*, portion: int, window: int) -> Statement[Portion]:
    """What is to be published now, at most `portion` rows, so that of each queue no more than `window` are out."""

    def read(found: Sequence[Row]) -> Portion:
        told = next(row for row in found if row[0] is None)
        rows = tuple(OutboxRow(*row[:6]) for row in found if row[0] is not None)
        return Portion(rows, gone=told[7], due_in_ms=told[6], full=told[8] or {})

    return Statement("message/due", {"portion": portion, "window": window}, read)


def mark_published(places: Mapping[int, int]) -> Statement[None]:
    """Notes at which place of the stream each row was put."""
    return Statement("message/mark", {"ids": list(places), "places": list(places.values())}, nothing)


def walk_published(place: Place, *, older_ms: int, limit: int) -> Statement[Walked]:
    """Takes away published rows whose task waits no more, and names those published so long ago whose task does."""
    parameters = {
        "queue": place.queue, "published_at": place.at, "id": place.id, "older_ms": older_ms, "limit": limit
    }  # fmt: skip

    def read(found: Sequence[Row]) -> Walked:
        told = next(row for row in found if row[0] is None)
        doubtful = tuple(Doubtful(*row[:4]) for row in found if row[0] is not None)
        after = None if told[6] is None else Place(*told[6:9])
        return Walked(seen=told[4], gone=told[5], doubtful=doubtful, next=after)

    return Statement("message/walk", parameters, read)


def walk_later(place: Place, *, limit: int) -> Statement[Place | None]:
    """Takes away unpublished rows whose task waits no more; answers where to go on, None after the last one."""
    parameters = {"queue": place.queue, "due_at": place.at, "id": place.id, "limit": limit}
    return Statement("message/walk_later", parameters, lambda found: Place(*found[0][:3]) if found else None)


def relay_failing(holder: str, *, failing: bool) -> Statement[None]:
    """Says whether the stream takes nothing, so that senders tell workers in its place."""
    return Statement("message/failing", {"holder": holder, "failing": failing}, nothing)


def tell_queues(queues: Collection[str], *, channel: str) -> Statement[None]:
    """Tells workers that there are these queues."""
    return Statement("message/tell_queues", {"queues": sorted(queues), "channel": channel}, nothing)


def tell_workers(queues: Collection[str], *, channel: str) -> Statement[None]:
    """Tells workers of tasks in these queues."""
    return Statement("message/tell_workers", {"queues": sorted(queues), "channel": channel}, nothing)


def publish_again(places: Mapping[int, int]) -> Statement[list[UUID]]:
    """Messages that are not at these places any more are to be published again; answers the tasks of those that still wait."""
    parameters = {"ids": list(places), "places": list(places.values())}
    return Statement("message/again", parameters, lambda found: [row[0] for row in found])


def queues_told() -> Statement[list[str]]:
    """The queues that have messages to be published, or out."""
    return Statement("message/queues", {}, lambda found: [row[0] for row in found])


def messages_lying() -> Statement[dict[str, Lying]]:
    """Count the messages that the stream may hold with reason, by queue."""

    def read(found: Sequence[Row]) -> dict[str, Lying]:
        return {row[0]: Lying(*row[1:]) for row in found}

    return Statement("message/lying", {}, read)


class Lying(Struct, frozen=True):
    """Of one queue: rows whose message is out, and tasks that a worker holds, each of which may have a message."""

    out: int
    held: int


def look_at(ids: Sequence[UUID], *, stale_ms: int) -> Statement[dict[UUID, Facts]]:
    """What the rows say of these tasks, those left out that nobody knows. `stale_ms`: a holder silent for longer is no obstacle for long."""

    def read(found: Sequence[Row]) -> dict[UUID, Facts]:
        return {row[0]: Facts(*row[1:]) for row in found}

    return Statement("message/look", {"ids": list(ids), "stale_ms": stale_ms}, read)


def relay_state(*, window: int = WINDOW) -> Statement[Relay | None]:
    """Who publishes, and what waits to be published; None where messages were never asked for."""
    return Statement("message/state", {"window": window}, lambda found: Relay(*found[0]) if found else None)


class Relay(Struct, frozen=True):
    """`holder`: whoever has the turn to publish, None: nobody. `waiting`: rows that are due and not published, for `oldest_s` the first of them.

    `failing`: the stream takes nothing.
    """

    holder: str | None
    waiting: int
    oldest_s: float | None
    failing: bool
