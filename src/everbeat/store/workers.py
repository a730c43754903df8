"""Statements with which supervisors and workers register, send heartbeats, observe each other and declare each other dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import psycopg
from msgspec import Struct, structs

from everbeat.domain.inspection import QuietTree
from everbeat.domain.schedule.model import Declared
from everbeat.errors import DatabaseError
from everbeat.store import rows
from everbeat.store.connection import SILENCE_KEPT_MS
from everbeat.store.migrations import known_migrations
from everbeat.store.rows import Row
from everbeat.store.schedules import declared_parameters
from everbeat.store.statement import Statement


class SupervisorRow(Struct, frozen=True, kw_only=True):
    """A supervisor's row. The application name of every session in its tree starts with `session_name`.

    `lock_file` is the path of the file that the tree keeps locked. The file contains the session name. `claimed_stale_ms` and
    `running_stale_ms` are the tree's staleness thresholds. Other trees judge this tree by them if their own thresholds are shorter.
    """

    id: str
    hostname: str
    pid: int
    boot_id: str | None
    pid_namespace: str | None
    process_started: int | None
    lock_key: int
    session_name: str
    machine_id: str | None = None
    lock_file: str | None = None
    metadata: str | None = None
    quiet: bool = False
    beat_ms: int | None = None
    claimed_stale_ms: int | None = None
    running_stale_ms: int | None = None


class WorkerRow(Struct, frozen=True, kw_only=True):
    """A worker's row, as its supervisor writes it. `declared` are the schedules and limits that the worker's code declares.

    `starts_version` is False if the worker only replaces another one with the same declaration, because that is not a deploy.
    """

    id: str
    supervisor_id: str
    hostname: str
    pid: int
    process_started: int | None
    queues: Sequence[str] | None
    metadata: str | None = None
    declared: Declared | None = None
    starts_version: bool = True


class BeatAnswer(Struct, frozen=True):
    """The reply to a heartbeat. `seq` is None if the supervisor has ended. Leases are (task id, claim_id[, worker id]) tuples.

    `ended`: the supervisor's workers whose rows have ended or are missing. `quiet`: an operator has made the tree quiet.
    """

    seq: int | None
    lost: tuple[tuple[UUID, UUID], ...]
    cancel: tuple[tuple[UUID, UUID], ...]
    phantoms: tuple[tuple[UUID, UUID, str], ...]
    ended: tuple[str, ...] = ()
    quiet: bool = False


class WatchedSession(Struct, frozen=True):
    """A supervisor's session as an observer sees it. `held_here`: the supervisor took its lock on the server's current incarnation.

    `beat_lately`: the last heartbeat is more recent than the time for which the server keeps a session whose network is silent. If the
    session is gone anyway, its socket was closed.

    `lost_in_crash`: no session of the tree is connected, and the server has crashed and recovered since the lock was taken. `beats_here`:
    the session that sends the heartbeats is open, and its backend is waiting for the client. `session_held`: the supervisor has taken its
    lock at some time.
    """

    supervisor_id: str
    beat_seq: int
    session_at: datetime
    held_here: bool
    locked: bool
    sessions: int
    beat_lately: bool
    lost_in_crash: bool
    beats_here: bool
    session_held: bool


class WatchedBeats(Struct, frozen=True):
    """A supervisor's heartbeats as an observer sees them: its own sequence number, and those of workers that have sent heartbeats
    themselves.

    `claimed_stale_ms` and `running_stale_ms` are the staleness thresholds by which to judge the tree's leases (None: the tree recorded
    none).
    """

    supervisor_id: str
    beat_seq: int
    silent_ms: int
    worker_seqs: Mapping[str, int]
    server_started_at: datetime
    claimed_stale_ms: int | None = None
    running_stale_ms: int | None = None


class WorkerState(Struct, frozen=True, kw_only=True):
    """A snapshot of a worker's load. `cpu_percent` is relative to one core. `messages` is JSON text."""

    worker_id: str
    running: int
    claimed: int
    slots: int
    rss_bytes: int
    cpu_percent: float
    loop_lag_ms: float
    messages: str | None = None


def register_supervisor(row: SupervisorRow) -> Statement[bool]:
    """Insert a supervisor's row."""
    parameters = structs.asdict(row) | {"code": known_migrations()[-1].version}
    return Statement("worker/register_supervisor", parameters, rows.any_row)


def record_starts(
    supervisor_id: str, *, processes: int, problem: str | None = None, age_ms: int = 0
) -> Statement[None]:
    """Store how many worker processes a supervisor maintains, and the problem that has prevented it from starting one for `age_ms`."""
    parameters = {
        "supervisor_id": supervisor_id, "processes": processes, "problem": problem, "age_ms": age_ms,
    }  # fmt: skip
    return Statement("worker/record_starts", parameters, rows.nothing)


def hold_session(supervisor_id: str, lock_key: int) -> Statement[bool | None]:
    """Take the supervisor's session lock on this connection.

    Return False if another session holds the lock, and None if the supervisor has ended.
    """
    return Statement(
        "worker/lock_session",
        {"id": supervisor_id, "lock_key": lock_key},
        lambda found: found[0][0] if found else None,
    )


def register_worker(row: WorkerRow) -> Statement[bool]:
    """Insert a worker's row. Return False if its supervisor has ended."""
    parameters = structs.asdict(row) | declared_parameters(row.declared)
    parameters["queues"] = None if row.queues is None else list(row.queues)
    return Statement("worker/register_worker", parameters, rows.any_row)


def beat(
    supervisor_id: str,
    held: Sequence[tuple[UUID, UUID]],
    *,
    draining: bool,
    worker_ids: Sequence[str] = (),
) -> Statement[BeatAnswer]:
    """Record a supervisor's heartbeat. `held` lists the leases that its workers hold in memory, as (task id, claim_id) pairs."""
    parameters = {
        "supervisor_id": supervisor_id, "worker_ids": list(worker_ids), "draining": draining,
        "ids": [lease[0] for lease in held], "claim_ids": [lease[1] for lease in held],
    }  # fmt: skip

    def read(found: Sequence[Row]) -> BeatAnswer:
        seq = next((int(row[3]) for row in found if row[0] == "beat"), None)
        return BeatAnswer(
            seq,
            tuple((row[1], row[2]) for row in found if row[0] == "lost"),
            tuple((row[1], row[2]) for row in found if row[0] == "cancel"),
            tuple((row[1], row[2], row[3]) for row in found if row[0] == "phantom"),
            tuple(row[3] for row in found if row[0] == "ended"),
            any(row[0] == "quiet" for row in found),
        )

    return Statement("worker/record_beat", parameters, read)


def listen(worker_id: str, *, listens: bool) -> Statement[None]:
    """Store whether a worker wants to be notified when tasks are due."""
    return Statement("worker/set_worker_listens", {"worker_id": worker_id, "listens": listens}, rows.nothing)


def beat_worker(worker_id: str) -> Statement[bool]:
    """Record a worker's own heartbeat. Return False if the worker has ended."""
    return Statement("worker/record_worker_beat", {"worker_id": worker_id}, rows.any_row)


def bury_workers(
    *,
    worker_ids: Sequence[str] = (),
    supervisor_id: str | None = None,
    how: str,
    cause: str | None = None,
    exit_code: int | None = None,
    signal: int | None = None,
) -> Statement[list[str]]:
    """Mark the given workers and, if `supervisor_id` is set, all workers of that supervisor as ended.

    This is permanent. Return the ids of the workers that had not ended before.
    """
    parameters = {
        "worker_ids": list(worker_ids), "supervisor_id": supervisor_id, "how": how, "cause": cause, "exit_code": exit_code, "signal": signal,
    }  # fmt: skip
    return Statement("worker/bury_workers", parameters, rows.first_column)


def bury_orphans() -> Statement[list[str]]:
    """Mark the workers of ended supervisors as ended, skipping locked rows. Return the ids of the workers that had not ended before."""
    return Statement("worker/bury_orphans", {}, rows.first_column)


def end_supervisor(
    supervisor_id: str, *, how: str, beat_seq: int | None = None, session_at: datetime | None = None
) -> Statement[bool]:
    """Mark a supervisor as ended. If `beat_seq` or `session_at` is set, do so only if that value has not changed since it was observed.

    Return whether the supervisor was marked.
    """
    parameters = {"supervisor_id": supervisor_id, "how": how, "beat_seq": beat_seq, "session_at": session_at}
    return Statement("worker/end_supervisor", parameters, rows.any_row)


class WatchTurnState(Struct, frozen=True):
    """The turn to watch that a supervisor has, or None. `supervisors` is the number of supervisors that have not ended, at most 101.

    `is_locked`: whether this session holds the lock that keeps the turn. `suspects`: turns whose holder's session has ended. `is_mass`: a
    watching supervisor has found that many trees fell silent or lost their sessions together.
    """

    turn: str | None
    is_locked: bool
    suspects: Sequence[str]
    supervisors: int
    is_mass: bool


WATCH_TURNS: Final = 3
"""How many supervisors of a kind watch the others."""


def take_watch_turn(
    taken_by: str, *, kind: str, turn_ms: int, by_lock: bool, suspects: Sequence[str] = (), mass_ms: int = 0
) -> Statement[WatchTurnState]:
    """Take or renew one of the turns to watch for observers of this kind, for `turn_ms`.

    `by_lock` is whether session locks work. `suspects` are those that an earlier call returned: these turns can be taken now. If `mass_ms`
    is positive, all supervisors learn for this time that many trees were lost.
    """
    parameters = {
        "turns": WATCH_TURNS, "taken_by": taken_by, "kind": kind, "by_lock": by_lock, "turn_ms": turn_ms, "mass_ms": mass_ms,
        "suspects": list(suspects),
    }  # fmt: skip
    return Statement("worker/take_watch_turn", parameters, lambda found: WatchTurnState(*found[0]))


def end_watch_turn(turn: str, *, taken_by: str) -> Statement[bool]:
    """End a supervisor's turn to watch. Return whether it still had the turn."""
    return Statement("worker/end_watch_turn", {"turn": turn, "taken_by": taken_by}, rows.any_row)


def watch_sessions(
    *, turn: str | None = None, taken_by: str | None = None, turn_ms: int = 0
) -> Statement[list[WatchedSession]]:
    """Return the sessions of all supervisors that have not ended, and renew the caller's turn to watch if it ends soon.

    The list is empty if another supervisor has taken this turn.
    """
    parameters = {
        "silence_kept_ms": SILENCE_KEPT_MS, "turn": turn, "taken_by": taken_by, "turn_ms": turn_ms,
        "renewed_ms": round(turn_ms * 0.7),
    }  # fmt: skip
    return Statement("worker/watch_sessions", parameters, rows.each(WatchedSession))


def watch_beats() -> Statement[list[WatchedBeats]]:
    """Return the heartbeats of all supervisors that have not ended."""
    return Statement(
        "worker/watch_beats",
        {},
        lambda found: [
            WatchedBeats(row[0], row[1], row[2], row[3] or {}, row[4], row[5], row[6]) for row in found
        ],
    )


def take_turn(service: str, *, interval_ms: int, taken_by: str) -> Statement[bool]:
    """Acquire the right to run a cluster service for one interval. Return False if another process has the right."""
    return Statement(
        "worker/take_turn",
        {"service": service, "interval_ms": interval_ms, "taken_by": taken_by},
        rows.any_row,
    )


def record_states(states: Sequence[WorkerState]) -> Statement[None]:
    """Store snapshots of workers."""
    columns = {name: [getattr(one, name) for one in states] for name in WorkerState.__struct_fields__}
    columns["worker_ids"] = columns.pop("worker_id")
    return Statement("worker/record_state", columns, rows.nothing)


class Predecessor(Struct, frozen=True):
    """A supervisor that has not ended, as its row describes it, and the state of its sessions in the database. Ages are in milliseconds.

    `held_here`: the supervisor took its session lock on the server's current incarnation. `lost_in_crash`: the session is gone, and the
    server has crashed and recovered since the session was opened.
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
        """Return whether the database shows any connected session of the supervisor's tree. Behind a pooler, it never shows one."""
        return self.locked or (self.session_held and self.sessions > 0)


def predecessors(
    supervisor_id: str, *, boot_id: str | None, machine_id: str | None, slot: str | None = None
) -> Statement[list[Predecessor]]:
    """Return the other supervisors that have not ended and that have this kernel's boot id, this machine's id, or this slot."""
    parameters = {"id": supervisor_id, "boot_id": boot_id, "machine_id": machine_id, "slot": slot}
    return Statement("worker/list_predecessors", parameters, rows.each(Predecessor))


def take_slot(supervisor_id: str, slot: str) -> Statement[bool]:
    """Reserve a slot for a supervisor. Return False if a supervisor that has not ended occupies the slot.

    If another supervisor takes the slot at the same time, raises a DatabaseError for which `is_slot_race` returns True.
    """
    return Statement("worker/take_slot", {"id": supervisor_id, "slot": slot}, rows.any_row)


def ended_trees(names: Sequence[str]) -> Statement[list[str]]:
    """Return those session names whose tree existed in this database and no longer has a live supervisor."""
    return Statement("worker/find_ended_trees", {"names": list(names)}, rows.first_column)


def is_slot_race(problem: DatabaseError) -> bool:
    """Return whether `take_slot` failed because another supervisor took the slot at the same time."""
    cause = problem.__cause__
    return isinstance(cause, psycopg.Error) and cause.diag.constraint_name == "supervisors_slot"


def quiet(
    ids: Sequence[str], *, host: str | None, everyone: bool, quiet: bool, channel: str
) -> Statement[list[QuietTree]]:
    """Make the chosen trees quiet, or resume them if `quiet` is False. Return all chosen trees that have not ended."""
    parameters = {"ids": list(ids), "host": host, "everyone": everyone, "quiet": quiet, "channel": channel}
    return Statement(
        "worker/set_quiet",
        parameters,
        lambda found: [QuietTree(row[0], row[1], row[2], row[3], tuple(row[4])) for row in found],
    )
