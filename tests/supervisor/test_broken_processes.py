"""Test live but useless worker processes: they hang or cannot reach the database, so the supervisor ends them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.store import workers
from tests.supervisor.supervising import FAST, tree, until
from tests.worker.harness import WorkerHarness

BUSY_MACHINE = 3
AGAIN = StoredPolicy(on_crash="retry").to_json()
SILENT = StoredPolicy(stall_timeout_ms=2_000).to_json()
BEHIND_A_BLOCKED_LOOP = 2.0 + 1.0
"""The stall_timeout and one check interval, in seconds."""


@pytest.fixture
def log(harness: WorkerHarness, tmp_path: Path) -> Path:
    # The row of the harness itself would count as one more dead worker.
    harness.run(workers.end_supervisor(harness.supervisor_id, how="left"))
    return tmp_path / "tree.log"


@pytest.mark.long
def test_a_hanging_worker_is_named_with_its_task_and_killed(harness: WorkerHarness, log: Path) -> None:  # E16
    with tree(harness.target, log, recovery={"hang_timeout_ms": 2_000}) as running_tree:
        innocent = harness.send_with("nap", {"seconds": 100}, policy=AGAIN)
        until(lambda: harness.task(innocent)["state"] == "RUNNING", what="a neighbour runs")
        (victim,) = running_tree.workers()
        guilty = harness.send("block_loop", seconds=60)
        until(lambda: harness.task(guilty)["state"] == "FAILED", what="recovered")
        until(lambda: harness.task(innocent)["attempt"] == 2, what="the neighbour runs again")
        assert victim not in running_tree.workers()
    (told,) = [line for line in log.read_text().splitlines() if "worker_hangs" in line]
    assert f"pid={victim}" in told
    assert f"block_loop {guilty}" in told
    assert f"nap {innocent}" in told
    assert "in block_loop" in log.read_text(), "its stack is in the log"
    causes = {row["cause"] for row in harness.query("select cause from {schema}.recoveries")}
    assert len(causes) == 1
    assert re.fullmatch(r"its loop stood still for \d+\.\d s, killed by its supervisor", causes.pop())


@pytest.mark.long
def test_a_hanging_worker_is_not_killed_by_default(harness: WorkerHarness, log: Path) -> None:  # E16
    with tree(harness.target, log, recovery=FAST) as running_tree:
        task = harness.send("block_loop", seconds=8)
        until(lambda: harness.task(task)["state"] == "COMPLETED", what="it ends by itself")
        assert len(running_tree.workers()) == 1
    assert "worker_hangs" not in log.read_text()
    assert harness.query("select * from {schema}.recoveries") == []


@pytest.mark.long
def test_the_supervisor_recovers_code_that_blocks_its_event_loop_past_the_stall_timeout(
    harness: WorkerHarness, log: Path
) -> None:  # G2
    with tree(harness.target, log, recovery=FAST) as running_tree:
        warm = harness.send("double", x=1)
        until(lambda: harness.task(warm)["state"] == "COMPLETED", what="the worker works")
        (pid,) = running_tree.workers()
        task = harness.send_with("block_loop", {"seconds": 12}, policy=SILENT)
        until(lambda: harness.task(task)["state"] == "FAILED", what="recovered")
        row = harness.task(task)
        took = (row["failed_at"] - row["started_at"]).total_seconds()
        print(f"stall_timeout of 2 s on a blocked loop: settled after {took:.2f} s")
        assert 2.0 <= took < BEHIND_A_BLOCKED_LOOP * BUSY_MACHINE
        assert row["error"]["code"] == "TASK_STALLED"
        after = harness.send("double", x=2)
        until(lambda: harness.task(after)["state"] == "COMPLETED", what="the loop turns again")
        assert running_tree.workers() == [pid], "the worker must not be killed for it"
    assert [each["outcome"] for each in harness.attempts(task)] == ["FAILED"]
    assert harness.task(task) == row, "the late result changes nothing"
    assert [each["noticed_by"] for each in harness.query("select noticed_by from {schema}.recoveries")] == [
        "progress"
    ]


def test_a_worker_process_that_cannot_reach_the_database_is_replaced(
    harness: WorkerHarness, log: Path
) -> None:
    with tree(harness.target, log, recovery=FAST) as running_tree:
        task = harness.send_with("break_the_process", {}, policy=AGAIN)
        until(lambda: harness.task(task)["state"] == "RUNNING", what="it runs")
        (victim,) = running_tree.workers()
        until(lambda: harness.query("select from {schema}.recoveries"), what="recovered")
        (recovery,) = harness.query("select * from {schema}.recoveries")
        assert (recovery["noticed_by"], recovery["pid"]) == ("child_exit", victim)
        assert re.fullmatch(
            r"it reached no database for \d+\.\d s to settle what it had finished, while others did,"
            r" killed by its supervisor",
            recovery["cause"],
        )
        harness.cancel(task)  # it would break every process in turn
        after = harness.send("double", x=2)
        until(lambda: harness.task(after)["state"] == "COMPLETED", what="a fresh process works")
    assert f"worker_cut_off worker_id={recovery['worker_id']} pid={victim}" in log.read_text()


def test_a_locked_row_does_not_end_a_worker_process(harness: WorkerHarness, log: Path) -> None:
    with tree(harness.target, log, recovery=FAST) as running_tree:
        task = harness.send("nap", seconds=2)
        until(lambda: harness.task(task)["state"] == "RUNNING", what="it runs")
        before = running_tree.workers()
        with harness.holding(f"select from {{schema}}.tasks where id = '{task}' for update"):
            outlasts_s = 2 + 3 * FAST["running_stale_threshold_ms"] / 1_000
            other = harness.send("nap", seconds=outlasts_s)
            until(lambda: _has_run(harness, other, outlasts_s), what="three thresholds have passed")
            assert harness.task(task)["state"] == "RUNNING"
        until(lambda: harness.task(task)["state"] == "COMPLETED", what="settled after all")
        assert running_tree.workers() == before
    assert harness.query("select * from {schema}.recoveries") == []


def _has_run(harness: WorkerHarness, task: object, seconds: float) -> bool:
    (row,) = harness.query(
        "select now() - started_at > make_interval(secs => %s) as over from {schema}.tasks where id = %s",
        seconds,
        task,
    )
    return bool(row["over"])
