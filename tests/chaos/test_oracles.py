"""Every oracle finds the problem that is planted for it, and finds no problem in a correct run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from tests.chaos import oracles
from tests.chaos.evidence import Evidence, InjectedFault, Messages, TaskRow, WorkflowRow
from tests.chaos.plan import Kind
from tests.chaos.sample_evidence import attempt, effect, fault, recovery, sample_run, with_faults
from tests.chaos.tree_oracles import CANARY
from tests.invariants import BY_THE_CLOCK

Change = Callable[[Evidence], Evidence]


def task(**other: object) -> Change:
    return lambda run: replace(run, tasks=[replace(run.tasks[0], **other), *run.tasks[1:]])


def effects(*added: object) -> Change:
    return lambda run: replace(run, effects=[*run.effects, *added])


def timeline(**other: object) -> Change:
    return lambda run: replace(run, timeline=replace(run.timeline, **other))


def late(run: Evidence, at: float = 120.0) -> Evidence:
    """Let the code of the first attempt of t1 start late."""
    return replace(run, effects=[replace(one, at=at) if one.attempt == 1 else one for one in run.effects])


def beside(run: Evidence, *, number: int = 2, started: float = 109.5) -> Evidence:
    """Put t1 and another task into one serial line, and let the other task start as well."""
    other = TaskRow(id="t2", name="lined", number=number, state="COMPLETED", attempt=1, serial="k")
    return replace(
        run,
        tasks=[replace(run.tasks[0], serial="k"), other],
        effects=[
            effect("t2", 1, "start", started),
            effect("t1", 1, "start", 109.0),
            effect("t1", 1, "end", 110.0),
        ],
        recoveries=[],
    )


def diamond(ended: str, *states: str | None) -> Change:
    """Add a workflow whose tasks end in these states. None means that the task was not sent.

    If `ended` is empty, the workflow is missing.
    """
    tasks = [
        TaskRow(id=f"n{number}", name="again", number=number, state=state, attempt=0)
        for number, state in enumerate(states, 11)
        if state is not None
    ]
    there = [WorkflowRow(id="w1", state=ended)] if ended else []
    return lambda run: replace(
        run,
        tasks=[*run.tasks, *tasks],
        workflows=there,
        sends=replace(run.sends, started={"w1": range(11, 16)}, intended={**run.sends.intended, **dict.fromkeys(range(11, 16), "again")}),
    )  # fmt: skip


def messages(**other: object) -> Change:
    """Turn the run into a run with NATS."""
    sound_ones = Messages(
        delivered=9, in_outbox=0, in_stream=0, workers_away=0, drained_after_s=1.0, found_after_s=2.0
    )
    return timeline(messages=replace(sound_ones, **other))


def with_only_fault(only: InjectedFault, run: Evidence) -> Evidence:
    """Return the run with `only` as its only fault."""
    return with_faults(run, only)


BROKEN_RUNS: list[tuple[str, str, Change]] = [
    ("I1", "is not there", lambda run: replace(run, tasks=run.tasks[1:], effects=[])),
    ("I1", "there 2 times", lambda run: replace(run, tasks=[*run.tasks, replace(run.tasks[0], id="t9")])),
    ("I2", "nobody meant to send", lambda run: replace(run, tasks=[*run.tasks, TaskRow(id="t9", name="again", number=9, state="FAILED", attempt=0)])),
    ("I2", "ran and is not there", effects(effect("t9", 1, "start", 120.0))),
    ("L3", "still RUNNING", task(state="RUNNING")),
    ("I9", "recovered unstarted", lambda run: replace(run, recoveries=[recovery(was="CLAIMED")])),
    ("I10", "started its code 2 times", effects(effect("t1", 2, "start", 114.6))),
    ("I10", "no attempt is recorded", effects(effect("t1", 3, "start", 118.0))),
    ("I10", "is recorded as", lambda run: replace(run, attempts=[run.attempts[0], replace(run.attempts[1], fence=9)])),
    ("I4", "fence 1 started after 2", lambda run: replace(late(run), recoveries=[])),
    ("I8", "its code did not", lambda run: replace(run, effects=run.effects[:2])),
    ("I11", "which nobody lost", lambda run: replace(run, effects=[*run.effects, effect("t1", 1, "end", 117.0)], recoveries=[])),
    ("P2", "nothing says why", lambda run: replace(run, attempts=[attempt("t1", 1, "FAILED"), run.attempts[1]])),
    ("P2", "against its policy", task(name="quick")),
    ("I18", "with starts", lambda run: replace(effects(effect("t2", 1, "start", 106.0))(run), attempts=[*run.attempts, attempt("t2",
    1, "CANCELLED")])),
    ("I18", "asked to cancel", lambda run: replace(task(state="FAILED")(run), sends=replace(run.sends, cancels={"t1": ("REQUESTED", 112.0)}))),
    ("I13", "recovered by age", with_faults),
    ("I13", "was ended by age", lambda run: replace(with_faults(run), recoveries=[])),
    ("I13", "was ended by age", lambda run: with_faults(run, fault(0, Kind.FREEZE_TREE, 1, 110.0, 116.0))),
    ("I13", "was ended by age", lambda run: with_faults(run, fault(0, Kind.FREEZE_TREE, 0, 113.5, 116.0))),
    ("I13", "was ended by age", lambda run: with_faults(run, fault(0, Kind.FREEZE_TREE, 0, 110.0, 110.5))),
    *[
        ("I13", "was ended by age", partial(with_only_fault, fault(0, kind, None, 110.0, 116.0)))
        for kind in (Kind.READ_ONLY, Kind.EXHAUST_CONNECTIONS, Kind.FREEZE_DATABASE, Kind.PROMOTE)
    ],
    ("I13", "was ended by age", lambda run: with_faults(run, fault(0, Kind.KILL_TURN_HOLDER, 1, 110.0, 116.0, expired_after_s=1.0))),
    ("L3", "was not expired", lambda run: with_faults(run, *run.faults, fault(1, Kind.KILL_TURN_HOLDER, 1, 120.0, 126.0, expired_after_s=None))),
    ("I14", "after the return", lambda run: with_faults(run, *run.faults, fault(1, Kind.READ_ONLY, None, 111.0, 112.0))),
    ("I26", "while forked children live", timeline(held_by_orphans=("everbeat idle",))),
    ("I13", "recovered by child_exit", lambda run: replace(run, recoveries=[recovery(noticed_by="child_exit")])),
    ("I13", "ended by session", lambda run: replace(run, ends=[replace(run.ends[0], how="session", at=111.0)], recoveries=[])),
    ("I13", "ended by startup", lambda run: replace(run, ends=[replace(run.ends[0], how="startup")], recoveries=[])),
    ("I14", "after the return", lambda run: with_faults(run, *run.faults, fault(1, Kind.RESTART_DATABASE, None, 111.0, 112.0))),
    ("I14", "by age", lambda run: replace(with_faults(run, *run.faults, fault(1, Kind.FREEZE_TREE, 1, 110.0, 112.0)), ends=[])),
    ("P4", "ended by itself", lambda run: replace(run, lives=[replace(run.lives[0], ended=120.0), run.lives[1]])),
    ("I26", "left behind: 7 python", timeline(left_behind=("7 python",))),
    ("I26", "left behind: everbeat", lambda run: replace(run, sessions=["everbeat idle in transaction"])),
    ("L7", "ended with", timeline(exit_codes=(0, None))),
    ("L7", "took 60.0 s", timeline(longest_stop_s=60.0)),
    ("I27", "deadlock detected", lambda run: replace(run, server_log="ERROR:  deadlock detected\n")),
    ("I27", "PANIC", lambda run: replace(run, server_log="PANIC:  could not fsync\n")),
    ("I29", CANARY, lambda run: replace(run, logs=f"failed with {CANARY}\n")),
    ("I12", "in the ledger []", task(name="ledgered")),
    ("I12", "'t1-1'", lambda run: replace(run, ledger=[("t1", "t1-1")])),
    ("I12", "'t1-2', 't1-2'", lambda run: replace(run, ledger=[("t1", "t1-2"), ("t1", "t1-2")])),
    ("G3", "did steps [0]", effects(effect("t1", 1, "step 0", 109.0), effect("t1", 1, "step 1", 109.5), effect("t1", 2, "step 0", 114.6))),
    ("G3", "did steps [3]", effects(effect("t1", 1, "step 0", 109.0), effect("t1", 1, "step 1", 109.5), effect("t1", 2, "step 3", 114.6))),
    ("I24", "began while", lambda run: replace(beside(run), recoveries=[])),
    ("I24", "in the order [2, 1]", lambda run: beside(run, number=2, started=105.0)),
    ("I15", "after 3 crashes", lambda run: replace(task(name="rude")(run), attempts=[attempt("t1", n, "CRASHED") for n in (1, 2, 3)])),
    ("I1", "workflow w1 was acknowledged", diamond("", *5 * ["COMPLETED"])),
    ("L3", "workflow w1 is still PAUSED", diamond("PAUSED", *5 * ["COMPLETED"])),
    ("I21", "sent the tasks of [0, 1, 2, 3, 4]", diamond("FAILED", "COMPLETED", "FAILED", "COMPLETED", "COMPLETED", "COMPLETED")),
    ("I21", "not of [0, 1, 2, 4]", diamond("COMPLETED", "COMPLETED", "COMPLETED", None, None, "COMPLETED")),
    ("I22", "ended COMPLETED", diamond("COMPLETED", "COMPLETED", "FAILED", "COMPLETED", None, "COMPLETED")),
    ("N1", "no message", messages(delivered=0)),
    ("N2", "3 rows", messages(in_outbox=3, drained_after_s=None)),
    ("N3", "2 messages", messages(in_stream=2, drained_after_s=None)),
    ("N3", "no stream", messages(in_stream=-1, drained_after_s=None)),
    ("N4", "1 living", messages(workers_away=1, drained_after_s=None)),
    ("N5", "did not end in time", messages(found_after_s=None)),
    ("I7", "by query", lambda run: replace(run, breaches=[("I7", "found by query")])),
]  # fmt: skip


def test_the_oracles_find_no_problem_in_a_correct_run() -> None:
    assert oracles.breaches(sample_run()) == []


def test_the_oracles_find_no_problem_in_a_correct_run_with_nats() -> None:
    assert oracles.breaches(messages()(sample_run())) == []


@pytest.mark.parametrize(
    ("ended", "states"),
    [
        ("COMPLETED", ["COMPLETED"] * 5),
        ("FAILED", ["FAILED", None, None, None, "COMPLETED"]),
        ("FAILED", ["COMPLETED", "COMPLETED", "FAILED", None, "FAILED"]),
    ],
)
def test_the_oracles_find_no_problem_in_a_correct_workflow(ended: str, states: list[str | None]) -> None:
    found = {breach.number for breach in oracles.breaches(diamond(ended, *states)(sample_run()))}
    assert found == set()


@pytest.mark.parametrize(
    ("number", "words", "change"), BROKEN_RUNS, ids=[f"{one[0]} {one[1]}" for one in BROKEN_RUNS]
)
def test_an_oracle_finds_each_planted_problem(number: str, words: str, change: Change) -> None:
    found = oracles.breaches(change(sample_run()))
    assert any(breach.number == number and words in breach.what for breach in found), found


def test_every_oracle_finds_a_planted_problem() -> None:
    silent = [
        oracle.__name__
        for oracle in oracles.ORACLES
        if not any(list(oracle(change(sample_run()))) for _, _, change in BROKEN_RUNS)
    ]
    assert silent == []


def test_times_are_not_compared_if_the_clock_was_shifted() -> None:
    run = replace(
        sample_run(), breaches=[("I17", "started before it was sent"), ("I39", f"{BY_THE_CLOCK}: ...")]
    )
    assert [breach.number for breach in oracles.breaches(run)] == ["I17", "I39"]
    shifted = with_faults(run, *run.faults, fault(1, Kind.SHIFT_CLOCK, None, 120.0, 123.0))
    assert oracles.breaches(shifted) == []


def test_a_death_after_a_cut_or_a_kill_is_explained() -> None:
    run = sample_run()
    cut = with_faults(run, fault(0, Kind.CUT, 0, 110.0, 116.0))
    assert oracles.breaches(cut) == []
    # The server came back in between, and since then the silence was inflicted for long enough.
    down = with_faults(cut, fault(0, Kind.CUT, 0, 111.2, 116.0), fault(1, Kind.FILL_DISK, None, 110.0, 111.0))
    assert oracles.breaches(down) == []
    killed = replace(
        with_faults(run, fault(0, Kind.KILL_TREE, 0, 110.0, 116.0, pids=[101, 201])),
        lives=[replace(run.lives[0], ended=110.0, was_killed=True), run.lives[1]],
        ends=[replace(run.ends[0], how="session", at=111.6)],
        recoveries=[recovery(noticed_by="session", at=111.7)],
    )
    assert oracles.breaches(killed) == []


def test_a_frozen_tree_can_be_judged_while_the_server_has_no_free_connection() -> None:
    """The frozen tree keeps its connections, but a tree whose connections were cut does not."""
    run = sample_run()
    frozen = with_faults(
        run,
        fault(0, Kind.FREEZE_TREE, 0, 110.0, 116.0),
        fault(1, Kind.EXHAUST_CONNECTIONS, None, 109.0, 113.0),
    )
    assert oracles.breaches(frozen) == []
    cut = with_faults(
        run, fault(0, Kind.CUT, 0, 110.0, 116.0), fault(1, Kind.EXHAUST_CONNECTIONS, None, 109.0, 113.0)
    )
    assert {breach.number for breach in oracles.breaches(cut)} == {"I14"}


@pytest.mark.parametrize("at", [114.8, 120.0], ids=["beside its successor", "after it"])
def test_code_that_lost_its_lease_can_start_late(at: float) -> None:
    assert oracles.breaches(late(sample_run(), at)) == []
