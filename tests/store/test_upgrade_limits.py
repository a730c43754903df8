"""Obstacles to an upgrade: poolers, missing rights, a read-only server, an autovacuum."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import psycopg
import pytest
from psycopg import sql

from everbeat import App
from everbeat.domain.doctor.findings import CheckVerdict
from everbeat.embedded.server import EmbeddedServer
from everbeat.errors import DatabaseReadOnly, MigrationStopped, SchemaForbidden
from everbeat.examination import Examination
from everbeat.store import migrating, migrations
from everbeat.store.migrations import known_migrations
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.stories.pooler import pooled

NEWEST = known_migrations()[-1].version
SLOW_VACUUM = {"autovacuum_naptime": "1s"}
WITHIN_S = 30.0


@pytest.fixture
def target(database_url: str, schema: str) -> Target:
    return Target.parse(database_url, schema=schema)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)  # polls from outside


def versions(target: Target) -> tuple[int, ...]:
    with target.connect("everbeat test") as connection:
        return migrations.status(connection, target).applied


def test_an_upgrade_through_a_transaction_pooler_is_rejected_and_a_creation_is_not(
    new_server: NewServer,
) -> None:  # J3
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server: EmbeddedServer = new_server(tcp_port=port)
    direct = Target.parse(server.tcp_url)
    with pooled(server.tcp_url) as url:
        through = Target.parse(url)
        with through.connect("everbeat test") as connection:
            assert migrating.migrate(connection, through, to=NEWEST - 1) != ()
            with pytest.raises(MigrationStopped, match="behind a transaction pooler") as refused:
                migrating.migrate(connection, through)
            assert refused.value.fix is not None
            assert "the URL of the server itself" in refused.value.fix
    assert max(versions(direct)) == NEWEST - 1
    with direct.connect("everbeat test") as connection:
        assert migrating.migrate(connection, direct) == (NEWEST,)


@pytest.mark.parametrize("rights", ["usage", "usage, create"])
def test_a_role_that_does_not_own_the_schema_cannot_upgrade_it(target: Target, rights: str) -> None:  # J3
    role = f"role_{target.schema}"
    names = {"schema": sql.Identifier(target.schema), "role": sql.Identifier(role), "rights": sql.SQL(rights)}
    with target.connect("everbeat test") as admin:
        migrating.migrate(admin, target, to=NEWEST - 1)
        admin.execute(sql.SQL("create role {role} login").format(**names))
        try:
            admin.execute(sql.SQL("grant {rights} on schema {schema} to {role}").format(**names))
            admin.execute(sql.SQL("grant all on all tables in schema {schema} to {role}").format(**names))
            theirs = Target.parse(psycopg.conninfo.make_conninfo(target.url, user=role), schema=target.schema)
            with theirs.connect("everbeat test") as connection, pytest.raises(SchemaForbidden) as refused:
                migrating.migrate(connection, theirs)
            assert (
                refused.value.fix == "run 'everbeat migrate' as the role that owns the schema and its tables."
            )
        finally:
            admin.execute(sql.SQL("drop owned by {role} cascade").format(**names))
            admin.execute(sql.SQL("drop role {role}").format(**names))
    assert max(versions(target)) == NEWEST - 1


def test_an_upgrade_on_a_read_only_server_is_rejected(target: Target) -> None:  # J3
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target, to=NEWEST - 1)
        connection.execute("set default_transaction_read_only = on")
        with pytest.raises(DatabaseReadOnly):
            migrating.migrate(connection, target)
        connection.execute("set default_transaction_read_only = off")
        assert migrating.migrate(connection, target) == (NEWEST,)


@pytest.mark.long
def test_an_upgrade_does_not_wait_for_an_autovacuum_to_finish(
    new_server: NewServer,
) -> None:  # J3
    server = new_server(settings=SLOW_VACUUM)
    target = Target.parse(server.url)
    vacuums = (
        "select 1 from pg_locks l join pg_stat_activity a using (pid)"
        " where a.backend_type = 'autovacuum worker' and l.relation = 'everbeat.tasks'::regclass and l.granted"
    )
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target, to=10)
        connection.execute(
            "alter table everbeat.tasks set (autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1,"
            " autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0)"
        )
        connection.execute(
            "insert into everbeat.tasks (id, name, queue, args) select gen_random_uuid(), 'work', 'default', '{}' from generate_series(1, 50000)"
        )
        connection.execute("delete from everbeat.tasks")
        until(lambda: connection.execute(vacuums).fetchone() is not None, "an autovacuum works on the table")
        reported: list[str] = []
        began_at = time.monotonic()
        assert migrating.migrate(connection, target, patience_s=20, report=reported.append) == tuple(
            range(11, NEWEST + 1)
        )
        print(f"{time.monotonic() - began_at:.1f} s")
    assert [line for line in reported if "waits for a lock on tasks" in line] != []


def test_a_role_with_rights_on_the_tables_continues_to_work_after_an_upgrade(
    target: Target,
) -> None:  # J3
    role = f"role_{target.schema}"
    names = {"schema": sql.Identifier(target.schema), "role": sql.Identifier(role)}
    with target.connect("everbeat test") as admin:
        migrating.migrate(admin, target, to=NEWEST - 1)
        admin.execute(sql.SQL("drop table {schema}.schema_steps").format(**names))  # as version 10 left it
        admin.execute(sql.SQL("create role {role} login").format(**names))
        try:
            admin.execute(sql.SQL("grant usage on schema {schema} to {role}").format(**names))
            rights = "grant select, insert, update, delete on all tables in schema {schema} to {role}"
            admin.execute(sql.SQL(rights).format(**names))
            migrating.migrate(admin, target)
            app = App(psycopg.conninfo.make_conninfo(target.url, user=role), schema=target.schema)
            try:
                found = {each.code: each for each in Examination(app, long_transaction_s=300).checks()}
            finally:
                app.close()
        finally:
            admin.execute(sql.SQL("drop owned by {role} cascade").format(**names))
            admin.execute(sql.SQL("drop role {role}").format(**names))
    assert {code: found[code].verdict for code in ("SCHEMA", "RIGHTS", "UPGRADE")} == dict.fromkeys(
        ("SCHEMA", "RIGHTS", "UPGRADE"), CheckVerdict.OK
    )
