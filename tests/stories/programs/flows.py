"""The user's program of the stories about workflows: tasks that follow their arguments and record effects."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from everbeat import App, RecoveryConfig, TaskError
from everbeat.config import WorkerConfig

app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    recovery=RecoveryConfig(**json.loads(os.environ.get("STORY_RECOVERY", "{}"))),
    worker=WorkerConfig(**json.loads(os.environ.get("STORY_WORKER", "{}"))),
    on_crash="retry",
)


@app.task(name="work", max_losses=100, max_crashes=100)
async def work(
    name: str, fails: bool = False, value: Any = None, pace: float = 0.0, given: dict[str, Any] | None = None
) -> Any:
    """End as the arguments say, after `pace` seconds."""
    if pace:
        await asyncio.sleep(pace)
    if fails:
        raise TaskError("BROKEN", f"{name} was told to")
    return value


@app.task(name="picky")
async def picky(gate: str) -> str:
    """Fail until the story opens the gate."""
    if not (Path(os.environ["STORY_GATES"]) / gate).exists():
        raise TaskError("CLOSED", f"{gate} is closed")
    return gate
