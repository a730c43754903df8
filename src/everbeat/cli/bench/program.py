"""The program that the benchmark's workers run."""

from __future__ import annotations

import asyncio
import os
import time

from everbeat import App, WorkerConfig
from everbeat.cli.selection import SCHEMA_VARIABLE

app = App(
    schema=os.environ.get(SCHEMA_VARIABLE, "everbeat_bench"),
    worker=WorkerConfig(async_concurrency=2_000),  # room for a thousand that sleep
)

PAYLOAD = "x" * 100


@app.task
async def nothing(number: int, payload: str = PAYLOAD) -> int:
    """Answers what it was given; the arguments take a hundred bytes."""
    del payload
    return number


@app.task
async def begun() -> float:
    """When its code began, by the machine's monotonic clock, which all its processes share."""
    return time.monotonic()


@app.task(on_crash="retry")
async def nap(seconds: float) -> None:
    """Sleeps."""
    await asyncio.sleep(seconds)
