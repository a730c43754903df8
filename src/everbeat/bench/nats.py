"""Compare latency, sends and drains of workers notified by NATS and of workers notified by PostgreSQL.

This module is loaded only with `--nats`, because it needs the extra `nats`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from random import Random
from typing import Final, NamedTuple

from everbeat import App
from everbeat.bench.concurrency import IDLE_QUEUE, QUIET_S, send_rate
from everbeat.bench.environment import APPLICATION, Bench, lock_schema_name, pause, wait_until, workers
from everbeat.bench.latency import ROUNDS, latencies_ms
from everbeat.bench.program import BenchProgram
from everbeat.bench.sampling import Measurement, Sample, percentile
from everbeat.bench.throughput import drained, verified, wait_for_all
from everbeat.cli.output import say
from everbeat.cli.own_tree import own_schema
from everbeat.client.database_access import database_of
from everbeat.errors import NatsError
from everbeat.nats.inspection import ask_once
from everbeat.nats.link import NatsLink
from everbeat.nats.problems import NO_STREAM, ApiProblem
from everbeat.nats.stream import ask
from everbeat.nats.stream_plan import StreamPlan
from everbeat.runtime.clock import SystemClock
from everbeat.store.statement import compose

_CLIENTS: Final = 8
_MOST_SENDS: Final = 8_000
_TURN: Final = 20
_WARM_UP: Final = 10
_RELAY_S: Final = 60.0
_ANY_WAIT_S: Final = 60.0  # the stream's name does not depend on it


class Transport(NamedTuple):
    """One way of notifying workers."""

    name: str
    bench: Bench
    uses_messages: bool

    def clear(self) -> None:
        """Delete all tasks and messages."""
        self.bench.execute("truncate_tasks")
        if self.uses_messages:
            self.bench.execute("truncate_messages")

    def wait_until_used(self) -> None:
        """Wait until a worker is publishing messages. Until then, PostgreSQL also notifies this transport's workers."""
        if not self.uses_messages:
            return
        relay_state = compose("message/read_relay_state", self.bench.app.schema)

        def is_relayed() -> bool:
            row = self.bench.connection.execute(relay_state, {"window": 1}).fetchone()
            return bool(row and row[0])

        wait_until(is_relayed, within_s=_RELAY_S, what="a worker that publishes", every_s=0.05)
        pause(QUIET_S)  # the worker still has to record that it needs no notifications from PostgreSQL


@contextmanager
def prepared(program: BenchProgram) -> Iterator[None]:
    """Create the program's schema for the duration of the block. Afterwards, delete the schema and the stream."""
    app = program.app
    with closing(app), database_of(app).target.connect(APPLICATION) as connection:
        lock_schema_name(connection, database_of(app).target)
        try:
            with own_schema(app):
                yield
        finally:
            _delete_stream(app)


def _delete_stream(app: App) -> None:
    assert app.nats is not None
    stream = StreamPlan(app.schema, app.nats, _ANY_WAIT_S).stream

    async def delete(link: NatsLink) -> None:
        try:
            await ask(link, f"STREAM.DELETE.{stream}")
        except ApiProblem as problem:
            if problem.err_code != NO_STREAM:  # no worker has created the stream
                raise

    try:
        asyncio.run(
            ask_once(
                app.nats, delete, name=APPLICATION, random=Random(), what=f"did not delete stream {stream!r}"
            )
        )
    except NatsError as problem:
        say(f"warning: the stream of this bench may be left behind. {problem.message}")


def nats_measurements(bench: Bench, by_nats: BenchProgram, *, tasks: int) -> Iterator[Measurement]:
    """Yield the measurement of latency, sends and drains with both transports. It raises WorkerError unless each task ran exactly once."""
    transports = (
        Transport("PostgreSQL", bench, uses_messages=False),
        Transport("NATS", Bench(program=by_nats, connection=bench.connection), uses_messages=True),
    )
    yield Measurement(name="nats", take=partial(_samples, transports, tasks=tasks))


def _samples(transports: Sequence[Transport], *, tasks: int) -> Iterator[Sample]:
    sends = min(tasks, _MOST_SENDS)
    waits_ms = _latencies(transports)
    for percent in (50, 99):
        found = [percentile(waits, percent) for waits in waits_ms]
        yield from _beside(transports, found, f"idle, send to code: p{percent}", "ms")
    for what, send, count in (
        (f"{_CLIENTS} clients send", partial(send_rate, senders=_CLIENTS), sends),
        (f"{_CLIENTS} sessions send inside the server", _send_in_server, 5 * sends),
    ):
        rates = [_send_rate(transport, send, count) for transport in transports]
        yield from _beside(transports, rates, what, "tasks/s")
    rates = []
    for transport in transports:
        transport.clear()
        rates.append(drained(transport.bench, tasks=tasks))
    yield from _beside(transports, rates, "drain, 1 worker process", "tasks/s")


def _beside(
    transports: Sequence[Transport], values: Iterable[float], what: str, unit: str
) -> Iterator[Sample]:
    first: str | None = None
    for transport, value in zip(transports, values, strict=True):
        name = f"notified by {transport.name}: {what}"
        yield Sample(name=name, value=value, unit=unit, beside=first)
        first = first or name


def _latencies(transports: Sequence[Transport]) -> list[list[float]]:
    """Measure both transports alternately while the workers of both are idle."""
    waits_ms: list[list[float]] = [[] for _ in transports]
    with ExitStack() as stack:
        for transport in transports:
            transport.clear()
            stack.enter_context(workers(transport.bench))
        for transport in transports:
            transport.wait_until_used()
            latencies_ms(transport.bench, _WARM_UP)
        for _ in range(0, ROUNDS, _TURN):
            for transport, waits in zip(transports, waits_ms, strict=True):
                waits += latencies_ms(transport.bench, _TURN)
    return waits_ms


def _send_rate(transport: Transport, send: Callable[..., float], count: int) -> float:
    """Return the rate of concurrent single sends while an idle worker serves another queue. Then run and verify all tasks."""
    each = count // _CLIENTS
    transport.clear()
    with workers(transport.bench, "--queues", IDLE_QUEUE):
        transport.wait_until_used()
        pause(QUIET_S)
        rate = send(transport.bench, each=each)
    with workers(transport.bench):
        wait_for_all(transport.bench)
    verified(transport.bench, tasks=each * _CLIENTS, name=transport.bench.program.nothing.name)
    return rate


def _send_in_server(bench: Bench, *, each: int) -> float:
    """Send from loops inside the server. This measures how much concurrent senders slow each other down when no client is involved."""
    target, clock = bench.target, SystemClock()
    parameters = {"sends": each, "task": bench.program.nothing.name}
    loop = compose("bench/send_in_server", target.schema)
    with ExitStack() as stack:
        sessions = [stack.enter_context(target.connect(APPLICATION)) for _ in range(_CLIENTS)]
        for session in sessions:
            session.execute(compose("bench/set_send_parameters", target.schema), parameters)
        started_at = clock.monotonic()
        with ThreadPoolExecutor(_CLIENTS) as threads:
            for _ in threads.map(lambda session: session.execute(loop), sessions):
                pass
        return each * _CLIENTS / (clock.monotonic() - started_at)
