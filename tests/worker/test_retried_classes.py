"""Exception classes in a retry policy: they match what the code raises, and everbeat's own timeout."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat.domain.policy import TaskOptions
from everbeat.domain.retry import RetryPolicy
from tests.worker.deeds import gate
from tests.worker.stand import Stand


def policy(*listed: str | type[BaseException], timeout: str | None = None) -> bytes | None:
    retry = RetryPolicy(max_retries=1, intervals=["1s"], jitter=0, auto_retry_for=listed)
    return TaskOptions(retry=retry, timeout=timeout).stored(on_crash="fail").to_json()


@pytest.mark.parametrize("listed", [TimeoutError, OSError, Exception, BaseException])
async def test_a_class_that_timeout_error_is_retries_a_timeout(
    stand: Stand, listed: type[BaseException]
) -> None:  # J6
    async with stand.worker() as running:
        task_id = stand.send_with("nap", {"seconds": 60}, policy=policy(listed, timeout="200ms"))
        row = await running.finished(task_id)
        assert (row["state"], row["retry_count"], row["error"]["code"]) == ("PENDING", 1, "TASK_TIMEOUT")
        await running.until(lambda: len(stand.attempts(task_id)) == 2)
    assert [each["will_retry"] for each in stand.attempts(task_id)] == [True, False]
    assert stand.task(task_id)["error"]["code"] == "TASK_TIMEOUT"


@pytest.mark.parametrize(
    ("name", "args"), [("wait_for_gate", {"word": "w"}), ("chatter_in_process", {"seconds": 60})]
)
async def test_a_timeout_of_a_thread_or_a_process_is_retried_by_class(
    stand: Stand, name: str, args: dict[str, Any]
) -> None:  # J6
    async with stand.worker() as running:
        task_id = stand.send_with(name, args, policy=policy(TimeoutError, timeout="1s"))
        row = await running.finished(task_id)
        assert (row["state"], row["error"]["code"]) == ("PENDING", "TASK_TIMEOUT")
        stand.cancel(task_id)
        gate.opened.set()


@pytest.mark.parametrize("listed", [ValueError, ConnectionError, "SMTP_DOWN"])
async def test_a_class_that_timeout_error_is_not_leaves_a_timeout_final(
    stand: Stand, listed: str | type[BaseException]
) -> None:  # J6
    async with stand.worker() as running:
        task_id = stand.send_with("nap", {"seconds": 60}, policy=policy(listed, timeout="200ms"))
        row = await running.finished(task_id)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "TASK_TIMEOUT")


@pytest.mark.parametrize("name", ["raise_kind", "raise_in_thread", "raise_in_process"])
async def test_exception_retries_whatever_exception_the_code_raises(stand: Stand, name: str) -> None:  # J6
    exceptions = ["task error", "plain", "unprintable", "nul", "key", "breaks isinstance"]
    others = ["exit", "interrupt", "cancelled"]
    async with stand.worker() as running:
        sent = {
            kind: stand.send_with(name, {"kind": kind}, policy=policy(Exception))
            for kind in (*exceptions, *others)
        }
        await running.finished(*sent.values())
    retried = {kind: stand.attempts(task_id)[0]["will_retry"] for kind, task_id in sent.items()}
    assert retried == dict.fromkeys(exceptions, True) | dict.fromkeys(others, False)


async def test_base_exception_retries_what_is_no_exception(stand: Stand) -> None:  # J6
    async with stand.worker() as running:
        task_id = stand.send_with("raise_kind", {"kind": "exit"}, policy=policy(BaseException))
        row = await running.finished(task_id)
    assert (row["state"], row["retry_count"]) == ("PENDING", 1)


async def test_a_cancel_is_not_retried_by_any_class(stand: Stand) -> None:  # J6
    async with stand.worker() as running:
        task_id = stand.send_with("linger", {"word": "w"}, policy=policy(BaseException))
        await running.until(lambda: ("begun", "w") in gate.journal)
        stand.cancel(task_id)
        row = await running.finished(task_id)
    assert row["state"] == "CANCELLED"
