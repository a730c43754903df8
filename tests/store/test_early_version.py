"""Version 16 completes a database that was upgraded with an early copy of version 15, which was changed before its release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import Connection, sql

from everbeat.store import migrating
from everbeat.store.migrations import known_migrations, record_of
from everbeat.store.statement import compose
from everbeat.store.target import Target
from tests.migrated import drop, new_name

EARLY = 15
LATER = ("29_limits_old_gates", "31_judge_all_gates")
"""Steps that the early copy did not have."""
EARLY_CONDITION = "m.changed_at > t - interval '1 day'"
FORGETS = "    -- A claim that began a day ago is not expected", "    opened := opened || changed;"

OBJECTS = """
select 'function', p.proname, md5(replace(pg_get_functiondef(p.oid), %(schema)s, 'SCHEMA')) from pg_proc p
where p.pronamespace = %(schema)s::regnamespace
union all
select 'index', i.relname, pg_get_indexdef(i.oid) from pg_class i where i.relnamespace = %(schema)s::regnamespace and i.relkind = 'i'
union all
select 'column', c.relname || '.' || a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid))
from pg_attribute a
join pg_class c on c.oid = a.attrelid
left join pg_attrdef d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
where c.relnamespace = %(schema)s::regnamespace and c.relkind = 'r' and a.attnum > 0
order by 1, 2, 3
"""


def early(name: str, text: str) -> str:
    """Return the text of a step of version 15 as its early copy had it."""
    if name.startswith("10_"):
        return text.replace("    add column has_old_gates boolean not null default false,\n", "")
    if name.startswith("14_"):
        return text.replace("    new.has_old_gates := true;\n", "")
    if name.startswith("23_"):
        before, _, rest = text.partition(FORGETS[0])
        after = FORGETS[1] + rest.partition(FORGETS[1])[2]
        return (before + after).replace("m.has_old_gates", EARLY_CONDITION)
    return text


@contextmanager
def dropped_afterwards(connection: Connection[Any], *targets: Target) -> Iterator[None]:
    try:
        yield
    finally:
        for target in targets:
            drop(connection, target.schema)


def migrate_as_early_copy(connection: Connection[Any], target: Target) -> None:
    """Migrate to version 15 with the statements of its early copy."""
    migrating.migrate(connection, target, to=EARLY - 1)  # type: ignore[arg-type]
    (version,) = (each for each in known_migrations() if each.version == EARLY)
    for statement in version.statements:
        name = statement.rpartition("/")[2]
        if name not in LATER:
            text = early(name, compose(statement, target.schema).decode())
            connection.execute(text.encode(), prepare=False)
    connection.execute(record_of(version, target.schema).encode(), prepare=False)


def objects(connection: Connection[Any], target: Target) -> set[tuple[str, str, str]]:
    found = connection.execute(OBJECTS, {"schema": target.schema}).fetchall()
    return {(kind, name, text.replace(target.schema, "SCHEMA")) for kind, name, text in found}


def test_a_database_with_an_early_copy_of_version_15_becomes_equal_to_others(
    database_url: str,
) -> None:  # J3
    target, other = (Target.parse(database_url, schema=new_name()) for _ in range(2))
    with target.connect("everbeat test") as connection, dropped_afterwards(connection, target, other):
        migrating.migrate(connection, other)
        migrate_as_early_copy(connection, target)
        insert = "insert into {}.limits (name, concurrency) values ('stripe', 1)"
        connection.execute(sql.SQL(insert).format(sql.Identifier(target.schema)))
        assert "has_old_gates" not in str(objects(connection, target))
        migrating.migrate(connection, target)
        state = sql.SQL("select version, has_old_gates from {}.limits").format(sql.Identifier(target.schema))
        assert connection.execute(state).fetchall() == [(1, True)], "its gates are judged again"
        assert "has_old_gates" in str(objects(connection, target))
        assert objects(connection, target) == objects(connection, other)
