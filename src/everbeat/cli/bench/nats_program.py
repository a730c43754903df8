"""The same task functions in a schema of their own, whose workers NATS tells of tasks.

What lives here: that app. What may not: functions of its own, which would be another program.
"""

from __future__ import annotations

import os

from everbeat import App, WorkerConfig
from everbeat.cli.bench import program
from everbeat.cli.bench.surroundings import NATS_SCHEMA_VARIABLE, NATS_VARIABLE

app = App(
    schema=os.environ.get(NATS_SCHEMA_VARIABLE, "everbeat_bench"),
    worker=WorkerConfig(async_concurrency=2_000),
    wake=os.environ.get(NATS_VARIABLE),
)

nothing = app.task(program.nothing.__wrapped__)
begun = app.task(program.begun.__wrapped__)
nap = app.task(on_crash="retry")(program.nap.__wrapped__)
