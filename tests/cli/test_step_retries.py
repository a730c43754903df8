"""Test how commands and the log show a task that waits for a step retry: the step, the retry and the error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from tests.cli.conftest import Command, RunningWorker

SHOP = """
    import asyncio
    from everbeat import App, Context, RetryPolicy

    app = App(schema={schema!r})

    class Refused(ConnectionError):
        pass

    async def charge(cents: int) -> int:
        raise Refused("the bank\\nrefused")

    @app.task
    async def order(ctx: Context, every: str) -> int:
        retry = RetryPolicy(max_retries=3, intervals=[every], jitter=0, auto_retry_for=[Refused])
        return await ctx.with_options(retry=retry).astep(charge, 100)
"""
ERROR = "UNHANDLED_EXCEPTION (shop.Refused): the bank"


@pytest.fixture
def bank(everbeat: Command, schema: str) -> None:
    everbeat.write("shop.py", SHOP.format(schema=schema))


def awaited(ask: Callable[[], str], pattern: str) -> str:
    """Repeat the command until its output matches, for at most 30 s."""
    until = time.monotonic() + 30
    while not re.search(pattern, answer := ask()):
        assert time.monotonic() < until, answer
        time.sleep(0.1)  # each repetition starts a command
    return answer


def test_a_long_wait_for_a_step_retry_shows_the_step_the_retry_and_the_error(  # J10
    everbeat: Command, bank: None, shop_worker: RunningWorker
) -> None:
    task_id = everbeat("send", "shop:app", "order", "every=1h").assert_code(0).out.strip()
    line = awaited(lambda: everbeat("tasks", "list").assert_code(0).out, r"PENDING .*charge")
    assert re.search(rf"PENDING .*retry 1 of 3 of step 'charge' in [\d.]+ \w+: {re.escape(ERROR)}", line)
    for page in ("explain", task_id), ("tasks", "show", task_id):
        assert re.search(
            rf"retry 1 of 3 of step 'charge' is due at .*, because its last try failed: {re.escape(ERROR)}\\nrefused",
            everbeat(*page).assert_code(0).out,
        )
    (reason,) = everbeat("explain", task_id, "--json").document["explanation"]["reasons"]
    assert (reason["code"], reason["blocked_by"]) == ("STEP_RETRY_DUE_LATER", "charge")
    shown = everbeat("tasks", "show", task_id, "--json").document
    assert reason["until"] == shown["enqueued_at"]
    assert shown["failed_try"] == {
        "step": "charge",
        "retry": 1,
        "max_retries": 3,
        "code": "UNHANDLED_EXCEPTION",
        "message": "the bank\nrefused",
        "type": "shop.Refused",
    }
    (logged,) = re.findall(r".*step_retry .*", shop_worker.log.read_text())
    assert "WARNING" in logged
    assert f"task_id={task_id} name=order attempt=1 code=UNHANDLED_EXCEPTION type=shop.Refused" in logged
    assert re.search(r"step=charge retry=1 max_retries=3 retry_in_s=3600", logged)


def test_a_short_wait_for_a_step_retry_is_shown_while_the_task_runs(  # J10
    everbeat: Command, bank: None, shop_worker: RunningWorker
) -> None:
    task_id = everbeat("send", "shop:app", "order", "every=4900ms").assert_code(0).out.strip()
    said = rf"it waits for retry \d of 3 of step 'charge', because the last try failed: {re.escape(ERROR)}"
    awaited(lambda: everbeat("explain", task_id).assert_code(0).out, rf"RUNNING .*{said}")
    awaited(
        lambda: everbeat("tasks", "list").assert_code(0).out, r"RUNNING .*retry \d of 3 of step 'charge': "
    )
    awaited(shop_worker.log.read_text, r"step_retry .*retry=1 max_retries=3 retry_in_s=4.9")
    assert "task_failure" not in shop_worker.log.read_text(), (
        "a failed step attempt must not end the task's attempt"
    )
