"""Detection of worker processes that hang, do not respond, or are cut off from the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from everbeat.domain.recovery.decision import UNRESPONSIVE_S
from everbeat.errors import DatabaseError
from everbeat.recovering.observer import Observer
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import Event
from everbeat.runtime.task_scope import Service, TaskScope
from everbeat.supervisor.processes import ManagedProcess, StartReport, WorkerChild
from everbeat.supervisor.registration import Supervision

_TIME_FOR_THE_STACKS_S: Final = 0.5
_TIME_FOR_THE_NAMES_S: Final = 1.0
_CHECK_EVERY_S: Final = 1.0
_CHECKS_PER_THRESHOLD: Final = 4
_THRESHOLDS: Final = 2


class WorkerHangs(Event, frozen=True, kw_only=True):
    """A worker process is being killed because it was silent for `silent_s` seconds. Its stacks are on its standard error.

    `running`: the name and id of each task whose code was running in the process, or None if the database did not reply in time.
    """

    component = "supervisor"
    level = logging.ERROR
    worker_id: str
    pid: int
    silent_s: float
    running: tuple[str, ...] | None


class HangWatch:
    """A service of the supervisor that kills worker processes whose event loop is blocked."""

    name = "hang_watch"

    def __init__(
        self,
        supervision: Supervision,
        children: Sequence[WorkerChild],
        *,
        timeout_s: float,
        scope: TaskScope,
    ) -> None:
        self.interval_s = min(1.0, timeout_s / 4)
        self._supervision = supervision
        self._children = children
        self._timeout_s = timeout_s
        self._clock = supervision.environment.clock
        self._scope = scope
        self._looked_at = self._clock.monotonic()

    async def tick(self) -> float | None:
        """Check all worker processes, and kill those that have been silent for too long.

        If the supervisor itself was suspended, it counts all silences from now on, because the workers' messages are still unread.
        """
        now = self._clock.monotonic()
        was_away = now - self._looked_at > 2 * self.interval_s
        self._looked_at = now
        for child in self._children:
            if was_away:
                child.heard_at = now
            elif child.is_ready and child.killed_because is None and now - child.heard_at >= self._timeout_s:
                silent_s = now - child.heard_at
                child.killed_because = f"its loop stood still for {silent_s:.1f} s"
                self._scope.start(self._end(child, silent_s=silent_s), name=f"end of {child.process.pid}")
        return None

    async def _end(self, child: WorkerChild, *, silent_s: float) -> None:
        child.process.dump_stacks()
        worker_id = child.worker_id
        asked = self._scope.start(self._names(worker_id), name=f"what runs in {worker_id}")
        await asyncio.sleep(_TIME_FOR_THE_STACKS_S)
        await asyncio.wait({asked}, timeout=_TIME_FOR_THE_NAMES_S - _TIME_FOR_THE_STACKS_S)
        self._supervision.environment.events.emit(
            WorkerHangs(
                worker_id=worker_id,
                pid=child.process.pid,
                silent_s=silent_s,
                running=asked.result() if asked.done() else None,
            )
        )
        child.process.kill()

    async def _names(self, worker_id: str) -> tuple[str, ...] | None:
        try:
            return tuple(await self._supervision.running(worker_id))
        except DatabaseError:
            return None


class WorkerUnresponsive(Event, frozen=True, kw_only=True):
    """A worker process has sent nothing for `silent_s` seconds, because it is suspended or code is blocking it. It keeps its leases.

    `fix`: the command with which an operator can release the process's tasks to other workers.
    """

    component = "supervisor"
    level = logging.WARNING
    worker_id: str
    pid: int
    silent_s: float
    held: int
    fix: str


class WorkerResponds(Event, frozen=True, kw_only=True):
    """A worker process that was reported as unresponsive has responded again after `silent_s` seconds."""

    component = "supervisor"
    level = logging.WARNING
    worker_id: str
    pid: int
    silent_s: float


class ResponseWatch:
    """A service of the supervisor that reports when a worker process becomes unresponsive and when it responds again."""

    name = "response_watch"

    def __init__(
        self,
        environment: ProcessEnvironment,
        children: Sequence[WorkerChild],
        *,
        after_s: float = UNRESPONSIVE_S,
    ) -> None:
        self.interval_s = min(_CHECK_EVERY_S, after_s / 4)
        self._environment = environment
        self._children = children
        self._after_s = after_s
        self._looked_at = self._present_since = environment.clock.monotonic()
        self._reported: dict[int, float] = {}

    async def tick(self) -> float | None:
        """Check all worker processes, and report changes.

        If the supervisor itself was suspended, it restarts the wait, because the workers' messages are still unread.
        """
        now = self._environment.clock.monotonic()
        if now - self._looked_at > 2 * self.interval_s:
            self._present_since = now
        self._looked_at = now
        pids = {child.process.pid for child in self._children}
        self._reported = {pid: at for pid, at in self._reported.items() if pid in pids}
        for child in self._children:
            self._check(child, now)
        return None

    def _check(self, child: WorkerChild, now: float) -> None:
        pid, worker_id, emit = child.process.pid, child.worker_id, self._environment.events.emit
        silent_since = self._reported.get(pid)
        if silent_since is not None:
            if child.heard_at > silent_since:
                del self._reported[pid]
                child.is_unresponsive = False
                emit(
                    WorkerResponds(
                        worker_id=worker_id, pid=pid, silent_s=round(child.heard_at - silent_since, 1)
                    )
                )
            return
        is_watched = child.is_ready and not child.has_left and child.killed_because is None
        if is_watched and now - max(child.heard_at, self._present_since) >= self._after_s:
            self._reported[pid] = child.heard_at
            child.is_unresponsive = True
            emit(
                WorkerUnresponsive(
                    worker_id=worker_id,
                    pid=pid,
                    silent_s=round(now - child.heard_at, 1),
                    held=0 if child.worker is None else len(child.worker.held),
                    fix=f"everbeat workers release {worker_id}",
                )
            )


class WorkerCutOff(Event, frozen=True, kw_only=True):
    """A worker process is being killed because it could not reach the database for `for_s` seconds while its supervisor could."""

    component = "supervisor"
    level = logging.ERROR
    worker_id: str
    pid: int
    for_s: float


class CutOffWatch:
    """A service of the supervisor that kills worker processes that cannot reach the database while the supervisor can."""

    name = "cut_off_watch"

    def __init__(
        self,
        observer: Observer,
        environment: ProcessEnvironment,
        children: Sequence[WorkerChild],
        *,
        threshold_s: float,
    ) -> None:
        self.interval_s = min(1.0, threshold_s / _CHECKS_PER_THRESHOLD)
        self._observer = observer
        self._environment = environment
        self._clock = environment.clock
        self._children = children
        self._too_long_s = _THRESHOLDS * threshold_s
        self._disturbances = observer.disturbances
        self._looked_at = self._clock.monotonic()
        self._reached_since: float | None = None

    async def tick(self) -> float | None:
        """Check all worker processes, and kill those that have been cut off from the database for too long."""
        was_away = self._clock.monotonic() - self._looked_at > 2 * self.interval_s
        is_asked = not was_away and any(_cut_off_s(child) > 0 for child in self._children)
        if not is_asked or not await self._reaches():
            self._reached_since = None
        elif self._reached_since is None:
            self._reached_since = self._clock.monotonic()
        self._disturbances, self._looked_at = self._observer.disturbances, self._clock.monotonic()
        for child in self._children:
            if self._is_cut_off(child):
                self._end(child)
        return None

    def _is_cut_off(self, child: WorkerChild) -> bool:
        if self._reached_since is None or child.worker is None or child.killed_because is not None:
            return False
        reached_s = child.worker.ticked_at - self._reached_since
        return min(reached_s, _cut_off_s(child)) >= self._too_long_s

    async def _reaches(self) -> bool:
        return await self._observer.can_connect() and self._observer.disturbances == self._disturbances

    def _end(self, child: WorkerChild) -> None:
        for_s = _cut_off_s(child)
        self._environment.events.emit(
            WorkerCutOff(worker_id=child.worker_id, pid=child.process.pid, for_s=for_s)
        )
        child.kill(
            because=f"it reached no database for {for_s:.1f} s to settle what it had finished, while others did"
        )


def _cut_off_s(child: WorkerChild) -> float:
    tick = None if child.worker is None else child.worker.tick
    return 0.0 if tick is None else tick.cut_off_s


def watches_of(
    supervision: Supervision,
    children: Sequence[WorkerChild],
    processes: Sequence[ManagedProcess],
    *,
    scope: TaskScope,
) -> list[Service]:
    """Return the services that watch worker processes, as configured. They read `children` and `processes` again at each tick."""
    config, environment = supervision.config, supervision.environment
    watches: list[Service] = [
        StartReport(supervision, processes),
        ResponseWatch(environment, children),
        CutOffWatch(
            supervision, environment, children, threshold_s=config.running_stale_threshold_ms / 1_000
        ),
    ]
    if config.hang_timeout_ms is not None:
        watches.append(
            HangWatch(supervision, children, timeout_s=config.hang_timeout_ms / 1_000, scope=scope)
        )
    return watches
