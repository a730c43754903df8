"""Signals and waits: each is received once by whoever waits for it, in whichever order the statements of both sides come to land."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from psycopg import Connection, sql

from everbeat.store import leases, signals, steps, tasks
from everbeat.store.leases import Claimed, Settlement
from everbeat.store.signals import SignalVerdict
from everbeat.store.statement import Statement
from tests.store.conftest import Hands

T = TypeVar("T")
NAME = "approved"


def signal(
    target: UUID, hands: Hands, *, name: str = NAME, value: bytes = b"1", own: UUID | None = None
) -> Any:
    return signals.send_signal(
        own or uuid4(), target=target, name=name, value=value, channel=hands.target.channel
    )


def send(hands: Hands, target: UUID, **more: Any) -> SignalVerdict:
    verdict: SignalVerdict = hands.run(signal(target, hands, **more))
    return verdict


def waiting(
    held: Claimed, *, name: str = NAME, timeout_ms: int | None = None
) -> Statement[steps.Waited | None]:
    event = name.partition("#")[0]
    return steps.wait_for_signal(held.id, held.claim_id, name=name, event=event, timeout_ms=timeout_ms)


def wait(hands: Hands, held: Claimed, **more: Any) -> steps.Waited:
    found = hands.run(waiting(held, **more))
    assert found is not None
    return found


def ask_twice(hands: Hands, held: Claimed) -> steps.Waited:
    """As a worker does before it lets its code be suspended."""
    found = wait(hands, held)
    return found if found.state != "OPEN" else wait(hands, held)


def suspension(held: Claimed, hands: Hands) -> Statement[dict[UUID, str]]:
    suspended = Settlement(id=held.id, claim_id=held.claim_id, outcome="SUSPENDED")
    return leases.settle([suspended], channel=hands.target.channel)


def in_workflow(hands: Hands, *, state: str = "RUNNING") -> tuple[UUID, Claimed]:
    """A running task of a workflow, which nothing else is known of."""
    workflow = a_workflow(hands, state=state)
    return workflow, adopted(hands, workflow)


def a_workflow(hands: Hands, *, state: str = "RUNNING") -> UUID:
    schema, workflow = sql.Identifier(hands.target.schema), uuid4()
    hands.connection.execute(
        sql.SQL(
            "insert into {}.workflows (id, name, state, on_error, node_count) values (%s, 'w', %s, 'fail', 1)"
        ).format(schema),
        [workflow, state],
    )
    return workflow


def adopted(hands: Hands, workflow: UUID, worker: str = "w1") -> Claimed:
    task_id = hands.send()
    hands.connection.execute(
        sql.SQL("update {}.tasks set workflow_id = %s, node = 1 where id = %s").format(
            sql.Identifier(hands.target.schema)
        ),
        [workflow, task_id],
    )
    (held,) = hands.claim(worker, limit=1)
    assert hands.start(held) == ["started"]
    return held


def taken_again(hands: Hands) -> Claimed:
    (held,) = hands.claim("w2", limit=1)
    assert hands.start(held) == ["started"]
    return held


def test_a_signal_that_came_before_is_had_at_once_and_once(hands: Hands) -> None:
    held = hands.running()
    assert send(hands, held.id, value=b'{"by": "ann"}') == SignalVerdict("stored", "task", "RUNNING")
    send(hands, held.id, value=b"2")
    send(hands, held.id, name="other", value=b"3")
    assert wait(hands, held) == steps.Waited("DONE", '{"by": "ann"}')
    assert wait(hands, held) == steps.Waited("DONE", '{"by": "ann"}'), "repeated, it answers the same"
    assert wait(hands, held, name="approved#2") == steps.Waited("DONE", "2")
    assert wait(hands, held, name="approved#3").state == "OPEN"


def test_a_repeated_signal_is_one(hands: Hands) -> None:
    held, own = hands.running(), uuid4()
    assert send(hands, held.id, own=own) == send(hands, held.id, own=own)
    hands.settle(held)
    assert send(hands, held.id, own=own).verdict == "stored", "its first try had landed before the end"
    assert hands.table("signals", "count(*)") == [(1,)]


def test_who_has_ended_or_is_unknown_is_refused_and_nothing_is_written(hands: Hands) -> None:
    held = hands.running()
    hands.settle(held)
    ended, _ = in_workflow(hands, state="CANCELLED")
    assert send(hands, held.id) == SignalVerdict("ended", "task", "COMPLETED")
    assert send(hands, ended) == SignalVerdict("ended", "workflow", "CANCELLED")
    assert send(hands, uuid4()) == SignalVerdict("unknown", None, None)
    assert hands.table("signals") == []


def test_a_suspended_task_is_due_when_the_signal_comes_and_its_workers_are_told(hands: Hands) -> None:
    held = hands.running(queue="mail")
    assert ask_twice(hands, held).state == "OPEN"
    hands.run(suspension(held, hands))
    assert hands.row(held.id, "enqueued_at > now() + interval '99 years'")
    send(hands, held.id, name="other")
    assert hands.claim() == []
    with hands.target.connect("everbeat test") as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(hands.target.channel)))
        send(hands, held.id, value=b"7")
        assert [note.payload for note in listener.notifies(timeout=10, stop_after=1)] == ["t:mail"]
    woken = taken_again(hands)
    assert wait(hands, woken) == steps.Waited("DONE", "7")
    assert hands.row(held.id, "waits_for, wake_at") == (None, None)


def test_the_timeout_counts_from_the_first_time_and_ends_the_wait_for_good(hands: Hands) -> None:
    held = hands.running()
    assert wait(hands, held, timeout_ms=3_600_000).state == "OPEN"
    hands.run(suspension(held, hands))
    due = hands.row(held.id, "enqueued_at")
    assert due == hands.table("steps", "due_at")[0][0]
    for table, column in (("tasks", "enqueued_at"), ("steps", "due_at")):
        hands.connection.execute(
            sql.SQL("update {}.{} set {} = now() - interval '1 s'").format(
                *map(sql.Identifier, (hands.target.schema, table, column))
            )
        )
    woken = taken_again(hands)
    assert wait(hands, woken, timeout_ms=3_600_000) == steps.Waited("TIMED_OUT", None)
    send(hands, held.id)
    assert wait(hands, woken, timeout_ms=3_600_000).state == "TIMED_OUT", "what code has seen stays as it was"
    assert wait(hands, woken, name="approved#2").state == "DONE", "and the signal is kept for the next wait"


def test_a_timeout_of_nothing_looks_once(hands: Hands) -> None:
    assert wait(hands, hands.running(), timeout_ms=0).state == "TIMED_OUT"


def test_an_operators_retry_of_a_timeout_waits_anew(hands: Hands) -> None:
    held = hands.running()
    for name in ("early", "late"):
        assert wait(hands, held, name=name, timeout_ms=0).state == "TIMED_OUT"
    hands.settle(held, "FAILED", error=b'{"code": "EVENT_TIMEOUT"}')
    hands.run(tasks.retry(held.id, channel=hands.target.channel, call=uuid4()))
    held = taken_again(hands)
    assert wait(hands, held, name="early").state == "TIMED_OUT", "the code went on after this one"
    assert wait(hands, held, name="late").state == "OPEN"
    hands.settle(held, "FAILED", error=b'{"code": "OTHER"}')
    hands.run(tasks.retry(held.id, channel=hands.target.channel, call=uuid4()))
    assert len(hands.table("steps")) == 2


def test_a_signal_makes_nothing_due_that_does_not_wait(hands: Hands) -> None:
    held = hands.running()
    assert ask_twice(hands, held).state == "OPEN"
    hands.settle(held, "FAILED", error=b'{"code": "X"}', retry_in_ms=3_600_000)
    send(hands, held.id)
    assert hands.claim() == [], "it waits for its retry, not for the signal"


def test_each_waiting_task_of_a_workflow_gets_it_once(hands: Hands) -> None:
    workflow, first = in_workflow(hands)
    second, stranger = adopted(hands, workflow), hands.running()
    for held in (first, second, stranger):
        assert ask_twice(hands, held).state == "OPEN"
        hands.run(suspension(held, hands))
    assert send(hands, workflow, value=b'"go"') == SignalVerdict("stored", "workflow", "RUNNING")
    woken = hands.claim("w2")
    assert {one.id for one in woken} == {first.id, second.id}
    hands.start(*woken)
    for held in woken:
        assert wait(hands, held) == steps.Waited("DONE", '"go"')
        assert wait(hands, held, name="approved#2").state == "OPEN"
    third = adopted(hands, workflow)
    assert wait(hands, third).state == "DONE", "who comes later has it, too"


def test_a_task_hears_itself_and_its_workflow_in_the_order_sent(hands: Hands) -> None:
    workflow, held = in_workflow(hands)
    send(hands, workflow, value=b"1")
    send(hands, held.id, value=b"2")
    send(hands, workflow, value=b"3")
    found = [wait(hands, held, name=name).value for name in ("approved", "approved#2", "approved#3")]
    assert found == ["1", "2", "3"]


# The race: a signal arrives while the task is about to be suspended. One side holds its transaction open, the other one begins.


def begun(hands: Hands, connection: Connection[Any], statement: Statement[T]) -> T:
    connection.execute("begin")
    return statement.read(
        connection.execute(hands.text(statement.name), statement.parameters, prepare=False).fetchall()
    )


def overlapping(hands: Hands, first: Statement[Any], then: Callable[[], T]) -> T:
    """What `then` answers that begins while the first is not committed yet: it has ended, or waits for a lock."""
    with hands.target.connect("the first") as connection, ThreadPoolExecutor(1) as pool:
        begun(hands, connection, first)
        answer = pool.submit(then)
        until_blocked(hands, answer)
        connection.execute("commit")
        return answer.result(timeout=20)


def until_blocked(hands: Hands, answer: Future[Any]) -> None:
    query = "select count(*) from pg_stat_activity where application_name = 'everbeat client' and wait_event_type = 'Lock'"
    for _ in range(2_000):
        if answer.done() or hands.connection.execute(query).fetchone() != (0,):
            return
        time.sleep(0.005)  # another session's lock is seen from outside only
    raise AssertionError("neither blocked nor done")


def check_received(hands: Hands, held: Claimed, seen: steps.Waited) -> None:
    """The code has the signal, or is suspended and due at once to have it."""
    if seen.state == "OPEN":
        hands.run(suspension(held, hands))
        check_due(hands, held)
    else:
        assert seen == steps.Waited("DONE", "1")


def check_due(hands: Hands, held: Claimed) -> None:
    woken = hands.claim("w2")
    assert [one.id for one in woken] == [held.id], "it would sleep for ever"
    hands.start(*woken)
    assert wait(hands, woken[0]) == steps.Waited("DONE", "1")


def both_targets(hands: Hands) -> list[tuple[UUID, Claimed]]:
    held = hands.running()
    return [(held.id, held), in_workflow(hands)]


def test_a_wait_that_begins_while_a_signal_is_stored(hands: Hands) -> None:
    for target, held in both_targets(hands):
        seen = overlapping(hands, signal(target, hands), lambda held=held: ask_twice(hands, held))  # type: ignore[misc]
        check_received(hands, held, seen)


def test_a_signal_that_begins_while_a_wait_is_written(hands: Hands) -> None:
    for target, held in both_targets(hands):
        overlapping(hands, waiting(held), lambda target=target: send(hands, target))  # type: ignore[misc]
        check_received(hands, held, wait(hands, held))


def test_a_signal_that_begins_while_the_second_look_is_taken(hands: Hands) -> None:
    for target, held in both_targets(hands):
        assert wait(hands, held).state == "OPEN"
        overlapping(hands, waiting(held), lambda target=target: send(hands, target))  # type: ignore[misc]
        hands.run(suspension(held, hands))  # it was told OPEN, twice
        check_due(hands, held)


def test_a_second_look_that_begins_while_a_signal_is_stored(hands: Hands) -> None:
    for target, held in both_targets(hands):
        assert wait(hands, held).state == "OPEN"
        seen = overlapping(hands, signal(target, hands), lambda held=held: wait(hands, held))  # type: ignore[misc]
        check_received(hands, held, seen)


def test_a_suspension_that_begins_while_a_signal_is_stored(hands: Hands) -> None:
    for target, held in both_targets(hands):
        assert ask_twice(hands, held).state == "OPEN"
        overlapping(hands, signal(target, hands), lambda held=held: hands.run(suspension(held, hands)))  # type: ignore[misc]
        check_due(hands, held)


def test_a_signal_that_begins_while_a_suspension_is_written(hands: Hands) -> None:
    for target, held in both_targets(hands):
        assert ask_twice(hands, held).state == "OPEN"
        overlapping(hands, suspension(held, hands), lambda target=target: send(hands, target))  # type: ignore[misc]
        check_due(hands, held)


@pytest.mark.parametrize("rounds", [60])
def test_signals_and_waits_at_full_speed_lose_nothing(hands: Hands, rounds: int) -> None:
    """Both sides as fast as they can, on sessions of their own: each round must end with the signal received."""
    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds):
            target, held = in_workflow(hands) if number % 2 else (UUID(int=0), hands.running())
            target = held.id if number % 2 == 0 else target
            sent = pool.submit(send, hands, target)
            seen = pool.submit(ask_twice, hands, held).result(timeout=20)
            if seen.state == "OPEN":
                hands.run(suspension(held, hands))
            sent.result(timeout=20)
            if seen.state == "OPEN":
                check_due(hands, held)
            else:
                assert seen.value == "1"
