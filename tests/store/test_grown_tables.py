"""A later migration adds columns while this code runs: every statement continues to work and returns the same columns."""

from __future__ import annotations

import re

import pytest
from psycopg import sql
from psycopg.pq import ExecStatus

from everbeat.store import leases
from everbeat.store.statement import compose, source
from tests.architecture.source_tree import PACKAGE
from tests.store.conftest import StoreHarness

SQL = PACKAGE / "sql"
STATEMENTS = [
    name
    for path in sorted(SQL.rglob("*.sql"))
    if not (name := path.relative_to(SQL).as_posix().removesuffix(".sql")).startswith(
        ("schema/", "bench/", "fragment/")
    )
]


def answers(db: StoreHarness, name: str, *, called: str) -> list[tuple[bytes | None, int]]:
    """Return the columns and types of PostgreSQL's reply; raise its error for a statement that it cannot prepare."""
    places: list[str] = []

    def place(parameter: re.Match[str]) -> str:
        if parameter[1] not in places:
            places.append(parameter[1])
        return f"${places.index(parameter[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", place, compose(name, db.target.schema).decode()).replace("%%", "%")
    server = db.connection.pgconn
    prepared = server.prepare(called.encode(), text.encode())
    assert prepared.status == ExecStatus.COMMAND_OK, f"{name}: {prepared.error_message.decode()}"
    found = server.describe_prepared(called.encode())
    return [(found.fname(column), found.ftype(column)) for column in range(found.nfields)]


def grow(db: StoreHarness) -> None:
    """Give each table and each view one more column, as a later migration might."""
    schema = sql.Identifier(db.target.schema)
    found = db.connection.execute(
        "select c.relname, c.relkind = 'v', pg_get_viewdef(c.oid) from pg_class c"
        " where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'v')",
        [f'"{db.target.schema}"'],
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
        db.connection.execute(change)


def test_statements_return_the_same_columns_after_tables_and_views_grow(db: StoreHarness) -> None:  # J3
    before = {name: answers(db, name, called=f"{name} before") for name in STATEMENTS}
    grow(db)
    after = {name: answers(db, name, called=f"{name} after") for name in STATEMENTS}
    assert after == before


def test_a_later_column_of_any_name_does_not_change_the_meaning_of_a_statement(
    db: StoreHarness,
) -> None:  # J3
    """No statement mistakes a later column for its own name: all names in the statement become columns of its tables.

    A point cannot be compared with other types, so a mistake cannot go unnoticed.
    """
    schema = sql.Identifier(db.target.schema)
    columns: dict[str, set[str]] = {}
    for table, column in db.connection.execute(
        "select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relnamespace = %s::regnamespace and c.relkind = 'r'",
        [f'"{db.target.schema}"'],
    ):
        columns.setdefault(table, set()).add(column)
    for name in STATEMENTS:
        before = answers(db, name, called=f"{name} as it is")
        text = source(name)
        words = set(re.findall(r"[a-z_]\w*", re.sub(r"--[^\n]*|'[^']*'|%\(\w+\)s", "", text)))
        with db.connection.transaction(force_rollback=True):
            for table in columns.keys() & words:
                later = [
                    sql.SQL("add column {} point").format(sql.Identifier(word))
                    for word in words - columns[table]
                ]
                change = sql.SQL("alter table {}.{} ").format(schema, sql.Identifier(table))
                db.connection.execute(change + sql.SQL(", ").join(later))
            assert answers(db, name, called=f"{name} later") == before, name


@pytest.mark.filterwarnings("error")
def test_prepared_statements_and_functions_continue_to_work_after_tables_and_views_grow(
    db: StoreHarness,
) -> None:  # J3
    """psycopg prepares a statement at its sixth run; PostgreSQL then rejects it if its result got another column."""

    def live() -> None:
        begun = db.running()
        assert db.leases()[0].claim_id == begun.claim_id
        assert [each.id for each in db.run(leases.leases_by_id([begun.id]))] == [begun.id]
        assert db.settle(begun) == "COMPLETED"

    for _ in range(8):
        live()
    grow(db)
    for _ in range(3):
        live()
    assert db.connection.execute(db.plain("select * from {schema}.bad_rows(100)")).fetchall() == []
