"""Decides when the hints of a process's sends are announced. The sends themselves do not notify, because PostgreSQL lets transactions that
notify commit one after another."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Final

from everbeat.store import rows
from everbeat.store.statement import Statement, texts

_log = logging.getLogger("everbeat.store")

APART_S: Final = 0.01
"""The shortest mean time between two announcements of a busy process, in seconds."""
LONGEST_APART_S: Final = 0.1
"""The longest time between two announcements while hints are waiting, in seconds."""
_SHARE: Final = 0.05
"""The largest share of a process's time that announcements take. Between two of them, the server of many senders does other work."""
AT_ONCE: Final = 5
"""How many announcements can follow one another at once after a pause. A program that sends a few tasks does not wait for `APART_S`."""
AFTER_FAILURE_S: Final = 1.0
"""How long no announcement follows one that failed, in seconds, because a caller of a send might have waited for it."""
FLUSH_S: Final = 1.0
"""How long `close` and the exit of the process wait for the last announcement, in seconds."""
MANY: Final = 100
"""From how many tasks on a send also notifies the message relay. Such a send can take so long that the relay becomes idle before it commits."""
_QUEUE_CHARACTERS: Final = 1_000
"""The maximum number of characters of a queue's name in a hint, as in the statements that notify: a payload takes less than 8,000 bytes."""


def hints_of(queues: Iterable[str], *, count: int = 1, joined: bool) -> Sequence[str]:
    """Return the hints to announce after a send of `count` tasks to these queues.

    A send in the user's transaction has none, because its statement notifies.
    """
    if joined:
        return ()
    hints = [f"t:{queue[:_QUEUE_CHARACTERS]}" for queue in dict.fromkeys(queues)]
    return hints if count < MANY else [*hints, "o:"]


def announcement(hints: Iterable[str], *, channel: str) -> Statement[None]:
    """Announce the hints of sends that were committed. Hints that tasks are ready are announced only if a worker listens."""
    return Statement("task/announce_hints", {"hints": texts(hints), "channel": channel}, rows.nothing)


class Announcer:
    """Collects hints, and hands them out every `APART_S` seconds on average, or less often if the server is busy.

    The first `AT_ONCE` senders after a pause announce their own hints. The hints of later senders are announced together by a thread, which
    ends when no hints are left. After a fork, the child makes a new announcer, so that it does not announce its parent's sends.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: dict[str, None] = {}
        self._next_at = 0.0
        self._must_end = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no hints are waiting and no thread is announcing any."""
        return self._thread is None

    def take(self, hints: Sequence[str], announce: Callable[[Sequence[str]], None]) -> Sequence[str]:
        """Return the hints that the caller must announce now. If there are none, a thread soon calls `announce` with the given hints."""
        with self._changed:
            if not self._waiting and self._pause_s() <= 0:
                self._count()
                return hints
            self._waiting.update(dict.fromkeys(hints))
            return () if self._thread is not None or self._start(announce) else self._taken()

    def take_waiting(self) -> Sequence[str]:
        """Return all waiting hints, which the caller must announce now, because a caller of this process waits for a result."""
        if not self._waiting:
            return ()
        with self._changed:
            return self._taken()

    def done(self, took_s: float) -> None:
        """Postpone the next announcement if the last one took long, because the server is busy."""
        apart_s = min(LONGEST_APART_S, took_s / _SHARE)
        if apart_s > APART_S:
            with self._changed:
                self._next_at += apart_s - APART_S

    def failed(self, problem: Exception) -> None:
        """Postpone the next announcement, because the last one failed. An idle worker finds the tasks when it polls."""
        _log.debug("hints_not_announced problem=%s", problem)
        with self._changed:
            self._next_at = monotonic() + AFTER_FAILURE_S + AT_ONCE * APART_S

    def flush(self, within_s: float = FLUSH_S) -> None:
        """Have the waiting hints announced at once, and wait up to `within_s` seconds for the announcement."""
        if self._pid != os.getpid():
            return  # a forked child has no such thread, and the lock might stay locked
        with self._changed:
            thread = self._thread
            self._must_end = thread is not None
            self._changed.notify()
        if thread is not None:
            thread.join(within_s)

    def _start(self, announce: Callable[[Sequence[str]], None]) -> bool:
        """Start the thread. Return False if that is impossible, for example because the interpreter is shutting down."""
        thread = threading.Thread(target=self._run, args=(announce,), name="everbeat-announce", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _run(self, announce: Callable[[Sequence[str]], None]) -> None:
        try:
            while due := self._due():
                announce(due)
        except BaseException:
            with self._changed:
                self._thread = None  # the next send starts another one
            raise

    def _due(self) -> Sequence[str]:
        """Wait until the next announcement is due, and return its hints. If there are none, the thread ends."""
        with self._changed:
            while not self._must_end and (wait_s := self._pause_s()) > 0:
                self._changed.wait(wait_s)
            if not self._waiting:
                self._thread, self._must_end = None, False
            return self._taken()

    def _taken(self) -> Sequence[str]:
        due, self._waiting = tuple(self._waiting), {}
        if due:
            self._count()
        return due

    def _pause_s(self) -> float:
        """Return how many seconds to wait before the next announcement."""
        return self._next_at - (AT_ONCE - 1) * APART_S - monotonic()

    def _count(self) -> None:
        self._next_at = max(monotonic(), self._next_at) + APART_S
