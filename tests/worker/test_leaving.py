"""Test draining and stopping: the worker claims no more, loses no task, charges no attempt and ends in time."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from everbeat.domain.task.policy import OnCrash, StoredPolicy
from everbeat.protocol import Drain, Leaving
from everbeat.store import expiry
from tests.worker.harness import WorkerHarness
from tests.worker.proxy import Proxy
from tests.worker.sample_tasks import gate
from tests.worker.test_stopping import until_pid


@pytest.mark.usefixtures("a_minute_ahead")
async def test_a_draining_worker_finishes_running_tasks_and_releases_waiting_ones(
    harness: WorkerHarness,
) -> None:  # B12
    async with harness.worker(thread_concurrency=2, prefetch=3) as running:
        running.measured("wait_for_gate")
        harness.send_many("wait_for_gate", [{"word": str(n)} for n in range(6)])
        await running.until(lambda: harness.states() == {"RUNNING": 2, "CLAIMED": 3, "PENDING": 1})
        await running.until(lambda: len(gate.journal) == 2)
        running.worker.obey(Drain(20_000))
        await running.until(lambda: harness.states() == {"RUNNING": 2, "PENDING": 4})
        later = harness.send("double", x=1)
        gate.opened.set()
        assert await running.left() == 0
    assert harness.states() == {"COMPLETED": 2, "PENDING": 5}
    assert harness.task(later)["fence"] == 0
    assert isinstance(running.told[-1], Leaving)
    assert not running.held


@pytest.mark.parametrize("on_crash", ["retry", "fail"])
async def test_a_task_that_outlasts_the_grace_period_follows_its_policy_uncharged(
    harness: WorkerHarness, tmp_path: Path, on_crash: OnCrash
) -> None:  # B12 J1
    policy = StoredPolicy(on_crash=on_crash).to_json()
    async with harness.worker() as running:
        sent = [
            harness.send_with("linger", {"word": "x"}, policy=policy),
            harness.send_with("check_often", {}, policy=policy),
            harness.send_with("process_linger", {"folder": str(tmp_path)}, policy=policy),
        ]
        pid = await until_pid(running, tmp_path)
        await running.until(lambda: running.have_begun(*sent))
        running.worker.obey(Drain(300))
        began = time.monotonic()
        assert await running.left() == 0
        took = time.monotonic() - began
        print(f"left {took:.2f} s after the order, 0.3 s grace")
        assert took < 15
    assert not psutil.pid_exists(pid)
    for task_id in sent:
        row = harness.task(task_id)
        assert (row["state"], row["retry_count"], row["crash_count"], row["loss_count"]) == (
            "PENDING" if on_crash == "retry" else "FAILED",
            0,
            0,
            0,
        )
        outcome = "RELEASED" if on_crash == "retry" else "FAILED"
        assert [a["outcome"] for a in harness.attempts(task_id)] == [outcome]


async def test_a_task_released_at_shutdown_runs_again_after_its_good_until(
    harness: WorkerHarness,
) -> None:  # J1
    policy, soon = StoredPolicy(on_crash="retry").to_json(), datetime.now(UTC) + timedelta(seconds=2)
    async with harness.worker() as running:
        task_id = harness.send_with("linger", {"word": "w"}, policy=policy, good_until=soon)
        await running.until(lambda: ("begun", "w") in gate.journal)
        running.worker.obey(Drain(0))
        await running.left()
    assert harness.task(task_id)["state"] == "PENDING"
    late = "select statement_timestamp() > %s as late"
    async with harness.worker(queues=["other"]) as idle:
        await idle.until(lambda: harness.query(late, soon)[0]["late"])
    assert harness.run(expiry.expire(channel=harness.target.channel)) == []
    async with harness.worker() as running:
        await running.until(lambda: gate.journal.count(("begun", "w")) == 2)
        assert harness.task(task_id)["attempt"] == 2
        harness.cancel(task_id)


async def test_a_worker_does_not_settle_code_that_does_not_end_before_its_process_ends(
    harness: WorkerHarness,
) -> None:  # J1
    async with harness.worker() as running:
        task_id = harness.send("stubborn", seconds=7)
        await running.until(lambda: running.have_begun(task_id))
        running.worker.obey(Drain(300))
        assert await running.left() == 76
    assert Leaving(code_runs=True) in running.told
    assert harness.task(task_id)["state"] == "RUNNING"


async def test_a_second_stop_request_ends_the_grace_period_at_once(harness: WorkerHarness) -> None:  # B12
    async with harness.worker() as running:
        task_id = harness.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        running.worker.obey(Drain(60_000))
        began = time.monotonic()
        running.stop()
        assert await running.left() == 0
        assert time.monotonic() - began < 5
    assert harness.task(task_id)["error"]["code"] == "WORKER_STOPPED"


async def test_a_task_that_finishes_within_the_grace_period_is_completed(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("wait_for_gate", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        running.worker.obey(Drain(20_000))
        gate.opened.set()
        assert await running.left() == 0
    assert harness.task(task_id)["state"] == "COMPLETED"


async def test_a_worker_stopped_without_a_database_exits_with_unsettled_tasks(harness: WorkerHarness) -> None:
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                task_id = harness.send("linger", word="x")
                await running.until(lambda: ("begun", "x") in gate.journal)
                proxy.cut()
                running.stop()
                assert await running.left() == 75
        finally:
            harness.target = direct
    assert not isinstance(running.told[-1], Leaving)
    # The dead worker still holds the task: its supervisor recovers it because of the exit code.
    assert harness.task(task_id)["state"] == "RUNNING"
