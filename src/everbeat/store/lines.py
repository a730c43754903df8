"""Lines and gates: the statements that bring them up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

MOST_CHANGES: Final = 2000
"""How many released permits, and how many other changes, one statement applies."""


class Applied(Struct, frozen=True):
    """The number of changes that a statement applied. `is_busy`: changes are left, or another worker is applying them."""

    applied: int
    is_busy: bool


def apply_changes(
    *, readers: Sequence[str], queues: Sequence[str] | None, channel: str | None, most: int = MOST_CHANGES
) -> Statement[Applied]:
    """Apply the noted changes to lines and gates, so that a claim can take the tasks that are ready.

    `readers` (names of tasks, or ids of needs) and `queues` (None: all) are those of the caller. Workers are notified through `channel` of
    lines that the caller cannot serve.
    """
    parameters = {
        "most": most,
        "readers": list(readers),
        "queues": None if queues is None else list(queues),
        "channel": channel,
    }

    def read(found: Sequence[Row]) -> Applied:
        return Applied(*found[0])

    return Statement("line/apply_changes", parameters, read)


def ready_limits(
    *, readers: Sequence[str], queues: Sequence[str] | None, suspects: bool | None
) -> Statement[bool]:
    """Return whether a line of tasks with limits is ready. `suspects`: only lines of suspects, only others, or (None) all."""
    parameters = {
        "readers": list(readers),
        "queues": None if queues is None else list(queues),
        "suspects": [False, True] if suspects is None else [suspects],
    }
    return Statement("line/check_ready_limits", parameters, rows.only(bool))
