"""Waits for tasks to finish. All of an app's waits in a process share one thread and one listening connection."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import chain
from math import inf
from time import monotonic, sleep
from typing import Final, TypeAlias
from uuid import UUID

from everbeat.domain.settings.units import Duration, to_seconds
from everbeat.domain.task.states import TaskState
from everbeat.errors import (
    AppClosed,
    DatabaseReadOnly,
    DatabaseUnreachable,
    EverbeatError,
    TaskNotFound,
    WaitTimeout,
)
from everbeat.hints import SyncHintSource
from everbeat.hints.delivery import HintRate
from everbeat.hints.topics import Everything, Hint, ItemsStored, TaskEnded
from everbeat.runtime.clock import Backoff
from everbeat.runtime.fork import call_in_forked_child
from everbeat.store import history
from everbeat.store.plan import Action, Bounded, Plan
from everbeat.store.tasks import StoredOutcome

LookUp: TypeAlias = Callable[[Sequence[UUID]], dict[UUID, StoredOutcome]]
IDLE_S: Final = 30.0
"""After this many seconds without a wait, the thread exits and closes its connection."""

_log = logging.getLogger("everbeat.client")
_BATCH: Final = 1_000
_LISTENING_POLL: Final = Backoff(first_s=1.0, longest_s=5.0, factor=1.5)
_DEAF_POLL: Final = Backoff(first_s=0.05, longest_s=0.5, factor=1.5)
_LAST_CHECK_S: Final = 0.5
"""The patience, in seconds, for the final query after a wait has timed out."""


class EndedTask(Future[StoredOutcome]):
    """A future that completes when a task finishes. `seen` is the last state that was read before the task finished, if any."""

    seen: TaskState | None = None
    _news: Future[None] | None = None

    def news(self) -> Future[None]:
        """Return a future that completes when the task might have new items. Call this before reading, so that no hint is missed."""
        self._news = Future()
        return self._news

    def hear(self) -> None:
        """Complete the last future that `news` returned."""
        if (news := self._news) is not None and not news.done():
            with suppress(InvalidStateError):  # the reader has just stopped waiting
                news.set_result(None)


class Waiter:
    """Creates a future for each wait. Threads use the future directly, and event loops wrap it with `asyncio.wrap_future`."""

    def __init__(self, *, look_up: LookUp, make_hint_source: Callable[[], SyncHintSource]) -> None:
        self._look_up = look_up
        self._make_hint_source = make_hint_source
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        # A forked child does not inherit its parent's threads. It starts its own thread at the first wait.
        self._changed = threading.Condition()
        self._waiting: dict[UUID, list[EndedTask]] = {}
        self._asked: set[UUID] = set()
        self._ask_all = False
        self._listening = False
        self._hint_rate = HintRate()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_listening(self) -> bool:
        """Return whether hints are arriving."""
        return self._listening

    def wait(self, task_id: UUID) -> EndedTask:
        """Return a future that completes when the task finishes. It fails with TaskNotFound, or a DatabaseError that a retry cannot fix."""
        future = EndedTask()
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
        """Stop the thread and close its connection. Calls that are still waiting raise AppClosed."""
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
                case ItemsStored(ids=ids):
                    for future in chain.from_iterable(self._waiting.get(task_id, ()) for task_id in ids):
                        future.hear()
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
        source = self._make_hint_source()
        source.start(self._hinted, self._heard)
        try:
            self._serve()
        finally:
            source.stop()

    def _serve(self) -> None:
        polls, next_poll, idle_since = 0, monotonic(), monotonic()
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
                pauses = _LISTENING_POLL if self._listening else _DEAF_POLL
            if wanted:
                sleep(self._hint_rate.pause_s(monotonic()))
            self._ask(wanted)
            if everybody or newcomers:
                # After a new wait or a finished task, other tasks often finish soon. Poll frequently at first, then less often.
                polls = 1 if newcomers else polls + 1
                next_poll = monotonic() + pauses.delay(polls)
            if self._waiting:
                idle_since = monotonic()

    def _retired(self, *, idle_for: float) -> bool:
        """Return whether the thread must exit now. Must be called with the lock held, so that no new wait is missed."""
        if not self._closed and (self._waiting or idle_for < IDLE_S):
            return False
        for task_id, ended in self._waiting.items():
            for future in ended:
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
                _log.warning("still waiting for tasks during a database outage: %s", outage)
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

    def _take(self, task_id: UUID) -> list[EndedTask]:
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


def _settle(future: EndedTask, end: StoredOutcome | EverbeatError) -> None:
    try:
        if isinstance(end, EverbeatError):
            future.set_exception(end)
        else:
            future.set_result(end)
    except InvalidStateError:
        pass  # the owner of the future has just stopped waiting


class Deadline:
    """The deadline of a wait: `within_s` seconds after the call began, or never."""

    def __init__(self, timeout: Duration | None) -> None:
        self.within_s = inf if timeout is None else to_seconds(timeout, subject="timeout")
        self._began_at = monotonic()

    @property
    def left_s(self) -> float | None:
        """Return the number of seconds until the deadline, or None without a deadline."""
        return None if self.within_s == inf else max(0.0, self.within_s - self.waited_s)

    @property
    def waited_s(self) -> float:
        """Return the number of seconds since the call began."""
        return monotonic() - self._began_at


def ends_of(waiter: Waiter, ids: Iterable[UUID], *, until: Deadline) -> Plan[dict[UUID, StoredOutcome]]:
    """Wait for all of the tasks to finish, and return their outcomes.

    Raises WaitTimeout, which names the first unfinished task, if the deadline passes first. Raises TaskNotFound if a task does not
    exist, AppClosed if the app is closed in the meantime, and DatabaseError if the tasks cannot be read.
    """
    ended = {task_id: waiter.wait(task_id) for task_id in ids}
    left_s = until.left_s
    try:
        yield Action(
            lambda: futures.wait(ended.values(), timeout=left_s, return_when=futures.FIRST_EXCEPTION),
            lambda: _await_ends(ended.values(), left_s),
        )
    finally:
        # If the call itself is interrupted, the waiter must not keep polling for these tasks.
        late = [task_id for task_id, future in ended.items() if future.cancel()]
    found = {task_id: future.result() for task_id, future in ended.items() if not future.cancelled()}
    seen = {task_id: ended[task_id].seen for task_id in late}
    # A wait for a single task trusts the last state that the waiter read. Of several tasks, some may have finished since then.
    asked = [task_id for task_id in late if len(ended) > 1 or seen[task_id] is None]
    if asked:
        last: dict[UUID, StoredOutcome] = yield Bounded(history.outcomes(asked), _LAST_CHECK_S)
        found |= {task_id: outcome for task_id, outcome in last.items() if outcome.state.is_terminal}
        seen |= {task_id: last[task_id].state if task_id in last else None for task_id in asked}
    missing = [task_id for task_id in late if task_id not in found]
    for task_id in missing:
        if seen[task_id] is None:
            raise TaskNotFound(task_id)
    if missing:
        raise WaitTimeout(
            missing[0], until.waited_s, state=seen[missing[0]], missing=len(missing), waited_for=len(ended)
        )
    return found


async def _await_ends(ended: Collection[EndedTask], left_s: float | None) -> None:
    waiting = [asyncio.wrap_future(future) for future in ended]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for each in waiting:
            each.cancel()
            each.add_done_callback(_retrieve_exception)


def _retrieve_exception(future: asyncio.Future[StoredOutcome]) -> None:
    # The wrapped future raises the error. Without this callback, asyncio logs that the wrapper's error was never retrieved.
    if not future.cancelled():
        future.exception()
