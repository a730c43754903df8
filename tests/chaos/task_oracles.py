"""Oracles about tasks and their code: no task is lost, duplicated, or run against its policy. No side effects."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from tests.chaos.evidence import Breach, Effect, Evidence
from tests.chaos.plan import OF_THE_CLOCK

FINAL_STATES: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"})
NEVER_AGAIN: Final = frozenset({"quick", "fails_when_lost"})
"""Tasks whose policy does not allow another run after a crash."""
SELF_KILLERS: Final = frozenset({"poison", "rude"})
"""Tasks that kill their own process."""
MOST_CRASHES: Final = 2
"""How often a task in `SELF_KILLERS` can kill its process."""
SELF_KILL: Final = 70
"""The exit code of a process that a task in `SELF_KILLERS` killed. The other tasks in that process die with it."""


def acknowledged_tasks_exist(evidence: Evidence) -> Iterator[Breach]:
    """I1: no acknowledged task is missing, and a repeated send did not create a second task."""
    by_id = {task.id: task for task in evidence.tasks}
    for number, task_id in evidence.sends.acknowledged.items():
        if task_id not in by_id:
            yield Breach("I1", f"task {task_id} (number {number}) was acknowledged and is not there")
        elif by_id[task_id].number != number:
            yield Breach(
                "I1", f"task {task_id} was acknowledged as number {number}, not {by_id[task_id].number}"
            )
    for number, times in Counter(task.number for task in evidence.tasks).items():
        if times > 1 and number is not None:
            yield Breach("I1", f"number {number} was sent once and is there {times} times")


def no_unexpected_task(evidence: Evidence) -> Iterator[Breach]:
    """I2: every task that exists or ran was intended by a producer, or by a schedule."""
    there = {task.id for task in evidence.tasks}
    for task in evidence.tasks:
        if task.number is not None and task.number not in evidence.sends.intended:
            yield Breach("I2", f"task {task.id} (number {task.number}) is there, and nobody meant to send it")
    for task_id in {effect.task for effect in evidence.effects} - there:
        yield Breach("I2", f"task {task_id} ran and is not there")


def everything_ends(evidence: Evidence) -> Iterator[Breach]:
    """L3: after the faults have ended, every task reaches a terminal state."""
    for task in evidence.tasks:
        if task.state not in FINAL_STATES:
            yield Breach("L3", f"task {task.id} ({task.name}) is still {task.state}")


def unstarted_means_no_code(evidence: Evidence) -> Iterator[Breach]:
    """I9: no code has run under a claim that was recovered as not started."""
    started = {effect.claim for effect in evidence.effects}
    for row in evidence.recoveries:
        if row.was == "CLAIMED" and row.claim_id in started:
            yield Breach(
                "I9", f"task {row.task_id}: claim {row.claim_id} was recovered unstarted, but its code ran"
            )


def each_start_once_and_recorded(evidence: Evidence) -> Iterator[Breach]:
    """I10: code runs once per claim, and only for recorded attempts. I4: the fences of a task's attempts increase."""
    recorded = {row.claim_id: row for row in evidence.attempts}
    for claim, times in Counter(effect.claim for effect in _starts(evidence)).items():
        if times > 1:
            yield Breach("I10", f"claim {claim} started its code {times} times")
    for effect in _starts(evidence):
        row = recorded.get(effect.claim)
        if row is None:
            yield Breach(
                "I10", f"task {effect.task}: claim {effect.claim} ran and no attempt is recorded for it"
            )
        elif (row.task_id, row.attempt, row.fence) != (effect.task, effect.attempt, effect.fence):
            yield Breach(
                "I10", f"task {effect.task}: claim {effect.claim} ran as {effect}, and is recorded as {row}"
            )
    lost = _lost(evidence)
    for task_id, starts in _by_task(_starts(evidence)).items():
        starts.sort(key=lambda effect: effect.at)
        for before, after in pairwise(starts):
            # Code that was frozen between the commit of its start and its first line can start late, which its fence shows.
            if after.fence <= before.fence and after.claim not in lost:
                yield Breach("I4", f"task {task_id}: fence {after.fence} started after {before.fence}")


def the_completing_attempt_ran_the_code(evidence: Evidence) -> Iterator[Breach]:
    """I8: the attempt that completed a task ran its code to the end under the recorded claim."""
    steps = defaultdict[str, set[str]](set)
    for effect in evidence.effects:
        steps[effect.claim].add(effect.step)
    for row in evidence.attempts:
        if row.outcome == "COMPLETED" and not {"start", "end"} <= steps[row.claim_id]:
            yield Breach(
                "I8",
                f"task {row.task_id}: claim {row.claim_id} completed, its code did not: {steps[row.claim_id]}",
            )


def runs_overlap_only_after_a_loss(evidence: Evidence) -> Iterator[Breach]:
    """I11: two runs of a task overlap only if the older run was recorded as lost."""
    lost = _lost(evidence)
    ended = {effect.claim: effect.at for effect in evidence.effects}
    for task_id, starts in _by_task(_starts(evidence)).items():
        starts.sort(key=lambda effect: effect.at)
        for before, after in pairwise(starts):
            older = min(before, after, key=lambda effect: effect.fence)
            if ended[before.claim] > after.at and older.claim not in lost:
                yield Breach(
                    "I11",
                    f"task {task_id}: {after.claim} began before {before.claim} ended, which nobody lost",
                )


def second_runs_are_explained(evidence: Evidence) -> Iterator[Breach]:
    """Promise 2: code runs again only if its policy allows this and the previous attempt is recorded with the reason."""
    for row in evidence.attempts:
        was_lost = row.outcome in ("LOST", "CRASHED")
        if was_lost and row.will_retry and _name(evidence, row.task_id) in NEVER_AGAIN:
            yield Breach(
                "P2",
                f"task {row.task_id}: attempt {row.attempt} was {row.outcome} and runs again against its policy",
            )
    will_retry = {(row.task_id, row.attempt): row.will_retry for row in evidence.attempts}
    for effect in _starts(evidence):
        if effect.attempt > 1 and will_retry.get((effect.task, effect.attempt - 1)) is not True:
            yield Breach("P2", f"task {effect.task}: attempt {effect.attempt} ran, and nothing says why")


def cancelled_stays_cancelled(evidence: Evidence) -> Iterator[Breach]:
    """I18: no code starts after an acknowledged cancel, and only a success can replace a cancel."""
    states = {task.id: task.state for task in evidence.tasks}
    lost = _lost(evidence)
    starts = _by_task(effect for effect in _starts(evidence) if effect.claim not in lost)
    for task_id, (verdict, at) in evidence.sends.cancels.items():
        state = states.get(task_id)
        match verdict:
            case "CANCELLED":
                late = [effect for effect in starts.get(task_id, ()) if effect.at > at]
                if late or state != "CANCELLED":
                    yield Breach(
                        "I18", f"task {task_id} was cancelled at {at:.2f}, and is {state}, with starts {late}"
                    )
            case "REQUESTED" if state not in ("CANCELLED", "COMPLETED"):
                yield Breach("I18", f"task {task_id} was asked to cancel and is {state}")
            case _:
                pass


def a_ledger_row_for_each_success(evidence: Evidence) -> Iterator[Breach]:
    """I12: a row that was written in the completing transaction exists exactly once, if the task completed under that claim."""
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


def steps_continue_where_they_stopped(evidence: Evidence) -> Iterator[Breach]:
    """G3: the next attempt starts with the interrupted step or the step after it."""
    for task_id, effects in _by_task(
        effect for effect in evidence.effects if effect.step.startswith("step ")
    ).items():
        by_attempt = defaultdict[int, list[int]](list)
        for effect in effects:
            by_attempt[effect.attempt].append(int(effect.step.removeprefix("step ")))
        done = -1
        for number, steps in sorted(by_attempt.items()):
            if steps != list(range(steps[0], steps[-1] + 1)) or steps[0] not in (max(done, 0), done + 1):
                yield Breach("G3", f"task {task_id}: attempt {number} did steps {steps} after step {done}")
            done = steps[-1]


def a_line_is_one_at_a_time(evidence: Evidence) -> Iterator[Breach]:
    """I24: tasks of a serial line run concurrently only after a loss, and start in the order in which they were sent."""
    lost = _lost(evidence)
    ended = {effect.claim: effect.at for effect in evidence.effects}
    lines = {
        task.id: task
        for task in evidence.tasks
        if task.serial is not None and not task.serial.startswith("limit:")
    }
    by_line = defaultdict[str | None, list[Effect]](list)
    for effect in sorted(_starts(evidence), key=lambda effect: effect.at):
        if effect.task in lines and effect.claim not in lost:
            by_line[lines[effect.task].serial].append(effect)
    was_shifted = any(fault.kind in OF_THE_CLOCK for fault in evidence.faults)
    for serial, starts in by_line.items():
        for before, after in pairwise(starts):
            if ended[before.claim] > after.at:
                yield Breach("I24", f"{serial}: {after.task} began while {before.task} was running")
        # The order follows the server's clock, and a send whose outcome is in doubt can arrive late.
        order = [lines[effect.task].number for effect in starts if effect.attempt == 1]
        order = [number for number in order if number in evidence.sends.acknowledged]
        if order != sorted(order) and not was_shifted:
            yield Breach("I24", f"{serial}: began in the order {order}")


def poison_tasks_are_stopped(evidence: Evidence) -> Iterator[Breach]:
    """I15: a task that kills its process never completes, and crashes at most `MOST_CRASHES` times."""
    crashes = Counter(row.task_id for row in evidence.attempts if row.outcome == "CRASHED")
    for task in evidence.tasks:
        if task.name in SELF_KILLERS and (crashes[task.id] > MOST_CRASHES or task.state == "COMPLETED"):
            yield Breach(
                "I15", f"task {task.id} ({task.name}) is {task.state} after {crashes[task.id]} crashes"
            )


TASK_ORACLES: Final = (
    acknowledged_tasks_exist,
    no_unexpected_task,
    everything_ends,
    unstarted_means_no_code,
    each_start_once_and_recorded,
    the_completing_attempt_ran_the_code,
    runs_overlap_only_after_a_loss,
    second_runs_are_explained,
    cancelled_stays_cancelled,
    a_ledger_row_for_each_success,
    steps_continue_where_they_stopped,
    a_line_is_one_at_a_time,
    poison_tasks_are_stopped,
)


def _lost(evidence: Evidence) -> set[str]:
    """Return the ids of the claims that were recovered."""
    return {row.claim_id for row in evidence.recoveries}


def _starts(evidence: Evidence) -> list[Effect]:
    return [effect for effect in evidence.effects if effect.step == "start"]


def _by_task(effects: Iterable[Effect]) -> dict[str, list[Effect]]:
    found = defaultdict[str, list[Effect]](list)
    for effect in effects:
        found[effect.task].append(effect)
    return found


def _name(evidence: Evidence, task_id: str) -> str:
    return next((task.name for task in evidence.tasks if task.id == task_id), "")
