"""A call of a client ends within its patience, whatever the server does, and finds the other host where there is one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from everbeat import App
from everbeat.errors import DatabaseUnreachable
from tests.conftest import NewPair
from tests.replication import Pair

PATIENCE_S = 2.0
BOUND_S = 3 * (PATIENCE_S + 1)


@contextmanager
def ends_in_time() -> Iterator[None]:
    began_at = time.monotonic()
    yield
    assert time.monotonic() - began_at < BOUND_S


@pytest.fixture
def make_app() -> Iterator[Callable[[str], App]]:
    made: list[App] = []

    def make(url: str) -> App:
        made.append(App(url, patience=PATIENCE_S))
        return made[-1]

    yield make
    for app in made:
        app.close()


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Its answer or error; fails if it does not end, as it would block the test for ever."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as problem:  # noqa: BLE001 - handed to the test
            answers.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert answers, f"no answer and no error within {BOUND_S} s"
    return answers[0]


def send_on_a_loop(app: App) -> Any:
    async def send() -> Any:
        try:
            return await app.asend_by_name("work")
        finally:
            await app.aclose()

    return asyncio.run(send())


SENDS: dict[str, Callable[[App], Any]] = {
    "thread": lambda app: app.send_by_name("work"),
    "loop": send_on_a_loop,
}


@pytest.fixture(params=SENDS)
def send(request: pytest.FixtureRequest) -> Callable[[App], Any]:
    return SENDS[request.param]


@pytest.mark.story
def test_calls_use_the_promoted_standby_while_the_primary_is_frozen(  # J15
    new_pair: NewPair, make_app: Callable[[str], App]
) -> None:
    pair = new_pair()
    app = make_app(pair.url)
    first = app.send_by_name("work")
    pair.wait_replayed()
    pair.freeze_primary()
    pair.promote()
    for send in SENDS.values():
        sent = in_a_thread(lambda send=send: send(app))  # type: ignore[misc]
        assert in_a_thread(sent.info).name == "work"
    assert in_a_thread(first.info).name == "work"
    assert stored(pair.standby.url) == 3


@pytest.mark.story
def test_calls_end_with_an_error_while_the_only_primary_is_frozen(  # J15
    new_pair: NewPair, make_app: Callable[[str], App]
) -> None:
    pair = new_pair()
    app, newcomer = make_app(pair.primary.tcp_url), make_app(pair.primary.tcp_url)
    handle = app.send_by_name("work")
    pair.freeze_primary()
    for call in (*(lambda send=send: send(app) for send in SENDS.values()), handle.info, handle.cancel):
        assert isinstance(in_a_thread(call), DatabaseUnreachable)
    assert isinstance(in_a_thread(lambda: newcomer.send_by_name("work")), DatabaseUnreachable)
    pair.thaw_primary()
    assert app.send_by_name("work").info().name == "work"


@pytest.mark.story
def test_a_send_ends_with_an_error_while_the_synchronous_standby_is_gone(  # J15
    new_pair: NewPair, make_app: Callable[[str], App], send: Callable[[App], Any]
) -> None:
    pair = new_pair(synchronous=True)
    app = make_app(pair.primary.tcp_url)
    app.send_by_name("work")
    pair.stop_standby()
    problem = in_a_thread(lambda: send(app))
    assert isinstance(problem, DatabaseUnreachable)
    assert "synchronous standby" in str(problem)
    assert waiting(pair) == 1, "the client leaves one session"


def waiting(pair: Pair) -> int:
    with psycopg.connect(pair.primary.url) as connection:
        row = connection.execute(
            "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def stored(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("select count(*) from everbeat.tasks").fetchone()
    assert row is not None
    return int(row[0])
