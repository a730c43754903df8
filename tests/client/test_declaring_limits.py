"""Test how a program that sends tasks stores the limits of its app: with its patience, its name in errors, and after a failure."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from everbeat import App, Limit, Schedule
from everbeat.client import limit_declarations
from everbeat.errors import BlockingCallInLoop, DatabaseUnreachable
from tests.client.conftest import NewApp
from tests.store.conftest import StoreHarness


@contextmanager
def no_table_of_limits(db: StoreHarness) -> Iterator[None]:
    db.connection.execute(db.plain("alter table {schema}.limits rename to limits_away"))
    try:
        yield
    finally:
        db.connection.execute(db.plain("alter table {schema}.limits_away rename to limits"))


@pytest.fixture
def cut_off(db: StoreHarness) -> Iterator[App]:
    """Yield an app whose own connection cannot be opened, on the schema of the harness."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"postgresql://postgres@127.0.0.1:{unused.getsockname()[1]}/postgres"
        opened = App(url, schema=db.target.schema, limits=[Limit("gpu", concurrency=4)], patience=20.0)
        yield opened
        opened.close()


def with_train(limited: NewApp) -> tuple[App, Any]:
    app = limited(Limit("gpu", concurrency=4))
    return app, train_of(app)


def train_of(app: App) -> Any:
    @app.task(limits=["gpu"])
    def train() -> None: ...

    return train


def names(app: App) -> list[str]:
    return [each.name for each in app.limits()]


def test_the_patience_of_a_send_applies_to_storing_its_limits(cut_off: App) -> None:
    train = train_of(cut_off)
    began = time.monotonic()
    with pytest.raises(DatabaseUnreachable):
        train.with_options(patience="200ms").send()
    with pytest.raises(DatabaseUnreachable):
        cut_off.send_many([train.with_options(patience="200ms").call()])
    assert time.monotonic() - began < 4


def put(app: App, train: Any) -> object:
    return app.put_schedule(Schedule("hourly", train.call(), every="1h"))


def start(app: App, train: Any) -> object:
    wf = app.workflow("w")
    wf.add(train)
    return wf.start()


@pytest.mark.parametrize(
    ("call", "name", "twin"),
    [
        (lambda app, train: app.set_limit("gpu", concurrency=1), "App.set_limit", "App.aset_limit"),
        (lambda app, train: app.send_many([train.call()]), "send_many", "asend_many"),
        (put, "App.put_schedule", "App.aput_schedule"),
        (start, "start", "astart"),
        (lambda app, train: train.send(), "send", "asend"),
    ],
)
async def test_a_call_on_an_event_loop_is_refused_with_its_own_name(
    limited: NewApp, call: Callable[[App, Any], object], name: str, twin: str
) -> None:
    app, train = with_train(limited)
    with pytest.raises(BlockingCallInLoop) as error:
        call(app, train)
    assert (error.value.name, error.value.twin) == (name, twin)


def test_a_joined_send_waits_briefly_and_seldom_for_the_apps_own_connection(
    cut_off: App, database_url: str
) -> None:
    train = train_of(cut_off)
    with psycopg.connect(database_url) as connection:
        began = time.monotonic()
        handles = [train.with_options(connection=connection).send() for _ in range(5)]
        handles += cut_off.send_many([train.with_options(connection=connection).call()])
        assert time.monotonic() - began < 4
        assert len({each.id for each in handles}) == 6
        connection.rollback()


async def test_an_async_joined_send_waits_briefly_for_the_apps_own_connection(
    cut_off: App, database_url: str
) -> None:
    train = train_of(cut_off)
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        began = time.monotonic()
        await train.with_options(connection=connection).asend()
        assert time.monotonic() - began < 4
        await connection.rollback()


def test_a_joined_send_that_could_not_store_its_limits_is_followed_by_another_try(
    limited: NewApp, db: StoreHarness, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, train = with_train(limited)
    monkeypatch.setattr(limit_declarations, "AGAIN_S", 0.0)
    with psycopg.connect(database_url) as connection:
        joined = train.with_options(connection=connection)
        with no_table_of_limits(db):
            joined.send()
            connection.rollback()
        assert names(app) == []
        joined.send()
        assert names(app) == ["gpu"]
        connection.rollback()


def test_a_limit_that_is_registered_after_the_first_send_is_stored_too(limited: NewApp) -> None:
    app, train = with_train(limited)
    train.send()

    @app.task(concurrency=3)
    def report() -> None: ...

    report.send()
    assert names(app) == ["gpu", "task:report"]
