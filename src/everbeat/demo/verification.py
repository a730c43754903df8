"""The faults that the demo injects, the evidence that it collects, and the promises that the evidence must satisfy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Final
from uuid import UUID

from everbeat import TaskState
from everbeat.demo.source_files import Counts, total
from everbeat.inspection import RecoveryInfo


class FaultKind(StrEnum):
    """The types of faults that the demo injects."""

    KILL_WORKER = "kill_worker"
    FREEZE_TREE = "freeze_tree"
    KILL_TREE = "kill_tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A fault, how it must be noticed, and the seconds within which all of the target's tasks must be recovered."""

    kind: FaultKind
    noticed_by: str
    within_s: float
    words: str


FAULT_PLAN: Final = (
    PlannedFault(
        kind=FaultKind.KILL_WORKER,
        noticed_by="child_exit",
        within_s=1.0,
        words="one worker process is killed",
    ),
    # Stale after 3 s without a heartbeat. Sweeps run every second, and two are needed: one that notices, and one that acts.
    PlannedFault(
        kind=FaultKind.FREEZE_TREE, noticed_by="age", within_s=6.0, words="one whole tree is frozen"
    ),
    PlannedFault(
        kind=FaultKind.KILL_TREE, noticed_by="session", within_s=3.0, words="one whole tree is killed"
    ),
)

LONGEST_DEMO_S: Final = 60.0
ALLOWANCE: Final = 3.0
"""A promise counts as broken only if its bound is exceeded by more than this factor, because the machine might be busy."""


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected. `held` contains the tasks that the target held at that time. Times are by the database's clock."""

    planned: PlannedFault
    tree: int
    pid: int
    worker_ids: frozenset[str]
    at: datetime
    at_s: float
    held: frozenset[UUID]
    thawed_after_s: float | None = None
    refused: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedFile:
    """The stored facts about the task for one file. `attempts` contains (fence, outcome) for each ended attempt."""

    task_id: UUID
    path: str
    task: str
    state: TaskState
    counts: Counts | None
    attempts: tuple[tuple[int, str], ...]

    @property
    def completed(self) -> int:
        """Return the number of completed attempts."""
        return sum(outcome == "COMPLETED" for _, outcome in self.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCounts:
    """The number of messages that NATS delivered and that are left in the stream.

    `delivered_after` counts deliveries since the server's restart, and `left` the messages in the stream at the end. `ended_meanwhile`
    counts the tasks that finished while the server was down. It was down for `away_s` seconds.
    """

    published: int
    delivered: int
    delivered_after: int
    left: int
    away_s: float
    ended_meanwhile: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts for the verification. `paths` are the files that were sent, out of `found` files.

    If something went wrong, `independent` is None or `problems` is not empty. `messages` is None without NATS.
    """

    folder: Path
    found: int
    paths: tuple[str, ...]
    files: Sequence[CountedFile]
    faults: Sequence[InjectedFault]
    recoveries: Sequence[RecoveryInfo]
    independent: Counts | None
    took_s: float
    problems: Sequence[str] = field(default=())
    messages: MessageCounts | None = None


@dataclass(frozen=True, slots=True)
class CheckedPromise:
    """A promise, whether it held, and the measured values."""

    words: str
    held: bool
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecovery:
    """The recovery of one task, with seconds counted from the fault. `kill` names the fault, or is None if the worker was not a target."""

    task_id: UUID
    path: str | None
    task: str
    kill: str | None
    worker_id: str
    was: str
    cause: str
    noticed_by: str
    action: str
    noticed_after_s: float | None
    rerun_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """The consequences of one fault. `settled_after_s` is when the last of its tasks was recovered."""

    fault: InjectedFault
    recoveries: tuple[TaskRecovery, ...]
    noticed_after_s: float | None
    settled_after_s: float | None
    rerun_after_s: float | None
    unrecovered: int

    @property
    def noticed_by(self) -> str | None:
        """Return how the fault was noticed, in one or more ways."""
        ways = sorted({recovery.noticed_by for recovery in self.recoveries})
        return ", ".join(ways) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of the demo. `ok` is true only if every promise held."""

    completed: int
    lost: int
    duplicated: int
    totals: Counts
    totals_match: bool
    results: tuple[FaultResult, ...]
    recoveries: tuple[TaskRecovery, ...]
    promises: tuple[CheckedPromise, ...]

    @property
    def ok(self) -> bool:
        """Return whether every promise held."""
        return all(promise.held for promise in self.promises)


def verify(evidence: Evidence) -> Verification:
    """Check every promise against the evidence."""
    by_path: Counter[str] = Counter(dict.fromkeys(evidence.paths, 0))
    for file in evidence.files:
        by_path[file.path] += file.completed if file.counts is not None else 0
    lost = sum(times == 0 for times in by_path.values())
    duplicated = sum(times > 1 for times in by_path.values())
    totals = total(file.counts for file in evidence.files if file.counts is not None)
    paths = {file.task_id: file.path for file in evidence.files}
    recoveries = tuple(
        _task_recovery(recovery, evidence.faults, path=paths.get(recovery.task_id))
        for recovery in evidence.recoveries
    )
    results = tuple(_result(fault, recoveries, evidence) for fault in evidence.faults)
    totals_match = evidence.independent == totals
    promises = (
        CheckedPromise("every file was counted", lost == 0, f"{lost} of {len(evidence.paths)} lost"),
        CheckedPromise("no file was counted twice", duplicated == 0, f"{duplicated} counted twice"),
        _same_totals(totals, evidence.independent),
        *_fault_promises(results),
        *_message_promises(evidence.messages),
        _nothing_late(results, evidence),
        _no_false_death(recoveries),
        _in_time(evidence),
    )
    return Verification(
        completed=len(by_path) - lost,
        lost=lost,
        duplicated=duplicated,
        totals=totals,
        totals_match=totals_match,
        results=results,
        recoveries=recoveries,
        promises=promises,
    )


def _task_recovery(
    recovery: RecoveryInfo, faults: Sequence[InjectedFault], *, path: str | None
) -> TaskRecovery:
    fault = next((one for one in faults if recovery.worker_id in one.worker_ids), None)
    again = recovery.ran_again_at
    return TaskRecovery(
        task_id=recovery.task_id,
        path=path,
        task=recovery.name,
        kill=None if fault is None else fault.planned.kind.value,
        worker_id=recovery.worker_id,
        was=recovery.was.value,
        cause=recovery.cause,
        noticed_by=recovery.noticed_by,
        action=recovery.action,
        noticed_after_s=None if fault is None else (recovery.noticed_at - fault.at).total_seconds(),
        rerun_after_s=None if fault is None or again is None else (again - fault.at).total_seconds(),
    )


def _result(fault: InjectedFault, recoveries: Sequence[TaskRecovery], evidence: Evidence) -> FaultResult:
    own = tuple(recovery for recovery in recoveries if recovery.worker_id in fault.worker_ids)
    noticed = [recovery.noticed_after_s for recovery in own if recovery.noticed_after_s is not None]
    rerun = [recovery.rerun_after_s for recovery in own if recovery.rerun_after_s is not None]
    # A statement that was in progress when the target was stopped can still be executed. Its task needs no recovery.
    ended = {file.task_id for file in evidence.files if file.counts is not None}
    missing = fault.held - {recovery.task_id for recovery in own} - ended
    return FaultResult(
        fault=fault,
        recoveries=own,
        noticed_after_s=min(noticed, default=None),
        settled_after_s=max(noticed, default=None),
        rerun_after_s=max(rerun, default=None),
        unrecovered=len(missing) + sum(recovery.rerun_after_s is None for recovery in own),
    )


def _same_totals(totals: Counts, independent: Counts | None) -> CheckedPromise:
    words = "the sums of all results equal those of one process that counted without a queue"
    if independent is None:
        return CheckedPromise(words, held=False, seen="that process failed")
    if totals == independent:
        return CheckedPromise(words, held=True, seen=f"{totals.lines:,} lines both times")
    different = [
        f"{name} {getattr(totals, name):,} instead of {getattr(independent, name):,}"
        for name in Counts.__slots__
        if getattr(totals, name) != getattr(independent, name)
    ]
    return CheckedPromise(words, held=False, seen=", ".join(different))


def _fault_promises(results: Sequence[FaultResult]) -> Iterator[CheckedPromise]:
    by_kind = {result.fault.planned.kind: result for result in results}
    for planned in FAULT_PLAN:
        words = f"{planned.words}: noticed by {planned.noticed_by}, all its tasks recovered within {planned.within_s:g} s"
        result = by_kind.get(planned.kind)
        if result is None:
            yield CheckedPromise(words, held=False, seen="the demo ended before this fault")
        elif not result.recoveries or result.settled_after_s is None:
            yield CheckedPromise(words, held=False, seen="no task was recovered")
        else:
            seen = (
                f"{len(result.recoveries)} tasks by {result.noticed_by} after {result.settled_after_s:.2f} s"
            )
            late = "" if result.settled_after_s <= planned.within_s else ", later than promised"
            missing = f", {result.unrecovered} not run again" if result.unrecovered else ""
            held = (
                result.noticed_by == planned.noticed_by
                and result.settled_after_s <= ALLOWANCE * planned.within_s
                and not result.unrecovered
            )
            yield CheckedPromise(words, held, f"{seen}{late}{missing}")


def _message_promises(messages: MessageCounts | None) -> Iterator[CheckedPromise]:
    if messages is None:
        return
    yield CheckedPromise(
        "NATS notified workers, also after the restart of its server",
        messages.published > 0 and messages.delivered > messages.delivered_after > 0,
        f"{messages.published} messages, {messages.delivered} deliveries, {messages.delivered_after} of them after the restart",
    )
    yield CheckedPromise(
        "the NATS server is killed: the work continues without it",
        messages.ended_meanwhile > 0,
        f"{messages.ended_meanwhile} tasks ended in {messages.away_s:.1f} s without it",
    )
    yield CheckedPromise(
        "every message was acknowledged", messages.left == 0, f"{messages.left} left in the stream"
    )


def _nothing_late(results: Sequence[FaultResult], evidence: Evidence) -> CheckedPromise:
    """Check that no recovered attempt completed, not even an attempt of the thawed tree."""
    taken_over = {(recovery.task_id, recovery.fence) for recovery in evidence.recoveries}
    counted = sum(
        outcome == "COMPLETED" and (file.task_id, fence) in taken_over
        for file in evidence.files
        for fence, outcome in file.attempts
    )
    refused = sum(result.fault.refused or 0 for result in results)
    words = "the thawed tree changed nothing"
    return CheckedPromise(words, counted == 0, f"{refused} late attempts refused, {counted} accepted")


def _no_false_death(recoveries: Sequence[TaskRecovery]) -> CheckedPromise:
    alive = {recovery.worker_id for recovery in recoveries if recovery.kill is None}
    return CheckedPromise("no living worker was declared dead", not alive, f"{len(alive)} were")


def _in_time(evidence: Evidence) -> CheckedPromise:
    late = ", later than promised" if evidence.took_s > LONGEST_DEMO_S else ""
    seen = f"{evidence.took_s:.1f} s{late}"
    held = evidence.took_s <= ALLOWANCE * LONGEST_DEMO_S and not evidence.problems
    return CheckedPromise("the demo took at most a minute", held, "; ".join([seen, *evidence.problems]))
