"""Tasks that continue to run when their worker must stop: one for each executor and policy."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from sample_tasks import app, effect, gate  # type: ignore[import-not-found]  # a program stands beside it

from everbeat import RetryPolicy

LISTED = RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=["WORKER_STOPPED"])

POLICIES: dict[str, dict[str, Any]] = {
    "fail": {"on_crash": "fail"},
    "retry": {"on_crash": "retry"},
    "listed": {"on_crash": "fail", "retry": LISTED},
    "stop_retry": {"on_crash": "fail", "on_stop": "retry"},
    "stop_fail": {"on_crash": "retry", "on_stop": "fail"},
}


async def polite(gate_name: str) -> None:
    effect("start")
    try:
        await asyncio.to_thread(gate, gate_name)
    finally:
        effect("end")


async def stubborn(gate_name: str) -> None:
    effect("start")
    waiting = asyncio.ensure_future(asyncio.to_thread(gate, gate_name))
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            effect("told")
    effect("end")


def blocked(gate_name: str) -> None:
    effect("start")
    gate(gate_name)
    effect("end")


TASKS = {
    (kind, policy): app.task(name=f"{kind}_{policy}", **options, **place)(code)
    for policy, options in POLICIES.items()
    for kind, code, place in (
        ("async", polite, {}),
        ("stubborn", stubborn, {}),
        ("thread", blocked, {"run_in": "thread"}),
        ("process", blocked, {"run_in": "process"}),
    )
}


@app.task(run_in="process", on_crash="retry", on_stop="fail")
def deaf_process(gate_name: str) -> None:
    """Ignore every signal that can be ignored, and every exception that a stop raises."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    effect("start")
    while True:
        try:
            gate(gate_name)
            return
        except BaseException:  # noqa: BLE001 - the misbehaviour under test
            effect("told")
