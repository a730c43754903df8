"""Test timeouts, cancels and lost leases: code is stopped as its mode allows, and the row has the outcome."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.protocol import CancelAttempts, DropLeases, Tick
from everbeat.runtime.events import LeasesLost, ZombieRefused
from everbeat.worker.attempt import Attempt
from everbeat.worker.executors.in_process import AsyncExecutor
from tests.variants import long_except
from tests.worker.harness import TASK_PROCESS, Running, WorkerHarness
from tests.worker.proxy import Proxy, statement_marker
from tests.worker.sample_tasks import gate

SHORT = StoredPolicy(timeout_ms=300).to_json()
SLACK = 3.0


async def until_pid(running: Running, folder: Path) -> int:
    """Wait until a process task reports its pid."""
    pid = folder / "pid"
    await running.until(lambda: pid.exists() and pid.read_text() != "")
    return int(pid.read_text())


async def test_a_timeout_cancels_an_async_task(harness: WorkerHarness) -> None:  # B10
    async with harness.worker() as running:
        sibling = harness.send("nap", seconds=0.8)
        task_id = harness.send_with("linger", {"word": "x"}, policy=SHORT)
        row = await running.finished(task_id)
        took = (row["failed_at"] - row["started_at"]).total_seconds()
        print(f"timeout of 0.3 s settled after {took:.3f} s")
        assert 0.3 <= took < 0.3 + 1.0
        assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")
        assert ("cancelled", "x") in gate.journal
        assert (await running.finished(sibling))["state"] == "COMPLETED"


async def test_code_that_catches_its_cancellation_is_settled_and_keeps_its_slot(
    harness: WorkerHarness,
) -> None:  # B10
    async with harness.worker(async_concurrency=1, prefetch=0) as running:
        task_id = harness.send_with("stubborn", {"seconds": 2.0}, policy=SHORT)
        after = harness.send("double", x=1)
        row = await running.finished(task_id)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")
        assert "swallowed" in gate.journal
        assert "ended" not in gate.journal
        assert harness.task(after)["state"] == "PENDING"
        await running.finished(after)
        assert "ended" in gate.journal
    assert harness.task(task_id)["state"] == "FAILED"
    assert len(harness.attempts(task_id)) == 1


async def test_a_timeout_settles_a_thread_task_that_keeps_its_slot(
    harness: WorkerHarness,
) -> None:  # B10
    async with harness.worker(thread_concurrency=1, prefetch=0) as running:
        task_id = harness.send_with("wait_for_gate", {"word": "x"}, policy=SHORT)
        after = harness.send("thread_nap", seconds=0)
        row = await running.finished(task_id)
        took = (row["failed_at"] - row["started_at"]).total_seconds()
        assert took < 0.3 + 1.0
        assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")
        await running.until(lambda: ("told", "x", "timed_out") in gate.journal)
        assert harness.task(after)["state"] == "PENDING"
        gate.opened.set()
        await running.finished(after)
    assert harness.task(task_id)["state"] == "FAILED"


@pytest.mark.parametrize(
    "name", long_except(["process_linger", "process_linger_async", "process_deaf"], "process_deaf")
)
async def test_a_timeout_kills_the_process_of_a_process_task(
    harness: WorkerHarness, tmp_path: Path, name: str
) -> None:  # B10
    async with harness.worker() as running:
        harness.send("process_pid")  # starts a process, so that its start does not use up the limit
        task_id = harness.send_with(name, {"folder": str(tmp_path)}, policy=SHORT)
        pid = await until_pid(running, tmp_path)
        row = await running.finished(task_id)
        took = (row["failed_at"] - row["started_at"]).total_seconds()
        print(f"{name}: timeout of 0.3 s settled after {took:.3f} s")
        assert took < 0.3 + 1.0 * SLACK
        assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")
        await running.until(lambda: not psutil.pid_exists(pid))
        assert (tmp_path / "interrupted").exists() == (name != "process_deaf")
        after = await running.finished(harness.send("process_pid"))
        assert after["result"][0] != pid
    assert running.crashes == []


@pytest.mark.parametrize("source", ["postgres", "silent"])
async def test_cancelled_async_and_process_code_ends_within_2_s(
    harness: WorkerHarness, tmp_path: Path, source: str
) -> None:  # B11
    make = harness.postgres_hints if source == "postgres" else harness.silent_hints
    async with harness.worker(hints=make) as running:
        on_loop, in_process = (
            harness.send("linger", word="x"),
            harness.send("process_linger", folder=str(tmp_path)),
        )
        pid = await until_pid(running, tmp_path)
        await running.until(lambda: ("begun", "x") in gate.journal)
        asked_at = time.monotonic()
        assert [harness.cancel(each)[0] for each in (on_loop, in_process)] == ["REQUESTED", "REQUESTED"]
        await running.finished(on_loop, in_process)
        took = time.monotonic() - asked_at
        print(f"cancelled after {took:.3f} s ({source} hints)")
        assert took < 2.0 * SLACK
        await running.until(lambda: not psutil.pid_exists(pid))
    for task_id in (on_loop, in_process):
        row = harness.task(task_id)
        assert (row["state"], row["error"]["code"]) == ("CANCELLED", "TASK_CANCELLED")
        assert [a["outcome"] for a in harness.attempts(task_id)] == ["CANCELLED"]
    assert ("cancelled", "x") in gate.journal
    assert (tmp_path / "interrupted").exists()


@pytest.mark.usefixtures("a_minute_ahead")
async def test_a_claimed_task_is_cancelled_immediately_and_never_runs(harness: WorkerHarness) -> None:  # B11
    async with harness.worker(thread_concurrency=1, prefetch=4) as running:
        running.measured("wait_for_gate")
        harness.send("wait_for_gate", word="first")
        await running.until(lambda: ("begun", "first") in gate.journal)
        waiting = harness.send("wait_for_gate", word="second")
        await running.until(lambda: harness.task(waiting)["state"] == "CLAIMED")
        assert harness.cancel(waiting)[0] == "CANCELLED"
        gate.opened.set()
        await running.finished(harness.send("wait_for_gate", word="third"))
    assert harness.task(waiting)["state"] == "CANCELLED"
    assert ("begun", "second") not in gate.journal


async def test_a_thread_task_that_checks_for_a_stop_is_cancelled(harness: WorkerHarness) -> None:  # B11
    async with harness.worker() as running:
        task_id = harness.send("check_often")
        await running.until(lambda: "begun" in gate.journal)
        harness.cancel(task_id)
        row = await running.finished(task_id)
    assert row["state"] == "CANCELLED"


async def test_a_thread_task_that_ignores_its_cancel_is_settled_at_its_timeout(
    harness: WorkerHarness,
) -> None:
    async with harness.worker() as running:
        policy = StoredPolicy(timeout_ms=1_500).to_json()
        task_id = harness.send_with("wait_for_gate", {"word": "x"}, policy=policy)
        await running.until(lambda: ("begun", "x") in gate.journal)
        harness.cancel(task_id)
        await running.until(lambda: ("told", "x", "cancelled") in gate.journal)
        row = await running.finished(task_id)
        assert ("ended", "x") not in gate.journal
    # A failure after a cancel request counts as a cancel.
    assert row["state"] == "CANCELLED"


async def test_a_task_that_returns_after_a_cancel_request_is_completed(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("wait_for_gate", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        harness.cancel(task_id)
        await running.until(lambda: ("told", "x", "cancelled") in gate.journal)
        gate.opened.set()
        row = await running.finished(task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", "x")


async def test_a_cancel_message_of_the_supervisor_stops_the_code(harness: WorkerHarness) -> None:
    async with harness.worker(hints=harness.silent_hints) as running:
        task_id = harness.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        running.worker.obey(CancelAttempts([(task_id, harness.task(task_id)["claim_id"])]))
        await running.until(lambda: ("cancelled", "x") in gate.journal)
        assert (await running.finished(task_id))["state"] == "CANCELLED"


@pytest.mark.parametrize("told_by", ["hint", "poll", "supervisor"])
async def test_code_whose_lease_was_lost_is_stopped_and_writes_nothing(
    harness: WorkerHarness, tmp_path: Path, told_by: str
) -> None:  # D5
    hints = harness.postgres_hints if told_by == "hint" else harness.silent_hints
    async with harness.worker(hints=hints) as running:
        on_loop, in_thread = harness.send("linger", word="x"), harness.send("wait_for_gate", word="y")
        in_process = harness.send("process_linger", folder=str(tmp_path))
        pid = await until_pid(running, tmp_path)
        await running.until(lambda: {("begun", "x"), ("begun", "y")} <= set(gate.journal))
        mine = (on_loop, in_thread, in_process)
        leases = [(each, harness.task(each)["claim_id"]) for each in mine]
        for each in mine:
            harness.recover(each)
        if told_by == "supervisor":
            running.worker.obey(DropLeases(leases))
        await running.until(lambda: ("cancelled", "x") in gate.journal)
        await running.until(lambda: ("told", "y", "lease_lost") in gate.journal)
        await running.until(lambda: not psutil.pid_exists(pid))
        gate.opened.set()
        await running.until(lambda: ("ended", "y") in gate.journal)
        lost = {task_id for event in running.of(LeasesLost) for task_id in event.task_ids}
        assert lost == set(mine)
        assert running.finishes() == []
    for each in mine:
        row = harness.task(each)
        assert (row["state"], row["result"]) == ("FAILED", None)
        assert [a["outcome"] for a in harness.attempts(each)] == ["LOST"]
    assert running.crashes == []


async def test_a_late_result_of_a_recovered_attempt_is_refused_and_reported(harness: WorkerHarness) -> None:
    async with harness.worker(hints=harness.silent_hints) as running:
        task_id = harness.send("wait_for_gate", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        # The code ends before the worker knows that its lease is lost (it polls once a second).
        harness.recover(task_id)
        gate.opened.set()
        await running.until(lambda: bool(running.of(ZombieRefused) or running.of(LeasesLost)))
        print([type(event).__name__ for event in running.events])
    row = harness.task(task_id)
    assert (row["state"], row["result"]) == ("FAILED", None)
    assert [a["outcome"] for a in harness.attempts(task_id)] == ["LOST"]


async def test_an_old_attempt_does_not_change_a_retry_that_runs_elsewhere(
    harness: WorkerHarness,
) -> None:  # D5
    async with harness.worker(hints=harness.silent_hints) as running:
        task_id = harness.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        first = harness.task(task_id)
        harness.recover(task_id, action="retry")
        await running.until(lambda: gate.journal.count(("begun", "x")) == 2)
        await running.until(lambda: ("cancelled", "x") in gate.journal)
        second = harness.task(task_id)
        assert second["fence"] == first["fence"] + 1
        assert second["state"] == "RUNNING"
        assert running.attempt(task_id).claim_id == second["claim_id"]
        harness.cancel(task_id)
        await running.finished(task_id)
    assert [a["outcome"] for a in harness.attempts(task_id)] == ["LOST", "CANCELLED"]


async def test_a_worker_whose_thread_slots_are_all_leaked_exits_to_be_replaced(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everbeat.worker.shutdown.LEAK_PATIENCE_S", 0.2)
    async with harness.worker(thread_concurrency=2, grace="1s") as running:
        sent: list[UUID] = [harness.send_with("wait_for_gate", {"word": w}, policy=SHORT) for w in "ab"]
        await running.finished(*sent)
        assert await running.left() == 74
    assert {harness.task(each)["error"]["code"] for each in sent} == {"TASK_TIMEOUT"}
    assert ("ended", "a") not in gate.journal


async def test_the_death_of_a_task_process_is_reported_with_its_cause(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        sent = {how: harness.send("process_die", how=how) for how in ("exit", "segv", "kill")}
        siblings = [harness.send("process_pid"), harness.send("double", x=3)]
        await running.until(lambda: len(running.crashes) == 3)
        await running.finished(*siblings)
        reports = {task_id: report for task_id, _, report in running.crashes}
        assert reports[sent["exit"]].exit_code == 139
        assert reports[sent["segv"]].signal_name == "SIGSEGV"
        assert reports[sent["kill"]].signal_name == "SIGKILL"
    assert {harness.task(each)["state"] for each in siblings} == {"COMPLETED"}


async def test_task_processes_are_reused(harness: WorkerHarness) -> None:
    async with harness.worker(process_concurrency=1) as running:
        first = await running.finished(harness.send("process_pid"))
        second = await running.finished(harness.send("process_pid"))
        raised = await running.finished(harness.send("raise_in_process", kind="exit"))
        third = await running.finished(harness.send("process_pid"))
    assert first["result"] == second["result"] == third["result"]
    assert raised["state"] == "FAILED"


async def test_tasks_are_released_if_task_processes_cannot_start(harness: WorkerHarness) -> None:
    argv = [*TASK_PROCESS, "--refuse"]
    async with harness.worker(task_process_argv=argv) as running:
        task_id = harness.send("process_pid")
        await running.until(lambda: harness.task(task_id)["fence"] >= 2)
        await running.until(lambda: harness.task(task_id)["state"] == "PENDING")
        assert (await running.finished(harness.send("double", x=1)))["state"] == "COMPLETED"
    assert harness.attempts(task_id) == []
    async with harness.worker() as sound:
        assert (await sound.finished(task_id))["result"][1] == 1


async def test_a_worker_that_ended_leaves_no_tasks_and_no_sessions(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        await running.finished(harness.send("double", x=1), harness.send("process_pid"))
    mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert mine == []
    ours = "select application_name from pg_stat_activity where application_name like 'everbeat-super%%'"
    async with asyncio.timeout(20):
        while harness.query(ours):
            await asyncio.sleep(0.01)  # PostgreSQL ends a session a moment after its client disconnects


@pytest.mark.usefixtures("a_minute_ahead")
async def test_a_cancel_during_the_start_statement_prevents_the_code_from_running(
    harness: WorkerHarness,
) -> None:  # B11
    """The task was claimed ahead of a free slot."""
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker(async_concurrency=1, prefetch=2) as running:
                running.measured("linger")
                first = harness.send("linger", word="first")
                await running.until(lambda: running.have_begun(first))
                task_id = harness.send("linger", word="x")
                await running.until(lambda: harness.task(task_id)["state"] == "CLAIMED")
                proxy.hold_reply(statement_marker("task/start_tasks"))
                harness.cancel(first)
                # The row says RUNNING, the worker does not know it yet.
                await running.until(lambda: harness.task(task_id)["state"] == "RUNNING")
                assert harness.cancel(task_id)[0] == "REQUESTED"
                await running.until(lambda: running.attempt(task_id).stopped == "cancelled")
                proxy.release()
                row = await running.finished(task_id)
                assert ("begun", "x") not in gate.journal
        finally:
            harness.target = direct
    assert row["state"] == "CANCELLED"


async def test_a_cancel_during_the_claim_statement_is_kept(
    harness: WorkerHarness,
) -> None:  # B11
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                await running.until(lambda: any(isinstance(one, Tick) for one in running.told))
                proxy.hold_reply(statement_marker("task/claim_tasks"))
                task_id = harness.send("linger", word="x")
                # The row says RUNNING, the worker does not know it yet.
                await running.until(lambda: harness.task(task_id)["state"] == "RUNNING")
                assert harness.cancel(task_id)[0] == "REQUESTED"
                await running.until(lambda: task_id in running.worker._leases._suspects)
                assert gate.journal == []
                proxy.release()
                row = await running.finished(task_id)
        finally:
            harness.target = direct
    assert row["state"] == "CANCELLED"


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the first step runs at once, so there is no time before it"
)
async def test_user_code_that_cancels_a_task_before_its_first_step_leaks_no_slot(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some libraries cancel every task of the loop when they close."""
    begin = AsyncExecutor.begin

    def cancelled(self: AsyncExecutor, attempt: Attempt) -> None:
        begin(self, attempt)
        if attempt.task.args == '{"x":7}':
            task = self._running[attempt]
            assert task is not None
            task.cancel()

    monkeypatch.setattr(AsyncExecutor, "begin", cancelled)
    async with harness.worker(async_concurrency=1, prefetch=0) as running:
        row = await running.finished(harness.send("double", x=7))
        assert (row["state"], row["error"]["type"]) == ("FAILED", "asyncio.exceptions.CancelledError")
        assert (await running.finished(harness.send("double", x=4)))["result"] == 8
