"""Statements about what is not claimed for now: pausing and resuming task functions and queues."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everbeat.domain.pauses import Pause, PauseKind
from everbeat.store.statement import Row, Statement


def pause(kind: PauseKind, name: str, *, paused_by: str, reason: str | None) -> Statement[Pause | None]:
    """Pauses; answers the pause that stands, which may be an earlier one; None where another one came or went meanwhile."""
    parameters = {"kind": kind, "name": name, "paused_by": paused_by, "reason": reason}
    return Statement("pause/pause", parameters, lambda found: Pause(*found[0]) if found else None)


def resume(kind: PauseKind, name: str, *, channel: str) -> Statement[Pause | None]:
    """Resumes; answers the pause that ended, None when there was none."""
    parameters = {"kind": kind, "name": name, "channel": channel}
    return Statement("pause/resume", parameters, lambda found: Pause(*found[0][:6]) if found else None)


def pauses() -> Statement[list[Pause]]:
    """What is paused, newest first."""
    return Statement("pause/pauses", {}, lambda found: [Pause(*row) for row in found])


def known_names(kind: PauseKind) -> Statement[list[str]]:
    """The names that are known in the database."""
    return Statement("pause/known_names", {"kind": kind}, lambda found: [row[0] for row in found])


def pause_crashing(
    names: Collection[str], *, crashes: int, window_ms: int, reason: str
) -> Statement[list[tuple[str, int, str]]]:
    """Pauses those of these task functions of which so many tasks crashed within the window: (name, crashes, reason) of new ones."""
    parameters = {"names": sorted(set(names)), "crashes": crashes, "window_ms": window_ms, "reason": reason}

    def read(found: Sequence[Row]) -> list[tuple[str, int, str]]:
        return [(row[0], row[1], row[2]) for row in found]

    return Statement("pause/pause_crashing", parameters, read)
