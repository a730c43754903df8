"""The last 90 seconds of all trees, as one process has seen them. The memory is bounded, and nothing of it is stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from everbeat.domain.explain.reasons import SilenceRules
from everbeat.domain.pulse.actions import ActionMemory
from everbeat.domain.pulse.judging import TreeJudgement, TreeState, crews_of, judged_trees
from everbeat.domain.pulse.sample import (
    PulseSample,
    SampledRecovery,
    SampledTree,
    SampledWorker,
    StoredBeat,
)

WINDOW_S: Final = 90
"""How many seconds a strip shows."""
DEAD_SHOWN_S: Final = 900
"""For how many seconds after its death a tree is still shown, as a flat strip."""
_MOST_SAMPLES: Final = 2 * WINDOW_S
"""While a tree is a suspect, two samples a second are taken."""
_MOST_BEATS: Final = 1_000
_MOST_RECOVERIES: Final = 1_000


class TreeTrace(Struct, kw_only=True):
    """The facts about one tree in the window. `beats` are times of heartbeats, with the leases for which each vouched.

    `seen` are the times of the samples that found its session held. `judgement` is that of the last sample.
    """

    tree: SampledTree
    judgement: TreeJudgement
    workers: tuple[SampledWorker, ...] = ()
    beats: deque[tuple[datetime, int]] = field(default_factory=lambda: deque(maxlen=_MOST_BEATS))
    seen: deque[datetime] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))

    @property
    def crew(self) -> list[SampledWorker]:
        """Return the workers that have not ended."""
        return [worker for worker in self.workers if worker.ended_at is None]

    @property
    def held(self) -> int:
        """Return how many leases its workers hold, also those that have ended."""
        return sum(worker.claimed + worker.running for worker in self.workers)

    @property
    def slots(self) -> int | None:
        """Return the number of slots of its live workers, or None if no snapshot says so."""
        known = [worker.slots for worker in self.crew if worker.slots is not None]
        return sum(known) if known else None


class PulseMemory:
    """Remembers the samples of the last 90 seconds, and the latest actions of operators. `rules` are the thresholds of the app."""

    def __init__(self, rules: SilenceRules) -> None:
        self.rules = rules
        self.samples = 0
        self.last: PulseSample | None = None
        self.recoveries: deque[SampledRecovery] = deque(maxlen=_MOST_RECOVERIES)
        self.actions = ActionMemory()
        self._traces: dict[str, TreeTrace] = {}

    @property
    def traces(self) -> list[TreeTrace]:
        """Return the traces of all trees, sorted by name. The order does not change if a tree dies."""
        return sorted(
            self._traces.values(),
            key=lambda trace: (trace.tree.hostname, trace.tree.started_at, trace.tree.id),
        )

    @property
    def known(self) -> list[str]:
        """Return the ids of all trees that are remembered."""
        return list(self._traces)

    def record(self, sample: PulseSample) -> None:
        """Add a sample, and forget what is older than the window."""
        crews, judgements = crews_of(sample), judged_trees(sample, self.rules)
        found: dict[str, TreeTrace] = {}
        for tree in sample.trees:
            if not _is_shown(tree, at=sample.at):
                continue
            crew = tuple(crews.get(tree.id, ()))
            before = self._traces.get(tree.id)
            found[tree.id] = _with(before, tree, crew, judgements[tree.id], at=sample.at)
        self._traces = found
        self.recoveries.extend(sample.recoveries)
        self.actions.record(sample.actions)
        self.last = sample
        self.samples += 1

    def doubt(self) -> None:
        """Judge no living tree without a stored heartbeat, because those of its time are not kept."""
        for trace in self._traces.values():
            if trace.tree.ended_at is None and not trace.tree.beat_seq:
                trace.judgement = replace(trace.judgement, state=TreeState.UNKNOWN, decides_in_s=None)

    def backfill(self, beats: Sequence[StoredBeat]) -> None:
        """Add stored heartbeats, oldest first. Those that are known already are not added twice."""
        by_tree: dict[str, list[tuple[datetime, int]]] = {}
        for beat in beats:
            by_tree.setdefault(beat.supervisor_id, []).append((beat.sent_at, beat.held))
        for tree_id, stored in by_tree.items():
            trace = self._traces.get(tree_id)
            if trace is not None:
                merged = dict(stored) | dict(trace.beats)
                trace.beats = deque(sorted(merged.items()), maxlen=_MOST_BEATS)


def _is_shown(tree: SampledTree, *, at: datetime) -> bool:
    if tree.ended_at is None:
        return True
    return at - tree.ended_at < timedelta(seconds=DEAD_SHOWN_S if tree.is_dead else WINDOW_S)


def _with(
    before: TreeTrace | None,
    tree: SampledTree,
    workers: tuple[SampledWorker, ...],
    judgement: TreeJudgement,
    *,
    at: datetime,
) -> TreeTrace:
    trace = TreeTrace(tree=tree, judgement=judgement) if before is None else before
    held = sum(worker.claimed + worker.running for worker in workers)
    if tree.beat_seq and (before is None or before.tree.beat_seq != tree.beat_seq):
        _add(trace.beats, (tree.last_beat_at, held))
    if tree.ended_at is None and tree.held_here and tree.locked:
        trace.seen.append(at)
    trace.tree, trace.workers, trace.judgement = tree, workers, judgement
    since = at - timedelta(seconds=WINDOW_S)
    while trace.beats and trace.beats[0][0] < since:
        trace.beats.popleft()
    while trace.seen and trace.seen[0] < since:
        trace.seen.popleft()
    return trace


def _add(beats: deque[tuple[datetime, int]], beat: tuple[datetime, int]) -> None:
    if beat[0] not in {at for at, _ in beats}:
        beats.append(beat)
