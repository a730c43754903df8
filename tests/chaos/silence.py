"""Determine which fault explains a death, from the silences inflicted on each tree and the detected deaths. No side effects."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.chaos.evidence import Evidence, Life, RecoveryRow
from tests.chaos.plan import BEAT_S, GRACE_S, ONE_AT_A_TIME, THRESHOLD_S, Kind

BY_ITSELF: Final = "ended_by_itself"
MACHINE: Final = "machine_stood_still"
TASK_CODE: Final = "task_code"

_LATE_S: Final = 0.3
"""The maximum error of recorded times, in seconds."""
_BEATS_AGAIN_S: Final = 1.5
"""How long a tree's next heartbeat can take after the end of a fault, in seconds."""
_RECONNECTS_S: Final = 0.7
"""How long a tree's session can take to be reopened after the end of a fault, in seconds."""
_CARRIED_OUT_S: Final = 0.5
"""How long a decision can take to commit after the check on which it is based, in seconds."""
_LEAST_INFLICTED: Final = 0.4
"""The minimum share of the threshold during which faults must prevent a tree's heartbeats before age can declare it dead."""
_LEAST_COVERED: Final = 0.85
"""The minimum share of a tree's last silence that faults must explain."""
_SILENCING: Final = frozenset({Kind.CUT, Kind.HALF_OPEN, Kind.FREEZE_TREE, Kind.FREEZE_SUPERVISOR})
_OF_TREES: Final = (Kind.KILL_TREE, Kind.KILL_SUPERVISOR, Kind.FORK, Kind.KILL_TURN_HOLDER)
"""Types of faults that kill a whole tree or its supervisor."""
_KILLING: Final = frozenset({Kind.KILL_WORKER, Kind.KILL_TASK_PROCESS, *_OF_TREES})
_WAYS: Final = frozenset({"age", "session", "startup"})


@dataclass(frozen=True, slots=True)
class Silence:
    """A period in which a tree could not send heartbeats, and the reason."""

    began: float
    ended: float
    why: str

    def lasting(self, seconds: float) -> Silence:
        """Return this silence, extended by this many seconds."""
        return Silence(self.began, self.ended + seconds, self.why)

    def overlap(self, began: float, ended: float) -> float:
        """Return how many seconds of this silence are within a period."""
        return max(0.0, min(self.ended, ended) - max(self.began, began))


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A detected death. `why` is None if no fault explains it. `since` is when the fault began."""

    way: str
    tree: int | None
    at: float
    subject: str
    why: str | None
    since: float | None


class Explainer:
    """Explains every recovery and every supervisor that was declared dead."""

    def __init__(self, evidence: Evidence, *, self_kill: int) -> None:
        self._evidence = evidence
        self._self_kill = f"exit code {self_kill}"
        self._ends = {end.supervisor_id: end for end in evidence.ends if end.how in _WAYS}

    def ends(self) -> Iterator[Death]:
        """Yield the death of every supervisor that other supervisors declared dead."""
        for end in self._ends.values():
            yield self._death(end.how, end.supervisor, end.supervisor_id, end.at)

    def recovery(self, row: RecoveryRow) -> Death:
        """Return the death that caused one recovery."""
        if row.noticed_by == "child_exit":
            return self._child_exit(row)
        end = self._ends.get(row.supervisor_id or "")
        if end is not None and row.at >= end.at:
            return self._death(end.how, end.supervisor, row.task_id, end.at, supervisor_id=end.supervisor_id)
        return self._death(
            row.noticed_by, row.supervisor, row.task_id, row.at, supervisor_id=row.supervisor_id
        )

    def _death(
        self, way: str, supervisor: int | None, subject: str, at: float, *, supervisor_id: str | None = None
    ) -> Death:
        match way:
            case "age":
                found = self._kept_from_beating(at, supervisor, supervisor_id or subject)
            case "session":
                found = self._kept_from_its_session(at, supervisor)
            case "startup":
                ended = [
                    one for one in self._silences(supervisor) if one.ended == math.inf and one.began <= at
                ]
                found = ended[0] if ended else None
            case _:
                found = None
        return Death(
            way=way,
            tree=self._evidence.tree_of(supervisor),
            at=at,
            subject=subject,
            why=None if found is None else found.why,
            since=None if found is None else found.began,
        )

    def _kept_from_beating(self, at: float, supervisor: int | None, supervisor_id: str) -> Silence | None:
        last = self.last_beat(supervisor_id, at)
        silences = [one for one in self._silences(supervisor) if one.overlap(last, at) > 0]
        inflicted = _covered(silences, last, at)
        due, until = last + BEAT_S + _LATE_S, at - _CARRIED_OUT_S
        # The server's own failures explain a silence but do not justify a death, which I14 checks.
        unheard = [one.lasting(_BEATS_AGAIN_S) for one in [*silences, *self._troubles()]]
        explained = _covered(unheard, due, until)
        if inflicted < _LEAST_INFLICTED * THRESHOLD_S or explained < _LEAST_COVERED * (until - due):
            return None
        return max(silences, key=lambda one: one.overlap(last, at))

    def _kept_from_its_session(self, at: float, supervisor: int | None) -> Silence | None:
        for one in self._silences(supervisor):
            if one.lasting(_RECONNECTS_S).overlap(at - GRACE_S, at) >= GRACE_S - _LATE_S:
                return one
        return None

    def last_beat(self, supervisor_id: str, at: float) -> float:
        """Return when a supervisor's last heartbeat before `at` was written, or a time long ago if there was none."""
        beats = self._evidence.beats.get(supervisor_id, ())
        place = bisect_left(beats, at)
        return beats[place - 1] if place else self._evidence.timeline.ready - 60.0

    def _silences(self, supervisor: int | None) -> Sequence[Silence]:
        """Return the silences that faults inflicted on one life of a tree."""
        evidence = self._evidence
        found = [Silence(began, ended, MACHINE) for began, ended in evidence.timeline.stalls]
        life = next((life for life in evidence.lives if life.pid == supervisor), None)
        if life is None:
            return found
        for fault in evidence.faults:
            if fault.tree == life.tree and fault.kind in _SILENCING:
                ended = math.inf if fault.ended is None else fault.ended
                found.append(Silence(fault.began, ended, fault.kind))
        if life.ended is not None:
            found.append(Silence(life.ended, math.inf, self._killer(life)))
        return found

    def _troubles(self) -> Iterator[Silence]:
        """Yield the periods in which the server itself did not respond."""
        for fault in self._evidence.faults:
            if fault.kind in ONE_AT_A_TIME:
                yield Silence(fault.began, math.inf if fault.ended is None else fault.ended, fault.kind)

    def _killer(self, life: Life) -> str:
        for fault in self._evidence.faults:
            hits = fault.tree == life.tree and fault.kind in _OF_TREES
            if life.was_killed and life.ended is not None and hits and abs(fault.began - life.ended) < 2.0:
                return fault.kind
        return BY_ITSELF

    def _child_exit(self, row: RecoveryRow) -> Death:
        tree = self._evidence.tree_of(row.supervisor)
        hits = [
            fault
            for fault in self._evidence.faults
            if fault.tree == tree and fault.kind in _KILLING and fault.began - _LATE_S <= row.at
        ]
        exact = [fault for fault in hits if row.victim in fault.detail.get("pids", ())]
        # A task process is not the worker. A kill of a task process is recognized by the signal and the time.
        near = [
            fault
            for fault in hits
            if fault.kind is Kind.KILL_TASK_PROCESS and row.at - fault.began < 15.0 and "SIGKILL" in row.cause
        ]
        fault = max(exact or near, key=lambda one: one.began, default=None)
        if fault is not None:
            why, since = str(fault.kind), fault.began
        elif self._self_kill in row.cause:
            why, since = TASK_CODE, None
        else:
            why, since = None, None
        return Death(way="child_exit", tree=tree, at=row.at, subject=row.task_id, why=why, since=since)


def _covered(silences: Sequence[Silence], began: float, ended: float) -> float:
    """Return how many seconds of a period at least one silence covers."""
    covered, reached = 0.0, began
    for one in sorted(silences, key=lambda each: each.began):
        start, end = max(one.began, reached), min(one.ended, ended)
        if end > start:
            covered += end - start
            reached = end
    return covered
