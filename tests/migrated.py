"""Migrated and empty schemas, which tests use one after the other: to migrate a new schema takes longer than most tests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import Connection, sql

from everbeat.store import migrating
from everbeat.store.target import Target
from tests.invariants import install_audit

# Sums, because the order of the rows does not matter. Each change of a catalog row gives it a new xmin. The rows of pg_class also
# change with TRUNCATE, so their columns count.
_FACTS = """
select (select sum(hashtextextended(r::text, 0)) from {installation} r), (select sum(hashtextextended(r::text, 0)) from {relay} r),
       (select sum(hashtextextended(r::text, 0)) from {versions} r),
       (select n::text from pg_namespace n where n.oid = {schema}::regnamespace),
       (select sum(hashint8extended(a.xmin::text::bigint, a.attrelid::bigint * 2000 + a.attnum))
        from pg_attribute a join pg_class c on c.oid = a.attrelid where {own}),
       (select sum(hashint8extended(p.xmin::text::bigint, p.oid::bigint)) from pg_proc p where p.pronamespace = {schema}::regnamespace),
       (select sum(hashint8extended(t.xmin::text::bigint, t.oid::bigint)) from pg_type t where t.typnamespace = {schema}::regnamespace),
       (select sum(hashint8extended(x.xmin::text::bigint, x.oid::bigint)) from pg_constraint x where x.connamespace = {schema}::regnamespace),
       (select sum(hashint8extended(t.xmin::text::bigint, t.oid::bigint)) from pg_trigger t join pg_class c on c.oid = t.tgrelid where {own}),
       (select sum(hashint8extended(i.xmin::text::bigint, i.indexrelid::bigint)) from pg_index i join pg_class c on c.oid = i.indrelid where {own}),
       (select sum(hashtextextended(row(c.oid, c.relname, c.relowner, c.relacl, c.reloptions, c.relpersistence, c.relrowsecurity)::text, 0))
        from pg_class c where {own}),
       (select count(*) from pg_statistic s join pg_class c on c.oid = s.starelid where {own})
"""

# A migration creates no partition of the history, so all of them are the test's.
# TRUNCATE and ALTER SEQUENCE write new files, which takes ten times as long as the DELETE of some rows. Triggers and foreign
# keys are off meanwhile. The reset counters keep autovacuum from gathering statistics, which would change the definition.
_EMPTY = """
do $$
declare
    used record;
    large text;
    part regclass;
begin
    set local session_replication_role = replica;
    for part in select inhrelid from pg_inherits where inhparent = to_regclass({history}) loop
        execute 'drop table ' || part;
    end loop;
    for used in
        select c.oid, c.oid::regclass::text as name, pg_relation_size(c.oid) as bytes
        from pg_class c
        where c.relnamespace = {schema}::regnamespace and c.relkind = 'r' and pg_relation_size(c.oid) > 0
          and c.relname not in ('installation', 'relay', 'schema_versions')
    loop
        if used.bytes > {small_bytes} then
            large = concat_ws(', ', large, used.name);
        else
            execute 'delete from ' || used.name;
        end if;
        perform pg_stat_reset_single_table_counters(used.oid);
    end loop;
    if large is not null then
        execute 'truncate ' || large || ' cascade';
    end if;
    perform setval(s.seqrelid, s.seqstart, false)
    from pg_sequence s join pg_class c on c.oid = s.seqrelid where c.relnamespace = {schema}::regnamespace;
end $$
"""
_SMALL_BYTES = 8 * 8192

_OTHERS = """
select count(*) from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
"""


@dataclass
class MigratedSchemas:
    """Lends one migrated, audited and empty schema after the other.

    A schema is lent again if its test left its definition as it was, and left no session. Otherwise it is dropped.
    """

    url: str
    _connection: Connection[Any] | None = None
    _spare: list[str] = field(default_factory=list)
    _facts: dict[str, Any] = field(default_factory=dict)

    def take(self) -> str:
        """Return the name of a migrated and empty schema."""
        if self._spare:
            return self._spare.pop()
        name = new_name()
        target = Target.parse(self.url, schema=name)
        with target.connect("everbeat test") as connection:
            migrating.migrate(connection, target)
            install_audit(connection, name)
        self._facts[name] = _facts(self._own_connection(), name)
        return name

    def give_back(self, name: str, *, is_reusable: bool = True) -> None:
        """Empty the schema for the next test, or drop it. A schema that was not taken is dropped."""
        before = self._facts.pop(name, None)
        connection = self._own_connection()
        if is_reusable and before is not None and _exists(connection, name) and _is_alone(connection):
            connection.execute(
                sql.SQL(_EMPTY).format(
                    schema=sql.Literal(f'"{name}"'),
                    history=sql.Literal(f'"{name}".history'),
                    small_bytes=_SMALL_BYTES,
                )
            )
            if _facts(connection, name) == before:
                self._spare.append(name)
                self._facts[name] = before
                return
        drop(connection, name)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _own_connection(self) -> Connection[Any]:
        """Return one connection for all tests: a new session would first read the catalogs, which takes as long as its queries."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self.url, autocommit=True, application_name="everbeat test schemas"
            )
            # An open transaction is a bug in the test, and should be reported instead of waited for.
            self._connection.execute("set lock_timeout = '10s'")
        return self._connection


def new_name() -> str:
    """Return a unique schema name."""
    return f"test_{uuid4().hex[:12]}"


def drop(connection: Connection[Any], name: str) -> None:
    """Drop the schema if it exists."""
    connection.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(name)))


def _exists(connection: Connection[Any], name: str) -> bool:
    found = connection.execute("select from pg_namespace where nspname = %s", [name])
    return found.rowcount == 1


def _is_alone(connection: Connection[Any]) -> bool:
    """Return whether the test's sessions have ended. The server needs some milliseconds for one that was closed just before."""
    for _ in range(20):
        if connection.execute(_OTHERS).fetchone() == (0,):
            return True
        time.sleep(0.01)  # the server announces the end of a session to no client
    return False


def _facts(connection: Connection[Any], name: str) -> Any:
    """Return what tests must not change: the definition of the schema, and the rows that a migration writes."""
    schema = sql.Literal(f'"{name}"')
    tables = {"installation": "installation", "relay": "relay", "versions": "schema_versions"}
    text = sql.SQL(_FACTS).format(
        schema=schema,
        own=sql.SQL("c.relnamespace = {}::regnamespace").format(schema),
        **{title: sql.Identifier(name, table) for title, table in tables.items()},
    )
    return connection.execute(text).fetchone()
