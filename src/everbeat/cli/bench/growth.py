"""Whether a drain stays as fast beside many rows that have ended, many that wait, and a transaction that sees the past."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from everbeat.cli.bench.crew import Program
from everbeat.cli.bench.drains import drained
from everbeat.cli.bench.figures import Sample, Target
from everbeat.cli.bench.watch import Plain
from everbeat.store.statement import compose

EMPTY = "drain, nothing else there"


def growth_figures(
    program: Program, connection: Plain, *, tasks: int, rows: int, connect: Callable[[], Plain]
) -> Iterator[Sample]:
    """One worker process in an otherwise empty schema, then beside `rows` others. `connect()` gives a further connection."""
    schema = program.app.schema

    def fill(name: str) -> Callable[[], None]:
        return lambda: connection.execute(compose(f"bench/{name}", schema), {"rows": rows})

    def drain(name: str, target: Target | None, before: Callable[[], None] | None) -> Sample:
        rate = drained(program, connection, tasks=tasks, processes=1, before=before)
        beside = None if before is None else EMPTY
        return Sample(name=name, value=rate, unit="tasks/s", beside=beside, target=target)

    yield drain(EMPTY, None, None)
    yield drain(f"drain beside {rows:,} finished", Target(at_least=0.9), fill("fill_finished"))
    yield drain(f"drain beside {rows:,} pending", Target(at_least=0.9), fill("fill_pending"))
    observer = connect()
    try:

        def hold() -> None:
            observer.execute(b"begin isolation level repeatable read")
            observer.execute(compose("bench/hold_snapshot", schema))

        yield drain("drain beside an old snapshot", Target(at_least=0.7), hold)
    finally:
        observer.close()
    connection.execute(compose("bench/forget", schema))
