"""Who is charged when a process dies under several tasks, and who runs alone next."""

from __future__ import annotations

import signal
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.exit_report import EXIT_SOFTWARE, EXIT_UNSETTLED, ExitReport
from everbeat.services.death import Death
from everbeat.store import leases, tasks, workers
from everbeat.store.leases import Claimed
from tests.services.conftest import Hands, Onlooker

AGAIN = StoredPolicy(on_crash="retry").to_json()


def by_signal(number: signal.Signals, **more: Any) -> ExitReport:
    return ExitReport(pid=2, signal_number=number, signal_name=number.name, **more)


BLAMED = [
    by_signal(signal.SIGSEGV), by_signal(signal.SIGBUS), by_signal(signal.SIGILL), by_signal(signal.SIGABRT),
    by_signal(signal.SIGKILL, out_of_memory=True), ExitReport(pid=2, exit_code=139), ExitReport(pid=2, exit_code=0),
]  # fmt: skip
NOT_BLAMED = [by_signal(signal.SIGKILL), by_signal(signal.SIGTERM), ExitReport(pid=2)]


def alone(hands: Hands, **options: Any) -> Claimed:
    """A task whose code runs in a process of its own."""
    hands.send(**options)
    (claimed,) = hands.claim(limit=1)
    start = leases.start(
        [(claimed.id, claimed.claim_id)], channel=hands.target.channel, alone={claimed.claim_id}
    )
    assert hands.run(start)[claimed.claim_id].verdict == "started"
    return claimed


async def die(onlooker: Onlooker, report: ExitReport) -> None:
    bury = workers.bury_workers(
        worker_ids=["w1"], how="child_exit", cause=report.cause, exit_code=report.exit_code,
        signal=report.signal_number,
    )  # fmt: skip
    assert onlooker.hands.run(bury) == ["w1"]
    await onlooker.recoverer(sweep_batch_size=2).recover_worker("w1", report, died_at=0.0)


def marks(hands: Hands, task_id: UUID) -> tuple[bool, int, int]:
    row: tuple[bool, int, int] = hands.row(task_id, "suspect, crash_count, loss_count")
    return row


@pytest.mark.parametrize("report", [*BLAMED, *NOT_BLAMED], ids=lambda report: report.cause)
async def test_several_that_shared_a_process_which_died_of_code_are_suspects(
    report: ExitReport, onlooker: Onlooker, hands: Hands
) -> None:  # E13
    tasks = [hands.running(policy=AGAIN).id for _ in range(3)]
    hands.send(policy=AGAIN)
    (claimed,) = hands.claim(limit=1)
    await die(onlooker, report)
    assert {marks(hands, each) for each in tasks} == {(report in BLAMED, 0, 1)}
    assert marks(hands, claimed.id) == (False, 0, 0), "its code had not started"
    rows = hands.table("recoveries", "was, charge, suspect")
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
async def test_what_we_end_ourselves_is_not_charged_to_the_code(
    report: ExitReport, charged: tuple[bool, int, int], onlooker: Onlooker, hands: Hands
) -> None:  # E13
    task = hands.running(policy=AGAIN).id
    await die(onlooker, report)
    assert marks(hands, task) == charged


async def test_what_ran_in_processes_of_their_own_is_neither_charged_nor_suspected(
    onlooker: Onlooker, hands: Hands
) -> None:  # E13
    apart = [alone(hands, policy=AGAIN).id for _ in range(3)]
    shared = hands.running(policy=AGAIN).id
    await die(onlooker, BLAMED[0])
    assert {marks(hands, each) for each in apart} == {(False, 0, 1)}
    suspect, crashes, losses = marks(hands, shared)
    assert (crashes, losses) == (1, 0), "it was the only one in the process that died"
    assert suspect


async def test_a_task_process_is_charged_and_makes_no_suspect(onlooker: Onlooker, hands: Hands) -> None:  # E8
    running = hands.running(policy=AGAIN)
    await onlooker.recoverer().recover_lease(running.id, running.claim_id, BLAMED[0])
    assert marks(hands, running.id) == (False, 1, 0)


def again_under(hands: Hands, supervisor: str, worker: str, *, apart: UUID) -> None:
    """Another tree runs all that is due; one task in a process of its own."""
    hands.supervisor(supervisor, worker)
    claimed = hands.claim(worker)
    start = leases.start(
        [(each.id, each.claim_id) for each in claimed],
        channel=hands.target.channel,
        alone={each.claim_id for each in claimed if each.id == apart},
    )
    assert {one.verdict for one in hands.run(start).values()} == {"started"}


async def lose_tree(onlooker: Onlooker, supervisor: str, noticed_by: str) -> None:
    onlooker.hands.run(workers.end_supervisor(supervisor, how=noticed_by))
    onlooker.hands.run(workers.bury_orphans())
    await onlooker.recoverer().recover_supervisor(supervisor, Death(noticed_by=noticed_by, cause="gone"))


async def lose_process(onlooker: Onlooker, worker: str, report: ExitReport) -> None:
    bury = workers.bury_workers(
        worker_ids=[worker], how="child_exit", cause=report.cause, exit_code=report.exit_code,
        signal=report.signal_number,
    )  # fmt: skip
    assert onlooker.hands.run(bury) == [worker]
    await onlooker.recoverer().recover_worker(worker, report, died_at=0.0)


KILLED = by_signal(signal.SIGKILL)
LIKE_OURS = ExitReport(pid=2, exit_code=EXIT_SOFTWARE)
"""everbeat exits with this code, and code of a user might."""
CUT_OFF = by_signal(signal.SIGKILL, killed_because="it reached no database for 9.0 s")


@pytest.mark.parametrize("noticed_by", ["session", "startup", "age", "sweep", "operator"])
async def test_lost_trees_make_no_suspects_however_many(
    noticed_by: str, onlooker: Onlooker, hands: Hands
) -> None:  # E13
    together = [hands.running(policy=AGAIN) for _ in range(2)]
    apart = alone(hands, policy=AGAIN)
    await lose_tree(onlooker, "s1", noticed_by)
    for number in range(2, 5):
        again_under(hands, f"s{number}", f"x{number}", apart=apart.id)
        await lose_tree(onlooker, f"s{number}", noticed_by)
    assert {marks(hands, each.id) for each in (*together, apart)} == {(False, 0, 4)}


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
async def test_only_the_second_process_that_ended_under_it_makes_a_suspect(
    first: ExitReport | None, second: ExitReport | None, expected: bool, onlooker: Onlooker, hands: Hands
) -> None:  # E13
    """None stands for the loss of the whole tree."""
    together = [hands.running(policy=AGAIN) for _ in range(2)]
    apart = alone(hands, policy=AGAIN)
    for supervisor, worker, report in (("s1", "w1", first), ("s2", "w5", second)):
        if supervisor == "s2":
            again_under(hands, supervisor, worker, apart=apart.id)
        if report is None:
            await lose_tree(onlooker, supervisor, "session")
        else:
            await lose_process(onlooker, worker, report)
    assert {marks(hands, each.id) for each in together} == {(expected, 0, 2)}
    assert marks(hands, apart.id) == (False, 0, 2)


async def test_a_retry_by_hand_forgets_the_processes_that_ended(onlooker: Onlooker, hands: Hands) -> None:
    running = [hands.running(policy=AGAIN) for _ in range(2)]
    await lose_process(onlooker, "w1", KILLED)
    for each in running:
        hands.run(tasks.cancel(each.id, channel=hands.target.channel, call=uuid4()))
        assert hands.run(tasks.retry(each.id, channel=hands.target.channel, call=uuid4()))
    again_under(hands, "s2", "w5", apart=running[0].id)
    await lose_process(onlooker, "w5", KILLED)
    assert marks(hands, running[1].id)[0] is False


async def test_a_suspect_stays_one_until_its_code_has_ended_by_itself(
    onlooker: Onlooker, hands: Hands
) -> None:  # E13
    for _ in range(2):
        hands.running(policy=AGAIN)
    await die(onlooker, BLAMED[0])
    one, other = hands.claim("w2")
    assert (one.suspect, other.suspect) == (True, True)
    hands.start(one, other)
    hands.settle(one, "RELEASED")
    hands.settle(other)
    assert hands.row(one.id, "suspect") is True
    assert hands.row(other.id, "suspect") is False


async def test_a_burial_that_was_not_followed_by_a_recovery_is_revisited_with_its_blame(
    onlooker: Onlooker, hands: Hands
) -> None:
    tasks = [hands.running(policy=AGAIN).id for _ in range(2)]
    hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause="killed by SIGSEGV", signal=11))
    hands.run(workers.end_supervisor("s1", how="session"))
    assert await onlooker.recoverer().recover_ended() == 2
    assert {marks(hands, each) for each in tasks} == {(True, 0, 1)}


async def test_a_process_that_hung_died_of_its_code(onlooker: Onlooker, hands: Hands) -> None:  # E16
    tasks = [hands.running(policy=AGAIN).id for _ in range(2)]
    cause = "its loop stood still for 5 s, killed by its supervisor"
    hands.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause=cause, signal=9))
    hands.run(workers.end_supervisor("s1", how="session"))
    await onlooker.recoverer().recover_ended()
    assert {marks(hands, each) for each in tasks} == {(True, 0, 1)}


async def test_the_certificate_tells_of_memory_and_progress(onlooker: Onlooker, hands: Hands) -> None:
    running, other = hands.running(), hands.running("w2")
    state = workers.WorkerState(
        worker_id="w2", running=1, claimed=0, slots=1, rss_bytes=123_456, cpu_percent=1.0, loop_lag_ms=0.0
    )
    hands.run(workers.record_states([state]))
    hands.run(leases.record_progress(other.id, other.claim_id, b'{"stage": "packing", "fraction": 0.25}'))
    await die(onlooker, by_signal(signal.SIGKILL, out_of_memory=True, max_rss_bytes=777))
    hands.run(workers.end_supervisor("s1", how="session"))
    await onlooker.recoverer().recover_ended()
    data = hands.row(running.id, "error")["data"]
    assert (data["out_of_memory"], data["last_rss_bytes"], data["last_progress"]) == (True, 777, None)
    data = hands.row(other.id, "error")["data"]
    assert (data["out_of_memory"], data["last_rss_bytes"]) == (False, 123_456)
    assert data["last_progress"] == {"stage": "packing", "fraction": 0.25, "message": ""}
