"""Measure how many tasks per second are sent, run and verified, and compare this with plain rows on the bare server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Final

from everbeat import WorkflowHandle
from everbeat.bench.environment import APPLICATION, DEFAULTS, SETUPS, Bench, Setup, timed, wait_until, workers
from everbeat.bench.sampling import FigureBound, Measurement, Sample
from everbeat.client.task import Call
from everbeat.errors import WorkerError
from everbeat.runtime.clock import SystemClock
from everbeat.store.statement import compose

INSERT: Final = "plain insert and commit, one row"
COPY: Final = "plain COPY"
CLAIM: Final = "plain claim and complete, batches of 100"
AWAITED: Final = "await asend, one at a time"
_ARGS: Final = '{"number": 1, "payload": "' + "x" * 100 + '"}'
_SINGLES: Final = 1_000
_TURN: Final = 50
_QUEUE: Final = "default"
_CHUNK: Final = 10_000
_DRAIN_S: Final = 900.0


def send_measurements(bench: Bench, *, tasks: int) -> Iterator[Measurement]:
    """Yield the measurements of sending to a queue without workers: one task at a time, and many at once."""
    yield Measurement(name="sends, one at a time", take=partial(_single_sends, bench))
    yield Measurement(name=COPY, take=partial(_plain_copy, bench, rows=tasks))
    yield Measurement(name=bulk_name(tasks), take=partial(_bulk_sends, bench, tasks=tasks))


def bulk_name(tasks: int) -> str:
    """Return the name of the figure for one `send_many`."""
    return f"send_many of {tasks:,}"


def _bulk_sends(bench: Bench, *, tasks: int) -> Iterator[Sample]:
    took_s = timed(lambda: _send(bench, range(tasks)))
    yield Sample(
        name=bulk_name(tasks),
        value=tasks / took_s,
        unit="tasks/s",
        beside=COPY,
        target=FigureBound(at_least=0.33),
    )


def _send(bench: Bench, numbers: range) -> None:
    bench.app.send_many(bench.program.nothing.call(number) for number in numbers)


def _single_sends(bench: Bench) -> Iterator[Sample]:
    """Alternate sends with plain inserts, because the speed of a shared machine changes from second to second."""
    took_s = [0.0, 0.0, 0.0]
    clock, nothing = SystemClock(), bench.program.nothing
    insert = compose("bench/insert_bare_row", bench.app.schema)

    async def send_awaited() -> None:
        for number in range(_TURN):
            await nothing.asend(number)

    with _bare_table(bench), asyncio.Runner() as runner:
        for number in range(0, _SINGLES, _TURN):
            moments = [clock.monotonic()]
            for _ in range(_TURN):
                bench.connection.execute(insert, {"args": _ARGS}, prepare=True)
            moments.append(clock.monotonic())
            for _ in range(_TURN):
                nothing.send(number)
            moments.append(clock.monotonic())
            runner.run(send_awaited())
            moments.append(clock.monotonic())
            took_s = [
                took + after - before for took, (before, after) in zip(took_s, pairwise(moments), strict=True)
            ]
    plain, send, asend = (_SINGLES / took for took in took_s)
    at_least = FigureBound(at_least=0.6)
    yield Sample(name=INSERT, value=plain, unit="rows/s")
    yield Sample(name="send, one at a time", value=send, unit="tasks/s", beside=INSERT, target=at_least)
    yield Sample(name=AWAITED, value=asend, unit="tasks/s", beside=INSERT, target=at_least)


def _plain_copy(bench: Bench, *, rows: int) -> Iterator[Sample]:
    with _bare_table(bench):
        yield Sample(name=COPY, value=rows / timed(lambda: _copy(bench, rows)), unit="rows/s")


def _plain_drain(bench: Bench, *, rows: int) -> Iterator[Sample]:
    drain = compose("bench/drain_bare_rows", bench.app.schema)
    with _bare_table(bench):
        _copy(bench, rows)
        bench.settle_server("vacuum_bare_table")
        took_s = timed(lambda: bench.connection.execute(drain, prepare=False))
        yield Sample(name=CLAIM, value=rows / took_s, unit="rows/s")


@contextmanager
def _bare_table(bench: Bench) -> Iterator[None]:
    bench.execute("create_bare_table")
    bench.execute("create_bare_index")
    try:
        yield
    finally:
        bench.execute("drop_bare_table")


def _copy(bench: Bench, rows: int) -> None:
    with bench.connection.cursor().copy(compose("bench/copy_bare_rows", bench.app.schema)) as copy:
        for _ in range(rows):
            copy.write_row((_ARGS,))


def drain_measurements(bench: Bench, *, tasks: int) -> Iterator[Measurement]:
    """Yield measurements of drains with one and two worker processes and each setup, after the same work on plain rows."""
    yield Measurement(name=CLAIM, take=partial(_plain_drain, bench, rows=tasks))
    for processes in (1, 2):
        for setup in SETUPS:
            take = partial(_drain_samples, bench, tasks=tasks, setup=setup, processes=processes)
            yield Measurement(name=drain_name(setup, processes), take=take)


def drain_name(setup: Setup, processes: int = 1) -> str:
    """Return the name of the figure for a drain."""
    return f"drain, {processes} worker process{'' if processes == 1 else 'es'}, {setup.name}"


def _drain_samples(bench: Bench, *, tasks: int, setup: Setup, processes: int) -> Iterator[Sample]:
    rate = drained(bench, tasks=tasks, processes=processes, setup=setup)
    name = drain_name(setup, processes)
    beside_rows = f"{name}, beside plain rows"

    def sample(name: str, beside: str, target: FigureBound | None = None) -> Sample:
        return Sample(name=name, value=rate, unit="tasks/s", beside=beside, target=target)

    if processes == 1:
        yield sample(name, CLAIM, FigureBound(at_least=0.55))
    else:
        yield sample(name, drain_name(setup), FigureBound(at_least=1.3, unless=beside_rows))
        yield sample(beside_rows, CLAIM, FigureBound(at_least=0.75, unless=name))
    if setup != DEFAULTS:
        yield sample(f"{name}, beside the defaults", drain_name(DEFAULTS, processes))


def drained(
    bench: Bench,
    *,
    tasks: int,
    processes: int = 1,
    setup: Setup = DEFAULTS,
    prepare: Callable[[], object] = lambda: None,
    call: Callable[[int], Call[int]] | None = None,
) -> float:
    """Drain a queue. Return the tasks per second from the first start to the last completion, by the server's clock.

    `prepare` can fill the emptied tables beforehand. `call` makes the task with a given number, by default a task that does nothing. Raises
    WorkerError unless each task ran exactly once.
    """
    make = bench.program.nothing.call if call is None else call
    bench.execute("truncate_tasks")
    prepare()
    bench.app.pause_queue(_QUEUE)
    for first in range(0, tasks, _CHUNK):
        bench.app.send_many(make(number) for number in range(first, min(tasks, first + _CHUNK)))
    bench.settle_server("vacuum_tasks")
    with workers(bench, *setup.options, processes=processes):
        bench.app.resume_queue(_QUEUE)
        wait_for_all(bench)
    return tasks / verified(bench, tasks=tasks, name=make(0).name)


def wait_for_all(bench: Bench) -> None:
    """Wait until no due task is left. Raises WorkerError after 15 minutes."""
    wait_until(
        lambda: not bench.is_true("find_unfinished_task"),
        within_s=_DRAIN_S,
        what="the last task",
        every_s=0.1,
    )


def verified(bench: Bench, *, tasks: int, name: str) -> float:
    """Return the seconds from the first start to the last completion. Raises WorkerError unless each task ran exactly once."""
    row = bench.execute("verify_tasks", {"name": name}).fetchone()
    sent, right_once, took_s = row or (0, 0, 0.0)
    if (sent, right_once) != (tasks, tasks):
        raise WorkerError(
            f"The benchmark sent {tasks} tasks. The database has {sent}, of which {right_once} ran once with the right result.",
            fix="report this with the database's log.",
        )
    return float(took_s)


@contextmanager
def old_snapshot(bench: Bench) -> Iterator[Callable[[], None]]:
    """Yield a function that takes a snapshot, which another session then holds until the block ends."""
    with bench.target.connect(APPLICATION) as observer:

        def hold() -> None:
            observer.execute(b"set idle_in_transaction_session_timeout = 0")
            observer.execute(b"begin isolation level repeatable read")
            observer.execute(compose("bench/hold_snapshot", bench.app.schema))

        yield hold


_EMPTY: Final = "drain, otherwise empty tables"


def growth_measurements(bench: Bench, *, tasks: int, rows: int) -> Iterator[Measurement]:
    """Yield measurements of drains in otherwise empty tables, beside `rows` finished or pending tasks, and beside an old snapshot."""

    def drain(
        name: str, prepare: Callable[[], object] = lambda: None, at_least: float | None = None
    ) -> Iterator[Sample]:
        yield Sample(
            name=name,
            value=drained(bench, tasks=tasks, prepare=prepare),
            unit="tasks/s",
            beside=None if name == _EMPTY else _EMPTY,
            target=None if at_least is None else FigureBound(at_least=at_least),
        )
        bench.execute("truncate_tasks")

    def drain_beside_snapshot(name: str) -> Iterator[Sample]:
        with old_snapshot(bench) as hold:
            yield from drain(name, hold, at_least=0.7)

    yield Measurement(name=_EMPTY, take=lambda: drain(_EMPTY))
    for what in ("finished", "pending"):
        name = f"drain beside {rows:,} {what}"
        fill = partial(bench.execute, f"insert_{what}_tasks", {"rows": rows})
        yield Measurement(name=name, take=partial(drain, name, fill, at_least=0.9))
    name = "drain beside an old snapshot"
    yield Measurement(name=name, take=partial(drain_beside_snapshot, name))


_WIDTHS: Final = (10, 100, 1_000, 10_000)
_LENGTH: Final = 100
_AT_ONCE: Final = 1_000
_ANSWER_S: Final = 300.0


def workflow_measurements(bench: Bench, *, widest: int) -> Iterator[Measurement]:
    """Yield measurements of maps whose nodes do nothing, compared with as many plain tasks, and of a chain of nodes."""
    yield Measurement(name="workflows", take=partial(_workflow_samples, bench, widest=widest))


def _workflow_samples(bench: Bench, *, widest: int) -> Iterator[Sample]:
    bench.execute("truncate_tasks")
    with workers(bench):
        _run_plain(bench, 10, 1)
        _run_maps(bench, 10, 1)
        for width in _WIDTHS:
            if width <= widest:
                yield from _map_samples(bench, width)
        yield _chain_sample(bench)


def _map_samples(bench: Bench, width: int) -> Iterator[Sample]:
    """Run narrow workflows side by side, so that about a thousand nodes or more run for each width."""
    times = max(1, _AT_ONCE // width)
    nodes = times * (width + 1)
    plain = f"{nodes:,} plain tasks, {width + 1:,} at a time"
    maps = f"{times:,} workflows" if times > 1 else "a workflow"
    yield Sample(name=plain, value=nodes / timed(lambda: _run_plain(bench, width, times)), unit="tasks/s")
    yield Sample(
        name=f"{maps} of {width:,} nodes and a join",
        value=nodes / timed(lambda: _run_maps(bench, width, times)),
        unit="nodes/s",
        beside=plain,
        target=FigureBound(at_least=0.5),
    )


def _run_plain(bench: Bench, width: int, times: int) -> None:
    app, nothing = bench.app, bench.program.nothing
    sent = [app.send_many(nothing.call(number) for number in range(width + 1)) for _ in range(times)]
    app.results([handle for handles in sent for handle in handles], timeout=_ANSWER_S)


def _run_maps(bench: Bench, width: int, times: int) -> None:
    nothing = bench.program.nothing
    started: list[WorkflowHandle[int]] = []
    for _ in range(times):
        workflow = bench.app.workflow("bench-wide")
        members = workflow.map(nothing, range(width))
        started.append(workflow.start(output=workflow.add(nothing, -1).after(members)))
    for handle in started:
        handle.result(timeout=_ANSWER_S)


def _chain_sample(bench: Bench) -> Sample:
    """Measure a chain in which each node receives the result of the previous node."""
    workflow = bench.app.workflow("bench-long")
    node = workflow.add(bench.program.nothing, 1)
    for _ in range(_LENGTH - 1):
        node = workflow.add(bench.program.nothing, node.result)
    took_s = timed(lambda: workflow.start(output=node).result(timeout=_ANSWER_S))
    name = f"chain of {_LENGTH} nodes: time per node"
    return Sample(name=name, value=1_000 * took_s / _LENGTH, unit="ms", target=FigureBound(at_most=10))
