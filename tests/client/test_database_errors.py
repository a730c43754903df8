"""Test the errors of unusable databases: the first use raises them, with a fix and without the password."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

from everbeat import App
from everbeat.client.database_access import database_of
from everbeat.embedded.server import EmbeddedServer
from everbeat.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseReadOnly,
    DatabaseTooOld,
    DatabaseUnreachable,
    SchemaForbidden,
    SchemaFromTheFuture,
    SchemaMissing,
    WrongDatabaseURL,
)
from everbeat.store import refusals, target
from tests.conftest import NewServer


def refused(app: App, kind: type[DatabaseError]) -> DatabaseError:
    """Return the error of a first use; a thread and an event loop get the same."""

    async def program() -> None:
        await app.asend_by_name("work")

    with pytest.raises(kind) as on_loop:
        asyncio.run(program())
    with pytest.raises(kind) as in_thread:
        app.send_by_name("work")
    assert str(in_thread.value) == str(on_loop.value)
    app.close()
    return in_thread.value


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "is empty"),
        ("mysql://db/app", "only PostgreSQL"),
        ("postgresql://u:secret@host:port/app", "a port that is not a number"),
        ("postgresql://u:secret@a:1,b:99999/app", "a port that is not a number"),
        ("postgresql://u:secret@a:1,b:99999/app", "for host 2 of 2"),
        ("host=db password=secret prot=1", "libpq does not know its option 'prot'.*did you mean 'port'"),
        ("postgresql://u:secret@a/app?sslmod=require", "its option 'sslmod'.*did you mean 'sslmode'"),
        ("host=db password=my secret=1", "an option that libpq does not know. It is not shown"),
        ("postgresql://u:secret@a/app?pooler=statement", "names pooler=statement, which"),
        ("postgresql://u:secret@a/app?pooler=", "empty option 'pooler='"),
        ("embeded", "write 'embedded' or 'embedded:FOLDER'"),
        ("Embedded:folder", "write 'embedded' or 'embedded:FOLDER'"),
        (5, "The database URL is of type int"),
    ],
)
def test_an_invalid_database_url_is_refused_when_the_app_is_constructed(url: Any, said: str) -> None:
    with pytest.raises(WrongDatabaseURL, match=said) as refusal:
        App(url)
    assert "secret" not in str(refusal.value)


def test_a_missing_database_url_is_refused_with_both_ways_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERBEAT_DATABASE_URL", raising=False)
    with pytest.raises(WrongDatabaseURL, match=r"EVERBEAT_DATABASE_URL.*App\('embedded'\)"):
        App()


def test_the_app_reads_the_database_url_from_the_environment(
    database_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERBEAT_DATABASE_URL", database_url)
    app = App(schema=schema)
    assert app.send_by_name("work").info().name == "work"
    app.close()


@pytest.mark.parametrize("schema", ["", "two words", "pg_everbeat", "public", "ever$beat", "x" * 64, 5])
def test_an_invalid_schema_name_is_refused(database_url: str, schema: Any) -> None:
    for url in (database_url, "embedded"):
        with pytest.raises(ConfigurationError, match=r": App.schema = .* (a schema name is|its own schema)"):
            App(url, schema=schema)


def test_the_error_of_an_unreachable_database_hides_the_password() -> None:
    error = refused(App("postgresql://user:secret@127.0.0.1:1/app", patience="300ms"), DatabaseUnreachable)
    assert "127.0.0.1:1/app" in error.message
    assert error.message.count("\n") == 0
    assert error.message.endswith("Connection refused.")
    assert "secret" not in str(error)


def test_the_error_names_a_database_that_does_not_exist(database_url: str) -> None:
    app = App(conninfo.make_conninfo(database_url, dbname="nowhere"))
    assert "nowhere" in refused(app, DatabaseError).message


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ('FATAL:  password authentication failed for user "app"', "correct the password"),
        ('FATAL:  database "shop" does not exist', "create this database"),
        ('FATAL:  role "app" does not exist', "create this role"),
        ("FATAL:  sorry, too many clients already", "raise max_connections"),
        (
            "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
            "raise max_connections",
        ),
        ('FATAL:  too many connections for role "app"', "the connection limit of the role"),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "app"', "pg_hba.conf"),
        ("Connection refused", "check the URL, and make sure that the server is running"),
    ],
)
def test_each_refused_connection_names_its_own_fix(said: str, fix: str) -> None:
    assert fix in refusals.remedy_of_connection(f'connection to server at "a", port 5432 failed: {said}')


def test_a_role_without_free_connections_is_reported_with_its_fix(new_server: NewServer) -> None:
    server = new_server()
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("create role few login connection limit 0")
        url = conninfo.make_conninfo(server.url, user="few")
        problem = refused(App(url, patience="300ms"), DatabaseUnreachable)
    assert "connection limit of the role" in str(problem.fix)


def test_a_server_that_is_read_only_by_a_setting_names_the_setting(new_server: NewServer) -> None:
    server = new_server()
    App(server.url).migrate()
    app = App(server.url, patience="300ms")
    app.send_by_name("work")
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("alter system set default_transaction_read_only = on")
        admin.execute("select pg_reload_conf()")
    problem = refused(app, DatabaseReadOnly)
    assert "default_transaction_read_only is on" in problem.message
    assert "primary" not in str(problem.fix)


def test_the_error_of_a_read_only_role_names_the_missing_privilege(database_url: str, schema: str) -> None:
    App(database_url, schema=schema).migrate()
    with role(database_url) as (name, url):
        denied = refused(App(url, schema=schema), SchemaForbidden)
        assert f'grant usage on schema "{schema}"' in str(denied.fix)
        execute(database_url, sql.SQL("grant usage on schema {} to {}"), schema, name)
        execute(database_url, sql.SQL("grant select on all tables in schema {} to {}"), schema, name)
        denied = refused(App(url, schema=schema), SchemaForbidden)
        assert f'insert, update, delete on all tables in schema "{schema}"' in str(denied.fix)


def test_the_sql_statement_of_a_fix_quotes_the_schema_name(database_url: str, schema: str) -> None:
    with role(database_url) as (_, url):
        problem = refused(App(url, schema=f"Shop_{schema}"), SchemaForbidden)
    assert f"'create schema \"Shop_{schema}\" authorization <role>'" in str(problem.fix)


def test_a_refused_login_is_reported_at_the_first_use_without_a_wait(new_server: NewServer) -> None:  # J11
    server = new_server()
    with psycopg.connect(server.url, autocommit=True) as admin:
        row = admin.execute("show hba_file").fetchone()
        assert row is not None
        file = Path(row[0])
        file.write_text(f"local all app scram-sha-256\nlocal all shut reject\n{file.read_text()}")
        admin.execute("create role app login password 'right'")
        admin.execute("create role shut login")
        admin.execute("create role idle nologin")
        admin.execute("select pg_reload_conf()")
    wrong = [
        ({"user": "app", "password": "wrong"}, "password authentication failed", "correct the password"),
        ({"user": "app"}, "no password supplied", "correct the password"),
        ({"user": "shut"}, "rejects connection", "pg_hba.conf"),
        ({"user": "idle"}, "not permitted to log in", "alter role <role> login"),
        ({"user": "nobody"}, 'role "nobody" does not exist', "create this role"),
        ({"dbname": "nowhere"}, 'database "nowhere" does not exist', "create this database"),
    ]
    for settings, said, fix in wrong:
        app = App(conninfo.make_conninfo(server.url, **settings), patience="60s")
        began_at = time.monotonic()
        error = refused(app, DatabaseUnreachable)
        assert said in error.message
        assert fix in str(error.fix)
        assert time.monotonic() - began_at < 15


def test_an_unreachable_host_is_not_reported_as_a_refused_login(database_url: str) -> None:  # J11
    """One host refuses the login, but the unreachable host might accept it."""
    place = conninfo.conninfo_to_dict(database_url)
    hosts = {"host": f"127.0.0.1,{place['host']}", "port": f"1,{place['port']}"}
    app = App(conninfo.make_conninfo(database_url, dbname="nowhere", **hosts), patience="1s")
    began_at = time.monotonic()
    assert "nowhere" in refused(app, DatabaseUnreachable).message
    assert time.monotonic() - began_at > 1.5


def test_a_read_only_database_is_refused(database_url: str, schema: str) -> None:
    with role(database_url) as (name, url):
        execute(database_url, sql.SQL("alter role {} set default_transaction_read_only = on"), name)
        assert "writes" in refused(App(url, schema=schema, patience="300ms"), DatabaseReadOnly).message


def test_a_postgresql_server_that_is_too_old_is_refused(
    database_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "OLDEST_SERVER", 990_000)  # the tests have no server that old
    assert "PostgreSQL 18" in refused(App(database_url, schema=schema), DatabaseTooOld).message


def test_without_auto_migrate_a_missing_schema_is_an_error(database_url: str, schema: str) -> None:
    app = App(database_url, schema=schema, auto_migrate=False)
    assert "everbeat migrate" in str(refused(app, SchemaMissing))
    assert app.schema_status().applied == ()
    assert app.migrate() == app.schema_status().known
    assert app.migrate() == ()
    assert app.send_by_name("work").info().name == "work"
    app.close()


def test_a_schema_of_a_newer_everbeat_is_refused(database_url: str, schema: str) -> None:
    App(database_url, schema=schema).migrate()
    execute(
        database_url,
        sql.SQL("insert into {}.schema_versions (version, name) values (999, 'later')"),
        schema,
    )
    for auto_migrate in (True, False):
        error = refused(App(database_url, schema=schema, auto_migrate=auto_migrate), SchemaFromTheFuture)
        assert "999" in error.message


def test_a_role_that_owns_only_its_schema_can_use_every_operation(
    database_url: str, schema: str
) -> None:  # B15
    with role(database_url) as (name, url):
        execute(database_url, sql.SQL("create schema {} authorization {}"), schema, name)
        app = App(url, schema=schema)

        @app.task
        def work(n: int) -> int:
            return n

        handle = work.send(1)
        app.send_many([work.call(2)])
        assert handle.cancel().state == "CANCELLED"
        assert handle.outcome(timeout=10) == handle.outcome()
        handle.retry()
        assert len(app.list_tasks()) == 2
        assert app.list_active_workers() == []
        assert [queue.name for queue in app.queues()] == ["default"]
        app.close()


def test_the_error_of_a_role_that_cannot_create_the_schema_names_the_fix(
    database_url: str, schema: str
) -> None:
    with role(database_url) as (_, url):
        error = refused(App(url, schema=schema), SchemaForbidden)
        assert "authorization" in str(error)


def test_two_apps_in_two_schemas_do_not_see_each_other(database_url: str, schema: str) -> None:  # B15
    one, other = App(database_url, schema=schema), App(database_url, schema=f"{schema}_b")
    try:
        sent = one.send_by_name("work", key="k")
        assert other.list_tasks() == []
        assert other.send_by_name("work", key="k").id != sent.id
        assert [task.id for task in one.list_tasks()] == [sent.id]
        assert database_of(one).channel != database_of(other).channel
    finally:
        one.close()
        other.close()
        execute(database_url, sql.SQL("drop schema if exists {} cascade"), f"{schema}_b")


def test_many_apps_can_create_the_schema_at_the_same_time(database_url: str, schema: str) -> None:
    apps = [App(database_url, schema=schema) for _ in range(6)]

    async def program() -> None:
        await asyncio.gather(*(app.asend_by_name("work") for app in apps))

    asyncio.run(program())
    assert len(apps[0].list_tasks()) == 6
    for app in apps:
        app.close()


def test_the_embedded_server_starts_at_the_first_use_and_stops_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERBEAT_EMBEDDED_DIR", "kept")
    app = App("embedded")
    assert not (tmp_path / "kept").exists()
    handle = app.send_by_name("work")
    status = EmbeddedServer.status(tmp_path / "kept")
    assert status.running
    app.close()
    assert not EmbeddedServer.status(tmp_path / "kept").running
    assert app.info(handle.id).name == "work"  # the next use opens it again
    app.close()


@contextmanager
def role(url: str) -> Iterator[tuple[str, str]]:
    """Yield a role without any privileges and the URL that connects as this role."""
    name = "everbeat_test_role"
    execute(url, sql.SQL("create role {} login"), name)
    try:
        yield name, conninfo.make_conninfo(url, user=name)
    finally:
        execute(url, sql.SQL("drop owned by {} cascade"), name)
        execute(url, sql.SQL("drop role {}"), name)


def execute(url: str, statement: sql.SQL, *names: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.format(*(sql.Identifier(name) for name in names)))
