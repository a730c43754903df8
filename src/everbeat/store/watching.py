"""Watches of a client's connections: a look at a silent statement over a second connection to the same server.

Without it, a client would wait for ever for a server that is frozen while its kernel still acknowledges, or that waits for a
synchronous standby; and a bound on each statement would end those that take long for good reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, Connection

from everbeat.store.patience import Judgement, Patience, Sight
from everbeat.store.silence import (
    Limit,
    WatchedAsyncConnection,
    WatchedConnection,
    hang_up,
    limited,
)
from everbeat.store.statement import Row, compose
from everbeat.store.target import Target

_LOOK: Final = "inspect/at_work"


class EndsAt:
    """Hangs up on a connection whose server is silent at a moment of the monotonic clock."""

    def __init__(self, connection: Connection[Any] | AsyncConnection[Any], ends_at: float) -> None:
        self._connection = connection
        self._ends_at = ends_at
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """On a loop, where nobody calls `silent`, set a timer."""
        if isinstance(self._connection, AsyncConnection):
            delay_s = max(self._ends_at - monotonic(), 0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, hang_up, self._connection)

    def silent(self) -> None:
        """Hang up if it is time."""
        if monotonic() >= self._ends_at:
            hang_up(self._connection)

    def end(self) -> None:
        """Remove the timer."""
        if self._timer is not None:
            self._timer.cancel()


class ThreadWatch:
    """Watches one connection of a thread for one call."""

    def __init__(
        self, target: Target, connection: WatchedConnection, patience: Patience, *, other_hosts: bool
    ) -> None:
        self._target = target
        self._connection = connection
        self._judgement = Judgement(patience, other_hosts=other_hosts)

    def begin(self) -> None:
        """A statement was sent."""
        self._judgement.begin()

    def silent(self) -> None:
        """Look at the statement when it is time, and hang up if it is given up."""
        judgement = self._judgement
        if monotonic() < judgement.look_at:
            return
        if judgement.is_hopeless or judgement.hangs_up(self._look(judgement.look_s)):
            hang_up(self._connection)

    def end(self) -> None:
        """Nothing is left to be done."""

    def _look(self, within_s: float) -> Sight:
        ends_at = monotonic() + within_s
        try:
            with limited(Limit(ends_at=ends_at, hosts=1)):
                second = WatchedConnection.connect(self._target.twin_of(self._connection), autocommit=True)
        except psycopg.Error:
            return Sight.SILENT if monotonic() >= ends_at else Sight.UNSURE
        with second:
            second.prepare_threshold = None
            second.watch = EndsAt(second, ends_at)
            try:
                return _sight(second.execute(*_question(self._target, self._connection)).fetchall())
            except psycopg.Error:
                return Sight.SILENT if monotonic() >= ends_at else Sight.UNSURE


class LoopWatch:
    """The twin of `ThreadWatch` for event loops."""

    def __init__(
        self, target: Target, connection: WatchedAsyncConnection, patience: Patience, *, other_hosts: bool
    ) -> None:
        self._target = target
        self._connection = connection
        self._judgement = Judgement(patience, other_hosts=other_hosts)
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A statement was sent."""
        self._judgement.begin()
        self._set_timer()

    def silent(self) -> None:
        """Timers do this."""

    def end(self) -> None:
        """The statement was answered, or failed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()

    def _set_timer(self) -> None:
        delay_s = max(self._judgement.look_at - monotonic(), 0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._begin_to_look)

    def _begin_to_look(self) -> None:
        self._looking = asyncio.ensure_future(self._judge())

    async def _judge(self) -> None:
        judgement = self._judgement
        if judgement.is_hopeless or judgement.hangs_up(await self._look(judgement.look_s)):
            hang_up(self._connection)
        else:
            self._set_timer()

    async def _look(self, within_s: float) -> Sight:
        ends_at = monotonic() + within_s
        try:
            with limited(Limit(ends_at=ends_at, hosts=1)):
                second = await WatchedAsyncConnection.connect(
                    self._target.twin_of(self._connection), autocommit=True
                )
        except psycopg.Error:
            return Sight.SILENT if monotonic() >= ends_at else Sight.UNSURE
        try:
            second.prepare_threshold = None
            second.watch = EndsAt(second, ends_at)
            cursor = await second.execute(*_question(self._target, self._connection))
            return _sight(await cursor.fetchall())
        except psycopg.Error:
            return Sight.SILENT if monotonic() >= ends_at else Sight.UNSURE
        finally:
            with suppress(psycopg.Error):
                await second.close()


def _question(
    target: Target, connection: WatchedConnection | WatchedAsyncConnection
) -> tuple[bytes, dict[str, Any]]:
    name = connection.info.parameter_status("application_name") or ""
    pid = 0 if connection.prepare_threshold is None else connection.server_pid
    return compose(_LOOK, target.schema), {"pid": pid, "name": name}


def _sight(found: Sequence[Row]) -> Sight:
    ((is_at_work, is_stalled),) = found
    return Sight.STALLED if is_stalled else Sight.WORKS if is_at_work else Sight.IDLE
