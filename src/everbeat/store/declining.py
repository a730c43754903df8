"""Statements about tasks whose arguments a worker does not understand: handing them back with a mark, and finding out what marked tasks need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from everbeat.store.lease_records import MarkedGroup
from everbeat.store.literals import uuids
from everbeat.store.statement import Row, Statement

_NONE: Final = "[]"
_FIRST_ID: Final = UUID(int=0)
_FIRST_PRIORITY: Final = -32_768


class MarkedPlace(Struct, frozen=True):
    """How far a walk through the marked groups has come: the last group, and the last of the serial lines."""

    needs_id: UUID = _FIRST_ID
    queue: str = ""
    priority: int = _FIRST_PRIORITY
    in_line: UUID = _FIRST_ID


BEGINNING: Final = MarkedPlace()


class MarkedPage(Struct, frozen=True):
    """Some marked groups, and where the walk goes on; `after` is None at the end."""

    groups: tuple[MarkedGroup, ...]
    after: MarkedPlace | None


def decline(leases: Sequence[tuple[UUID, UUID]], *, channel: str) -> Statement[dict[UUID, str]]:
    """Hands back tasks with a mark of what they need, given as (id, claim_id).

    The answer has for each claim_id that still held its task: "PENDING", "CANCELLED", or "unmarkable" for a task that was left as it is.
    """
    ordered = sorted(leases)
    parameters = {
        "ids": uuids([lease[0] for lease in ordered]),
        "claim_ids": uuids([lease[1] for lease in ordered]),
        "channel": channel,
    }
    return Statement("task/decline", parameters, lambda found: {row[0]: row[1] for row in found})


def marked(after: MarkedPlace = BEGINNING, *, most: int) -> Statement[MarkedPage]:
    """Reads the next marked groups: at most `most` outside of serial lines, and as many within."""
    parameters = {
        "after_id": after.needs_id, "after_queue": after.queue, "after_priority": after.priority, "after_in_line": after.in_line,
        "most": most,
    }  # fmt: skip

    def read(found: Sequence[Row]) -> MarkedPage:
        # By the walk's own count: PostgreSQL may sort the names of queues otherwise than Python.
        rows = sorted(found, key=_number)
        groups = tuple(MarkedGroup(*row[:5]) for row in rows if row[3] is not None)
        placed = [row for row in rows if row[1] is not None]
        in_line = [row for row in rows if row[1] is None]
        if len(placed) < most and len(in_line) < most:
            return MarkedPage(groups, None)
        place = after
        if placed:
            needs_id, queue, priority = placed[-1][:3]
            place = MarkedPlace(needs_id, queue, priority, place.in_line)
        if in_line:
            place = replace(place, in_line=in_line[-1][0])
        return MarkedPage(groups, place)

    return Statement("task/marked", parameters, read)


def marked_json(groups: Sequence[MarkedGroup]) -> str:
    """The groups as a parameter of statements."""
    if not groups:
        return _NONE
    return msgspec.json.encode(
        [
            {"needs_id": each.needs_id, "name": each.name, "queue": each.queue, "priority": each.priority}
            for each in groups
        ]
    ).decode()


def _number(row: Row) -> int:
    return int(row[5])
