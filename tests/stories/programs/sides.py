"""A program of which two versions run side by side. `python -c "import sides; sides.send_on('name')"` sends its tasks."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from pathlib import Path

from sample_tasks import app, effect


@app.task(on_crash="retry", max_losses=100)
async def carry(n: int) -> int:
    effect("start")
    await asyncio.sleep(0.1)
    return n


@app.task
async def once(n: int) -> int:
    effect("start")
    await asyncio.sleep(0.01)
    return n


@app.task(on_crash="retry", max_losses=100)
async def newer(n: int) -> int:
    effect("start")
    return n


def send_on(*names: str, pause_s: float = 0.1) -> None:
    """Send one task of each name repeatedly until the gate "enough" opens; print the sent tasks."""
    enough = Path(os.environ["STORY_GATES"]) / f"enough {' '.join(names)}"
    for number in itertools.count():
        if enough.exists():
            return
        for name in names:
            print(name, app.send_by_name(name, {"n": number}).id, flush=True)
        time.sleep(pause_s)  # the load of the story
