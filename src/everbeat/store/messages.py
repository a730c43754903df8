"""Statements for the message outbox: choose the relay that publishes, list the messages to publish, and read the facts about their tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.delivery import Facts
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

WINDOW: Final = 1_000
"""The maximum number of published messages per queue. Further messages wait in their outbox rows, where they cost the stream nothing."""


class OutboxRow(Struct, frozen=True):
    """An outbox row whose message is to be published. `reason`: why the task was taken from a worker, if it was."""

    id: int
    task_id: UUID
    queue: str
    fence: int
    times: int
    reason: str | None


class DueMessages(Struct, frozen=True):
    """The rows to publish now, the number of rows removed, and the milliseconds until the next row is due (None: there is no next row).

    `full` maps each queue whose window is full while more rows are waiting to the number of its last waiting row.
    """

    rows: tuple[OutboxRow, ...]
    gone: int
    due_in_ms: float | None
    full: Mapping[str, int]


class Doubtful(Struct, frozen=True):
    """A published row whose task is still waiting, so its message may have been lost."""

    id: int
    place: int
    task_id: UUID
    queue: str


class OutboxPlace(Struct, frozen=True):
    """The position from which a scan of the outbox continues: the queue, the time of publication or due time, and the row's number."""

    queue: str
    at: datetime
    id: int


BEGINNING: Final = OutboxPlace("", datetime(1970, 1, 1, tzinfo=UTC), 0)


class OutboxScan(Struct, frozen=True):
    """The result of a scan: the numbers of rows read and removed, the doubtful rows, and the next position (None after the last row)."""

    seen: int
    gone: int
    doubtful: tuple[Doubtful, ...]
    next: OutboxPlace | None


def use_messages(*, channel: str) -> Statement[bool]:
    """Enable messages permanently: from now on, each new task is written to the outbox. Return whether messages were already enabled."""
    return Statement("message/enable_messages", {"channel": channel}, rows.only(bool))


def hold_relay(holder: str, *, taken_ms: int, channel: str) -> Statement[bool]:
    """Acquire or renew the right to publish for `taken_ms` milliseconds. Return whether the caller has the right."""
    parameters = {"holder": holder, "taken_ms": taken_ms, "channel": channel}
    return Statement("message/hold_relay", parameters, rows.only(bool))


def let_relay_go(holder: str) -> Statement[None]:
    """Release the right to publish, if this holder has it."""
    return Statement("message/release_relay", {"holder": holder}, rows.nothing)


def relay_listens(holder: str, *, listens: bool) -> Statement[None]:
    """Store whether senders notify the relay of each new row."""
    return Statement("message/set_relay_listens", {"holder": holder, "listens": listens}, rows.nothing)


def due_messages(*, portion: int, window: int) -> Statement[DueMessages]:
    """Return up to `portion` rows to publish now. No queue gets more than `window` published messages."""

    def read(found: Sequence[Row]) -> DueMessages:
        told = next(row for row in found if row[0] is None)
        rows = tuple(OutboxRow(*row[:6]) for row in found if row[0] is not None)
        return DueMessages(rows, gone=told[7], due_in_ms=told[6], full=told[8] or {})

    return Statement("message/list_due_messages", {"portion": portion, "window": window}, read)


def mark_published(places: Mapping[int, int]) -> Statement[None]:
    """Record each published row's position in the stream."""
    return Statement(
        "message/mark_published", {"ids": list(places), "places": list(places.values())}, rows.nothing
    )


def walk_published(place: OutboxPlace, *, older_ms: int, limit: int) -> Statement[OutboxScan]:
    """Examine up to `limit` published rows, and remove those whose task is no longer waiting.

    The result contains the rows that were published more than `older_ms` milliseconds ago and whose task is still waiting.
    """
    parameters = {
        "queue": place.queue, "published_at": place.at, "id": place.id, "older_ms": older_ms, "limit": limit
    }  # fmt: skip

    def read(found: Sequence[Row]) -> OutboxScan:
        told = next(row for row in found if row[0] is None)
        doubtful = tuple(Doubtful(*row[:4]) for row in found if row[0] is not None)
        after = None if told[6] is None else OutboxPlace(*told[6:9])
        return OutboxScan(seen=told[4], gone=told[5], doubtful=doubtful, next=after)

    return Statement("message/clean_published", parameters, read)


def walk_later(place: OutboxPlace, *, limit: int) -> Statement[OutboxPlace | None]:
    """Examine up to `limit` unpublished rows, and remove those whose task is no longer waiting.

    Return the next position, or None after the last row.
    """
    parameters = {"queue": place.queue, "due_at": place.at, "id": place.id, "limit": limit}
    return Statement(
        "message/clean_scheduled", parameters, lambda found: OutboxPlace(*found[0][:3]) if found else None
    )


def relay_failing(holder: str, *, failing: bool) -> Statement[None]:
    """Record whether the stream rejects all messages. If it does, senders notify the workers directly."""
    return Statement("message/set_failing", {"holder": holder, "failing": failing}, rows.nothing)


def tell_queues(queues: Collection[str], *, channel: str) -> Statement[None]:
    """Notify workers that these queues exist."""
    return Statement("message/notify_queues", {"queues": sorted(queues), "channel": channel}, rows.nothing)


def tell_workers(queues: Collection[str], *, channel: str) -> Statement[None]:
    """Notify workers that tasks are waiting in these queues."""
    return Statement("message/notify_workers", {"queues": sorted(queues), "channel": channel}, rows.nothing)


def publish_again(places: Mapping[int, int]) -> Statement[list[UUID]]:
    """Mark lost messages for republication if their tasks are still waiting. Return the ids of these tasks.

    `places` maps each row's number to the stream position at which the message was lost.
    """
    parameters = {"ids": list(places), "places": list(places.values())}
    return Statement("message/republish_messages", parameters, rows.first_column)


def queues_told() -> Statement[list[str]]:
    """Return the names of the queues with unpublished or published messages."""
    return Statement("message/list_queues", {}, rows.first_column)


def messages_lying() -> Statement[dict[str, OutstandingMessages]]:
    """Return, for each queue, how many messages may legitimately be in the stream."""

    def read(found: Sequence[Row]) -> dict[str, OutstandingMessages]:
        return {row[0]: OutstandingMessages(*row[1:]) for row in found}

    return Statement("message/count_expected_messages", {}, read)


def queues_unserved(queues: Collection[str]) -> Statement[list[str]]:
    """Return the names of those queues that no live worker serves through NATS, according to the workers' last snapshots."""
    return Statement("message/find_unserved_queues", {"queues": sorted(queues)}, rows.first_column)


class OutstandingMessages(Struct, frozen=True):
    """The numbers of published rows and of tasks held by workers in one queue. Each of these may have a message in the stream."""

    out: int
    held: int


def delivery_facts(ids: Sequence[UUID], *, stale_ms: int) -> Statement[dict[UUID, Facts]]:
    """Return the facts about these tasks by id. Unknown ids are omitted.

    A lease holder that has been silent for longer than `stale_ms` is considered dead.
    """

    def read(found: Sequence[Row]) -> dict[UUID, Facts]:
        return {row[0]: Facts(*row[1:]) for row in found}

    return Statement("message/read_tasks", {"ids": list(ids), "stale_ms": stale_ms}, read)


def relay_state(*, window: int = WINDOW) -> Statement[RelayState | None]:
    """Return the state of the relay, or None if messages were never enabled."""
    return Statement("message/read_relay_state", {"window": window}, rows.first(RelayState))


class RelayState(Struct, frozen=True):
    """The state of the relay. `holder` is the process that currently has the right to publish (None: no relay is running).

    `waiting` is the number of rows that are due but not published. The oldest of them has been due for `oldest_s` seconds. `failing`: the
    stream rejects all messages.
    """

    holder: str | None
    waiting: int
    oldest_s: float | None
    failing: bool
