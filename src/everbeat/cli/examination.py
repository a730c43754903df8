"""The examination of `everbeat doctor`: asks the database for facts, one subject after the other, and lets the domain judge.

What lives here: the order, and what follows when a question cannot be asked. What may not: the judgements, and showing them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, Final, TypeVar
from uuid import UUID

from everbeat import assembly
from everbeat.app import App
from everbeat.client.explaining import silence_rules
from everbeat.domain import nats_checks, server_checks, work_checks
from everbeat.domain.commands import sweep_command
from everbeat.domain.diagnosis import Check, CheckCode, Crew, Verdict
from everbeat.domain.duration import spelled
from everbeat.domain.locks import judge_locks
from everbeat.domain.nats_checks import NatsTrouble, Outbox, StreamFacts, Told
from everbeat.domain.read_only import ReadOnly
from everbeat.domain.recent_failures import LOOKED_AT_S, MOST_FAILURES, judge_failures
from everbeat.domain.starts import judge_starts
from everbeat.domain.unfit import judge_needs
from everbeat.domain.upgrades import judge_upgrade
from everbeat.errors import DatabaseError, EverbeatError, NatsNotInstalled, SchemaOutdated
from everbeat.runtime.clock import SystemClock
from everbeat.store import (
    diagnosis,
    explanation,
    inspect,
    messages,
    migrations,
    notify_queue,
    pauses,
    workflow_control,
)
from everbeat.store.database import Database
from everbeat.store.statement import Statement
from everbeat.store.target import Target, is_pooled, is_read_only

T = TypeVar("T")
_HEAR_WITHIN_S: Final = 3.0
_LONGEST_WATCH_S: Final = 5.0
_MOST_SNAPSHOTS: Final = 10_000
_MOST_WORKERS: Final = 100_000
_MOST_BAD_ROWS: Final = 100
_MOST_WORKFLOWS: Final = 10_000
_STUCK_MS: Final = 60_000
"""Longer than the pauses of advancers and reconcilers, which repeat a step that failed."""
_OF_THE_LIVING: Final = frozenset(
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
    }
)
"""Checks that a standby cannot answer: it takes no LISTEN, and does not know who lives."""


class Examination:
    """One look at the database of an app, judged by the app's RecoveryConfig. Changes nothing, and never migrates."""

    def __init__(self, app: App, *, long_transaction_s: float) -> None:
        self._app = app
        self._long_transaction_s = long_transaction_s
        self._rules = silence_rules(app.recovery)
        self._alive_within_ms = app.recovery.claimed_stale_threshold_ms
        self._is_standby = False

    def checks(self) -> Iterator[Check]:
        """The checks as they are made; without a database, or a schema that fits, no more follow."""
        target = self._app.door.target
        try:
            check, self._is_standby, pooled = _reach(target)
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
            for code, look in self._looks(database, target, pooled=pooled):
                if self._is_standby and code in _OF_THE_LIVING:
                    yield server_checks.judge_unknown(code)
                    continue
                try:
                    yield look()
                except EverbeatError as error:
                    yield Check(
                        code, Verdict.WARN, f"this could not be looked at: {error.message}", error.fix
                    )
        finally:
            database.close()

    def _schema(self, target: Target) -> Check:
        found = self._app.door.status()
        migrations.require_fit(found, target)
        return Check(CheckCode.SCHEMA, Verdict.OK, found.summary)

    def _upgrade(self) -> Check:
        newest = migrations.known_migrations()[-1].version
        return judge_upgrade(self._app.door.unfinished(), newest_known=newest)

    def _looks(
        self, database: Database, target: Target, *, pooled: bool
    ) -> Iterator[tuple[CheckCode, Callable[[], Check]]]:
        def asked(statement: Statement[T], judge: Callable[[T], Check]) -> Callable[[], Check]:
            return lambda: judge(database.run(statement))

        config, rules, stale_ms = self._app.recovery, self._rules, self._alive_within_ms
        yield CheckCode.RIGHTS, asked(diagnosis.rights(target.schema), server_checks.judge_rights)
        yield CheckCode.UPGRADE, self._upgrade
        yield CheckCode.POOLER, lambda: server_checks.judge_pooler(is_pooled=pooled)
        yield (
            CheckCode.LISTEN,
            lambda: server_checks.judge_listen(
                diagnosis.hear(target, within_s=_HEAR_WITHIN_S), is_pooled=pooled
            ),
        )
        yield (
            CheckCode.NOTIFY_QUEUE,
            lambda: server_checks.judge_notify_queue(notify_queue.look(target)),
        )
        yield CheckCode.NATS, lambda: self._nats(database)
        yield CheckCode.CLOCK, lambda: self._clock(database)
        yield CheckCode.CONNECTIONS, asked(diagnosis.connections(), server_checks.judge_connections)
        yield (
            CheckCode.TRANSACTIONS,
            asked(
                diagnosis.long_transactions(older_than_ms=round(self._long_transaction_s * 1_000)),
                lambda found: server_checks.judge_transactions(
                    found, limit=spelled(self._long_transaction_s)
                ),
            ),
        )
        yield CheckCode.LOCKS, asked(explanation.lock_holders(target.schema), judge_locks)
        yield CheckCode.DEAD_ROWS, asked(diagnosis.dead_rows(target.schema), server_checks.judge_dead_rows)
        yield CheckCode.WORKERS, lambda: work_checks.judge_crew(self._crew(database))
        yield CheckCode.STARTS, asked(explanation.failing_starts(stale_ms=stale_ms), judge_starts)
        yield CheckCode.UNRESPONSIVE, asked(diagnosis.unresponsive(), work_checks.judge_unresponsive)
        silent = diagnosis.silent_trees(silent_ms=2 * config.beat_interval_ms, stale_ms=stale_ms)
        is_watched = config.session_grace_ms / 1_000 <= _LONGEST_WATCH_S
        command = sweep_command(beat_interval_ms=config.beat_interval_ms, schema=target.schema)
        yield (
            CheckCode.TREES,
            asked(
                silent, lambda found: work_checks.judge_trees(found, command=command, is_watched=is_watched)
            ),
        )
        yield (
            CheckCode.BEATS,
            asked(diagnosis.beat_gaps(), lambda gaps: work_checks.judge_beats(gaps, rules=rules)),
        )
        margin_ms = work_checks.LOOKS_MISSED * rules.check_interval_ms
        yield (
            CheckCode.SWEEPER,
            asked(
                diagnosis.unswept(rules, margin_ms=margin_ms, stale_ms=stale_ms),
                lambda found: work_checks.judge_sweeper(found, rules=rules),
            ),
        )
        unserved = diagnosis.unserved(stale_ms=stale_ms)
        yield CheckCode.NAMES, asked(unserved, work_checks.judge_names)
        yield CheckCode.NEEDS, lambda: self._needs(database)
        yield CheckCode.QUEUES, asked(unserved, work_checks.judge_queues)
        yield CheckCode.PAUSES, asked(pauses.pauses(), work_checks.judge_pauses)
        yield CheckCode.SUSPECTS, asked(diagnosis.suspects(), work_checks.judge_suspects)
        failures = diagnosis.failures(within_s=LOOKED_AT_S, most=MOST_FAILURES)
        yield CheckCode.FAILURES, asked(failures, judge_failures)
        yield from self._rows(database)

    def _rows(self, database: Database) -> Iterator[tuple[CheckCode, Callable[[], Check]]]:
        config = self._app.recovery

        def kept() -> Check:
            return work_checks.judge_retention(
                database.run(diagnosis.oldest_records()),
                terminal_hours=config.terminal_record_retention_hours,
                beat_hours=config.heartbeat_retention_hours,
                state_hours=config.worker_state_retention_hours,
            )

        def stuck() -> Check:
            page = database.run(
                workflow_control.stuck(after=UUID(int=0), limit=_MOST_WORKFLOWS, grace_ms=_STUCK_MS)
            )
            return work_checks.judge_stuck({each.workflow_id for each in page.found})

        def bad() -> Check:
            found = database.run(diagnosis.bad_rows(most=_MOST_BAD_ROWS))
            return work_checks.judge_bad_rows(found)

        yield CheckCode.RETENTION, kept
        yield CheckCode.STUCK, stuck
        yield CheckCode.BAD_ROWS, bad

    def _crew(self, database: Database) -> Crew:
        """Who lives. A tree without a session might just be connecting again, so it gets the session grace for that."""
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

    def _clock(self, database: Database) -> Check:
        clock = SystemClock()
        database.run(diagnosis.clocks())  # so that the next one waits for no connection
        asked_at = clock.wall()
        found = database.run(diagnosis.clocks())
        return server_checks.judge_clock(found, asked_at=asked_at, answered_at=clock.wall())

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
        return nats_checks.judge_nats(self._stream(), outbox, self._told(database))

    def _stream(self) -> StreamFacts | NatsTrouble | None:
        """None for an app that has no use for it."""
        nats = self._app.nats
        if nats is None:
            return None
        try:
            return assembly.look_at_nats(self._app.schema, nats, self._app.recovery)
        except NatsNotInstalled as problem:
            return NatsTrouble(refused=True, text=problem.message, fix=problem.fix)

    def _told(self, database: Database) -> Told:
        """By the latest snapshots of live workers."""
        alive = database.run(
            inspect.workers(stale_ms=self._alive_within_ms, ended_too=False, limit=_MOST_WORKERS)
        )
        latest: dict[str, Mapping[str, Any] | None] = {}
        for snapshot in database.run(inspect.worker_states(None, limit=_MOST_SNAPSHOTS)):
            latest.setdefault(snapshot.worker_id, snapshot.messages)
        return Told.of(
            [latest.get(worker.worker_id) for worker in alive if not (worker.is_stale or worker.session_lost)]
        )


def _reach(target: Target) -> tuple[Check, bool, bool]:
    """Whether the server answers and writes, whether it is a standby, and whether a transaction pooler stands before it.

    Raises a DatabaseError.
    """
    with target.connect("everbeat doctor") as connection:
        version = connection.info.server_version
        name = f"PostgreSQL {version // 10_000}.{version % 10_000}"
        pooled, read_only = is_pooled(connection), is_read_only(connection)
    with closing(Database(target, application_name="everbeat doctor")) as database:
        found = database.run(diagnosis.standing())
        set_where = _read_only(database) if read_only and not found.is_standby else None
    check = server_checks.judge_server(found, set_where, name=name, where=target.shown)
    return check, found.is_standby, pooled


def _read_only(database: Database) -> ReadOnly | None:
    try:
        return database.run(explanation.read_only())
    except DatabaseError:  # no schema of this version, which is the finding of the next check
        return ReadOnly("", for_workers=False)


def _failed(code: CheckCode, error: EverbeatError) -> Check:
    return Check(code, Verdict.FAIL, error.message, error.fix)
