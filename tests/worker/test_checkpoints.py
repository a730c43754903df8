"""Test checkpoints and resume in every mode: stored under the lease, found by the next attempt, refused with a reason."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from everbeat.runtime.events import LeasesLost
from tests.variants import long_except
from tests.worker.effects import effects
from tests.worker.harness import WorkerHarness
from tests.worker.proxy import Proxy
from tests.worker.sample_tasks import gate

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "partial_task_process.py")]
REMEMBER = ["remember_in_thread", "remember_in_process", "remember_async", "remember_async_in_process"]
WALK = ["walk_in_thread", "walk_in_process", "walk_async", "walk_async_in_process"]


@pytest.mark.parametrize("name", long_except(REMEMBER, "remember_in_process", "remember_async"))
async def test_the_next_attempt_finds_the_last_checkpoint(
    harness: WorkerHarness, tmp_path: Path, name: str
) -> None:  # G3
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = harness.send(name, folder=str(tmp_path))
        await running.until(lambda: harness.task(task_id)["state"] in ("COMPLETED", "FAILED"))
    row = harness.task(task_id)
    assert effects(tmp_path) == ["[1, {'two': None}]"]
    assert (row["state"], row["result"]) == ("COMPLETED", [2, [1, {"two": None}]])
    assert row["checkpoint"] is None  # a completed task needs none


@pytest.mark.parametrize("name", long_except(WALK, "walk_in_process", "walk_async"))
async def test_the_next_attempt_skips_items_that_resume_recorded(
    harness: WorkerHarness, tmp_path: Path, name: str
) -> None:  # G3
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = harness.send(name, folder=str(tmp_path))
        await running.until(lambda: harness.task(task_id)["state"] in ("COMPLETED", "FAILED"))
    assert effects(tmp_path) == [str(step) for step in range(1, 11)]
    row = harness.task(task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", 2)
    fraction = None if name == "walk_async" else 1.0  # the number of items of an async iterator is unknown
    assert (row["progress"]["stage"], row["progress"]["fraction"]) == ("step", fraction)
    assert row["progress"]["message"] == ("10 done" if fraction is None else "10 of 10")
    assert row["progress_at"] is not None


async def test_two_concurrent_resume_loops_are_counted_separately(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = harness.send("walk_two_at_once", folder=str(tmp_path))
        await running.until(lambda: harness.task(task_id)["state"] in ("COMPLETED", "FAILED"))
    assert harness.task(task_id)["state"] == "COMPLETED"
    done = effects(tmp_path)
    assert sorted(done) == sorted(f"{name} {step}" for name in ("left", "right") for step in range(1, 11))


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        (
            "large",
            "PayloadError",
            "would take 2,000,0.. bytes of JSON; at most 1,048,576 are stored .it is of type str",
        ),
        ("object", "PayloadError", r"checkpoint of task 'store_what' at \['a'\]\[0\] is of type object"),
        ("nan", "PayloadError", r"at \[0\] is nan, which JSON does not have"),
        ("keys", "PayloadError", "has the key 1, which would arrive as a str.*Fix: checkpoint plain values"),
        ("items", "PayloadError", "items 5 of the resume 'step' in task 'store_what' are of type int"),
        ("surrogate", "PayloadError", "lone surrogate"),
        ("name", "PayloadError", "'' of a resume in task 'store_what' is not a printable text"),
        ("twice", "PayloadError", "resumes 'same' again in the same attempt.*f'same of {item}'"),
    ],
)
async def test_a_checkpoint_that_cannot_be_stored_is_refused_and_keeps_the_last_one(
    harness: WorkerHarness, what: str, code: str, message: str
) -> None:
    async with harness.worker() as running:
        row = await running.finished(harness.send("store_what", what=what))
    assert row["state"] == "FAILED"
    assert code in row["error"]["type"]
    assert re.search(message, row["error"]["message"])
    done = {"same": 2} if what == "twice" else {}
    assert row["checkpoint"] == {"value": "before", "done": done}


@pytest.mark.parametrize(
    ("what", "instead"),
    [("checkpoint", r"await Context.acheckpoint\(...\)"), ("resume", "async for ... in Context.aresume")],
)
async def test_blocking_checkpoints_and_resumes_are_refused_on_an_event_loop(
    harness: WorkerHarness, what: str, instead: str
) -> None:
    async with harness.worker() as running:
        row = await running.finished(harness.send("block_the_loop_by", what=what))
    assert "BlockingCallInLoop" in row["error"]["type"]
    assert re.search(instead, row["error"]["traceback"])
    assert row["checkpoint"] is None


async def test_threads_and_other_event_loops_of_a_task_can_checkpoint(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        row = await running.finished(harness.send("help_from_a_thread"))
    assert (row["state"], row["result"]) == ("COMPLETED", "from another loop")


async def test_a_checkpoint_in_a_thread_that_lost_its_lease_raises_and_stores_nothing(
    harness: WorkerHarness,
) -> None:  # G3, D5
    async with harness.worker(hints=WorkerHarness.silent_hints, poll_interval="200ms") as running:
        task_id = harness.send("checkpoint_when_told")
        await running.until(lambda: gate.journal == ["waits"])
        harness.recover(task_id)
        gate.opened.set()
        await running.until(lambda: len(gate.journal) == 2)
        assert "lease_lost" in gate.journal[1]
        await running.until(lambda: bool(running.of(LeasesLost)))
    row = harness.task(task_id)
    assert (row["state"], row["checkpoint"], row["progress_at"]) == ("FAILED", None, None)


async def test_a_checkpoint_in_a_process_that_lost_its_lease_raises_and_stores_nothing(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker(
        hints=WorkerHarness.silent_hints, poll_interval="200ms", task_process_argv=PROGRAM
    ) as running:
        task_id = harness.send("checkpoint_in_process_when_told", folder=str(tmp_path))
        await running.until(lambda: effects(tmp_path) == ["waits"])
        harness.recover(task_id)
        (tmp_path / "go").touch()
        await running.until(lambda: len(effects(tmp_path)) == 2)
        assert "lease_lost" in effects(tmp_path)[1]
        await running.until(lambda: bool(running.of(LeasesLost)))
    assert harness.task(task_id)["checkpoint"] is None


async def test_a_cancel_stops_code_that_waits_for_its_checkpoint(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        thread = harness.send("checkpoint_when_told")
        process = harness.send("checkpoint_in_process_when_told", folder=str(tmp_path))
        await running.until(lambda: gate.journal == ["waits"] and effects(tmp_path) == ["waits"])
        with harness.holding("lock table {schema}.tasks in share mode"):
            gate.opened.set()
            (tmp_path / "go").touch()
            await running.until(lambda: running.attempt(thread).unanswered == 1)
            await running.until(lambda: running.attempt(process).unanswered == 1)
            for task_id in (thread, process):
                running.worker._lifecycle.stop(running.attempt(task_id), "cancelled")
            await running.until(lambda: len(effects(tmp_path)) == 2)
            assert "cancelled" in effects(tmp_path)[1]
            assert gate.journal == ["waits"]  # a thread cannot be interrupted: it is notified with the answer
        await running.until(lambda: len(gate.journal) == 2)
        assert "cancelled" in gate.journal[1]
        await running.finished(thread, process)
    # The checkpoint was stored before the code was stopped, so an operator's retry continues from it.
    assert harness.task(thread)["checkpoint"] == {"value": "late", "done": {}}
    assert {harness.task(thread)["state"], harness.task(process)["state"]} == {"CANCELLED"}


async def test_a_checkpoint_whose_reply_is_lost_is_repeated(harness: WorkerHarness) -> None:
    async with Proxy.before(harness.target) as proxy:
        straight, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                task_id = harness.send("checkpoint_when_told")
                await running.until(lambda: gate.journal == ["waits"])
                proxy.lose_reply(b"set checkpoint =")
                gate.opened.set()
                row = await running.finished(task_id)
                assert proxy.lost == 1
        finally:
            harness.target = straight
    assert gate.journal == ["waits", "stored"]
    assert row["state"] == "COMPLETED"


async def test_a_checkpoint_waits_until_an_outage_ends(harness: WorkerHarness) -> None:
    async with Proxy.before(harness.target) as proxy:
        straight, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                task_id = harness.send("checkpoint_when_told")
                await running.until(lambda: gate.journal == ["waits"])
                proxy.cut()
                gate.opened.set()
                await asyncio.sleep(1.5)  # longer than the patience of one call
                assert gate.journal == ["waits"]
                proxy.mend()
                await running.until(lambda: len(gate.journal) == 2)
                await running.finished(task_id)
        finally:
            harness.target = straight
    assert gate.journal == ["waits", "stored"]
