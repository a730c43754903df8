"""The statement of sends with scopes of uniqueness, and the triggers of keys, one statement at a time and in races."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from msgspec import structs

from everbeat.store import claims, leases, tasks
from everbeat.store.statement import Statement, compose
from everbeat.store.unique_tasks import UniqueTask, insert_unique_tasks, task_with_key
from tests.store.conftest import StoreHarness
from tests.store.test_messages import in_use


def unique(
    key: str | None = "k", unique_for: str | None = "waiting", on_duplicate: Any = "existing", n: int = 1
) -> UniqueTask:
    args = b'{"n": %d}' % n
    task = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=args, key=key)
    return UniqueTask(task=task, unique_for=unique_for, on_duplicate=on_duplicate)


def send(db: StoreHarness, *asked: UniqueTask) -> list[UUID | None]:
    return db.run(insert_unique_tasks(asked, channel=db.target.channel))


def run_all(db: StoreHarness) -> None:
    claimed = db.claim()
    db.start(*claimed)
    db.complete(*claimed)


class OpenTransaction:
    """Runs statements in one transaction."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str) -> None:
        self.commit = connection.commit
        self.pid = connection.info.backend_pid
        self._connection = connection
        self._schema = schema

    def run(self, statement: Statement[Any]) -> Any:
        text = compose(statement.name, self._schema)
        return statement.read(self._connection.execute(text, statement.parameters).fetchall())


@contextmanager
def transaction(db: StoreHarness) -> Iterator[OpenTransaction]:
    """Yield an open transaction, which is committed at the end if the test has not done so."""
    with psycopg.connect(db.target.url) as connection:
        yield OpenTransaction(connection, db.target.schema)


@contextmanager
def blocked(db: StoreHarness, opened: OpenTransaction, call: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run the call in a thread, and enter the block as soon as its session waits for the open transaction."""
    waits = "select count(*) from pg_stat_activity where %s = any(pg_blocking_pids(pid))"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        while True:
            row = db.connection.execute(waits, [opened.pid]).fetchone()
            assert row is not None
            if row[0] or future.done():
                break
        yield future


def test_a_repeated_send_of_a_task_that_has_ended_returns_that_task(db: StoreHarness) -> None:  # K8
    for scope in ("waiting", "3600000 milliseconds", "kept"):
        asked = unique(scope, scope)
        assert send(db, asked) == [asked.task.id]
        run_all(db)
        assert send(db, asked) == [asked.task.id]
        newer = unique(scope, scope)
        assert send(db, newer) == [newer.task.id if scope == "waiting" else asked.task.id]
        run_all(db)


def test_a_repeated_send_that_changed_a_task_returns_it_after_its_end(db: StoreHarness) -> None:  # K8
    first, second = unique(), unique(on_duplicate="replace", n=2)
    assert send(db, first) == send(db, second) == [first.task.id]
    run_all(db)
    assert send(db, second) == [first.task.id]
    assert len(db.table("tasks")) == 1


def test_a_send_that_runs_twice_at_once_does_not_take_the_key_of_its_own_ended_task(
    db: StoreHarness,
) -> None:  # K8
    """The second run began before the first one was committed, so only the trigger sees the task's own key."""
    asked = unique()
    send(db, asked)
    db.claim()
    take = db.plain(
        "insert into {schema}.unique_keys (name, key, task_id) values ('work', 'k', %s) on conflict do nothing"
    )
    db.connection.execute(take, [asked.task.id])
    assert db.table("unique_keys", "task_id, until = '-infinity'") == [(asked.task.id, True)]


def test_a_send_that_meets_a_claim_in_flight_sends_a_new_task(db: StoreHarness) -> None:  # K8
    """A replacing send locks the waiting task. After the claim, the task is no longer waiting, and its arguments stay as they were."""
    first, second = unique(), unique(on_duplicate="replace", n=2)
    send(db, first)
    claim = claims.claim(
        worker_id="w1", claim_call=uuid4(), names=["work"], limit=1, queues=None, queue_priorities={}
    )
    with transaction(db) as opened:
        assert [one.id for one in opened.run(claim)] == [first.task.id]
        with blocked(db, opened, lambda: send(db, second)) as sent:
            opened.commit()
            assert sent.result(timeout=10) == [None], "the holder of the key has changed"
    assert send(db, second) == [second.task.id]
    assert sorted(db.table("tasks", "args->>'n', state")) == [("1", "CLAIMED"), ("2", "PENDING")]


def test_a_reject_among_other_calls_stores_nothing_if_its_key_is_taken_in_the_meantime(
    db: StoreHarness,
) -> None:  # K8
    """The statement waits for the other transaction, is aborted, and finds the other task when it is repeated."""
    rival, other = unique("k", "kept"), unique("a", "kept")
    rejecting = unique("k", "kept", "reject")
    with transaction(db) as opened:
        assert opened.run(insert_unique_tasks([rival], channel=db.target.channel)) == [rival.task.id]
        with blocked(db, opened, lambda: send(db, other, rejecting)) as sent:
            assert not sent.done()
            opened.commit()
            assert sent.result(timeout=10)[1] == rival.task.id
    assert [row[0] for row in db.table("tasks", "id")] == [rival.task.id]
    assert [row[0] for row in db.table("unique_keys", "key")] == ["k"]


def test_a_release_does_not_wait_for_an_open_transaction_that_takes_the_key(db: StoreHarness) -> None:  # K8
    first, second = unique(), unique(n=2)
    send(db, first)
    (claimed,) = db.claim()
    with transaction(db) as opened:
        assert opened.run(insert_unique_tasks([second], channel=db.target.channel)) == [second.task.id]
        db.connection.execute("set lock_timeout = '2s'")
        release = leases.release([(claimed.id, claimed.claim_id)], channel=db.target.channel)
        db.connection.execute(db.text(release.name), release.parameters)
        assert db.row(first.task.id, "state") == "PENDING"
    db.connection.execute("reset lock_timeout")
    assert db.run(task_with_key("work", "k")) == second.task.id


def test_two_senders_of_a_free_key_get_the_same_task(db: StoreHarness) -> None:  # K8
    old, first, second = unique(), unique(n=2), unique(n=3)
    send(db, old)
    run_all(db)
    with transaction(db) as opened:
        assert opened.run(insert_unique_tasks([first], channel=db.target.channel)) == [first.task.id]
        with blocked(db, opened, lambda: send(db, second)) as sent:
            opened.commit()
            assert sent.result(timeout=10) in ([None], [first.task.id])
    assert send(db, second) == [first.task.id]


def test_a_rolled_back_send_leaves_its_key_free(db: StoreHarness) -> None:  # K8
    old, first, second = unique(), unique(n=2), unique(n=3)
    send(db, old)
    run_all(db)
    with psycopg.connect(db.target.url) as connection:
        statement = insert_unique_tasks([first], channel=db.target.channel)
        connection.execute(compose(statement.name, db.target.schema), statement.parameters)
        connection.rollback()
    assert send(db, second) == [second.task.id]


@pytest.mark.parametrize("unique_for", [None, "kept"])
def test_a_key_of_another_task_function_is_another_key(db: StoreHarness, unique_for: str | None) -> None:
    first = unique(unique_for=unique_for, on_duplicate="replace")
    task = tasks.NewTask(id=uuid4(), name="other", queue="default", priority=0, args=b"{}", key="k")
    other = UniqueTask(task=task, unique_for=unique_for, on_duplicate="replace")
    assert send(db, first, other) == [first.task.id, other.task.id]


def test_a_send_that_moves_a_waiting_task_writes_a_message_for_its_new_moment_and_queue(
    db: StoreHarness,
) -> None:
    in_use(db)
    first = unique()
    send(db, first)
    later = unique(on_duplicate="debounce")
    delayed = structs.replace(later, task=structs.replace(later.task, delay_ms=60_000))
    moved = unique(on_duplicate="replace")
    elsewhere = structs.replace(moved, task=structs.replace(moved.task, queue="mail"))
    assert send(db, delayed) == send(db, elsewhere) == [first.task.id]
    rows = db.table("message_outbox", "task_id, queue, due_at > now() + interval '50 s'")
    assert rows == [
        (first.task.id, "default", False),
        (first.task.id, "default", True),
        (first.task.id, "mail", False),
    ]
