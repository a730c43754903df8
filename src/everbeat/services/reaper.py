"""The reaper: notices by age, judged per lease, and revisits what the ended still hold.

What lives here: one look at the beats of all supervisors and what follows. What may not: faster ways to notice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final
from uuid import uuid4

from everbeat.config import RecoveryConfig
from everbeat.domain.commands import SWEEP
from everbeat.domain.recovery import Charge
from everbeat.domain.silence import is_mass
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, JudgementDelayed, MassSilence
from everbeat.services.brake import Brake
from everbeat.services.death import AGE, Death
from everbeat.services.excuses import Excuses
from everbeat.services.observer import Amnesty, Observer, OwnBeats, Statements, Windows
from everbeat.services.problems import problem_of
from everbeat.services.recovery import Recoverer, always
from everbeat.services.thresholds import Thresholds
from everbeat.services.witness import Witness
from everbeat.store import leases, workers
from everbeat.store.leases import Lease
from everbeat.store.workers import WatchedBeats

_ONE_TRY: Final = 0.0
_MOST_OF_ONE_SUPERVISOR: Final = 10_000
_SOONEST_S: Final = 0.02
_EXCUSED_WINDOWS: Final = 2
_THRESHOLDS_UNTIL_TOLD: Final = 2


class Reaper:
    """A service of every supervisor. It never judges its own. `witness`: who proves deaths in a mass silence; None: nobody."""

    name = "reaper"

    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        recoverer: Recoverer,
        observer: Observer,
        events: EventBus,
        clock: Clock,
        witness: Witness | None = None,
        command: str = SWEEP,
    ) -> None:
        self.interval_s = config.check_interval_ms / 1_000
        self._statements = statements
        self._recoverer = recoverer
        self._observer = observer
        self._events = events
        self._clock = clock
        self._witness = witness
        self._command = command
        self._beat_s = config.beat_interval_ms / 1_000
        self._is_in_doubt = False
        self._is_delayed = False
        self._silent_ids: set[str] = set()
        self._thresholds = Thresholds.automatic(config)
        self._windows = Windows()
        self._amnesty = Amnesty(longest_gap_s=2 * self.interval_s)
        self._own_beats = OwnBeats()
        window_s = self._thresholds.longest_plain_ms / 1_000
        self._brake = Brake(window_s=window_s)
        self._excuses = Excuses(
            statements,
            observer=observer,
            events=events,
            longest_s=_EXCUSED_WINDOWS * window_s,
            command=command,
        )

    async def tick(self) -> float | None:
        """One look. Asks for the next one at the very moment in which a silence becomes too long."""
        if not self._thresholds.all_ms():
            return None
        parts = (self._recoverer.recover_ended, partial(self._recoverer.recover_orphans, self._thresholds))
        problems = [problem for part in parts if (problem := await problem_of(part)) is not None]
        wanted = await self._look()
        if problems:
            raise problems[0]
        return wanted

    async def _look(self) -> float | None:
        asked_at = self._clock.monotonic()
        beats = await self._statements.run(workers.watch_beats(), patience_s=_ONE_TRY)
        self._see(beats, asked_at=asked_at, answered_at=self._clock.monotonic())
        others = [beat for beat in beats if beat.supervisor_id != self._observer.supervisor_id]
        is_silent = any(self._silence_s(beat, at=asked_at) > self._beat_s for beat in others)
        excused = await self._excuses.look(others, is_silent=is_silent, at=asked_at)
        for beat in others:
            if beat.supervisor_id in excused:
                self._windows.forget_some((beat.supervisor_id, *beat.worker_seqs))
        others = [beat for beat in others if beat.supervisor_id not in excused]
        self._tell_delay(others, at=asked_at)
        unproven = await self._unproven(others, known=len(beats), at=asked_at)
        known, others = len(beats) - len(others) + len(unproven), unproven
        stale = [
            beat
            for beat in others
            if self._windows.stands_s(beat.supervisor_id, at=asked_at) >= self._least_s(beat)
        ]
        judged = await self._judged(stale, others=others, known=known, at=asked_at)
        problems = [await problem_of(partial(self._judge, beat, at=asked_at)) for beat in judged]
        for problem in filter(None, problems):
            raise problem
        return self._next_look(others)

    def _see(self, beats: Sequence[WatchedBeats], *, asked_at: float, answered_at: float) -> None:
        landed = self._own_beats.landed(beats, supervisor_id=self._observer.supervisor_id)
        if beats and self._amnesty.is_due(
            asked_at=asked_at,
            answered_at=answered_at,
            server=beats[0].server_started_at,
            disturbances=self._observer.disturbances,
        ):
            self._windows.excuse(at=answered_at)
        watched_s = self._amnesty.watched_s
        self._windows.pass_by(watched_s=watched_s, served_s=landed * self._beat_s if watched_s else 0.0)
        for beat in beats:
            self._windows.see(beat.supervisor_id, beat.beat_seq, at=answered_at)
            for worker_id, sequence in beat.worker_seqs.items():
                self._windows.see(worker_id, sequence, at=answered_at)
        seen = [beat.supervisor_id for beat in beats]
        self._windows.keep(seen + [worker_id for beat in beats for worker_id in beat.worker_seqs])

    def _tell_delay(self, others: Sequence[WatchedBeats], *, at: float) -> None:
        """Says once that the trouble of this observer has put judgements off for long."""
        silent_s = [
            self._unheard_s(beat)
            for beat in others
            if self._unheard_s(beat) > _THRESHOLDS_UNTIL_TOLD * self._least_s(beat)
            and not self._is_silent(beat, at=at)
        ]
        if silent_s and not self._is_delayed:
            self._events.emit(
                JudgementDelayed(
                    silent=len(silent_s), for_s=max(silent_s), troubles=self._observer.disturbances
                )
            )
        self._is_delayed = bool(silent_s)

    async def _unproven(self, others: Sequence[WatchedBeats], *, known: int, at: float) -> list[WatchedBeats]:
        """The others without those that this machine proves dead: a death is no part of a mass silence."""
        silent = [beat for beat in others if self._is_silent(beat, at=at)]
        if self._witness is None or not is_mass(silent=self._silent_with(silent, others, at=at), known=known):
            return list(others)
        buried = await self._witness.bury_proven([beat.supervisor_id for beat in silent], noticed_by=AGE)
        return [beat for beat in others if beat.supervisor_id not in buried]

    def _silent_with(
        self, silent: Sequence[WatchedBeats], others: Sequence[WatchedBeats], *, at: float
    ) -> int:
        """How many may have fallen silent together with these."""
        since = min((self._silence_s(beat, at=at) for beat in silent), default=math.inf)
        with_it = since - self._beat_s - self.interval_s
        return sum(self._silence_s(beat, at=at) >= with_it for beat in others)

    async def _judged(
        self,
        stale: Sequence[WatchedBeats],
        *,
        others: Sequence[WatchedBeats],
        known: int,
        at: float,
    ) -> Sequence[WatchedBeats]:
        """Whom this look may judge: all that are stale or, in a mass silence, nobody or the longest silent one."""
        silent = sorted(
            (beat for beat in stale if self._is_silent(beat, at=at)),
            key=lambda beat: self._silence_s(beat, at=at),
            reverse=True,
        )
        was_on = self._brake.is_on
        if self._brake.look(silent=len(silent), known=known, at=at):
            self._events.emit(
                MassSilence(silent=len(silent), known=known, wait_s=self._brake.window_s, fix=self._command)
            )
        if was_on and not self._brake.is_on:
            self._windows.forget()  # most are back: the last ones may be on their way
            return []
        if not self._brake.is_on:
            # Those cut off together reach the threshold one after the other, as their last beats came, and were seen: before the
            # first of them is judged, all that may have fallen silent with it show whether they are alive.
            self._is_in_doubt = is_mass(silent=self._silent_with(silent, others, at=at), known=known)
            return [] if self._is_in_doubt else stale
        self._is_in_doubt = False
        back = self._silent_ids & {beat.supervisor_id for beat in others} - {
            beat.supervisor_id for beat in silent
        }
        self._silent_ids = {beat.supervisor_id for beat in silent}
        if back:
            self._brake.wait_again(at)  # one came back: the others may be on their way
        if self._brake.is_waiting(at):
            return []
        # One turn for all observers; a new name each time, because a turn may be retaken by whoever has it.
        turn = workers.take_turn(
            "brake", interval_ms=round(self._brake.pace_s * 1_000), taken_by=str(uuid4())
        )
        return silent[:1] if await self._statements.run(turn, patience_s=_ONE_TRY) else []

    async def _judge(self, beat: WatchedBeats, *, at: float) -> None:
        page = leases.leases_of_supervisor(beat.supervisor_id, limit=_MOST_OF_ONE_SUPERVISOR)
        while True:
            held = await self._statements.run(page, patience_s=_ONE_TRY)
            if self._amnesty.has_lapsed(self._observer.disturbances):
                return  # this look was before an outage, and what follows from it would land after it
            stale = [lease for lease in held if self._is_stale(lease, beat, at=at)]
            # Once only: on any error the decision is dropped, and taken anew from a new look.
            carried = await self._recoverer.carry_out(
                stale,
                always(_death(beat)),
                charge=always(Charge.LOSS),
                watched=(beat.supervisor_id, beat.beat_seq),
                patience_s=_ONE_TRY,
            )
            if len(carried.landed) + len(carried.left) < len(held):
                return  # its longest threshold has not passed, or it came back, or what it holds is to be left
            if carried.left or len(held) < _MOST_OF_ONE_SUPERVISOR:
                break
        if self._silence_s(beat, at=at) * 1_000 >= self._thresholds.judging(beat).longest_plain_ms:
            end = workers.end_supervisor(beat.supervisor_id, how=AGE, beat_seq=beat.beat_seq)
            await self._statements.run(end, patience_s=_ONE_TRY)
            await self._recoverer.recover_ended()

    def _is_stale(self, lease: Lease, beat: WatchedBeats, *, at: float) -> bool:
        threshold_ms = self._thresholds.of(lease)
        if threshold_ms is None or lease.supervisor_seq != beat.beat_seq:
            return False
        if lease.worker_seq != beat.worker_seqs.get(lease.worker_id, 0):
            return False
        own_s = (
            self._windows.stands_s(lease.worker_id, at=at)
            if lease.worker_id in beat.worker_seqs
            else math.inf
        )
        return min(self._windows.stands_s(beat.supervisor_id, at=at), own_s) * 1_000 >= threshold_ms

    def _least_s(self, beat: WatchedBeats) -> float:
        """The shortest silence from which a lease of this tree may be stale."""
        return self._thresholds.judging(beat).all_ms()[0] / 1_000

    def _is_silent(self, beat: WatchedBeats, *, at: float) -> bool:
        """Whether nothing of a tree was heard for that long."""
        return self._silence_s(beat, at=at) >= self._least_s(beat)

    def _silence_s(self, beat: WatchedBeats, *, at: float) -> float:
        """How long nothing of a tree was heard: of its supervisor or of a worker that beats for itself."""
        return min(self._windows.stands_s(key, at=at) for key in (beat.supervisor_id, *beat.worker_seqs))

    def _unheard_s(self, beat: WatchedBeats) -> float:
        """The same, counted without regard to the trouble of this observer."""
        return min(self._windows.watched_s(key) for key in (beat.supervisor_id, *beat.worker_seqs))

    def _next_look(self, others: Sequence[WatchedBeats]) -> float | None:
        if self._brake.is_on:
            return None
        if self._is_in_doubt:
            return min(self.interval_s, self._beat_s / 8)
        now = self._clock.monotonic()
        waits = [
            self._windows.next_in(beat.supervisor_id, threshold_ms / 1_000, at=now)
            for beat in others
            if self._windows.is_suspect(beat.supervisor_id)
            for threshold_ms in self._thresholds.judging(beat).all_ms()
        ]
        soonest = min((wait for wait in waits if wait > 0), default=self.interval_s)
        return max(_SOONEST_S, soonest) if soonest < self.interval_s else None


def _death(beat: WatchedBeats) -> Death:
    return Death(
        noticed_by=AGE,
        cause=f"its supervisor fell silent (beat {beat.beat_seq} was its last)",
    )
