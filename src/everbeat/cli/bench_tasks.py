"""The program that the benchmark's worker runs: one task that does nothing."""

from __future__ import annotations

import os

from everbeat import App
from everbeat.cli.selection import SCHEMA_VARIABLE

app = App(schema=os.environ.get(SCHEMA_VARIABLE, "everbeat_bench"))


@app.task
async def nothing(number: int) -> int:
    """Answers what it was given."""
    return number
