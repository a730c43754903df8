"""The program that the demo's workers run: an app like any user's, and three tasks that count one file each.

What lives here: that app. What may not: anything that knows of kills; only the pace is the demo's.
"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from typing import Final

from everbeat import App, NatsConfig, RecoveryConfig, WorkerConfig
from everbeat.cli.demo.count import Counts, count_file
from everbeat.cli.demo.plan import NATS_VARIABLE


def _wake() -> NatsConfig | None:
    """The NATS server of this demo, if it is to have one."""
    url = os.environ.get(NATS_VARIABLE)
    # What a killed tree had in hand comes again after seconds, not after ten minutes: the demo waits for the last acknowledgement.
    return None if url is None else NatsConfig(servers=[url], ack_wait="6s")


app = App(
    schema=os.environ.get("EVERBEAT_SCHEMA", "everbeat_demo"),
    # Deaths are noticed by age after seconds, not minutes: nobody wants to watch a frozen tree for five of them.
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
    on_crash="retry",  # counting a file twice harms nobody: only one count is kept
)

warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in foreign code are not ours to report


@app.task
async def count_on_the_loop(path: str, pace_s: float) -> Counts:
    """Counts one file without keeping the event loop; waits `pace_s` first, so that a kill finds it running."""
    await asyncio.sleep(pace_s)
    return await asyncio.to_thread(count_file, path)


@app.task
def count_in_a_thread(path: str, pace_s: float) -> Counts:
    """As above, in a thread."""
    time.sleep(pace_s)
    return count_file(path)


@app.task(run_in="process")
def count_in_a_process(path: str, pace_s: float) -> Counts:
    """As above, in a process of its own."""
    time.sleep(pace_s)
    return count_file(path)


DEAL: Final = (
    *(count_on_the_loop, count_in_a_thread) * 2,
    count_in_a_process,
    *(count_on_the_loop, count_in_a_thread) * 2,
    count_on_the_loop,
)
"""How files are dealt to the three, one after the other, and then from the first again."""
