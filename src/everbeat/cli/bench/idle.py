"""What everbeat costs while nothing is to be done, and how soon it begins when something is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Final

from everbeat.cli.bench.crew import Program, workers
from everbeat.cli.bench.figures import Sample, Target, percentile
from everbeat.cli.bench.watch import Plain, pause, until
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.identity import cpu_seconds, rss_bytes
from everbeat.store.statement import compose

SLEEPERS: Final = 1_000
P50: Final = "idle, send to code: p50"
P99: Final = "idle, send to code: p99"
_NOTHING: Final = "idle"
_ANSWER_S: Final = 60.0
_WINDOW_S: Final = 5.0


def idle_figures(program: Program, connection: Plain, *, rounds: int, watch_s: float) -> Iterator[Sample]:
    """Latency by the machine's monotonic clock, from the call of send to the first line of the task's code; then the cost of waiting."""
    app, clock = program.app, SystemClock()
    connection.execute(compose("bench/forget", app.schema))
    with workers(app) as tree:
        for _ in range(10):
            program.begun.send().result(timeout=_ANSWER_S)
        waits_ms = []
        for _ in range(rounds):
            asked_at = clock.monotonic()
            waits_ms.append((program.begun.send().result(timeout=_ANSWER_S) - asked_at) * 1_000)
        yield Sample(name=P50, value=percentile(waits_ms, 50), unit="ms", target=Target(at_most=2))
        yield Sample(name=P99, value=percentile(waits_ms, 99), unit="ms", target=Target(at_most=5))
        yield from _cost(program, connection, tree, watch_s=watch_s, when=_NOTHING)
        naps = app.send_many(program.nap.call(600.0) for _ in range(SLEEPERS))
        until(
            lambda: not app.list_tasks(state=["PENDING", "CLAIMED"], limit=1),
            within_s=_ANSWER_S,
            what="sleepers that sleep",
        )
        yield from _cost(program, connection, tree, watch_s=watch_s, when=f"{SLEEPERS:,} sleeping tasks")
        for nap in naps:
            nap.cancel()


def _cost(
    program: Program, connection: Plain, tree: subprocess.Popen[bytes], *, watch_s: float, when: str
) -> Iterator[Sample]:
    app = program.app
    pids = [tree.pid, *(worker.pid for worker in app.list_active_workers())]

    def spent() -> tuple[float, float, float]:
        row = connection.execute(compose("bench/cost", app.schema)).fetchone()
        assert row is not None
        return float(row[0]), float(row[1]), sum(cpu_seconds(pid) or 0.0 for pid in pids)

    # What went before is told to the server's statistics when a session has been idle for ten seconds, at the latest.
    pause(11.0)
    seen = [spent()]
    for _ in range(max(1, round(watch_s / _WINDOW_S))):
        pause(min(watch_s, _WINDOW_S))
        seen.append(spent())
    _, wal, cpu_s = (last - first for first, last in zip(seen[0], seen[-1], strict=True))
    # The server looks after its tables once a minute, in transactions that count like any other: most windows have none of them.
    # Each window has one that asks for the figures.
    statements = median(after[0] - before[0] - 1 for before, after in pairwise(seen)) / min(
        watch_s, _WINDOW_S
    )
    yield Sample(name=f"{when}: statements", value=statements, unit="1/s", target=Target(at_most=2))
    yield Sample(name=f"{when}: WAL", value=wal / watch_s * 60 / 1_000, unit="kB/min")
    yield Sample(
        name=f"{when}: CPU of supervisor and worker",
        value=100 * cpu_s / watch_s,
        unit="%",
        target=Target(at_most=0.5) if when == _NOTHING else None,
    )
    memory = sum(rss_bytes(pid) or 0 for pid in pids) / 1_000_000
    yield Sample(
        name=f"{when}: memory of both",
        value=memory,
        unit="MB",
        target=Target(at_most=100) if when == _NOTHING else None,
    )
