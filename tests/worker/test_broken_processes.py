"""Worker processes that live and are of no use: they hang, or reach no database. Named, ended, and their work recovered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.store import workers
from tests.worker.stand import Stand
from tests.worker.supervising import FAST, tree, until

BUSY_MACHINE = 3
AGAIN = StoredPolicy(on_crash="retry").to_json()
SILENT = StoredPolicy(stall_timeout_ms=2_000).to_json()
BEHIND_A_BLOCKED_LOOP = 2.0 + 1.0
"""The stall_timeout and one check interval, in seconds."""


@pytest.fixture
def log(stand: Stand, tmp_path: Path) -> Path:
    # The row of the stand itself would be one more that has died.
    stand.run(workers.end_supervisor(stand.supervisor_id, how="left"))
    return tmp_path / "tree.log"


def test_a_hanging_worker_is_named_with_its_task_and_killed(stand: Stand, log: Path) -> None:  # E16
    with tree(stand.target, log, recovery={"hang_timeout_ms": 2_000}) as party:
        innocent = stand.send_with("nap", {"seconds": 100}, policy=AGAIN)
        until(lambda: stand.task(innocent)["state"] == "RUNNING", what="a neighbour runs")
        (victim,) = party.workers()
        guilty = stand.send("block_loop", seconds=60)
        until(lambda: stand.task(guilty)["state"] == "FAILED", what="recovered")
        until(lambda: stand.task(innocent)["attempt"] == 2, what="the neighbour runs again")
        assert victim not in party.workers()
    (told,) = [line for line in log.read_text().splitlines() if "worker_hangs" in line]
    assert f"pid={victim}" in told
    assert f"block_loop {guilty}" in told
    assert f"nap {innocent}" in told
    assert "in block_loop" in log.read_text(), "its stack is on the log"
    causes = {row["cause"] for row in stand.query("select cause from {schema}.recoveries")}
    assert len(causes) == 1
    assert re.fullmatch(r"its loop stood still for \d+\.\d s, killed by its supervisor", causes.pop())


@pytest.mark.long
def test_by_default_a_hanging_worker_is_let_be(stand: Stand, log: Path) -> None:  # E16
    with tree(stand.target, log, recovery=FAST) as party:
        task = stand.send("block_loop", seconds=8)
        until(lambda: stand.task(task)["state"] == "COMPLETED", what="it ends by itself")
        assert len(party.workers()) == 1
    assert "worker_hangs" not in log.read_text()
    assert stand.query("select * from {schema}.recoveries") == []


def test_code_that_blocks_its_loop_and_says_nothing_is_recovered_by_its_supervisor(
    stand: Stand, log: Path
) -> None:  # G2
    with tree(stand.target, log, recovery=FAST) as party:
        warm = stand.send("double", x=1)
        until(lambda: stand.task(warm)["state"] == "COMPLETED", what="the worker works")
        (pid,) = party.workers()
        task = stand.send_with("block_loop", {"seconds": 12}, policy=SILENT)
        until(lambda: stand.task(task)["state"] == "FAILED", what="recovered")
        row = stand.task(task)
        took = (row["failed_at"] - row["started_at"]).total_seconds()
        print(f"stall_timeout of 2 s on a blocked loop: settled after {took:.2f} s")
        assert 2.0 <= took < BEHIND_A_BLOCKED_LOOP * BUSY_MACHINE
        assert row["error"]["code"] == "TASK_STALLED"
        after = stand.send("double", x=2)
        until(lambda: stand.task(after)["state"] == "COMPLETED", what="the loop turns again")
        assert party.workers() == [pid], "it is not killed for that"
    assert [each["outcome"] for each in stand.attempts(task)] == ["FAILED"]
    assert stand.task(task) == row, "the late result changes nothing"
    assert [each["noticed_by"] for each in stand.query("select noticed_by from {schema}.recoveries")] == [
        "progress"
    ]


def test_a_process_that_reaches_no_database_is_replaced(stand: Stand, log: Path) -> None:
    with tree(stand.target, log, recovery=FAST) as party:
        task = stand.send_with("break_the_process", {}, policy=AGAIN)
        until(lambda: stand.task(task)["state"] == "RUNNING", what="it runs")
        (victim,) = party.workers()
        until(lambda: stand.query("select from {schema}.recoveries"), what="recovered")
        (recovery,) = stand.query("select * from {schema}.recoveries")
        assert (recovery["noticed_by"], recovery["pid"]) == ("child_exit", victim)
        assert re.fullmatch(
            r"it reached no database for \d+\.\d s to settle what it had finished, while others did,"
            r" killed by its supervisor",
            recovery["cause"],
        )
        stand.cancel(task)  # it would break every process
        after = stand.send("double", x=2)
        until(lambda: stand.task(after)["state"] == "COMPLETED", what="a fresh process works")
    assert f"worker_cut_off worker_id={recovery['worker_id']} pid={victim}" in log.read_text()


def test_a_row_that_somebody_keeps_locked_ends_no_process(stand: Stand, log: Path) -> None:
    with tree(stand.target, log, recovery=FAST) as party:
        task = stand.send("nap", seconds=2)
        until(lambda: stand.task(task)["state"] == "RUNNING", what="it runs")
        before = party.workers()
        with stand.holding(f"select from {{schema}}.tasks where id = '{task}' for update"):
            outlasts_s = 2 + 3 * FAST["running_stale_threshold_ms"] / 1_000
            other = stand.send("nap", seconds=outlasts_s)
            until(lambda: _has_run(stand, other, outlasts_s), what="three thresholds have passed")
            assert stand.task(task)["state"] == "RUNNING"
        until(lambda: stand.task(task)["state"] == "COMPLETED", what="settled after all")
        assert party.workers() == before
    assert stand.query("select * from {schema}.recoveries") == []


def _has_run(stand: Stand, task: object, seconds: float) -> bool:
    (row,) = stand.query(
        "select now() - started_at > make_interval(secs => %s) as over from {schema}.tasks where id = %s",
        seconds,
        task,
    )
    return bool(row["over"])
