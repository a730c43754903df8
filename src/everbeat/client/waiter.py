"""Waiting for tasks to end: one thread and one listening connection for all waiters of an app in a process.

What lives here: who waits for which id, and when the database is asked. Hints make it fast, a slow poll makes it sure.
What may not: what an outcome means (`handle`), and connections, which come from outside.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from time import monotonic, sleep
from typing import Final, TypeAlias
from uuid import UUID

from everbeat.domain.states import TaskState
from everbeat.errors import AppClosed, DatabaseReadOnly, DatabaseUnreachable, EverbeatError, TaskNotFound
from everbeat.runtime.fork import call_in_forked_child
from everbeat.store.tasks import StoredOutcome
from everbeat.wake import SyncWake
from everbeat.wake.hint_rate import HintRate
from everbeat.wake.topics import Everything, Hint, TaskEnded

LookUp: TypeAlias = Callable[[Sequence[UUID]], dict[UUID, StoredOutcome]]
IDLE_S: Final = 30.0
"""A waiter without waiters gives its connection back after this long."""

_log = logging.getLogger("everbeat.client")
_BATCH: Final = 1_000
_LISTENING_POLL_S: Final = (1.0, 5.0)
_DEAF_POLL_S: Final = (0.05, 0.5)
_SLOWER: Final = 1.5


class Ended(Future[StoredOutcome]):
    """A task's end, once it is known; `seen` is the last state that the database told before that."""

    seen: TaskState | None = None


class Waiter:
    """Gives a future for each id that is waited for. Futures serve threads as they are, and loops by `asyncio.wrap_future`."""

    def __init__(self, *, look_up: LookUp, make_wake: Callable[[], SyncWake]) -> None:
        self._look_up = look_up
        self._make_wake = make_wake
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        # A forked child has none of the parent's threads: it starts its own when it waits.
        self._changed = threading.Condition()
        self._waiting: dict[UUID, list[Ended]] = {}
        self._asked: set[UUID] = set()
        self._ask_all = False
        self._listening = False
        self._hint_rate = HintRate()
        self._thread: threading.Thread | None = None
        self._closed = False

    def wait(self, task_id: UUID) -> Ended:
        """A future of the task's end; it fails with TaskNotFound, or the DatabaseError that no repetition cures."""
        future = Ended()
        with self._changed:
            self._waiting.setdefault(task_id, []).append(future)
            self._asked.add(task_id)
            self._closed = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="everbeat-waiter", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Ends the thread and its connection; whoever still waits is told AppClosed."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _hinted(self, hint: Hint) -> None:
        with self._changed:
            match hint:
                case TaskEnded(ids=ids):
                    self._asked.update(task_id for task_id in ids if task_id in self._waiting)
                case Everything():
                    self._ask_all = True
                case _:
                    return
            if self._asked or self._ask_all:
                self._changed.notify()

    def _heard(self, listening: bool) -> None:
        with self._changed:
            self._listening = listening
            self._changed.notify()

    def _run(self) -> None:
        wake = self._make_wake()
        wake.start(self._hinted, self._heard)
        try:
            self._serve()
        finally:
            wake.stop()

    def _serve(self) -> None:
        pause, next_poll, idle_since = _DEAF_POLL_S[0], monotonic(), monotonic()
        while True:
            with self._changed:
                while not (self._asked or self._ask_all or self._closed):
                    now = monotonic()
                    due = next_poll if self._waiting else idle_since + IDLE_S
                    if now >= due:
                        break
                    self._changed.wait(due - now)
                if self._retired(idle_for=monotonic() - idle_since):
                    return
                newcomers = bool(self._asked)
                everybody = self._ask_all or monotonic() >= next_poll
                wanted = list(self._waiting) if everybody else [*self._asked & self._waiting.keys()]
                self._asked.clear()
                self._ask_all = False
                first, last = _LISTENING_POLL_S if self._listening else _DEAF_POLL_S
            if wanted:
                sleep(self._hint_rate.pause_s(monotonic()))
            self._ask(wanted)
            if everybody or newcomers:
                # Whoever came or ended just now is not alone: look soon, then less and less often.
                pause = first if newcomers else min(max(pause * _SLOWER, first), last)
                next_poll = monotonic() + pause
            if self._waiting:
                idle_since = monotonic()

    def _retired(self, *, idle_for: float) -> bool:
        """Whether the thread ends now, decided under the lock so that no newcomer is left behind."""
        if not self._closed and (self._waiting or idle_for < IDLE_S):
            return False
        for task_id, futures in self._waiting.items():
            for future in futures:
                _settle(future, AppClosed(task_id))
        self._waiting.clear()
        self._thread = None
        return True

    def _ask(self, wanted: Sequence[UUID]) -> None:
        self._drop_those_who_left(wanted)
        for start in range(0, len(wanted), _BATCH):
            batch = [task_id for task_id in wanted[start : start + _BATCH] if task_id in self._waiting]
            if not batch:
                continue
            try:
                found = self._look_up(batch)
            except (DatabaseUnreachable, DatabaseReadOnly) as outage:
                _log.warning("waiting for tasks goes on over an outage: %s", outage)
                continue
            except EverbeatError as error:
                self._fail(batch, error)
                continue
            self._deliver(batch, found)

    def _deliver(self, batch: Collection[UUID], found: dict[UUID, StoredOutcome]) -> None:
        for task_id in batch:
            outcome = found.get(task_id)
            if outcome is None:
                self._fail([task_id], TaskNotFound(task_id))
            elif outcome.state.is_terminal:
                self._hint_rate.paid_off()
                for future in self._take(task_id):
                    _settle(future, outcome)
            else:
                for future in self._waiting.get(task_id, ()):
                    future.seen = outcome.state

    def _fail(self, batch: Collection[UUID], error: EverbeatError) -> None:
        for task_id in batch:
            for future in self._take(task_id):
                _settle(future, error)

    def _take(self, task_id: UUID) -> list[Ended]:
        with self._changed:
            return self._waiting.pop(task_id, [])

    def _drop_those_who_left(self, wanted: Sequence[UUID]) -> None:
        with self._changed:
            for task_id in wanted:
                staying = [future for future in self._waiting.get(task_id, ()) if not future.cancelled()]
                if staying:
                    self._waiting[task_id] = staying
                else:
                    self._waiting.pop(task_id, None)


def _settle(future: Ended, end: StoredOutcome | EverbeatError) -> None:
    try:
        if isinstance(end, EverbeatError):
            future.set_exception(end)
        else:
            future.set_result(end)
    except InvalidStateError:
        pass  # its owner stopped waiting in this very moment
