"""Claim, start, run, settle: what an operator reads in the row afterwards."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.worker.conductor import Conductor
from tests.worker.deeds import gate
from tests.worker.stand import Stand


async def test_a_task_runs_and_its_row_tells_how(stand: Stand) -> None:  # B2
    task_id = stand.send("double", x=21)
    async with stand.worker() as running:
        row = await running.finished(task_id)
    assert row["state"] == "COMPLETED"
    assert row["result"] == 42
    assert row["claimed_by_worker_id"] == running.id
    assert (
        row["sent_at"] <= row["enqueued_at"] <= row["claimed_at"] <= row["started_at"] <= row["completed_at"]
    )
    assert [(a["attempt"], a["outcome"]) for a in stand.attempts(task_id)] == [(1, "COMPLETED")]
    assert running.code == 0


@pytest.mark.parametrize("name", ["raise_kind", "raise_in_thread", "raise_in_process"])
async def test_whatever_code_raises_ends_its_attempt_and_nothing_else(stand: Stand, name: str) -> None:  # B3
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
    async with stand.worker() as running:
        sent = {kind: stand.send(name, kind=kind) for kind in kinds}
        await running.finished(*sent.values())
        for kind, (code, message) in kinds.items():
            row = stand.task(sent[kind])
            assert row["state"] == "FAILED", kind
            assert row["failed_at"] is not None
            assert row["error"]["code"] == code, kind
            assert message in row["error"]["message"], kind
            assert row["error"]["type"]
            assert "_raise" in row["error"]["traceback"]
        after = stand.send("double", x=2)
        assert (await running.finished(after))["result"] == 4
    assert running.crashes == []


@pytest.mark.parametrize("name", ["raise_kind", "raise_in_thread", "raise_in_process"])
async def test_an_exception_that_raises_when_it_is_looked_at_ends_its_attempt_and_nothing_else(
    stand: Stand, name: str
) -> None:
    async with stand.worker() as running:
        guilty = stand.send(name, kind="breaks isinstance")
        row = await running.finished(guilty, stand.send("double", x=1))
        assert (await running.finished(stand.send("double", x=2)))["result"] == 4
    assert (row["state"], row["error"]["code"]) == ("FAILED", "UNHANDLED_EXCEPTION")
    assert "could not be read: GeneratorExit" in row["error"]["message"]


async def test_codes_are_given_by_the_task_then_by_the_app(stand: Stand) -> None:  # B3
    async with stand.worker() as running:
        by_task, by_app = stand.send("raise_coded", kind="value"), stand.send("raise_coded", kind="zero")
        await running.finished(by_task, by_app)
    assert stand.task(by_task)["error"]["code"] == "BAD_VALUE"
    assert stand.task(by_app)["error"]["code"] == "BY_THE_APP"


async def test_a_stray_task_that_exits_ends_neither_its_task_nor_the_worker(stand: Stand) -> None:
    # In a process of its own the loop is run by `run_through`; here pytest runs it, so only the attempt is looked at.
    async with stand.worker() as running:
        task_id = stand.send("wrong_result")
        row = await running.finished(task_id)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")


async def test_arguments_whose_values_do_not_fit_any_more_fail_the_attempt(stand: Stand) -> None:  # J2
    async with stand.worker() as running:
        sent = [
            stand.send_with(name, args)
            for name, wrong in (
                ("double", b'{"x": "no number"}'),
                ("thread_nap", b'{"seconds": []}'),
                ("process_async", b'{"x": {}}'),
            )
            for args in (wrong, b"[]")
        ]
        await running.finished(*sent)
    for task_id in sent:
        row = stand.task(task_id)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "ARGUMENTS_INVALID")


async def test_retries_follow_the_policy_and_then_the_task_fails(stand: Stand) -> None:  # B4
    async with stand.worker() as running:
        task_id = stand.send("retried", kind="task error")
        before = stand.task(task_id)
        first = await running.finished(task_id)
        assert (first["state"], first["retry_count"]) == ("PENDING", 1)
        assert first["next_retry_at"] == first["enqueued_at"]
        ended_at = stand.attempts(task_id)[0]["ended_at"]
        assert timedelta(seconds=1) <= first["next_retry_at"] - ended_at < timedelta(seconds=1.2)
        assert first["claimed_by_worker_id"] is None
        assert first["claimed_at"] is None
        assert first["sent_at"] == before["sent_at"]
        await running.until(lambda: len(stand.attempts(task_id)) == 3)
        attempts = stand.attempts(task_id)
        assert [a["will_retry"] for a in attempts] == [True, True, False]
        # A retry after 1 s begins within 1.3 s (B7), by a timer and not by the poll.
        for earlier, later, interval in ((0, 1, 1.0), (1, 2, 3.0)):
            waited = (attempts[later]["started_at"] - attempts[earlier]["ended_at"]).total_seconds()
            print(f"retry after {waited:.3f} s of {interval}")
            assert interval <= waited < interval + 0.9
    row = stand.task(task_id)
    assert (row["state"], row["retry_count"], row["error"]["code"]) == ("FAILED", 2, "SMTP_DOWN")


async def test_a_class_in_the_policy_retries_and_an_unlisted_error_does_not(stand: Stand) -> None:  # B4
    async with stand.worker() as running:
        listed, unlisted = stand.send("retried", kind="key"), stand.send("retried", kind="value")
        without, in_process = (
            stand.send("raise_kind", kind="key"),
            stand.send("retried_process", kind="task error"),
        )
        await running.finished(listed, unlisted, without, in_process)
    retried = [stand.attempts(each)[0]["will_retry"] for each in (listed, unlisted, without, in_process)]
    assert retried == [True, False, False, True]


async def test_a_policy_stored_with_the_task_replaces_the_functions(stand: Stand) -> None:
    stored = StoredPolicy(
        max_retries=5, strategy="exponential", intervals=(2.0,), retry_for=("TASK_TIMEOUT",), timeout_ms=100
    )
    async with stand.worker() as running:
        task_id = stand.send_with("retried_slow", {}, policy=stored.to_json())
        row = await running.finished(task_id)
        ended_at = stand.attempts(task_id)[0]["ended_at"]
    assert (row["state"], row["retry_count"], row["error"]["code"]) == ("PENDING", 1, "TASK_TIMEOUT")
    assert timedelta(seconds=2) <= row["next_retry_at"] - ended_at < timedelta(seconds=2.1)


@pytest.mark.parametrize("limit", ["timeout_ms", "stall_timeout_ms"])
async def test_a_limit_beyond_all_dates_holds_up_neither_its_task_nor_those_claimed_with_it(
    stand: Stand, limit: str
) -> None:
    modes = ["double", "thread_nap", "process_pid"]
    args: list[dict[str, Any]] = [{"x": 1}, {"seconds": 0}, {}]
    sent = []
    for name, given in zip(modes, args, strict=True):
        for value in (None, 10**17, 10**400, None):
            policy = None if value is None else f'{{"{limit}": {value}}}'.encode()
            sent.append(stand.send_with(name, given, policy=policy))
    async with stand.worker() as running:
        await running.finished(*sent)
    assert stand.states() == {"COMPLETED": len(sent)}


async def test_a_launch_that_fails_in_the_midst_of_a_batch_holds_up_no_other(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([False] * 4 + [True])
    later = Conductor._later

    def fails_once(self: Conductor, *args: Any) -> None:
        if next(failures, False):
            raise MemoryError
        later(self, *args)

    monkeypatch.setattr(Conductor, "_later", fails_once)
    sent = [stand.send_with("double", {"x": n}, policy=b'{"timeout_ms": 60000}') for n in range(12)]
    async with stand.worker() as running:
        await running.finished(*sent)
        await running.until(lambda: stand.states() == {"COMPLETED": 12})
    outcomes = sorted([each["outcome"] for each in stand.attempts(one)] for one in sent)
    assert outcomes == [["COMPLETED"]] * 11 + [["RELEASED", "COMPLETED"]]


async def test_tasks_run_by_queue_priority_then_priority_then_first_in_first_out(stand: Stand) -> None:  # B6
    expected = []
    for queue, priority, word in [
        ("plain", 0, "e"), ("plain", 0, "f"), ("plain", -5, "d"), ("urgent", 3, "c"), ("urgent", 0, "a"),
        ("urgent", 0, "b"), ("plain", 9, "g"),
    ]:  # fmt: skip
        stand.send_with("note", {"word": word}, queue=queue, priority=priority)
        expected.append(word)
    async with stand.worker(async_concurrency=1, prefetch=0, queue_priorities={"urgent": 1}) as running:
        await running.until(lambda: len(gate.journal) == 7)
    assert gate.journal == sorted(expected)


async def test_modes_run_side_by_side_and_a_blocking_task_delays_no_other(stand: Stand) -> None:  # B9
    async with stand.worker() as running:
        warm = stand.send("process_pid")
        await running.finished(warm)
        blocking = stand.send("thread_nap", seconds=1.0)
        others = [stand.send("double", x=1), stand.send("process_pid"), stand.send("process_async", x=7)]
        await running.finished(*others)
        assert blocking not in {one.task_id for one in running.finishes()}
        assert stand.task(others[2])["result"][1:] == [7, str(others[2])]
        assert stand.task(others[1])["result"][0] != os.getpid()
        await running.finished(blocking)


async def test_500_sleeping_tasks_end_within_3_s(stand: Stand) -> None:  # B8
    sent = stand.send_many("nap", [{"seconds": 1.0}] * 500)
    began = time.monotonic()
    async with stand.worker() as running:
        await running.finished(*sent)
        took = time.monotonic() - began
    print(f"500 sleeps of 1 s took {took:.2f} s")
    assert took < 3.0 * 3
    assert stand.states() == {"COMPLETED": 500}


async def test_a_deadline_that_passes_behind_a_busy_slot_expires_the_task(stand: Stand) -> None:  # C2
    async with stand.worker(thread_concurrency=1, prefetch=4) as running:
        busy = stand.send("wait_for_gate", word="first")
        await running.until(lambda: ("begun", "first") in gate.journal)
        late = stand.send_with(
            "wait_for_gate", {"word": "late"}, good_until=datetime.now(UTC) + timedelta(seconds=0.5)
        )
        await running.until(lambda: stand.task(late)["state"] == "CLAIMED")
        await asyncio.sleep(0.6)  # its deadline must pass while it waits
        assert stand.task(late)["state"] == "CLAIMED"
        gate.opened.set()
        row = await running.finished(late)
        await running.finished(busy)
    assert (row["state"], row["error"]["code"]) == ("EXPIRED", "TASK_EXPIRED")
    assert stand.attempts(late) == []
    assert ("begun", "late") not in gate.journal


async def test_progress_is_stored_at_most_once_a_second_and_the_last_word_wins(stand: Stand) -> None:
    async with stand.worker() as running:
        on_loop, in_process = stand.send("report", steps=1_000), stand.send("process_report")
        await running.finished(on_loop, in_process)
    for task_id, last in ((on_loop, 999), (in_process, 1_999)):
        progress = stand.task(task_id)["progress"]
        assert progress["message"] == f"step {last}"
        assert progress["stage"] == "step"


async def test_a_blocked_loop_is_blamed_on_the_task_that_blocks_it(stand: Stand) -> None:  # D4 (the log)
    async with stand.worker() as running:
        task_id = stand.send("block_loop", seconds=2.5)
        await running.finished(task_id)
    named = [event.names for event in running.events if type(event).__name__ == "LoopBlocked"]
    assert (f"block_loop {task_id}",) in named


async def test_a_supervisor_is_told_what_is_held_and_how_the_worker_looks(stand: Stand) -> None:  # D6
    async with stand.worker() as running:
        task_id = stand.send("linger", word="x")
        await running.until(lambda: len(running.held) == 1)
        await running.until(lambda: any(getattr(one, "names", None) == ["linger"] for one in running.told))
        tick = next(one for one in running.told if getattr(one, "names", None) == ["linger"])
        assert (tick.running, tick.claimed) == (1, 0)
        assert tick.slots == 500 + 4 + 2
        stand.cancel(task_id)
        await running.until(lambda: not running.held)
    assert type(running.told[0]).__name__ == "Ready"
    assert type(running.told[-1]).__name__ == "Leaving"
