"""Test sends in the caller's transaction: the task is committed or rolled back with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine

from everbeat import App, TaskState
from everbeat.errors import BlockingCallInLoop, ConfigurationError, TaskNotFound
from tests.store.conftest import StoreHarness
from tests.store.foreign_kinds import ASYNC_KINDS, SYNC_KINDS, AsyncKind, SyncKind, asyncpg_arguments

OWN_END = ("begun", "autocommit")
"""Kinds whose transaction somebody else ends, or that have none."""


@pytest.fixture
def welcome(app: App) -> Any:
    @app.task
    async def welcome(user_id: int) -> int:
        return user_id

    return welcome


@pytest.fixture
def stored(db: StoreHarness) -> Callable[[], int]:
    """Return a function that counts the tasks that other sessions see."""

    def count() -> int:
        return len(db.table("tasks"))

    return count


def ending(kind: SyncKind | AsyncKind) -> bool:
    return not any(word in kind.name for word in OWN_END)


@pytest.mark.parametrize("kind", [each for each in SYNC_KINDS if ending(each)], ids=lambda kind: kind.name)
def test_a_task_sent_in_the_callers_transaction_is_visible_after_its_commit(
    kind: SyncKind, database_url: str, welcome: Any, stored: Callable[[], int]
) -> None:
    with kind.open(database_url) as connection:
        joined = welcome.with_options(connection=connection, key="u1")
        joined.send(1)
        assert stored() == 0
        connection.rollback()
        assert stored() == 0
        handle = joined.send(2)
        many = joined.send_many(welcome.with_options(key=f"m{n}").call(n) for n in range(5))
        assert isinstance(handle.id, UUID)
        assert joined.send(3).id == handle.id, "this transaction already has the key"
        assert stored() == 0
        with pytest.raises(TaskNotFound):
            handle.result(timeout=0.1)
        connection.commit()
    assert stored() == 6
    assert {each.info().state for each in (handle, *many)} == {TaskState.PENDING}


@pytest.mark.parametrize("kind", [each for each in ASYNC_KINDS if ending(each)], ids=lambda kind: kind.name)
async def test_a_task_sent_in_the_callers_async_transaction_is_visible_after_its_commit(
    kind: AsyncKind, database_url: str, welcome: Any, stored: Callable[[], int]
) -> None:
    async with kind.open(database_url) as connection:
        is_asyncpg = kind.name.startswith("asyncpg")

        def transaction() -> Any:
            return connection.transaction() if is_asyncpg else connection

        async def begin(block: Any) -> None:
            if is_asyncpg:
                await block.start()

        joined = welcome.with_options(connection=connection, key="u1")
        block = transaction()
        await begin(block)
        await joined.asend(1)
        assert stored() == 0
        await block.rollback()
        assert stored() == 0
        block = transaction()
        await begin(block)
        await joined.asend(2)
        await joined.asend_many([welcome.call(n) for n in range(5)])
        assert stored() == 0
        await block.commit()
    assert stored() == 6


async def test_type_codecs_of_the_callers_connection_do_not_change_a_send(
    database_url: str, welcome: Any, db: StoreHarness
) -> None:
    connection = await asyncpg.connect(**asyncpg_arguments(database_url))
    try:
        await connection.set_type_codec(
            "json", encoder=lambda value: f'"{value}"', decoder=str, schema="pg_catalog"
        )
        joined = welcome.with_options(connection=connection)
        await joined.asend(1)
        await joined.asend_many([welcome.call(2)])
    finally:
        await connection.close()
    assert {row[0] for row in db.table("tasks", "args::text")} == {
        '{"user_id":1}',
        '{"user_id":2}',
    }


def test_a_transaction_that_fails_rolls_the_task_back(
    database_url: str, welcome: Any, stored: Callable[[], int]
) -> None:
    def send_and_fail(connection: Any) -> None:
        with connection.transaction():
            welcome.with_options(connection=connection).send(1)
            raise ZeroDivisionError

    with psycopg.connect(database_url) as connection:
        with pytest.raises(ZeroDivisionError):
            send_and_fail(connection)
        with connection.transaction():
            welcome.with_options(connection=connection).send(2)
            with pytest.raises(ZeroDivisionError):
                send_and_fail(connection)
    assert stored() == 1


def test_a_send_on_the_callers_connection_is_not_repeated(database_url: str, welcome: Any) -> None:
    connection = psycopg.connect(database_url)
    connection.close()
    with pytest.raises(psycopg.OperationalError):
        welcome.with_options(connection=connection).send(1)


def test_unsupported_connections_are_refused_with_an_explanation(database_url: str, welcome: Any) -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as other, pytest.raises(ConfigurationError, match="leads to no PostgreSQL"):
        welcome.with_options(connection=other).send(1)
    for wrong in (engine, object(), "postgresql://"):
        with pytest.raises(ConfigurationError, match="none of those that can carry a send"):
            welcome.with_options(connection=wrong).send(1)


async def test_a_sync_connection_refuses_asend_and_names_send(database_url: str, welcome: Any) -> None:
    with psycopg.connect(database_url) as connection:
        joined = welcome.with_options(connection=connection)
        with pytest.raises(ConfigurationError, match="use send"):
            await joined.asend(1)
        with pytest.raises(BlockingCallInLoop):
            joined.send(1)


def test_calls_of_two_transactions_are_not_sent_together(database_url: str, welcome: Any, app: App) -> None:
    with psycopg.connect(database_url) as one, psycopg.connect(database_url) as other:
        calls = [welcome.with_options(connection=each).call(1) for each in (one, other)]
        with pytest.raises(ConfigurationError, match="more than one"):
            app.send_many(calls)
        with pytest.raises(ConfigurationError, match="more than one"):
            app.send_many([calls[0], welcome.call(2)])
        assert len(app.send_many([calls[0], calls[0]])) == 2


@pytest.mark.parametrize("kind", SYNC_KINDS, ids=lambda kind: kind.name)
def test_an_error_of_a_missing_schema_gets_a_note_with_the_fix(
    kind: SyncKind, database_url: str, schema: str
) -> None:
    app = App(database_url, schema=schema)
    welcome = app.task(name="welcome")(plain_function)
    with kind.open(database_url) as connection:
        with pytest.raises(Exception) as failure:  # noqa: PT011 - the error of the user's own library
            welcome.with_options(connection=connection).send(1)
        assert_noted(failure.value, schema)
        with pytest.raises(Exception):  # noqa: B017, PT011 - the transaction has failed, or the same again
            welcome.with_options(connection=connection).send_many([welcome.call(1)])
        connection.rollback()
    app.close()


@pytest.mark.parametrize("kind", ASYNC_KINDS, ids=lambda kind: kind.name)
async def test_an_error_of_a_missing_schema_on_an_event_loop_gets_a_note_with_the_fix(
    kind: AsyncKind, database_url: str, schema: str
) -> None:
    app = App(database_url, schema=schema)
    welcome = app.task(name="welcome")(plain_function)
    async with kind.open(database_url) as connection:
        with pytest.raises(Exception) as failure:  # noqa: PT011 - the error of the user's own library
            await welcome.with_options(connection=connection).asend(1)
    assert_noted(failure.value, schema)
    await app.aclose()


def test_errors_of_another_schema_version_and_a_missing_privilege_get_their_own_notes(
    app: App, db: StoreHarness, database_url: str, welcome: Any
) -> None:
    role = f"sender_{db.target.schema[-12:]}"
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(f"create role {role}")
        try:
            with psycopg.connect(database_url) as connection:
                connection.execute(f"set role {role}")
                with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
                    welcome.with_options(connection=connection).send(1)
            assert "grant usage on schema" in " ".join(refused.value.__notes__)
        finally:
            admin.execute(f"drop role {role}")
    with psycopg.connect(database_url) as connection:
        connection.execute(f'alter table "{db.target.schema}".tasks rename column args to arguments')
        with pytest.raises(psycopg.errors.UndefinedColumn) as outdated:
            welcome.with_options(connection=connection).send(1)
    assert "another version of everbeat" in " ".join(outdated.value.__notes__)


def test_other_errors_of_the_users_library_are_raised_unchanged(database_url: str, welcome: Any) -> None:
    with psycopg.connect(database_url) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("select 1/0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction) as failure:
            welcome.with_options(connection=connection).send(1)
    assert not hasattr(failure.value, "__notes__")


def plain_function(user_id: int) -> None: ...


def assert_noted(problem: BaseException, schema: str) -> None:
    (note,) = problem.__notes__
    assert note.startswith(
        f"everbeat: the database of this connection has no everbeat tables in schema {schema!r}"
    )
    assert "everbeat migrate" in note


class TestDjango:
    """Sends on Django's own connection in atomic blocks."""

    @pytest.fixture
    def connection(self, database_url: str) -> Iterator[Any]:
        django = pytest.importorskip(
            "django", reason="LOUD: Django is not installed: its connections are not tried"
        )
        from django.conf import settings
        from django.db import connections

        given = psycopg.conninfo.conninfo_to_dict(database_url)
        if not settings.configured:
            settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}})
            django.setup()
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": given.get("dbname") or given.get("user"),
            "USER": given.get("user"),
            "HOST": given["host"],
            "PORT": given.get("port") or "5432",
        }
        connections.databases["default"].update(database)
        yield connections["default"]
        connections["default"].close()

    def test_a_task_sent_in_a_django_atomic_block_is_visible_after_the_block(
        self, connection: Any, welcome: Any, stored: Callable[[], int]
    ) -> None:
        from django.db import connection as proxy
        from django.db import transaction

        with transaction.atomic():
            welcome.with_options(connection=proxy).send(1)
            welcome.with_options(connection=connection).send_many(welcome.call(n) for n in (2, 3))
            assert stored() == 0
        assert stored() == 3

        @transaction.atomic
        def send_and_fail() -> None:
            welcome.with_options(connection=proxy).send(4)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            send_and_fail()
        assert stored() == 3

    def test_a_django_error_of_a_missing_schema_gets_a_note_with_the_fix(
        self, connection: Any, database_url: str, schema: str
    ) -> None:
        from django.db import ProgrammingError, transaction

        other = App(database_url, schema=f"{schema}_absent")
        welcome = other.task(name="welcome")(plain_function)
        with pytest.raises(ProgrammingError) as failure, transaction.atomic():
            welcome.with_options(connection=connection).send(1)
        assert_noted(failure.value, other.schema)
        other.close()
