"""Limits how long a client's call waits for a silent database, and inspects the silent statement over a second connection."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing, suppress
from enum import Enum
from random import Random
from time import monotonic
from typing import Final

import psycopg
from msgspec import Struct

from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.blocking import hang_up
from everbeat.runtime.clock import Backoff
from everbeat.store.connection import (
    ConnectLimit,
    EndsAt,
    WatchedAsyncConnection,
    WatchedConnection,
    has_news,
    limited,
)
from everbeat.store.refusals import is_refused_login, is_repeatable
from everbeat.store.statement import compose
from everbeat.store.target import Target

_SHARE: Final = 4
_SHORTEST_CHECK_S: Final = 0.25
_SECOND_CHECK_S: Final = 0.5
DEFAULT_PATIENCE_S: Final = 5.0
LONGEST_PATIENCE_S: Final = 1_800.0
"""The longest patience of a call, in seconds.

A send that is repeated after a lost reply must find its task in `tasks`. A task stays there for an hour after its end (`SHORTEST_AGE_S`).
"""
LONGEST_PAUSE_S: Final = 1.0


class SessionSight(Enum):
    """The state of a session whose statement has not returned yet, as seen by an inspection over another connection."""

    WORKS = "works"
    """The server is working on the statement, or the statement is waiting for a lock."""
    STALLED = "stalled"
    """The statement is waiting for a synchronous standby."""
    IDLE = "idle"
    """The session has stopped running a statement, so its reply was lost."""
    SILENT = "silent"
    """The server did not reply to the inspection either."""
    UNSURE = "unsure"
    """The inspection failed before its time limit: the server refused it, or this process could not perform it."""


_REASONS: Final = {
    SessionSight.WORKS: "the server is still working on a statement, or the statement is waiting for a lock",
    SessionSight.STALLED: "a statement is waiting for a synchronous standby that does not confirm it",
    SessionSight.IDLE: "the answer to a statement was lost",
    SessionSight.SILENT: "the server responds neither to a statement nor to a new connection",
    SessionSight.UNSURE: "the server does not answer a statement, and another connection to it cannot be made",
}


class LastProblem(Struct, frozen=True):
    """The problem that caused a try of a call to fail, and the fix that a user can apply."""

    message: str
    fix: str | None


class SignsOfLife(Struct):
    """The time when a database last replied to any call of a client, and the problem of a later call, if any."""

    last_at: float = 0.0
    problem: LastProblem | None = None


class Patience:
    """The time limit of one call. `ends_at` is `seconds` after the call's start or the last sign of life that the call received."""

    def __init__(self, seconds: float, signs: SignsOfLife | None = None, *, is_final: bool = False) -> None:
        self.seconds = seconds
        self.is_final = is_final
        self.step_s = seconds / _SHARE
        self.ends_at = monotonic() + seconds
        self.reason: str | None = None
        self.has_left_a_stall = False
        self._signs = signs or SignsOfLife()
        self._has_failed = False

    @property
    def remaining_s(self) -> float:
        """Return the number of seconds that remain, at least 0."""
        return max(self.ends_at - monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Return whether the time limit of the call has passed."""
        return monotonic() >= self.ends_at

    def renew(self) -> None:
        """Restart the time limit, because this call has received a sign of life from the database. A final limit is not extended."""
        self._signs.last_at = monotonic()
        if not self.is_final:
            self.ends_at = self._signs.last_at + self.seconds

    def failed(self, problem: LastProblem) -> None:
        """Record that a try of this call has failed."""
        self._has_failed = True
        self._signs.problem = problem

    @property
    def last_problem(self) -> LastProblem | None:
        """Return the last problem of any call, or None if the database has replied since then."""
        return self._signs.problem

    def follow_others(self) -> None:
        """Extend the time limit as if this call had received the last sign of life of any call.

        Used while this call is waiting for a connection. Do nothing if a try of this call has failed: a server that refuses writes still
        replies to calls that only read.
        """
        if not self.is_final and not self._has_failed:
            self.ends_at = max(self.ends_at, self._signs.last_at + self.seconds)

    def answered(self) -> None:
        """Record that the database has replied."""
        self._signs.last_at = monotonic()
        self._signs.problem = None


class Judgement:
    """Decides when to inspect a statement that has not returned, and whether to abandon it."""

    def __init__(self, patience: Patience, *, other_hosts: bool) -> None:
        self._patience = patience
        self._other_hosts = other_hosts
        self.begin()

    def begin(self) -> None:
        """Start judging a statement that has just been sent."""
        self._last: SessionSight | None = None
        self._arriving_until = 0.0
        self.check_at = self._next(self._patience.step_s)

    def arrived(self) -> None:
        """Postpone the next inspection, because part of the reply has arrived. This try continues, but a repetition gets no extra time."""
        if self._patience.is_final and self._patience.is_over:
            return
        self._patience.answered()
        self._arriving_until = monotonic() + self._patience.seconds
        self._last, self.check_at = None, self._next(self._patience.step_s)

    @property
    def is_stalled(self) -> bool:
        """Return whether the last inspection found the statement waiting for a synchronous standby."""
        return self._last is SessionSight.STALLED

    @property
    def check_s(self) -> float:
        """Return how many seconds the next inspection may take. If no other host is left to try, it can use all the remaining time."""
        remaining = max(self._ends_at - monotonic(), 0.0)
        return max(
            min(self._patience.step_s, remaining) if self._other_hosts else remaining, _SHORTEST_CHECK_S
        )

    @property
    def is_hopeless(self) -> bool:
        """Return whether the time limit has passed and another inspection could not extend it."""
        return self._is_over and self._last in (SessionSight.STALLED, SessionSight.UNSURE)

    def hangs_up(self, sight: SessionSight) -> bool:
        """Return whether to abandon the statement after this inspection. If not, the next inspection is due at `check_at`."""
        is_second, self._last = sight is self._last, sight
        pause_s = self._patience.step_s
        gives_up = sight is SessionSight.SILENT
        match sight:
            case SessionSight.WORKS:
                self._patience.renew()
                if not self._is_over:
                    self.check_at = self._next(pause_s)
                    return False
            case SessionSight.IDLE:
                # The reply may be on its way.
                gives_up, pause_s = is_second, min(pause_s, _SECOND_CHECK_S)
            case SessionSight.STALLED:
                # A session that is abandoned in this state stays until the standby returns. So abandon at most one, and only to try another
                # host.
                gives_up = is_second and self._other_hosts and not self._patience.has_left_a_stall
                self._patience.has_left_a_stall |= gives_up
            case SessionSight.SILENT | SessionSight.UNSURE:
                pass
        self._patience.reason = _REASONS[sight]
        self.check_at = self._next(pause_s)
        return gives_up or self._is_over

    @property
    def _ends_at(self) -> float:
        return max(self._patience.ends_at, 0.0 if self._patience.is_final else self._arriving_until)

    @property
    def _is_over(self) -> bool:
        return monotonic() >= self._ends_at

    def _next(self, pause_s: float) -> float:
        now = monotonic()
        return max(min(now + pause_s, self._ends_at), now + min(pause_s, _SHORTEST_CHECK_S))


_ACTIVITY: Final = "inspect/read_session_activity"


class _ConnectionWatch:
    """Watches one connection during one call. Subclasses decide how the statement is inspected."""

    def __init__(
        self,
        target: Target,
        connection: WatchedConnection | WatchedAsyncConnection,
        patience: Patience,
        *,
        other_hosts: bool,
    ) -> None:
        self._target = target
        self._connection = connection
        self._judgement = Judgement(patience, other_hosts=other_hosts)

    @property
    def is_stalled(self) -> bool:
        """Return whether the statement was last found waiting for a synchronous standby."""
        return self._judgement.is_stalled

    def begin(self) -> None:
        """Start watching a statement that has just been sent."""
        self._judgement.begin()

    def arrived(self) -> None:
        """Postpone the next inspection, because data has arrived. A timer that is already set notices this when it fires."""
        self._judgement.arrived()

    def end(self) -> None:
        """Stop watching: the statement has finished or failed."""


class ThreadConnectionWatch(_ConnectionWatch):
    """The watch for threads. Each inspection blocks the thread that is waiting for the statement."""

    def silent(self) -> None:
        """Inspect the statement if an inspection is due, and abort the connection if the statement is to be abandoned."""
        judgement = self._judgement
        if monotonic() < judgement.check_at:
            return
        if judgement.is_hopeless:
            hang_up(self._connection)
            return
        sight = _check(self._target, self._connection, judgement.check_s)
        if not has_news(self._connection) and judgement.hangs_up(sight):
            hang_up(self._connection)


class LoopConnectionWatch(_ConnectionWatch):
    """The watch for event loops. It starts each inspection by a timer, in a separate thread, so that no inspection blocks the loop."""

    _timer: asyncio.TimerHandle | None = None
    _statement = 0

    def begin(self) -> None:
        """Start watching a statement that has just been sent."""
        super().begin()
        self._loop = asyncio.get_running_loop()
        self._set_timer()

    def silent(self) -> None:
        """Do nothing: the timer starts the inspections."""

    def end(self) -> None:
        """Stop watching: the statement has finished or failed. The result of a running inspection is ignored."""
        self._statement += 1
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        delay_s = max(self._judgement.check_at - monotonic(), 0)
        self._timer = self._loop.call_later(delay_s, self._begin_check)

    def _begin_check(self) -> None:
        if monotonic() < self._judgement.check_at:
            self._set_timer()
            return
        if self._judgement.is_hopeless:
            hang_up(self._connection)
            return
        arguments = (self._statement, self._judgement.check_s)
        check = threading.Thread(target=self._report, args=arguments, name="everbeat-check", daemon=True)
        try:
            check.start()
        except RuntimeError:  # no more threads
            self._judge(self._statement, SessionSight.UNSURE)

    def _report(self, statement: int, within_s: float) -> None:
        sight = _check(self._target, self._connection, within_s)
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._judge, statement, sight)

    def _judge(self, statement: int, sight: SessionSight) -> None:
        if statement != self._statement:
            return
        if monotonic() < self._judgement.check_at or has_news(self._connection):
            self._set_timer()
        elif self._judgement.hangs_up(sight):
            hang_up(self._connection)
        else:
            self._set_timer()


def _check(
    target: Target, connection: WatchedConnection | WatchedAsyncConnection, within_s: float
) -> SessionSight:
    """Return what this connection's session is doing, as the server reports it over a second connection."""
    ends_at = monotonic() + within_s
    try:
        name = connection.info.parameter_status("application_name") or ""
        pid = 0 if connection.prepare_threshold is None else connection.server_pid
        with limited(ConnectLimit(ends_at=ends_at, hosts=1)):
            second = WatchedConnection.connect(target.twin_of(connection), autocommit=True)
        with closing(second):
            second.prepare_threshold = None  # the second connection may lead to a pooler
            second.watch = EndsAt(second, ends_at)
            found = second.execute(compose(_ACTIVITY, target.schema), {"pid": pid, "name": name}).fetchall()
    except (psycopg.Error, OSError, RuntimeError):
        return SessionSight.SILENT if monotonic() >= ends_at else SessionSight.UNSURE
    ((is_at_work, is_stalled),) = found
    return SessionSight.STALLED if is_stalled else SessionSight.WORKS if is_at_work else SessionSight.IDLE


_FIX: Final = (
    "check the server and its standbys; patience=... of App or of one call sets how long a call is repeated."
)


def repeat_backoff(random: Random, *, longest_s: float = LONGEST_PAUSE_S) -> Backoff:
    """Return the backoff between the tries of a statement."""
    return Backoff(first_s=0.05, longest_s=longest_s, spread=(0.5, 1.5), random=random)


def pause_before_repeat(
    problem: psycopg.Error | DatabaseError,
    target: Target,
    patience: Patience,
    *,
    delay_s: float,
    has_connected: bool,
) -> float:
    """Return how many seconds to wait before the call is repeated, at most `delay_s`. The last try begins when the patience ends.

    Raises the call's error if the problem is not an outage, or if the patience has ended. Once a login with these settings has succeeded, a
    refused login counts as an outage: the password may be changing.
    """
    is_outage = isinstance(problem, DatabaseError) or is_repeatable(problem)
    is_outage = is_outage and (has_connected or not is_refused_login(problem))
    if is_outage:
        known = problem if isinstance(problem, DatabaseError) else target.explain(problem)
        patience.failed(LastProblem(known.message, known.fix))
    if is_outage and not patience.is_over:
        return min(delay_s, patience.remaining_s)
    if is_outage and patience.reason is not None and not isinstance(problem, DatabaseReadOnly):
        raise DatabaseUnreachable(
            f"The database at {target.shown!r} did not respond for {patience.seconds:g} s: {patience.reason}. "
            "The statement may take effect later.",
            fix=_FIX,
        ) from problem
    if isinstance(problem, DatabaseError):
        raise problem
    raise target.explain(problem) from problem


def all_busy(target: Target, patience: Patience, *, connections: int) -> DatabaseUnreachable:
    """Return the error for a call that got no connection. It includes the last problem of the calls that hold the connections, if known."""
    text = f"All {connections} connections of this process to {target.shown!r} have waited for an answer for {patience.seconds:g} s."
    return unreachable(text, fix=_FIX, last=patience.last_problem)


def unreachable(text: str, *, fix: str, last: LastProblem | None) -> DatabaseUnreachable:
    """Return the error for a call that waited for other calls. It includes their last problem and the fix for it, if known."""
    if last is None:
        return DatabaseUnreachable(text, fix=fix)
    return DatabaseUnreachable(f"{text} The last problem was: {last.message}", fix=last.fix or fix)


def given_up(problem: BaseException, target: Target) -> DatabaseError:
    """Return the error for a statement that a session no longer repeats after this problem."""
    if isinstance(problem, DatabaseError):
        return problem
    if isinstance(problem, psycopg.Error):
        return target.explain(problem)
    return DatabaseUnreachable(
        f"The database at {target.shown!r} did not answer in time.",
        fix="check the network and the server's load.",
    )
