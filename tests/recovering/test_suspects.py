"""Test which tasks are charged when a process dies under several tasks, and which become suspects."""

from __future__ import annotations

import signal
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.recovering.orders import Death
from everbeat.runtime.processes import EXIT_SOFTWARE, EXIT_UNSETTLED, ExitReport
from everbeat.store import leases, tasks, workers
from everbeat.store.claims import Claimed
from tests.recovering.conftest import ManualObserver, StoreHarness

AGAIN = StoredPolicy(on_crash="retry").to_json()


def by_signal(number: signal.Signals, **more: Any) -> ExitReport:
    return ExitReport(pid=2, signal_number=number, signal_name=number.name, **more)


BLAMED = [
    by_signal(signal.SIGSEGV), by_signal(signal.SIGBUS), by_signal(signal.SIGILL), by_signal(signal.SIGABRT),
    by_signal(signal.SIGKILL, out_of_memory=True), ExitReport(pid=2, exit_code=139), ExitReport(pid=2, exit_code=0),
]  # fmt: skip
NOT_BLAMED = [by_signal(signal.SIGKILL), by_signal(signal.SIGTERM), ExitReport(pid=2)]


def alone(db: StoreHarness, **options: Any) -> Claimed:
    """Start a task whose code runs in a separate process."""
    db.send(**options)
    (claimed,) = db.claim(limit=1)
    start = leases.start(
        [(claimed.id, claimed.claim_id)], channel=db.target.channel, alone={claimed.claim_id}
    )
    assert db.run(start)[claimed.claim_id].verdict == "started"
    return claimed


async def die(observer: ManualObserver, report: ExitReport) -> None:
    bury = workers.bury_workers(
        worker_ids=["w1"], how="child_exit", cause=report.cause, exit_code=report.exit_code,
        signal=report.signal_number,
    )  # fmt: skip
    assert observer.db.run(bury) == ["w1"]
    await observer.recoverer(sweep_batch_size=2).recover_worker("w1", report, died_at=0.0)


def marks(db: StoreHarness, task_id: UUID) -> tuple[bool, int, int]:
    row: tuple[bool, int, int] = db.row(task_id, "suspect, crash_count, loss_count")
    return row


@pytest.mark.parametrize("report", [*BLAMED, *NOT_BLAMED], ids=lambda report: report.cause)
async def test_tasks_that_shared_a_process_killed_by_code_become_suspects(
    report: ExitReport, observer: ManualObserver, db: StoreHarness
) -> None:  # E13
    tasks = [db.running(policy=AGAIN).id for _ in range(3)]
    db.send(policy=AGAIN)
    (claimed,) = db.claim(limit=1)
    await die(observer, report)
    assert {marks(db, each) for each in tasks} == {(report in BLAMED, 0, 1)}
    assert marks(db, claimed.id) == (False, 0, 0), "its code had not started"
    rows = db.table("recoveries", "was, charge, suspect")
    assert sorted(rows, key=str) == sorted(
        [("CLAIMED", None, False), *[("RUNNING", "loss", report in BLAMED)] * 3], key=str
    )


@pytest.mark.parametrize(
    ("report", "charged"),
    [
        (by_signal(signal.SIGKILL, killed_because="it reached no database for 9.0 s"), (False, 0, 1)),
        (ExitReport(pid=2, exit_code=EXIT_UNSETTLED), (False, 0, 1)),
        (ExitReport(pid=2, exit_code=EXIT_SOFTWARE), (False, 0, 1)),
        (by_signal(signal.SIGKILL, killed_because="its loop stood still for 9.0 s"), (True, 1, 0)),
        (ExitReport(pid=2, exit_code=3), (True, 1, 0)),
    ],
    ids=lambda value: value.cause if isinstance(value, ExitReport) else "",
)
async def test_a_process_that_everbeat_ended_is_not_charged_to_its_task(
    report: ExitReport, charged: tuple[bool, int, int], observer: ManualObserver, db: StoreHarness
) -> None:  # E13
    task = db.running(policy=AGAIN).id
    await die(observer, report)
    assert marks(db, task) == charged


async def test_tasks_in_separate_processes_are_neither_charged_nor_suspected(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E13
    apart = [alone(db, policy=AGAIN).id for _ in range(3)]
    shared = db.running(policy=AGAIN).id
    await die(observer, BLAMED[0])
    assert {marks(db, each) for each in apart} == {(False, 0, 1)}
    suspect, crashes, losses = marks(db, shared)
    assert (crashes, losses) == (1, 0), "it was the only one in the process that died"
    assert suspect


async def test_the_death_of_a_task_process_charges_its_task_without_suspicion(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E8
    running = db.running(policy=AGAIN)
    await observer.recoverer().recover_attempt(
        running.id, running.claim_id, Death.by_exit(BLAMED[0], after_s=0.0, pid=BLAMED[0].pid)
    )
    assert marks(db, running.id) == (False, 1, 0)


def again_under(db: StoreHarness, supervisor: str, worker: str, *, apart: UUID) -> None:
    """Let another tree run all due tasks, one of them in a separate process."""
    db.supervisor(supervisor, worker)
    claimed = db.claim(worker)
    start = leases.start(
        [(each.id, each.claim_id) for each in claimed],
        channel=db.target.channel,
        alone={each.claim_id for each in claimed if each.id == apart},
    )
    assert {one.verdict for one in db.run(start).values()} == {"started"}


async def lose_tree(observer: ManualObserver, supervisor: str, noticed_by: str) -> None:
    observer.db.run(workers.end_supervisor(supervisor, how=noticed_by))
    observer.db.run(workers.bury_orphans())
    await observer.recoverer().recover_supervisor(supervisor, Death(noticed_by=noticed_by, cause="gone"))


async def lose_process(observer: ManualObserver, worker: str, report: ExitReport) -> None:
    bury = workers.bury_workers(
        worker_ids=[worker], how="child_exit", cause=report.cause, exit_code=report.exit_code,
        signal=report.signal_number,
    )  # fmt: skip
    assert observer.db.run(bury) == [worker]
    await observer.recoverer().recover_worker(worker, report, died_at=0.0)


KILLED = by_signal(signal.SIGKILL)
LIKE_OURS = ExitReport(pid=2, exit_code=EXIT_SOFTWARE)
"""everbeat exits with this code, and code of a user might."""
CUT_OFF = by_signal(signal.SIGKILL, killed_because="it reached no database for 9.0 s")


@pytest.mark.parametrize("noticed_by", ["session", "startup", "age", "sweep", "operator"])
async def test_repeatedly_lost_trees_make_no_suspects(
    noticed_by: str, observer: ManualObserver, db: StoreHarness
) -> None:  # E13
    together = [db.running(policy=AGAIN) for _ in range(2)]
    apart = alone(db, policy=AGAIN)
    await lose_tree(observer, "s1", noticed_by)
    for number in range(2, 5):
        again_under(db, f"s{number}", f"x{number}", apart=apart.id)
        await lose_tree(observer, f"s{number}", noticed_by)
    assert {marks(db, each.id) for each in (*together, apart)} == {(False, 0, 4)}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (KILLED, KILLED, True), (KILLED, None, False), (None, KILLED, False), (None, None, False),
        (CUT_OFF, KILLED, False), (KILLED, CUT_OFF, False), (None, BLAMED[0], True),
        (LIKE_OURS, LIKE_OURS, True), (LIKE_OURS, None, False), (CUT_OFF, LIKE_OURS, False),
    ],
    ids=[
        "two processes", "process, tree", "tree, process", "two trees", "ours, process", "process, ours", "tree, SIGSEGV",
        "two exits with a code of ours", "exit with a code of ours, tree", "ours, exit with a code of ours",
    ],
)  # fmt: skip
async def test_a_task_becomes_a_suspect_at_the_second_process_that_ended_under_it(
    first: ExitReport | None,
    second: ExitReport | None,
    expected: bool,
    observer: ManualObserver,
    db: StoreHarness,
) -> None:  # E13
    """A report of None stands for the loss of the whole tree."""
    together = [db.running(policy=AGAIN) for _ in range(2)]
    apart = alone(db, policy=AGAIN)
    for supervisor, worker, report in (("s1", "w1", first), ("s2", "w5", second)):
        if supervisor == "s2":
            again_under(db, supervisor, worker, apart=apart.id)
        if report is None:
            await lose_tree(observer, supervisor, "session")
        else:
            await lose_process(observer, worker, report)
    assert {marks(db, each.id) for each in together} == {(expected, 0, 2)}
    assert marks(db, apart.id) == (False, 0, 2)


async def test_an_operators_retry_resets_the_processes_that_ended_under_a_task(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = [db.running(policy=AGAIN) for _ in range(2)]
    await lose_process(observer, "w1", KILLED)
    for each in running:
        db.run(tasks.cancel(each.id, channel=db.target.channel, call=uuid4()))
        assert db.run(tasks.retry(each.id, channel=db.target.channel, call=uuid4()))
    again_under(db, "s2", "w5", apart=running[0].id)
    await lose_process(observer, "w5", KILLED)
    assert marks(db, running[1].id)[0] is False


async def test_a_suspect_is_cleared_only_when_its_code_ends_by_itself(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E13
    for _ in range(2):
        db.running(policy=AGAIN)
    await die(observer, BLAMED[0])
    one, other = db.claim("w2")
    assert (one.suspect, other.suspect) == (True, True)
    db.start(one, other)
    db.settle(one, "RELEASED")
    db.settle(other)
    assert db.row(one.id, "suspect") is True
    assert db.row(other.id, "suspect") is False


async def test_a_recovery_after_an_unfinished_burial_still_makes_suspects(
    observer: ManualObserver, db: StoreHarness
) -> None:
    tasks = [db.running(policy=AGAIN).id for _ in range(2)]
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed by SIGSEGV", signal=11))
    db.run(workers.end_supervisor("s1", how="session"))
    assert await observer.recoverer().recover_ended() == 2
    assert {marks(db, each) for each in tasks} == {(True, 0, 1)}


async def test_a_process_killed_for_hanging_makes_its_tasks_suspects(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E16
    tasks = [db.running(policy=AGAIN).id for _ in range(2)]
    cause = "its loop stood still for 5 s, killed by its supervisor"
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause=cause, signal=9))
    db.run(workers.end_supervisor("s1", how="session"))
    await observer.recoverer().recover_ended()
    assert {marks(db, each) for each in tasks} == {(True, 0, 1)}


async def test_the_stored_cause_of_death_has_memory_and_progress(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running, other = db.running(), db.running("w2")
    state = workers.WorkerState(
        worker_id="w2", running=1, claimed=0, slots=1, rss_bytes=123_456, cpu_percent=1.0, loop_lag_ms=0.0
    )
    db.run(workers.record_states([state]))
    db.run(leases.record_progress(other.id, other.claim_id, b'{"stage": "packing", "fraction": 0.25}'))
    await die(observer, by_signal(signal.SIGKILL, out_of_memory=True, max_rss_bytes=777))
    db.run(workers.end_supervisor("s1", how="session"))
    await observer.recoverer().recover_ended()
    data = db.row(running.id, "error")["data"]
    assert (data["out_of_memory"], data["last_rss_bytes"], data["last_progress"]) == (True, 777, None)
    data = db.row(other.id, "error")["data"]
    assert (data["out_of_memory"], data["last_rss_bytes"]) == (False, 123_456)
    assert data["last_progress"] == {"stage": "packing", "fraction": 0.25, "message": ""}
