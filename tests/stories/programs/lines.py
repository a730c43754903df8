"""An app with serial lines: by queue, by task function and by key."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sample_tasks import async_gate, die, effect, gate

from everbeat import App, QueueConfig, RecoveryConfig, RetryPolicy, TaskError
from everbeat.config import WorkerConfig

app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    recovery=RecoveryConfig(**json.loads(os.environ.get("STORY_RECOVERY", "{}"))),
    worker=WorkerConfig(**json.loads(os.environ.get("STORY_WORKER", "{}"))),
    queues=[QueueConfig("ledger", serial=True), QueueConfig("unserved")],
)


@app.task(queue="ledger", on_crash="retry")
async def book(number: int, gate_name: str | None = None) -> int:
    effect("start", number=number)
    if gate_name is not None:
        await async_gate(gate_name)
    effect("end", number=number)
    return number


@app.task(serial=True, on_crash="retry")
def close_month(number: int, gate_name: str | None = None) -> int:
    effect("start", number=number)
    if gate_name is not None:
        gate(gate_name)
    effect("end", number=number)
    return number


@app.task(
    on_crash="retry", retry=RetryPolicy(max_retries=2, intervals=[2], jitter=0, auto_retry_for=["NOT_YET"])
)
async def pay(number: int, gate_name: str | None = None, *, fails: int = 0) -> int:
    """Fail `fails` times, then wait for the gate."""
    effect("start", number=number)
    if sum(line["step"] == "failed" and line["number"] == number for line in seen()) < fails:
        effect("failed", number=number)
        raise TaskError("NOT_YET", "not this time")
    if gate_name is not None:
        await async_gate(gate_name)
    effect("end", number=number)
    return number


@app.task(on_crash="retry", max_crashes=2)
async def poison(number: int) -> None:
    effect("start", number=number)
    die("signal")


@app.task
async def refuse(number: int) -> None:
    effect("start", number=number)
    raise TaskError("REFUSED", "never")


def seen() -> list[dict[str, object]]:
    """Return the effects of all tasks so far."""
    lines = Path(os.environ["STORY_EFFECTS"]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
