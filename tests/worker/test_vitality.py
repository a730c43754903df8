"""What a worker may do while nobody vouches for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from everbeat.config import RecoveryConfig
from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.clock import SystemClock
from everbeat.worker.protocol import Beaten, Tick
from everbeat.worker.vitality import Silence
from tests.worker.deeds import gate
from tests.worker.proxy import Proxy
from tests.worker.stand import Running, Stand

FAST = {
    "claimer_heartbeat_interval_ms": 1_000,
    "runner_heartbeat_interval_ms": 1_000,
    "claimed_stale_threshold_ms": 2_000,
    "running_stale_threshold_ms": 2_000,
    "check_interval_ms": 1_000,
}


def test_the_limits_of_silence_follow_from_the_settings() -> None:
    default = Silence.allowed_by(RecoveryConfig())
    assert (default.beat_every_s, default.supervisor_silent_s, default.start_nothing_s) == (30, 100, 80)
    assert default.fence_s is None
    fast = Silence.allowed_by(RecoveryConfig(**FAST, self_fence=True))
    assert fast.supervisor_silent_s == 1.25
    assert fast.fence_s == 1.5


async def test_a_worker_whose_supervisor_is_silent_claims_nothing_and_beats_for_itself(stand: Stand) -> None:
    async with stand.worker(recovery=RecoveryConfig(**FAST), beating=False) as running:
        held = stand.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        seq = "select beat_seq from {schema}.workers where id = %s"
        assert stand.query(seq, running.id)[0]["beat_seq"] == 0
        await running.until(lambda: stand.query(seq, running.id)[0]["beat_seq"] >= 2)
        waiting = stand.send("double", x=1)
        await asyncio.sleep(0.5)  # nothing may be claimed
        assert stand.task(waiting)["state"] == "PENDING"
        assert stand.task(held)["state"] == "RUNNING"
        running.worker.obey(Beaten(1, SystemClock().monotonic()))
        assert (await running.finished(waiting))["state"] == "COMPLETED"
        running.stop()


async def test_a_worker_that_was_given_up_stops_its_code(stand: Stand) -> None:
    async with stand.worker(
        recovery=RecoveryConfig(**FAST), beating=False, wake=stand.silent_wake
    ) as running:
        task_id = stand.send("linger", word="x")
        await running.until(lambda: ("begun", "x") in gate.journal)
        stand.query(
            "update {schema}.workers set ended_at = now(), ended_how = 'age' where id = %s returning id",
            running.id,
        )
        await running.until(lambda: ("cancelled", "x") in gate.journal)
    assert stand.task(task_id)["state"] == "RUNNING"  # what becomes of it is for those who gave the worker up
    stand.recover(task_id)


@pytest.mark.parametrize("blow", [Proxy.cut, Proxy.stall], ids=["cut", "stalled"])
async def test_a_fenced_worker_stops_its_code_before_it_can_be_taken_over(
    stand: Stand, blow: Callable[[Proxy], None]
) -> None:  # E15, worker's half
    recovery = RecoveryConfig(**FAST, self_fence=True)
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker(recovery=recovery, beating=False) as running:
                task_id = stand.send("linger", word="x")
                await running.until(lambda: ("begun", "x") in gate.journal)
                begun = time.monotonic()
                blow(proxy)
                await running.until(lambda: ("cancelled", "x") in gate.journal)
                assert time.monotonic() - begun < 2.0  # the threshold
                proxy.mend()
                row = await running.finished(task_id)
        finally:
            stand.target = direct
    assert (row["state"], row["error"]["code"]) == ("FAILED", "WORKER_CRASHED")
    assert row["error"]["data"] == {"cause": "self_fenced"}


async def test_a_fenced_task_runs_again_where_its_policy_lets_it_after_a_crash(stand: Stand) -> None:  # E15
    recovery = RecoveryConfig(**FAST, self_fence=True)
    again = StoredPolicy(on_crash="retry")
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker(recovery=recovery, beating=False) as running:
                task_id = stand.send_with("linger", {"word": "x"}, policy=again.to_json())
                await running.until(lambda: ("begun", "x") in gate.journal)
                proxy.cut()
                await running.until(lambda: ("cancelled", "x") in gate.journal)
                proxy.mend()
                await running.until(lambda: bool(stand.attempts(task_id)))
                stand.cancel(task_id)
        finally:
            stand.target = direct
    assert stand.attempts(task_id)[0]["will_retry"]


async def test_without_self_fencing_code_goes_on_through_an_outage(stand: Stand) -> None:
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker(recovery=RecoveryConfig(**FAST), beating=False) as running:
                task_id = stand.send("nap", seconds=3)
                await running.until(lambda: running.have_begun(task_id))
                proxy.cut()
                await asyncio.sleep(2.5)  # longer than the threshold
                proxy.mend()
                row = await running.finished(task_id)
        finally:
            stand.target = direct
    assert row["state"] == "COMPLETED"


def may_start(running: Running) -> bool:
    return running.worker._vitality.may_start


async def test_code_whose_start_was_learned_of_too_late_is_handed_back(stand: Stand) -> None:  # E6
    """The row says RUNNING, and then the worker stood still for so long that its lease may be somebody else's by now."""
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker(recovery=RecoveryConfig(**FAST)) as running:
                await running.until(lambda: any(isinstance(one, Tick) for one in running.told))
                proxy.hold_reply(b"-- Claims due")
                task_id = stand.send("note", word="x")
                await running.until(lambda: stand.task(task_id)["state"] == "RUNNING")
                running.hush()
                await running.until(lambda: not may_start(running))
                proxy.release()
                await running.until(lambda: stand.task(task_id)["state"] == "PENDING")
                assert gate.journal == [], "its code must not begin"
                row = stand.task(task_id)
                assert (row["retry_count"], row["crash_count"], row["loss_count"]) == (0, 0, 0)
                running.worker.obey(Beaten(1, SystemClock().monotonic()))
                await running.until(lambda: stand.task(task_id)["state"] == "COMPLETED")
                assert gate.journal == ["x"]
        finally:
            stand.target = direct


async def test_an_old_beat_that_lay_unread_is_no_sign_of_life(stand: Stand) -> None:  # E6, E15
    """What a frozen process finds in its channel when it thaws was said before somebody else took its work."""
    async with stand.worker(recovery=RecoveryConfig(**FAST), beating=False) as running:
        running.worker.obey(Beaten(1, SystemClock().monotonic()))
        await asyncio.sleep(1.5)  # the silence that a worker does not claim in
        running.worker.obey(Beaten(2, SystemClock().monotonic() - 1.4))
        waiting = stand.send("double", x=1)
        await asyncio.sleep(0.5)  # nothing may be claimed
        assert stand.task(waiting)["state"] == "PENDING"
        running.worker.obey(Beaten(3, SystemClock().monotonic()))
        await running.finished(waiting)
        running.stop()
