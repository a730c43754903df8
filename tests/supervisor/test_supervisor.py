"""Test real trees of processes that are really killed: how deaths are noticed, tasks recovered and trees stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.store import workers
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.supervisor.supervising import BY_AGE, FAST, Tree, tree, until
from tests.variants import long_except
from tests.worker.harness import WorkerHarness

# A busy machine can exceed a bound of the product by this factor; the tests print the measured times.
BUSY_MACHINE = 3
AGAIN = StoredPolicy(on_crash="retry").to_json()
NewTree = Callable[..., AbstractContextManager[Tree]]


@pytest.fixture
def new_tree(harness: WorkerHarness, tmp_path: Path) -> NewTree:
    # The row of the harness itself would count as one more dead worker.
    harness.run(workers.end_supervisor(harness.supervisor_id, how="left"))
    logs = (tmp_path / f"tree-{number}.log" for number in range(100))

    def plant(*flags: str, **settings: Any) -> AbstractContextManager[Tree]:
        return tree(harness.target, next(logs), *flags, **settings)

    return plant


def state(harness: WorkerHarness, task_id: UUID) -> str:
    return harness.task(task_id)["state"]


def is_running(harness: WorkerHarness, *task_ids: UUID) -> bool:
    return all(state(harness, task_id) == "RUNNING" for task_id in task_ids)


def until_running(harness: WorkerHarness, *task_ids: UUID) -> None:
    until(partial(is_running, harness, *task_ids), what="the tasks run")


def pid_of(harness: WorkerHarness, task_id: UUID) -> int:
    (row,) = harness.query(
        "select w.pid from {schema}.tasks t join {schema}.workers w on w.id = t.claimed_by_worker_id where t.id = %s",
        task_id,
    )
    return row["pid"]


def supervisors(harness: WorkerHarness) -> dict[int, dict[str, Any]]:
    rows = harness.query(
        "select * from {schema}.supervisors where session_name like 'everbeat-%%' and metadata is null and pid > 1"
    )
    return {row["pid"]: row for row in rows}


def test_tasks_of_a_killed_worker_process_are_settled_at_once_and_it_is_replaced(
    harness: WorkerHarness, new_tree: NewTree
) -> None:  # E4
    with new_tree(processes=2, async_concurrency=2, prefetch=0) as running_tree:
        until(lambda: len(running_tree.workers()) == 2, what="two workers")
        many = [harness.send("nap", seconds=100) for _ in range(4)]
        until_running(harness, *many)
        pids = {task: pid_of(harness, task) for task in many}
        victim = pids[many[0]]
        dead = [task for task, pid in pids.items() if pid == victim]
        waiting = harness.send("double", x=4)
        os.kill(victim, signal.SIGKILL)
        took = until(lambda: all(state(harness, task) == "FAILED" for task in dead), what="settled")
        print(f"settled {took:.3f} s after the kill")
        assert took < BUSY_MACHINE * 1
        until(
            lambda: len(running_tree.workers()) == 2 and victim not in running_tree.workers(), what="replaced"
        )
        until(lambda: state(harness, waiting) == "COMPLETED", what="the replacement works")
        for task in many:
            assert state(harness, task) == ("FAILED" if task in dead else "RUNNING")
        error = harness.task(dead[0])["error"]
        assert error["data"]["noticed_by"] == "child_exit"
        assert error["data"]["cause"] == "killed by SIGKILL"
        assert error["data"]["pid"] == victim


def test_tasks_of_a_killed_tree_are_settled_by_another_within_three_seconds(
    harness: WorkerHarness, new_tree: NewTree
) -> None:  # E4
    with new_tree() as victim:
        tasks = [harness.send_with("nap", {"seconds": 100}, policy=AGAIN) for _ in range(3)]
        until_running(harness, *tasks)
        # On a slow machine, the reconciliation of its start would still be running, and find the death first.
        with new_tree(recovery={"startup_reconciliation": False}) as other:
            until(lambda: other.pid in supervisors(harness) and other.workers(), what="the other is there")
            until(lambda: supervisors(harness)[other.pid]["session_held"], what="and watches")
            victim.kill()
            took = until(
                lambda: all(harness.task(task)["loss_count"] == 1 for task in tasks),
                timeout_s=9,
                what="settled",
            )
            print(f"settled {took:.3f} s after the kill")
            assert took < BUSY_MACHINE * 3
            until_running(harness, *tasks)
            (how,) = {
                row["noticed_by"] for row in harness.query("select noticed_by from {schema}.recoveries")
            }
            assert how == "session"


@pytest.mark.skipif(sys.platform != "linux", reason="the proof reads /proc")
@pytest.mark.parametrize(
    ("way", "recovery"),
    [("session", {}), pytest.param("age", FAST | {"detect_session_loss": False}, marks=pytest.mark.long)],
)
def test_half_of_all_trees_killed_on_one_machine_are_recovered_as_fast_as_one(
    way: str, recovery: dict[str, Any], harness: WorkerHarness, new_tree: NewTree
) -> None:  # E14
    """Enough for a mass silence, but the other trees on the machine prove that these are dead."""
    plant = partial(new_tree, recovery=recovery, async_concurrency=1, prefetch=0)
    with plant() as one, plant() as two:
        until(lambda: one.workers() and two.workers(), what="two trees work")
        tasks = [harness.send_with("nap", {"seconds": 100}, policy=AGAIN) for _ in range(2)]
        until_running(harness, *tasks)
        with plant() as three, plant() as four:
            until(lambda: three.workers() and four.workers(), what="two more")
            until(
                lambda: [row["session_held"] for row in supervisors(harness).values()] == [True] * 4,
                what="all four watch",
            )
            for victim in (one, two):
                victim.signal_all(signal.SIGKILL)
            took = until(
                lambda: all(harness.task(task)["loss_count"] == 1 for task in tasks),
                timeout_s=BUSY_MACHINE * 5,
                what="settled",
            )
            print(f"settled {took:.3f} s after the kill")
            assert took < BUSY_MACHINE * 3
            until_running(harness, *tasks)
            told = {row["noticed_by"] for row in harness.query("select noticed_by from {schema}.recoveries")}
            assert told == {way}


def test_all_processes_of_a_tree_die_with_its_supervisor(
    harness: WorkerHarness, new_tree: NewTree
) -> None:  # E5
    with new_tree() as victim, new_tree() as other:
        until(lambda: len(supervisors(harness)) == 2 and other.workers(), what="both are there")
        task = harness.send_with("nap", {"seconds": 100}, policy=AGAIN)
        process_task = harness.send("process_pid")
        until(lambda: state(harness, process_task) == "COMPLETED", what="a task process exists")
        until_running(harness, task)
        family = [*victim.family()[1:]]
        os.kill(victim.pid, signal.SIGKILL)
        assert (
            until(lambda: not any(_lives(one) for one in family), what="no process left") < BUSY_MACHINE * 2
        )
        until(lambda: is_running(harness, task), what="its task runs")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_tasks_of_a_killed_tree_are_settled_by_age_within_four_seconds(
    harness: WorkerHarness, new_tree: NewTree
) -> None:  # E1, E2, E3
    with new_tree("--slow-processes", recovery=BY_AGE) as victim:
        failing = harness.send("nap", seconds=100)
        again = harness.send_with("nap", {"seconds": 100}, policy=AGAIN)
        until_running(harness, failing, again)
        claimed = harness.send("process_pid")
        until(
            lambda: state(harness, claimed) == "CLAIMED", what="claimed for a process that is not ready yet"
        )
        with new_tree(recovery=BY_AGE) as other:
            until(lambda: other.pid in supervisors(harness) and other.workers(), what="the other is there")
            victim.kill()
            took = until(lambda: state(harness, failing) == "FAILED", what="settled")
            print(f"settled {took:.3f} s after the kill")
            assert took < BUSY_MACHINE * 4
            until(lambda: state(harness, claimed) == "COMPLETED", what="run elsewhere")
            until(lambda: harness.task(again)["attempt"] == 2, what="run again elsewhere")
            row = harness.task(claimed)
            assert (row["retry_count"], row["loss_count"], row["attempt"]) == (0, 0, 1)
            assert harness.task(again)["loss_count"] == 1


def test_a_killed_worker_process_is_noticed_by_age_under_its_live_supervisor(
    harness: WorkerHarness, new_tree: NewTree
) -> None:
    with new_tree(recovery=BY_AGE) as running_tree:
        task = harness.send_with("nap", {"seconds": 100}, policy=AGAIN)
        until_running(harness, task)
        os.kill(pid_of(harness, task), signal.SIGKILL)
        until(lambda: harness.task(task)["attempt"] == 2, what="run again")
        assert harness.task(task)["loss_count"] == 1
        assert harness.attempts(task)[0]["error"]["data"]["noticed_by"] == "age"
        assert running_tree.process.poll() is None


@pytest.mark.long
def test_a_frozen_tree_that_thaws_writes_nothing_and_continues_under_a_new_id(
    harness: WorkerHarness, new_tree: NewTree
) -> None:  # E6
    with new_tree(recovery=BY_AGE) as victim:
        task = harness.send_with("nap", {"seconds": 5}, policy=AGAIN)
        until_running(harness, task)
        victim.signal_all(signal.SIGSTOP)
        with new_tree(recovery=BY_AGE) as other:
            until(lambda: harness.task(task)["attempt"] == 2, what="run elsewhere")
            until(lambda: victim.pid not in _living(harness), what="given up")
            victim.signal_all(signal.SIGCONT)
            until(lambda: victim.pid in _living(harness), what="back under a new id")
            until(lambda: state(harness, task) == "COMPLETED", what="completed elsewhere")
            assert [row["outcome"] for row in harness.attempts(task)] == ["LOST", "COMPLETED"]
            other.kill()
            after = harness.send("double", x=2)
            until(lambda: state(harness, after) == "COMPLETED", what="the thawed tree works")
            assert "declared_dead" in victim.text()


def _living(harness: WorkerHarness) -> set[int]:
    return {
        row["pid"] for row in harness.query("select pid from {schema}.supervisors where ended_at is null")
    }


def test_a_tree_finishes_its_tasks_and_exits_at_sigterm(
    harness: WorkerHarness, new_tree: NewTree
) -> None:  # B12
    with new_tree(processes=2) as running_tree:
        until(lambda: len(harness.query("select from {schema}.workers")) == 2, what="both are registered")
        tasks = [harness.send("nap", seconds=1) for _ in range(4)]
        until_running(harness, *tasks)
        running_tree.process.send_signal(signal.SIGTERM)
        until(lambda: all(row["draining"] for row in supervisors(harness).values()), what="says so")
        assert running_tree.process.wait(60) == 0
        assert {state(harness, task) for task in tasks} == {"COMPLETED"}
        assert {row["ended_how"] for row in supervisors(harness).values()} == {"left"}
        ended = harness.query("select w.ended_how from {schema}.workers w")
        assert [row["ended_how"] for row in ended] == ["left", "left"]


def test_a_task_that_outlasts_the_grace_period_is_released_uncharged(
    harness: WorkerHarness, new_tree: NewTree
) -> None:  # B12
    with new_tree(grace="500ms") as running_tree:
        task = harness.send_with("nap", {"seconds": 60}, policy=AGAIN)
        until_running(harness, task)
        running_tree.process.send_signal(signal.SIGTERM)
        assert running_tree.process.wait(60) == 0
        row = harness.task(task)
        assert (row["state"], row["retry_count"], row["crash_count"], row["loss_count"]) == (
            "PENDING",
            0,
            0,
            0,
        )


def test_a_second_signal_ends_a_tree_at_once(harness: WorkerHarness, new_tree: NewTree) -> None:  # B12
    with new_tree(grace="1m") as running_tree:
        task = harness.send_with("nap", {"seconds": 60}, policy=AGAIN)
        until_running(harness, task)
        running_tree.process.send_signal(signal.SIGTERM)
        until(lambda: "stop_asked times=1" in running_tree.text(), what="heard")
        running_tree.process.send_signal(signal.SIGINT)
        assert running_tree.process.wait(60) == 0
        assert state(harness, task) == "PENDING"


@pytest.mark.parametrize("signals", long_except([1, 2], 1))
def test_a_silent_worker_process_is_killed_soon_after_the_grace_period(
    signals: int, harness: WorkerHarness, new_tree: NewTree
) -> None:  # J1
    """Kubernetes kills five seconds after the grace period, so the stop policy must have decided before."""
    with new_tree(grace="500ms" if signals == 1 else "1m") as running_tree:
        task = harness.send_with("block_loop", {"seconds": 60}, policy=AGAIN)
        until_running(harness, task)
        began_at = time.monotonic()
        for number in range(1, signals + 1):
            running_tree.process.send_signal(signal.SIGTERM)
            until(lambda number=number: f"stop_asked times={number}" in running_tree.text(), what="heard")  # type: ignore[misc]
        assert running_tree.process.wait(60) == 0
        print(f"{time.monotonic() - began_at:.1f} s")
        assert time.monotonic() - began_at < BUSY_MACHINE * 5
        assert "grace_exceeded" in running_tree.text()
        row = harness.task(task)
        assert (row["state"], row["crash_count"], row["loss_count"]) == ("PENDING", 0, 0)


def test_a_third_signal_kills_a_frozen_worker_process(harness: WorkerHarness, new_tree: NewTree) -> None:
    with new_tree(grace="1m") as running_tree:
        task = harness.send_with("nap", {"seconds": 60}, policy=AGAIN)
        until_running(harness, task)
        os.kill(pid_of(harness, task), signal.SIGSTOP)
        for number in (1, 2, 3):
            running_tree.process.send_signal(signal.SIGTERM)
            until(lambda number=number: f"stop_asked times={number}" in running_tree.text(), what="heard")
        assert running_tree.process.wait(60) == 0
        row = harness.task(task)
        assert (row["state"], row["crash_count"], row["loss_count"]) == ("PENDING", 0, 0)


def test_a_worker_that_refuses_to_start_ends_the_supervisor_with_its_reason(new_tree: NewTree) -> None:
    with new_tree("--refuse") as running_tree:
        assert running_tree.process.wait(60) == 1
        assert "refused: there is no app" in running_tree.text()


def test_workers_that_die_before_they_are_ready_end_the_supervisor(new_tree: NewTree) -> None:
    began = time.monotonic()
    with new_tree("--die") as running_tree:
        assert running_tree.process.wait(60) == 1
        exits, took_s = running_tree.text().count("worker_exited"), time.monotonic() - began
        # Five deaths, or at least two if they take 10 s.
        assert exits == 5 or (exits >= 2 and took_s >= 10.0)
        assert "again and again; the last one: exit code 3" in running_tree.text()


def test_a_signal_during_the_start_ends_the_tree_in_good_order(new_tree: NewTree) -> None:
    with new_tree("--slow") as running_tree:
        until(running_tree.workers, what="a worker imports its app")
        running_tree.process.send_signal(signal.SIGTERM)
        assert running_tree.process.wait(60) == 0


@pytest.mark.long
def test_no_supervisor_is_declared_dead_because_of_an_outage(
    new_server: NewServer, tmp_path: Path
) -> None:  # E7, I13, I14
    server = new_server(settings={"synchronous_commit": "on"})
    target = Target.parse(server.url, schema="everbeat")
    harness = WorkerHarness(target)
    with (
        tree(harness.target, tmp_path / "1.log", recovery=FAST) as one,
        tree(harness.target, tmp_path / "2.log", recovery=FAST) as two,
    ):
        until(lambda: len(_living(harness)) >= 3 and one.workers() and two.workers(), what="both are there")
        tasks = [harness.send("nap", seconds=6) for _ in range(6)]
        until_running(harness, *tasks)
        harness.terminate_sessions()
        # During the tasks, and during the recovery from the loss of all sessions.
        until(
            lambda: all(row["session_held"] for row in supervisors(harness).values()),
            what="the locks are back",
        )
        harness.close()
        server.restart("immediate")
        harness = WorkerHarness(target)
        until(lambda: all(state(harness, task) == "COMPLETED" for task in tasks), what="completed")
        assert harness.query("select * from {schema}.recoveries") == []
        assert {len(harness.attempts(task)) for task in tasks} == {1}
        late = harness.send("double", x=1)
        assert until(lambda: state(harness, late) == "COMPLETED", what="works on") < BUSY_MACHINE * 2
        assert {one.pid, two.pid} <= _living(harness)
    harness.close()


@pytest.mark.long
def test_no_supervisor_is_declared_dead_because_of_a_long_outage(
    new_server: NewServer, tmp_path: Path
) -> None:  # E7, I13, I14
    """Seven thresholds without a database, which no observer must count as silence."""
    server = new_server(settings={"synchronous_commit": "on"})
    target = Target.parse(server.url, schema="everbeat")
    harness = WorkerHarness(target)
    with (
        tree(target, tmp_path / "1.log", recovery=FAST) as one,
        tree(target, tmp_path / "2.log", recovery=FAST) as two,
    ):
        until(lambda: len(_living(harness)) >= 3 and one.workers() and two.workers(), what="both are there")
        tasks = [harness.send("nap", seconds=1) for _ in range(6)]
        until_running(harness, *tasks)
        harness.close()
        server.stop("immediate")
        time.sleep(15)  # the outage
        server.restart("fast")
        harness = WorkerHarness(target)
        until(lambda: all(state(harness, task) == "COMPLETED" for task in tasks), what="completed")
        late = harness.send("double", x=1)
        assert until(lambda: state(harness, late) == "COMPLETED", what="works on") < BUSY_MACHINE * 2
        time.sleep(5)  # two thresholds in which a wrong judgement would happen
        assert harness.query("select * from {schema}.recoveries") == []
        assert {one.pid, two.pid} <= _living(harness)
    harness.close()


@pytest.mark.parametrize("hang_timeout_ms", [2_000])
def test_a_worker_that_stopped_reporting_is_named_and_killed(
    hang_timeout_ms: int, harness: WorkerHarness, new_tree: NewTree
) -> None:  # E16
    with new_tree(recovery={"hang_timeout_ms": hang_timeout_ms}) as running_tree:
        task = harness.send("block_loop", seconds=30)
        until_running(harness, task)
        until(lambda: state(harness, task) == "FAILED", what="recovered")
        assert "worker_hangs" in running_tree.text()
        assert "in block_loop" in running_tree.text(), "its stack is in the log"
