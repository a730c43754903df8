"""Test a worker whose supervisor or database is silent: it claims nothing, and fences itself if configured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from everbeat.config import RecoveryConfig
from everbeat.domain.task.policy import StoredPolicy
from everbeat.protocol import Beaten, Tick
from everbeat.runtime.clock import SystemClock
from everbeat.worker.liveness import SilenceLimits
from tests.worker.harness import Running, WorkerHarness
from tests.worker.proxy import Proxy, statement_marker
from tests.worker.sample_tasks import gate

FAST = {
    "claimer_heartbeat_interval_ms": 1_000,
    "runner_heartbeat_interval_ms": 1_000,
    "claimed_stale_threshold_ms": 2_000,
    "running_stale_threshold_ms": 2_000,
    "check_interval_ms": 1_000,
}


def test_the_silence_limits_follow_from_the_recovery_settings() -> None:
    default = SilenceLimits.allowed_by(RecoveryConfig())
    assert (default.beat_every_s, default.supervisor_silent_s, default.start_nothing_s) == (30, 100, 80)
    assert default.fence_s is None
    fast = SilenceLimits.allowed_by(RecoveryConfig(**FAST, self_fence=True))
    assert fast.supervisor_silent_s == 1.25
    assert fast.fence_s == 1.5


async def test_a_worker_with_a_silent_supervisor_claims_nothing_and_sends_its_own_heartbeats(
    harness: WorkerHarness,
) -> None:
    async with harness.worker(recovery=RecoveryConfig(**FAST), beating=False) as running:
        held = harness.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        seq = "select beat_seq from {schema}.workers where id = %s"
        assert harness.query(seq, running.id)[0]["beat_seq"] == 0
        await running.until(lambda: harness.query(seq, running.id)[0]["beat_seq"] >= 2)
        waiting = harness.send("double", x=1)
        await asyncio.sleep(0.5)  # time in which the worker must claim nothing
        assert harness.task(waiting)["state"] == "PENDING"
        assert harness.task(held)["state"] == "RUNNING"
        running.worker.obey(Beaten(1, SystemClock().monotonic()))
        assert (await running.finished(waiting))["state"] == "COMPLETED"
        running.stop()


async def test_a_worker_that_was_declared_dead_stops_its_code(harness: WorkerHarness) -> None:
    async with harness.worker(
        recovery=RecoveryConfig(**FAST), beating=False, hints=harness.silent_hints
    ) as running:
        task_id = harness.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        harness.query(
            "update {schema}.workers set ended_at = now(), ended_how = 'age' where id = %s returning id",
            running.id,
        )
        await running.until(lambda: ("cancelled", "x") in gate.journal)
    assert (
        harness.task(task_id)["state"] == "RUNNING"
    )  # its outcome belongs to the supervisor that declared the worker dead
    harness.recover(task_id)


@pytest.mark.parametrize("blow", [Proxy.cut, Proxy.stall], ids=["cut", "stalled"])
async def test_a_self_fencing_worker_stops_its_code_before_its_leases_can_be_recovered(
    harness: WorkerHarness, blow: Callable[[Proxy], None]
) -> None:  # E15, worker's half
    recovery = RecoveryConfig(**FAST, self_fence=True)
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker(recovery=recovery, beating=False) as running:
                task_id = harness.send("linger", word="x")
                await running.until(lambda: ("begun", "x") in gate.journal)
                begun = time.monotonic()
                blow(proxy)
                await running.until(lambda: ("cancelled", "x") in gate.journal)
                assert time.monotonic() - begun < 2.0  # the threshold
                proxy.mend()
                row = await running.finished(task_id)
        finally:
            harness.target = direct
    assert (row["state"], row["error"]["code"]) == ("FAILED", "WORKER_CRASHED")
    assert row["error"]["data"] == {"cause": "self_fenced"}


async def test_a_task_of_a_self_fenced_worker_runs_again_if_on_crash_is_retry(
    harness: WorkerHarness,
) -> None:  # E15
    recovery = RecoveryConfig(**FAST, self_fence=True)
    again = StoredPolicy(on_crash="retry")
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker(recovery=recovery, beating=False) as running:
                task_id = harness.send_with("linger", {"word": "x"}, policy=again.to_json())
                await running.until(lambda: ("begun", "x") in gate.journal)
                proxy.cut()
                await running.until(lambda: ("cancelled", "x") in gate.journal)
                proxy.mend()
                await running.until(lambda: bool(harness.attempts(task_id)))
                harness.cancel(task_id)
        finally:
            harness.target = direct
    assert harness.attempts(task_id)[0]["will_retry"]


async def test_code_continues_through_an_outage_without_self_fencing(harness: WorkerHarness) -> None:
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker(recovery=RecoveryConfig(**FAST), beating=False) as running:
                task_id = harness.send("nap", seconds=3)
                await running.until(lambda: running.have_begun(task_id))
                proxy.cut()
                await asyncio.sleep(2.5)  # longer than the threshold
                proxy.mend()
                row = await running.finished(task_id)
        finally:
            harness.target = direct
    assert row["state"] == "COMPLETED"


def may_start(running: Running) -> bool:
    return running.worker._liveness.may_start


async def test_a_start_that_is_acknowledged_too_late_is_released(harness: WorkerHarness) -> None:  # E6
    """The row is RUNNING, but the worker was paused so long that another one might have its lease by now."""
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker(recovery=RecoveryConfig(**FAST)) as running:
                await running.until(lambda: any(isinstance(one, Tick) for one in running.told))
                proxy.hold_reply(statement_marker("task/claim_tasks"))
                task_id = harness.send("note", word="x")
                await running.until(lambda: harness.task(task_id)["state"] == "RUNNING")
                running.stop_heartbeats()
                await running.until(lambda: not may_start(running))
                proxy.release()
                await running.until(lambda: harness.task(task_id)["state"] == "PENDING")
                assert gate.journal == [], "its code must not begin"
                row = harness.task(task_id)
                assert (row["retry_count"], row["crash_count"], row["loss_count"]) == (0, 0, 0)
                running.worker.obey(Beaten(1, SystemClock().monotonic()))
                await running.until(lambda: harness.task(task_id)["state"] == "COMPLETED")
                assert gate.journal == ["x"]
        finally:
            harness.target = direct


async def test_an_old_supervisor_heartbeat_does_not_let_a_worker_claim(
    harness: WorkerHarness,
) -> None:  # E6, E15
    """When a frozen process thaws, the messages in its channel are older than the recovery of its tasks."""
    async with harness.worker(recovery=RecoveryConfig(**FAST), beating=False) as running:
        running.worker.obey(Beaten(1, SystemClock().monotonic()))
        await asyncio.sleep(1.5)  # a silence after which a worker does not claim
        running.worker.obey(Beaten(2, SystemClock().monotonic() - 1.4))
        waiting = harness.send("double", x=1)
        await asyncio.sleep(0.5)  # time in which the worker must claim nothing
        assert harness.task(waiting)["state"] == "PENDING"
        running.worker.obey(Beaten(3, SystemClock().monotonic()))
        await running.finished(waiting)
        running.stop()
