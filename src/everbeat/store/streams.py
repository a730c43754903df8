"""Statements for the items that tasks emit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.task.context_backend import EmittedItem, StreamInfo
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

PAGE_ITEMS: Final = 1_000
PAGE_BYTES: Final = 4 * 1024 * 1024
MOST_LEASES: Final = 200
"""The maximum number of attempts in one statement. A notification contains the ids of all of them."""


class StoredItem(Struct, frozen=True):
    """One item of a stream. `value` is JSON text."""

    number: int
    value: str
    at: datetime
    attempt: int


def insert_items(
    portions: Sequence[tuple[tuple[UUID, UUID], Sequence[EmittedItem]]], *, channel: str
) -> Statement[frozenset[UUID]]:
    """Store the items of running attempts, given as pairs of a lease (task id, claim_id) and its items.

    Return the claim ids of the attempts that still hold their lease. Nothing is stored for the others.
    """
    items = [(lease[1], item) for lease, emitted in portions for item in emitted]
    parameters = {
        "ids": [lease[0] for lease, _ in portions],
        "claim_ids": [lease[1] for lease, _ in portions],
        "owners": [claim_id for claim_id, _ in items],
        "names": [item.name for _, item in items],
        "numbers": [item.number for _, item in items],
        "values": [item.value for _, item in items],
        "channel": channel,
    }
    return Statement("stream/insert_items", parameters, _held)


def list_streams(task_id: UUID) -> Statement[list[StreamInfo]]:
    """Return the streams of a task, by name."""
    return Statement("stream/list_streams", {"id": task_id}, rows.each(StreamInfo))


def list_items(
    task_id: UUID, name: str, *, after: int, most: int = PAGE_ITEMS
) -> Statement[list[StoredItem]]:
    """Return the next items of a stream after the given number, at most `most`. An empty page means that no such item is stored now."""
    parameters = {"id": task_id, "name": name, "after": after, "limit": most, "bytes": PAGE_BYTES}
    return Statement("stream/list_items", parameters, rows.each(StoredItem))


def _held(found: Sequence[Row]) -> frozenset[UUID]:
    return frozenset(found[0][0] or ())
