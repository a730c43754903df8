"""Code that lives and says nothing: stopped by the means of its mode, recovered by its policy, refused afterwards."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.worker.stall_watch import TaskStalled
from tests.worker.deeds import gate
from tests.worker.proxy import Proxy
from tests.worker.stand import Running, Stand

SLACK = 3.0


def policy(**more: Any) -> bytes | None:
    return StoredPolicy(stall_timeout_ms=1_000, **more).to_json()


async def until_stalled(running: Running, times: int = 1) -> list[TaskStalled]:
    await running.until(lambda: len(running.of(TaskStalled)) >= times)
    return running.of(TaskStalled)


async def test_a_silent_coroutine_is_cancelled_and_recovered(stand: Stand) -> None:  # G1, G2
    async with stand.worker() as running:
        task_id = stand.send_with("fall_silent", {"word": "page 5"}, policy=policy())
        (told,) = await until_stalled(running)
        await running.until(lambda: stand.task(task_id)["state"] == "FAILED")
        assert (told.task_id, told.name, told.attempt) == (task_id, "fall_silent", 1)
        assert "_wait_for_gate" in told.stack, "down to what it awaits"
        gate.opened.set()
        row = stand.task(task_id)
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
    (attempt,) = stand.attempts(task_id)
    assert (attempt["outcome"], attempt["will_retry"]) == ("FAILED", False)
    (recovery,) = stand.query("select * from {schema}.recoveries")
    assert (recovery["noticed_by"], recovery["was"], recovery["action"]) == ("progress", "RUNNING", "fail")
    assert recovery["cause"] == "no progress for 1s"
    assert (row["crash_count"], row["loss_count"], row["retry_count"]) == (0, 0, 0)


async def test_a_silent_thread_is_told_keeps_its_slot_and_changes_nothing_any_more(
    stand: Stand,
) -> None:  # G2
    async with stand.worker(thread_concurrency=1, prefetch=0) as running:
        task_id = stand.send_with("wait_for_gate", {"word": "x"}, policy=policy())
        (told,) = await until_stalled(running)
        assert "in wait_for_gate" in told.stack
        await running.until(lambda: stand.task(task_id)["state"] == "FAILED")
        await running.until(lambda: ("told", "x", "stalled") in gate.journal)
        after = stand.send("thread_nap", seconds=0)
        assert stand.task(after)["state"] == "PENDING"
        gate.opened.set()
        await running.finished(after)
        assert ("ended", "x") in gate.journal
    row = stand.task(task_id)
    assert (row["state"], row["result"], row["error"]["code"]) == ("FAILED", None, "TASK_STALLED")
    assert len(stand.attempts(task_id)) == 1


@pytest.mark.parametrize("name", ["process_linger", "process_linger_async", "process_deaf"])
async def test_a_silent_process_writes_its_stacks_and_is_killed(
    stand: Stand, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:  # G2
    async with stand.worker() as running:
        stand.send("process_pid")  # starts a process, so that the limit is not spent on its start
        task_id = stand.send_with(name, {"folder": str(tmp_path)}, policy=policy())
        (told,) = await until_stalled(running)
        pid = int((tmp_path / "pid").read_text())
        assert told.stack.endswith(f"process {pid}")
        await running.until(lambda: not psutil.pid_exists(pid))
        await running.until(lambda: stand.task(task_id)["state"] == "FAILED")
        assert not (tmp_path / "interrupted").exists(), "it was not asked"
        after = await running.finished(stand.send("process_pid"))
        assert after["result"][0] != pid
        assert running.crashes == [], "one recovery, not two"
    assert f"in {name}" in capfd.readouterr().err
    assert [row["noticed_by"] for row in stand.query("select noticed_by from {schema}.recoveries")] == [
        "progress"
    ]


@pytest.mark.parametrize("name", ["chatter", "chatter_in_thread", "chatter_in_process"])
async def test_code_that_reports_is_left_alone(stand: Stand, name: str) -> None:  # G2
    async with stand.worker() as running:
        task_id = stand.send_with(name, {"seconds": 2.5}, policy=policy())
        assert (await running.finished(task_id))["state"] == "COMPLETED"
        assert running.of(TaskStalled) == []


@pytest.mark.parametrize("name", ["nap", "thread_nap"])
async def test_without_a_stall_timeout_silence_is_nobodys_business(stand: Stand, name: str) -> None:  # G2
    async with stand.worker() as running:
        task_id = stand.send(name, seconds=2.5)
        assert (await running.finished(task_id))["state"] == "COMPLETED"
        assert running.of(TaskStalled) == []


async def test_a_stall_that_the_policy_lists_is_a_retry_and_no_crash(stand: Stand) -> None:
    async with stand.worker() as running:
        listed = policy(max_retries=1, intervals=(0.1,), retry_for=("TASK_STALLED",))
        task_id = stand.send_with("fall_silent", {"word": "x"}, policy=listed)
        await until_stalled(running, 2)
        await running.until(lambda: stand.task(task_id)["state"] == "FAILED")
    row = stand.task(task_id)
    assert (row["retry_count"], row["crash_count"], row["error"]["code"]) == (1, 0, "TASK_STALLED")
    assert [a["will_retry"] for a in stand.attempts(task_id)] == [True, False]
    assert len(stand.query("select from {schema}.recoveries")) == 2


async def test_a_stall_under_on_crash_retry_is_a_crash_and_has_its_cap(stand: Stand) -> None:
    async with stand.worker() as running:
        again = policy(on_crash="retry", max_crashes=2)
        task_id = stand.send_with("fall_silent", {"word": "x"}, policy=again)
        await until_stalled(running, 2)
        await running.until(lambda: stand.task(task_id)["state"] == "FAILED")
    row = stand.task(task_id)
    assert (row["crash_count"], row["error"]["code"], row["error"]["data"]["poison"]) == (
        2,
        "TASK_STALLED",
        True,
    )
    assert [a["outcome"] for a in stand.attempts(task_id)] == ["CRASHED", "CRASHED"]


async def test_a_stall_after_a_cancel_is_a_cancel(stand: Stand) -> None:
    async with stand.worker() as running:
        again = policy(on_crash="retry")
        task_id = stand.send_with("wait_for_gate", {"word": "x"}, policy=again)
        await running.until(lambda: ("begun", "x") in gate.journal)
        stand.cancel(task_id)
        await running.until(lambda: ("told", "x", "cancelled") in gate.journal)
        await until_stalled(running)
        await running.until(lambda: stand.task(task_id)["state"] == "CANCELLED")
    assert len(stand.attempts(task_id)) == 1


async def test_waiting_claimed_is_no_silence(stand: Stand) -> None:
    async with stand.worker(async_concurrency=1, prefetch=1) as running:
        stand.send("nap", seconds=2.0)
        task_id = stand.send_with("double", {"x": 1}, policy=policy())
        await running.until(lambda: stand.task(task_id)["state"] == "CLAIMED")
        assert (await running.finished(task_id))["state"] == "COMPLETED"
        assert running.of(TaskStalled) == []


async def test_while_the_database_is_away_reports_still_count_and_silence_does_too(stand: Stand) -> None:
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker() as running:
                talking = stand.send_with("chatter", {"seconds": 3.0}, policy=policy())
                silent = stand.send_with("fall_silent", {"word": "x"}, policy=policy())
                await running.until(lambda: running.have_begun(talking, silent))
                proxy.cut()
                (told,) = await until_stalled(running)
                assert told.task_id == silent
                proxy.mend()
                await running.finished(talking)
                await running.until(lambda: stand.task(silent)["state"] == "FAILED")
        finally:
            stand.target = direct
    assert stand.task(talking)["state"] == "COMPLETED"


async def test_whoever_waits_for_the_worker_is_not_silent(stand: Stand) -> None:
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker() as running:
                task_id = stand.send_with("keep_a_checkpoint", {}, policy=policy())
                await running.until(lambda: running.have_begun(task_id))
                proxy.cut()
                gate.opened.set()
                await running.until(lambda: running.attempt(task_id).unanswered == 1)
                with pytest.raises(TimeoutError):  # two stall_timeouts
                    await running.until(lambda: bool(running.of(TaskStalled)), timeout_s=2.5)
                proxy.mend()
                assert (await running.finished(task_id))["state"] == "COMPLETED"
        finally:
            stand.target = direct


async def test_a_neighbour_that_blocked_the_loop_stalls_nobody_else(stand: Stand) -> None:
    """Nobody on a blocked loop can say anything, and nobody can hear what threads and processes say."""
    async with stand.worker() as running:
        await running.finished(stand.send("process_pid"))
        innocent = [
            stand.send_with(name, {"seconds": 4.0}, policy=policy())
            for name in ("chatter", "chatter_in_thread", "chatter_in_process")
        ]
        await running.until(lambda: {stand.task(one)["state"] for one in innocent} == {"RUNNING"})
        began = time.monotonic()
        await running.finished(stand.send_with("block_loop", {"seconds": 2.0}, policy=policy()))
        assert time.monotonic() - began >= 2.0
        await running.finished(*innocent)
        assert running.of(TaskStalled) == []
    assert {stand.task(one)["state"] for one in innocent} == {"COMPLETED"}
