"""Measure how soon an idle worker starts a task, what an idle tree costs, and how soon work continues after a kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Final

from everbeat import Handle
from everbeat.bench.environment import BEST, Bench, pause, started, timed, wait_until, workers
from everbeat.bench.sampling import FigureBound, Measurement, Sample, percentile
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.identity import cpu_seconds, rss_bytes

P50: Final = "idle, send to code: p50"
P99: Final = "idle, send to code: p99"
ROUNDS: Final = 200
_WARM_UP: Final = 10
_ANSWER_S: Final = 60.0
_RECOVERY_S: Final = 120.0
_IDLE: Final = "idle"
_SLEEPERS: Final = 1_000
_WINDOW_S: Final = 5.0
_STATISTICS_S: Final = 11.0
"""An idle session reports its transactions to the server's statistics within ten seconds."""


def latency_measurements(bench: Bench) -> Iterator[Measurement]:
    """Yield the measurement of an idle worker's latency with default settings."""
    yield Measurement(name="latency", take=partial(_latency_samples, bench))


def _latency_samples(bench: Bench) -> Iterator[Sample]:
    bench.execute("truncate_tasks")
    with workers(bench):
        latencies_ms(bench, _WARM_UP)
        waits_ms = latencies_ms(bench, ROUNDS)
    yield Sample(name=P50, value=percentile(waits_ms, 50), unit="ms", target=FigureBound(at_most=2))
    yield Sample(name=P99, value=percentile(waits_ms, 99), unit="ms", target=FigureBound(at_most=5))


def latencies_ms(bench: Bench, rounds: int) -> list[float]:
    """Return, in milliseconds, the time of each round from the call to `send` to the first line of the task's code.

    Times are measured by the machine's monotonic clock.
    """
    clock, waits_ms = SystemClock(), []
    for _ in range(rounds):
        sent_at = clock.monotonic()
        waits_ms.append((bench.program.begun.send().result(timeout=_ANSWER_S) - sent_at) * 1_000)
    return waits_ms


def idle_measurements(bench: Bench, *, watch_s: float) -> Iterator[Measurement]:
    """Yield measurements of the cost of a supervisor and a worker while they are idle, and while they run a thousand sleeping tasks."""
    yield Measurement(name="idle", take=partial(_idle_samples, bench, watch_s))
    yield Measurement(name="sleeping tasks", take=partial(_sleeping_samples, bench, watch_s))


def _idle_samples(bench: Bench, watch_s: float) -> Iterator[Sample]:
    bench.execute("truncate_tasks")
    with workers(bench) as tree:
        latencies_ms(bench, 1)
        yield from _cost_samples(bench, tree, watch_s=watch_s, when=_IDLE)


def _sleeping_samples(bench: Bench, watch_s: float) -> Iterator[Sample]:
    """Measure with the best settings, so that all tasks are sleeping at the same time."""
    bench.execute("truncate_tasks")
    with workers(bench, *BEST.options) as tree:
        naps = bench.app.send_many(bench.program.nap.call(600.0) for _ in range(_SLEEPERS))
        wait_until(
            lambda: not bench.app.list_tasks(state=["PENDING", "CLAIMED"], limit=1),
            within_s=_ANSWER_S,
            what="all tasks to sleep",
        )
        yield from _cost_samples(bench, tree, watch_s=watch_s, when=f"{_SLEEPERS:,} sleeping tasks")
        for nap in naps:
            nap.cancel()


def _cost_samples(
    bench: Bench, tree: subprocess.Popen[bytes], *, watch_s: float, when: str
) -> Iterator[Sample]:
    pids = [tree.pid, *(worker.pid for worker in bench.app.list_active_workers())]
    window_s = min(watch_s, _WINDOW_S)

    def spent() -> tuple[float, float, float]:
        transactions, wal_bytes = bench.execute("measure_cost").fetchone()
        return float(transactions), float(wal_bytes), sum(cpu_seconds(pid) or 0.0 for pid in pids)

    pause(_STATISTICS_S)
    seen = [spent()]
    for _ in range(max(1, round(watch_s / _WINDOW_S))):
        pause(window_s)
        seen.append(spent())
    _, wal, cpu_s = (last - first for first, last in zip(seen[0], seen[-1], strict=True))
    # Autovacuum runs once per minute. Its transactions are counted as well, but the median leaves them out. Each window contains one
    # transaction of the benchmark itself.
    statements = median(after[0] - before[0] - 1 for before, after in pairwise(seen)) / window_s
    memory = sum(rss_bytes(pid) or 0 for pid in pids) / 1_000_000
    for name, value, unit, at_most in (
        ("statements", statements, "1/s", 2),
        ("WAL", wal / watch_s * 60 / 1_000, "kB/min", None),
        ("CPU of supervisor and worker", 100 * cpu_s / watch_s, "%", 0.5 if when == _IDLE else None),
        ("memory of both", memory, "MB", 100 if when == _IDLE else None),
    ):
        target = None if at_most is None else FigureBound(at_most=at_most)
        yield Sample(name=f"{when}: {name}", value=value, unit=unit, target=target)


def death_measurements(bench: Bench) -> Iterator[Measurement]:
    """Yield the measurement of recovery after a kill -9, and of the time from a worker's start to its first completed task."""
    yield Measurement(name="deaths", take=partial(_death_samples, bench))


def _death_samples(bench: Bench) -> Iterator[Sample]:
    def sample(name: str, took_s: float, at_most: float) -> Sample:
        return Sample(name=name, value=took_s, unit="s", target=FigureBound(at_most=at_most))

    bench.execute("truncate_tasks")
    with workers(bench):
        nap, pid = _sleeping(bench)
        yield sample("kill -9 of a worker process, to the next start", _killed(bench, nap, pid), 1)
    bench.execute("truncate_tasks")
    with started(bench) as tree:
        wait_until(bench.app.list_active_workers, within_s=_RECOVERY_S, what="a worker that is ready")
        nap, pid = _sleeping(bench)
        with workers(bench):
            took_s = _killed(bench, nap, tree.pid, pid)
            yield sample("kill -9 of a whole tree, to the next start", took_s, 3)
    bench.execute("truncate_tasks")
    bench.program.begun.send()
    with ExitStack() as tree_of_first_task:

        def run_first_task() -> None:
            tree_of_first_task.enter_context(started(bench))
            wait_until(
                lambda: bench.app.list_tasks(state=["COMPLETED"], limit=1),
                within_s=_RECOVERY_S,
                what="the first task",
            )

        yield sample("start of everbeat worker to its first task's end", timed(run_first_task), 1.5)


def _sleeping(bench: Bench) -> tuple[Handle[None], int]:
    """Start a long task. Return its handle and the id of the process in which it is running."""
    nap = bench.program.nap.send(600.0)
    wait_until(lambda: nap.info().state == "RUNNING", within_s=_RECOVERY_S, what="a task that runs")
    worker_id = nap.info().claimed_by_worker_id
    return nap, next(
        worker.pid for worker in bench.app.list_active_workers() if worker.worker_id == worker_id
    )


def _killed(bench: Bench, nap: Handle[None], *pids: int) -> float:
    """Kill these processes, wait until another worker runs the task, and cancel it. Return the seconds until the task ran again."""

    def holders() -> set[str | None]:
        return {task.claimed_by_worker_id for task in bench.app.list_tasks(state=["RUNNING"])}

    before = holders()

    def kill() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: holders() - before, within_s=_RECOVERY_S, what="the task to run again")

    took_s = timed(kill)
    nap.cancel()
    return took_s
