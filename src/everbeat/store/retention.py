"""Statements that delete old rows, and statements that find and end leftover sessions. Each handles a limited batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Generic, TypeVar
from uuid import UUID

from msgspec import Struct

from everbeat.domain.inspection import PruneResult
from everbeat.domain.series import SUMS_KEPT_S
from everbeat.errors import DatabaseUnreachable
from everbeat.errors.wording import amount
from everbeat.store import rows
from everbeat.store.connection import Host, WatchedAsyncConnection, WatchedConnection
from everbeat.store.rows import Row
from everbeat.store.statement import Statement
from everbeat.store.workers import bury_workers

K = TypeVar("K")


class PruneStep(Struct, Generic[K], frozen=True):
    """The number of rows that one step deleted from each table, and the key after which the next step starts (None: nothing is left)."""

    deleted: Mapping[str, int]
    next_after: K | None


class TaskIdBounds(Struct, frozen=True):
    """Two bounds on task ids. `old` is the smallest id of a task sent at the retention cutoff, and `now` that of a task sent now."""

    old: UUID
    now: UUID


def task_id_bounds(*, hours: float) -> Statement[TaskIdBounds]:
    """Return the id bounds to use in a search for tasks that ended more than `hours` ago.

    Such tasks were sent before that time, and ids sort by the time when a task was sent.
    """
    return Statement("retention/find_task_id_bounds", {"hours": hours}, rows.only(TaskIdBounds))


def prune_tasks(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete tasks that ended more than `hours` ago, with all data stored about them.

    Examine at most `limit` tasks between the two ids.
    """
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement(
        "retention/prune_tasks", parameters, _step("tasks", "attempts", "recoveries", "steps", "signals")
    )


def prune_results(*, limit: int, after: bool) -> Statement[PruneStep[bool]]:
    """Remove up to `limit` results whose `keep_result_for` has passed. Each step begins at the start, so `after` is not used."""
    del after
    return Statement("retention/prune_results", {"limit": limit}, _step("results"))


def prune_lines(*, limit: int, after: str) -> Statement[PruneStep[str]]:
    """Delete idle lines without live tasks. Examine at most the next `limit` lines. Lines are not counted as records."""
    return Statement("retention/prune_lines", {"limit": limit, "after": after}, _step())


def prune_gates(*, limit: int, after: str) -> Statement[PruneStep[str]]:
    """Delete gates that have not been used for a day. Examine at most the next `limit` gates. Gates are not counted as records."""
    return Statement("retention/prune_gates", {"limit": limit, "after": after}, _step())


def has_more_to_remove() -> Statement[bool]:
    """Return whether retention has work if it keeps all records: a result with a `keep_result_for`, lines, gates, rates, depths or logs."""
    return Statement("retention/check_more_to_remove", {}, rows.only(bool))


def prune_workflows(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete workflows that ended more than `hours` ago, with their nodes, edges and signals.

    Examine at most `limit` workflows between the two ids.
    """
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_workflows", parameters, _step("workflows", "nodes", "edges", "signals"))


def prune_batches(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete batches and gathers that ended more than `hours` ago. Examine at most `limit` of them. They are not counted as records."""
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_batches", parameters, _step())


def prune_stray_attempts(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete attempts that ended more than `hours` ago and whose task no longer exists.

    Examine at most `limit` attempts between the two task ids.
    """
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_stray_attempts", parameters, _step("attempts"))


def prune_stray_steps(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete steps that were recorded more than `hours` ago and whose task no longer exists.

    Examine at most `limit` steps between the two task ids.
    """
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_stray_steps", parameters, _step("steps"))


def prune_stray_signals(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete signals that were sent more than `hours` ago and whose target no longer exists.

    Examine at most `limit` signals between the two signal ids.
    """
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_stray_signals", parameters, _step("signals"))


def prune_stray_labels(*, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete labels whose task or workflow no longer exists. Examine at most `limit` labels between the two ids.

    Labels are not counted as records.
    """
    parameters = {"limit": limit, "after": after, "until": until}
    return Statement("retention/prune_stray_labels", parameters, _step())


def prune_stray_items(*, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete up to `limit` items of streams whose task no longer exists, also not in `history`. Items are not counted as records."""
    return Statement("retention/prune_stray_items", {"limit": limit, "after": after, "until": until}, _step())


def prune_logs(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[PruneStep[UUID]]:
    """Delete up to `limit` parts of captured logs that were last written more than `hours` ago, or whose task no longer exists.

    They are not counted as records.
    """
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_logs", parameters, _step())


def prune_stray_recoveries(*, hours: int, limit: int, after: int) -> Statement[PruneStep[int]]:
    """Delete recoveries that are older than `hours` and whose task no longer exists. Examine at most the next `limit` recoveries."""
    parameters = {"hours": hours, "limit": limit, "after": after}
    return Statement("retention/prune_stray_recoveries", parameters, _step("recoveries"))


def prune_beats(*, hours: int, limit: int, after: datetime) -> Statement[PruneStep[datetime]]:
    """Delete up to `limit` heartbeats older than `hours`, starting with the oldest after `after`."""
    return Statement(
        "retention/prune_beats", {"hours": hours, "limit": limit, "after": after}, _step("beats")
    )


def prune_worker_states(*, hours: int, limit: int, after: datetime) -> Statement[PruneStep[datetime]]:
    """Delete up to `limit` snapshots older than `hours`, starting with the oldest after `after`."""
    parameters = {"hours": hours, "limit": limit, "after": after}
    return Statement("retention/prune_worker_states", parameters, _step("worker_states"))


def prune_ticks(*, hours: int, limit: int, after: datetime) -> Statement[PruneStep[datetime]]:
    """Delete up to `limit` ticks that were decided more than `hours` ago, starting with the oldest after `after`."""
    return Statement(
        "retention/prune_ticks", {"hours": hours, "limit": limit, "after": after}, _step("ticks")
    )


def prune_rates(*, limit: int, after: datetime) -> Statement[PruneStep[datetime]]:
    """Delete up to `limit` rates of hours that began more than 30 days ago. Rates are not counted as records."""
    return Statement("retention/prune_rates", {"limit": limit, "after": after}, _step())


def prune_rate_sums(
    seconds: int, *, is_total: bool, limit: int, after: datetime
) -> Statement[PruneStep[datetime]]:
    """Delete up to `limit` old sums of rates over spans of this length. Sums are not counted as records."""
    parameters = {
        "seconds": seconds, "is_total": is_total, "kept_s": SUMS_KEPT_S[seconds], "limit": limit, "after": after,
    }  # fmt: skip
    return Statement("retention/prune_rate_sums", parameters, _step())


def prune_depth_peaks(
    seconds: int, *, is_total: bool, limit: int, after: datetime
) -> Statement[PruneStep[datetime]]:
    """Delete up to `limit` old peaks of depths over spans of this length. Peaks are not counted as records."""
    parameters = {
        "seconds": seconds, "is_total": is_total, "kept_s": SUMS_KEPT_S[seconds], "limit": limit, "after": after,
    }  # fmt: skip
    return Statement("retention/prune_depth_peaks", parameters, _step())


def prune_depths(seconds: int, *, limit: int, after: datetime) -> Statement[PruneStep[datetime]]:
    """Delete up to `limit` old samples of the kind `seconds`: 3,600 (kept for 30 days), 60 (48 hours) or 10 (2 hours).

    Samples are not counted as records.
    """
    parameters = {"seconds": seconds, "limit": limit, "after": after}
    return Statement("retention/prune_depths", parameters, _step())


def prune_schedule_versions(*, hours: int, limit: int, after: str) -> Statement[PruneStep[str]]:
    """Delete up to `limit` versions of declared schedules that became live more than `hours` ago and that no stored worker declares."""
    parameters = {"hours": hours, "limit": limit, "after": after}
    return Statement("retention/prune_schedule_versions", parameters, _step("schedule_versions"))


def prune_workers(*, hours: int, limit: int, after: str) -> Statement[PruneStep[str]]:
    """Delete workers that ended more than `hours` ago and hold no tasks. Examine at most the next `limit` workers."""
    return Statement(
        "retention/prune_workers", {"hours": hours, "limit": limit, "after": after}, _step("workers")
    )


def prune_supervisors(*, hours: int, limit: int, after: str) -> Statement[PruneStep[str]]:
    """Delete supervisors that ended more than `hours` ago and have no worker rows left. Examine at most the next `limit` supervisors."""
    parameters = {"hours": hours, "limit": limit, "after": after}
    return Statement("retention/prune_supervisors", parameters, _step("supervisors"))


def count(
    *, terminal_hours: int | None, worker_hours: int | None, beat_hours: int | None, bounds: TaskIdBounds
) -> Statement[PruneResult]:
    """Count the rows that a retention pass would delete now, without those of `history`. If an age is None, all rows of that type are kept."""
    parameters = {
        "terminal_hours": terminal_hours, "worker_hours": worker_hours, "beat_hours": beat_hours, "old_id": bounds.old, "now_id": bounds.now,
    }  # fmt: skip
    return Statement("retention/count_old_rows", parameters, rows.only(PruneResult))


def rest(seconds: float) -> Statement[None]:
    """Sleep on the server without holding a lock."""
    return Statement("retention/sleep_between_batches", {"seconds": seconds}, lambda _: None)


def _step(*tables: str) -> Callable[[Sequence[Row]], PruneStep[K]]:
    def read(found: Sequence[Row]) -> PruneStep[K]:
        next_after, *counts = found[0]
        return PruneStep(dict(zip(tables, counts, strict=True)), next_after)

    return read


class SilentSupervisor(Struct, frozen=True):
    """A supervisor whose whole tree has been silent. `held` maps the id of each worker with leases to the number of its leases."""

    id: str
    beat_seq: int
    worker_ids: tuple[str, ...]
    held: Mapping[str, int]


class KnownWorker(Struct, frozen=True):
    """A registered worker. `over_at` and `cause` say when and why the worker ended, either by itself or together with its supervisor."""

    id: str
    is_ended: bool
    over_at: datetime | None = None
    cause: str | None = None


class RemainingSession(Struct, frozen=True):
    """An unused session that still holds locks: its backend's pid, its application name and its role.

    `since` changes with each of the session's statements; None means that this role cannot see it. `is_left`: the session's tree is dead.
    Otherwise, the client was not reading a reply when the sessions were listed. If `is_partial`, it had sent only a part of a request.
    `may_end`: this role is allowed to terminate the session.
    """

    pid: int
    session: str
    role: str
    since: datetime | None
    is_left: bool
    may_end: bool
    is_partial: bool


def silent_supervisors(*, silent_ms: int, exact: bool = False) -> Statement[list[SilentSupervisor]]:
    """Return the supervisors that have not ended and whose whole tree has been silent for `silent_ms` by the database's clock.

    If a tree recorded a longer threshold, the tree is judged by that threshold unless `exact` is set.
    """
    return Statement(
        "worker/list_silent_supervisors",
        {"silent_ms": silent_ms, "exact": exact},
        lambda found: [SilentSupervisor(row[0], row[1], tuple(row[2]), row[3] or {}) for row in found],
    )


def remaining_sessions() -> Statement[list[RemainingSession]]:
    """List the sessions that dead trees left behind, and the sessions of any tree that wait for its process in the middle of a statement."""
    return Statement("worker/list_remaining_sessions", {}, rows.each(RemainingSession), of_sessions=True)


def end_sessions(doomed: Sequence[RemainingSession]) -> Statement[frozenset[int]]:
    """Terminate the given sessions, except those that have been active since they were listed. Return the pids of the terminated backends."""
    parameters = {
        "pids": [each.pid for each in doomed],
        "since": [each.since for each in doomed],
        "are_left": [each.is_left for each in doomed],
    }
    return Statement(
        "worker/end_sessions", parameters, lambda found: frozenset(pid for pid, _ in found), of_sessions=True
    )


def end_turn(service: str, *, taken_by: str) -> Statement[bool]:
    """Release the right to run a cluster service before its interval has passed."""
    return Statement("worker/end_turn", {"service": service, "taken_by": taken_by}, rows.any_row)


def known_workers() -> Statement[list[KnownWorker]]:
    """List all workers that have a row, newest first."""
    return Statement("worker/list_known_workers", {}, rows.each(KnownWorker))


def release_workers(worker_ids: Sequence[str], *, cause: str) -> Statement[list[str]]:
    """Mark workers as ended on behalf of an operator. Return the ids of the workers that had not ended before."""
    return bury_workers(worker_ids=worker_ids, how="operator", cause=cause)


MOST_LEFT: Final = 8


class LeftSessions:
    """The sessions that a client has abandoned and that servers may still keep open. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._left: dict[Host | None, set[int]] = {}

    def add(self, connection: WatchedConnection | WatchedAsyncConnection) -> None:
        """Record that the client has abandoned this connection's session."""
        if (
            connection.prepare_threshold is not None
        ):  # behind a transaction pooler, the pid may belong to another client by now
            with self._guard:
                self._left.setdefault(connection.host, set()).add(connection.server_pid)

    def question(
        self, connection: WatchedConnection | WatchedAsyncConnection
    ) -> Statement[Sequence[Row]] | None:
        """Return the first statement for a new connection if this client left sessions on the connection's server, else None."""
        with self._guard:
            left = sorted(self._left.get(connection.host, ()))
        return (
            None if not left else Statement("inspect/find_ended_sessions", {"pids": left}, rows.as_they_are)
        )

    def require_room(
        self, connection: WatchedConnection | WatchedAsyncConnection, gone: Sequence[Row]
    ) -> None:
        """Forget the sessions that have ended.

        Raises DatabaseUnreachable if the server still has the maximum number of sessions that a client may leave behind.
        """
        with self._guard:
            left = self._left.setdefault(connection.host, set())
            left -= {pid for (pid,) in gone}  # another thread may have added one in the meantime
            count = len(left)
        if count >= MOST_LEFT:
            raise DatabaseUnreachable(
                f"{amount(count, 'earlier statement of this process still waits', plural='earlier statements of this process still wait')}"
                " for a synchronous standby; no more are sent.",
                fix="bring the standby back, or remove it from synchronous_standby_names.",
            )
