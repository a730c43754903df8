"""The plan that docs/claim.md shows. `python -m tests.store.claim_page` prints a new one; tests/store/test_plans.py compares them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from psycopg import sql

from everbeat.embedded.server import EmbeddedServer
from everbeat.store import claims, lines
from everbeat.store.session import KEYED
from everbeat.store.statement import Statement
from everbeat.store.user_connection.drivers import numbered
from tests.architecture.source_tree import ROOT
from tests.store.conftest import StoreHarness

PAGE: Final = ROOT / "docs" / "claim.md"
_NODE: Final = re.compile(
    r"^ *(?:->  )?([A-Z][\w ]+?)(?: using (\w+))?(?: on (\w+)(?: \w+)?)? \((?:actual|never)"
)
_PART: Final = re.compile(r"^ *CTE (\w+)$")
Node = tuple[str, str | None]
"""A node type and its index."""


def as_a_worker(db: StoreHarness, statement: Statement[Any], *, options: str) -> list[Any]:
    """Return the rows of EXPLAIN for a statement prepared and planned as in a worker, in the caller's transaction."""
    text, names = numbered(statement.name, db.target.schema)
    given = sql.SQL(", ").join(sql.Literal(statement.parameters[name]) for name in names)
    db.connection.execute(KEYED.replace(b"set ", b"set local "))
    db.connection.execute(f"prepare as_a_worker_does as {text}".encode())
    try:
        explain = sql.SQL("explain ({}) execute as_a_worker_does ({})").format(
            sql.SQL(options),  # type: ignore[arg-type]
            given,
        )
        return [row[0] for row in db.connection.execute(explain).fetchall()]
    finally:
        db.connection.execute("deallocate as_a_worker_does")


@contextmanager
def beside_lines_and_suspects(db: StoreHarness) -> Iterator[Statement[Any]]:
    """Add 20 serial lines of 100 tasks and 1,000 suspects during the block. Yield a claim that has one floor."""
    schema = sql.Identifier(db.target.schema)
    place = "select enqueued_at, id from {}.tasks where queue = 'default' and priority = 1 and state = 'PENDING' order by 1, 2 offset 500 limit 1"
    with db.connection.transaction(force_rollback=True):
        for text in (
            "insert into {}.tasks (id, name, queue, args, serial, serial_at) select gen_random_uuid(), 'work', 'lines', '{{}}',"
            " 'key:' || n % 20, now() + n * interval '1 ms' from generate_series(1, 2000) n",
            "update {}.tasks set suspect = true where id = any(array(select id from {}.tasks where state = 'PENDING' limit 1000))",
            "analyze {}.tasks",
            "analyze {}.pauses",
        ):
            db.connection.execute(sql.SQL(text).format(schema, schema))
        apply = lines.apply_changes(readers=["work"], queues=None, channel=None, most=10_000)
        db.connection.execute(db.text(apply.name), apply.parameters)
        floor = db.connection.execute(sql.SQL(place).format(schema)).fetchone()
        assert floor is not None
        yield claims.claim(
            worker_id="w2", claim_call=uuid4(), names=["work"], limit=100, queues=None, queue_priorities={},
            suspects=False, starts=8, floors={("default", 1): (floor[0], floor[1])},
        )  # fmt: skip


def nodes_of(lines: list[str]) -> dict[str, set[Node]]:
    """Return the nodes of each CTE in the text of a plan; those outside of CTEs have the name `result`."""
    found: dict[str, set[Node]] = {}
    part, indent = "result", -1
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if (cte := _PART.match(line)) is not None:
            part, indent = cte[1], depth
        elif part != "result" and depth <= indent:
            part, indent = "result", -1
        if (node := _NODE.match(line)) is not None:
            found.setdefault(part, set()).add((node[1], node[2]))
    return found


def nodes_on_the_page() -> dict[str, set[Node]]:
    """Return the nodes that the excerpts in docs/claim.md name, by CTE."""
    found: dict[str, set[Node]] = {}
    for block in re.findall(
        r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        for part, nodes in nodes_of(block.splitlines()).items():
            found.setdefault(part, set()).update(nodes)
    return found


def main() -> None:
    """Print the plan."""
    from tests.store.plans import HELD, ROWS, filled

    with (
        tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer.open(Path(folder)) as server,
        filled(server.url, rows=ROWS, in_flight=HELD) as db,
        beside_lines_and_suspects(db) as claim,
    ):
        print("\n".join(as_a_worker(db, claim, options="analyze, buffers, costs off, timing off")))


if __name__ == "__main__":
    main()
