"""Measure how soon a worker that is half busy starts a task."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final
from uuid import UUID

from everbeat.bench.environment import Bench, pause, wait_until, workers
from everbeat.bench.latency import latencies_ms
from everbeat.bench.sampling import FigureBound, Measurement, Sample, percentile
from everbeat.runtime.clock import SystemClock

_NAME: Final = "begun"
_WARM_UP: Final = 10
_DRAIN_S: Final = 900.0
_LOAD_S: Final = 5.0
_TURN_S: Final = 0.01
"""The time between two batches of sends, in seconds."""


def load_measurements(bench: Bench, *, tasks: int) -> Iterator[Measurement]:
    """Yield the measurement of the latency at half of the highest rate, which a drain of this many tasks determines."""
    yield Measurement(name="half load", take=partial(_samples, bench, tasks))


def _samples(bench: Bench, tasks: int) -> Iterator[Sample]:
    clock, begun = SystemClock(), bench.program.begun
    bench.execute("truncate_tasks")
    with workers(bench):
        latencies_ms(bench, _WARM_UP)
        bench.execute("truncate_tasks")
        bench.app.send_many(begun.call() for _ in range(tasks))
        _wait_for_all(bench)
        highest_per_s = float(bench.execute("measure_rate", {"name": _NAME}).fetchone()[0])
        each = max(1, round(highest_per_s / 2 * _TURN_S))
        sent_at: dict[UUID, float] = {}
        began_at = clock.monotonic()
        for turn in range(round(_LOAD_S / _TURN_S)):
            pause(max(0.0, began_at + turn * _TURN_S - clock.monotonic()))
            at = clock.monotonic()
            sent_at |= {handle.id: at for handle in bench.app.send_many(begun.call() for _ in range(each))}
        sent_per_s = len(sent_at) / (clock.monotonic() - began_at)
        _wait_for_all(bench)
    results = bench.execute("list_results", {"name": _NAME}).fetchall()
    waits_ms = [(begun_at - sent_at[id_]) * 1_000 for id_, begun_at in results if id_ in sent_at]
    yield Sample(name="at half load: tasks sent", value=sent_per_s, unit="tasks/s")
    yield Sample(name="at half load, send to code: p50", value=percentile(waits_ms, 50), unit="ms")
    p99 = percentile(waits_ms, 99)
    yield Sample(name="at half load, send to code: p99", value=p99, unit="ms", target=FigureBound(at_most=20))


def _wait_for_all(bench: Bench) -> None:
    wait_until(
        lambda: not bench.is_true("find_unfinished_task"), within_s=_DRAIN_S, what="all tasks to finish"
    )
