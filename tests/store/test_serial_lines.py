"""Serial lines, suspects and pauses as the claim sees them: one of a line at a time and in order, whoever claims."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.domain.states import TaskState
from everbeat.store import leases, tasks
from everbeat.store.database import Database
from everbeat.store.leases import Claimed, RecoveryOrder
from tests.store.conftest import Hands

LINE = "queue:ledger"


def send_line(hands: Hands, count: int, *, line: str = LINE) -> list[UUID]:
    return [hands.send(serial=line) for _ in range(count)]


def claimed_ids(hands: Hands, worker: str = "w1") -> list[UUID]:
    return [one.id for one in hands.claim(worker)]


def recovered(hands: Hands, held: Claimed, *, action: str, retry_in_ms: int | None = None) -> None:
    order = RecoveryOrder(
        id=held.id,
        claim_id=held.claim_id,
        state=TaskState.RUNNING,
        action=action,  # type: ignore[arg-type]
        retry_in_ms=retry_in_ms,
        outcome="LOST",
        error=b'{"code": "WORKER_CRASHED", "message": "died"}',
        cause="died",
        last_beat_at=None,
        noticed_after_ms=0,
    )
    landed = hands.run(
        leases.recover([order], noticed_by="session", recovered_by="s2", channel=hands.target.channel)
    )
    assert [one.id for one in landed] == [held.id]


def test_one_at_a_time_and_in_order(hands: Hands) -> None:  # F8
    first, second, third = send_line(hands, 3)
    for expected in (first, second, third):
        (held,) = hands.claim("w1")
        assert held.id == expected
        assert hands.claim("w2") == []
        assert hands.start(held) == ["started"]
        assert hands.claim("w2") == []
        assert hands.settle(held) == "COMPLETED"
    assert hands.claim("w1") == []


def test_lines_do_not_hold_each_other_up_nor_plain_tasks(hands: Hands) -> None:
    mine, _ = send_line(hands, 2, line="key:a")
    yours, _ = send_line(hands, 2, line="key:b")
    plain = hands.send()
    assert set(claimed_ids(hands)) == {mine, yours, plain}
    assert claimed_ids(hands, "w2") == []


def test_the_order_holds_through_a_retry_and_through_a_death(hands: Hands) -> None:  # F8
    first, second = send_line(hands, 2)
    (held,) = hands.claim("w1")
    hands.start(held)
    recovered(hands, held, action="retry", retry_in_ms=60_000)
    assert hands.claim("w2") == [], "the head waits for its retry, and the line behind it"
    hands.connection.execute(
        sql.SQL("update {}.tasks set enqueued_at = statement_timestamp() where id = %s").format(
            sql.Identifier(hands.target.schema)
        ),
        [first],
    )
    (again,) = hands.claim("w2")
    assert again.id == first
    hands.start(again)
    recovered(hands, again, action="fail")
    assert claimed_ids(hands) == [second]


@pytest.mark.parametrize("how", ["cancelled", "released", "expired at the start", "expired while waiting"])
def test_whoever_leaves_lets_the_next_one_go(hands: Hands, how: str) -> None:
    first, second = send_line(hands, 2)
    schema = sql.Identifier(hands.target.schema)
    past = sql.SQL("update {}.tasks set good_until = now() - interval '1 minute' where id = %s").format(
        schema
    )
    match how:
        case "cancelled":
            hands.run(tasks.cancel(first, channel=hands.target.channel, call=uuid4()))
        case "released":
            (held,) = hands.claim("w1")
            hands.run(leases.release([(held.id, held.claim_id)], channel=hands.target.channel))
            assert claimed_ids(hands) == [first], "given back, it keeps its place"
            return
        case "expired at the start":
            (held,) = hands.claim("w1")
            hands.connection.execute(past, [first])
            assert hands.start(held) == ["expired"]
        case _:
            hands.connection.execute(past, [first])
            assert claimed_ids(hands) == []
            assert hands.run(tasks.expire(channel=hands.target.channel)) == [first]
    assert claimed_ids(hands) == [second]


def test_an_operators_retry_goes_to_the_end(hands: Hands) -> None:
    first, second, third = send_line(hands, 3)
    hands.run(tasks.cancel(first, channel=hands.target.channel, call=uuid4()))
    hands.run(tasks.retry(first, channel=hands.target.channel, call=uuid4()))
    for expected in (second, third, first):
        (held,) = hands.claim("w1")
        assert held.id == expected
        hands.start(held)
        hands.settle(held)


def test_every_end_wakes_whoever_may_take_the_next_one(hands: Hands) -> None:
    send_line(hands, 2)
    (held,) = hands.claim("w1")
    hands.start(held)
    with hands.target.connect("everbeat test") as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(hands.target.channel)))
        hands.settle(held)
        heard = [note.payload for note in listener.notifies(timeout=10, stop_after=2)]
    assert "t:default" in heard


def test_many_claimers_at_once_never_hold_two_of_a_line(hands: Hands) -> None:
    """Sends that commit late appear in front of a line whose later head is being claimed: PostgreSQL refuses the second."""
    rounds, claimers = 30, 4
    schema = sql.Identifier(hands.target.schema)
    over, taken, broken = threading.Event(), list[UUID](), list[object]()

    def serve(name: str) -> None:
        database = Database(hands.target)
        try:
            while not over.is_set():
                for held in database.run(
                    leases.claim(
                        worker_id=name,
                        claim_call=uuid4(),
                        names=["work"],
                        limit=5,
                        queues=None,
                        queue_priorities={},
                    )
                ):
                    lease = (held.id, held.claim_id)
                    database.run(leases.start([lease], channel=hands.target.channel))
                    taken.append(held.id)
                    settlement = leases.Settlement(id=held.id, claim_id=held.claim_id, outcome="COMPLETED")
                    database.run(leases.settle([settlement], channel=hands.target.channel))
        except Exception as problem:  # noqa: BLE001 - told by the assertion below
            broken.append(problem)
        finally:
            database.close()

    with ThreadPoolExecutor(claimers) as pool:
        served = [pool.submit(serve, name) for name in ("w1", "w2", "w3", "w1")]
        sent = []
        try:
            for _ in range(rounds):
                with hands.target.connect("everbeat test") as late:
                    late.autocommit = False
                    slow = tasks.insert_task(
                        tasks.NewTask(
                            id=uuid4(), name="work", queue="default", priority=0, args=b"{}", serial=LINE
                        ),
                        channel=hands.target.channel,
                    )
                    row = late.execute(hands.text(slow.name), slow.parameters).fetchone()
                    assert row is not None
                    sent += [row[0], *send_line(hands, 3)]
                    late.commit()
            waiting = sql.SQL("select count(*) from {}.tasks where state not in ('COMPLETED')").format(schema)
            for _ in range(600):
                row = hands.connection.execute(waiting).fetchone()
                if row == (0,) or broken:
                    break
                over.wait(0.05)
        finally:
            over.set()
            for one in served:
                one.result(timeout=30)
    assert broken == []
    assert sorted(taken) == sorted(sent)
    # No two attempts of the line overlapped, by the database's clock.
    overlaps = sql.SQL(
        "select count(*) from {0}.attempts a join {0}.attempts b on a.task_id <> b.task_id"
        " and a.claimed_at < b.claimed_at and b.claimed_at < a.ended_at"
    ).format(schema)
    assert hands.connection.execute(overlaps).fetchone() == (0,)


def test_postgresql_itself_refuses_a_second_one_of_a_line(hands: Hands) -> None:
    _, second = send_line(hands, 2)
    assert len(hands.claim("w1")) == 1
    force = sql.SQL("update {}.tasks set state = 'CLAIMED', claim_id = gen_random_uuid() where id = %s")
    with pytest.raises(psycopg.errors.UniqueViolation, match="tasks_serial_held"):
        hands.connection.execute(force.format(sql.Identifier(hands.target.schema)), [second])


def test_suspects_are_taken_by_those_who_ask_for_them(hands: Hands) -> None:  # E13
    plain, suspect = hands.send(), hands.send()
    mark = sql.SQL("update {}.tasks set suspect = true where id = %s").format(
        sql.Identifier(hands.target.schema)
    )
    hands.connection.execute(mark, [suspect])
    assert [(one.id, one.suspect) for one in hands.claim("w1", suspects=False)] == [(plain, False)]
    (held,) = hands.claim("w1", suspects=True)
    assert (held.id, held.suspect) == (suspect, True)
    hands.start(held)
    hands.settle(held, outcome="FAILED", error=b'{"code": "X", "message": "raised"}')
    assert hands.row(suspect, "suspect") is False, "its code ended by itself"


@pytest.mark.parametrize("kind", ["task", "queue"])
def test_what_is_paused_is_left_alone(hands: Hands, kind: str) -> None:
    paused, other = hands.send(queue="mail"), hands.send(name="other")
    schema = sql.Identifier(hands.target.schema)
    name = "work" if kind == "task" else "mail"
    pause = sql.SQL("insert into {}.pauses (kind, name, paused_by) values (%s, %s, 'test')").format(schema)
    hands.connection.execute(pause, [kind, name])
    assert [one.id for one in hands.claim("w1", names=("work", "other"))] == [other]
    hands.connection.execute(sql.SQL("delete from {}.pauses").format(schema))
    assert claimed_ids(hands) == [paused]
