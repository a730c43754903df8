"""Test steps with their own retry and timeout: they are called again as their policy says, after durable waits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.worker.effects import effects
from tests.worker.harness import WorkerHarness
from tests.worker.run_modes import SOME_MODES
from tests.worker.test_steps import PROGRAM, ended, make_due, send, steps, suspended


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_a_failed_step_with_retries_is_called_again_in_the_same_attempt(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:  # J5
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = send(harness, f"retry_step_{mode}", tmp_path, fails=2, every="1s")
        row = await ended(running, task_id)
    assert (row["state"], row["result"], row["retry_count"]) == ("COMPLETED", ["reached", 1], 0), row["error"]
    assert effects(tmp_path) == ["try"] * 3
    assert steps(harness, task_id) == [
        ("sleep", "reach#1/retry", "DONE"), ("sleep", "reach#1/retry#2", "DONE"), ("step", "reach", "DONE")
    ]  # fmt: skip


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_a_long_wait_before_a_step_retry_holds_no_slot(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = send(harness, f"retry_step_{mode}", tmp_path, fails=2, every="1h")
        for tries in (1, 2):
            await running.until(lambda tries=tries: harness.task(task_id)["attempt"] == tries)
            await suspended(running, task_id)
            assert effects(tmp_path) == ["try"] * tries
            make_due(harness, task_id)
        row = await ended(running, task_id)
    assert (row["state"], row["result"], row["retry_count"]) == ("COMPLETED", ["reached", 3], 0)
    assert [one["outcome"] for one in harness.attempts(task_id)] == ["SUSPENDED", "SUSPENDED", "COMPLETED"]


async def test_an_attempt_that_begins_during_a_step_retry_wait_waits_for_the_rest(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "retry_step_on_loop", tmp_path, fails=1, every="1h")
        await suspended(running, task_id)
        harness.query("update {schema}.tasks set enqueued_at = now() where id = %s returning 1", task_id)
        harness.query("select pg_notify(%s, 't:default')", harness.target.channel)
        await running.until(lambda: harness.task(task_id)["attempt"] == 2)
        await suspended(running, task_id)
        assert effects(tmp_path) == ["try"]
        make_due(harness, task_id)
        assert (await ended(running, task_id))["result"] == ["reached", 3]


async def test_a_step_without_retries_left_raises_its_last_exception(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "retry_step_in_thread", tmp_path, fails=9, every="1s"))
    assert (row["state"], row["error"]["type"]) == ("FAILED", "ConnectionError")
    assert "Step 'reach' failed 3 times" in row["error"]["traceback"]
    assert effects(tmp_path) == ["try"] * 3


async def test_a_step_retry_does_not_call_recorded_inner_steps_again(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "retry_nested_steps", tmp_path))
    assert (row["state"], row["result"]) == ("COMPLETED", [3])
    assert effects(tmp_path) == ["charge 1", "charge 2", "try", "try"]


@pytest.mark.parametrize(
    ("what", "kind", "message", "done"),
    [
        ("timeout", "TimeoutError", "Step 'hang' of task 'misuse_step_options' ran longer than its timeout of 200ms", ["try", "left"] * 2),
        ("own", "TimeoutError", "of its own", ["try"]),
        ("thread", "PayloadError", "Step 'pack' .* has a timeout, but its function is not async", []),
        ("unlisted", "ValueError", "no", ["try"]),
        ("code", "KeyError", "no", ["try"] * 3),
        ("retry", "ConfigurationError", "retry of Context.with_options = 3: must be a RetryPolicy", []),
        ("length", "ConfigurationError", "timeout of Context.with_options = 0", []),
    ],
)  # fmt: skip
async def test_a_step_with_options_raises_timeouts_and_invalid_options(
    harness: WorkerHarness, tmp_path: Path, what: str, kind: str, message: str, done: list[str]
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "misuse_step_options", tmp_path, what=what))
    assert row["error"]["type"].endswith(kind), row["error"]
    assert re.search(message, row["error"]["message"]), row["error"]["message"]
    assert effects(tmp_path) == done
