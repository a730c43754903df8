"""Test that every client call ends within its patience and uses another host if one can answer."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from contextvars import copy_context
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat import App, Workflow
from everbeat.errors import ConfigurationError, DatabaseReadOnly, DatabaseUnreachable, TaskNotRetryable
from everbeat.store import tasks
from everbeat.store.database import MOST_CONNECTIONS, Database
from everbeat.store.patience import LastProblem, Patience, SignsOfLife
from everbeat.store.retention import MOST_LEFT
from everbeat.store.target import Target
from tests.conftest import NewPair, NewServer
from tests.replication import Pair
from tests.variants import long_except

PATIENCE_S = 2.0
BOUND_S = 3 * (PATIENCE_S + 1)


MakeApp = Callable[..., App]


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    made: list[App] = []

    def make(url: str, *, patience: float = PATIENCE_S, schema: str = "everbeat") -> App:
        made.append(App(url, patience=patience, schema=schema))
        return made[-1]

    yield make
    for app in made:
        app.close()


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Return the answer or error of the call; fail if it does not end, so that it cannot block the test."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as problem:  # noqa: BLE001 - handed to the test
            answers.append(problem)

    thread = threading.Thread(target=copy_context().run, args=[run], daemon=True)
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


@pytest.mark.story
def test_calls_use_the_promoted_standby_while_the_primary_is_frozen(  # J15
    new_pair: NewPair, make_app: MakeApp
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
    new_pair: NewPair, make_app: MakeApp
) -> None:
    pair = new_pair()
    app, newcomer = (make_app(pair.primary.tcp_url, patience=1.0) for _ in range(2))
    handle = app.send_by_name("work")
    pair.freeze_primary()
    for call in (*(lambda send=send: send(app) for send in SENDS.values()), handle.cancel):
        assert isinstance(in_a_thread(call), DatabaseUnreachable)
    assert isinstance(in_a_thread(lambda: newcomer.send_by_name("work")), DatabaseUnreachable)
    pair.thaw_primary()
    assert app.send_by_name("work").info().name == "work"


@pytest.mark.long
@pytest.mark.story
def test_sends_end_with_an_error_while_the_synchronous_standby_is_down(  # J15
    new_pair: NewPair, make_app: MakeApp
) -> None:
    pair = new_pair(synchronous=True)
    app = make_app(pair.primary.tcp_url)
    app.send_by_name("work")
    pair.stop_standby()
    for number, send in enumerate(SENDS.values(), 1):
        problem = in_a_thread(lambda send=send: send(app))  # type: ignore[misc]
        assert isinstance(problem, DatabaseUnreachable)
        assert "synchronous standby" in str(problem)
        assert waiting(pair) == number, "each call leaves one session"
    with app.patience("300ms"):
        for _ in range(MOST_LEFT):
            assert isinstance(in_a_thread(lambda: app.send_by_name("work")), DatabaseUnreachable)
    assert waiting(pair) <= MOST_LEFT, "the server is not filled with sessions"
    pair.require_standby("")
    assert app.send_by_name("work").info().name == "work"


@pytest.mark.long
@pytest.mark.story
def test_each_kind_of_write_ends_in_time_while_the_synchronous_standby_is_down(  # J15
    new_pair: NewPair, make_app: MakeApp
) -> None:
    pair = new_pair(synchronous=True)
    app = make_app(pair.primary.tcp_url, patience=1.0)

    @app.task
    def work(n: int) -> None: ...

    @app.define_workflow("order")
    def order(wf: Workflow) -> None:
        wf.add(work, 1)

    waits, ended = work.send(1), work.send(2)
    ended.cancel()
    writes: dict[str, Callable[[], Any]] = {
        "send_many": lambda: app.send_many(work.call(n) for n in range(3)),
        "cancel": waits.cancel,
        "retry": ended.retry,
        "start": order.start,
    }
    pair.stop_standby()
    for name, write in writes.items():
        began_at = time.monotonic()
        problem = in_a_thread(write)
        took_s = time.monotonic() - began_at
        print(f"{name}: {took_s:.2f} s")
        assert isinstance(problem, DatabaseUnreachable), name
        assert "synchronous standby" in str(problem)
        assert took_s < 3 * (1.0 + 1), name
    pair.require_standby("")
    states = ["CANCELLED", "PENDING"]
    deadline = time.monotonic() + 20
    # Each session that waits for the standby shows its commit once it has read the new setting. The first write certainly takes
    # effect. The others wait for its lock on the notification queue, and the server ends them 2 s after their client disconnected.
    # Each of these takes effect or not, as the error says, and a repeated call finishes it.
    while (seen := [app.handle(each.id).info().state for each in (waits, ended)]) != states:
        assert time.monotonic() < deadline, seen
        waits.cancel()
        with suppress(TaskNotRetryable):
            ended.retry()
    assert stored(pair.primary.url) >= 5, "send_many took effect"
    assert app.send_many([work.call(9)])[0].info().name == "work", "the client continues"


@pytest.mark.long
@pytest.mark.story
def test_a_send_uses_the_promoted_standby_while_the_old_primary_waits_for_it(  # J15
    new_pair: NewPair, make_app: MakeApp
) -> None:
    pair = new_pair(synchronous=True)
    app = make_app(pair.url)
    app.send_by_name("work")
    pair.wait_replayed()
    pair.promote()
    for send in SENDS.values():
        in_a_thread(lambda send=send: send(app).id)  # type: ignore[misc]
    assert stored(pair.standby.url) == 3


def test_a_call_waits_for_a_statement_that_the_server_still_runs(  # J15
    database_url: str, schema: str, make_app: MakeApp
) -> None:
    app = make_app(database_url, patience=0.4, schema=schema)
    app.migrate()
    for send in SENDS.values():
        with psycopg.connect(database_url) as other:
            other.execute(sql.SQL("lock table {}").format(sql.Identifier(schema, "tasks")))
            threading.Timer(1.5, other.rollback).start()
            began_at = time.monotonic()
            in_a_thread(lambda send=send: send(app).id)  # type: ignore[misc]
            assert time.monotonic() - began_at > 1.2


def test_a_send_outlasts_a_server_that_refuses_writes(  # J15
    new_server: NewServer, make_app: MakeApp
) -> None:
    server = new_server()
    app = make_app(server.url, patience=10.0)
    app.send_by_name("work")
    set_read_only(server.url, is_on=True)
    threading.Timer(1.0, set_read_only, [server.url], {"is_on": False}).start()
    for send in SENDS.values():
        assert in_a_thread(lambda send=send: send(app)).name == "work"  # type: ignore[misc]


def test_a_server_that_refuses_writes_for_longer_is_reported(  # J15
    new_server: NewServer, make_app: MakeApp
) -> None:
    server = new_server()
    app = make_app(server.url, patience=0.5)
    app.send_by_name("work")
    set_read_only(server.url, is_on=True)
    for send in SENDS.values():
        assert isinstance(in_a_thread(lambda send=send: send(app)), DatabaseReadOnly)  # type: ignore[misc]
    until_left(server.url, "everbeat client")  # a connection that refused is not used again


def test_the_patience_of_one_call_replaces_that_of_the_app(make_app: MakeApp) -> None:  # J15
    app = make_app("postgresql://127.0.0.1:1/nowhere", patience=30.0)

    @app.task
    def work() -> None: ...

    hurried = work.with_options(patience="200ms")
    for call in (hurried.send, lambda: app.send_many([hurried.call(), hurried.call()])):
        began_at = time.monotonic()
        assert isinstance(in_a_thread(call), DatabaseUnreachable)
        assert time.monotonic() - began_at < 3 * 1.2
    with app.patience("200ms"), pytest.raises(DatabaseUnreachable):
        app.handle(uuid4()).info()


def test_the_patience_of_one_start_of_a_workflow_replaces_that_of_the_app(make_app: MakeApp) -> None:  # J15
    app = make_app("postgresql://127.0.0.1:1/nowhere", patience=30.0)

    @app.task
    def work() -> None: ...

    @app.define_workflow("order")
    def order(wf: Workflow) -> None:
        wf.add(work)

    def built() -> Workflow:
        made = app.workflow("built")
        made.add(work)
        return made

    starts: list[Callable[[], Any]] = [
        lambda: built().start(patience="200ms"),
        lambda: asyncio.run(built().astart(patience="200ms")),
        lambda: order.with_options(patience="200ms").start(),
        lambda: asyncio.run(order.with_options(patience="200ms").astart()),
    ]
    for start in starts:
        began_at = time.monotonic()
        assert isinstance(in_a_thread(start), DatabaseUnreachable)
        assert time.monotonic() - began_at < 3 * 1.2


@pytest.mark.parametrize("patience_s", long_except([0.5, 1.5, 3.0], 1.5))
def test_the_last_attempt_of_a_call_begins_when_its_patience_ends(
    make_app: MakeApp, patience_s: float
) -> None:  # J15
    """The server refuses each connection at once, so the pauses between the attempts add up to the patience."""
    app = make_app("postgresql://127.0.0.1:1/nowhere", patience=patience_s)
    for send in SENDS.values():
        began_at = time.monotonic()
        assert isinstance(in_a_thread(lambda send=send: send(app)), DatabaseUnreachable)  # type: ignore[misc]
        took_s = time.monotonic() - began_at
        print(f"{took_s:.2f} s")
        assert patience_s <= took_s < patience_s + 3


def test_a_wait_lasts_until_its_timeout_even_if_the_app_never_connected(
    make_app: MakeApp,
) -> None:  # J15
    app = make_app("postgresql://127.0.0.1:1/nowhere", patience=0.3)
    handle = app.handle(uuid4())
    waits: list[Callable[[], Any]] = [
        lambda: handle.result(timeout=1.5),
        lambda: asyncio.run(handle.aresult(timeout=1.5)),
        lambda: app.outcomes([handle], timeout=1.5),
        lambda: asyncio.run(app.aoutcomes([handle], timeout=1.5)),
    ]
    for wait in waits:
        began_at = time.monotonic()
        assert isinstance(in_a_thread(wait), DatabaseUnreachable)
        assert 1.5 <= time.monotonic() - began_at < 1.5 + 3


def test_a_wait_finds_a_server_that_comes_back_within_its_timeout(
    new_server: NewServer, make_app: MakeApp
) -> None:  # J15
    server = new_server()
    handle = make_app(server.url).send_by_name("work")
    handle.cancel()
    newcomer = make_app(server.url, patience=0.3)
    with psycopg.connect(server.url, dbname="template1", autocommit=True) as admin:
        admin.execute("alter database postgres allow_connections false")
        threading.Timer(1.5, admin.execute, ["alter database postgres allow_connections true"]).start()
        ended = in_a_thread(lambda: newcomer.handle(handle.id).outcome(timeout=5))
    assert ended.error.code == "TASK_CANCELLED", ended


def test_a_call_without_a_connection_names_the_last_problem_of_other_calls(
    make_app: MakeApp,
) -> None:  # J15
    database = Database(Target.parse("postgresql://127.0.0.1:1/nowhere"), patience_s=0.2)
    look = tasks.outcomes([uuid4()])
    with pytest.raises(DatabaseUnreachable, match="Connection refused"):
        database.run(look)
    with ExitStack() as others:
        for _ in range(MOST_CONNECTIONS):
            database._free.acquire()
            others.callback(database._free.release)
        with pytest.raises(
            DatabaseUnreachable, match=r"All 8 connections .*The last problem was: .*Connection refused"
        ):
            database.run(look)


def test_answers_to_other_calls_do_not_prolong_a_call_whose_own_attempt_failed() -> None:  # J15
    """A server that refuses writes still answers reads of other calls."""
    signs = SignsOfLife()
    waiting, refused = (Patience(10.0, signs) for _ in range(2))
    ends_at = refused.ends_at
    refused.failed(LastProblem("read-only", None))
    Patience(10.0, signs).answered()
    for patience in (waiting, refused):
        patience.follow_others()
    assert refused.ends_at == ends_at
    assert waiting.ends_at > ends_at


@pytest.mark.parametrize("wrong", [0, "1ms", -1, "soon", None])
def test_an_invalid_patience_is_refused(make_app: MakeApp, wrong: Any) -> None:  # J15
    with pytest.raises(ConfigurationError, match="patience"):
        App("postgresql://", patience=wrong)
    app = make_app("postgresql://")
    with pytest.raises(ConfigurationError, match="patience"):
        app.patience(wrong)
    with pytest.raises(ConfigurationError, match="patience"):
        app.task(lambda: None, name="work").with_options(patience=wrong)
    if wrong is not None:  # that of the app
        with pytest.raises(ConfigurationError, match="patience of the start"):
            app.workflow("built").start(patience=wrong)


@pytest.fixture
def mute_url() -> Iterator[str]:
    """Yield the URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"postgresql://app@127.0.0.1:{listener.getsockname()[1]}/app"


def test_a_first_call_in_a_thread_waits_for_another_only_within_its_own_patience(  # J15
    make_app: MakeApp, mute_url: str
) -> None:
    app = make_app(mute_url, patience=1.0)
    begun = threading.Event()

    def patient() -> None:
        with app.patience("15s"), suppress(DatabaseUnreachable):
            begun.set()
            app.send_by_name("work")

    threading.Thread(target=patient, daemon=True).start()
    assert begun.wait(10)
    time.sleep(0.2)  # it is about to connect
    began_at = time.monotonic()
    assert isinstance(in_a_thread(lambda: app.send_by_name("work")), DatabaseUnreachable)
    took_s = time.monotonic() - began_at
    print(f"{took_s:.2f} s")
    assert 0.8 < took_s < 3 * 2


def test_first_calls_on_an_event_loop_wait_for_others_only_within_their_own_patience(  # J15
    make_app: MakeApp, mute_url: str
) -> None:
    app = make_app(mute_url, patience=1.0)

    async def patient() -> None:
        with app.patience("15s"):
            await app.asend_by_name("work")

    async def program() -> list[float]:
        others = [asyncio.create_task(patient()) for _ in range(40)]
        await asyncio.sleep(0.2)  # they are about to connect
        took_s: list[float] = []
        began_at = time.monotonic()
        assert await asyncio.to_thread(lambda: "free") == "free", (
            "no thread of the loop's executor must be occupied"
        )
        took_s.append(time.monotonic() - began_at)
        with pytest.raises(DatabaseUnreachable):
            await app.asend_by_name("work")
        took_s.append(time.monotonic() - began_at)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return took_s

    began_at = time.monotonic()
    took_s = in_a_thread(lambda: asyncio.run(program()))
    print(took_s)
    assert took_s[0] < 1
    assert 0.8 < took_s[1] < 3 * 2
    assert time.monotonic() - began_at < 3 * 3, "the loop must not wait for a thread at its end"


def set_read_only(url: str, *, is_on: bool) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set default_transaction_read_only = off")
        connection.execute(
            f"alter system set default_transaction_read_only = {'on' if is_on else 'off'}".encode()
        )
        connection.execute("select pg_reload_conf()")
        row: tuple[Any, ...] | None = None
        give_up_at = time.monotonic() + 30
        while row != (str(is_on).lower(),) and time.monotonic() < give_up_at:
            with psycopg.connect(url) as other:
                row = other.execute(
                    "select (current_setting('default_transaction_read_only') = 'on')::text"
                ).fetchone()


def sessions(url: str, name: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "select count(*) from pg_stat_activity where application_name = %s", [name]
        ).fetchone()
    assert row is not None
    return int(row[0])


def until_left(url: str, name: str) -> None:
    """Wait until no session has this name. A session leaves a moment after its client has closed it."""
    deadline = time.monotonic() + 20
    while sessions(url, name):
        assert time.monotonic() < deadline, f"a session is called {name}"
        time.sleep(0.01)  # the server sends no event


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


@pytest.mark.parametrize("call", ["result", "aresult"])
def test_a_wait_for_a_result_ends_at_its_timeout_while_the_table_is_locked(
    database_url: str, schema: str, make_app: MakeApp, call: str
) -> None:
    app = make_app(database_url, schema=schema)
    app.migrate()
    handle = app.send_by_name("work")
    waits = {
        "result": lambda: handle.result(timeout=0.5),
        "aresult": lambda: asyncio.run(handle.aresult(timeout=0.5)),
    }
    with psycopg.connect(database_url) as locked:
        locked.execute(
            sql.SQL("lock table {} in access exclusive mode").format(sql.Identifier(schema, "tasks"))
        )
        problem = in_a_thread(waits[call])
    assert isinstance(problem, DatabaseUnreachable)
    assert "is waiting for a lock" in str(problem), "not because the server terminated"
