"""Oracles about tasks and their code: nothing lost, nothing doubled, nothing run that should not; pure.

What lives here: one function a promise, each yielding what breaks it, judged from what was written outside the database
wherever that can be. What may not: deaths and farewells, which are in `tree_oracles`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from tests.chaos.evidence import Breach, Deed, Evidence
from tests.chaos.plan import OF_THE_CLOCK

FINAL_STATES: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"})
NEVER_AGAIN: Final = frozenset({"quick", "fails_when_lost"})
"""Tasks whose policy does not run them again after a crash."""
SELF_KILLERS: Final = frozenset({"poison", "rude"})
"""Tasks that kill their process."""
MOST_CRASHES: Final = 2
"""How often they may."""
SELF_KILL: Final = 70
"""The exit code of a process killed by them; its other tasks fall with it."""


def acknowledged_is_there(evidence: Evidence) -> Iterator[Breach]:
    """I1: no acknowledged task is missing, and a send that was repeated made no second one."""
    by_id = {task.id: task for task in evidence.tasks}
    for number, task_id in evidence.sends.acknowledged.items():
        if task_id not in by_id:
            yield Breach("I1", f"task {task_id} (number {number}) was acknowledged and is not there")
        elif by_id[task_id].number != number:
            yield Breach(
                "I1", f"task {task_id} was acknowledged as number {number}, not {by_id[task_id].number}"
            )
    for number, times in Counter(task.number for task in evidence.tasks).items():
        if times > 1:
            yield Breach("I1", f"number {number} was sent once and is there {times} times")


def nothing_uncalled_for(evidence: Evidence) -> Iterator[Breach]:
    """I2: nothing is there or ran that nobody meant to send."""
    there = {task.id for task in evidence.tasks}
    for task in evidence.tasks:
        if task.number not in evidence.sends.intended:
            yield Breach("I2", f"task {task.id} (number {task.number}) is there, and nobody meant to send it")
    for task_id in {deed.task for deed in evidence.deeds} - there:
        yield Breach("I2", f"task {task_id} ran and is not there")


def everything_ends(evidence: Evidence) -> Iterator[Breach]:
    """L3: once faults stop, every task reaches a final state."""
    for task in evidence.tasks:
        if task.state not in FINAL_STATES:
            yield Breach("L3", f"task {task.id} ({task.name}) is still {task.state}")


def unstarted_means_no_code(evidence: Evidence) -> Iterator[Breach]:
    """I9: a claim that was recovered as not started has run no code."""
    started = {deed.claim for deed in evidence.deeds}
    for row in evidence.recoveries:
        if row.was == "CLAIMED" and row.claim_id in started:
            yield Breach(
                "I9", f"task {row.task_id}: claim {row.claim_id} was recovered unstarted, but its code ran"
            )


def each_start_once_and_recorded(evidence: Evidence) -> Iterator[Breach]:
    """I10: code runs once for each claim, and only for attempts that are recorded; I4: their fences grow."""
    recorded = {row.claim_id: row for row in evidence.attempts}
    for claim, times in Counter(deed.claim for deed in _starts(evidence)).items():
        if times > 1:
            yield Breach("I10", f"claim {claim} started its code {times} times")
    for deed in _starts(evidence):
        row = recorded.get(deed.claim)
        if row is None:
            yield Breach("I10", f"task {deed.task}: claim {deed.claim} ran and no attempt is recorded for it")
        elif (row.task_id, row.attempt, row.fence) != (deed.task, deed.attempt, deed.fence):
            yield Breach(
                "I10", f"task {deed.task}: claim {deed.claim} ran as {deed}, and is recorded as {row}"
            )
    lost = _lost(evidence)
    for task_id, starts in _by_task(_starts(evidence)).items():
        starts.sort(key=lambda deed: deed.at)
        for before, after in pairwise(starts):
            # Frozen between the commit of its start and its first line, lost code may begin late; its fence says so.
            if after.fence <= before.fence and after.claim not in lost:
                yield Breach("I4", f"task {task_id}: fence {after.fence} started after {before.fence}")


def the_winner_did_it(evidence: Evidence) -> Iterator[Breach]:
    """I8: whoever completed a task began its code and came to its end, under the very claim that is recorded."""
    steps = defaultdict[str, set[str]](set)
    for deed in evidence.deeds:
        steps[deed.claim].add(deed.step)
    for row in evidence.attempts:
        if row.outcome == "COMPLETED" and not {"start", "end"} <= steps[row.claim_id]:
            yield Breach(
                "I8",
                f"task {row.task_id}: claim {row.claim_id} completed, its code did not: {steps[row.claim_id]}",
            )


def runs_overlap_only_after_a_loss(evidence: Evidence) -> Iterator[Breach]:
    """I11: two runs of a task overlap only if the older one was recorded as lost."""
    lost = _lost(evidence)
    ended = {deed.claim: deed.at for deed in evidence.deeds}
    for task_id, starts in _by_task(_starts(evidence)).items():
        starts.sort(key=lambda deed: deed.at)
        for before, after in pairwise(starts):
            older = min(before, after, key=lambda deed: deed.fence)
            if ended[before.claim] > after.at and older.claim not in lost:
                yield Breach(
                    "I11",
                    f"task {task_id}: {after.claim} began before {before.claim} ended, which nobody lost",
                )


def second_runs_are_explained(evidence: Evidence) -> Iterator[Breach]:
    """Promise 2: code runs again only if its policy says so, after an attempt that is recorded with the reason."""
    for row in evidence.attempts:
        was_lost = row.outcome in ("LOST", "CRASHED")
        if was_lost and row.will_retry and _name(evidence, row.task_id) in NEVER_AGAIN:
            yield Breach(
                "P2",
                f"task {row.task_id}: attempt {row.attempt} was {row.outcome} and runs again against its policy",
            )
    will_retry = {(row.task_id, row.attempt): row.will_retry for row in evidence.attempts}
    for deed in _starts(evidence):
        if deed.attempt > 1 and will_retry.get((deed.task, deed.attempt - 1)) is not True:
            yield Breach("P2", f"task {deed.task}: attempt {deed.attempt} ran, and nothing says why")


def cancelled_stays_cancelled(evidence: Evidence) -> Iterator[Breach]:
    """I18: no code starts after a cancel that was acknowledged, and nothing but a success outlives one."""
    states = {task.id: task.state for task in evidence.tasks}
    lost = _lost(evidence)
    starts = _by_task(deed for deed in _starts(evidence) if deed.claim not in lost)
    for task_id, (verdict, at) in evidence.sends.cancels.items():
        state = states.get(task_id)
        match verdict:
            case "CANCELLED":
                late = [deed for deed in starts.get(task_id, ()) if deed.at > at]
                if late or state != "CANCELLED":
                    yield Breach(
                        "I18", f"task {task_id} was cancelled at {at:.2f}, and is {state}, with starts {late}"
                    )
            case "REQUESTED" if state not in ("CANCELLED", "COMPLETED"):
                yield Breach("I18", f"task {task_id} was asked to cancel and is {state}")
            case _:
                pass


def a_ledger_row_for_each_success(evidence: Evidence) -> Iterator[Breach]:
    """I12: a row written in the transaction of the completion is there once, if the task completed under that claim."""
    won = {row.task_id: row.claim_id for row in evidence.attempts if row.outcome == "COMPLETED"}
    ledgered = [task.id for task in evidence.tasks if task.name == "ledgered" and task.state == "COMPLETED"]
    rows = defaultdict[str, list[str]](list)
    for task_id, claim_id in evidence.ledger:
        rows[task_id].append(claim_id)
    for task_id in {*ledgered, *rows}:
        if rows[task_id] != [won.get(task_id)]:
            yield Breach(
                "I12", f"task {task_id}: completed by {won.get(task_id)}, in the ledger {rows[task_id]}"
            )


def steps_go_on_where_they_stopped(evidence: Evidence) -> Iterator[Breach]:
    """G3: the next attempt begins with the step that was interrupted, or the one after it."""
    for task_id, deeds in _by_task(deed for deed in evidence.deeds if deed.step.startswith("step ")).items():
        by_attempt = defaultdict[int, list[int]](list)
        for deed in deeds:
            by_attempt[deed.attempt].append(int(deed.step.removeprefix("step ")))
        done = -1
        for number, steps in sorted(by_attempt.items()):
            if steps != list(range(steps[0], steps[-1] + 1)) or steps[0] not in (max(done, 0), done + 1):
                yield Breach("G3", f"task {task_id}: attempt {number} did steps {steps} after step {done}")
            done = steps[-1]


def a_line_is_one_at_a_time(evidence: Evidence) -> Iterator[Breach]:
    """I24: tasks of a serial line do not run side by side but after a loss, and begin in the order they were sent."""
    lost = _lost(evidence)
    ended = {deed.claim: deed.at for deed in evidence.deeds}
    lines = {task.id: task for task in evidence.tasks if task.serial is not None}
    by_line = defaultdict[str | None, list[Deed]](list)
    for deed in sorted(_starts(evidence), key=lambda deed: deed.at):
        if deed.task in lines and deed.claim not in lost:
            by_line[lines[deed.task].serial].append(deed)
    was_shifted = any(fault.kind in OF_THE_CLOCK for fault in evidence.faults)
    for serial, starts in by_line.items():
        for before, after in pairwise(starts):
            if ended[before.claim] > after.at:
                yield Breach("I24", f"{serial}: {after.task} began while {before.task} was running")
        # The order is that of the server's clock, and what was in doubt may arrive late.
        order = [lines[deed.task].number for deed in starts if deed.attempt == 1]
        order = [number for number in order if number in evidence.sends.acknowledged]
        if order != sorted(order) and not was_shifted:
            yield Breach("I24", f"{serial}: began in the order {order}")


def the_guilty_are_stopped(evidence: Evidence) -> Iterator[Breach]:
    """I15: what kills its process is stopped, and says so."""
    crashes = Counter(row.task_id for row in evidence.attempts if row.outcome == "CRASHED")
    for task in evidence.tasks:
        if task.name in SELF_KILLERS and (crashes[task.id] > MOST_CRASHES or task.state == "COMPLETED"):
            yield Breach(
                "I15", f"task {task.id} ({task.name}) is {task.state} after {crashes[task.id]} crashes"
            )


TASK_ORACLES: Final = (
    acknowledged_is_there,
    nothing_uncalled_for,
    everything_ends,
    unstarted_means_no_code,
    each_start_once_and_recorded,
    the_winner_did_it,
    runs_overlap_only_after_a_loss,
    second_runs_are_explained,
    cancelled_stays_cancelled,
    a_ledger_row_for_each_success,
    steps_go_on_where_they_stopped,
    a_line_is_one_at_a_time,
    the_guilty_are_stopped,
)


def _lost(evidence: Evidence) -> set[str]:
    """The claims that were recovered."""
    return {row.claim_id for row in evidence.recoveries}


def _starts(evidence: Evidence) -> list[Deed]:
    return [deed for deed in evidence.deeds if deed.step == "start"]


def _by_task(deeds: Iterable[Deed]) -> dict[str, list[Deed]]:
    found = defaultdict[str, list[Deed]](list)
    for deed in deeds:
        found[deed.task].append(deed)
    return found


def _name(evidence: Evidence, task_id: str) -> str:
    return next((task.name for task in evidence.tasks if task.id == task_id), "")
