"""Signals and waits: each signal is received once by its waiter, in whichever order the statements of both sides commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from psycopg import Connection, sql

from everbeat.store import leases, steps, tasks
from everbeat.store.claims import Claimed
from everbeat.store.leases import Settlement
from everbeat.store.statement import Statement
from everbeat.store.tasks import SignalVerdict
from tests.store.conftest import StoreHarness

T = TypeVar("T")
NAME = "approved"


def signal(
    target: UUID, db: StoreHarness, *, name: str = NAME, value: bytes = b"1", own: UUID | None = None
) -> Any:
    return tasks.send_signal(own or uuid4(), target=target, name=name, value=value, channel=db.target.channel)


def send(db: StoreHarness, target: UUID, **more: Any) -> SignalVerdict:
    verdict: SignalVerdict = db.run(signal(target, db, **more))
    return verdict


def waiting(
    held: Claimed, *, name: str = NAME, timeout_ms: int | None = None
) -> Statement[steps.Waited | None]:
    event = name.partition("#")[0]
    return steps.wait_for_signal(held.id, held.claim_id, name=name, event=event, timeout_ms=timeout_ms)


def wait(db: StoreHarness, held: Claimed, **more: Any) -> steps.Waited:
    found = db.run(waiting(held, **more))
    assert found is not None
    return found


def ask_twice(db: StoreHarness, held: Claimed) -> steps.Waited:
    """Wait twice, as a worker does before it lets its code be suspended."""
    found = wait(db, held)
    return found if found.state != "OPEN" else wait(db, held)


def suspension(held: Claimed, db: StoreHarness) -> Statement[dict[UUID, str]]:
    suspended = Settlement(id=held.id, claim_id=held.claim_id, outcome="SUSPENDED")
    return leases.settle([suspended], channel=db.target.channel)


def in_workflow(db: StoreHarness, *, state: str = "RUNNING") -> tuple[UUID, Claimed]:
    """Return a running task of an otherwise empty workflow."""
    workflow = a_workflow(db, state=state)
    return workflow, adopted(db, workflow)


def a_workflow(db: StoreHarness, *, state: str = "RUNNING") -> UUID:
    schema, workflow = sql.Identifier(db.target.schema), uuid4()
    db.connection.execute(
        sql.SQL(
            "insert into {}.workflows (id, name, state, on_error, node_count) values (%s, 'w', %s, 'fail', 1)"
        ).format(schema),
        [workflow, state],
    )
    return workflow


def adopted(db: StoreHarness, workflow: UUID, worker: str = "w1") -> Claimed:
    task_id = db.send()
    db.connection.execute(
        sql.SQL("update {}.tasks set workflow_id = %s, node = 1 where id = %s").format(
            sql.Identifier(db.target.schema)
        ),
        [workflow, task_id],
    )
    (held,) = db.claim(worker, limit=1)
    assert db.start(held) == ["started"]
    return held


def taken_again(db: StoreHarness) -> Claimed:
    (held,) = db.claim("w2", limit=1)
    assert db.start(held) == ["started"]
    return held


def test_a_signal_that_arrived_before_its_wait_is_received_at_once_and_once(db: StoreHarness) -> None:
    held = db.running()
    assert send(db, held.id, value=b'{"by": "ann"}') == SignalVerdict("stored", "task", "RUNNING")
    send(db, held.id, value=b"2")
    send(db, held.id, name="other", value=b"3")
    assert wait(db, held) == steps.Waited("DONE", '{"by": "ann"}')
    assert wait(db, held) == steps.Waited("DONE", '{"by": "ann"}'), "repeated, the wait returns the same"
    assert wait(db, held, name="approved#2") == steps.Waited("DONE", "2")
    assert wait(db, held, name="approved#3").state == "OPEN"


def test_a_repeated_signal_is_stored_once(db: StoreHarness) -> None:
    held, own = db.running(), uuid4()
    assert send(db, held.id, own=own) == send(db, held.id, own=own)
    db.settle(held)
    assert send(db, held.id, own=own).verdict == "stored", "its first try was stored before the task ended"
    assert db.table("signals", "count(*)") == [(1,)]


def test_a_signal_to_an_ended_or_unknown_target_is_rejected_and_not_stored(db: StoreHarness) -> None:
    held = db.running()
    db.settle(held)
    ended, _ = in_workflow(db, state="CANCELLED")
    assert send(db, held.id) == SignalVerdict("ended", "task", "COMPLETED")
    assert send(db, ended) == SignalVerdict("ended", "workflow", "CANCELLED")
    assert send(db, uuid4()) == SignalVerdict("unknown", None, None)
    assert db.table("signals") == []


def test_a_signal_makes_a_suspended_task_due_and_notifies_its_workers(db: StoreHarness) -> None:
    held = db.running(queue="mail")
    assert ask_twice(db, held).state == "OPEN"
    db.run(suspension(held, db))
    assert db.row(held.id, "enqueued_at > now() + interval '99 years'")
    send(db, held.id, name="other")
    assert db.claim() == []
    with db.target.connect("everbeat test") as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(db.target.channel)))
        send(db, held.id, value=b"7")
        assert [note.payload for note in listener.notifies(timeout=10, stop_after=1)] == ["t:mail"]
    woken = taken_again(db)
    assert wait(db, woken) == steps.Waited("DONE", "7")
    assert db.row(held.id, "waits_for, wake_at") == (None, None)


def test_the_timeout_of_a_wait_counts_from_the_first_wait_and_is_final(db: StoreHarness) -> None:
    held = db.running()
    assert wait(db, held, timeout_ms=3_600_000).state == "OPEN"
    db.run(suspension(held, db))
    due = db.row(held.id, "enqueued_at")
    assert due == db.table("steps", "due_at")[0][0]
    for table, column in (("tasks", "enqueued_at"), ("steps", "due_at")):
        db.connection.execute(
            sql.SQL("update {}.{} set {} = now() - interval '1 s'").format(
                *map(sql.Identifier, (db.target.schema, table, column))
            )
        )
    woken = taken_again(db)
    assert wait(db, woken, timeout_ms=3_600_000) == steps.Waited("TIMED_OUT", None)
    send(db, held.id)
    assert wait(db, woken, timeout_ms=3_600_000).state == "TIMED_OUT", (
        "a result that code has seen does not change"
    )
    assert wait(db, woken, name="approved#2").state == "DONE", "and the signal is kept for the next wait"


def test_a_wait_with_a_timeout_of_zero_times_out_at_once(db: StoreHarness) -> None:
    assert wait(db, db.running(), timeout_ms=0).state == "TIMED_OUT"


def test_an_operator_retry_after_a_timed_out_wait_waits_again(db: StoreHarness) -> None:
    held = db.running()
    for name in ("early", "late"):
        assert wait(db, held, name=name, timeout_ms=0).state == "TIMED_OUT"
    db.settle(held, "FAILED", error=b'{"code": "EVENT_TIMEOUT"}')
    db.run(tasks.retry(held.id, channel=db.target.channel, call=uuid4()))
    held = taken_again(db)
    assert wait(db, held, name="early").state == "TIMED_OUT", "the code continued after this one"
    assert wait(db, held, name="late").state == "OPEN"
    db.settle(held, "FAILED", error=b'{"code": "OTHER"}')
    db.run(tasks.retry(held.id, channel=db.target.channel, call=uuid4()))
    assert len(db.table("steps")) == 2


def test_a_signal_does_not_make_a_task_due_that_waits_for_its_retry(db: StoreHarness) -> None:
    held = db.running()
    assert ask_twice(db, held).state == "OPEN"
    db.settle(held, "FAILED", error=b'{"code": "X"}', retry_in_ms=3_600_000)
    send(db, held.id)
    assert db.claim() == [], "it waits for its retry, not for the signal"


def test_each_waiting_task_of_a_workflow_receives_a_signal_of_the_workflow_once(db: StoreHarness) -> None:
    workflow, first = in_workflow(db)
    second, stranger = adopted(db, workflow), db.running()
    for held in (first, second, stranger):
        assert ask_twice(db, held).state == "OPEN"
        db.run(suspension(held, db))
    assert send(db, workflow, value=b'"go"') == SignalVerdict("stored", "workflow", "RUNNING")
    woken = db.claim("w2")
    assert {one.id for one in woken} == {first.id, second.id}
    db.start(*woken)
    for held in woken:
        assert wait(db, held) == steps.Waited("DONE", '"go"')
        assert wait(db, held, name="approved#2").state == "OPEN"
    third = adopted(db, workflow)
    assert wait(db, third).state == "DONE", "a task that starts later receives it, too"


def test_a_task_receives_its_own_signals_and_those_of_its_workflow_in_the_order_sent(
    db: StoreHarness,
) -> None:
    workflow, held = in_workflow(db)
    send(db, workflow, value=b"1")
    send(db, held.id, value=b"2")
    send(db, workflow, value=b"3")
    found = [wait(db, held, name=name).value for name in ("approved", "approved#2", "approved#3")]
    assert found == ["1", "2", "3"]


# The race: a signal arrives while the task is about to be suspended. One side keeps its transaction open while the other begins.


def begun(db: StoreHarness, connection: Connection[Any], statement: Statement[T]) -> T:
    connection.execute("begin")
    return statement.read(
        connection.execute(db.text(statement.name), statement.parameters, prepare=False).fetchall()
    )


def overlapping(db: StoreHarness, first: Statement[Any], then: Callable[[], T]) -> T:
    """Return the result of `then`, which begins before the first statement is committed: it has ended or waits for a lock."""
    with db.target.connect("the first") as connection, ThreadPoolExecutor(1) as pool:
        begun(db, connection, first)
        answer = pool.submit(then)
        until_blocked(db, answer)
        connection.execute("commit")
        return answer.result(timeout=20)


def until_blocked(db: StoreHarness, answer: Future[Any]) -> None:
    query = "select count(*) from pg_stat_activity where application_name = 'everbeat client' and wait_event_type = 'Lock'"
    for _ in range(2_000):
        if answer.done() or db.connection.execute(query).fetchone() != (0,):
            return
        time.sleep(0.005)  # another session's lock is visible from outside only
    raise AssertionError("neither blocked nor done")


def check_received(db: StoreHarness, held: Claimed, seen: steps.Waited) -> None:
    """Check that the code has the signal, or is suspended and due at once to receive it."""
    if seen.state == "OPEN":
        db.run(suspension(held, db))
        check_due(db, held)
    else:
        assert seen == steps.Waited("DONE", "1")


def check_due(db: StoreHarness, held: Claimed) -> None:
    woken = db.claim("w2")
    assert [one.id for one in woken] == [held.id], "the task would sleep forever"
    db.start(*woken)
    assert wait(db, woken[0]) == steps.Waited("DONE", "1")


def both_targets(db: StoreHarness) -> list[tuple[UUID, Claimed]]:
    held = db.running()
    return [(held.id, held), in_workflow(db)]


def test_a_wait_that_begins_while_a_signal_is_stored_receives_it(db: StoreHarness) -> None:
    for target, held in both_targets(db):
        seen = overlapping(db, signal(target, db), lambda held=held: ask_twice(db, held))  # type: ignore[misc]
        check_received(db, held, seen)


def test_a_signal_that_begins_while_a_wait_is_written_is_received(db: StoreHarness) -> None:
    for target, held in both_targets(db):
        overlapping(db, waiting(held), lambda target=target: send(db, target))  # type: ignore[misc]
        check_received(db, held, wait(db, held))


def test_a_signal_that_begins_during_the_second_wait_is_received(db: StoreHarness) -> None:
    for target, held in both_targets(db):
        assert wait(db, held).state == "OPEN"
        overlapping(db, waiting(held), lambda target=target: send(db, target))  # type: ignore[misc]
        db.run(suspension(held, db))  # both waits returned OPEN
        check_due(db, held)


def test_a_second_wait_that_begins_while_a_signal_is_stored_receives_it(db: StoreHarness) -> None:
    for target, held in both_targets(db):
        assert wait(db, held).state == "OPEN"
        seen = overlapping(db, signal(target, db), lambda held=held: wait(db, held))  # type: ignore[misc]
        check_received(db, held, seen)


def test_a_suspension_that_begins_while_a_signal_is_stored_receives_it(db: StoreHarness) -> None:
    for target, held in both_targets(db):
        assert ask_twice(db, held).state == "OPEN"
        overlapping(db, signal(target, db), lambda held=held: db.run(suspension(held, db)))  # type: ignore[misc]
        check_due(db, held)


def test_a_signal_that_begins_while_a_suspension_is_written_is_received(db: StoreHarness) -> None:
    for target, held in both_targets(db):
        assert ask_twice(db, held).state == "OPEN"
        overlapping(db, suspension(held, db), lambda target=target: send(db, target))  # type: ignore[misc]
        check_due(db, held)


@pytest.mark.parametrize("rounds", [60])
def test_concurrent_signals_and_waits_lose_no_signal(db: StoreHarness, rounds: int) -> None:
    """Both sides run as fast as they can, on separate sessions: each round must end with the signal received."""
    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds):
            target, held = in_workflow(db) if number % 2 else (UUID(int=0), db.running())
            target = held.id if number % 2 == 0 else target
            sent = pool.submit(send, db, target)
            seen = pool.submit(ask_twice, db, held).result(timeout=20)
            if seen.state == "OPEN":
                db.run(suspension(held, db))
            sent.result(timeout=20)
            if seen.state == "OPEN":
                check_due(db, held)
            else:
                assert seen.value == "1"
