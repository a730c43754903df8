"""Read-only statements that show what the code of one task has recorded: its steps and its checkpoint."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal
from uuid import UUID

from msgspec import Struct

from everbeat.store import rows
from everbeat.store.statement import Statement

MOST_CHARACTERS: Final = 4_000
"""How much of a long value is read."""
MOST_STEPS: Final = 500


class RecordedStep(Struct, frozen=True):
    """A step that the task's code need not do again, or a sleep, a wait or a child. `result` is JSON text, and `is_cut` if it is longer.

    It began at `begun_at` in this attempt. `state` is OPEN for a sleep or a wait that has not ended.
    """

    kind: Literal["step", "sleep", "event", "child"]
    name: str
    state: Literal["OPEN", "DONE", "TIMED_OUT"]
    attempt: int
    begun_at: datetime
    recorded_at: datetime
    due_at: datetime | None
    result: str | None
    is_cut: bool | None


class RecordedCheckpoint(Struct, frozen=True):
    """The beginning of a checkpoint as JSON text, and whether the rest was left out."""

    text: str
    is_cut: bool


def list_steps(task_id: UUID) -> Statement[list[RecordedStep]]:
    """Return up to 500 records of one task, the first at the beginning."""
    values = {"id": task_id, "most": MOST_CHARACTERS, "limit": MOST_STEPS}
    return Statement("inspect/list_steps", values, rows.each(RecordedStep))


def read_checkpoint(task_id: UUID) -> Statement[RecordedCheckpoint | None]:
    """Return the checkpoint of one task, or None if it has none."""
    values = {"id": task_id, "most": MOST_CHARACTERS}
    return Statement("inspect/read_checkpoint", values, rows.first(RecordedCheckpoint))
