"""Test the life of a task from claim to settlement, as its row shows it."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.worker.lifecycle import AttemptLifecycle
from tests.worker.harness import WorkerHarness
from tests.worker.sample_tasks import gate


async def test_a_completed_task_has_its_result_and_times_in_its_row(harness: WorkerHarness) -> None:  # B2
    task_id = harness.send("double", x=21)
    async with harness.worker() as running:
        row = await running.finished(task_id)
    assert row["state"] == "COMPLETED"
    assert row["result"] == 42
    assert row["claimed_by_worker_id"] == running.id
    assert (
        row["sent_at"] <= row["enqueued_at"] <= row["claimed_at"] <= row["started_at"] <= row["completed_at"]
    )
    assert [(a["attempt"], a["outcome"]) for a in harness.attempts(task_id)] == [(1, "COMPLETED")]
    assert running.code == 0


@pytest.mark.parametrize("name", ["raise_kind", "raise_in_thread", "raise_in_process"])
async def test_any_exception_of_the_code_ends_only_its_attempt(
    harness: WorkerHarness, name: str
) -> None:  # B3
    kinds = {
        "task error": ("SMTP_DOWN", "refused"),
        "plain": ("UNHANDLED_EXCEPTION", "plain"),
        "exit": ("UNHANDLED_EXCEPTION", "3"),
        "interrupt": ("UNHANDLED_EXCEPTION", ""),
        "generator exit": ("UNHANDLED_EXCEPTION", ""),
        "stop iteration": ("UNHANDLED_EXCEPTION", ""),
        "cancelled": ("UNHANDLED_EXCEPTION", ""),
        "unprintable": ("UNHANDLED_EXCEPTION", "raised RuntimeError"),
        "exits when printed": ("UNHANDLED_EXCEPTION", "raised SystemExit"),
        "is cancelled when printed": ("UNHANDLED_EXCEPTION", "a group"),
        "nul": ("UNHANDLED_EXCEPTION", "a\\x00b"),
        "huge": ("UNHANDLED_EXCEPTION", "xxx"),
        "key": ("KEY_MISSING", "'k'"),
    }
    async with harness.worker() as running:
        sent = {kind: harness.send(name, kind=kind) for kind in kinds}
        await running.finished(*sent.values())
        for kind, (code, message) in kinds.items():
            row = harness.task(sent[kind])
            assert row["state"] == "FAILED", kind
            assert row["failed_at"] is not None
            assert row["error"]["code"] == code, kind
            assert message in row["error"]["message"], kind
            assert row["error"]["type"]
            assert "_raise" in row["error"]["traceback"]
            first = row["error"]["traceback"].partition('File "')[2].partition('"')[0]
            assert first.endswith("sample_tasks.py"), (
                "the frames of everbeat that called the code are left out"
            )
        after = harness.send("double", x=2)
        assert (await running.finished(after))["result"] == 4
    assert running.crashes == []


@pytest.mark.parametrize("name", ["raise_kind", "raise_in_thread", "raise_in_process"])
async def test_an_exception_that_cannot_be_read_ends_only_its_attempt(
    harness: WorkerHarness, name: str
) -> None:
    async with harness.worker() as running:
        guilty = harness.send(name, kind="breaks isinstance")
        row = await running.finished(guilty, harness.send("double", x=1))
        assert (await running.finished(harness.send("double", x=2)))["result"] == 4
    assert (row["state"], row["error"]["code"]) == ("FAILED", "UNHANDLED_EXCEPTION")
    assert "could not be read: GeneratorExit" in row["error"]["message"]


async def test_error_codes_of_the_task_take_precedence_over_those_of_the_app(
    harness: WorkerHarness,
) -> None:  # B3
    async with harness.worker() as running:
        by_task, by_app = harness.send("raise_coded", kind="value"), harness.send("raise_coded", kind="zero")
        await running.finished(by_task, by_app)
    assert harness.task(by_task)["error"]["code"] == "BAD_VALUE"
    assert harness.task(by_app)["error"]["code"] == "BY_THE_APP"


async def test_a_result_of_the_wrong_type_fails_the_attempt(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("wrong_result")
        row = await running.finished(task_id)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")


async def test_stored_arguments_of_the_wrong_type_fail_the_attempt(
    harness: WorkerHarness,
) -> None:  # J2
    async with harness.worker() as running:
        sent = [
            harness.send_with(name, args)
            for name, wrong in (
                ("double", b'{"x": "no number"}'),
                ("thread_nap", b'{"seconds": []}'),
                ("process_async", b'{"x": {}}'),
            )
            for args in (wrong, b"[]")
        ]
        await running.finished(*sent)
    for task_id in sent:
        row = harness.task(task_id)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "ARGUMENTS_INVALID")


async def test_a_task_is_retried_by_its_policy_and_then_fails(harness: WorkerHarness) -> None:  # B4
    async with harness.worker() as running:
        task_id = harness.send("retried", kind="task error")
        before = harness.task(task_id)
        first = await running.finished(task_id)
        assert (first["state"], first["retry_count"]) == ("PENDING", 1)
        assert first["next_retry_at"] == first["enqueued_at"]
        ended_at = harness.attempts(task_id)[0]["ended_at"]
        assert timedelta(seconds=1) <= first["next_retry_at"] - ended_at < timedelta(seconds=1.2)
        assert first["claimed_by_worker_id"] is None
        assert first["claimed_at"] is None
        assert first["sent_at"] == before["sent_at"]
        await running.until(lambda: len(harness.attempts(task_id)) == 3)
        attempts = harness.attempts(task_id)
        assert [a["will_retry"] for a in attempts] == [True, True, False]
        # A retry after 1 s begins within 1.3 s (B7), because of a timer and not of polling.
        for earlier, later, interval in ((0, 1, 1.0), (1, 2, 3.0)):
            waited = (attempts[later]["started_at"] - attempts[earlier]["ended_at"]).total_seconds()
            print(f"retry after {waited:.3f} s of {interval}")
            assert interval <= waited < interval + 0.9
    row = harness.task(task_id)
    assert (row["state"], row["retry_count"], row["error"]["code"]) == ("FAILED", 2, "SMTP_DOWN")


async def test_a_task_is_retried_only_for_exceptions_that_its_policy_lists(
    harness: WorkerHarness,
) -> None:  # B4
    async with harness.worker() as running:
        listed, unlisted = harness.send("retried", kind="key"), harness.send("retried", kind="value")
        without, in_process = (
            harness.send("raise_kind", kind="key"),
            harness.send("retried_process", kind="task error"),
        )
        await running.finished(listed, unlisted, without, in_process)
    retried = [harness.attempts(each)[0]["will_retry"] for each in (listed, unlisted, without, in_process)]
    assert retried == [True, False, False, True]


async def test_a_policy_stored_with_the_task_replaces_that_of_the_function(harness: WorkerHarness) -> None:
    stored = StoredPolicy(
        max_retries=5, strategy="exponential", intervals=(2.0,), retry_for=("TASK_TIMEOUT",), timeout_ms=100
    )
    async with harness.worker() as running:
        task_id = harness.send_with("retried_slow", {}, policy=stored.to_json())
        row = await running.finished(task_id)
        ended_at = harness.attempts(task_id)[0]["ended_at"]
    assert (row["state"], row["retry_count"], row["error"]["code"]) == ("PENDING", 1, "TASK_TIMEOUT")
    assert timedelta(seconds=2) <= row["next_retry_at"] - ended_at < timedelta(seconds=2.1)


@pytest.mark.parametrize("limit", ["timeout_ms", "stall_timeout_ms"])
async def test_a_time_limit_beyond_all_dates_does_not_block_its_claim(
    harness: WorkerHarness, limit: str
) -> None:
    modes = ["double", "thread_nap", "process_pid"]
    args: list[dict[str, Any]] = [{"x": 1}, {"seconds": 0}, {}]
    sent = []
    for name, given in zip(modes, args, strict=True):
        for value in (None, 10**17, 10**400, None):
            policy = None if value is None else f'{{"{limit}": {value}}}'.encode()
            sent.append(harness.send_with(name, given, policy=policy))
    async with harness.worker() as running:
        await running.finished(*sent)
    assert harness.states() == {"COMPLETED": len(sent)}


async def test_an_attempt_that_cannot_be_launched_does_not_block_the_rest_of_its_batch(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([False] * 4 + [True])
    later = AttemptLifecycle._later

    def fails_once(self: AttemptLifecycle, *args: Any) -> None:
        if next(failures, False):
            raise MemoryError
        later(self, *args)

    monkeypatch.setattr(AttemptLifecycle, "_later", fails_once)
    sent = [harness.send_with("double", {"x": n}, policy=b'{"timeout_ms": 60000}') for n in range(12)]
    async with harness.worker() as running:
        await running.finished(*sent)
    assert Counter(each.task_id for each in running.finishes()) == Counter(sent)
    outcomes = sorted([each["outcome"] for each in harness.attempts(one)] for one in sent)
    assert outcomes == [["COMPLETED"]] * 11 + [["RELEASED", "COMPLETED"]]


async def test_tasks_run_by_queue_priority_then_priority_then_first_in_first_out(
    harness: WorkerHarness,
) -> None:  # B6
    expected = []
    for queue, priority, word in [
        ("plain", 0, "e"), ("plain", 0, "f"), ("plain", -5, "d"), ("urgent", 3, "c"), ("urgent", 0, "a"),
        ("urgent", 0, "b"), ("plain", 9, "g"),
    ]:  # fmt: skip
        harness.send_with("note", {"word": word}, queue=queue, priority=priority)
        expected.append(word)
    async with harness.worker(async_concurrency=1, prefetch=0, queue_priorities={"urgent": 1}) as running:
        await running.until(lambda: len(gate.journal) == 7)
    assert gate.journal == sorted(expected)


async def test_a_blocking_task_does_not_delay_tasks_of_other_modes(
    harness: WorkerHarness,
) -> None:  # B9
    async with harness.worker() as running:
        warm = harness.send("process_pid")
        await running.finished(warm)
        blocking = harness.send("thread_nap", seconds=1.0)
        others = [
            harness.send("double", x=1),
            harness.send("process_pid"),
            harness.send("process_async", x=7),
        ]
        await running.finished(*others)
        assert blocking not in {one.task_id for one in running.finishes()}
        assert harness.task(others[2])["result"][1:] == [7, str(others[2])]
        assert harness.task(others[1])["result"][0] != os.getpid()
        await running.finished(blocking)


@pytest.mark.long
async def test_a_worker_runs_500_sleeping_tasks_within_3_s(harness: WorkerHarness) -> None:  # B8
    sent = harness.send_many("nap", [{"seconds": 1.0}] * 500)
    began = time.monotonic()
    async with harness.worker() as running:
        await running.finished(*sent)
        took = time.monotonic() - began
    print(f"500 sleeps of 1 s took {took:.2f} s")
    assert took < 3.0 * 3
    assert harness.states() == {"COMPLETED": 500}


@pytest.mark.usefixtures("a_minute_ahead")
async def test_a_claimed_task_expires_when_its_good_until_passes_behind_a_busy_slot(
    harness: WorkerHarness,
) -> None:  # C2
    async with harness.worker(thread_concurrency=1, prefetch=4) as running:
        running.measured("wait_for_gate")
        busy = harness.send("wait_for_gate", word="first")
        await running.until(lambda: ("begun", "first") in gate.journal)
        late = harness.send_with(
            "wait_for_gate", {"word": "late"}, good_until=datetime.now(UTC) + timedelta(seconds=0.5)
        )
        await running.until(lambda: harness.task(late)["state"] == "CLAIMED")
        await asyncio.sleep(0.6)  # its good_until must pass while it waits
        assert harness.task(late)["state"] == "CLAIMED"
        gate.opened.set()
        row = await running.finished(late)
        await running.finished(busy)
    assert (row["state"], row["error"]["code"]) == ("EXPIRED", "TASK_EXPIRED")
    assert harness.attempts(late) == []
    assert ("begun", "late") not in gate.journal


async def test_the_last_progress_report_of_a_task_is_stored(
    harness: WorkerHarness,
) -> None:
    async with harness.worker() as running:
        on_loop, in_process = harness.send("report", steps=1_000), harness.send("process_report")
        await running.finished(on_loop, in_process)
    for task_id, last in ((on_loop, 999), (in_process, 1_999)):
        progress = harness.task(task_id)["progress"]
        assert progress["message"] == f"step {last}"
        assert progress["stage"] == "step"


async def test_the_log_names_the_task_that_blocks_the_event_loop(
    harness: WorkerHarness,
) -> None:  # D4 (the log)
    async with harness.worker() as running:
        task_id = harness.send("block_loop", seconds=2.5)
        await running.finished(task_id)
    named = [event.names for event in running.events if type(event).__name__ == "LoopBlocked"]
    assert (f"block_loop {task_id}",) in named


async def test_a_worker_reports_its_leases_and_its_state_to_the_supervisor(
    harness: WorkerHarness,
) -> None:  # D6
    async with harness.worker() as running:
        task_id = harness.send("linger", word="x")
        await running.until(lambda: len(running.held) == 1)
        await running.until(lambda: any(getattr(one, "names", None) == ["linger"] for one in running.told))
        tick = next(one for one in running.told if getattr(one, "names", None) == ["linger"])
        assert (tick.running, tick.claimed) == (1, 0)
        assert tick.slots == 100 + 4 + 2
        harness.cancel(task_id)
        await running.until(lambda: not running.held)
    assert type(running.told[0]).__name__ == "Ready"
    assert type(running.told[-1]).__name__ == "Leaving"
