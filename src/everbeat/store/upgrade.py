"""The upgrade of a schema that is in use: step by step, so that no statement of a sender or a worker waits long behind it.

Each transactional step is one message to the server: it takes its lock, changes the schema and records itself, whatever happens to this
process. The lock of migrations belongs to the same session, so a migrator that loses its connection has lost the lock and does nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from time import monotonic
from typing import Any, Final

import psycopg
from psycopg import sql

from everbeat.domain.duration import spelled
from everbeat.errors import MigrationStopped
from everbeat.store.lock_watch import LockWatch, Wait, session_of
from everbeat.store.migrations import Migration
from everbeat.store.schema_steps import LOCK_TIMEOUT_MS, Step, record_of, steps_of
from everbeat.store.silence import WatchedConnection
from everbeat.store.statement import Row, compose
from everbeat.store.target import Target, is_pooled

DEFAULT_LOCK_PATIENCE_S: Final = 600.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 10.0
_LOCK_POLL_S: Final = 0.25
_CLEANING_MS: Final = 2_000
_LONGEST_DEADLOCK_MS: Final = 2_000
_AGAIN: Final = "then run 'everbeat migrate' again, which goes on at this step."

Tell = Callable[[str], None]


def tell_nobody(_: str) -> None:
    """Drop a line: the caller does not show what a migration does."""


class Upgrade:
    """Applies the steps of migrations on one session, each once. `tell` gets one line for each step and each wait."""

    def __init__(
        self, connection: WatchedConnection, target: Target, *, patience_s: float, tell: Tell
    ) -> None:
        self._connection = connection
        self._target = target
        self._patience_s = patience_s
        self._tell = tell
        self._random = Random()
        self._deadlock_ms = 1_000
        self._last_told = ""
        self._watch = LockWatch(connection, target, self._on_wait)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block, no other session upgrades this schema. Raises MigrationStopped behind a transaction pooler."""
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
        """Do the steps that are not done yet, then record the version. Raises MigrationStopped, psycopg.Error."""
        done = {row[0] for row in self._ask("schema/done_steps", {"version": migration.version})}
        for step in steps_of(migration):
            if step.name not in done:
                began_at = monotonic()
                try:
                    self._once_free(step)
                except psycopg.Error:
                    self._tell(f"{_title(step)}: failed.")
                    raise
                self._tell(f"{_title(step)}: done in {monotonic() - began_at:.1f} s.")
        record = record_of(migration, self._target.schema)
        self._connection.execute(record.encode(), prepare=False)

    def _once_free(self, step: Step) -> None:
        """Do the step, again and again while a lock is in the way and the patience lasts."""
        ends_at, pause_s, timeout_ms = monotonic() + self._patience_s, _FIRST_PAUSE_S, LOCK_TIMEOUT_MS
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
            time.sleep(min(pause_s * (0.5 + self._random.random()), left_s))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _next_timeout(self, seen: Wait | None) -> int:
        # PostgreSQL cancels an autovacuum for a waiting session only after deadlock_timeout, which is longer than a try usually waits.
        if seen is not None and seen.only_vacuum and self._deadlock_ms <= _LONGEST_DEADLOCK_MS:
            return self._deadlock_ms + LOCK_TIMEOUT_MS
        return LOCK_TIMEOUT_MS

    def _concurrently(self, step: Step) -> None:
        """Build or drop an index. A build that was cut off left an invalid index, which is dropped; a finished one is accepted."""
        schema = self._target.schema
        found = self._ask("schema/index_state", {"schema": schema, "index": step.index})
        is_done = not found if step.drops else bool(found) and found[0][0]
        if not is_done:
            if found and not step.drops:
                self._tell(
                    f"{_title(step)}: drops the invalid index {step.index} of a build that did not finish."
                )
                self._drop(step.index)
            self._tell(f"{_title(step)}: {'drops' if step.drops else 'builds'} the index {step.index}.")
            try:
                self._connection.execute(step.text(schema).encode(), prepare=False)
            except psycopg.errors.UniqueViolation as problem:
                raise self._duplicates(step, problem) from problem
        self._connection.execute(step.record(schema).encode(), prepare=False)

    def _drop(self, index: str) -> None:
        drop = sql.SQL("drop index concurrently {}").format(sql.Identifier(self._target.schema, index))
        self._connection.execute(drop, prepare=False)

    def _duplicates(self, step: Step, problem: psycopg.errors.UniqueViolation) -> MigrationStopped:
        ((table, columns, predicate),) = self._ask(
            "schema/duplicates_of_index", {"schema": self._target.schema, "index": step.index}
        )
        where = "" if predicate is None else f" where {predicate}"
        # Shown, not run; its parts come from the catalogue.
        query = f"select {columns}, count(*) from {table}{where} group by {columns} having count(*) > 1"  # noqa: S608
        with suppress(
            psycopg.Error
        ):  # while it is there it refuses rows, although it is invalid; the next run drops it too
            self._connection.execute(f"set lock_timeout = {_CLEANING_MS}".encode())
            self._drop(step.index)
        return MigrationStopped(
            f"{_title(step)} cannot build the unique index {step.index}: {problem.diag.message_detail or problem}",
            fix=f"list the duplicates with '{query}' and remove them, {_AGAIN}",
        )

    def _blocked(self, step: Step, seen: Wait | None) -> MigrationStopped:
        waited = f"{_title(step)} got no lock within {spelled(round(self._patience_s, 3))}"
        if seen is None:
            return MigrationStopped(
                f"{waited}.", fix=f"look for long transactions with 'everbeat doctor', {_AGAIN}"
            )
        where = f" on {self._target.schema}.{seen.wanted}" if seen.wanted else ""
        return MigrationStopped(
            f"{waited}{where}. It waits for {seen.held_by}.",
            fix=f"end that transaction, for example by {seen.holders[0].command}, {_AGAIN}",
        )

    def _on_wait(self, wait: Wait) -> None:
        subject = "the end of a transaction" if wait.wanted is None else f"a lock on {wait.wanted}"
        text = f"{_title(self._step)}: waits for {subject}, held by {wait.held_by}."
        if text != self._last_told:
            self._last_told = text
            self._tell(text)

    def _take_lock(self, key: dict[str, Any]) -> None:
        has_told = False
        while not self._ask("schema/try_lock_upgrade", key)[0][0]:
            if not has_told:
                found = self._ask("schema/migrator", key)
                who = session_of(*found[0]).who if found else "another session"
                self._tell(f"Another migration is under way: {who}. This one waits until it ends.")
                has_told = True
            time.sleep(_LOCK_POLL_S * (0.5 + self._random.random()))

    def _ask(self, name: str, parameters: dict[str, Any]) -> list[Row]:
        return self._connection.execute(compose(name, self._target.schema), parameters).fetchall()


def _title(step: Step) -> str:
    return f"Version {step.version}, step {step.name}"
