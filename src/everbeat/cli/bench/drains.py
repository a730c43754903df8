"""How fast waiting tasks are run, with their whole life cycle, durably; each is verified to have run once, with its attempt row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from everbeat.cli.bench.ceiling import CEILING
from everbeat.cli.bench.crew import PROGRAM, Program, workers
from everbeat.cli.bench.figures import Sample, Target
from everbeat.cli.bench.watch import Plain, calm, until
from everbeat.errors import WorkerError
from everbeat.store.statement import compose

ONE: Final = "drain, 1 worker process"
TWO: Final = "drain, 2 worker processes"
TWO_OF_CEILING: Final = "drain, 2 worker processes, of the ceiling"
_QUEUE: Final = "default"
_CHUNK: Final = 10_000
_DRAIN_S: Final = 900.0


def drain_figures(program: Program, connection: Plain, *, tasks: int) -> Iterator[Sample]:
    """One worker process, then two."""
    rate = drained(program, connection, tasks=tasks, processes=1)
    yield Sample(name=ONE, value=rate, unit="tasks/s", beside=CEILING, target=Target(at_least=0.55))
    rate = drained(program, connection, tasks=tasks, processes=2)
    yield Sample(
        name=TWO, value=rate, unit="tasks/s", beside=ONE, target=Target(at_least=1.3, unless=TWO_OF_CEILING)
    )
    yield Sample(
        name=TWO_OF_CEILING,
        value=rate,
        unit="tasks/s",
        beside=CEILING,
        target=Target(at_least=0.75, unless=TWO),
    )


def drained(
    program: Program,
    connection: Plain,
    *,
    tasks: int,
    processes: int,
    before: Callable[[], None] | None = None,
    module: str = PROGRAM,
) -> float:
    """Tasks per second from the first start to the last end, by the server's clock, in a schema that `before` may fill.

    Raises WorkerError unless each ran once.
    """
    app, schema = program.app, program.app.schema
    connection.execute(compose("bench/forget", schema))
    if before is not None:
        before()
    app.pause_queue(_QUEUE)
    for first in range(0, tasks, _CHUNK):
        app.send_many(program.nothing.call(number) for number in range(first, min(tasks, first + _CHUNK)))
    calm(connection, schema, "vacuum", "vacuum_attempts")
    with workers(app, processes=processes, module=module):
        app.resume_queue(_QUEUE)
        until(lambda: not is_left(connection, schema), within_s=_DRAIN_S, what="the last task", every_s=0.1)
    return tasks / verified(program, connection, tasks=tasks)


def verified(program: Program, connection: Plain, *, tasks: int) -> float:
    """From the first start to the last end, in seconds. Raises WorkerError unless so many tasks are there and each ran once."""
    schema = program.app.schema
    row = connection.execute(compose("bench/verify", schema), {"name": program.nothing.name}).fetchone()
    sent, right_once, took_s = row or (0, 0, 0.0)
    if (sent, right_once) != (tasks, tasks):
        raise WorkerError(
            f"Of {tasks} tasks of the benchmark {sent} are there, and {right_once} ran once with the right result.",
            fix="report this with the database's log.",
        )
    return float(took_s)


def is_left(connection: Plain, schema: str) -> bool:
    """Whether anything that is due is not ended yet."""
    row = connection.execute(compose("bench/left", schema)).fetchone()
    return bool(row and row[0])
