"""The task functions that the benchmark measures, and its workers' apps, which are configured by environment variables.

`python -m everbeat.bench.program NAME COUNT SECONDS` runs one sender. The sender prints "ready", and sends tasks once it has read a line
from stdin, until it has sent COUNT tasks or SECONDS have passed. Finally, it prints the times at which it started and finished, by the
machine's monotonic clock, and how many tasks it sent.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Final

from msgspec import Struct

from everbeat import App, Limit, Task
from everbeat.bench import NATS_SCHEMA_VARIABLE, NATS_VARIABLE

PAYLOAD: Final = "x" * 100
_WARM_UP: Final = 5


class BenchProgram(Struct, frozen=True, kw_only=True):
    """An app with its tasks. `name` is the name of the program in this module."""

    name: str
    app: App
    nothing: Task[..., int]
    begun: Task[[], float]
    nap: Task[[float], None]
    limited: Task[..., int]
    keyed: Task[..., int]
    serial: Task[..., int]
    closed: Task[..., int]
    later: Task[..., int]

    @property
    def locator(self) -> str:
        """Return the app's locator for `everbeat worker`."""
        return f"everbeat.bench.program:{self.name}.app"


async def nothing(number: int, payload: str = PAYLOAD) -> int:
    """Return `number`. The arguments take a hundred bytes."""
    del payload
    return number


async def begun() -> float:
    """Return the time at which this code started, by the monotonic clock, which all processes on the machine share."""
    return time.monotonic()


async def limited(number: int, key: int = 0, payload: str = PAYLOAD) -> int:
    """Return `number`. The task functions that have a limit or a serial line share this code."""
    del key, payload
    return number


async def nap(seconds: float) -> None:
    """Sleep for `seconds`."""
    await asyncio.sleep(seconds)


def _program(name: str, app: App) -> BenchProgram:
    return BenchProgram(
        name=name,
        app=app,
        nothing=app.task(nothing),
        begun=app.task(begun),
        nap=app.task(on_crash="retry")(nap),
        limited=app.task(name="limited", limits=["with-room"])(limited),
        keyed=app.task(name="keyed", limits=["of-key"])(limited),
        serial=app.task(name="serial")(limited),
        closed=app.task(name="closed", limits=["closed"])(limited),
        later=app.task(name="later")(limited),
    )


LIMITS: Final = (
    Limit("with-room", concurrency=1_000_000),
    Limit("of-key", concurrency=3, key="key", fairness="round_robin"),
    Limit("closed", concurrency=1, key="key"),
)

by_postgres = _program(
    "by_postgres", App(schema=os.environ.get("EVERBEAT_SCHEMA", "everbeat_bench"), limits=LIMITS)
)
by_nats: BenchProgram | None = None
"""The same tasks in another schema, with workers notified by a NATS server. None if no NATS server is configured."""
if NATS_VARIABLE in os.environ:
    by_nats = _program(
        "by_nats",
        App(schema=os.environ[NATS_SCHEMA_VARIABLE], wake=os.environ[NATS_VARIABLE], limits=LIMITS),
    )


def main() -> None:
    """Send tasks to a queue without workers."""
    name, count, seconds = sys.argv[1:]
    program: BenchProgram = globals()[name]
    for _ in range(_WARM_UP):  # connects
        program.app.queues()
    print("ready", flush=True)
    sys.stdin.readline()
    started, sent = time.monotonic(), 0
    while sent < int(count) and time.monotonic() < started + float(seconds):
        program.nothing.send(sent)
        sent += 1
    print(started, time.monotonic(), sent, flush=True)
    program.app.close()


if __name__ == "__main__":
    main()
