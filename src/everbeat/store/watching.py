"""Watches of a client's connections: a look at a silent statement over a second connection to the same server.

Without it, a client would wait for ever for a server that is frozen while its kernel still acknowledges, or that waits for a
synchronous standby; and a bound on each statement would end those that take long for good reasons.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing, suppress
from time import monotonic
from typing import Final

import psycopg

from everbeat.store.patience import Judgement, Patience, Sight
from everbeat.store.silence import (
    EndsAt,
    Limit,
    WatchedAsyncConnection,
    WatchedConnection,
    hang_up,
    has_news,
    limited,
)
from everbeat.store.statement import compose
from everbeat.store.target import Target

_LOOK: Final = "inspect/at_work"


class ThreadWatch:
    """Watches one connection of a thread for one call."""

    def __init__(
        self, target: Target, connection: WatchedConnection, patience: Patience, *, other_hosts: bool
    ) -> None:
        self._target = target
        self._connection = connection
        self._judgement = Judgement(patience, other_hosts=other_hosts)

    @property
    def is_stalled(self) -> bool:
        """Whether the statement was last seen to wait for a synchronous standby."""
        return self._judgement.is_stalled

    def begin(self) -> None:
        """A statement was sent."""
        self._judgement.begin()

    def silent(self) -> None:
        """Look at the statement when it is time, and hang up if it is given up."""
        judgement = self._judgement
        if monotonic() < judgement.look_at:
            return
        if judgement.is_hopeless:
            hang_up(self._connection)
            return
        sight = _look(self._target, self._connection, judgement.look_s)
        if not has_news(self._connection) and judgement.hangs_up(sight):
            hang_up(self._connection)

    def arrived(self) -> None:
        """Data has arrived: look later."""
        self._judgement.arrived()

    def end(self) -> None:
        """Nothing is left to be done."""


class LoopWatch:
    """The twin of `ThreadWatch` for event loops: a timer, and a thread for each look, which does not block the loop."""

    def __init__(
        self, target: Target, connection: WatchedAsyncConnection, patience: Patience, *, other_hosts: bool
    ) -> None:
        self._target = target
        self._connection = connection
        self._judgement = Judgement(patience, other_hosts=other_hosts)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._statement = 0

    @property
    def is_stalled(self) -> bool:
        """Whether the statement was last seen to wait for a synchronous standby."""
        return self._judgement.is_stalled

    def begin(self) -> None:
        """A statement was sent."""
        self._judgement.begin()
        self._set_timer()

    def silent(self) -> None:
        """The timer does this."""

    def arrived(self) -> None:
        """Data has arrived: look later. The timer finds out when it fires."""
        self._judgement.arrived()

    def end(self) -> None:
        """The statement was answered, or failed. A look that is under way is ignored."""
        self._statement += 1
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        delay_s = max(self._judgement.look_at - monotonic(), 0)
        self._timer = self._loop.call_later(delay_s, self._begin_to_look)

    def _begin_to_look(self) -> None:
        if monotonic() < self._judgement.look_at:
            self._set_timer()
            return
        if self._judgement.is_hopeless:
            hang_up(self._connection)
            return
        arguments = (self._statement, self._judgement.look_s)
        look = threading.Thread(target=self._report, args=arguments, name="everbeat-look", daemon=True)
        try:
            look.start()
        except RuntimeError:  # no more threads
            self._judge(self._statement, Sight.UNSURE)

    def _report(self, statement: int, within_s: float) -> None:
        sight = _look(self._target, self._connection, within_s)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._judge, statement, sight)

    def _judge(self, statement: int, sight: Sight) -> None:
        if statement != self._statement:
            return
        if monotonic() < self._judgement.look_at or has_news(self._connection):
            self._set_timer()
        elif self._judgement.hangs_up(sight):
            hang_up(self._connection)
        else:
            self._set_timer()


def _look(target: Target, connection: WatchedConnection | WatchedAsyncConnection, within_s: float) -> Sight:
    """Ask the server of this connection what it does for it, over a second connection."""
    ends_at = monotonic() + within_s
    try:
        name = connection.info.parameter_status("application_name") or ""
        pid = 0 if connection.prepare_threshold is None else connection.server_pid
        with limited(Limit(ends_at=ends_at, hosts=1)):
            second = WatchedConnection.connect(target.twin_of(connection), autocommit=True)
        with closing(second):
            second.prepare_threshold = None  # it may go to a pooler
            second.watch = EndsAt(second, ends_at)
            found = second.execute(compose(_LOOK, target.schema), {"pid": pid, "name": name}).fetchall()
    except (psycopg.Error, OSError, RuntimeError):
        return Sight.SILENT if monotonic() >= ends_at else Sight.UNSURE
    ((is_at_work, is_stalled),) = found
    return Sight.STALLED if is_stalled else Sight.WORKS if is_at_work else Sight.IDLE
