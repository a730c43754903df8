"""An app with limits: a number of permits, rates, and a key. A counter outside of the program notices when they run."""

from __future__ import annotations

import asyncio
import json
import os

from sample_tasks import async_gate, effect

from everbeat import App, Limit, RecoveryConfig
from everbeat.config import WorkerConfig

app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    recovery=RecoveryConfig(**json.loads(os.environ.get("STORY_RECOVERY", "{}"))),
    worker=WorkerConfig(**json.loads(os.environ.get("STORY_WORKER", "{}"))),
    limits=[
        Limit("stripe", concurrency=20),
        Limit("tenant", concurrency=1, key="tenant"),
        Limit("smooth", rate="20/1s", burst=5),
        Limit("sliding", rate="20/1s", window="sliding"),
        Limit("frequent", rate="200/1s", burst=10),
    ],
)


@app.task(limits=["stripe"], on_crash="retry", max_crashes=50)
async def charge(number: int, seconds: float, gate: str = "") -> int:
    """Stay connected to the counter for this time, and then until a named gate is open. The counter notices the death of this process at once."""
    effect("start", number=number)
    reader, writer = await asyncio.open_unix_connection(os.environ["STORY_COUNTER"])
    await asyncio.sleep(seconds)  # the length of the call to the limited service
    if gate:
        await async_gate(gate)
    writer.write(b"e")  # the answer proves that the counter knows the end before the permit is free
    await reader.readexactly(1)
    writer.close()
    effect("end", number=number)
    return number


@app.task(limits=["tenant"])
async def serve(tenant: str, seconds: float) -> str:
    effect("start", tenant=tenant)
    await asyncio.sleep(seconds)  # the length of the call to the limited service
    effect("end", tenant=tenant)
    return tenant


@app.task(limits=["smooth"])
async def call_smoothly() -> None: ...


@app.task(limits=["sliding"])
async def call_in_window() -> None: ...


@app.task(limits=["frequent"])
async def call_often() -> None: ...
