"""What the server does without everbeat, measured in the same run: what every other figure is divided by.

What lives here: plain SQL on a table of its own. What may not: anything of everbeat but the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from everbeat.cli.bench.figures import Sample
from everbeat.cli.bench.watch import Plain, calm, timed
from everbeat.store.statement import compose

INSERT: Final = "plain insert and commit, one row"
COPY: Final = "plain COPY"
CEILING: Final = "plain claim and complete, by hundreds"

_ARGS: Final = '{"number": 1, "payload": "' + "x" * 100 + '"}'


def plain_figures(connection: Plain, schema: str, *, rows: int) -> Iterator[Sample]:
    """What can be written, and worked off; `connection` is in autocommit. Leaves nothing behind."""
    with _table(connection, schema):
        took_s = timed(lambda: _copy(connection, schema, rows))
        yield Sample(name=COPY, value=rows / took_s, unit="rows/s")
        calm(connection, schema, "plain_vacuum")
        took_s = timed(lambda: connection.execute(compose("bench/plain_drain", schema), prepare=False))
        yield Sample(name=CEILING, value=rows / took_s, unit="rows/s")


@contextmanager
def plain_inserts(connection: Plain, schema: str) -> Iterator[Callable[[int], None]]:
    """Inserts and commits so many rows, one at a time. Leaves nothing behind."""
    insert = compose("bench/plain_insert", schema)

    def write(times: int) -> None:
        for _ in range(times):
            connection.execute(insert, {"args": _ARGS}, prepare=True)

    with _table(connection, schema):
        yield write


@contextmanager
def _table(connection: Plain, schema: str) -> Iterator[None]:
    for name in ("plain_table", "plain_index"):
        connection.execute(compose(f"bench/{name}", schema))
    try:
        yield
    finally:
        connection.execute(compose("bench/plain_drop", schema))


def _copy(connection: Plain, schema: str, rows: int) -> None:
    with connection.cursor().copy(compose("bench/plain_copy", schema)) as copy:
        for _ in range(rows):
            copy.write_row((_ARGS,))
