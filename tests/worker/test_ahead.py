"""Test which tasks a worker claims ahead of free slots: those that can start within 0.25 s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from everbeat.protocol import Quiet
from everbeat.worker.claim.durations import FEWEST_RUNS, NO_PREFETCH_S
from tests.variants import long_except
from tests.worker.harness import Running, WorkerHarness
from tests.worker.sample_tasks import gate

SLACK = 3.0
NAP_S = 0.06


async def measured(harness: WorkerHarness, running: Running, name: str = "nap", **args: object) -> None:
    """Run the function often enough that the worker knows its duration."""
    sent = harness.send_many(name, [args or {"seconds": NAP_S}] * FEWEST_RUNS)
    await running.finished(*sent)


@contextmanager
def seen_together(running: Running) -> Iterator[None]:
    """Let the worker poll only after all of these tasks are sent."""
    running.worker.obey(Quiet(on=True))
    yield
    running.worker.obey(Quiet(on=False))


def never_claimed(harness: WorkerHarness) -> int:
    return int(harness.query("select count(*) as n from {schema}.tasks where fence = 0")[0]["n"])


@pytest.mark.parametrize("name", ["linger", "wait_for_gate", "process_linger"])
async def test_a_worker_claims_no_tasks_ahead_of_a_function_without_measured_runs(
    harness: WorkerHarness, name: str, tmp_path: object
) -> None:  # J5
    args = {"folder": str(tmp_path)} if name == "process_linger" else {"word": "x"}
    one_each = {"async_concurrency": 1, "thread_concurrency": 1, "process_concurrency": 1}
    async with harness.worker(**one_each) as running:
        sent = harness.send_many(name, [args] * 3)
        await running.until(lambda: any(running.have_begun(each) for each in sent))
        await asyncio.sleep(0.5)  # time in which the worker must claim no more
        assert harness.states() == {"RUNNING": 1, "PENDING": 2}
        assert never_claimed(harness) == 2
        gate.opened.set()
        for each in sent:
            harness.cancel(each)


async def test_tasks_that_wait_too_long_are_released_in_one_batch_with_one_notification(
    harness: WorkerHarness,
) -> None:  # J5
    async with harness.worker(async_concurrency=1) as running:
        await measured(harness, running)
        with seen_together(running):
            slow = harness.send("nap", seconds=8.0)
            others = harness.send_many("nap", [{"seconds": NAP_S}] * 20)
        await running.until(lambda: harness.states().get("CLAIMED", 0) > 0)
        harness.database.announcer.flush()  # the hint of the second send must not be counted below
        harness.connection.execute(f'listen "{harness.target.channel}"')  # type: ignore[arg-type]
        await running.until(lambda: harness.states().get("CLAIMED") is None)
        waited = time.monotonic() - running.attempt(slow).launched_at
        print(f"given back {waited:.2f} s after they were claimed")
        assert waited < 0.25 + 0.25 * SLACK
        back = harness.query("select * from {schema}.tasks where fence > 0 and state = 'PENDING'")
        assert 1 <= len(back) <= 4
        assert {(row["attempt"], row["retry_count"], row["loss_count"]) for row in back} == {(0, 0, 0)}
        assert all(harness.attempts(row["id"]) == [] for row in back)
        told = list(harness.connection.notifies(timeout=0.5))
        assert [one.payload for one in told if one.payload.startswith("t:")] == ["t:default"]
        # The released tasks do not wait for this worker: another one runs them all meanwhile.
        async with harness.worker(async_concurrency=2) as other:
            await other.finished(*others)
        assert harness.task(slow)["state"] == "RUNNING"
        harness.cancel(slow)
    assert all(len(harness.attempts(each)) == 1 for each in others)


@pytest.mark.long
async def test_a_function_whose_tasks_were_released_is_not_claimed_ahead_for_five_seconds(
    harness: WorkerHarness,
) -> None:  # J5
    async with harness.worker(async_concurrency=1) as running:
        await measured(harness, running)
        with seen_together(running):
            harness.send("nap", seconds=0.8)
            harness.send_many("nap", [{"seconds": NAP_S}] * 4)
        await running.until(lambda: harness.states().get("CLAIMED", 0) > 0)
        await running.until(lambda: harness.states().get("CLAIMED") is None)
        barred_at = time.monotonic()
        await running.until(lambda: harness.states().keys() == {"COMPLETED"})
        sent = harness.send_many("nap", [{"seconds": NAP_S}] * 200)
        await running.until(lambda: harness.states().get("CLAIMED", 0) > 0)
        assert time.monotonic() - barred_at >= NO_PREFETCH_S - 0.5, (
            "the next claim ahead must not come so soon"
        )
        await running.finished(*sent)


async def test_tasks_started_by_their_claim_are_released_uncharged_if_their_slot_stays_busy(
    harness: WorkerHarness,
) -> None:  # J5
    async with harness.worker(async_concurrency=1) as running:
        await measured(harness, running, seconds=0)
        with seen_together(running):
            slow = harness.send("nap", seconds=8.0)
            others = harness.send_many("nap", [{"seconds": 0}] * 40)
        await running.until(lambda: harness.states().get("RUNNING", 0) > 1)
        await running.until(
            lambda: harness.states() == {"COMPLETED": FEWEST_RUNS, "RUNNING": 1, "PENDING": 40}
        )
        charged = (
            "select distinct retry_count, crash_count, loss_count from {schema}.tasks where state = 'PENDING'"
        )
        assert harness.query(charged) == [{"retry_count": 0, "crash_count": 0, "loss_count": 0}]
        async with harness.worker(async_concurrency=2) as other:
            await other.finished(*others)
        harness.cancel(slow)
    outcomes = harness.query(
        "select outcome, count(distinct task_id) as n from {schema}.attempts group by outcome order by outcome"
    )
    assert {row["outcome"]: row["n"] for row in outcomes}["COMPLETED"] == FEWEST_RUNS + 40


@pytest.mark.parametrize("seconds", [0.02, NAP_S])
async def test_an_urgent_task_overtakes_tasks_claimed_ahead(
    harness: WorkerHarness, seconds: float
) -> None:  # J5
    async with harness.worker(async_concurrency=1, queue_priorities={"urgent": 1}) as running:
        await measured(harness, running, seconds=seconds)
        harness.send_many("nap", [{"seconds": seconds}] * int(3.0 / seconds))
        await asyncio.sleep(1.0)  # the worker claims ahead as many tasks as it can
        sent_at = time.monotonic()
        urgent = [
            harness.send_with("note", {"word": "a"}, queue="urgent"),
            harness.send_with("note", {"word": "b"}, priority=-1),
        ]
        for each in urgent:
            await running.finished(each)
        took = time.monotonic() - sent_at
        print(f"urgent tasks were done after {took:.3f} s")
        assert took < 0.25 + 0.25 * SLACK
        assert harness.states().get("PENDING", 0) > 0, "tasks claimed ahead were not overtaken"
        await running.until(lambda: harness.states().keys() == {"COMPLETED"})


@pytest.mark.alone  # the durations of functions decide, and a busy machine makes all of them slow
@pytest.mark.parametrize(
    ("name", "slots"), long_except([("note", 5), ("note", 100), ("thread_note", 4)], ("note", 5))
)
async def test_tasks_of_fast_functions_are_claimed_by_the_hundred_with_any_number_of_slots(
    harness: WorkerHarness, name: str, slots: int
) -> None:
    claims = []
    while not claims or (
        claims[-1] >= 100 and len(claims) < 6
    ):  # a run can coincide with other work of the machine
        gate.journal.clear()
        harness.send_many(name, [{"word": str(n)} for n in range(2_000)])
        async with harness.worker(async_concurrency=slots, thread_concurrency=slots) as running:
            await running.until(lambda: len(running.finishes()) == 2_000, timeout_s=60)
            claims.append(running.worker._table.claims_sent)
        assert sorted(map(int, gate.journal)) == list(range(2_000))
    print(f"{claims} claims for 2,000 tasks in {slots} slots")
    assert claims[-1] < 100


async def test_tasks_with_default_settings_do_not_exhaust_a_pool_of_fifteen_connections(
    harness: WorkerHarness,
) -> None:  # J5
    sent = harness.send_many("query", [{"seconds": 0.4}] * 150)
    async with harness.worker() as running:
        await running.finished(*sent)
    assert harness.states() == {"COMPLETED": 150}
