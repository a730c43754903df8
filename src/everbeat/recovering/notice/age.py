"""Detect deaths by the age of heartbeats, separately for each lease. A mass silence or a server outage does not count as a death."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import uuid4

from msgspec import Struct

from everbeat.domain.doctor.findings import SWEEP
from everbeat.domain.recovery.decision import is_mass
from everbeat.recovering.notice.startup import Witness
from everbeat.recovering.observer import (
    ONE_TRY,
    Amnesty,
    OwnBeats,
    RecoveryEnvironment,
    Thresholds,
    Windows,
    collected,
)
from everbeat.recovering.orders import AGE, Death, LostLease
from everbeat.recovering.recoverer import Recoverer, Recovery
from everbeat.recovering.watch_turn import WatchTurn
from everbeat.runtime.events import Event, JudgementDelayed, MassSilence
from everbeat.store import leases, workers
from everbeat.store.leases import Lease
from everbeat.store.workers import WatchedBeats, WatchedSession

_MOST_OF_ONE_SUPERVISOR: Final = 10_000
_SOONEST_S: Final = 0.02
_EXCUSED_WINDOWS: Final = 2
_THRESHOLDS_UNTIL_REPORTED: Final = 2


class MassSilenceGuard:
    """Delays judgements while many supervisors are silent at once. All times are on the observer's monotonic clock."""

    def __init__(self, *, window_s: float) -> None:
        self.window_s = window_s
        self._since: float | None = None

    @property
    def pace_s(self) -> float:
        """Return the minimum time between two declared deaths while the guard is active, across all observers, in seconds."""
        return 2 * self.window_s

    @property
    def is_active(self) -> bool:
        """Return whether the last check found a mass silence."""
        return self._since is not None

    def record(self, *, silent: int, known: int, at: float) -> bool:
        """Record how many of the known supervisors are silent, and return whether this check activated the guard."""
        if not is_mass(silent=silent, known=known):
            self._since = None
            return False
        if self._since is not None:
            return False
        self._since = at
        return True

    def is_waiting(self, at: float) -> bool:
        """Return whether the additional window that all supervisors were granted is still running."""
        return self._since is not None and at < self._since + self.window_s

    def wait_again(self, at: float) -> None:
        """Grant all supervisors another additional window, starting at `at`."""
        if self._since is not None:
            self._since = at


class SilenceExcused(Event, frozen=True, kw_only=True):
    """The server refuses new connections, so these trees might be alive but unable to connect. Their silence is not judged for now.

    `at_most_s` limits the excuse if it is unknown whether the trees need a connection. `None` means until the server accepts one.
    """

    component = "recovering"
    level = logging.WARNING
    supervisor_ids: tuple[str, ...]
    at_most_s: float | None
    fix: str


class _Excuse(Struct, frozen=True):
    """The time when a tree was excused, and the sequence numbers of its heartbeats at that time."""

    since: float
    beats: tuple[object, ...]


class Excuses:
    """The trees whose silence one observer excuses. `longest_s` limits the excuse of trees that might still be connected."""

    def __init__(self, environment: RecoveryEnvironment, *, longest_s: float, command: str) -> None:
        self._environment = environment
        self._observer = environment.observer
        self._longest_s = longest_s
        self._fix = (
            f"close connections, or raise max_connections; for trees that you know are dead: {command}"
        )
        self._is_refused = False
        self._excused: dict[str, _Excuse] = {}

    async def find(self, others: Sequence[WatchedBeats], *, is_silent: bool, at: float) -> set[str]:
        """Return the ids of the excused supervisors.

        A new connection is tried only if a tree is silent or the previous try was refused.
        """
        self._is_refused = (is_silent or self._is_refused) and not await self._observer.can_connect()
        if not self._is_refused:
            self._excused.clear()
            return set()
        found = await self._environment.run_once(workers.watch_sessions())
        sessions = {each.supervisor_id: each for each in found}
        before, self._excused = self._excused, {}
        for beat in others:
            if not self._is_connected(sessions.get(beat.supervisor_id)):
                self._excused[beat.supervisor_id] = _excuse_of(beat, before, at=at)
        without = {name for name in self._excused if self._has_none(sessions.get(name))}
        self._report(without - before.keys(), at_most_s=None)
        self._report(self._excused.keys() - without - before.keys(), at_most_s=self._longest_s)
        return {
            name
            for name, excuse in self._excused.items()
            if name in without or at - excuse.since < self._longest_s
        }

    def _is_connected(self, session: WatchedSession | None) -> bool:
        return session is not None and session.beats_here and not self._observer.is_pooled

    def _has_none(self, session: WatchedSession | None) -> bool:
        """Return whether a tree certainly has no connection. Behind a transaction pooler, this is unknown, so the result is False."""
        if session is None or self._observer.is_pooled or not session.session_held:
            return False
        return not session.locked and not session.sessions

    def _report(self, names: set[str], *, at_most_s: float | None) -> None:
        if names:
            self._environment.events.emit(
                SilenceExcused(supervisor_ids=tuple(sorted(names)), at_most_s=at_most_s, fix=self._fix)
            )


def _excuse_of(beat: WatchedBeats, before: Mapping[str, _Excuse], *, at: float) -> _Excuse:
    """Return the excuse of a tree. A tree that has sent a heartbeat since the last check gets a new excuse."""
    beats = (beat.beat_seq, *sorted(beat.worker_seqs.items()))
    known = before.get(beat.supervisor_id)
    return known if known is not None and known.beats == beats else _Excuse(at, beats)


class Reaper:
    """A service in every supervisor that declares other silent supervisors dead and recovers the leases of silent trees.

    `witness` proves deaths on this host during a mass silence. `command` is the command for an operator who knows that the silent trees
    are dead. `turn` is the turn to watch, which a supervisor passes on if it must not judge a silence.
    """

    name = "reaper"

    def __init__(
        self,
        recoverer: Recoverer,
        *,
        witness: Witness,
        command: str = SWEEP,
        turn: WatchTurn | None = None,
    ) -> None:
        self._turn = turn
        environment = recoverer.environment
        config = environment.config
        self.interval_s = config.check_interval_ms / 1_000
        self._environment = environment
        self._recoverer = recoverer
        self._observer = environment.observer
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
        self._guard = MassSilenceGuard(window_s=window_s)
        self._excuses = Excuses(environment, longest_s=_EXCUSED_WINDOWS * window_s, command=command)

    async def tick(self) -> float | None:
        """Judge all silent trees once. Return the seconds until another silence reaches its threshold, if that is soon."""
        if not self._thresholds.all_ms():
            return None
        problems: list[Exception] = []
        with collected(problems):
            await self._recoverer.recover_ended()
        with collected(problems):
            await self._recoverer.recover_orphans(self._thresholds)
        wanted = await self._check()
        if problems:
            raise problems[0]
        return wanted

    async def _check(self) -> float | None:
        clock = self._environment.clock
        asked_at = clock.monotonic()
        beats = await self._environment.run_once(workers.watch_beats())
        self._see(beats, asked_at=asked_at, answered_at=clock.monotonic())
        others = [beat for beat in beats if beat.supervisor_id != self._observer.supervisor_id]
        is_silent = any(self._silence_s(beat, at=asked_at) > self._beat_s for beat in others)
        excused = await self._excuses.find(others, is_silent=is_silent, at=asked_at)
        if excused and self._turn is not None:
            await self._turn.pass_on(known=len(beats))
        for beat in others:
            if beat.supervisor_id in excused:
                self._windows.forget_some((beat.supervisor_id, *beat.worker_seqs))
        others = [beat for beat in others if beat.supervisor_id not in excused]
        self._report_delay(others, at=asked_at)
        unproven = await self._unproven(others, known=len(beats), at=asked_at)
        known, others = len(beats) - len(others) + len(unproven), unproven
        stale = [
            beat
            for beat in others
            if self._windows.stands_s(beat.supervisor_id, at=asked_at) >= self._least_s(beat)
        ]
        judged = await self._judged(stale, others=others, known=known, at=asked_at)
        problems: list[Exception] = []
        for beat in judged:
            with collected(problems):
                await self._judge(beat, at=asked_at)
        if problems:
            raise problems[0]
        return self._next_check(others)

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

    def _report_delay(self, others: Sequence[WatchedBeats], *, at: float) -> None:
        """Report once that disturbances of this observer have postponed judgements for a long time."""
        silent_s = [
            self._unheard_s(beat)
            for beat in others
            if self._unheard_s(beat) > _THRESHOLDS_UNTIL_REPORTED * self._least_s(beat)
            and not self._is_silent(beat, at=at)
        ]
        if silent_s and not self._is_delayed:
            self._environment.events.emit(
                JudgementDelayed(
                    silent=len(silent_s), for_s=max(silent_s), troubles=self._observer.disturbances
                )
            )
        self._is_delayed = bool(silent_s)

    async def _unproven(self, others: Sequence[WatchedBeats], *, known: int, at: float) -> list[WatchedBeats]:
        """Return the trees that this host cannot prove dead. A proven death does not count towards a mass silence."""
        silent = [beat for beat in others if self._is_silent(beat, at=at)]
        if not is_mass(silent=self._silent_with(silent, others, at=at), known=known):
            return list(others)
        buried = await self._witness.bury_proven([beat.supervisor_id for beat in silent], noticed_by=AGE)
        return [beat for beat in others if beat.supervisor_id not in buried]

    def _silent_with(
        self, silent: Sequence[WatchedBeats], others: Sequence[WatchedBeats], *, at: float
    ) -> int:
        """Return how many of `others` might have fallen silent together with `silent`."""
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
        """Return the trees that can be judged now.

        These are all stale trees. In a mass silence, it is at most one tree: the one that has been silent for longest.
        """
        silent = sorted(
            (beat for beat in stale if self._is_silent(beat, at=at)),
            key=lambda beat: self._silence_s(beat, at=at),
            reverse=True,
        )
        was_on = self._guard.is_active
        if self._guard.record(silent=len(silent), known=known, at=at):
            self._environment.events.emit(
                MassSilence(silent=len(silent), known=known, wait_s=self._guard.window_s, fix=self._command)
            )
        if was_on and not self._guard.is_active:
            self._windows.forget()  # most trees are back, and the others might be about to return
            return []
        if not self._guard.is_active:
            # Supervisors that are cut off together reach the threshold one after another, because their last heartbeats were sent at
            # different times. So a supervisor is judged only after others that might have been cut off with it had time to send a heartbeat.
            self._is_in_doubt = is_mass(silent=self._silent_with(silent, others, at=at), known=known)
            return [] if self._is_in_doubt else stale
        self._is_in_doubt = False
        back = self._silent_ids & {beat.supervisor_id for beat in others} - {
            beat.supervisor_id for beat in silent
        }
        self._silent_ids = {beat.supervisor_id for beat in silent}
        if back:
            self._guard.wait_again(at)  # one tree came back, so the others might be about to return
        if self._guard.is_waiting(at):
            return []
        # All observers share one turn. Each turn is taken under a new name, because the holder of a turn can take it again.
        turn = workers.take_turn(
            "brake", interval_ms=round(self._guard.pace_s * 1_000), taken_by=str(uuid4())
        )
        return silent[:1] if await self._environment.run_once(turn) else []

    async def _judge(self, beat: WatchedBeats, *, at: float) -> None:
        query = leases.leases_of_supervisor(beat.supervisor_id, limit=_MOST_OF_ONE_SUPERVISOR)
        death = Death(noticed_by=AGE, cause=f"its supervisor fell silent (beat {beat.beat_seq} was its last)")
        while True:
            held = await self._environment.run_once(query)
            if self._amnesty.has_lapsed(self._observer.disturbances):
                return  # the check preceded an outage, and a decision based on it would be applied after the outage
            # Try only once: on any error the decision is dropped, and a later check decides again.
            recovery = Recovery(
                lost=[LostLease(lease, death) for lease in held if self._is_stale(lease, beat, at=at)],
                last_beat=(beat.supervisor_id, beat.beat_seq),
                patience_s=ONE_TRY,
            )
            result = await self._recoverer.recover(recovery)
            if len(result.landed) + len(result.left) < len(held):
                return  # the tree's longest threshold has not passed, the tree came back, or its leases must be left
            if result.left or len(held) < _MOST_OF_ONE_SUPERVISOR:
                break
        if self._silence_s(beat, at=at) * 1_000 >= self._thresholds.judging(beat).longest_plain_ms:
            end = workers.end_supervisor(beat.supervisor_id, how=AGE, beat_seq=beat.beat_seq)
            await self._environment.run_once(end)
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
        """Return the shortest silence in seconds after which a lease of this tree can be stale."""
        return self._thresholds.judging(beat).all_ms()[0] / 1_000

    def _is_silent(self, beat: WatchedBeats, *, at: float) -> bool:
        """Return whether the whole tree has been silent for at least `_least_s`."""
        return self._silence_s(beat, at=at) >= self._least_s(beat)

    def _silence_s(self, beat: WatchedBeats, *, at: float) -> float:
        """Return how many seconds a tree has been silent, including its supervisor and the workers that send their own heartbeats."""
        return min(self._windows.stands_s(key, at=at) for key in (beat.supervisor_id, *beat.worker_seqs))

    def _unheard_s(self, beat: WatchedBeats) -> float:
        """Return how many seconds a tree has been silent, regardless of disturbances of this observer."""
        return min(self._windows.watched_s(key) for key in (beat.supervisor_id, *beat.worker_seqs))

    def _next_check(self, others: Sequence[WatchedBeats]) -> float | None:
        if self._guard.is_active:
            return None
        if self._is_in_doubt:
            return min(self.interval_s, self._beat_s / 8)
        now = self._environment.clock.monotonic()
        waits = [
            self._windows.next_in(beat.supervisor_id, threshold_ms / 1_000, at=now)
            for beat in others
            if self._windows.is_suspect(beat.supervisor_id)
            for threshold_ms in self._thresholds.judging(beat).all_ms()
        ]
        soonest = min((wait for wait in waits if wait > 0), default=self.interval_s)
        return max(_SOONEST_S, soonest) if soonest < self.interval_s else None
