"""The tasks that the schedules of the stories send."""

from __future__ import annotations

from sample_tasks import app, async_gate, effect  # type: ignore[import-not-found]  # a program stands beside it

from everbeat import WORKER_CRASHED, Context, RetryPolicy

RETRY_S = 8


def note(step: str) -> None:
    tick = Context.current().tick
    effect(step, tick=None if tick is None else tick.isoformat())


@app.task
async def tick() -> None:
    note("start")


async def held(gate_name: str) -> None:
    note("start")
    try:
        await async_gate(gate_name)
    finally:
        note("end")


@app.task
async def wait_at(gate_name: str) -> None:
    await held(gate_name)


@app.task(retry=RetryPolicy(max_retries=3, intervals=[RETRY_S], jitter=0, auto_retry_for=[WORKER_CRASHED]))
async def wait_again_at(gate_name: str) -> None:
    await held(gate_name)


@app.task
async def fail() -> None:
    note("start")
    raise RuntimeError("as the story wants")
