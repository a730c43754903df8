"""The judgement: which promises held, from the evidence alone; pure.

What lives here: promises, and the figures that belong to them. What may not: words for the screen beyond the promises'
own, and gathering evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from everbeat import RecoveryInfo
from everbeat.cli.demo.count import Counts, total
from everbeat.cli.demo.evidence import Evidence, Messages, Strike
from everbeat.cli.demo.plan import ACTS, ALLOWANCE

LONGEST_DEMO_S = 60.0


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise, whether it held, and what was seen."""

    words: str
    held: bool
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """One recovery of one task; seconds count from the blow. `blow` is None if nobody had struck its worker."""

    task_id: UUID
    path: str | None
    task: str
    blow: str | None
    worker_id: str
    was: str
    cause: str
    noticed_by: str
    action: str
    noticed_after_s: float | None
    rerun_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeResult:
    """What came of one blow; `settled_after_s`: when the last of its tasks was in other hands."""

    strike: Strike
    rescues: tuple[Rescue, ...]
    noticed_after_s: float | None
    settled_after_s: float | None
    rerun_after_s: float | None
    unrescued: int

    @property
    def noticed_by(self) -> str | None:
        """The way in which it was noticed; several are told together."""
        ways = sorted({rescue.noticed_by for rescue in self.rescues})
        return ", ".join(ways) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement: `ok` only if every promise held."""

    completed: int
    lost: int
    duplicated: int
    totals: Counts
    totals_match: bool
    strikes: tuple[StrikeResult, ...]
    rescues: tuple[Rescue, ...]
    promises: tuple[Promise, ...]

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return all(promise.held for promise in self.promises)


def judge(evidence: Evidence) -> Verdict:
    """Judges."""
    by_path: Counter[str] = Counter(dict.fromkeys(evidence.paths, 0))
    for file in evidence.files:
        by_path[file.path] += file.completed if file.counts is not None else 0
    lost = sum(times == 0 for times in by_path.values())
    duplicated = sum(times > 1 for times in by_path.values())
    totals = total(file.counts for file in evidence.files if file.counts is not None)
    paths = {file.task_id: file.path for file in evidence.files}
    rescues = tuple(
        _rescue(recovery, evidence.strikes, path=paths.get(recovery.task_id))
        for recovery in evidence.recoveries
    )
    strikes = tuple(_result(strike, rescues, evidence) for strike in evidence.strikes)
    totals_match = evidence.independent == totals
    promises = (
        Promise("every file was counted", lost == 0, f"{lost} of {len(evidence.paths)} lost"),
        Promise("no file was counted twice", duplicated == 0, f"{duplicated} counted twice"),
        _same_totals(totals, evidence.independent),
        *_about_strikes(strikes),
        *_about_messages(evidence.messages),
        _nothing_late(strikes, evidence),
        _nobody_alive(rescues),
        _in_time(evidence),
    )
    return Verdict(
        completed=len(by_path) - lost,
        lost=lost,
        duplicated=duplicated,
        totals=totals,
        totals_match=totals_match,
        strikes=strikes,
        rescues=rescues,
        promises=promises,
    )


def _rescue(recovery: RecoveryInfo, strikes: Sequence[Strike], *, path: str | None) -> Rescue:
    strike = next((one for one in strikes if recovery.worker_id in one.worker_ids), None)
    again = recovery.ran_again_at
    return Rescue(
        task_id=recovery.task_id,
        path=path,
        task=recovery.name,
        blow=None if strike is None else strike.act.blow.value,
        worker_id=recovery.worker_id,
        was=recovery.was.value,
        cause=recovery.cause,
        noticed_by=recovery.noticed_by,
        action=recovery.action,
        noticed_after_s=None if strike is None else (recovery.noticed_at - strike.at).total_seconds(),
        rerun_after_s=None if strike is None or again is None else (again - strike.at).total_seconds(),
    )


def _result(strike: Strike, rescues: Sequence[Rescue], evidence: Evidence) -> StrikeResult:
    own = tuple(rescue for rescue in rescues if rescue.worker_id in strike.worker_ids)
    noticed = [rescue.noticed_after_s for rescue in own if rescue.noticed_after_s is not None]
    rerun = [rescue.rerun_after_s for rescue in own if rescue.rerun_after_s is not None]
    # A statement that was on its way when the victim was stopped may still have landed: such a task needs no rescue.
    ended = {file.task_id for file in evidence.files if file.counts is not None}
    missing = strike.held - {rescue.task_id for rescue in own} - ended
    return StrikeResult(
        strike=strike,
        rescues=own,
        noticed_after_s=min(noticed, default=None),
        settled_after_s=max(noticed, default=None),
        rerun_after_s=max(rerun, default=None),
        unrescued=len(missing) + sum(rescue.rerun_after_s is None for rescue in own),
    )


def _same_totals(totals: Counts, independent: Counts | None) -> Promise:
    words = "the sums of all results equal those of one process that counted without a queue"
    if independent is None:
        return Promise(words, held=False, seen="that process failed")
    if totals == independent:
        return Promise(words, held=True, seen=f"{totals.lines:,} lines both times")
    different = [
        f"{name} {getattr(totals, name):,} instead of {getattr(independent, name):,}"
        for name in Counts.__slots__
        if getattr(totals, name) != getattr(independent, name)
    ]
    return Promise(words, held=False, seen=", ".join(different))


def _about_strikes(results: Sequence[StrikeResult]) -> Iterator[Promise]:
    struck = {result.strike.act.blow: result for result in results}
    for act in ACTS:
        words = f"{act.words}: noticed by {act.noticed_by}, all its tasks in other hands within {act.within_s:g} s"
        result = struck.get(act.blow)
        if result is None:
            yield Promise(words, held=False, seen="it never came to that")
        elif not result.rescues or result.settled_after_s is None:
            yield Promise(words, held=False, seen="nothing was rescued")
        else:
            seen = f"{len(result.rescues)} tasks by {result.noticed_by} after {result.settled_after_s:.2f} s"
            late = "" if result.settled_after_s <= act.within_s else ", slower than it should be"
            missing = f", {result.unrescued} not run again" if result.unrescued else ""
            held = (
                result.noticed_by == act.noticed_by
                and result.settled_after_s <= ALLOWANCE * act.within_s
                and not result.unrescued
            )
            yield Promise(words, held, f"{seen}{late}{missing}")


def _about_messages(messages: Messages | None) -> Iterator[Promise]:
    if messages is None:
        return
    yield Promise(
        "tasks were told by NATS, and again after its server had come back",
        messages.published > 0 and messages.delivered > messages.delivered_after > 0,
        f"{messages.published} messages, {messages.delivered} deliveries, {messages.delivered_after} of them after that",
    )
    yield Promise(
        "the NATS server is killed: the work goes on without it",
        messages.ended_meanwhile > 0,
        f"{messages.ended_meanwhile} tasks ended in {messages.away_s:.1f} s without it",
    )
    yield Promise("every message was acknowledged", messages.left == 0, f"{messages.left} left in the stream")


def _nothing_late(results: Sequence[StrikeResult], evidence: Evidence) -> Promise:
    """No attempt that was taken over has counted: not even that of the tree which came back."""
    taken_over = {(recovery.task_id, recovery.fence) for recovery in evidence.recoveries}
    counted = sum(
        outcome == "COMPLETED" and (file.task_id, fence) in taken_over
        for file in evidence.files
        for fence, outcome in file.attempts
    )
    refused = sum(result.strike.refused or 0 for result in results)
    words = "the tree that came back changed nothing"
    return Promise(words, counted == 0, f"{refused} late attempts refused, {counted} accepted")


def _nobody_alive(rescues: Sequence[Rescue]) -> Promise:
    alive = {rescue.worker_id for rescue in rescues if rescue.blow is None}
    return Promise("nobody alive was declared dead", not alive, f"{len(alive)} were")


def _in_time(evidence: Evidence) -> Promise:
    late = ", slower than it should be" if evidence.took_s > LONGEST_DEMO_S else ""
    seen = f"{evidence.took_s:.1f} s{late}"
    held = evidence.took_s <= ALLOWANCE * LONGEST_DEMO_S and not evidence.problems
    return Promise("it was over within a minute", held, "; ".join([seen, *evidence.problems]))
