"""Create the schema, or upgrade a schema in use step by step, so that no sender or worker waits long for a lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from random import Random
from time import monotonic
from typing import Any, Final

import psycopg
from msgspec import Struct
from psycopg import Connection, sql

from everbeat.domain.doctor.server import DoneStep, LockHolder, UnfinishedUpgrade
from everbeat.domain.settings.units import spelled_duration
from everbeat.errors import MigrationStopped, SchemaForbidden
from everbeat.runtime.clock import Backoff
from everbeat.store import migrations
from everbeat.store.connection import ConnectLimit, WatchedConnection, limited
from everbeat.store.migrations import LOCK_TIMEOUT_MS, Migration, MigrationStep, record_of, steps_of
from everbeat.store.rows import Row
from everbeat.store.statement import compose
from everbeat.store.target import Target, is_pooled, transaction

_FIRST_CHECK_S: Final = 0.1
"""The delay before the first check. It is short enough to see the lock's holder before the lock timeout ends the wait."""
_CHECK_S: Final = 1.0
_CONNECT_S: Final = 5.0


class Wait(Struct, frozen=True):
    """The reason why a statement is waiting: a lock on the table `wanted`, or the end of other transactions (`wanted` is None).

    `holders` lists the blocking sessions, oldest first.
    """

    wanted: str | None
    holders: tuple[LockHolder, ...]
    begun: tuple[datetime | None, ...]
    only_vacuum: bool

    @property
    def held_by(self) -> str:
        """Return a phrase that names the sessions that hold the lock."""
        named = [
            holder.who
            if began_at is None
            else f"{holder.who}, whose transaction began at {began_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
            for holder, began_at in zip(self.holders, self.begun, strict=True)
        ]
        return "; ".join(named)


class LockWatch:
    """A watch that wraps the connection's own watch and finds the sessions that block a statement.

    `seen` describes what the last statement was waiting for.
    """

    def __init__(
        self, connection: WatchedConnection, target: Target, on_wait: Callable[[Wait], None]
    ) -> None:
        self._connection = connection
        self._target = target
        self._on_wait = on_wait
        self._inner = connection.watch
        self._second: WatchedConnection | None = None
        self._check_at = 0.0
        self.seen: Wait | None = None

    def begin(self) -> None:
        """Start watching a statement that has just been sent."""
        self._check_at = monotonic() + _FIRST_CHECK_S
        self.seen = None
        if self._inner is not None:
            self._inner.begin()

    def silent(self) -> None:
        """Look up the holders of the lock if the next check is due."""
        if self._inner is not None:
            self._inner.silent()
        if monotonic() < self._check_at:
            return
        found = self._blockers()
        self._check_at = monotonic() + _CHECK_S
        if found:
            self.seen = _wait(found)
            self._on_wait(self.seen)

    def arrived(self) -> None:
        """Pass the event on to the connection's own watch."""
        if self._inner is not None:
            self._inner.arrived()

    def end(self) -> None:
        """Stop watching: the statement has finished or failed."""
        if self._inner is not None:
            self._inner.end()

    def close(self) -> None:
        """Restore the connection's own watch, and close the second connection."""
        self._connection.watch = self._inner
        if self._second is not None:
            self._second.close()

    def _blockers(self) -> Sequence[Row]:
        try:
            if self._second is None:
                with limited(ConnectLimit(ends_at=monotonic() + _CONNECT_S, hosts=1)):
                    self._second = WatchedConnection.connect(
                        self._target.twin_of(self._connection), autocommit=True
                    )
            question = compose("schema/blockers", self._target.schema)
            return self._second.execute(question, {"pid": self._connection.server_pid}).fetchall()
        except (psycopg.Error, OSError):  # the upgrade continues without naming the holder
            with suppress(psycopg.Error):
                if self._second is not None:
                    self._second.close()
            self._second = None
            return []


def session_of(
    pid: int | None, session: str | None, role: str | None, state: str | None, event: str | None, since: Any
) -> LockHolder:
    """Return the holder of a lock as the server reports it."""
    return LockHolder(pid, session, role, state, event, waiters=1, since=since, waited_s=0.0, hostname=None)


def _wait(found: Sequence[Row]) -> Wait:
    return Wait(
        wanted=found[0][0],
        holders=tuple(session_of(*row[1:7]) for row in found),
        begun=tuple(row[6] for row in found),
        only_vacuum=all(row[7] for row in found),
    )


DEFAULT_LOCK_PATIENCE_S: Final = 600.0
_LOCK_POLL_S: Final = 0.25
_CLEANING_MS: Final = 2_000
_LONGEST_DEADLOCK_MS: Final = 2_000
_AGAIN: Final = "then run 'everbeat migrate' again, which continues at this step."

Report = Callable[[str], None]


def report_nothing(_: str) -> None:
    """Discard a progress line. Used by callers that do not show the progress of a migration."""


class Upgrade:
    """Runs the steps of migrations in one session, each step exactly once. `report` receives a line for each step and each wait."""

    def __init__(
        self, connection: WatchedConnection, target: Target, *, patience_s: float, report: Report
    ) -> None:
        self._connection = connection
        self._target = target
        self._patience_s = patience_s
        self._report = report
        self._random = Random()
        self._deadlock_ms = 1_000
        self._last_reported = ""
        self._watch = LockWatch(connection, target, self._on_wait)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block, keep other sessions from upgrading this schema.

        Raises MigrationStopped if the database is behind a transaction pooler.
        """
        if is_pooled(self._connection):
            raise MigrationStopped(
                f"The database at {self._target.shown!r} is behind a transaction pooler, and an upgrade needs one session from start to end.",
                fix="give 'everbeat migrate' the URL of the server itself; a pooler that keeps one session for each client is"
                " named in the URL with pooler=session.",
            )
        key = {"lock_key": self._target.lock_key("migrations")}
        self._take_lock(key)
        self._connection.watch = self._watch
        try:
            wait_ms = {"wait_ms": round(self._patience_s * 1_000)}
            self._deadlock_ms = self._ask("schema/begin_upgrade", wait_ms)[0][1]
            yield
        finally:
            self._watch.close()
            with suppress(psycopg.Error):  # the session is gone, and its lock with it
                self._ask("schema/end_upgrade", key)

    def apply(self, migration: Migration) -> None:
        """Run the remaining steps of a migration, then record its version. Raises MigrationStopped or psycopg.Error if a step fails."""
        done = {row[0] for row in self._ask("schema/done_steps", {"version": migration.version})}
        for step in steps_of(migration):
            if step.name not in done:
                began_at = monotonic()
                try:
                    self._once_free(step)
                except psycopg.Error:
                    self._report(f"{_title(step)}: failed.")
                    raise
                self._report(f"{_title(step)}: done in {monotonic() - began_at:.1f} s.")
        record = record_of(migration, self._target.schema)
        self._connection.execute(record.encode(), prepare=False)

    def _once_free(self, step: MigrationStep) -> None:
        """Run the step, and retry it while another session holds a lock. Raises MigrationStopped if the lock is not released in time."""
        ends_at, timeout_ms = monotonic() + self._patience_s, LOCK_TIMEOUT_MS
        backoff = Backoff(first_s=0.5, longest_s=10.0, spread=(0.5, 1.5), random=self._random)
        while True:
            self._step = step
            try:
                if step.is_concurrent:
                    self._concurrently(step)
                else:
                    text = step.in_transaction(self._target.schema, lock_timeout_ms=timeout_ms)
                    self._connection.execute(text.encode(), prepare=False)
                return
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as problem:
                seen = self._watch.seen
                left_s = ends_at - monotonic()
                if left_s <= 0:
                    raise self._blocked(step, seen) from problem
            timeout_ms = self._next_timeout(seen)
            time.sleep(min(backoff.next(), left_s))

    def _next_timeout(self, seen: Wait | None) -> int:
        # PostgreSQL cancels an autovacuum for a waiting session only after deadlock_timeout, which is longer than a try usually waits.
        if seen is not None and seen.only_vacuum and self._deadlock_ms <= _LONGEST_DEADLOCK_MS:
            return self._deadlock_ms + LOCK_TIMEOUT_MS
        return LOCK_TIMEOUT_MS

    def _concurrently(self, step: MigrationStep) -> None:
        """Build or drop an index concurrently.

        An invalid index that an interrupted build left behind is dropped first. An index that is already complete is kept.
        """
        schema = self._target.schema
        found = self._ask("schema/index_state", {"schema": schema, "index": step.index})
        is_done = not found if step.drops else bool(found) and found[0][0]
        if not is_done:
            if found and not step.drops:
                self._report(
                    f"{_title(step)}: dropping the invalid index {step.index}, which an unfinished build left behind."
                )
                self._drop(step.index)
            self._report(f"{_title(step)}: {'drops' if step.drops else 'builds'} the index {step.index}.")
            try:
                self._connection.execute(step.text(schema).encode(), prepare=False)
            except psycopg.errors.UniqueViolation as problem:
                raise self._duplicates(step, problem) from problem
        self._connection.execute(step.record(schema).encode(), prepare=False)

    def _drop(self, index: str) -> None:
        drop = sql.SQL("drop index concurrently {}").format(sql.Identifier(self._target.schema, index))
        self._connection.execute(drop, prepare=False)

    def _duplicates(self, step: MigrationStep, problem: psycopg.errors.UniqueViolation) -> MigrationStopped:
        ((table, columns, predicate),) = self._ask(
            "schema/duplicates_of_index", {"schema": self._target.schema, "index": step.index}
        )
        where = "" if predicate is None else f" where {predicate}"
        # The query is shown, not run; its parts come from the catalog.
        query = f"select {columns}, count(*) from {table}{where} group by {columns} having count(*) > 1"  # noqa: S608
        with suppress(
            psycopg.Error
        ):  # even an invalid index refuses rows; if this fails, the next run drops the index
            self._connection.execute(f"set lock_timeout = {_CLEANING_MS}".encode())
            self._drop(step.index)
        return MigrationStopped(
            f"{_title(step)} cannot build the unique index {step.index}: {problem.diag.message_detail or problem}",
            fix=f"run '{query}' to list the duplicates, remove them, {_AGAIN}",
        )

    def _blocked(self, step: MigrationStep, seen: Wait | None) -> MigrationStopped:
        waited = (
            f"{_title(step)} could not acquire its lock within {spelled_duration(round(self._patience_s, 3))}"
        )
        if seen is None:
            return MigrationStopped(
                f"{waited}.", fix=f"look for long transactions with 'everbeat doctor', {_AGAIN}"
            )
        where = f" on {self._target.schema}.{seen.wanted}" if seen.wanted else ""
        return MigrationStopped(
            f"{waited}{where}. It is waiting for {seen.held_by}.",
            fix=f"end that transaction, for example by {seen.holders[0].command}, {_AGAIN}",
        )

    def _on_wait(self, wait: Wait) -> None:
        subject = "the end of a transaction" if wait.wanted is None else f"a lock on {wait.wanted}"
        text = f"{_title(self._step)}: waits for {subject}, held by {wait.held_by}."
        if text != self._last_reported:
            self._last_reported = text
            self._report(text)

    def _take_lock(self, key: dict[str, Any]) -> None:
        has_reported = False
        while not self._ask("schema/try_lock_upgrade", key)[0][0]:
            if not has_reported:
                found = self._ask("schema/migrator", key)
                who = session_of(*found[0]).who if found else "another session"
                self._report(f"Another migration is in progress: {who}. Waiting for it to finish.")
                has_reported = True
            time.sleep(_LOCK_POLL_S * (0.5 + self._random.random()))

    def _ask(self, name: str, parameters: dict[str, Any]) -> list[Row]:
        return self._connection.execute(compose(name, self._target.schema), parameters).fetchall()


def _title(step: MigrationStep) -> str:
    return f"Version {step.version}, step {step.name}"


def unfinished(connection: Connection[Any], target: Target) -> UnfinishedUpgrade:
    """Return the state of an unfinished upgrade.

    Its steps are empty if the schema is at version 10 or older, or if the role cannot read the table of steps.
    """

    def asked(name: str, **parameters: object) -> list[tuple[Any, ...]]:
        return connection.execute(compose(f"schema/{name}", target.schema), parameters).fetchall()

    table = sql.Identifier(target.schema, "schema_steps").as_string(connection)
    ((is_readable,),) = asked("steps_readable", steps_table=table)
    steps = asked("unfinished_steps") if is_readable else []
    invalid = asked("invalid_indexes", schema=target.schema)
    migrators = asked("migrator", lock_key=target.lock_key("migrations"))
    return UnfinishedUpgrade(
        schema=target.schema,
        steps=tuple(DoneStep(*row) for row in steps),
        invalid_indexes=tuple(name for (name,) in invalid),
        migrator=session_of(*migrators[0]) if migrators else None,
    )


def migrate(
    connection: WatchedConnection,
    target: Target,
    *,
    to: int | None = None,
    only_absent: bool = False,
    patience_s: float = DEFAULT_LOCK_PATIENCE_S,
    report: Report = report_nothing,
) -> tuple[int, ...]:
    """Create the schema in one transaction, or upgrade it step by step, up to version `to`. Return the applied versions.

    If `only_absent` is set, create a missing schema but never upgrade an existing one, even if another program creates it in the meantime.
    `patience_s` is how long each upgrade step tries to acquire its lock. `report` receives a line for each step and each wait. A newer
    schema that supports this code is left unchanged. Raises SchemaFromTheFuture, SchemaGone, SchemaForbidden, MigrationStopped or another
    DatabaseError if the schema cannot be migrated.
    """
    try:
        pending = _pending(connection, target, to)
        if not pending.migrations:
            return ()
        if pending.is_absent and (created := _create(connection, target, to)):
            return created
        if only_absent:
            return ()
        return _upgrade(
            connection, target, to, Upgrade(connection, target, patience_s=patience_s, report=report)
        )
    except psycopg.Error as problem:
        raise target.explain(problem) from problem


class _Pending(Struct, frozen=True):
    """The migrations to apply, and whether the schema is missing."""

    migrations: tuple[Migration, ...]
    is_absent: bool


def _pending(connection: Connection[Any], target: Target, to: int | None) -> _Pending:
    """Return the migrations to apply. Raises SchemaFromTheFuture if the schema is too new for this code, and SchemaGone if it was renamed."""
    found = migrations.status(connection, target)
    if found.is_too_new:
        migrations.require_fit(found, target)
    migrations.require_own_name(found, target)
    pending = [
        each
        for each in migrations.known_migrations()
        if each.version in found.pending and (to is None or each.version <= to)
    ]
    return _Pending(tuple(pending), is_absent=not found.applied)


def _create(connection: Connection[Any], target: Target, to: int | None) -> tuple[int, ...]:
    """Create a missing schema with all versions in one transaction.

    Return an empty tuple if another process has created the schema in the meantime.
    """
    with transaction(connection):
        connection.execute(
            compose("schema/lock_migrations", target.schema), {"lock_key": target.lock_key("migrations")}
        )
        pending = _pending(connection, target, to)
        if not pending.is_absent:
            return ()
        there = connection.execute(
            compose("schema/schema_exists", target.schema),
            {"schema": target.schema, "versions_table": "pg_class"},
        ).fetchone()
        if there is None or not there[0]:
            connection.execute(compose("schema/create_schema", target.schema))
        for name in ("schema/versions_table", "schema/steps_table"):
            connection.execute(compose(name, target.schema))
        for migration in pending.migrations:
            for name in migration.statements:
                connection.execute(compose(name, target.schema))
            connection.execute(record_of(migration, target.schema).encode())
    return tuple(migration.version for migration in pending.migrations)


def _upgrade(
    connection: WatchedConnection, target: Target, to: int | None, upgrade: Upgrade
) -> tuple[int, ...]:
    """Apply the migrations that no other process has applied in the meantime.

    Raises SchemaForbidden, MigrationStopped or psycopg.Error if a step fails.
    """
    with upgrade.alone():
        pending = _pending(connection, target, to)
        if not pending.migrations:
            return ()
        try:
            for name in ("schema/versions_table", "schema/steps_table"):
                connection.execute(compose(name, target.schema))
            for migration in pending.migrations:
                upgrade.apply(migration)
        except psycopg.errors.InsufficientPrivilege as problem:
            fix = "run 'everbeat migrate' as the role that owns the schema and its tables."
            raise SchemaForbidden(target.explain(problem).message, fix=fix) from problem
        return tuple(migration.version for migration in pending.migrations)


def drop(connection: Connection[Any], target: Target) -> None:
    """Drop the schema and everything in it, if it exists. Raises DatabaseError on failure."""
    try:
        connection.execute(compose("schema/drop_schema", target.schema))
    except psycopg.Error as problem:
        raise target.explain(problem) from problem
