"""Records the statements that a page runs, and explains them on a session with the settings of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

import psycopg
import pytest
from msgspec import Struct
from psycopg import sql

from everbeat.store.database import Database
from everbeat.store.reading import SESSION
from everbeat.store.statement import Statement
from everbeat.store.user_connection.drivers import numbered
from tests.store.conftest import StoreHarness
from tests.store.plans import nodes

LARGE: Final = frozenset({
    "tasks", "history", "attempts", "steps", "signals", "labels", "nodes", "edges", "beats", "worker_states",
    "rates", "depths", "ticks", "stream_items", "batch_events",
})  # fmt: skip
"""The tables that grow with the number of tasks or with time. No page may read one of them as a whole."""
PATIENCE_S: Final = 60
"""How long a statement can take that is explained."""


class Executed(Struct, frozen=True):
    """A statement that a page ran, and how long the page waited for its rows, in ms."""

    statement: Statement[Any]
    took_ms: float

    @property
    def key(self) -> tuple[str, str]:
        return self.statement.name, repr(sorted(self.statement.parameters.items()))


class Explained(Struct, frozen=True, kw_only=True):
    """The cost of a statement: the pages that the server touched, its time in ms, and the large tables that it read as a whole."""

    pages: int
    ms: float
    planning_ms: float
    scans: tuple[str, ...]


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[list[Executed]]:
    """Record all statements that event loops run. They are run as usual."""
    found: list[Executed] = []
    rows = Database._arows

    async def noted(self: Database, connection: Any, statement: Statement[Any]) -> Sequence[Any]:
        began_at = perf_counter()
        try:
            return await rows(self, connection, statement)
        finally:
            found.append(Executed(statement, (perf_counter() - began_at) * 1_000))

    with patch.context() as patched:
        patched.setattr(Database, "_arows", noted)
        yield found


def explained(connection: psycopg.Connection[Any], db: StoreHarness, statement: Statement[Any]) -> Explained:
    """Execute a statement with the plan of a page, which is made for the values of its parameters."""
    text, names = numbered(statement.name, db.target.schema)
    given = sql.SQL(", ").join(sql.Literal(statement.parameters[name]) for name in names)
    asked = sql.SQL("execute as_a_page ({})").format(given) if names else sql.SQL("execute as_a_page")
    connection.execute(f"prepare as_a_page as {text}".encode(), prepare=False)
    try:
        row = connection.execute(
            sql.SQL("explain (analyze, buffers, format json) {}").format(asked), prepare=False
        ).fetchone()
    except psycopg.errors.QueryCanceled:
        return Explained(pages=0, ms=PATIENCE_S * 1_000, planning_ms=0, scans=("everything, it seems",))
    finally:
        connection.execute("deallocate as_a_page", prepare=False)
    assert row is not None
    (found,) = row[0]
    return Explained(
        pages=found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"],
        ms=found["Execution Time"],
        planning_ms=found["Planning Time"],
        scans=tuple(
            sorted({name for node in nodes(found["Plan"]) if (name := scanned_table(node)) in LARGE})
        ),
    )


def scanned_table(node: dict[str, Any]) -> str | None:
    """Return the table that a node of a plan reads as a whole, or None. The partitions of `history` count as `history`."""
    if node["Node Type"] != "Seq Scan":
        return None
    name = str(node.get("Relation Name"))
    return "history" if name.startswith("history_2") else name


@contextmanager
def session_of_a_page(db: StoreHarness) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection with the settings of the connections of the pages."""
    with db.target.connect("everbeat test") as connection:
        connection.execute(SESSION)
        # A statement that takes too long is explained, too.
        connection.execute(f"set statement_timeout = '{PATIENCE_S}s'".encode())
        yield connection
