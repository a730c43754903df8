"""How fast tasks are sent: one at a time, from a blocking and from an async program, and in bulk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from everbeat.cli.bench.ceiling import COPY, INSERT, plain_inserts
from everbeat.cli.bench.crew import Program
from everbeat.cli.bench.figures import Sample, Target
from everbeat.cli.bench.watch import Plain, timed
from everbeat.runtime.clock import SystemClock

AWAITED: Final = "await asend, one at a time"
_TURN: Final = 50


def bulk_name(count: int) -> str:
    """The name of the figure of so many at once."""
    return f"send_many of {count:,}"


def send_figures(program: Program, connection: Plain, *, singles: int, bulk: int) -> Iterator[Sample]:
    """Sends to a queue that nobody serves."""
    yield from _one_at_a_time(program, connection, singles)
    took_s = timed(lambda: program.app.send_many(program.nothing.call(number) for number in range(bulk)))
    yield Sample(
        name=bulk_name(bulk), value=bulk / took_s, unit="tasks/s", beside=COPY, target=Target(at_least=0.33)
    )


def _one_at_a_time(program: Program, connection: Plain, count: int) -> Iterator[Sample]:
    """In turns with plain inserts: from one second to the next a shared machine is another."""
    took_s = [0.0, 0.0, 0.0]
    clock = SystemClock()
    with plain_inserts(connection, program.app.schema) as insert, asyncio.Runner() as runner:
        for number in range(0, count, _TURN):
            began = clock.monotonic()
            insert(_TURN)
            inserted = clock.monotonic()
            for _ in range(_TURN):
                program.nothing.send(number)
            sent = clock.monotonic()
            runner.run(_asend(program, _TURN))
            moments = (began, inserted, sent, clock.monotonic())
            took_s = [
                took + after - before for took, (before, after) in zip(took_s, pairwise(moments), strict=True)
            ]
    plain, send, asend = (count / took for took in took_s)
    at_least = Target(at_least=0.6)
    yield Sample(name=INSERT, value=plain, unit="rows/s")
    yield Sample(name="send, one at a time", value=send, unit="tasks/s", beside=INSERT, target=at_least)
    yield Sample(name=AWAITED, value=asend, unit="tasks/s", beside=INSERT, target=at_least)


async def _asend(program: Program, count: int) -> None:
    for number in range(count):
        await program.nothing.asend(number)
