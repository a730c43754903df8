"""Whether a tree beats, is late, might be dead, is dead or has left, by the rules of the reaper and the session watch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from heapq import nsmallest

from msgspec import Struct
from msgspec.structs import replace

from everbeat.domain.explain.reasons import SilenceRules
from everbeat.domain.pulse.sample import PulseSample, SampledTree, SampledWorker
from everbeat.domain.recovery.liveness import LATE_BEATS, is_session_lost, longer_silence


class TreeState(StrEnum):
    """How a tree is doing."""

    BEATS = "beats"
    """It beats, and its session is held if it can be watched."""
    LATE = "late"
    """Two heartbeats are missing."""
    SUSPECT = "suspect"
    """Its session is lost or its threshold has passed, but it has not been declared dead."""
    DEAD = "dead"
    """An observer declared it dead."""
    LEFT = "left"
    """It shut down in an orderly way."""
    UNKNOWN = "unknown"
    """It lived at a past moment of which no heartbeats are kept, or a standby has not received its heartbeats."""


class TreeJudgement(Struct, frozen=True, kw_only=True):
    """The state of a tree. `silent_s` is counted from the last heartbeat of the supervisor or of a worker that beats for itself.

    `decides_in_s` is how many seconds remain until the age of its heartbeats decides. It is negative if the moment has passed, and None if
    recovery by age is off or the tree has ended. `session_lost`: neither its lock nor any of its sessions is left.
    """

    state: TreeState
    silent_s: float
    beat_s: float
    decides_in_s: float | None = None
    session_lost: bool = False

    @property
    def late_s(self) -> float:
        """Return how many seconds ago the first missing heartbeat was due, or a negative number if none is missing."""
        return self.silent_s - self.beat_s


class TreeCounts(Struct, frozen=True):
    """How many trees beat, are late or suspects, and died in the last hour."""

    beat: int
    late: int
    dead: int

    @classmethod
    def of(cls, states: Iterable[TreeState], *, dead: int) -> TreeCounts:
        """Count the trees in these states. `dead` is counted elsewhere, because no judgement is kept for an hour."""
        known = list(states)
        late = known.count(TreeState.LATE) + known.count(TreeState.SUSPECT)
        return cls(known.count(TreeState.BEATS), late, dead)


def judged_trees(sample: PulseSample, rules: SilenceRules) -> Mapping[str, TreeJudgement]:
    """Judge all trees of a sample, and return the judgements by the ids of the trees. `rules` are the thresholds of the app.

    On a standby, replication delays the heartbeats, so an old one proves nothing.
    """
    crews, observed, found = crews_of(sample), observed_rules(sample.trees, rules), {}
    for tree in sample.trees:
        judgement = judged(tree, crews.get(tree.id, ()), rules=observed[tree.id], at=sample.at)
        if sample.is_standby and judgement.state in (TreeState.LATE, TreeState.SUSPECT):
            judgement = replace(judgement, state=TreeState.UNKNOWN, decides_in_s=None, session_lost=False)
        found[tree.id] = judgement
    return found


def crews_of(sample: PulseSample) -> Mapping[str, Sequence[SampledWorker]]:
    """Return the workers of a sample by the id of their tree."""
    crews: dict[str, list[SampledWorker]] = {}
    for worker in sample.workers:
        crews.setdefault(worker.supervisor_id, []).append(worker)
    return crews


def judged(
    tree: SampledTree, workers: Sequence[SampledWorker], *, rules: SilenceRules, at: datetime
) -> TreeJudgement:
    """Judge one tree at the database's time `at`. `workers` are its own."""
    beat_ms = tree.beat_ms or rules.beat_interval_ms
    silent_s = max(0.0, (at - last_sign(tree, workers)).total_seconds())
    if tree.ended_at is not None:
        state = TreeState.DEAD if tree.is_dead else TreeState.LEFT
        return TreeJudgement(state=state, silent_s=silent_s, beat_s=beat_ms / 1_000)
    threshold_ms = _threshold_ms(tree, workers, rules=rules)
    decides_in_s = None if threshold_ms is None else threshold_ms / 1_000 - silent_s
    lost = is_session_lost(held_here=tree.held_here, is_locked=tree.locked, sessions=tree.sessions)
    if lost or (decides_in_s is not None and decides_in_s <= 0):
        state = TreeState.SUSPECT
    else:
        state = TreeState.LATE if silent_s * 1_000 >= LATE_BEATS * beat_ms else TreeState.BEATS
    return TreeJudgement(
        state=state,
        silent_s=silent_s,
        beat_s=beat_ms / 1_000,
        decides_in_s=decides_in_s,
        session_lost=lost,
    )


def observed_rules(trees: Sequence[SampledTree], rules: SilenceRules) -> Mapping[str, SilenceRules]:
    """Return the thresholds by which the others judge each tree, by its id: of those that they have registered, the shortest.

    If no other tree lives or has registered any, these are `rules`, or the tree's own. Recovery that `rules` switch off stays off.
    """
    live = [tree for tree in trees if tree.ended_at is None]
    claimed = _two_shortest((tree.claimed_stale_ms, tree.id) for tree in live)
    running = _two_shortest((tree.running_stale_ms, tree.id) for tree in live)
    found = {}
    for tree in trees:
        if any(other.id != tree.id for other in live[:2]):
            claimed_ms, running_ms = _of_others(claimed, tree), _of_others(running, tree)
        else:
            claimed_ms, running_ms = tree.claimed_stale_ms, tree.running_stale_ms
        found[tree.id] = replace(
            rules,
            claimed_ms=rules.claimed_ms if None in (claimed_ms, rules.claimed_ms) else claimed_ms,
            running_ms=rules.running_ms if None in (running_ms, rules.running_ms) else running_ms,
        )
    return found


def _two_shortest(thresholds: Iterable[tuple[int | None, str]]) -> list[tuple[int, str]]:
    """Return the shortest threshold with the id of its tree, and the shortest of the other trees."""
    return nsmallest(2, ((ms, name) for ms, name in thresholds if ms is not None))


def _of_others(shortest: Sequence[tuple[int, str]], tree: SampledTree) -> int | None:
    return next((ms for ms, name in shortest if name != tree.id), None)


def last_sign(tree: SampledTree, workers: Iterable[SampledWorker]) -> datetime:
    """Return when the tree last beat: its supervisor, or a live worker that beats for itself."""
    own = [
        worker.last_beat_at
        for worker in workers
        if worker.last_beat_at is not None and worker.ended_at is None
    ]
    return max([tree.last_beat_at, *own])


def decides_at(judgement: TreeJudgement, *, at: datetime) -> datetime | None:
    """Return when the age of the tree's heartbeats decides, or None if it never does."""
    return None if judgement.decides_in_s is None else at + timedelta(seconds=judgement.decides_in_s)


def _threshold_ms(tree: SampledTree, workers: Iterable[SampledWorker], *, rules: SilenceRules) -> int | None:
    """Return the shortest silence after which a lease of the tree is stale, or after which a tree without leases is declared dead."""
    claimed_ms = longer_silence(rules.claimed_ms, tree.claimed_stale_ms)
    running_ms = longer_silence(rules.running_ms, tree.running_stale_ms)
    crew = [worker for worker in workers if worker.ended_at is None]
    held = []
    if any(worker.claimed for worker in crew):
        held.append(claimed_ms)
    if any(worker.running for worker in crew):
        held.append(running_ms)
    known = [each for each in held or [claimed_ms, running_ms] if each is not None]
    if not known:
        return None
    return min(known) if held else max(known)
