"""Draining and stopping: no further claims, nothing lost, nothing charged, and the worker is gone in time."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from everbeat.domain.policy import OnCrash, StoredPolicy
from everbeat.store import tasks
from everbeat.worker.protocol import Drain, Leaving
from tests.worker.deeds import gate
from tests.worker.proxy import Proxy
from tests.worker.stand import Stand
from tests.worker.test_stopping import until_pid


async def test_a_draining_worker_finishes_what_runs_and_gives_back_what_waits(stand: Stand) -> None:  # B12
    stand.send_many("wait_for_gate", [{"word": str(n)} for n in range(6)])
    async with stand.worker(thread_concurrency=2, prefetch=3) as running:
        await running.until(lambda: stand.states() == {"RUNNING": 2, "CLAIMED": 3, "PENDING": 1})
        running.worker.obey(Drain(20_000))
        await running.until(lambda: stand.states() == {"RUNNING": 2, "PENDING": 4})
        later = stand.send("double", x=1)
        gate.opened.set()
        assert await running.left() == 0
    assert stand.states() == {"COMPLETED": 2, "PENDING": 5}
    assert stand.task(later)["fence"] == 0
    assert isinstance(running.told[-1], Leaving)
    assert not running.held


@pytest.mark.parametrize("on_crash", ["retry", "fail"])
async def test_what_outlasts_the_grace_follows_its_policy_at_no_cost(
    stand: Stand, tmp_path: Path, on_crash: OnCrash
) -> None:  # B12 J1
    policy = StoredPolicy(on_crash=on_crash).to_json()
    async with stand.worker() as running:
        sent = [
            stand.send_with("linger", {"word": "x"}, policy=policy),
            stand.send_with("check_often", {}, policy=policy),
            stand.send_with("process_linger", {"folder": str(tmp_path)}, policy=policy),
        ]
        pid = await until_pid(running, tmp_path)
        await running.until(lambda: stand.states() == {"RUNNING": 3})
        running.worker.obey(Drain(300))
        began = time.monotonic()
        assert await running.left() == 0
        took = time.monotonic() - began
        print(f"left {took:.2f} s after the order, 0.3 s grace")
        assert took < 15
    assert not psutil.pid_exists(pid)
    for task_id in sent:
        row = stand.task(task_id)
        assert (row["state"], row["retry_count"], row["crash_count"], row["loss_count"]) == (
            "PENDING" if on_crash == "retry" else "FAILED",
            0,
            0,
            0,
        )
        outcome = "RELEASED" if on_crash == "retry" else "FAILED"
        assert [a["outcome"] for a in stand.attempts(task_id)] == [outcome]


async def test_a_task_that_was_handed_back_runs_again_after_its_deadline(stand: Stand) -> None:  # J1
    policy, soon = StoredPolicy(on_crash="retry").to_json(), datetime.now(UTC) + timedelta(seconds=2)
    async with stand.worker() as running:
        task_id = stand.send_with("linger", {"word": "w"}, policy=policy, good_until=soon)
        await running.until(lambda: ("begun", "w") in gate.journal)
        running.worker.obey(Drain(0))
        await running.left()
    assert stand.task(task_id)["state"] == "PENDING"
    late = "select statement_timestamp() > %s as late"
    async with stand.worker(queues=["other"]) as idle:
        await idle.until(lambda: stand.query(late, soon)[0]["late"])
    assert stand.run(tasks.expire(channel=stand.target.channel)) == []
    async with stand.worker() as running:
        await running.until(lambda: gate.journal.count(("begun", "w")) == 2)
        assert stand.task(task_id)["attempt"] == 2
        stand.cancel(task_id)


async def test_code_that_does_not_end_is_settled_by_nobody_before_its_process_has_ended(
    stand: Stand,
) -> None:  # J1
    async with stand.worker() as running:
        task_id = stand.send("stubborn", seconds=7)
        await running.until(lambda: stand.states() == {"RUNNING": 1})
        running.worker.obey(Drain(300))
        assert await running.left() == 76
    assert Leaving(code_runs=True) in running.told
    assert stand.task(task_id)["state"] == "RUNNING"


async def test_a_second_order_is_at_once(stand: Stand) -> None:  # B12
    async with stand.worker() as running:
        task_id = stand.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        running.worker.obey(Drain(60_000))
        began = time.monotonic()
        running.stop()
        assert await running.left() == 0
        assert time.monotonic() - began < 5
    assert stand.task(task_id)["error"]["code"] == "WORKER_STOPPED"


async def test_a_task_that_finishes_when_asked_to_hurry_is_completed(stand: Stand) -> None:
    async with stand.worker() as running:
        task_id = stand.send("wait_for_gate", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        running.worker.obey(Drain(20_000))
        gate.opened.set()
        assert await running.left() == 0
    assert stand.task(task_id)["state"] == "COMPLETED"


async def test_without_a_database_a_stopped_worker_leaves_unsettled(stand: Stand) -> None:
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker() as running:
                task_id = stand.send("linger", word="x")
                await running.until(lambda: ("begun", "x") in gate.journal)
                proxy.cut()
                running.stop()
                assert await running.left() == 75
        finally:
            stand.target = direct
    assert not isinstance(running.told[-1], Leaving)
    # It is still held, in a dead worker's name: its supervisor buries the process by its exit code.
    assert stand.task(task_id)["state"] == "RUNNING"
