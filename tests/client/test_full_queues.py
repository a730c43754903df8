"""Test `max_waiting`: sends into a full queue are refused or wait, for one task, many tasks and a transaction."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from everbeat import App, QueueConfig
from everbeat.client.queue_limits import COUNT_EVERY_S, FULL_FOR_S
from everbeat.config import MOST_WAITING
from everbeat.errors import ConfigurationError, QueueFull
from everbeat.store.tasks import count_waiting
from tests.client.working import working
from tests.store.conftest import StoreHarness
from tests.store.plans import nodes, plan

MakeApp = Callable[..., App]


@pytest.fixture
def limited(app: App, database_url: str, schema: str) -> Iterator[MakeApp]:
    """Return a function that opens a further app whose queue `mail` is limited."""
    opened: list[App] = []

    def make(**options: Any) -> App:
        queues = [QueueConfig("mail", **options), QueueConfig("other")]
        opened.append(App(database_url, schema=schema, queues=queues, patience="1s"))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def work_of(app: App, **options: Any) -> Any:
    @app.task(name="work", queue="mail", **options)
    def work(n: int = 0) -> int:
        return n

    return work


def waiting(db: StoreHarness) -> int:
    query = sql.SQL("select count(*) from {}.tasks where state = 'PENDING'").format(
        sql.Identifier(db.target.schema)
    )
    row = db.connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def test_a_send_into_a_full_queue_is_refused_with_its_numbers(limited: MakeApp, db: StoreHarness) -> None:
    work = work_of(limited(max_waiting=3))
    for _ in range(3):
        work.send()
    with pytest.raises(QueueFull) as caught:
        work.send()
    assert str(caught.value) == (
        "Queue 'mail' is full: 3 tasks or more wait, and max_waiting is 3, so a task was not sent."
        " Fix: send again later, add workers for the queue, or raise its max_waiting."
    )
    error = caught.value
    assert (error.queue, error.waiting, error.max_waiting, error.sending) == ("mail", 3, 3, 1)
    work.with_options(queue="other").send()  # other queues have no limit
    assert waiting(db) == 4


def test_a_claim_makes_room_for_the_next_send(limited: MakeApp, db: StoreHarness) -> None:
    work = work_of(limited(max_waiting=1))
    work.send()
    with pytest.raises(QueueFull):
        work.send()
    db.claim("w1")
    time.sleep(FULL_FOR_S)  # the time for which a count without room is used
    work.send()
    assert waiting(db) == 1


def test_a_send_many_counts_its_own_tasks(limited: MakeApp, db: StoreHarness) -> None:
    app = limited(max_waiting=5, when_full="wait")
    work = work_of(app)
    app.send_many([work.call(n) for n in range(4)])
    with pytest.raises(QueueFull, match=r"so 2 tasks were not sent") as caught:
        app.send_many([work.call(n) for n in range(2)])
    assert caught.value.waiting == 4
    began = time.monotonic()
    never = r"can never take 6 tasks at once: max_waiting is 5.*send at most 5 tasks at once"
    with pytest.raises(QueueFull, match=never):
        app.send_many([work.call(n) for n in range(6)])
    assert time.monotonic() - began < 0.5  # a send that never fits does not wait
    assert waiting(db) == 4


def test_scheduled_serial_and_retried_tasks_count_as_waiting(limited: MakeApp, db: StoreHarness) -> None:
    app = limited(max_waiting=3)
    work = work_of(app)
    work.schedule(timedelta(hours=1))
    work.with_options(serial="a").send()
    work.with_options(serial="b").send()
    with pytest.raises(QueueFull):
        work.send()


def test_a_send_waits_for_room_up_to_its_patience(limited: MakeApp, db: StoreHarness) -> None:
    work = work_of(limited(max_waiting=1, when_full="wait"))
    work.send()
    began = time.monotonic()
    with pytest.raises(QueueFull, match=r"is full after 1(\.\d+)? s"):
        work.send()  # the patience of the app
    assert 0.9 < time.monotonic() - began < 5
    claim = threading.Timer(1.5, lambda: db.claim("w1"))
    claim.start()
    try:
        work.with_options(patience="20s").send()
    finally:
        claim.join()
    assert waiting(db) == 1


async def test_an_async_send_waits_without_blocking_the_loop(limited: MakeApp, db: StoreHarness) -> None:
    app = limited(max_waiting=1, when_full="wait")

    @app.task(queue="mail")
    async def nap(n: int) -> int:
        return n

    async with working(app):
        with app.patience("30s"):
            handles = await asyncio.gather(*(nap.asend(n) for n in range(5)))
        assert sorted([await each.aresult(timeout=30) for each in handles]) == [0, 1, 2, 3, 4]


def test_a_send_in_a_transaction_checks_once_and_never_waits(
    limited: MakeApp, db: StoreHarness, database_url: str
) -> None:
    work = work_of(limited(max_waiting=2, when_full="wait"))
    with psycopg.connect(database_url) as connection:
        joined = work.with_options(connection=connection)
        joined.send()
        joined.send()
        began = time.monotonic()
        with pytest.raises(QueueFull):
            joined.send()
        assert time.monotonic() - began < 0.5
        assert connection.execute("select 1").fetchone() == (1,)  # the transaction is still usable
    assert waiting(db) == 2


def test_concurrent_senders_overshoot_by_at_most_one_period(limited: MakeApp, db: StoreHarness) -> None:
    works = [work_of(limited(max_waiting=50)) for _ in range(4)]
    sent = [0] * len(works)
    until = time.monotonic() + 4 * COUNT_EVERY_S

    def send(place: int) -> None:
        while time.monotonic() < until:
            try:
                works[place].send()
                sent[place] += 1
            except QueueFull:
                time.sleep(0.01)  # the pace of a sender that tries again

    threads = [threading.Thread(target=send, args=[place]) for place in range(len(works))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    # Each app stands for a process. In the first period it knows only its own 50 tasks, and afterwards none is sent.
    assert 50 <= waiting(db) == sum(sent) <= 4 * 50
    before = waiting(db)
    with pytest.raises(QueueFull):
        works[0].send()
    assert waiting(db) == before


def test_the_count_reads_a_bounded_part_of_an_index(db: StoreHarness) -> None:
    schema = sql.Identifier(db.target.schema)
    db.connection.execute(
        sql.SQL(
            "insert into {}.tasks (id, name, queue, priority, args, serial, serial_at)"
            " select gen_random_uuid(), 'work', 'mail', n %% 7, '{{}}', case when n %% 2 = 0 then 's' || n end, now()"
            " from generate_series(1, %s) n"
        ).format(schema),
        [100_000],
    )
    db.connection.execute(sql.SQL("vacuum analyze {}.tasks").format(schema))
    found = plan(db, count_waiting("mail", limit=500))
    assert [each["Node Type"] for each in nodes(found["Plan"]) if each["Node Type"] == "Seq Scan"] == []
    rows = [each["Actual Rows"] for each in nodes(found["Plan"]) if each.get("Relation Name") == "tasks"]
    assert max(rows) <= 10 * 500, json.dumps(found)[:2000]
    assert db.run(count_waiting("mail", limit=500)) >= 500
    assert db.run(count_waiting("empty", limit=500)) == 0


def test_invalid_limits_are_rejected() -> None:
    for wrong in ({"max_waiting": 0}, {"max_waiting": MOST_WAITING + 1}, {"when_full": "drop"}):
        with pytest.raises(ConfigurationError, match=r"QueueConfig\.(max_waiting|when_full)"):
            QueueConfig("mail", **wrong)  # type: ignore[arg-type]
