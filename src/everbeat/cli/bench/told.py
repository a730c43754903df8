"""How workers are told of tasks, measured in one run: by PostgreSQL's NOTIFY, and by NATS beside it.

What lives here: latency, sends and drains of both, in turns. What may not: a NATS server, which is the user's own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from everbeat.cli.bench.crew import PROGRAM, Program, workers
from everbeat.cli.bench.drains import drained, is_left, verified
from everbeat.cli.bench.figures import Sample, percentile
from everbeat.cli.bench.watch import Plain, pause, until
from everbeat.errors import WorkerError
from everbeat.runtime.clock import SystemClock
from everbeat.store.statement import compose

NATS_PROGRAM: Final = "everbeat.cli.bench.nats_program"
CLIENTS: Final = 8

_IDLE_QUEUE: Final = "elsewhere"
_TURN: Final = 20
_WARM_UP: Final = 10
_ANSWER_S: Final = 60.0
_SEND_S: Final = 300.0
_CALM_S: Final = 1.0


class Side(NamedTuple):
    """One way in which workers are told; `module` is the program that a worker or a sender loads."""

    words: str
    module: str
    program: Program
    uses_messages: bool


def told_figures(
    by_postgres: Program, by_nats: Program, connection: Plain, *, rounds: int, sends: int, tasks: int
) -> Iterator[Sample]:
    """Latency, sends and drains, each of both sides. Raises WorkerError unless each task ran once."""
    sides = (
        Side("PostgreSQL", PROGRAM, by_postgres, uses_messages=False),
        Side("NATS", NATS_PROGRAM, by_nats, uses_messages=True),
    )
    yield from _latencies(sides, connection, rounds=rounds)
    yield from _beside(_sends(sides, connection, _sent, count=sends), f"{CLIENTS} clients send", "tasks/s")
    yield from _beside(
        _sends(sides, connection, _sent_within, count=5 * sends),
        f"{CLIENTS} sessions send, no client between",
        "tasks/s",
    )
    rates = [_drained(side, connection, tasks=tasks) for side in sides]
    yield from _beside(zip(sides, rates, strict=True), "drain, 1 worker process", "tasks/s")


def _beside(
    found: Iterator[tuple[Side, float]] | zip[tuple[Side, float]], what: str, unit: str
) -> Iterator[Sample]:
    first: str | None = None
    for side, value in found:
        name = f"told by {side.words}: {what}"
        yield Sample(name=name, value=value, unit=unit, beside=first)
        first = first or name


def _latencies(sides: Sequence[Side], connection: Plain, *, rounds: int) -> Iterator[Sample]:
    """From the call of send to the first line of the task's code, in turns, while both workers are idle."""
    clock = SystemClock()
    waits_ms: dict[str, list[float]] = {side.words: [] for side in sides}
    with ExitStack() as trees:
        for side in sides:
            _forget(side, connection)
            trees.enter_context(workers(side.program.app, module=side.module))
        for side in sides:
            if side.uses_messages:
                _await_relay(side, connection)
            for _ in range(_WARM_UP):
                side.program.begun.send().result(timeout=_ANSWER_S)
        for _ in range(0, rounds, _TURN):
            for side in sides:
                for _ in range(_TURN):
                    asked_at = clock.monotonic()
                    begun_at = side.program.begun.send().result(timeout=_ANSWER_S)
                    waits_ms[side.words].append((begun_at - asked_at) * 1_000)
    for percent in (50, 99):
        found = [(side, percentile(waits_ms[side.words], percent)) for side in sides]
        yield from _beside(iter(found), f"idle, send to code: p{percent}", "ms")


def _sends(
    sides: Sequence[Side], connection: Plain, send: Callable[[Side, int], float], *, count: int
) -> Iterator[tuple[Side, float]]:
    """Sends of several at once, one task at a time, while a worker is idle which has no part in their queue; then all of it is run."""
    for side in sides:
        _forget(side, connection)
        with workers(side.program.app, "--queues", _IDLE_QUEUE, module=side.module):
            if side.uses_messages:
                _await_relay(side, connection)
            pause(_CALM_S)
            rate = send(side, count)
        _run_all(side, connection)
        verified(side.program, connection, tasks=count // CLIENTS * CLIENTS)
        yield side, rate


def _run_all(side: Side, connection: Plain) -> None:
    with workers(side.program.app, module=side.module):
        until(
            lambda: not is_left(connection, side.program.app.schema),
            within_s=_SEND_S,
            what="the last task",
            every_s=0.1,
        )


def _sent_within(side: Side, count: int) -> float:
    """Tasks per second of as many sessions, whose loops run in the server: what senders cost each other there, without their own work."""
    target, clock = side.program.app.door.target, SystemClock()
    asked = {"sends": count // CLIENTS, "task": side.program.nothing.name, "channel": target.channel}
    with ExitStack() as stack:
        sessions = [stack.enter_context(target.connect("everbeat bench")) for _ in range(CLIENTS)]
        for session in sessions:
            session.execute(compose("bench/send_settings", target.schema), asked)
        loop = compose("bench/send_loop", target.schema)
        began = clock.monotonic()
        with ThreadPoolExecutor(CLIENTS) as threads:
            for _ in threads.map(lambda session: session.execute(loop), sessions):
                pass
        return count // CLIENTS * CLIENTS / (clock.monotonic() - began)


def _sent(side: Side, count: int) -> float:
    """Tasks per second of programs of their own, from the first send to the last answer of any program."""
    with ExitStack() as stack:
        senders = [stack.enter_context(_sender(side, count=count // CLIENTS)) for _ in range(CLIENTS)]
        for sender in senders:
            if _line(sender) != "ready\n":
                raise WorkerError("A program that sends does not start.", fix="see above what it wrote.")
        for sender in senders:
            assert sender.stdin is not None
            sender.stdin.write("begin\n")
            sender.stdin.flush()
        moments = [tuple(map(float, _line(sender).split())) for sender in senders]
    if not all(len(each) == 2 for each in moments):
        raise WorkerError("A program that sends has failed.", fix="see above what it wrote.")
    return (count // CLIENTS * CLIENTS) / (
        max(end for _, end in moments) - min(began for began, _ in moments)
    )


@contextmanager
def _sender(side: Side, *, count: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "everbeat.cli.bench.sender", side.module, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _drained(side: Side, connection: Plain, *, tasks: int) -> float:
    if side.uses_messages:
        connection.execute(compose("bench/forget_messages", side.program.app.schema))
    return drained(side.program, connection, tasks=tasks, processes=1, module=side.module)


def _forget(side: Side, connection: Plain) -> None:
    connection.execute(compose("bench/forget", side.program.app.schema))
    if side.uses_messages:
        connection.execute(compose("bench/forget_messages", side.program.app.schema))


def _await_relay(side: Side, connection: Plain) -> None:
    """Before somebody publishes, PostgreSQL tells the tasks."""
    schema = side.program.app.schema

    def somebody_publishes() -> bool:
        row = connection.execute(compose("message/state", schema), {"window": 1}).fetchone()
        return bool(row and row[0])

    until(somebody_publishes, within_s=_ANSWER_S, what="a worker that publishes", every_s=0.05)
    pause(_CALM_S)  # the worker says that it need not be told by PostgreSQL any more
