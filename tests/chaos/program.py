"""The task code of a run: tasks of every type, each of which records its actions in an append-only file."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Final

import psutil
import psycopg
from psycopg import sql

from everbeat import (
    WORKER_CRASHED,
    App,
    Context,
    DatabaseError,
    FinalFailure,
    Limit,
    NatsConfig,
    RecoveryConfig,
    RetryPolicy,
    TaskError,
    WorkerConfig,
)
from tests.chaos.around_oracles import EMITTED
from tests.chaos.clock import boot_s
from tests.chaos.plan import BEAT_S, GRACE_S, THRESHOLD_S
from tests.chaos.task_oracles import MOST_CRASHES, SELF_KILL
from tests.chaos.tree_oracles import CANARY

# A dead worker's messages are redelivered soon after its death can be detected, instead of after the default of ten minutes.
_NATS = os.environ.get("CHAOS_NATS")
_WAKE = None if _NATS is None else NatsConfig(servers=[_NATS], ack_wait=THRESHOLD_S + 2.0)

app = App(
    os.environ["CHAOS_URL"],
    schema=os.environ["CHAOS_SCHEMA"],
    recovery=RecoveryConfig(
        claimer_heartbeat_interval_ms=round(BEAT_S * 1_000),
        runner_heartbeat_interval_ms=round(BEAT_S * 1_000),
        claimed_stale_threshold_ms=round(THRESHOLD_S * 1_000),
        running_stale_threshold_ms=round(THRESHOLD_S * 1_000),
        check_interval_ms=1_000,
        session_grace_ms=round(GRACE_S * 1_000),
        # These snapshots report whether every worker is connected to NATS.
        worker_state_snapshot_interval_ms=30_000 if _NATS is None else 1_000,
    ),
    worker=WorkerConfig(
        processes=int(os.environ.get("CHAOS_PROCESSES", "2")),
        async_concurrency=20,
        thread_concurrency=6,
        process_concurrency=2,
        prefetch=4,
        grace="4s",
        # With NATS, no task may wait for a poll. Such a task would count as stuck.
        poll_interval="1s" if _NATS is None else "60s",
    ),
    wake=_WAKE,
    limits=[Limit("shared", concurrency=8), Limit("rated", rate="50/s", burst=10)],
)

LISTED = RetryPolicy(max_retries=20, intervals=[1], jitter=0, auto_retry_for=[WORKER_CRASHED])
PATIENT: Final = RetryPolicy(
    max_retries=20, intervals=[1], jitter=0, auto_retry_for=[WORKER_CRASHED, DatabaseError, psycopg.Error]
)
STEPS: Final = 6

_NOTE: Final = sql.SQL("insert into {}.ledger (task_id, claim_id) values (%s, %s)").format(
    sql.Identifier(os.environ["CHAOS_SCHEMA"])
)


def effect(step: str) -> None:
    """Append one line to the effects file. A single write to a file opened for appending is atomic."""
    context = Context.current()
    line = {
        "task": str(context.task_id),
        "name": context.name,
        "attempt": context.attempt,
        "fence": context.fence,
        "claim": str(context.claim_id),
        "pid": os.getpid(),
        "step": step,
        "at": boot_s(),
    }
    file = os.open(os.environ["CHAOS_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


async def on_the_loop(seconds: float) -> str:
    effect("start")
    await asyncio.sleep(seconds)  # the work of this program is to take time
    effect("end")
    return CANARY


def blocking(seconds: float) -> str:
    effect("start")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)  # the work of this program is to take time
        Context.current().check_cancelled()
    effect("end")
    return CANARY


@app.task
async def quick(number: int, seconds: float, secret: str) -> str:
    return await on_the_loop(seconds)


@app.task(max_losses=100)
async def fails_when_lost(number: int, seconds: float, secret: str) -> str:
    return await on_the_loop(seconds)


@app.task(retry=LISTED, max_losses=100, max_crashes=100)
async def listed(number: int, seconds: float, secret: str) -> str:
    return await on_the_loop(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def again(number: int, seconds: float, secret: str) -> str:
    return await on_the_loop(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
def again_in_thread(number: int, seconds: float, secret: str) -> str:
    return blocking(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100, run_in="process")
def again_in_process(number: int, seconds: float, secret: str) -> str:
    return blocking(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
def forks(number: int, seconds: float, secret: str) -> str:
    """In the first attempt, fork a child that does nothing and outlives its worker. The run kills the child at the end."""
    effect("start")
    if Context.current().attempt == 1:
        worker = os.getpid()
        if os.fork() == 0:
            # The child writes its own line, because the worker might be killed right after the fork.
            line = {"pid": os.getpid(), "created": psutil.Process().create_time(), "worker": worker}
            with Path(os.environ["CHAOS_FORKED"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            while True:
                time.sleep(3_600)  # the child only has to exist
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)  # the work of this program is to take time
    effect("end")
    return CANARY


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def reports(number: int, seconds: float, secret: str) -> str:
    effect("start")
    for step in range(10):
        Context.current().progress("step", step / 10, f"step {step}")
        await asyncio.sleep(seconds / 10)  # the work of this program is to take time
    effect("end")
    return CANARY


@app.task(retry=PATIENT, max_losses=100, max_crashes=100)
async def stepped(number: int, seconds: float, secret: str) -> str:
    """Run in several steps. The next attempt continues with the interrupted step."""
    effect("start")
    async for step in Context.current().aresume("step", range(STEPS)):
        effect(f"step {step}")
        await asyncio.sleep(seconds / STEPS)  # the work of this program is to take time
    effect("end")
    return CANARY


@app.task(retry=PATIENT, max_losses=100, max_crashes=100)
def ledgered(number: int, seconds: float, secret: str) -> str:
    """Write a row to the ledger and complete the task in one transaction."""
    effect("start")
    context = Context.current()
    with (
        psycopg.connect(os.environ["CHAOS_URL"], connect_timeout=3) as connection,
        context.commit(connection) as completion,
    ):
        connection.execute(_NOTE, [context.task_id, context.claim_id])
        time.sleep(seconds)  # the work of this program is to take time
        effect("end")
        completion.result = CANARY
    return CANARY


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def lined(number: int, seconds: float, secret: str) -> str:
    """Run in a serial line, whose key the producer chooses."""
    return await on_the_loop(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100, limits=["shared"])
async def limited(number: int, seconds: float, secret: str) -> str:
    """Hold a permit that the other tasks of the limits compete for."""
    return await on_the_loop(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100, limits=["shared", "rated"])
def limited_in_thread(number: int, seconds: float, secret: str) -> str:
    return blocking(seconds)


@app.task(on_crash="retry", max_crashes=MOST_CRASHES, max_losses=100, run_in="process")
def poison(number: int, seconds: float, secret: str) -> str:
    effect("start")
    os._exit(SELF_KILL)


@app.task(on_crash="retry", max_crashes=MOST_CRASHES, max_losses=100)
def rude(number: int, seconds: float, secret: str) -> str:
    """Kill the whole worker process, including the other tasks in it."""
    effect("start")
    os._exit(SELF_KILL)


@app.task(
    retry=RetryPolicy(max_retries=20, intervals=[1], jitter=0, auto_retry_for=["FLAKY", WORKER_CRASHED]),
    max_losses=100,
)
def flaky(number: int, seconds: float, secret: str) -> str:
    effect("start")
    if Context.current().attempt == 1:
        raise TaskError("FLAKY", "not the first time")
    effect("end")
    return CANARY


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def cancelled(number: int, seconds: float, secret: str) -> str:
    return await on_the_loop(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def expiring(number: int, seconds: float, secret: str) -> str:
    return await on_the_loop(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def ticked(seconds: float) -> str:
    """Run for a tick of a schedule."""
    return await on_the_loop(seconds)


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def noticed(failure: FinalFailure) -> str:
    """Handle the final failure of another task."""
    return await on_the_loop(0.0)


@app.task(on_failure=noticed, labels={"kind": "handled"})
async def handled(number: int, seconds: float, secret: str) -> str:
    """Fail each time, also after a retry. Its code writes no effects, because it never completes."""
    raise TaskError("HANDLED", "as intended")


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def grown(seconds: float) -> str:
    """Run for a batch to which a task of this batch has added it."""
    return await on_the_loop(seconds)


@app.task(retry=PATIENT, max_losses=100, max_crashes=100)
async def member(number: int, seconds: float, secret: str) -> str:
    """Run for a batch. Some of these tasks let the batch grow, also when it is sealed."""
    effect("start")
    if number % 3 == 0:
        await Context.current().batch.asend(grown.call(seconds))
    await asyncio.sleep(seconds)  # the work of this program is to take time
    effect("end")
    return CANARY


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def closed() -> str:
    """Run when a batch has ended."""
    return await on_the_loop(0.0)


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def leaf(place: int, seconds: float) -> int:
    """Run for a gather."""
    await on_the_loop(seconds)
    return place


@app.task(retry=PATIENT, max_losses=100, max_crashes=100)
async def gathering(number: int, seconds: float, secret: str) -> str:
    """Gather children, and fail if the results are not theirs."""
    effect("start")
    found = await Context.current().agather(*(leaf.call(place, seconds / 2) for place in range(STEPS)))
    if found != tuple(range(STEPS)):
        raise TaskError("WRONG_RESULTS", f"gathered {found}")
    effect("end")
    return CANARY


@app.task(retry=PATIENT, max_losses=100, max_crashes=100)
async def streaming(number: int, seconds: float, secret: str) -> str:
    """Emit a stream of numbers."""
    effect("start")
    for item in range(EMITTED):
        await Context.current().aemit("numbers", item)
        await asyncio.sleep(seconds / EMITTED)  # the work of this program is to take time
    effect("end")
    return CANARY


for _overlap in ("allow", "skip", "buffer_one", "cancel_other"):
    app.schedule(f"every-second.{_overlap}", ticked.call(1.2), every="1s", overlap=_overlap)

WEIGHTS: Final = {
    quick: 10, fails_when_lost: 3, listed: 4, again: 4, again_in_thread: 4, again_in_process: 2, reports: 2, stepped: 3,
    ledgered: 3, lined: 2, poison: 0.2, rude: 0.1, flaky: 2, cancelled: 2, expiring: 1,
    limited: 2, limited_in_thread: 2,
}  # fmt: skip
"""The relative frequency with which a producer sends each task."""
NODE_TASKS: Final = (quick, again, again_in_thread, fails_when_lost, listed, flaky, stepped)
"""The tasks that can be workflow nodes."""
LONGEST_S: Final = {
    quick: 0.1, flaky: 0.0, poison: 0.0, rude: 0.0, fails_when_lost: 2.0, again_in_process: 2.0, ledgered: 0.5, lined: 0.5,
    limited: 0.5, limited_in_thread: 0.5,
}  # fmt: skip
