"""Test that sends commit before their hints are announced, and that a process announces at most 20 times per second on average."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, suppress
from typing import Any, Final
from uuid import uuid4

import psycopg
import pytest
from psycopg import Connection, sql

from everbeat import App
from everbeat.errors import WaitTimeout
from everbeat.store import announcer, tasks, workflows
from everbeat.store.announcer import announcement
from everbeat.store.database import Database
from everbeat.store.statement import Statement, compose
from everbeat.store.target import Target
from everbeat.store.workers import listen
from tests.conftest import NewServer
from tests.store.conftest import StoreHarness
from tests.store.flows import Graph, task
from tests.worker.proxy import Proxy, statement_marker

LONG_S: Final = 600.0
SOON_S: Final = 10.0
"""A bound for a busy machine on times that are otherwise below 0.1 s."""
Listener = Callable[..., list[str]]


@pytest.fixture
def heard(db: StoreHarness) -> Iterator[Listener]:
    """Yield a function that returns the payloads that have arrived, once `count` have arrived or none arrives for `within` seconds."""
    with psycopg.connect(db.target.url, autocommit=True) as connection:
        connection.execute(sql.SQL("listen {}").format(sql.Identifier(db.target.channel)))

        def listened(count: int | None = None, *, within: float = SOON_S) -> list[str]:
            return [each.payload for each in connection.notifies(timeout=within, stop_after=count)]

        yield listened


@pytest.fixture(autouse=True)
def one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each announcement wait for the end of the pause after the one before."""
    monkeypatch.setattr(announcer, "AT_ONCE", 1)
    monkeypatch.setattr(announcer, "APART_S", 0.05)  # longer than a send takes on a busy machine


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pause between two announcements longer than a test, so that a waiting hint leaves only for another reason."""
    monkeypatch.setattr(announcer, "APART_S", LONG_S)


def new(queue: str = "default", **options: Any) -> tasks.NewTask:
    return tasks.NewTask(id=uuid4(), name="work", queue=queue, priority=0, args=b"{}", **options)


def insert(queue: str, channel: str = "unused") -> Statement[Any]:
    return tasks.insert_task(new(queue), channel=channel)


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "everbeat-announce"]


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the server sends no event


def notify(url: str) -> None:
    """Commit a notification. The commit ends when the session is terminated, because no standby confirms it."""
    with suppress(psycopg.Error), psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set synchronous_commit = on")
        connection.execute("select pg_notify('foreign', '')")


def holds_turn(connection: Connection[Any]) -> list[int]:
    """Return the pid of the session that holds the lock under which PostgreSQL commits notifications, if any."""
    query = """select pid from pg_locks where locktype = 'object' and classid = 'pg_database'::regclass and objid = 0 and granted"""
    return [row[0] for row in connection.execute(query).fetchall()]


def test_a_send_of_many_tasks_notifies_the_message_relay(db: StoreHarness, heard: Listener) -> None:
    """Such a send can have begun while the relay was busy, so that its trigger sent no hint."""
    for count in (announcer.MANY - 1, announcer.MANY):
        with closing(Database(db.target)) as database:
            database.run(tasks.insert_tasks([new() for _ in range(count)], channel=db.target.channel))
    assert heard(3) == ["t:default", "t:default", "o:"]


def test_a_send_does_not_wait_for_another_session_that_commits_a_notification(
    new_server: NewServer,
) -> None:  # R5
    """The other session waits for a standby that does not exist, and keeps the lock meanwhile."""
    server = new_server(settings={"synchronous_standby_names": "nobody"})
    app = App(server.url)
    app.migrate()
    with Target(server.url, schema=app.schema).connect("everbeat test") as watcher:
        party = StoreHarness(Target(server.url, schema=app.schema), watcher)
        party.supervisor("s1", "w1")
        rival = threading.Thread(target=notify, args=(server.url,))
        rival.start()
        until(lambda: holds_turn(watcher))
        began_at = time.monotonic()
        sent = [party.send(queue=queue) for queue in ("a", "b", "c")]
        assert time.monotonic() - began_at < SOON_S
        assert sorted(party.table("tasks", "id")) == sorted((each,) for each in sent)
        # The lock is held all the time: a statement that notifies by itself waits for it.
        watcher.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            watcher.execute(
                compose("task/insert_task", app.schema),
                tasks.insert_task(new(), channel="c", joined=True).parameters,
            )
        for pid in holds_turn(watcher):
            watcher.execute("select pg_terminate_backend(%s)", [pid])
        rival.join(SOON_S)
        party.database.close()
    app.close()
    assert not rival.is_alive()


def test_an_announcement_does_not_wait_for_the_disk_or_a_standby(new_server: NewServer) -> None:  # R5
    server = new_server(settings={"synchronous_standby_names": "nobody"})
    app = App(server.url)
    app.migrate()
    target = Target(server.url, schema=app.schema)
    with target.connect("everbeat test") as connection, psycopg.connect(server.url, autocommit=True) as ear:
        party = StoreHarness(target, connection)
        party.supervisor("s1", "w1")
        ear.execute(sql.SQL("listen {}").format(sql.Identifier(target.channel)))
        connection.execute("set synchronous_commit = on")
        connection.execute("set statement_timeout = '20s'")
        told = announcement(["t:a", "w"], channel=target.channel)
        connection.execute(compose(told.name, target.schema), told.parameters)
        assert sorted(each.payload for each in ear.notifies(timeout=SOON_S, stop_after=2)) == ["t:a", "w"]
        assert connection.execute("show synchronous_commit").fetchone() == ("on",)
        party.database.close()
    app.close()


SENDS: Final[dict[str, Callable[[], Statement[Any]]]] = {
    "one": lambda: insert("a"),
    "many": lambda: tasks.insert_tasks([new("a"), new("a")], channel="unused"),
    "unless full": lambda: tasks.insert_unless_full(new("a"), channel="unused"),
    "workflow": lambda: workflows.insert(uuid4(), Graph(name="f", nodes=(task("a"),)), channel="unused"),
}


@pytest.mark.parametrize("kind", SENDS)
def test_the_transaction_of_a_send_does_not_notify(
    kind: str, db: StoreHarness, heard: Listener
) -> None:  # R5
    """The statement is run without the announcer. Its channel would be another one."""
    statement = SENDS[kind]()
    parameters = {**statement.parameters, "channel": db.target.channel}
    db.connection.execute(compose(statement.name, db.target.schema), parameters)
    db.connection.execute(compose(statement.name, db.target.schema), parameters | {"joined": True})
    assert heard(within=0.3) == []
    other = SENDS[kind]()
    joined = {**other.parameters, "channel": db.target.channel, "joined": True}
    db.connection.execute(compose(other.name, db.target.schema), joined)
    assert heard(1) == ["w" if kind == "workflow" else "t:a"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_burst_of_sends_is_announced_at_most_20_times_per_second(
    is_async: bool, db: StoreHarness, heard: Listener
) -> None:
    sent, began_at = 0, time.monotonic()
    queues = ("a", "b", "c")

    async def send_async() -> None:
        nonlocal sent
        while time.monotonic() - began_at < 1.0:
            await db.database.arun(insert(queues[sent % 3]))
            sent += 1
        await db.database.arun(insert("last"))
        await db.database.aclose()

    def send() -> None:
        nonlocal sent
        while time.monotonic() - began_at < 1.0:
            db.run(insert(queues[sent % 3]))
            sent += 1
        db.run(insert("last"))

    asyncio.run(send_async()) if is_async else send()
    took_s = time.monotonic() - began_at
    found = heard(within=0.5)
    most = 1 + took_s / announcer.APART_S
    assert {*found} == {"t:a", "t:b", "t:c", "t:last"}
    assert found.count("t:last") == 1
    assert all(2 < found.count(f"t:{queue}") <= most for queue in queues)
    assert sent > 4 * most


def test_the_first_send_after_a_pause_is_announced_at_once_and_the_next_after_50_ms(
    db: StoreHarness, heard: Listener
) -> None:
    arrived: list[tuple[str, float]] = []
    for _ in range(3):
        time.sleep(2 * announcer.APART_S)  # the pause is what the test is about
        sent_at = time.monotonic()
        for queue in ("first", "second", "third"):
            db.run(insert(queue))
        count = len(arrived) + 3
        while len(arrived) < count:  # hints that arrive together are returned together
            arrived += [(payload, time.monotonic() - sent_at) for payload in heard(1)]
    assert [payload for payload, _ in arrived] == ["t:first", "t:second", "t:third"] * 3
    # On a busy machine, single figures mean nothing.
    assert min(after_s for payload, after_s in arrived if payload == "t:first") < announcer.APART_S
    assert max(after_s for payload, after_s in arrived if payload == "t:third") < SOON_S
    assert min(after_s for payload, after_s in arrived if payload == "t:third") >= announcer.APART_S * 0.9


def test_announcements_that_take_long_follow_one_another_less_often() -> None:  # R5
    one, announced = announcer.Announcer(), list[str]()
    assert one.take(["t:a"], announced.extend) == ["t:a"]
    one.done(1.0)
    time.sleep(1.5 * announcer.APART_S)  # by now, another one would be due after a short one
    assert one.take(["t:b"], announced.extend) == ()
    assert announced == []
    one.flush(SOON_S)
    assert announced == ["t:b"]


def test_a_few_sends_after_a_pause_are_announced_at_once(
    db: StoreHarness, heard: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "AT_ONCE", 3)
    monkeypatch.setattr(announcer, "APART_S", LONG_S)
    for queue in ("a", "b", "c", "d"):
        db.run(insert(queue))
    assert heard(3) == ["t:a", "t:b", "t:c"]
    assert heard(within=0.2) == []
    db.database.announcer.flush()
    assert heard(1) == ["t:d"]


@pytest.mark.usefixtures("slow")
def test_a_caller_that_waits_for_a_result_announces_the_waiting_sends(
    app: App, db: StoreHarness, heard: Listener
) -> None:
    handles = [app.send_by_name("work", {}, queue=queue) for queue in ("a", "b")]
    assert heard(within=0.2) == ["t:a"]
    with pytest.raises(WaitTimeout):
        handles[0].result(timeout=0.1)
    assert heard(1) == ["t:b"]

    async def wait() -> None:
        handle = await app.asend_by_name("work", {}, queue="c")
        with pytest.raises(WaitTimeout):
            await handle.aresult(timeout=0.1)
        await app.aclose()

    asyncio.run(wait())
    assert heard(1) == ["t:c"]


def test_nothing_is_announced_while_no_worker_listens_except_workflows(
    db: StoreHarness, heard: Listener
) -> None:
    for worker in ("w1", "w2"):
        db.run(listen(worker, listens=False))
    db.run(insert("a"))
    db.run(SENDS["workflow"]())
    assert heard(1) == ["w"]
    assert heard(within=0.2) == []


def refused(hints: object, *, channel: str) -> Statement[None]:
    """Return an announcement that the server refuses."""
    del hints
    return Statement("task/announce_hints", {"hints": "{", "channel": channel}, lambda _: None)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_send_succeeds_although_its_announcement_fails(
    is_async: bool, db: StoreHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everbeat.store.database.announcement", refused)

    async def send() -> None:
        await db.database.arun(insert("a"))
        await db.database.arun(insert("a"))
        await db.database.aclose()

    with caplog.at_level(logging.DEBUG, logger="everbeat.store"):
        if is_async:
            asyncio.run(send())
        else:
            db.run(insert("a"))
            db.run(insert("a"))
            db.database.close()
    assert len(db.table("tasks", "id")) == 2
    assert "hints_not_announced" in caplog.text
    assert [each for each in caplog.records if each.levelno > logging.DEBUG] == []


@pytest.fixture
async def proxy(database_url: str, schema: str) -> AsyncIterator[Proxy]:
    async with Proxy.before(Target.parse(database_url, schema=schema)) as made:
        yield made


async def test_a_send_is_not_repeated_if_the_connection_is_lost_during_the_announcement(
    db: StoreHarness, proxy: Proxy
) -> None:
    database = Database(proxy.target)
    proxy.lose_reply(statement_marker("task/announce_hints"))
    await database.arun(insert("a"))
    proxy.lose_reply(statement_marker("task/announce_hints"))
    database.announcer._next_at = 0.0
    await asyncio.to_thread(database.run, insert("b"))
    assert proxy.lost == 2
    await asyncio.to_thread(database.run, insert("c"))  # on a new connection
    assert sorted(db.table("tasks", "queue")) == [("a",), ("b",), ("c",)]
    await database.aclose()


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("is_async", [False, True])
def test_close_announces_the_last_sends_and_leaves_no_thread(
    is_async: bool, db: StoreHarness, heard: Listener
) -> None:
    async def send_and_close() -> None:
        await db.database.arun(insert("a"))
        await db.database.arun(insert("b"))
        assert threads() == ["everbeat-announce"]
        await db.database.aclose()

    if is_async:
        asyncio.run(send_and_close())
    else:
        db.run(insert("a"))
        db.run(insert("b"))
        assert threads() == ["everbeat-announce"]
        db.database.close()
    assert threads() == []
    assert sorted(heard(2)) == ["t:a", "t:b"]


def test_sends_of_several_event_loops_share_one_announcer(db: StoreHarness, heard: Listener) -> None:
    async def send(queue: str) -> None:
        await db.database.arun(insert(queue))

    for queue in ("a", "b", "c"):
        asyncio.run(send(queue))  # the loop ends before the hint of its send leaves
    assert sorted(heard(3)) == ["t:a", "t:b", "t:c"]
    until(lambda: not threads())


PROGRAM: Final = """
import os, sys
from everbeat.store import announcer, tasks
from everbeat.store.database import Database
from everbeat.store.target import Target
from uuid import uuid4

announcer.APART_S, announcer.AT_ONCE = 600.0, 1
database = Database(Target(sys.argv[1], schema=sys.argv[2]))

def send(queue):
    new = tasks.NewTask(id=uuid4(), name="work", queue=queue, priority=0, args=b"{}")
    database.run(tasks.insert_task(new, channel="unused"))

send("a")
send("b")
"""


def run(db: StoreHarness, end: str) -> None:
    """Run a program that sends to the queues a and b, and then does `end`."""
    command = [sys.executable, "-c", PROGRAM + end, db.target.url, db.target.schema]
    subprocess.run(command, check=True, timeout=60, env=dict(os.environ))


def test_a_program_that_ends_announces_its_last_sends(db: StoreHarness, heard: Listener) -> None:
    run(db, "")
    assert sorted(heard(2)) == ["t:a", "t:b"]


def test_a_program_that_is_ended_at_once_announces_no_more(db: StoreHarness, heard: Listener) -> None:
    """The counterpart of the test above: without the end of the program, the hint of the second send waits."""
    run(db, "os._exit(0)")
    assert heard(within=0.3) == ["t:a"]


def test_a_forked_child_announces_only_its_own_sends(db: StoreHarness, heard: Listener) -> None:
    run(
        db,
        """
pid = os.fork()
if pid == 0:
    send("c")
    send("d")
    sys.exit(0)  # the child's own exit announces d, and not b
assert os.waitpid(pid, 0)[1] == 0
os._exit(0)
""",
    )
    assert sorted(heard(within=0.5)) == ["t:a", "t:c", "t:d"]
