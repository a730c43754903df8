"""Statements of supervisors and workers about themselves and each other: registration, beats, observation, burial, turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from everbeat.store.own_settings import SILENCE_KEPT_MS
from everbeat.store.statement import Row, Statement, any_row, nothing


class SupervisorRow(Struct, frozen=True, kw_only=True):
    """What a supervisor tells about itself. `session_name` begins the application name of every session of its tree.

    `lock_file`: the path of the file that its tree keeps locked, whose content is the session name. Others judge its silence by these
    lengths if they are longer than their own; None: by their own.
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
    """What a supervisor tells about a worker it started."""

    id: str
    supervisor_id: str
    hostname: str
    pid: int
    process_started: int | None
    queues: Sequence[str] | None
    metadata: str | None = None


class BeatAnswer(Struct, frozen=True):
    """What a beat learned. `seq` is None when the supervisor was ended. Leases are (task id, claim_id[, worker id]).

    `ended`: those of its workers that others ended. `quiet`: an operator made the tree quiet.
    """

    seq: int | None
    lost: tuple[tuple[UUID, UUID], ...]
    cancel: tuple[tuple[UUID, UUID], ...]
    phantoms: tuple[tuple[UUID, UUID, str], ...]
    ended: tuple[str, ...] = ()
    quiet: bool = False


class WatchedSession(Struct, frozen=True):
    """A supervisor's session as an observer sees it. `held_here`: it took its lock on the server's present incarnation.

    `beat_lately`: its last beat is younger than the time for which the server keeps the session of a silent network. If the session is
    gone all the same, its socket was closed.

    `lost_in_crash`: nothing of its tree is connected, and the server has crashed and recovered since the lock was taken. `beats_here`:
    the session on which it beats is open, and its backend waits for its client. `session_held`: it ever took its lock.
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
    """A supervisor's beats as an observer sees them: its own sequence, and those of workers that ever beat for themselves.

    The lengths are those by which its tree wrote that its leases are to be judged; None: it wrote none.
    """

    supervisor_id: str
    beat_seq: int
    silent_ms: int
    worker_seqs: Mapping[str, int]
    server_started_at: datetime
    claimed_stale_ms: int | None = None
    running_stale_ms: int | None = None


class WorkerState(Struct, frozen=True, kw_only=True):
    """A snapshot of a worker: tasks, slots, resident bytes, CPU in percent of one core, loop lag in ms, its messages as JSON."""

    worker_id: str
    running: int
    claimed: int
    slots: int
    rss_bytes: int
    cpu_percent: float
    loop_lag_ms: float
    messages: str | None = None


def register_supervisor(row: SupervisorRow) -> Statement[bool]:
    """Announces a supervisor."""
    parameters = {
        "id": row.id, "hostname": row.hostname, "pid": row.pid, "boot_id": row.boot_id, "pid_namespace": row.pid_namespace,
        "process_started": row.process_started, "lock_key": row.lock_key, "session_name": row.session_name,
        "machine_id": row.machine_id, "lock_file": row.lock_file, "metadata": row.metadata,
        "quiet": row.quiet, "beat_ms": row.beat_ms, "claimed_stale_ms": row.claimed_stale_ms, "running_stale_ms": row.running_stale_ms,
    }  # fmt: skip
    return Statement("worker/register_supervisor", parameters, any_row)


def record_starts(
    supervisor_id: str, *, processes: int, problem: str | None = None, age_ms: int = 0
) -> Statement[None]:
    """Stores how many worker processes a supervisor keeps, and why it has not been able to start one for `age_ms`."""
    parameters = {
        "supervisor_id": supervisor_id, "processes": processes, "problem": problem, "age_ms": age_ms,
    }  # fmt: skip
    return Statement("worker/record_starts", parameters, nothing)


def hold_session(supervisor_id: str, lock_key: int) -> Statement[bool | None]:
    """Takes the session lock on this connection: True, False (somebody has it), None (the supervisor was ended)."""
    return Statement(
        "worker/hold_session",
        {"id": supervisor_id, "lock_key": lock_key},
        lambda found: found[0][0] if found else None,
    )


def register_worker(row: WorkerRow) -> Statement[bool]:
    """Announces a worker; False when its supervisor was ended."""
    parameters = {
        "id": row.id, "supervisor_id": row.supervisor_id, "hostname": row.hostname, "pid": row.pid, "process_started": row.process_started,
        "queues": None if row.queues is None else list(row.queues), "metadata": row.metadata,
    }  # fmt: skip
    return Statement("worker/register_worker", parameters, any_row)


def beat(
    supervisor_id: str,
    held: Sequence[tuple[UUID, UUID]],
    *,
    draining: bool,
    worker_ids: Sequence[str] = (),
) -> Statement[BeatAnswer]:
    """One beat for what these workers hold in memory, as (task id, claim_id)."""
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

    return Statement("worker/beat", parameters, read)


def listen(worker_id: str, *, listens: bool) -> Statement[None]:
    """A worker says whether it has use for hints that tasks are due."""
    return Statement("worker/listen", {"worker_id": worker_id, "listens": listens}, nothing)


def beat_worker(worker_id: str) -> Statement[bool]:
    """A worker's own beat; False when it was ended."""
    return Statement("worker/beat_worker", {"worker_id": worker_id}, any_row)


def bury_workers(
    *,
    worker_ids: Sequence[str] = (),
    supervisor_id: str | None = None,
    how: str,
    cause: str | None = None,
    exit_code: int | None = None,
    signal: int | None = None,
) -> Statement[list[str]]:
    """Ends workers for good: those named, and all of a supervisor if one is given; answers those that were not ended yet."""
    parameters = {
        "worker_ids": list(worker_ids), "supervisor_id": supervisor_id, "how": how, "cause": cause, "exit_code": exit_code, "signal": signal,
    }  # fmt: skip
    return Statement("worker/bury_workers", parameters, lambda found: [row[0] for row in found])


def bury_orphans() -> Statement[list[str]]:
    """Ends the workers of ended supervisors, those locked by somebody excepted; answers those that were not ended yet."""
    return Statement("worker/bury_orphans", {}, lambda found: [row[0] for row in found])


def end_supervisor(
    supervisor_id: str, *, how: str, beat_seq: int | None = None, session_at: datetime | None = None
) -> Statement[bool]:
    """Ends a supervisor, by swap on the beat and the session that were watched, if given."""
    parameters = {"supervisor_id": supervisor_id, "how": how, "beat_seq": beat_seq, "session_at": session_at}
    return Statement("worker/end_supervisor", parameters, any_row)


def watch_sessions() -> Statement[list[WatchedSession]]:
    """The sessions of all supervisors that were not ended."""
    parameters = {"silence_kept_ms": SILENCE_KEPT_MS}
    return Statement(
        "worker/watch_sessions", parameters, lambda found: [WatchedSession(*row) for row in found]
    )


def watch_beats() -> Statement[list[WatchedBeats]]:
    """The beats of all supervisors that were not ended."""
    return Statement(
        "worker/watch_beats",
        {},
        lambda found: [
            WatchedBeats(row[0], row[1], row[2], row[3] or {}, row[4], row[5], row[6]) for row in found
        ],
    )


def take_turn(service: str, *, interval_ms: int, taken_by: str) -> Statement[bool]:
    """Takes the turn of a cluster service for one interval; False when somebody else has it."""
    return Statement(
        "worker/take_turn", {"service": service, "interval_ms": interval_ms, "taken_by": taken_by}, any_row
    )


def record_states(states: Sequence[WorkerState]) -> Statement[None]:
    """Stores snapshots."""
    parameters = {
        "worker_ids": [one.worker_id for one in states], "running": [one.running for one in states], "claimed": [one.claimed for one in states],
        "slots": [one.slots for one in states], "rss_bytes": [one.rss_bytes for one in states],
        "cpu_percent": [one.cpu_percent for one in states], "loop_lag_ms": [one.loop_lag_ms for one in states],
        "messages": [one.messages for one in states],
    }  # fmt: skip
    return Statement("worker/record_state", parameters, lambda _: None)
