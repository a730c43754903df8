"""A program whose tasks fail in every way, with failure handlers that record their argument."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import sample_tasks
from sample_tasks import async_gate, effect, gate

from everbeat import Cancel, Context, FinalFailure, RetryPolicy, TaskError

app = sample_tasks.app


def told(failure: FinalFailure) -> None:
    effect(
        "told", of=str(failure.task_id), state=failure.state, code=failure.error.code, fence=failure.fence,
        attempt=failure.attempt, key=failure.key, arguments=dict(failure.arguments or {}), omitted=failure.arguments_omitted, node=failure.node,
        workflow=None if failure.workflow_id is None else str(failure.workflow_id),
    )  # fmt: skip


@app.task(queue="alerts", priority=-5)
async def alert(failure: FinalFailure) -> None:
    told(failure)


@app.task(run_in="process", on_crash="retry", max_crashes=50)
def careful(ctx: Context, failure: FinalFailure) -> None:
    effect("begins", of=str(failure.task_id))
    gate("careful")
    told(failure)


@app.task
def in_thread(failure: FinalFailure) -> None:
    told(failure)


@app.task(on_failure=alert)
async def broken(number: int, text: str = "") -> None:
    raise TaskError("BROKEN", "it is broken", {"number": number})


@app.task(
    on_failure=in_thread,
    run_in="process",
    retry=RetryPolicy(max_retries=2, intervals=[1], jitter=0, auto_retry_for=["BROKEN"]),
)
def stubborn() -> None:
    effect("start")
    raise TaskError("BROKEN", "again")


@app.task(on_failure="alert", timeout="0.2s")
async def slow() -> None:
    await async_gate("never")


@app.task(on_failure=alert.with_options(queue="urgent"), run_in="process")
def fragile() -> None:
    effect("start")
    gate("fragile")


@app.task(on_failure=careful, run_in="process", on_crash="retry", max_crashes=2)
def deadly() -> None:
    effect("start")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@app.task(on_failure=careful)
async def watched() -> None:
    raise TaskError("WATCHED")


@app.task
async def plain() -> None:
    raise TaskError("PLAIN")


@app.task(on_failure=alert)
async def works(value: Any = None) -> Any:
    return value


@app.task(on_failure=alert)
async def cancelled() -> None:
    raise Cancel("no longer needed")
