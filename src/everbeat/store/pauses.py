"""Statements about what is not claimed for now: pausing and resuming task functions and queues."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from uuid import UUID

from everbeat.domain.pauses import Pause, PauseKind
from everbeat.store.statement import Row, Statement, nothing


def pause(
    kind: PauseKind, name: str, *, paused_by: str, reason: str | None, call: UUID
) -> Statement[Pause | None]:
    """Pauses; answers the pause that stands, which may be an earlier one; None where another one came or went meanwhile."""
    parameters = {"kind": kind, "name": name, "paused_by": paused_by, "reason": reason, "call": call}
    return Statement("pause/pause", parameters, lambda found: Pause(*found[0]) if found else None)


def resume(pause: Pause, *, channel: str) -> Statement[None]:
    """End this pause if it has not ended; a later one of the same name stays."""
    parameters = {"kind": pause.kind, "name": pause.name, "paused_at": pause.paused_at, "channel": channel}
    return Statement("pause/resume", parameters, nothing)


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
