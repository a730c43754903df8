"""A later migration adds columns while this code runs: each of its statements goes on, with the same columns in its answer."""

from __future__ import annotations

import re

import pytest
from psycopg import sql
from psycopg.pq import ExecStatus

from everbeat.store import leases
from everbeat.store.statement import compose
from tests.architecture.source_tree import PACKAGE
from tests.store.conftest import Hands

SQL = PACKAGE / "sql"
STATEMENTS = [
    name
    for path in sorted(SQL.rglob("*.sql"))
    if not (name := path.relative_to(SQL).as_posix().removesuffix(".sql")).startswith(("schema/", "bench/"))
]


def answers(hands: Hands, name: str, *, called: str) -> list[tuple[bytes | None, int]]:
    """The columns and their types with which PostgreSQL would answer; raises what it says to a statement that it cannot prepare."""
    places: list[str] = []

    def place(parameter: re.Match[str]) -> str:
        if parameter[1] not in places:
            places.append(parameter[1])
        return f"${places.index(parameter[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", place, compose(name, hands.target.schema).decode()).replace("%%", "%")
    server = hands.connection.pgconn
    prepared = server.prepare(called.encode(), text.encode())
    assert prepared.status == ExecStatus.COMMAND_OK, f"{name}: {prepared.error_message.decode()}"
    found = server.describe_prepared(called.encode())
    return [(found.fname(column), found.ftype(column)) for column in range(found.nfields)]


def grow(hands: Hands) -> None:
    """Gives each table and each view one more column, as a later migration may."""
    schema = sql.Identifier(hands.target.schema)
    found = hands.connection.execute(
        "select c.relname, c.relkind = 'v', pg_get_viewdef(c.oid) from pg_class c"
        " where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'v')",
        [f'"{hands.target.schema}"'],
    ).fetchall()
    for name, is_view, definition in found:
        if is_view:
            text = sql.SQL("create or replace view {}.{} as select old.*, 1 as grown from ({}) old")
            change = text.format(schema, sql.Identifier(name), sql.SQL(definition.rstrip().rstrip(";")))
        else:
            text = sql.SQL(
                "alter table {}.{} add column grown text not null default 'of a later version',"
                " add column grown_document json default '[]', add column grown_list text[] default '{{}}', add column grown_point point"
            )
            change = text.format(schema, sql.Identifier(name))
        hands.connection.execute(change)


def test_no_answer_gets_more_columns_when_tables_and_views_grow(hands: Hands) -> None:  # J3
    before = {name: answers(hands, name, called=f"{name} before") for name in STATEMENTS}
    grow(hands)
    after = {name: answers(hands, name, called=f"{name} after") for name in STATEMENTS}
    assert after == before


def test_a_later_column_can_have_any_name(hands: Hands) -> None:  # J3
    """No statement takes a later column for what it means by the same name: all names of the statement become columns of its tables.

    A point can be compared with nothing, so what is taken for one cannot go unnoticed.
    """
    schema = sql.Identifier(hands.target.schema)
    columns: dict[str, set[str]] = {}
    for table, column in hands.connection.execute(
        "select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relnamespace = %s::regnamespace and c.relkind = 'r'",
        [f'"{hands.target.schema}"'],
    ):
        columns.setdefault(table, set()).add(column)
    for name in STATEMENTS:
        before = answers(hands, name, called=f"{name} as it is")
        text = (SQL / f"{name}.sql").read_text(encoding="utf-8")
        words = set(re.findall(r"[a-z_]\w*", re.sub(r"--[^\n]*|'[^']*'|%\(\w+\)s", "", text)))
        with hands.connection.transaction(force_rollback=True):
            for table in columns.keys() & words:
                later = [
                    sql.SQL("add column {} point").format(sql.Identifier(word))
                    for word in words - columns[table]
                ]
                change = sql.SQL("alter table {}.{} ").format(schema, sql.Identifier(table))
                hands.connection.execute(change + sql.SQL(", ").join(later))
            assert answers(hands, name, called=f"{name} later") == before, name


@pytest.mark.filterwarnings("error")
def test_prepared_statements_and_functions_go_on_when_tables_and_views_grow(hands: Hands) -> None:  # J3
    """psycopg prepares a statement at its sixth run; PostgreSQL then refuses it if its answer got another column."""

    def live() -> None:
        begun = hands.running()
        assert hands.leases()[0].claim_id == begun.claim_id
        assert [each.id for each in hands.run(leases.leases_by_id([begun.id]))] == [begun.id]
        assert hands.settle(begun) == "COMPLETED"

    for _ in range(8):
        live()
    grow(hands)
    for _ in range(3):
        live()
    assert hands.connection.execute(hands.plain("select * from {schema}.bad_rows(100)")).fetchall() == []
