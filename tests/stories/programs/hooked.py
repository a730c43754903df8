"""The user's program of the stories about recovery hooks: hooks record effects like tasks."""

from __future__ import annotations

import asyncio
import json
import os
import time
from datetime import timedelta
from pathlib import Path

from everbeat import App, Context, RecoveryConfig, WorkerConfig
from everbeat.recovery import Default, FailWithBackoff, RecoveryContext, Reschedule, Skip, SweepSummary

app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    recovery=RecoveryConfig(**json.loads(os.environ.get("STORY_RECOVERY", "{}"))),
    worker=WorkerConfig(**json.loads(os.environ.get("STORY_WORKER", "{}"))),
)


def note(step: str, task: object, **more: object) -> None:
    """Append one line; a single write to a file opened for appending is atomic."""
    file = os.open(os.environ["STORY_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(
            file, json.dumps({"step": step, "task": str(task), "pid": os.getpid(), **more}).encode() + b"\n"
        )
    finally:
        os.close(file)


def wait(name: str) -> None:
    note("start", Context.current().task_id)
    path = Path(os.environ["STORY_GATES"]) / name
    while not path.exists():
        time.sleep(0.01)  # a file also reaches the successor of a killed worker


@app.task
def plain(gate: str) -> None:
    wait(gate)


@app.task
def later(gate: str) -> None:
    wait(gate)


@app.task
def backoff(gate: str) -> None:
    wait(gate)


@app.task
def left(gate: str) -> None:
    wait(gate)


@app.task(run_in="process")
def left_alone(gate: str) -> None:
    wait(gate)


@app.task(run_in="process")
def brief() -> int:
    return os.getpid()


@app.task
def raising(gate: str) -> None:
    wait(gate)


@app.task
def hanging(gate: str) -> None:
    wait(gate)


@app.task
def murder(gate: str) -> None:
    wait(gate)


@app.on_recovery
def decide(context: RecoveryContext) -> Default | Skip:
    note(
        "asked",
        context.task_id,
        reason=context.reason,
        previous=context.previous_worker_id,
        sweeping=context.sweeping_worker_id,
        arguments=dict(app.info(context.task_id).arguments),
    )
    if context.name == "raising":
        raise ValueError("no idea")
    if context.name == "hanging":
        time.sleep(60)  # a hook that does not return in time
    if context.name == "murder":
        os._exit(9)
    return Skip() if context.name in ("left", "left_alone") else Default()


@app.on_recovery(task="later")
async def at_leisure(context: RecoveryContext) -> Reschedule:
    await asyncio.sleep(0)  # hooks may be asynchronous
    note("asked", context.task_id, arguments=dict((await app.ainfo(context.task_id)).arguments))
    return Reschedule(run_at=timedelta(seconds=1), attempts=0)


@app.on_recovery(task="backoff")
def again(context: RecoveryContext) -> FailWithBackoff:
    return FailWithBackoff()


@app.on_interrupted
async def interrupted(context: RecoveryContext) -> None:
    note("interrupted", context.task_id)


@app.on_recovered
def recovered(summary: SweepSummary) -> None:
    note("recovered", "", count=summary.recovered_count, workers=list(summary.worker_ids),
         tasks=[str(task_id) for task_id in summary.task_ids])  # fmt: skip
