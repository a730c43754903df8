"""How fast tasks are sent: one at a time, from a blocking and from an async program, and in bulk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from everbeat.cli.bench.ceiling import COPY, INSERT
from everbeat.cli.bench.crew import Program
from everbeat.cli.bench.figures import Sample, Target
from everbeat.cli.bench.watch import timed

AWAITED: Final = "await asend, one at a time"


def bulk_name(count: int) -> str:
    """The name of the figure of so many at once."""
    return f"send_many of {count:,}"


def send_figures(program: Program, *, singles: int, bulk: int) -> Iterator[Sample]:
    """Sends to a queue that nobody serves."""
    took_s = timed(lambda: _send(program, singles))
    yield Sample(
        name="send, one at a time",
        value=singles / took_s,
        unit="tasks/s",
        beside=INSERT,
        target=Target(at_least=0.6),
    )
    took_s = timed(lambda: asyncio.run(_asend(program, singles)))
    yield Sample(
        name=AWAITED,
        value=singles / took_s,
        unit="tasks/s",
        beside=INSERT,
        target=Target(at_least=0.6),
    )
    took_s = timed(lambda: program.app.send_many(program.nothing.call(number) for number in range(bulk)))
    yield Sample(
        name=bulk_name(bulk), value=bulk / took_s, unit="tasks/s", beside=COPY, target=Target(at_least=0.33)
    )


def _send(program: Program, count: int) -> None:
    for number in range(count):
        program.nothing.send(number)


async def _asend(program: Program, count: int) -> None:
    for number in range(count):
        await program.nothing.asend(number)
