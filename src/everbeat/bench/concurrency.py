"""Measure how many tasks 1 to 16 processes send or run at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import Final

from everbeat.bench.environment import DEFAULTS, Bench, pause, workers
from everbeat.bench.sampling import FigureBound, Measurement, Sample
from everbeat.bench.throughput import drain_name, drained
from everbeat.errors import WorkerError

IDLE_QUEUE: Final = "elsewhere"
"""The queue of a worker that stays idle while others send. It listens all the time."""
QUIET_S: Final = 1.0
_PROCESSES: Final = (1, 2, 4, 8, 16)
_SEND_S: Final = 2.0


def sender_measurements(bench: Bench) -> Iterator[Measurement]:
    """Yield the measurements of 1 to 16 processes that each send one task at a time, alone and next to an idle worker."""
    for is_listening in (False, True):
        name = "senders next to an idle worker" if is_listening else "senders"
        yield Measurement(name=name, take=partial(_sender_samples, bench, is_listening=is_listening))


def _sender_samples(bench: Bench, *, is_listening: bool) -> Iterator[Sample]:
    rates: dict[int, float] = {}
    with workers(bench, "--queues", IDLE_QUEUE) if is_listening else nullcontext():
        for senders in _PROCESSES:
            bench.execute("truncate_tasks")
            pause(QUIET_S)
            rates[senders] = send_rate(bench, senders=senders, seconds=_SEND_S)
    where = ", next to an idle worker" if is_listening else ""
    for senders, rate in rates.items():
        alone = f"{senders} sender{'' if senders == 1 else 's'}"
        target = FigureBound(at_least=0.8) if is_listening else None
        beside = alone if is_listening else None
        yield Sample(name=f"{alone}{where}", value=rate, unit="tasks/s", beside=beside, target=target)
    yield from _most_beside_best(rates, f"senders{where}")


def worker_measurements(bench: Bench, *, tasks: int) -> Iterator[Measurement]:
    """Yield the measurement of drains with 1 to 16 worker processes."""
    yield Measurement(name="workers", take=partial(_worker_samples, bench, tasks=tasks))


def _worker_samples(bench: Bench, *, tasks: int) -> Iterator[Sample]:
    rates = {number: drained(bench, tasks=tasks, processes=number) for number in _PROCESSES}
    for number, rate in rates.items():
        yield Sample(name=drain_name(DEFAULTS, number), value=rate, unit="tasks/s")
    yield from _most_beside_best(rates, "worker processes")


def _most_beside_best(rates: Mapping[int, float], what: str) -> Iterator[Sample]:
    """Compare the rate of the most processes with the best rate of fewer processes."""
    most, fewer = _PROCESSES[-1], _PROCESSES[:-1]
    best = f"best of 1 to {fewer[-1]} {what}"
    yield Sample(name=best, value=max(rates[number] for number in fewer), unit="tasks/s")
    yield Sample(
        name=f"{most} {what}, beside the best",
        value=rates[most],
        unit="tasks/s",
        beside=best,
        target=FigureBound(at_least=0.9),
    )


def send_rate(bench: Bench, *, senders: int, seconds: float = inf, each: int = sys.maxsize) -> float:
    """Send from several processes at once, one task at a time. Return the number of sends per second.

    A process ends after `seconds`, or when it has sent `each` tasks.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_sender(bench, each, seconds)) for _ in range(senders)]
        if any(_line(process) != "ready\n" for process in processes):
            raise WorkerError("A benchmark sender did not start.", fix="see its messages above.")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("begin\n")
            process.stdin.flush()
        ends = [tuple(map(float, _line(process).split())) for process in processes]
    if not all(len(each) == 3 for each in ends):
        raise WorkerError("A benchmark sender failed.", fix="see its messages above.")
    took_s = max(ended for _, ended, _ in ends) - min(started for started, _, _ in ends)
    return sum(sent for _, _, sent in ends) / took_s


@contextmanager
def _sender(bench: Bench, count: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "everbeat.bench.program", bench.program.name, str(count), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
