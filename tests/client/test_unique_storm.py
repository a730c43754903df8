"""Concurrent senders of the same keys while a worker claims and ends the tasks: each scope keeps its promise at every moment."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest
from msgspec import Struct

from everbeat import App
from everbeat.errors import DuplicateTask
from tests.invariants import QUERIES, deadlocks
from tests.store.conftest import StoreHarness
from tests.variants import every_nth_quick

SENDERS = 8
SENDS = 12
KEYS = ("a", "b", "c")
ANSWERS = ("existing", "replace", "debounce", "reject")


class Reply(Struct, frozen=True):
    """The reply to one sender, and the time of the database when the send began."""

    key: str
    began_at: datetime
    task_id: UUID
    existed: bool


class Observer:
    """Checks the invariants of keys in the snapshots of its own session while others write."""

    def __init__(self, db: StoreHarness) -> None:
        self.found: list[Any] = []
        self.looks = 0
        self._db = db
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        queries = [(rule, self._db.plain(query)) for number, rule, query in QUERIES if number == "I33"]
        with psycopg.connect(self._db.target.url, autocommit=True) as connection:
            while not self._stop.is_set():
                for rule, query in queries:
                    self.found += [(rule, *row) for row in connection.execute(query).fetchall()]
                self.looks += 1


@pytest.fixture
def senders(database_url: str, schema: str, db: StoreHarness) -> Iterator[list[Any]]:
    """Return the same task function of eight apps, each with its own connections."""
    apps = [App(database_url, schema=schema) for _ in range(SENDERS)]

    async def work(n: int = 0) -> int:
        return n

    yield [app.task(name="work")(work) for app in apps]
    for app in apps:
        app.close()


def drain(db: StoreHarness, seed: int, begun: dict[UUID, datetime]) -> int:
    """Claim due tasks, and complete, fail or recover each of them, as chance decides. Return how many were claimed.

    `begun` gets the time after the first claim of each task, which is the earliest time at which its code can start.
    """
    chance = random.Random(seed)
    claimed = db.claim(limit=chance.choice([1, 3]))
    row = db.connection.execute("select clock_timestamp()").fetchone()
    assert row is not None
    for one in claimed:
        begun.setdefault(one.id, row[0])
        db.start(one)
        match chance.randrange(4):
            case 0:
                db.settle(one, outcome="FAILED", retry_in_ms=0, error=b'{"code": "X", "message": "x"}')
            case 1:
                (lease,) = [lease for lease in db.leases() if lease.id == one.id]
                db.recover(lease, "retry")
            case _:
                db.complete(one)
    return len(claimed)


def storm(
    db: StoreHarness, senders: list[Any], send: Callable[[Any, int, int], list[Reply]]
) -> tuple[list[Reply], dict[UUID, datetime]]:
    """Let all senders send at once while a worker runs. Return all replies, and the earliest start of each task."""
    replies: list[Reply] = []
    begun: dict[UUID, datetime] = {}
    barrier = threading.Barrier(SENDERS)

    def sending(number: int) -> list[Reply]:
        barrier.wait()
        return [reply for turn in range(SENDS) for reply in send(senders[number], number, turn)]

    with psycopg.connect(db.target.url, autocommit=True) as connection:
        before = deadlocks(connection)
        with Observer(db) as observer, ThreadPoolExecutor(SENDERS) as pool:
            running = [pool.submit(sending, number) for number in range(SENDERS)]
            seed = 0
            while not all(each.done() for each in running):
                drain(db, seed := seed + 1, begun)
            replies = [reply for each in running for reply in each.result()]
            db.connection.execute(
                db.plain("update {schema}.tasks set enqueued_at = now() where state = 'PENDING'")
            )
            while drain(db, seed := seed + 1, begun):
                pass
        assert observer.found == []
        assert observer.looks > 3
        assert deadlocks(connection) == before
    return replies, begun


def now(db: StoreHarness, connections: dict[int, Any], number: int) -> datetime:
    if number not in connections:
        connections[number] = psycopg.connect(db.target.url, autocommit=True)
    row = connections[number].execute("select clock_timestamp()").fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment


@pytest.fixture
def connections() -> Iterator[dict[int, Any]]:
    opened: dict[int, Any] = {}
    yield opened
    for each in opened.values():
        each.close()


def judge(db: StoreHarness, scope: str, replies: list[Reply], begun: dict[UUID, datetime]) -> None:
    tasks = {
        row[0]: row[1:]
        for row in db.table("tasks", "id, coalesce(unique_key, key), state, claimed_at, sent_at")
    }
    assert {row[1] for row in tasks.values()} == {"COMPLETED"}
    new = [each for each in replies if not each.existed]
    assert len({each.task_id for each in new}) == len(new) == len(tasks), (
        "each task was new for exactly one send"
    )
    assert all(tasks[each.task_id][0] == each.key for each in replies)
    if scope in ("1h", "kept"):
        assert len(tasks) == len(KEYS)
    if scope == "waiting":
        late = [each for each in replies if begun[each.task_id] < each.began_at]
        assert late == [], "the code of a task starts after each send that found it"


@pytest.mark.parametrize(
    ("scope", "answer"),
    every_nth_quick(
        3, [(scope, answer) for scope in ("live", "waiting", "1h", "kept") for answer in ANSWERS]
    ),
)
def test_concurrent_senders_of_the_same_keys_get_one_task_for_each_key_and_scope(
    db: StoreHarness, senders: list[Any], connections: dict[int, Any], scope: str, answer: str
) -> None:  # K8
    def send(task: Any, number: int, turn: int) -> list[Reply]:
        key = KEYS[(number + turn) % len(KEYS)]
        began_at = now(db, connections, number)
        chosen = task.with_options(key=key, unique_for=scope, on_duplicate=answer)
        try:
            handle = chosen.send(100 * number + turn)
        except DuplicateTask as duplicate:
            assert answer == "reject"
            return [Reply(duplicate.key, began_at, duplicate.task_id, existed=True)]
        assert answer != "reject" or not handle.existed
        return [Reply(key, began_at, handle.id, handle.existed)]

    judge(db, scope, *storm(db, senders, send))


@pytest.mark.parametrize("answer", ["existing", "replace", "reject"])
def test_concurrent_send_many_calls_take_their_keys_without_a_deadlock(
    db: StoreHarness, senders: list[Any], answer: str
) -> None:  # K8
    """Each call has the same keys in another order, in all scopes. A rejected call stores nothing."""

    def send(task: Any, number: int, turn: int) -> list[Reply]:
        calls = [
            task.with_options(key=f"{key}{scope}", unique_for=scope, on_duplicate=answer).call(turn)
            for key in KEYS
            for scope in ("live", "waiting", "1h", "kept")
        ]
        random.Random(100 * number + turn).shuffle(calls)
        if answer == "reject":
            calls = calls[:2]
        try:
            handles = task.send_many([*calls, task.call(1_000 * number + turn)])
        except DuplicateTask:
            return []
        *keyed, plain = handles
        assert not plain.existed
        assert answer != "reject" or not any(each.existed for each in keyed)
        return [
            Reply(str(call.settings.key), datetime.now().astimezone(), handle.id, handle.existed)
            for call, handle in zip(calls, keyed, strict=True)
        ] + [Reply("", datetime.now().astimezone(), plain.id, existed=False)]

    replies, _ = storm(db, senders, send)
    new = [each for each in replies if not each.existed]
    stored = {row[0]: row[1] for row in db.table("tasks", "id, coalesce(unique_key, key, '')")}
    assert len({each.task_id for each in new}) == len(new)
    assert {each.task_id: each.key for each in new} == stored, "a call that was rejected stored nothing"
    for key in KEYS:
        for scope in ("1h", "kept"):
            assert [*stored.values()].count(f"{key}{scope}") <= 1


def test_a_send_waits_only_for_a_transaction_with_the_same_key(
    db: StoreHarness, senders: list[Any], database_url: str
) -> None:  # K8
    """An open transaction has sent a new task, and has replaced and met waiting tasks."""
    first, second = senders[:2]
    options = {"unique_for": "waiting", "on_duplicate": "replace"}
    replaced = first.with_options(key="replaced", **options).send(1)
    met = first.with_options(key="met", unique_for="waiting").send(1)
    with psycopg.connect(database_url) as connection, ThreadPoolExecutor(1) as pool:
        first.with_options(key="new", connection=connection, **options).send(2)
        first.with_options(key="replaced", connection=connection, **options).send(2)
        assert first.with_options(key="met", unique_for="waiting", connection=connection).send(2).id == met.id
        others = second.send_many([second.with_options(key=f"other{n}", **options).call(n) for n in range(3)])
        assert not any(each.existed for each in others)
        assert second.with_options(key="met", **options).send(3).id == met.id
        claimed = db.claim()
        assert {each.id for each in claimed} == {met.id, *(each.id for each in others)}
        db.start(*claimed)
        db.complete(*claimed)
        waiting = pool.submit(second.with_options(key="new", **options).send, 3)
        done = threading.Event()
        assert not done.wait(0.3), "gives the other send time to end, if it does not wait"
        assert not waiting.done()
        connection.commit()
        assert waiting.result(timeout=10).existed
    assert replaced.info().arguments == {"n": 2}
