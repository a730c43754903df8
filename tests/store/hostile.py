"""Hostile rows: copies of an ordinary row, each with one value that everbeat never writes, for every column of every table.

The columns come from the catalogue of PostgreSQL. Each copy differs from its template in one column only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

import psycopg
from msgspec import Struct
from psycopg import Connection, sql

_TIMES: Final = ("'infinity'", "'-infinity'", "'294276-12-31 23:59:59+00'", "'4713-01-01 00:00:00+00 BC'")
_FLOATS: Final = ("'NaN'", "'Infinity'", "'-Infinity'")
_JSON: Final = (
    "'7'", "'\"text\"'", "'null'", "'true'", "'[]'", "'[null]'", "'{{}}'", "'1e999'", "'{{\"a\": 1, \"a\": 2}}'", "'\"\\ud800\"'",
    "'{{\"code\": \"\\ud800\", \"stage\": \"\\ud800\", \"tasks\": [\"\\ud800\"]}}'", "'{{\"\\u0000\": \"\\u0000\"}}'",
    "'{{\"tasks\": 7, \"code\": 7, \"stage\": 7, \"policy\": \"x\", \"executors\": 7, \"serial\": 7, \"good_until\": \"soon\", \"intervals\": 7}}'",
    "'{{\"executors\": {{\"a\": {{\"slots\": \"x\", \"tasks\": 7}}, \"b\": 7}}, \"tasks\": {{\"a\": 1}}}}'",
    "(repeat('[', 3000) || repeat(']', 3000))", "('\"' || repeat('x', 1000000) || '\"')",
)  # fmt: skip
_TEXTS: Final = (
    "''",
    "repeat('x', 1000000)",
    "repeat('y', 9000)",
    "E'\\x1b[31m\\r\\n\\t\\x01'",
    "'\u202e\ud7ff'",
)
_ARRAYS: Final = ("'{{}}'", "'{{NULL}}'", "'{{a,NULL}}'", "'{{{{a,b}},{{c,d}}}}'", "array[repeat('x', 9000)]")
_UUIDS: Final = ("'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-ffff-ffff-ffffffffffff'")

VALUES: Final[Mapping[str, Sequence[str]]] = {
    "smallint": ("-32768", "32767"),
    "integer": ("-2147483648", "2147483647"),
    "bigint": ("'-9223372036854775808'", "9223372036854775807"),
    "timestamp with time zone": _TIMES,
    "endless": _TIMES,
    "real": _FLOATS,
    "double precision": _FLOATS,
    "json": _JSON,
    "jsonb": ('\'{{"a": 7, "b": null, "c": {{}}}}\'', *(each for each in _JSON if "\\u" not in each)),
    "text": _TEXTS,
    "text[]": _ARRAYS,
    "uuid": _UUIDS,
    "oid": ("0", "4294967295"),
    "boolean": ("true", "false"),
    "integer[]": ("'{{}}'", "'{{NULL}}'", "'{{0}}'", "'{{-1,2147483647}}'", "'{{{{1}},{{2}}}}'"),
    "double precision[]": ("'{{}}'", "'{{NULL}}'", "'{{NaN,Infinity}}'", "'{{{{1}},{{2}}}}'"),
    "xid8": ("'0'", "'18446744073709551615'"),
    '"char"': ("'R'", "'W'", "'B'", "'I'", "'x'"),
}
"""Values by type, as SQL expressions with doubled braces; nullable columns are also set to NULL."""

_CATALOGUE: Final = """
    select a.attnum, a.attname, regexp_replace(format_type(a.atttypid, a.atttypmod), '^.*[.]', ''), not a.attnotnull, a.attidentity <> ''
    from pg_attribute a
    where a.attrelid = {table}::regclass and a.attnum > 0 and not a.attisdropped
    order by a.attnum
"""

_REFUSALS: Final = """
    with columns as (
        select c.oid, c.relname, a.attnum, a.attname, a.attidentity
        from pg_class c join pg_attribute a on a.attrelid = c.oid
        where c.relnamespace = {schema}::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
    )
    select c.relname, c.attname, '428C9' from columns c where c.attidentity <> ''
    union
    select c.relname, c.attname, case k.contype when 'c' then '23514' when 'f' then '23503' end
    from columns c join pg_constraint k on k.conrelid = c.oid and c.attnum = any(k.conkey) where k.contype in ('c', 'f')
    union
    select c.relname, c.attname, '23505' from columns c join pg_index i on i.indrelid = c.oid and c.attnum = any(i.indkey) where i.indisunique
    union
    select c.relname, c.attname, '54000' from columns c join pg_index i on i.indrelid = c.oid and c.attnum = any(i.indkey)
"""
"""The SQLSTATEs with which PostgreSQL can refuse a value of a column, by its constraints and indexes."""

_ALWAYS_BROKEN: Final = {
    "smallint", "integer", "bigint", "timestamp with time zone", "real", "double precision",
}  # fmt: skip
_UNREADABLE: Final = {
    value for value in _JSON if "ud800" in value or "1e999" in value or "repeat('['" in value
}


class Column(Struct, frozen=True):
    """A column as the catalogue has it."""

    place: int
    name: str
    kind: str
    nullable: bool
    identity: bool

    @property
    def cast(self) -> str:
        """Return the type of the values."""
        return "timestamptz" if self.kind == "endless" else self.kind

    @property
    def values(self) -> Iterator[str]:
        """Yield the values to store in this column."""
        yield from VALUES[self.kind]
        if self.nullable:
            yield "null"


class HostileRow(Struct, frozen=True):
    """A stored copy whose `column` holds `value`."""

    table: str
    ctid: str
    column: str
    value: str

    kind: str

    @property
    def is_broken(self) -> bool:
        """Whether everbeat never writes this value and cannot use it."""
        if self.kind in _ALWAYS_BROKEN:
            return self.value != "null"
        return (self.kind == "text[]" and "NULL" in self.value) or (
            self.kind == "json" and self.value in _UNREADABLE
        )


class Refused(Struct, frozen=True):
    """A value that PostgreSQL rejected, and the SQLSTATE of the rejection."""

    table: str
    column: str
    value: str
    kind: str
    sqlstate: str | None

    def is_expected(self, expected: Set[tuple[str, str, str]]) -> bool:
        """Whether a constraint or an index of the column explains the rejection; only long texts exceed an index entry."""
        is_text = self.kind in ("text", "text[]")
        if self.sqlstate == "54000" and not (is_text and "repeat(" in self.value):
            return False
        return (self.table, self.column, self.sqlstate or "") in expected


def columns(connection: Connection[Any], schema: str, table: str) -> list[Column]:
    name = sql.Identifier(schema, table).as_string(connection)
    question = sql.SQL(_CATALOGUE).format(table=sql.Literal(name))
    return [Column(*row) for row in connection.execute(question)]


def tables(connection: Connection[Any], schema: str) -> set[str]:
    question = "select relname from pg_class where relkind = 'r' and relnamespace = %s::regnamespace"
    return {row[0] for row in connection.execute(question, [f'"{schema}"'])}


def refusals(connection: Connection[Any], schema: str) -> set[tuple[str, str, str]]:
    """Return (table, column, SQLSTATE) for every refusal that the constraints and indexes of the schema explain."""
    question = sql.SQL(_REFUSALS).format(schema=sql.Literal(f'"{schema}"'))
    return {(row[0], row[1], row[2]) for row in connection.execute(question)}


def copies(
    connection: Connection[Any],
    schema: str,
    table: str,
    template: str,
    *,
    keys: Mapping[str, str],
    share: tuple[int, int] = (0, 1),
) -> tuple[list[HostileRow], list[Refused]]:
    """Store one copy of the template row for each value of each column; return the copies and the rejected values.

    `template`: the condition that selects the row. `share`: (n, of); of long lists of texts and documents, store every n-th only.
    `keys`: SQL expressions for columns that must differ between copies.
    """
    found = columns(connection, schema, table)
    names = [column.name for column in found if not column.identity]
    where = sql.Identifier(schema, table)
    one = sql.SQL("select ctid::text from {} where {} limit 1").format(where, sql.SQL(template))  # type: ignore[arg-type]
    usual = connection.execute(one).fetchone()
    assert usual is not None, f"no row of {table} is like {template}"
    made: list[HostileRow] = []
    refused: list[Refused] = []
    for column in found:
        for number, value in enumerate(column.values):
            if column.kind in ("json", "text") and (number + column.place) % share[1] != share[0]:
                continue
            put = {name: sql.Identifier("o", name) for name in names} | {
                name: sql.SQL(expression) for name, expression in keys.items()
            }  # type: ignore[arg-type]
            statement = sql.SQL("insert into {} as n ({}) select {} from {} o where {} returning n.ctid::text").format(
                where, sql.SQL(", ").join(map(sql.Identifier, names)),
                sql.SQL(", ").join(put[name] for name in names), where, sql.SQL("ctid = {}").format(sql.Literal(usual[0])),  # type: ignore[arg-type]
            )  # fmt: skip
            change = sql.SQL(
                "update {} as n set {} = ({})::{} where ctid = %s returning n.ctid::text"
            ).format(
                where,
                sql.Identifier(column.name),
                sql.SQL(value.replace("{{", "{").replace("}}", "}")),
                sql.SQL(column.cast),
            )  # type: ignore[arg-type]
            try:
                with connection.transaction():
                    placed = connection.execute(statement).fetchone()
                    assert placed is not None
                    moved = connection.execute(change, [placed[0]]).fetchone()
                    assert moved is not None
            except (
                psycopg.IntegrityError,
                psycopg.OperationalError,
                psycopg.errors.GeneratedAlways,
            ) as problem:
                refused.append(Refused(table, column.name, value, column.kind, problem.sqlstate))
                continue
            made.append(HostileRow(table, moved[0], column.name, value, column.kind))
    return made, refused


def change(
    connection: Connection[Any], schema: str, table: str, where: str, column: Column, value: str
) -> bool:
    """Store the value in the column of the matching rows; return False if PostgreSQL rejects it."""
    statement = sql.SQL("update {} set {} = ({})::{} where {}").format(
        sql.Identifier(schema, table), sql.Identifier(column.name), sql.SQL(value.replace("{{", "{").replace("}}", "}")),
        sql.SQL(column.cast), sql.SQL(where),
    )  # type: ignore[arg-type]  # fmt: skip
    try:
        connection.execute(statement)
    except (psycopg.IntegrityError, psycopg.OperationalError):
        return False
    return True
