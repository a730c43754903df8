"""Tasks whose sends, deaths and ticks the metrics count."""

from __future__ import annotations

import os
import signal

from sample_tasks import app, quick


@app.task
async def fan_out(count: int) -> None:
    """Send `count` tasks."""
    for number in range(count):
        await quick.asend(number)


@app.task(run_in="process", on_crash="retry", max_crashes=2)
def deadly() -> None:
    """Kill the own process in each attempt."""
    os.kill(os.getpid(), signal.SIGKILL)


app.schedule("tock", quick.call(0), every="1s")
