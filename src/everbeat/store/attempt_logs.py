"""Statements for the captured logs of attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.task.captured_log import UnwrittenPart, encode_lines
from everbeat.store import rows
from everbeat.store.statement import Statement

MOST_LOGS: Final = 20
"""The maximum number of attempts whose logs are read together."""


class LogPlace(Struct, frozen=True):
    """The attempt and the claim to which a part of a log belongs."""

    task_id: UUID
    attempt: int
    claim_id: UUID


class LogSummary(Struct, frozen=True):
    """An attempt with a captured log. `last` is the number of the last record that was kept."""

    attempt: int
    claim_id: UUID
    last: int


class StoredPart(Struct, frozen=True):
    """A stored part of a log. `lines` is JSON text."""

    first: int
    last: int
    lines: str


def write_parts(parts: Sequence[tuple[LogPlace, UnwrittenPart]]) -> Statement[None]:
    """Store the state of parts. A part that is already stored in a newer state, or whose task has been deleted, is left out."""
    parameters = {
        "ids": [place.task_id for place, _ in parts],
        "attempts": [place.attempt for place, _ in parts],
        "claim_ids": [place.claim_id for place, _ in parts],
        "parts": [part.number for _, part in parts],
        "firsts": [part.lines[0].number for _, part in parts],
        "lasts": [part.lines[-1].number for _, part in parts],
        "lines": [encode_lines(part.lines) for _, part in parts],
    }
    return Statement("log/write_parts", parameters, lambda _: None)


def list_logs(
    task_id: UUID, *, attempt: int | None = None, limit: int = MOST_LOGS
) -> Statement[list[LogSummary]]:
    """Return the newest attempts of a task that have a captured log, newest first. `attempt` selects one attempt."""
    parameters = {"id": task_id, "attempt": attempt, "limit": limit}
    return Statement("log/list_logs", parameters, rows.each(LogSummary))


def list_parts(task_id: UUID, log: LogSummary, *, after: int) -> Statement[list[StoredPart]]:
    """Return the parts of one log that contain records after the given number, in their order."""
    parameters = {"id": task_id, "attempt": log.attempt, "claim_id": log.claim_id, "after": after}
    return Statement("log/list_parts", parameters, rows.each(StoredPart))
