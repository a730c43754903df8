"""Test exception classes in a retry policy: they match exceptions of the code and everbeat's own timeout."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat.domain.task.policy import TaskOptions
from everbeat.domain.task.retry import RetryPolicy
from tests.worker.harness import WorkerHarness
from tests.worker.sample_tasks import gate


def policy(*listed: str | type[BaseException], timeout: str | None = None) -> bytes | None:
    retry = RetryPolicy(max_retries=1, intervals=["1s"], jitter=0, auto_retry_for=listed)
    return TaskOptions(retry=retry, timeout=timeout).stored(on_crash="fail").to_json()


@pytest.mark.parametrize("listed", [TimeoutError, OSError, Exception, BaseException])
async def test_a_listed_base_class_of_timeout_error_retries_a_timeout(
    harness: WorkerHarness, listed: type[BaseException]
) -> None:  # J6
    async with harness.worker() as running:
        task_id = harness.send_with("nap", {"seconds": 60}, policy=policy(listed, timeout="200ms"))
        row = await running.finished(task_id)
        assert (row["state"], row["retry_count"], row["error"]["code"]) == ("PENDING", 1, "TASK_TIMEOUT")
        await running.until(lambda: len(harness.attempts(task_id)) == 2)
    assert [each["will_retry"] for each in harness.attempts(task_id)] == [True, False]
    assert harness.task(task_id)["error"]["code"] == "TASK_TIMEOUT"


@pytest.mark.parametrize(
    ("name", "args"), [("wait_for_gate", {"word": "w"}), ("chatter_in_process", {"seconds": 60})]
)
async def test_a_listed_timeout_error_retries_timeouts_of_threads_and_processes(
    harness: WorkerHarness, name: str, args: dict[str, Any]
) -> None:  # J6
    async with harness.worker() as running:
        task_id = harness.send_with(name, args, policy=policy(TimeoutError, timeout="1s"))
        row = await running.finished(task_id)
        assert (row["state"], row["error"]["code"]) == ("PENDING", "TASK_TIMEOUT")
        harness.cancel(task_id)
        gate.opened.set()


@pytest.mark.parametrize("listed", [ValueError, ConnectionError, "SMTP_DOWN"])
async def test_a_listed_class_unrelated_to_timeout_error_does_not_retry_a_timeout(
    harness: WorkerHarness, listed: str | type[BaseException]
) -> None:  # J6
    async with harness.worker() as running:
        task_id = harness.send_with("nap", {"seconds": 60}, policy=policy(listed, timeout="200ms"))
        row = await running.finished(task_id)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")


@pytest.mark.parametrize("name", ["raise_kind", "raise_in_thread", "raise_in_process"])
async def test_a_listed_exception_retries_every_exception_but_no_exit(
    harness: WorkerHarness, name: str
) -> None:  # J6
    exceptions = ["task error", "plain", "unprintable", "nul", "key", "breaks isinstance"]
    others = ["exit", "interrupt", "cancelled"]
    async with harness.worker() as running:
        sent = {
            kind: harness.send_with(name, {"kind": kind}, policy=policy(Exception))
            for kind in (*exceptions, *others)
        }
        await running.finished(*sent.values())
    retried = {kind: harness.attempts(task_id)[0]["will_retry"] for kind, task_id in sent.items()}
    assert retried == dict.fromkeys(exceptions, True) | dict.fromkeys(others, False)


async def test_a_listed_base_exception_retries_a_system_exit(harness: WorkerHarness) -> None:  # J6
    async with harness.worker() as running:
        task_id = harness.send_with("raise_kind", {"kind": "exit"}, policy=policy(BaseException))
        row = await running.finished(task_id)
    assert (row["state"], row["retry_count"]) == ("PENDING", 1)


async def test_a_cancel_is_not_retried_for_any_listed_class(harness: WorkerHarness) -> None:  # J6
    async with harness.worker() as running:
        task_id = harness.send_with("linger", {"word": "w"}, policy=policy(BaseException))
        await running.until(lambda: ("begun", "w") in gate.journal)
        harness.cancel(task_id)
        row = await running.finished(task_id)
    assert row["state"] == "CANCELLED"
