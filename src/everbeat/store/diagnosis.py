"""Statements for the commands `doctor` and `explain`. They change no data."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from time import monotonic
from typing import Any, Final
from uuid import UUID

import msgspec
import psycopg
from psycopg import sql
from psycopg.errors import Diagnostic

from everbeat.domain.doctor.findings import (
    BadRow,
    Clocks,
    Connections,
    Crew,
    Gaps,
    LongTransaction,
    LongTransactions,
    NotifyQueue,
    Oldest,
    QueueHolder,
    Right,
    Rows,
    SilentTrees,
    Standing,
    Suspects,
    Unresponsive,
    Unserved,
    Unswept,
)
from everbeat.domain.doctor.server import LONG_WAIT_MS, LockHolder, ReadOnly
from everbeat.domain.doctor.work import RecentFailures
from everbeat.domain.explain.reasons import FailingStart, Holding, RestartingSupervisor, SilenceRules, Waiting
from everbeat.domain.explain.workflows import Movement
from everbeat.domain.inspection import Pause
from everbeat.domain.limit.model import OF_QUEUE
from everbeat.domain.recovery.decision import UNRESPONSIVE_S
from everbeat.domain.task.needs import (
    KnowingWorkers,
    MarkedTasks,
    Needs,
    Registered,
    read_needs,
    read_parameters,
    read_registered,
)
from everbeat.store import rows
from everbeat.store.refusals import is_refused_hint
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, compose
from everbeat.store.target import Target

_CHANNEL: Final = "everbeat_doctor"


def standing() -> Statement[Standing]:
    """Return whether the server is a standby."""
    return Statement("inspect/read_standby", {}, rows.only(Standing))


def rights(schema: str) -> Statement[list[Right]]:
    """Return the privileges on the schema's tables that this role lacks."""
    return Statement(
        "inspect/list_missing_rights",
        {"schema": schema},
        lambda found: [Right(row[0], tuple(row[1]), row[2]) for row in found],
    )


def clocks() -> Statement[Clocks]:
    """Return the database's current time, and the supervisors whose heartbeats are ahead of it."""
    return Statement(
        "inspect/compare_clocks", {}, lambda found: Clocks(found[0][0], tuple(found[0][1]), found[0][2])
    )


def connections() -> Statement[Connections]:
    """Return the number of client connections, the maximum, and how many of the connections belong to everbeat."""
    return Statement("inspect/count_connections", {}, rows.only(Connections))


def long_transactions(*, older_than_ms: int) -> Statement[LongTransactions]:
    """Return up to five of the oldest transactions that keep dead rows from being removed."""
    return Statement(
        "inspect/list_long_transactions",
        {"older_than_ms": older_than_ms},
        lambda found: LongTransactions(
            tuple(LongTransaction(*row[:3]) for row in found if row[1] is not None), found[0][3]
        ),
    )


def dead_rows(schema: str) -> Statement[Rows | None]:
    """Return the number of live and dead rows in the tasks table, or None if the server does not count them."""
    return Statement("inspect/count_dead_rows", {"schema": schema}, rows.first(Rows))


def crew(*, stale_ms: int) -> Statement[Crew]:
    """Count the live supervisors and workers. A process without a heartbeat for `stale_ms` is not considered live."""
    return Statement("inspect/count_live_processes", {"stale_ms": stale_ms}, rows.only(Crew))


def unresponsive() -> Statement[list[Unresponsive]]:
    """Return the live workers whose processes did not respond to their supervisors at the last snapshot.

    The workers that have been unresponsive for the longest time come first.
    """
    return Statement(
        "inspect/list_unresponsive_workers", {"lag_ms": UNRESPONSIVE_S * 1_000}, rows.each(Unresponsive)
    )


def silent_trees(*, silent_ms: int, stale_ms: int) -> Statement[SilentTrees]:
    """Count the supervisors that have not ended, and those whose whole tree has been silent for `silent_ms`.

    The result names the silent supervisors without a session.
    """

    def read(found: Sequence[Row]) -> SilentTrees:
        known, silent, held, living, lost, held_by_lost = found[0]
        return SilentTrees(known, silent, held, living, tuple(lost or ()), held_by_lost)

    return Statement("inspect/count_silent_trees", {"silent_ms": silent_ms, "stale_ms": stale_ms}, read)


def beat_gaps() -> Statement[Gaps]:
    """Return statistics on the time between heartbeats during the last day."""
    return Statement("inspect/measure_beat_gaps", {}, rows.only(Gaps))


def unswept(rules: SilenceRules, *, margin_ms: int, stale_ms: int) -> Statement[Unswept]:
    """Return the number of leases that are overdue for recovery by more than `margin_ms` according to `rules`.

    A supervisor without a heartbeat for `stale_ms` is not considered live.
    """
    parameters = {
        "claimed_ms": rules.claimed_ms, "running_ms": rules.running_ms, "multiplier": rules.multiplier,
        "resilient_flags": list(rules.resilient_flags), "margin_ms": margin_ms, "stale_ms": stale_ms,
    }  # fmt: skip
    return Statement("inspect/list_unswept_leases", parameters, rows.only(Unswept))


def unserved(*, stale_ms: int) -> Statement[list[Unserved]]:
    """Return up to 50 groups of PENDING tasks that no live worker claims, grouped by queue and name.

    Only the first 100,000 tasks are read.
    """
    return Statement("inspect/list_unserved_tasks", {"stale_ms": stale_ms}, rows.each(Unserved))


def marked() -> Statement[list[MarkedTasks]]:
    """Return up to 200 groups of PENDING tasks that only workers with suitable code can run.

    Only the first 200,000 such tasks are read.
    """

    def read(found: Sequence[Row]) -> list[MarkedTasks]:
        return [
            MarkedTasks(name, queue, read_needs(needs) or Needs(), *rest)
            for name, queue, needs, *rest in found
        ]

    return Statement("inspect/count_marked_tasks", {}, read)


def knowing(task_names: Collection[str], *, stale_ms: int) -> Statement[list[KnowingWorkers]]:
    """Return the live workers that registered these task functions. A worker without a heartbeat for `stale_ms` is not considered live."""

    def read(found: Sequence[Row]) -> list[KnowingWorkers]:
        return [
            KnowingWorkers(name, rows.names(queues), Registered(read_parameters(told), tuple(workers)))
            for name, queues, told, workers in found
        ]

    return Statement(
        "inspect/list_registered_parameters", {"names": sorted(task_names), "stale_ms": stale_ms}, read
    )


def suspects() -> Statement[Suspects]:
    """Count the tasks that may kill their worker process."""
    return Statement("inspect/count_suspects", {}, rows.only(Suspects))


def failures(*, within_s: int, most: int) -> Statement[list[RecentFailures]]:
    """Count the tasks that failed in the last `within_s` seconds, by task name, error code and class.

    Only the newest `most` tasks are counted.
    """
    parameters = {"within_ms": within_s * 1_000, "most": most}
    return Statement("inspect/list_failures", parameters, rows.each(RecentFailures))


def unsent_handlers(*, within_s: int, most: int) -> Statement[list[UUID]]:
    """Return the tasks that failed in the last `within_s` seconds, at most an hour, and whose failure handler was not sent.

    Only the newest `most` failed tasks are examined.
    """
    parameters = {"within_ms": within_s * 1_000, "most": most}
    return Statement("inspect/list_unsent_handlers", parameters, rows.first_column)


def oldest_records() -> Statement[Oldest]:
    """Return the age of the oldest records that retention can delete."""

    def read(found: Sequence[Row]) -> Oldest:
        return Oldest(*found[0])

    return Statement("inspect/find_oldest_records", {}, read)


def bad_rows(*, most: int) -> Statement[list[BadRow]]:
    """Return up to `most` rows with a value that everbeat never writes and cannot use. Only live tasks and the newest rows are read."""
    return Statement("inspect/find_bad_rows", {"most": most}, rows.each(BadRow))


def hear(target: Target, *, within_s: float) -> float | None:
    """Return how many seconds a notification takes to reach another connection, or None if it takes longer than `within_s` seconds.

    Raises DatabaseError if a connection or statement fails.
    """
    try:
        with target.connect("everbeat doctor") as listener, target.connect("everbeat doctor") as sender:
            listener.execute(sql.SQL("listen {}").format(sql.Identifier(_CHANNEL)))
            sent_at = monotonic()
            sender.execute("select pg_notify(%s, '') where pg_notification_queue_usage() < 0.5", [_CHANNEL])
            for _ in listener.notifies(timeout=within_s, stop_after=1):
                return monotonic() - sent_at
            return None
    except psycopg.Error as problem:
        raise target.explain(problem) from problem


_LEASE_COLUMNS = 14


def waiting(task_id: UUID, *, stale_ms: int, unfit: Sequence[str] = ()) -> Statement[Waiting | None]:
    """Return the facts that show why a task is waiting, or None if the task does not exist.

    A worker without a heartbeat for `stale_ms` is not considered live. `unfit` lists the ids of workers that cannot run the task with its
    arguments.
    """
    parameters = {"id": task_id, "stale_ms": stale_ms, "unfit": list(unfit)}
    return Statement("inspect/read_waiting_task", parameters, _waiting)


def holding(task_id: UUID, *, stale_ms: int) -> Statement[Holding | None]:
    """Return the task's lease and its holder, or None if no worker holds the task."""
    return Statement("inspect/read_lease_holder", {"id": task_id, "stale_ms": stale_ms}, _holding)


def lock_holders(schema: str) -> Statement[list[LockHolder]]:
    """Return up to five sessions that hold locks for which other sessions have been waiting for a long time. The longest wait comes first."""
    parameters = {"schema": schema, "older_than_ms": LONG_WAIT_MS}
    return Statement("inspect/list_lock_holders", parameters, rows.each(LockHolder))


def read_only() -> Statement[ReadOnly | None]:
    """Return where transactions were made read-only by default. Return None on a standby, or if transactions are not read-only by default."""
    return Statement("inspect/read_default_read_only", {}, rows.first(ReadOnly))


def failing_starts(*, stale_ms: int) -> Statement[list[FailingStart]]:
    """Return up to 100 live supervisors that cannot start a worker process.

    A supervisor without a heartbeat for `stale_ms` is not considered live.
    """
    return Statement("inspect/list_failing_starts", {"stale_ms": stale_ms}, rows.each(FailingStart))


def restarting(task_id: UUID | None = None, *, stale_ms: int) -> Statement[tuple[RestartingSupervisor, ...]]:
    """Return up to 100 live supervisors that are starting missing worker processes.

    If `task_id` is set, return only the supervisors whose workers could claim that task.
    """
    parameters = {"task_id": task_id, "stale_ms": stale_ms}
    return Statement(
        "inspect/list_restarting_supervisors",
        parameters,
        lambda found: tuple(RestartingSupervisor(*row) for row in found),
    )


def known_names(*, stale_ms: int) -> Statement[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the names of the tasks and queues that live workers have registered."""

    def read(found: Sequence[Row]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        tasks = tuple(row[1] for row in found if row[0] == "task")
        return tasks, tuple(row[1] for row in found if row[0] == "queue")

    return Statement("inspect/list_known_names", {"stale_ms": stale_ms}, read)


def known_queues(*, stale_ms: int) -> Statement[list[str]]:
    """Return the queues that live workers serve, that are paused, or that have a limit."""
    parameters = {"stale_ms": stale_ms, "of_queue": OF_QUEUE}
    return Statement("inspect/list_known_queues", parameters, rows.first_column)


def movement(workflow_id: UUID, *, stale_ms: int) -> Statement[Movement]:
    """Return whether the workflow is advancing. A worker without a heartbeat for `stale_ms` is not considered live."""
    parameters = {"id": workflow_id, "stale_ms": stale_ms}
    return Statement("inspect/read_workflow_movement", parameters, rows.only(Movement))


def _waiting(found: Sequence[Row]) -> Waiting | None:
    if not found:
        return None
    columns = found[0]
    facts = dict(zip(Waiting.__struct_fields__[:15], columns[:15], strict=True))
    facts["first_state"] = rows.state(facts["first_state"])
    is_standby, lost, quiet, quiet_since, fitting, told = columns[33:]
    return Waiting(
        **facts,
        task_pause=_pause(columns[15:21]),
        queue_pause=_pause(columns[21:27]),
        all_pause=_pause(columns[27:33]),
        is_standby=is_standby,
        lost=lost,
        quiet=quiet,
        quiet_since=quiet_since,
        fitting=fitting,
        registered=read_registered(told),
    )


def _pause(columns: Sequence[Any]) -> Pause | None:
    return None if columns[0] is None else Pause(*columns)


def _holding(found: Sequence[Row]) -> Holding | None:
    if not found:
        return None
    facts, (flags, neighbours, *rest) = found[0][:_LEASE_COLUMNS], found[0][_LEASE_COLUMNS:]
    return Holding(*[*facts, _flags(flags), tuple(neighbours), *rest])


def _flags(text: str | None) -> dict[str, Any]:
    """Return the flags, or no flags if the column is damaged. Recovery treats a damaged column in the same way."""
    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}


_NUMBER: Final = re.compile(r"\d+")


def notify_queue(target: Target) -> NotifyQueue:
    """Return how full PostgreSQL's notification queue is, and which sessions keep it full. Raises DatabaseError on failure.

    No view shows which session keeps the queue full. PostgreSQL includes the session's pid in a warning, which it sends to notifying
    sessions at most once every 5 s.
    """
    pids: list[int] = []

    def noticed(notice: Diagnostic) -> None:
        if found := _NUMBER.search(notice.message_detail or ""):
            pids.append(int(found[0]))

    try:
        with target.connect("everbeat doctor") as connection:
            connection.add_notice_handler(noticed)
            try:
                connection.execute("select pg_notify(%s, '')", [_CHANNEL])
            except psycopg.Error as problem:
                if not is_refused_hint(problem):
                    raise
            pid = pids[0] if pids else None
            found = connection.execute(
                compose("inspect/read_notify_queue", target.schema), {"pid": pid}
            ).fetchall()
    except psycopg.Error as problem:
        raise target.explain(problem) from problem
    holders = tuple(QueueHolder(*row[1:]) for row in found if row[1] is not None)
    return NotifyQueue(found[0][0], holders, is_named=pid is not None)
