"""Statements of a supervisor that starts, about those that may have been there before it: candidates for a proof, slots, lock files."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import psycopg
from msgspec import Struct

from everbeat.errors import DatabaseError
from everbeat.store.statement import Statement, any_row


class Predecessor(Struct, frozen=True):
    """A supervisor that was not ended, as it described itself, and what the database says of its sessions. Ages in ms.

    `held_here`: it took its session lock on the server's present incarnation. `lost_in_crash`: that session is gone, and the server has
    crashed and recovered since it was opened.
    """

    id: str
    hostname: str
    pid: int
    boot_id: str | None
    pid_namespace: str | None
    process_started: int | None
    machine_id: str | None
    session_name: str
    lock_file: str | None
    slot: str | None
    beat_seq: int
    session_at: datetime
    session_held: bool
    held_here: bool
    locked: bool
    sessions: int
    silent_ms: int
    lost_in_crash: bool

    @property
    def has_sessions(self) -> bool:
        """Whether something of its tree is connected, as far as that can be seen: behind a pooler nothing is."""
        return self.locked or (self.session_held and self.sessions > 0)


def predecessors(
    supervisor_id: str, *, boot_id: str | None, machine_id: str | None, slot: str | None = None
) -> Statement[list[Predecessor]]:
    """The other supervisors that were not ended and ran on this kernel, on another boot of this machine, or in this slot."""
    parameters = {"id": supervisor_id, "boot_id": boot_id, "machine_id": machine_id, "slot": slot}
    return Statement("worker/predecessors", parameters, lambda found: [Predecessor(*row) for row in found])


def take_slot(supervisor_id: str, slot: str) -> Statement[bool]:
    """Takes a slot; False when a supervisor that was not ended has it.

    Raises a DatabaseError that `is_slot_race` when another one took it at the same moment.
    """
    return Statement("worker/take_slot", {"id": supervisor_id, "slot": slot}, any_row)


def ended_trees(names: Sequence[str]) -> Statement[list[str]]:
    """Which of the trees with these session names were here, and have no supervisor any more that was not ended."""
    return Statement("worker/ended_trees", {"names": list(names)}, lambda found: [row[0] for row in found])


def is_slot_race(problem: DatabaseError) -> bool:
    """Whether `take_slot` was refused because somebody else took the slot at the same moment."""
    cause = problem.__cause__
    return isinstance(cause, psycopg.Error) and cause.diag.constraint_name == "supervisors_slot"
