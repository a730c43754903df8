"""Plans of statements beside 300,000 tasks: which tables a statement scans, and how many pages it touches."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import Connection, sql

from everbeat.store import migrating
from everbeat.store.session import KEYED
from everbeat.store.statement import Statement, compose
from everbeat.store.target import Target
from everbeat.store.user_connection.drivers import numbered
from tests.store.conftest import StoreHarness

ROWS = 100_000
HELD = 500
SCHEMA = "plans"

FILL = """
insert into {schema}.tasks (id, name, queue, priority, state, args, sent_at, enqueued_at, claim_id, claimed_at, claimed_by_worker_id,
    started_at, completed_at, good_until, fence, attempt)
select gen_random_uuid(), 'work', case when n %% 10 = 0 then 'mail' else 'default' end, n %% 3, state, '{{}}', now(), now() + delay, claim_id,
    case when state <> 'PENDING' then now() end, case when state <> 'PENDING' then 'w1' end,
    case when state in ('RUNNING', 'COMPLETED') then now() end, case when state = 'COMPLETED' then now() end,
    case when n %% 1000 = 0 then now() - interval '1 minute' end, 1, 1
from (
    select n, 'COMPLETED' as state, interval '0' as delay, null::uuid as claim_id from generate_series(1, %(rows)s) n
    union all
    select n, 'PENDING', case when n %% 2 = 0 then interval '1 hour' else interval '0' end, null from generate_series(1, %(rows)s) n
    union all
    select n, 'RUNNING', interval '0', gen_random_uuid() from generate_series(1, %(held)s) n
    union all
    select n, 'COMPLETED', interval '0', null from generate_series(1, %(rows)s) n
) s
"""


@contextmanager
def filled(database_url: str, *, rows: int, in_flight: int) -> Iterator[StoreHarness]:
    """Create a schema with this many waiting tasks, twice as many ended ones, and `in_flight` running ones.

    The schema is in its own database, a copy of a template: to copy the files takes a twentieth of the time of the inserts.
    """
    name = f"filled_{uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as server:
        template = _template(server, database_url, rows=rows, in_flight=in_flight)
        server.execute(f"create database {name} template {template} strategy file_copy".encode())
        target = Target.parse(_in_database(database_url, name), schema=SCHEMA)
        connection = target.connect("everbeat test")
        party = StoreHarness(target, connection)
        yield party
        party.database.close()
        connection.close()
        server.execute(f"drop database {name} with (force)".encode())


def _template(server: Connection[Any], database_url: str, *, rows: int, in_flight: int) -> str:
    """Return the name of the filled database from which copies are made, after creating it if it does not exist."""
    name = f"filled_{rows}_{in_flight}"
    if server.execute("select from pg_database where datname = %s", [name]).rowcount:
        return name
    server.execute(f"create database {name}".encode())
    target = Target.parse(_in_database(database_url, name), schema=SCHEMA)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        party = StoreHarness(target, connection)
        party.supervisor("s1", "w1")
        party.supervisor("s2", "w2", "w3")
        connection.execute(party.plain(FILL), {"rows": rows, "held": in_flight})
        for table in ("tasks", "workers", "supervisors", "attempts"):
            connection.execute(party.plain(f"vacuum analyze {{schema}}.{table}"))
        party.database.close()
    return name


def _in_database(database_url: str, name: str) -> str:
    return urlsplit(database_url)._replace(path=f"/{name}").geturl()


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[StoreHarness]:
    with filled(database_url, rows=ROWS, in_flight=HELD) as db:
        yield db


def held(db: StoreHarness, count: int) -> list[tuple[UUID, UUID]]:
    query = sql.SQL("select id, claim_id from {}.tasks where state = 'RUNNING' limit {}")
    found = db.connection.execute(
        query.format(sql.Identifier(db.target.schema), sql.Literal(count))
    ).fetchall()
    return [(row[0], row[1]) for row in found]


def vacuum(db: StoreHarness, *tables: str) -> None:
    """Remove the rows of transactions that were rolled back, also from indexes. By default, VACUUM leaves a few rows there."""
    for table in tables:
        db.connection.execute(db.plain(f"vacuum (index_cleanup on) {{schema}}.{table}"))


def plan(db: StoreHarness, statement: Statement[Any]) -> dict[str, Any]:
    """Return the plan of a client's execution whose changes are rolled back.

    It is the second execution: the first one of a session also reads catalogs and compiles triggers, up to 400 pages.
    The second one also reads the rows that the first one left.
    """
    text = b"explain (analyze, buffers, format json) " + compose(statement.name, db.target.schema)
    for _ in range(2):
        with db.connection.transaction(force_rollback=True):
            row = db.connection.execute(text, statement.parameters).fetchone()
    assert row is not None
    found = row[0] if isinstance(row[0], list) else json.loads(row[0])
    return dict(found[0])


def plan_of_trees(db: StoreHarness, statement: Statement[Any], *, generic: bool = False) -> dict[str, Any]:
    """Return the plan of an execution in a session of a tree, which prepares statements and avoids scans.

    A generic plan is made before the values are known. Changes are rolled back, and the session is warm as in `plan`.
    """
    text, names = numbered(statement.name, db.target.schema)
    given = sql.SQL(", ").join(sql.Literal(statement.parameters[name]) for name in names)
    execute = (
        sql.SQL("execute as_a_tree_does ({})").format(given) if names else sql.SQL("execute as_a_tree_does")
    )
    connection = db.connection
    with connection.transaction(force_rollback=True):
        connection.execute(KEYED.replace(b"set ", b"set local "))
        connection.execute("set local plan_cache_mode = force_generic_plan") if generic else None
        connection.execute(f"prepare as_a_tree_does as {text}".encode())
        for _ in range(2):
            with connection.transaction(force_rollback=True):
                row = connection.execute(
                    sql.SQL("explain (analyze, buffers, format json) ") + execute
                ).fetchone()
        connection.execute("deallocate as_a_tree_does")
    assert row is not None
    return dict(row[0][0])


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from nodes(child)


def scans_of(found: dict[str, Any], tables: Collection[str]) -> list[dict[str, Any]]:
    """Return the nodes that scan one of the tables."""
    return [
        node
        for node in nodes(found["Plan"])
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") in tables
    ]


def pages_of(found: dict[str, Any], of: Statement[Any], *, tables: Collection[str] = ("tasks",)) -> int:
    """Return how many pages the execution touched. Fail if it scanned one of the tables.

    The pages of a change whose rows are not read are not part of those of the whole plan, because it runs after the rest.
    """
    scans = scans_of(found, tables)
    assert scans == [], f"{of.name}: {json.dumps(scans, indent=1)[:2000]}"
    pages = max(int(node["Shared Hit Blocks"] + node["Shared Read Blocks"]) for node in nodes(found["Plan"]))
    print(f"{of.name}: {pages} pages, {found['Execution Time']:.2f} ms")
    return pages


def check_plan(db: StoreHarness, statement: Statement[Any], *, pages: int) -> None:
    """Fail if a client's execution scans the table of tasks or touches more pages."""
    assert pages_of(plan(db, statement), statement) <= pages


def check_plans(
    db: StoreHarness, statement: Statement[Any], *, pages: int, tables: Collection[str], by: str = "both"
) -> None:
    """Fail if a client's execution, or one of a tree, scans one of the tables or touches more pages."""
    for who, explain in (("tree", plan_of_trees), ("client", plan)):
        if by in (who, "both"):
            assert pages_of(explain(db, statement), statement, tables=tables) <= pages, (statement.name, who)
