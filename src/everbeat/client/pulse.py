"""Samples the pulse for all viewers of a process: one statement a second, and only while pages are watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final

from everbeat.domain.doctor.work import SWEEPS_MISSED
from everbeat.domain.explain.reasons import SilenceRules
from everbeat.domain.inspection import RecoveryInfo, SupervisorInfo
from everbeat.domain.pulse.actions import ActionMemory
from everbeat.domain.pulse.incidents import Incident, incidents_of
from everbeat.domain.pulse.judging import TreeState
from everbeat.domain.pulse.memory import DEAD_SHOWN_S, WINDOW_S, PulseMemory
from everbeat.domain.pulse.wording import names_in_incidents
from everbeat.domain.recovery.liveness import FAREWELL
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.task_scope import TaskScope
from everbeat.store import pulse

EVERY_S: Final = 1.0
"""Seconds between two samples."""
SUSPECT_EVERY_S: Final = 0.5
"""Seconds between two samples while a tree might be dead, so that its end is seen soon."""
LINGER_S: Final = 3.0
"""For how many seconds sampling continues after the last viewer left. A page that is loaded again then finds its picture."""
_GAP_S: Final = 5.0
"""After this many seconds without a sample, the window is filled from the stored heartbeats again."""
SINCE: Final = timedelta(hours=24)
"""How far back incidents are listed."""
_CALM_S: Final = 15.0
_BUSY_S: Final = 2.0

RunPulse = Callable[[Any], Awaitable[Any]]
"""Runs one statement on the dashboard's connections."""


class PulseWatch:
    """Takes samples for all viewers. `run` runs a statement. Viewers wait for the next look, so a slow one misses looks and holds no memory.

    `problem` is why the last sample failed, or None.
    """

    def __init__(self, run: RunPulse, *, rules: SilenceRules, clock: Clock) -> None:
        self.memory = PulseMemory(rules)
        self.problem: DatabaseError | None = None
        self.viewers = 0
        self.looks = 0
        self._run = run
        self._rules = rules
        self._clock = clock
        self._scope = TaskScope(name="pulse")
        self._sampling: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._looked_at: float | None = None
        self._left_at = 0.0
        self._one = asyncio.Lock()
        self._is_closed = False

    async def look_at_actions(self) -> ActionMemory:
        """Return the actions of operators with all those that are committed now. Raises DatabaseError."""
        actions = self.memory.actions
        actions.record(await self._run(pulse.latest_actions(actions.last_id)))
        return actions

    async def look(self) -> PulseMemory:
        """Return the memory with a sample that is at most a second old. Raises DatabaseError if none can be taken."""
        async with self._one:
            if self.age_s > EVERY_S:
                await self._sample()
        if self.problem is not None:
            raise self.problem
        return self.memory

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
        """Count as a viewer inside an `async with` block. The function waits for the next look, and returns False when the watch is closed."""
        self.viewers += 1
        self._start()
        seen = self.looks

        async def next_look() -> bool:
            nonlocal seen
            while self.looks == seen and not self._is_closed:
                await self._looked.wait()
            seen = self.looks
            return not self._is_closed

        try:
            yield next_look
        finally:
            self.viewers -= 1
            self._left_at = self._clock.monotonic()

    async def close(self) -> None:
        """Stop sampling, and end the waits of all viewers."""
        self._is_closed = True
        self._tell()
        await self._scope.close()

    def _start(self) -> None:
        if not self._is_closed and (self._sampling is None or self._sampling.done()):
            self._sampling = self._scope.start(self._keep_sampling(), name="sampling")

    async def _keep_sampling(self) -> None:
        while self.viewers or self._clock.monotonic() - self._left_at < LINGER_S:
            began = self._clock.monotonic()
            async with self._one:
                await self._sample()
            self._tell()
            pause_s = self._pause_s() - (self._clock.monotonic() - began)
            await self._clock.sleep(max(0.0, pause_s))

    def _pause_s(self) -> float:
        is_suspect = any(
            trace.judgement.state is TreeState.SUSPECT and trace.judgement.session_lost
            for trace in self.memory.traces
        )
        return SUSPECT_EVERY_S if is_suspect else EVERY_S

    async def _sample(self) -> None:
        memory = self.memory
        is_gap = self.age_s > _GAP_S
        statement = pulse.sample(
            self._rules,
            margin_ms=SWEEPS_MISSED * self._rules.check_interval_ms,
            window_ms=DEAD_SHOWN_S * 1_000,
            known=None if is_gap else memory.known,
            after_recovery=None if memory.last is None else memory.last.last_recovery,
            after_action=memory.actions.last_id,
        )
        try:
            memory.record(await self._run(statement))
            if is_gap:
                memory.backfill(await self._run(pulse.stored_beats(window_ms=WINDOW_S * 1_000)))
        except DatabaseError as problem:
            self.problem = problem  # the pages show it
            return
        self.problem = None
        self._looked_at = self._clock.monotonic()

    @property
    def age_s(self) -> float:
        """Return how many seconds ago the last sample was taken, or infinity."""
        return float("inf") if self._looked_at is None else self._clock.monotonic() - self._looked_at

    def _tell(self) -> None:
        self.looks += 1
        self._looked.set()
        self._looked = asyncio.Event()


class IncidentWatch:
    """Keeps the incidents of the last 24 hours for all viewers. It reads them again when the pulse shows that something changed.

    `recoveries` and `departed` read the recoveries since a time, at most `most`, and the supervisors with those that have ended.
    """

    def __init__(
        self,
        watch: PulseWatch,
        *,
        most: int,
        recoveries: Callable[[], Awaitable[Sequence[RecoveryInfo]]],
        departed: Callable[[], Awaitable[Sequence[SupervisorInfo]]],
        clock: Clock,
    ) -> None:
        self._watch = watch
        self._most = most
        self._recoveries = recoveries
        self._departed = departed
        self._clock = clock
        self._found: list[Incident] = []
        self._died: list[datetime] = []
        self._read_at: float | None = None
        self._read_of: object = None
        self._one = asyncio.Lock()

    async def incidents(self) -> list[Incident]:
        """Return the incidents of the last 24 hours, the latest first. Raises DatabaseError if they cannot be read."""
        async with self._one:
            state = self._state()
            if self._read_at is None or state != self._read_of or self._age_s() >= self._fresh_s():
                await self._read(state)
        return self._found

    @property
    def last(self) -> list[Incident]:
        """Return what was read last, also if it is old."""
        return self._found

    def died_since(self, moment: datetime) -> int:
        """Return how many trees died since a moment, of those that were read last."""
        return sum(ended_at >= moment for ended_at in self._died)

    async def _read(self, state: object) -> None:
        recoveries, supervisors = await asyncio.gather(self._recoveries(), self._departed())
        last = self._watch.memory.last
        now = None if last is None else last.at
        departed = [
            each
            for each in supervisors
            if each.ended_at is not None and (now is None or now - each.ended_at < SINCE)
        ]
        self._died = [each.ended_at for each in departed if each.ended_at and each.ended_how != FAREWELL]
        self._found = incidents_of(
            recoveries, departed, names=names_in_incidents(supervisors), most=self._most
        )
        self._read_at, self._read_of = self._clock.monotonic(), state

    def _state(self) -> object:
        memory = self._watch.memory
        ended = tuple(trace.tree.id for trace in memory.traces if trace.tree.ended_at is not None)
        return (0 if memory.last is None else memory.last.last_recovery, ended)

    def _fresh_s(self) -> float:
        return _BUSY_S if any(incident.waiting for incident in self._found) else _CALM_S

    def _age_s(self) -> float:
        return float("inf") if self._read_at is None else self._clock.monotonic() - self._read_at
