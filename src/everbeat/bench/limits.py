"""Measure drains of tasks with limits and serial keys, beside many waiting keys and beside an old snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Final

from msgspec.structs import replace

from everbeat.bench.environment import Bench, wait_until, workers
from everbeat.bench.sampling import FigureBound, Measurement, Sample
from everbeat.bench.throughput import drained, old_snapshot
from everbeat.client.task import Call

_KEYS: Final = 1_000
_FEW: Final = 100
_CHUNK: Final = 10_000
_SETTLED_S: Final = 600.0
_WAITING_QUEUE: Final = "waiting"
_TOMORROW: Final = timedelta(days=1)
_PLAIN: Final = "drain without limits"


def limit_measurements(bench: Bench, *, tasks: int, keys: int) -> Iterator[Measurement]:
    """Yield measurements of drains with limits, each beside a drain of plain tasks, and of their growth with waiting keys and dead rows."""
    program = bench.program
    kinds: dict[str, tuple[Callable[[int], Call[int]], float | None]] = {
        _PLAIN: (program.nothing.call, None),
        "drain, one limit with room": (program.limited.call, 0.7),
        f"drain, {_KEYS:,} keys with 3 permits each": (
            lambda number: program.keyed.call(number, number % _KEYS),
            0.35,
        ),
        f"drain, {_KEYS:,} serial keys": (partial(_serial, bench), None),
    }
    for name, (call, at_least) in kinds.items():
        beside = None if name == _PLAIN else _PLAIN
        yield _measurement(bench, name, call, tasks=tasks, beside=beside, at_least=at_least)
    for name, (call, _) in kinds.items():
        shown = f"{name}, beside an old snapshot"
        take = partial(_beside_snapshot, bench, shown, call, tasks=tasks, beside=name)
        yield Measurement(name=shown, take=take)
    for name in [*kinds][2:]:
        few, many = (f"{name}, beside {each:,} waiting keys" for each in (_FEW, keys))
        for shown, waiting, beside in ((few, _FEW, None), (many, keys, few)):
            yield _measurement(
                bench,
                shown,
                kinds[name][0],
                tasks=tasks,
                beside=beside,
                at_least=None if beside is None else 0.8,
                prepare=partial(_wait_with, bench, waiting),
            )


def _serial(bench: Bench, number: int) -> Call[int]:
    return bench.program.serial.with_options(serial=f"key-{number % _KEYS}").call(number)


def _measurement(
    bench: Bench,
    name: str,
    call: Callable[[int], Call[int]],
    *,
    tasks: int,
    beside: str | None,
    at_least: float | None,
    prepare: Callable[[], object] = lambda: None,
) -> Measurement:
    def take() -> Iterator[Sample]:
        yield Sample(
            name=name,
            value=drained(bench, tasks=tasks, call=call, prepare=prepare),
            unit="tasks/s",
            beside=beside,
            target=None if at_least is None else FigureBound(at_least=at_least),
        )
        bench.execute("truncate_tasks")

    return Measurement(name=name, take=take)


def _beside_snapshot(
    bench: Bench, name: str, call: Callable[[int], Call[int]], *, tasks: int, beside: str
) -> Iterator[Sample]:
    with old_snapshot(bench) as hold:
        measured = _measurement(bench, name, call, tasks=tasks, beside=beside, at_least=0.5, prepare=hold)
        samples = list(measured.take())  # the last statement waits for the snapshot
    yield from samples


def _wait_with(bench: Bench, keys: int) -> None:
    """Let as many keys wait: half of them at a closed limit, and half of them in serial lines whose first task is due tomorrow."""
    closed, later = (
        task.with_options(queue=_WAITING_QUEUE) for task in (bench.program.closed, bench.program.later)
    )
    with workers(bench, "--queues", _WAITING_QUEUE):
        wait_until(
            lambda: any(each.name == "closed" for each in bench.app.limits()),
            within_s=_SETTLED_S,
            what="the limit",
        )
        bench.app.set_limit("closed", concurrency=0)
        for first in range(0, keys, _CHUNK):
            numbers = range(first, min(keys, first + _CHUNK))
            bench.app.send_many(closed.call(number, number) for number in numbers if number % 2)
            bench.app.send_many(
                replace(later.with_options(serial=f"later-{number}").call(number), when=_TOMORROW)
                for number in numbers
                if number % 2 == 0
            )
        wait_until(
            lambda: bench.is_true("check_lines_wait"),
            within_s=_SETTLED_S,
            what="the lines to wait",
            every_s=0.2,
        )
