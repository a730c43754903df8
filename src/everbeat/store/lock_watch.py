"""Watches a session that upgrades the schema: while a statement waits for a lock, it finds out which sessions hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final

import psycopg
from msgspec import Struct

from everbeat.domain.locks import LockHolder
from everbeat.store.silence import Limit, WatchedConnection, limited
from everbeat.store.statement import Row, compose
from everbeat.store.target import Target

_FIRST_LOOK_S: Final = 0.1
"""Soon enough to see the holder before the wait for the lock ends."""
_LOOK_S: Final = 1.0
_CONNECT_S: Final = 5.0


class Wait(Struct, frozen=True):
    """What a statement waits for: a lock of the table `wanted`, or the end of other transactions; and whose they are, the oldest first."""

    wanted: str | None
    holders: tuple[LockHolder, ...]
    begun: tuple[datetime | None, ...]
    only_vacuum: bool

    @property
    def held_by(self) -> str:
        """The holders, as one clause."""
        named = [
            holder.who
            if began_at is None
            else f"{holder.who}, whose transaction began at {began_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
            for holder, began_at in zip(self.holders, self.begun, strict=True)
        ]
        return "; ".join(named)


class LockWatch:
    """The watch of one connection, beside the one that it had. `seen` is what the last statement was seen to wait for."""

    def __init__(
        self, connection: WatchedConnection, target: Target, on_wait: Callable[[Wait], None]
    ) -> None:
        self._connection = connection
        self._target = target
        self._on_wait = on_wait
        self._inner = connection.watch
        self._second: WatchedConnection | None = None
        self._look_at = 0.0
        self.seen: Wait | None = None

    def begin(self) -> None:
        """A statement was sent."""
        self._look_at = monotonic() + _FIRST_LOOK_S
        self.seen = None
        if self._inner is not None:
            self._inner.begin()

    def silent(self) -> None:
        """Look for the holders of a lock when it is time."""
        if self._inner is not None:
            self._inner.silent()
        if monotonic() < self._look_at:
            return
        found = self._blockers()
        self._look_at = monotonic() + _LOOK_S
        if found:
            self.seen = _wait(found)
            self._on_wait(self.seen)

    def arrived(self) -> None:
        """Data has arrived."""
        if self._inner is not None:
            self._inner.arrived()

    def end(self) -> None:
        """The statement was answered, or failed."""
        if self._inner is not None:
            self._inner.end()

    def close(self) -> None:
        """Give the connection its own watch again, and close the second one."""
        self._connection.watch = self._inner
        if self._second is not None:
            self._second.close()

    def _blockers(self) -> Sequence[Row]:
        try:
            if self._second is None:
                with limited(Limit(ends_at=monotonic() + _CONNECT_S, hosts=1)):
                    self._second = WatchedConnection.connect(
                        self._target.twin_of(self._connection), autocommit=True
                    )
            question = compose("schema/blockers", self._target.schema)
            return self._second.execute(question, {"pid": self._connection.server_pid}).fetchall()
        except (psycopg.Error, OSError):  # the upgrade goes on without a name
            with suppress(psycopg.Error):
                if self._second is not None:
                    self._second.close()
            self._second = None
            return []


def session_of(
    pid: int | None, session: str | None, role: str | None, state: str | None, event: str | None, since: Any
) -> LockHolder:
    """The holder of a lock, as the server shows it."""
    return LockHolder(pid, session, role, state, event, waiters=1, since=since, waited_s=0.0, hostname=None)


def _wait(found: Sequence[Row]) -> Wait:
    return Wait(
        wanted=found[0][0],
        holders=tuple(session_of(*row[1:7]) for row in found),
        begun=tuple(row[6] for row in found),
        only_vacuum=all(row[7] for row in found),
    )
