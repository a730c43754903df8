"""Statements of whoever recovers on an operator's word: whose turn it is, who is silent, and who is to be released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct

from everbeat.store.statement import Statement, any_row


class SilentSupervisor(Struct, frozen=True):
    """A supervisor of whose tree nothing was heard; `held`: leases by worker, of those that hold any."""

    id: str
    beat_seq: int
    worker_ids: tuple[str, ...]
    held: Mapping[str, int]


class KnownWorker(Struct, frozen=True):
    """A worker by its id, and whether it was ended."""

    id: str
    is_ended: bool


class RemainingSession(Struct, frozen=True):
    """A session that keeps locks without use: its backend, its application name and its role.

    `since` changes with each of its statements; None: hidden from this role. `is_left`: its tree is dead. Otherwise its process
    did not read an answer at the moment of the look.
    """

    pid: int
    session: str
    role: str
    since: datetime | None
    is_left: bool
    may_end: bool


def silent_supervisors(*, silent_ms: int, exact: bool = False) -> Statement[list[SilentSupervisor]]:
    """Those that were not ended and whose whole tree has been silent for `silent_ms`, by the database's clock.

    Unless `exact`, a tree that wrote a longer threshold is judged by that.
    """
    return Statement(
        "worker/silent_supervisors",
        {"silent_ms": silent_ms, "exact": exact},
        lambda found: [SilentSupervisor(row[0], row[1], tuple(row[2]), row[3] or {}) for row in found],
    )


def remaining_sessions() -> Statement[list[RemainingSession]]:
    """What is left of the sessions of dead trees, and the sessions of all trees whose answer is not read at this moment."""
    return Statement(
        "worker/remaining_sessions",
        {},
        lambda found: [RemainingSession(*row) for row in found],
        of_sessions=True,
    )


def end_sessions(doomed: Sequence[RemainingSession]) -> Statement[frozenset[int]]:
    """End these sessions, which this role must be allowed to end; answers the backends that had done nothing since the look."""
    parameters = {
        "pids": [each.pid for each in doomed],
        "since": [each.since for each in doomed],
        "are_left": [each.is_left for each in doomed],
    }
    return Statement(
        "worker/end_sessions", parameters, lambda found: frozenset(pid for pid, _ in found), of_sessions=True
    )


def end_turn(service: str, *, taken_by: str) -> Statement[bool]:
    """Gives a turn back before its time."""
    return Statement("worker/end_turn", {"service": service, "taken_by": taken_by}, any_row)


def known_workers() -> Statement[list[KnownWorker]]:
    """All workers that have a row, the newest first."""
    return Statement("worker/known_workers", {}, lambda found: [KnownWorker(*row) for row in found])


def release_workers(worker_ids: Sequence[str], *, cause: str) -> Statement[list[str]]:
    """Ends workers on an operator's word; answers those that were not ended yet."""
    parameters = {
        "worker_ids": list(worker_ids), "supervisor_id": None, "how": "operator", "cause": cause, "exit_code": None, "signal": None,
    }  # fmt: skip
    return Statement("worker/bury_workers", parameters, lambda found: [row[0] for row in found])
