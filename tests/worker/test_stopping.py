"""Timeouts, cancels and lost leases: code is stopped by the means of its mode, and the row says what became of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.events import LeasesLost, ZombieRefused
from everbeat.worker.async_executor import AsyncExecutor
from everbeat.worker.attempt import Attempt
from everbeat.worker.protocol import Cancel, Lost, Tick
from tests.worker.deeds import gate
from tests.worker.proxy import Proxy
from tests.worker.stand import TASK_PROCESS, Running, Stand

SHORT = StoredPolicy(timeout_ms=300).to_json()
SLACK = 3.0


async def until_pid(running: Running, folder: Path) -> int:
    """Wait for a process task to say who it is."""
    pid = folder / "pid"
    await running.until(lambda: pid.exists() and pid.read_text() != "")
    return int(pid.read_text())


async def test_an_async_task_that_takes_too_long_is_cancelled(stand: Stand) -> None:  # B10
    async with stand.worker() as running:
        sibling = stand.send("nap", seconds=0.8)
        task_id = stand.send_with("linger", {"word": "x"}, policy=SHORT)
        row = await running.finished(task_id)
        took = (row["failed_at"] - row["started_at"]).total_seconds()
        print(f"timeout of 0.3 s settled after {took:.3f} s")
        assert 0.3 <= took < 0.3 + 1.0
        assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")
        assert ("cancelled", "x") in gate.journal
        assert (await running.finished(sibling))["state"] == "COMPLETED"


async def test_code_that_swallows_its_timeout_is_settled_and_keeps_its_slot(stand: Stand) -> None:  # B10
    async with stand.worker(async_concurrency=1, prefetch=0) as running:
        task_id = stand.send_with("stubborn", {"seconds": 2.0}, policy=SHORT)
        after = stand.send("double", x=1)
        row = await running.finished(task_id)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")
        assert "swallowed" in gate.journal
        assert "ended" not in gate.journal
        assert stand.task(after)["state"] == "PENDING"
        await running.finished(after)
        assert "ended" in gate.journal
    assert stand.task(task_id)["state"] == "FAILED"
    assert len(stand.attempts(task_id)) == 1


async def test_a_thread_that_takes_too_long_is_told_and_settled_and_keeps_its_slot(
    stand: Stand,
) -> None:  # B10
    async with stand.worker(thread_concurrency=1, prefetch=0) as running:
        task_id = stand.send_with("wait_for_gate", {"word": "x"}, policy=SHORT)
        after = stand.send("thread_nap", seconds=0)
        row = await running.finished(task_id)
        took = (row["failed_at"] - row["started_at"]).total_seconds()
        assert took < 0.3 + 1.0
        assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")
        await running.until(lambda: ("told", "x", "timed_out") in gate.journal)
        assert stand.task(after)["state"] == "PENDING"
        gate.opened.set()
        await running.finished(after)
    assert stand.task(task_id)["state"] == "FAILED"


@pytest.mark.parametrize("name", ["process_linger", "process_linger_async", "process_deaf"])
async def test_a_process_that_takes_too_long_is_gone(stand: Stand, tmp_path: Path, name: str) -> None:  # B10
    async with stand.worker() as running:
        stand.send("process_pid")  # starts a process, so that the limit is not spent on its start
        task_id = stand.send_with(name, {"folder": str(tmp_path)}, policy=SHORT)
        pid = await until_pid(running, tmp_path)
        row = await running.finished(task_id)
        took = (row["failed_at"] - row["started_at"]).total_seconds()
        print(f"{name}: timeout of 0.3 s settled after {took:.3f} s")
        assert took < 0.3 + 1.0 * SLACK
        assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")
        await running.until(lambda: not psutil.pid_exists(pid))
        assert (tmp_path / "interrupted").exists() == (name != "process_deaf")
        after = await running.finished(stand.send("process_pid"))
        assert after["result"][0] != pid
    assert running.crashes == []


@pytest.mark.parametrize("wake", ["postgres", "silent"])
async def test_cancelled_async_and_process_code_ends_within_2_s(
    stand: Stand, tmp_path: Path, wake: str
) -> None:  # B11
    make = stand.postgres_wake if wake == "postgres" else stand.silent_wake
    async with stand.worker(wake=make) as running:
        on_loop, in_process = (
            stand.send("linger", word="x"),
            stand.send("process_linger", folder=str(tmp_path)),
        )
        pid = await until_pid(running, tmp_path)
        await running.until(lambda: ("begun", "x") in gate.journal)
        asked_at = time.monotonic()
        assert [stand.cancel(each)[0] for each in (on_loop, in_process)] == ["REQUESTED", "REQUESTED"]
        await running.finished(on_loop, in_process)
        took = time.monotonic() - asked_at
        print(f"cancelled after {took:.3f} s ({wake} wake)")
        assert took < 2.0 * SLACK
        await running.until(lambda: not psutil.pid_exists(pid))
    for task_id in (on_loop, in_process):
        row = stand.task(task_id)
        assert (row["state"], row["error"]["code"]) == ("CANCELLED", "TASK_CANCELLED")
        assert [a["outcome"] for a in stand.attempts(task_id)] == ["CANCELLED"]
    assert ("cancelled", "x") in gate.journal
    assert (tmp_path / "interrupted").exists()


async def test_a_claimed_task_is_cancelled_at_once_and_never_runs(stand: Stand) -> None:  # B11
    async with stand.worker(thread_concurrency=1, prefetch=4) as running:
        stand.send("wait_for_gate", word="first")
        await running.until(lambda: ("begun", "first") in gate.journal)
        waiting = stand.send("wait_for_gate", word="second")
        await running.until(lambda: stand.task(waiting)["state"] == "CLAIMED")
        assert stand.cancel(waiting)[0] == "CANCELLED"
        gate.opened.set()
        await running.finished(stand.send("wait_for_gate", word="third"))
    assert stand.task(waiting)["state"] == "CANCELLED"
    assert ("begun", "second") not in gate.journal


async def test_a_thread_that_asks_is_cancelled(stand: Stand) -> None:  # B11
    async with stand.worker() as running:
        task_id = stand.send("check_often")
        await running.until(lambda: "begun" in gate.journal)
        stand.cancel(task_id)
        row = await running.finished(task_id)
    assert row["state"] == "CANCELLED"


async def test_a_thread_that_ignores_its_cancel_ends_with_its_timeout(stand: Stand) -> None:
    async with stand.worker() as running:
        policy = StoredPolicy(timeout_ms=1_500).to_json()
        task_id = stand.send_with("wait_for_gate", {"word": "x"}, policy=policy)
        await running.until(lambda: ("begun", "x") in gate.journal)
        stand.cancel(task_id)
        await running.until(lambda: ("told", "x", "cancelled") in gate.journal)
        row = await running.finished(task_id)
        assert ("ended", "x") not in gate.journal
    # A failure after a cancel was asked is a cancel, never a failure.
    assert row["state"] == "CANCELLED"


async def test_a_success_that_happened_is_not_hidden_by_a_cancel(stand: Stand) -> None:
    async with stand.worker() as running:
        task_id = stand.send("wait_for_gate", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        stand.cancel(task_id)
        await running.until(lambda: ("told", "x", "cancelled") in gate.journal)
        gate.opened.set()
        row = await running.finished(task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", "x")


async def test_a_supervisors_word_cancels_too(stand: Stand) -> None:
    async with stand.worker(wake=stand.silent_wake) as running:
        task_id = stand.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        running.worker.obey(Cancel([(task_id, stand.task(task_id)["claim_id"])]))
        await running.until(lambda: ("cancelled", "x") in gate.journal)
        assert (await running.finished(task_id))["state"] == "CANCELLED"


@pytest.mark.parametrize("told_by", ["hint", "poll", "supervisor"])
async def test_code_whose_lease_was_lost_is_stopped_and_writes_nothing(
    stand: Stand, tmp_path: Path, told_by: str
) -> None:  # D5
    wake = stand.postgres_wake if told_by == "hint" else stand.silent_wake
    async with stand.worker(wake=wake) as running:
        on_loop, in_thread = stand.send("linger", word="x"), stand.send("wait_for_gate", word="y")
        in_process = stand.send("process_linger", folder=str(tmp_path))
        pid = await until_pid(running, tmp_path)
        await running.until(lambda: {("begun", "x"), ("begun", "y")} <= set(gate.journal))
        mine = (on_loop, in_thread, in_process)
        leases = [(each, stand.task(each)["claim_id"]) for each in mine]
        for each in mine:
            stand.recover(each)
        if told_by == "supervisor":
            running.worker.obey(Lost(leases))
        await running.until(lambda: ("cancelled", "x") in gate.journal)
        await running.until(lambda: ("told", "y", "lease_lost") in gate.journal)
        await running.until(lambda: not psutil.pid_exists(pid))
        gate.opened.set()
        await running.until(lambda: ("ended", "y") in gate.journal)
        lost = {task_id for event in running.of(LeasesLost) for task_id in event.task_ids}
        assert lost == set(mine)
        assert running.finishes() == []
    for each in mine:
        row = stand.task(each)
        assert (row["state"], row["result"]) == ("FAILED", None)
        assert [a["outcome"] for a in stand.attempts(each)] == ["LOST"]
    assert running.crashes == []


async def test_a_zombies_late_result_is_refused_and_reported(stand: Stand) -> None:
    async with stand.worker(wake=stand.silent_wake) as running:
        task_id = stand.send("wait_for_gate", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        # The worker has not heard of its loss when the code ends (the poll comes once a second).
        stand.recover(task_id)
        gate.opened.set()
        await running.until(lambda: bool(running.of(ZombieRefused) or running.of(LeasesLost)))
        print([type(event).__name__ for event in running.events])
    row = stand.task(task_id)
    assert (row["state"], row["result"]) == ("FAILED", None)
    assert [a["outcome"] for a in stand.attempts(task_id)] == ["LOST"]


async def test_a_retry_taken_elsewhere_is_not_touched_by_the_old_attempt(stand: Stand) -> None:  # D5
    async with stand.worker(wake=stand.silent_wake) as running:
        task_id = stand.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        first = stand.task(task_id)
        stand.recover(task_id, action="retry")
        await running.until(lambda: gate.journal.count(("begun", "x")) == 2)
        await running.until(lambda: ("cancelled", "x") in gate.journal)
        second = stand.task(task_id)
        assert second["fence"] == first["fence"] + 1
        assert second["state"] == "RUNNING"
        assert running.attempt(task_id).claim_id == second["claim_id"]
        stand.cancel(task_id)
        await running.finished(task_id)
    assert [a["outcome"] for a in stand.attempts(task_id)] == ["LOST", "CANCELLED"]


async def test_when_all_thread_slots_are_leaked_the_process_asks_to_be_replaced(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everbeat.worker.departure.LEAK_PATIENCE_S", 0.2)
    async with stand.worker(thread_concurrency=2, grace="1s") as running:
        sent: list[UUID] = [stand.send_with("wait_for_gate", {"word": w}, policy=SHORT) for w in "ab"]
        await running.finished(*sent)
        assert await running.left() == 74
    assert {stand.task(each)["error"]["code"] for each in sent} == {"TASK_TIMEOUT"}
    assert ("ended", "a") not in gate.journal


async def test_the_death_of_a_task_process_is_reported_with_its_cause(stand: Stand) -> None:
    async with stand.worker() as running:
        sent = {how: stand.send("process_die", how=how) for how in ("exit", "segv", "kill")}
        siblings = [stand.send("process_pid"), stand.send("double", x=3)]
        await running.until(lambda: len(running.crashes) == 3)
        await running.finished(*siblings)
        reports = {task_id: report for task_id, _, report in running.crashes}
        assert reports[sent["exit"]].exit_code == 139
        assert reports[sent["segv"]].signal_name == "SIGSEGV"
        assert reports[sent["kill"]].signal_name == "SIGKILL"
    assert {stand.task(each)["state"] for each in siblings} == {"COMPLETED"}


async def test_task_processes_are_kept_warm(stand: Stand) -> None:
    async with stand.worker(process_concurrency=1) as running:
        first = await running.finished(stand.send("process_pid"))
        second = await running.finished(stand.send("process_pid"))
        raised = await running.finished(stand.send("raise_in_process", kind="exit"))
        third = await running.finished(stand.send("process_pid"))
    assert first["result"] == second["result"] == third["result"]
    assert raised["state"] == "FAILED"


async def test_tasks_are_given_back_when_task_processes_cannot_start(stand: Stand) -> None:
    argv = [*TASK_PROCESS, "--refuse"]
    async with stand.worker(task_process_argv=argv) as running:
        task_id = stand.send("process_pid")
        await running.until(lambda: stand.task(task_id)["fence"] >= 2)
        await running.until(lambda: stand.task(task_id)["state"] == "PENDING")
        assert (await running.finished(stand.send("double", x=1)))["state"] == "COMPLETED"
    assert stand.attempts(task_id) == []
    async with stand.worker() as sound:
        assert (await sound.finished(task_id))["result"][1] == 1


async def test_nothing_is_left_of_the_worker_on_its_loop(stand: Stand) -> None:
    async with stand.worker() as running:
        await running.finished(stand.send("double", x=1), stand.send("process_pid"))
    mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert mine == []
    ours = "select application_name from pg_stat_activity where application_name like 'everbeat-super%%'"
    async with asyncio.timeout(20):
        while stand.query(ours):
            await asyncio.sleep(0.01)  # looked at from outside: the server ends it in its own time


async def test_a_cancel_that_comes_while_the_start_is_under_way_keeps_the_code_from_beginning(
    stand: Stand,
) -> None:  # B11
    """Of a task that was claimed ahead of a free slot."""
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker(async_concurrency=1, prefetch=2) as running:
                first = stand.send("linger", word="first")
                await running.until(lambda: running.have_begun(first))
                task_id = stand.send("linger", word="x")
                await running.until(lambda: stand.task(task_id)["state"] == "CLAIMED")
                proxy.hold_reply(b"-- Starts claimed")
                stand.cancel(first)
                # The row says RUNNING, the worker does not know it yet.
                await running.until(lambda: stand.task(task_id)["state"] == "RUNNING")
                assert stand.cancel(task_id)[0] == "REQUESTED"
                await running.until(lambda: running.attempt(task_id).cancel_asked)
                proxy.release()
                row = await running.finished(task_id)
                assert ("begun", "x") not in gate.journal
        finally:
            stand.target = direct
    assert row["state"] == "CANCELLED"


async def test_a_cancel_that_comes_while_the_claim_is_under_way_is_not_forgotten(stand: Stand) -> None:  # B11
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker() as running:
                await running.until(lambda: any(isinstance(one, Tick) for one in running.told))
                proxy.hold_reply(b"-- Claims due")
                task_id = stand.send("linger", word="x")
                # The row says RUNNING, the worker does not know it yet.
                await running.until(lambda: stand.task(task_id)["state"] == "RUNNING")
                assert stand.cancel(task_id)[0] == "REQUESTED"
                await running.until(lambda: task_id in running.worker._leases._suspects)
                assert gate.journal == []
                proxy.release()
                row = await running.finished(task_id)
        finally:
            stand.target = direct
    assert row["state"] == "CANCELLED"


async def test_a_stranger_that_cancels_code_before_its_first_step_takes_no_slot_with_it(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever cancels every task of the loop, as some libraries do when they close."""
    begin = AsyncExecutor.begin

    def cancelled(self: AsyncExecutor, attempt: Attempt) -> None:
        begin(self, attempt)
        if attempt.task.args == '{"x":7}':
            self._running[attempt].cancel()

    monkeypatch.setattr(AsyncExecutor, "begin", cancelled)
    async with stand.worker(async_concurrency=1, prefetch=0) as running:
        row = await running.finished(stand.send("double", x=7))
        assert (row["state"], row["error"]["type"]) == ("FAILED", "asyncio.exceptions.CancelledError")
        assert (await running.finished(stand.send("double", x=4)))["result"] == 8
