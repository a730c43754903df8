"""What the server does without everbeat, measured in the same run: what every other figure is divided by.

What lives here: plain SQL on a table of its own. What may not: anything of everbeat but the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from everbeat.cli.bench.figures import Sample
from everbeat.cli.bench.watch import Plain, calm, timed
from everbeat.store.statement import compose

INSERT: Final = "plain insert and commit, one row"
COPY: Final = "plain COPY"
CEILING: Final = "plain claim and complete, by hundreds"

_ARGS: Final = '{"number": 1, "payload": "' + "x" * 100 + '"}'


def plain_figures(connection: Plain, schema: str, *, rows: int, singles: int) -> Iterator[Sample]:
    """The three walls; `connection` is in autocommit. Leaves nothing behind."""

    def run(name: str, **parameters: object) -> None:
        connection.execute(compose(f"bench/{name}", schema), parameters or None, prepare=bool(parameters))

    run("plain_table")
    run("plain_index")
    try:
        took_s = timed(lambda: _insert(run, singles))
        yield Sample(name=INSERT, value=singles / took_s, unit="rows/s")
        took_s = timed(lambda: _copy(connection, schema, rows))
        yield Sample(name=COPY, value=rows / took_s, unit="rows/s")
        calm(connection, schema, "plain_vacuum")
        took_s = timed(lambda: run("plain_drain"))
        yield Sample(name=CEILING, value=(rows + singles) / took_s, unit="rows/s")
    finally:
        run("plain_drop")


def _copy(connection: Plain, schema: str, rows: int) -> None:
    with connection.cursor().copy(compose("bench/plain_copy", schema)) as copy:
        for _ in range(rows):
            copy.write_row((_ARGS,))


def _insert(run: Callable[..., None], times: int) -> None:
    for _ in range(times):
        run("plain_insert", args=_ARGS)
