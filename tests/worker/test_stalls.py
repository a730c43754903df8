"""Test code that reports no progress: it is stopped as its mode allows, recovered by its policy, and refused later."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.worker.progress import TaskStalled
from tests.variants import long_except
from tests.worker.harness import Running, WorkerHarness
from tests.worker.proxy import Proxy
from tests.worker.sample_tasks import gate

SLACK = 3.0


def policy(**more: Any) -> bytes | None:
    return StoredPolicy(stall_timeout_ms=1_000, **more).to_json()


async def until_stalled(running: Running, times: int = 1) -> list[TaskStalled]:
    await running.until(lambda: len(running.of(TaskStalled)) >= times)
    return running.of(TaskStalled)


async def test_a_silent_coroutine_is_cancelled_and_recovered(harness: WorkerHarness) -> None:  # G1, G2
    async with harness.worker() as running:
        task_id = harness.send_with("fall_silent", {"word": "page 5"}, policy=policy())
        (told,) = await until_stalled(running)
        await running.until(lambda: harness.task(task_id)["state"] == "FAILED")
        assert (told.task_id, told.name, told.attempt) == (task_id, "fall_silent", 1)
        assert "_wait_for_gate" in told.stack, "the stack must include what the code awaits"
        gate.opened.set()
        row = harness.task(task_id)
        took = (row["failed_at"] - row["progress_at"]).total_seconds()
        print(f"stall_timeout of 1 s settled after {took:.3f} s")
        assert 1.0 <= took < 1.0 + 1.0 * SLACK
    error = row["error"]
    assert error["code"] == "TASK_STALLED"
    data = error["data"]
    assert (data["stage"], data["fraction"], data["message"]) == ("upload", 0.5, "page 5")
    assert datetime.fromisoformat(data["last_progress_at"]) == row["progress_at"]
    assert (data["worker_id"], data["pid"], data["stall_timeout_s"]) == (running.id, 2, 1.0)
    assert data["silent_for_s"] >= 1.0
    (attempt,) = harness.attempts(task_id)
    assert (attempt["outcome"], attempt["will_retry"]) == ("FAILED", False)
    (recovery,) = harness.query("select * from {schema}.recoveries")
    assert (recovery["noticed_by"], recovery["was"], recovery["action"]) == ("progress", "RUNNING", "fail")
    assert recovery["cause"] == "no progress for 1s"
    assert (row["crash_count"], row["loss_count"], row["retry_count"]) == (0, 0, 0)


async def test_a_silent_thread_is_asked_to_stop_keeps_its_slot_and_cannot_settle(
    harness: WorkerHarness,
) -> None:  # G2
    async with harness.worker(thread_concurrency=1, prefetch=0) as running:
        task_id = harness.send_with("wait_for_gate", {"word": "x"}, policy=policy())
        (told,) = await until_stalled(running)
        assert "in wait_for_gate" in told.stack
        await running.until(lambda: harness.task(task_id)["state"] == "FAILED")
        await running.until(lambda: ("told", "x", "stalled") in gate.journal)
        after = harness.send("thread_nap", seconds=0)
        assert harness.task(after)["state"] == "PENDING"
        gate.opened.set()
        await running.finished(after)
        assert ("ended", "x") in gate.journal
    row = harness.task(task_id)
    assert (row["state"], row["result"], row["error"]["code"]) == ("FAILED", None, "TASK_STALLED")
    assert len(harness.attempts(task_id)) == 1


@pytest.mark.parametrize(
    "name", long_except(["process_linger", "process_linger_async", "process_deaf"], "process_deaf")
)
async def test_a_silent_process_writes_its_stacks_and_is_killed(
    harness: WorkerHarness, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:  # G2
    async with harness.worker() as running:
        harness.send("process_pid")  # starts a process, so that its start does not use up the limit
        task_id = harness.send_with(name, {"folder": str(tmp_path)}, policy=policy())
        (told,) = await until_stalled(running)
        pid = int((tmp_path / "pid").read_text())
        assert told.stack.endswith(f"process {pid}")
        await running.until(lambda: not psutil.pid_exists(pid))
        await running.until(lambda: harness.task(task_id)["state"] == "FAILED")
        assert not (tmp_path / "interrupted").exists(), "the process must be killed without an interrupt"
        after = await running.finished(harness.send("process_pid"))
        assert after["result"][0] != pid
        assert running.crashes == [], "one recovery, not two"
    assert f"in {name}" in capfd.readouterr().err
    assert [row["noticed_by"] for row in harness.query("select noticed_by from {schema}.recoveries")] == [
        "progress"
    ]


@pytest.mark.parametrize(
    "name", long_except(["chatter", "chatter_in_thread", "chatter_in_process"], "chatter_in_process")
)
async def test_code_that_reports_progress_is_not_stalled(harness: WorkerHarness, name: str) -> None:  # G2
    async with harness.worker() as running:
        task_id = harness.send_with(name, {"seconds": 2.5}, policy=policy())
        assert (await running.finished(task_id))["state"] == "COMPLETED"
        assert running.of(TaskStalled) == []


@pytest.mark.parametrize("name", long_except(["nap", "thread_nap"], "nap"))
async def test_silent_code_without_a_stall_timeout_is_not_stalled(
    harness: WorkerHarness, name: str
) -> None:  # G2
    async with harness.worker() as running:
        task_id = harness.send(name, seconds=2.5)
        assert (await running.finished(task_id))["state"] == "COMPLETED"
        assert running.of(TaskStalled) == []


async def test_a_stall_listed_in_the_policy_counts_as_a_retry_and_not_as_a_crash(
    harness: WorkerHarness,
) -> None:
    async with harness.worker() as running:
        listed = policy(max_retries=1, intervals=(0.1,), retry_for=("TASK_STALLED",))
        task_id = harness.send_with("fall_silent", {"word": "x"}, policy=listed)
        await until_stalled(running, 2)
        await running.until(lambda: harness.task(task_id)["state"] == "FAILED")
    row = harness.task(task_id)
    assert (row["retry_count"], row["crash_count"], row["error"]["code"]) == (1, 0, "TASK_STALLED")
    assert [a["will_retry"] for a in harness.attempts(task_id)] == [True, False]
    assert len(harness.query("select from {schema}.recoveries")) == 2


async def test_a_stall_under_on_crash_retry_counts_towards_max_crashes(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        again = policy(on_crash="retry", max_crashes=2)
        task_id = harness.send_with("fall_silent", {"word": "x"}, policy=again)
        await until_stalled(running, 2)
        await running.until(lambda: harness.task(task_id)["state"] == "FAILED")
    row = harness.task(task_id)
    assert (row["crash_count"], row["error"]["code"], row["error"]["data"]["poison"]) == (
        2,
        "TASK_STALLED",
        True,
    )
    assert [a["outcome"] for a in harness.attempts(task_id)] == ["CRASHED", "CRASHED"]


async def test_a_task_that_stalls_after_a_cancel_ends_cancelled(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        again = policy(on_crash="retry")
        task_id = harness.send_with("wait_for_gate", {"word": "x"}, policy=again)
        await running.until(lambda: ("begun", "x") in gate.journal)
        harness.cancel(task_id)
        await running.until(lambda: ("told", "x", "cancelled") in gate.journal)
        await until_stalled(running)
        await running.until(lambda: harness.task(task_id)["state"] == "CANCELLED")
    assert len(harness.attempts(task_id)) == 1


@pytest.mark.usefixtures("a_minute_ahead")
async def test_the_stall_timeout_does_not_run_while_a_task_is_claimed(harness: WorkerHarness) -> None:
    async with harness.worker(async_concurrency=1, prefetch=1) as running:
        running.measured("nap")
        harness.send("nap", seconds=2.0)
        task_id = harness.send_with("nap", {"seconds": 0.0}, policy=policy())
        await running.until(lambda: harness.task(task_id)["state"] == "CLAIMED")
        assert (await running.finished(task_id))["state"] == "COMPLETED"
        assert running.of(TaskStalled) == []


async def test_the_stall_timeout_works_during_an_outage(
    harness: WorkerHarness,
) -> None:
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                talking = harness.send_with("chatter", {"seconds": 3.0}, policy=policy())
                silent = harness.send_with("fall_silent", {"word": "x"}, policy=policy())
                await running.until(lambda: running.have_begun(talking, silent))
                proxy.cut()
                (told,) = await until_stalled(running)
                assert told.task_id == silent
                proxy.mend()
                await running.finished(talking)
                await running.until(lambda: harness.task(silent)["state"] == "FAILED")
        finally:
            harness.target = direct
    assert harness.task(talking)["state"] == "COMPLETED"


async def test_code_that_waits_for_a_checkpoint_is_not_stalled(harness: WorkerHarness) -> None:
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                task_id = harness.send_with("keep_a_checkpoint", {}, policy=policy())
                await running.until(lambda: running.have_begun(task_id))
                proxy.cut()
                gate.opened.set()
                await running.until(lambda: running.attempt(task_id).unanswered == 1)
                with pytest.raises(TimeoutError):  # two stall_timeouts
                    await running.until(lambda: bool(running.of(TaskStalled)), timeout_s=2.5)
                proxy.mend()
                assert (await running.finished(task_id))["state"] == "COMPLETED"
        finally:
            harness.target = direct


async def test_code_that_blocks_the_event_loop_does_not_stall_other_tasks(harness: WorkerHarness) -> None:
    """On a blocked loop no task can report progress, and the worker cannot read reports of threads and processes."""
    async with harness.worker() as running:
        await running.finished(harness.send("process_pid"))
        innocent = [
            harness.send_with(name, {"seconds": 4.0}, policy=policy())
            for name in ("chatter", "chatter_in_thread", "chatter_in_process")
        ]
        await running.until(lambda: {harness.task(one)["state"] for one in innocent} == {"RUNNING"})
        began = time.monotonic()
        await running.finished(harness.send_with("block_loop", {"seconds": 2.0}, policy=policy()))
        assert time.monotonic() - began >= 2.0
        await running.finished(*innocent)
        assert running.of(TaskStalled) == []
    assert {harness.task(one)["state"] for one in innocent} == {"COMPLETED"}
