"""The checks of `everbeat doctor` and of the dashboard: queries the database for the facts of each, which `domain.doctor` judges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

from everbeat import assembly
from everbeat.app import App
from everbeat.client.database_access import database_of
from everbeat.client.explaining import silence_rules
from everbeat.domain.doctor import nats, server, work
from everbeat.domain.doctor.batches import judge_batches
from everbeat.domain.doctor.bulk_actions import judge_bulk_actions
from everbeat.domain.doctor.findings import Check, CheckCode, Crew, sweep_command
from everbeat.domain.doctor.limits import SET_MS, judge_limits
from everbeat.domain.doctor.nats import NatsConnections, NatsTrouble, Outbox, StreamFacts
from everbeat.domain.doctor.schedules import OVERDUE_MS, judge_schedules
from everbeat.domain.doctor.server import ReadOnly, judge_locks, judge_upgrade
from everbeat.domain.doctor.work import (
    HANDLERS_WINDOW_S,
    MOST_FAILURES,
    WINDOW_S,
    judge_failures,
    judge_starts,
)
from everbeat.domain.explain.waiting import judge_needs
from everbeat.domain.schedule.timing import zone_is_known
from everbeat.domain.settings.units import spelled_duration
from everbeat.errors import DatabaseError, EverbeatError, NatsNotInstalled, SchemaOutdated
from everbeat.runtime.clock import SystemClock
from everbeat.store import (
    batches,
    bulk,
    diagnosis,
    inspection,
    limits,
    messages,
    migrations,
    schedules,
    tasks,
    workflow_control,
)
from everbeat.store.database import Database
from everbeat.store.statement import Statement
from everbeat.store.target import Target, is_pooled, is_read_only

T = TypeVar("T")
_HEAR_WITHIN_S: Final = 3.0
_LONGEST_WATCH_S: Final = 5.0
_APPLIED_WITHIN_S: Final = 2.0
_MOST_SNAPSHOTS: Final = 10_000
_MOST_WORKERS: Final = 100_000
_MOST_BAD_ROWS: Final = 100
_MOST_WORKFLOWS: Final = 10_000
_STUCK_MS: Final = 60_000
"""A workflow step that is this late is stuck. The time is longer than the retry intervals of advancers and reconcilers."""
_NEED_LIVENESS: Final = frozenset(
    {
        CheckCode.LISTEN,
        CheckCode.NOTIFY_QUEUE,
        CheckCode.WORKERS,
        CheckCode.STARTS,
        CheckCode.UNRESPONSIVE,
        CheckCode.TREES,
        CheckCode.SWEEPER,
        CheckCode.NAMES,
        CheckCode.NEEDS,
        CheckCode.QUEUES,
        CheckCode.SCHEDULES,
        CheckCode.LIMITS,
        CheckCode.BULK_ACTIONS,
    }
)
"""Checks that cannot run on a standby, because it rejects LISTEN and does not know which workers are alive."""


class Examination:
    """Checks an app's database against the app's RecoveryConfig. It is read-only and never migrates."""

    def __init__(self, app: App, *, long_transaction_s: float) -> None:
        self._app = app
        self._long_transaction_s = long_transaction_s
        self._rules = silence_rules(app.recovery)
        self._alive_within_ms = app.recovery.claimed_stale_threshold_ms
        self._is_standby = False

    def checks(self) -> Iterator[Check]:
        """Yield each check as soon as it is done. Stop early if the database is unreachable or has no compatible schema."""
        target = database_of(self._app).target
        try:
            check, self._is_standby, pooled = _server_check(target)
        except DatabaseError as error:
            yield _failed(CheckCode.DATABASE, error)
            return
        yield check
        try:
            yield self._schema(target)
        except DatabaseError as error:
            yield _failed(CheckCode.SCHEMA, error)
            if isinstance(error, SchemaOutdated):
                yield self._upgrade()
            return
        database = Database(target, application_name="everbeat doctor")
        try:
            for code, run in self._remaining(database, target, pooled=pooled):
                if self._is_standby and code in _NEED_LIVENESS:
                    yield server.judge_unknown(code)
                    continue
                try:
                    yield run()
                except EverbeatError as error:
                    text = f"this check failed to run: {error.message}"
                    yield code.warn(text, error.fix)
        finally:
            database.close()

    def _schema(self, target: Target) -> Check:
        found = database_of(self._app).status()
        migrations.require_fit(found, target)
        return CheckCode.SCHEMA.ok(found.summary)

    def _upgrade(self) -> Check:
        newest = migrations.known_migrations()[-1].version
        return judge_upgrade(database_of(self._app).unfinished(), newest_known=newest)

    def _remaining(
        self, database: Database, target: Target, *, pooled: bool
    ) -> Iterator[tuple[CheckCode, Callable[[], Check]]]:
        def judged(statement: Statement[T], judge: Callable[[T], Check]) -> Callable[[], Check]:
            return lambda: judge(database.run(statement))

        config, rules, stale_ms = self._app.recovery, self._rules, self._alive_within_ms
        yield CheckCode.RIGHTS, judged(diagnosis.rights(target.schema), server.judge_rights)
        yield CheckCode.UPGRADE, self._upgrade
        yield CheckCode.POOLER, lambda: server.judge_pooler(is_pooled=pooled)
        yield (
            CheckCode.LISTEN,
            lambda: server.judge_listen(diagnosis.hear(target, within_s=_HEAR_WITHIN_S), is_pooled=pooled),
        )
        yield (
            CheckCode.NOTIFY_QUEUE,
            lambda: server.judge_notify_queue(diagnosis.notify_queue(target)),
        )
        yield CheckCode.NATS, lambda: self._nats(database)
        yield CheckCode.CLOCK, lambda: self._clock(database)
        yield CheckCode.CONNECTIONS, judged(diagnosis.connections(), server.judge_connections)
        yield (
            CheckCode.TRANSACTIONS,
            judged(
                diagnosis.long_transactions(older_than_ms=round(self._long_transaction_s * 1_000)),
                lambda found: server.judge_transactions(
                    found, limit=spelled_duration(self._long_transaction_s)
                ),
            ),
        )
        yield CheckCode.LOCKS, judged(diagnosis.lock_holders(target.schema), judge_locks)
        yield CheckCode.DEAD_ROWS, judged(diagnosis.dead_rows(target.schema), server.judge_dead_rows)
        yield CheckCode.WORKERS, lambda: work.judge_crew(self._crew(database))
        yield CheckCode.STARTS, judged(diagnosis.failing_starts(stale_ms=stale_ms), judge_starts)
        yield CheckCode.UNRESPONSIVE, judged(diagnosis.unresponsive(), work.judge_unresponsive)
        silent = diagnosis.silent_trees(silent_ms=2 * config.beat_interval_ms, stale_ms=stale_ms)
        is_watched = config.session_grace_ms / 1_000 <= _LONGEST_WATCH_S
        command = sweep_command(beat_interval_ms=config.beat_interval_ms, schema=target.schema)
        yield (
            CheckCode.TREES,
            judged(silent, lambda found: work.judge_trees(found, command=command, is_watched=is_watched)),
        )
        yield (
            CheckCode.BEATS,
            judged(diagnosis.beat_gaps(), lambda gaps: work.judge_beats(gaps, rules=rules)),
        )
        margin_ms = work.SWEEPS_MISSED * rules.check_interval_ms
        yield (
            CheckCode.SWEEPER,
            judged(
                diagnosis.unswept(rules, margin_ms=margin_ms, stale_ms=stale_ms),
                lambda found: work.judge_sweeper(found, rules=rules),
            ),
        )
        unserved = diagnosis.unserved(stale_ms=stale_ms)
        yield CheckCode.NAMES, judged(unserved, work.judge_names)
        yield CheckCode.NEEDS, lambda: self._needs(database)
        yield CheckCode.QUEUES, judged(unserved, work.judge_queues)
        yield CheckCode.PAUSES, judged(tasks.pauses(), work.judge_pauses)
        yield CheckCode.SCHEDULES, lambda: self._schedules(database)
        yield CheckCode.LIMITS, lambda: self._limits(database)
        yield CheckCode.BATCHES, judged(batches.find_forgotten(), judge_batches)
        yield CheckCode.BULK_ACTIONS, judged(bulk.problems(), judge_bulk_actions)
        yield CheckCode.SUSPECTS, judged(diagnosis.suspects(), work.judge_suspects)
        failures = diagnosis.failures(within_s=WINDOW_S, most=MOST_FAILURES)
        yield CheckCode.FAILURES, judged(failures, judge_failures)
        unsent = diagnosis.unsent_handlers(within_s=HANDLERS_WINDOW_S, most=MOST_FAILURES)
        yield CheckCode.HANDLERS, judged(unsent, work.judge_handlers)
        yield from self._records(database)

    def _records(self, database: Database) -> Iterator[tuple[CheckCode, Callable[[], Check]]]:
        config = self._app.recovery
        retentions = partial(
            work.judge_retention,
            terminal_hours=config.terminal_record_retention_hours,
            beat_hours=config.heartbeat_retention_hours,
            state_hours=config.worker_state_retention_hours,
        )
        yield CheckCode.RETENTION, lambda: retentions(database.run(diagnosis.oldest_records()))
        stuck = workflow_control.stuck(after=UUID(int=0), limit=_MOST_WORKFLOWS, grace_ms=_STUCK_MS)
        yield (
            CheckCode.STUCK,
            lambda: work.judge_stuck({each.workflow_id for each in database.run(stuck).found}),
        )

        def bad_rows() -> Check:
            found = database.run(diagnosis.bad_rows(most=_MOST_BAD_ROWS))
            return work.judge_bad_rows(found)

        yield CheckCode.BAD_ROWS, bad_rows

    def _crew(self, database: Database) -> Crew:
        """Return the live workers and supervisors. If a tree has no session, allow it the session grace period to reconnect."""
        crew = diagnosis.crew(stale_ms=self._alive_within_ms)
        found = database.run(crew)
        if not found.lost:
            return found
        time.sleep(min(self._app.recovery.session_grace_ms / 1_000, _LONGEST_WATCH_S))
        return database.run(crew)

    def _needs(self, database: Database) -> Check:
        marked = database.run(diagnosis.marked())
        names = {each.name for each in marked}
        crew = database.run(diagnosis.knowing(names, stale_ms=self._alive_within_ms)) if names else []
        return judge_needs(marked, crew)

    def _schedules(self, database: Database) -> Check:
        found = database.run(schedules.find_problems(overdue_ms=OVERDUE_MS))
        return judge_schedules(found, unknown_zones=[zone for zone in found.zones if not zone_is_known(zone)])

    def _limits(self, database: Database) -> Check:
        found = database.run(limits.find_problems(set_ms=SET_MS))
        unapplied = False
        if found.changes and database.run(diagnosis.crew(stale_ms=self._alive_within_ms)).workers:
            # Workers apply changes within a second, so a number that does not fall is a problem.
            oldest = database.run(limits.oldest_change())
            time.sleep(_APPLIED_WITHIN_S)
            unapplied = oldest is not None and database.run(limits.oldest_change()) == oldest
        return judge_limits(found, unapplied=unapplied)

    def _clock(self, database: Database) -> Check:
        clock = SystemClock()
        database.run(
            diagnosis.clocks()
        )  # connect first, so that the measured query does not include the connection time
        asked_at = clock.wall()
        found = database.run(diagnosis.clocks())
        return server.judge_clock(found, asked_at=asked_at, answered_at=clock.wall())

    def _nats(self, database: Database) -> Check:
        share = None if self._app.nats is None else self._app.nats.share
        window = messages.WINDOW if share is None else min(messages.WINDOW, share)
        relay = database.run(messages.relay_state(window=window))
        outbox = (
            None
            if relay is None
            else Outbox(
                holder=relay.holder,
                waiting=relay.waiting,
                oldest_s=relay.oldest_s,
                failing=relay.failing,
            )
        )
        return nats.judge_nats(self._stream(), outbox, self._connections(database))

    def _stream(self) -> StreamFacts | NatsTrouble | None:
        """Return the facts about the NATS stream, or None if the app does not use NATS."""
        nats = self._app.nats
        if nats is None:
            return None
        try:
            return assembly.inspect_nats(self._app.schema, nats, self._app.recovery)
        except NatsNotInstalled as problem:
            return NatsTrouble(refused=True, text=problem.message, fix=problem.fix)

    def _connections(self, database: Database) -> NatsConnections:
        """Return a summary of the NATS connections in the live workers' latest snapshots."""
        alive = database.run(
            inspection.workers(stale_ms=self._alive_within_ms, ended_too=False, limit=_MOST_WORKERS)
        )
        latest: dict[str, Mapping[str, Any] | None] = {}
        for snapshot in database.run(inspection.worker_states(None, limit=_MOST_SNAPSHOTS)):
            latest.setdefault(snapshot.worker_id, snapshot.messages)
        return NatsConnections.of(
            [latest.get(worker.worker_id) for worker in alive if not (worker.is_stale or worker.session_lost)]
        )


def _server_check(target: Target) -> tuple[Check, bool, bool]:
    """Return the server check, whether the server is a standby, and whether it is behind a transaction pooler.

    Raises a DatabaseError.
    """
    with target.connect("everbeat doctor") as connection:
        version = connection.info.server_version
        name = f"PostgreSQL {version // 10_000}.{version % 10_000}"
        pooled, read_only = is_pooled(connection), is_read_only(connection)
    with closing(Database(target, application_name="everbeat doctor")) as database:
        found = database.run(diagnosis.standing())
        set_where = _read_only(database) if read_only and not found.is_standby else None
    check = server.judge_server(found, set_where, name=name, where=target.shown)
    return check, found.is_standby, pooled


def _read_only(database: Database) -> ReadOnly | None:
    try:
        return database.run(diagnosis.read_only())
    except DatabaseError:  # the schema has a different version, which the next check reports
        return ReadOnly("", for_workers=False)


def _failed(code: CheckCode, error: EverbeatError) -> Check:
    return code.fail(error.message, error.fix)
