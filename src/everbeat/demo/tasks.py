"""The program of the demo's workers: an app like a user's, with three task functions that each count one file."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from typing import Final

from everbeat import App, NatsConfig, RecoveryConfig, WorkerConfig
from everbeat.demo import NATS_VARIABLE
from everbeat.demo.source_files import Counts, count_file


def _wake() -> NatsConfig | None:
    """Return the configuration for the demo's NATS server, or None if the demo runs without NATS."""
    url = os.environ.get(NATS_VARIABLE)
    # NATS redelivers the messages of a killed tree after seconds instead of ten minutes, because the demo waits for the last
    # acknowledgement.
    return None if url is None else NatsConfig(servers=[url], ack_wait="6s")


app = App(
    schema=os.environ.get("EVERBEAT_SCHEMA", "everbeat_demo"),
    # A frozen tree is noticed within seconds, instead of after the default of five minutes.
    recovery=RecoveryConfig(
        claimer_heartbeat_interval_ms=1_000,
        runner_heartbeat_interval_ms=1_000,
        claimed_stale_threshold_ms=3_000,
        running_stale_threshold_ms=3_000,
        check_interval_ms=1_000,
    ),
    worker=WorkerConfig(
        processes=2, async_concurrency=2, thread_concurrency=2, process_concurrency=1, prefetch=1, grace="5s"
    ),
    wake=_wake(),
    on_crash="retry",  # counting a file twice does no harm: only one result is stored
)

warnings.simplefilter(
    "ignore", SyntaxWarning
)  # invalid escapes in the counted code are not the demo's problem


@app.task
async def count_on_the_loop(path: str, pace_s: float) -> Counts:
    """Count one file without blocking the event loop, after `pace_s` seconds in which a fault can strike."""
    await asyncio.sleep(pace_s)
    return await asyncio.to_thread(count_file, path)


@app.task
def count_in_a_thread(path: str, pace_s: float) -> Counts:
    """Count one file in a thread."""
    time.sleep(pace_s)
    return count_file(path)


@app.task(run_in="process")
def count_in_a_process(path: str, pace_s: float) -> Counts:
    """Count one file in a task process."""
    time.sleep(pace_s)
    return count_file(path)


TASKS_IN_TURN: Final = (
    *(count_on_the_loop, count_in_a_thread) * 2,
    count_in_a_process,
    *(count_on_the_loop, count_in_a_thread) * 2,
    count_on_the_loop,
)
"""The tasks of the first ten files, the next ten, and so on."""
