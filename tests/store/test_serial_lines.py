"""Serial lines, suspects and pauses as the claim sees them: one task of a line at a time and in order, for any claimer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.domain.task.states import TaskState
from everbeat.store import claims, expiry, leases, lines, tasks
from everbeat.store.claims import Claimed
from everbeat.store.database import Database
from everbeat.store.leases import RecoveryOrder
from tests.store.conftest import StoreHarness

LINE = "queue:ledger"


def send_line(db: StoreHarness, count: int, *, line: str = LINE) -> list[UUID]:
    return [db.send(serial=line) for _ in range(count)]


def claimed_ids(db: StoreHarness, worker: str = "w1") -> list[UUID]:
    return [one.id for one in db.claim(worker)]


def recovered(db: StoreHarness, held: Claimed, *, action: str, retry_in_ms: int | None = None) -> None:
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
    landed = db.run(
        leases.recover([order], noticed_by="session", recovered_by="s2", channel=db.target.channel)
    )
    assert [one.id for one in landed] == [held.id]


def test_a_serial_line_runs_one_task_at_a_time_and_in_order(db: StoreHarness) -> None:  # F8
    first, second, third = send_line(db, 3)
    for expected in (first, second, third):
        (held,) = db.claim("w1")
        assert held.id == expected
        assert db.claim("w2") == []
        assert db.start(held) == ["started"]
        assert db.claim("w2") == []
        assert db.settle(held) == "COMPLETED"
    assert db.claim("w1") == []


def test_serial_lines_do_not_block_each_other_or_plain_tasks(db: StoreHarness) -> None:
    mine, _ = send_line(db, 2, line="key:a")
    yours, _ = send_line(db, 2, line="key:b")
    plain = db.send()
    assert set(claimed_ids(db)) == {mine, yours, plain}
    assert claimed_ids(db, "w2") == []


def test_a_serial_line_keeps_its_order_through_a_retry_and_a_death(db: StoreHarness) -> None:  # F8
    first, second = send_line(db, 2)
    (held,) = db.claim("w1")
    db.start(held)
    recovered(db, held, action="retry", retry_in_ms=60_000)
    assert db.claim("w2") == [], "the head waits for its retry, and the line waits behind it"
    db.connection.execute(
        sql.SQL("update {}.tasks set enqueued_at = statement_timestamp() where id = %s").format(
            sql.Identifier(db.target.schema)
        ),
        [first],
    )
    (again,) = db.claim("w2")
    assert again.id == first
    db.start(again)
    recovered(db, again, action="fail")
    assert claimed_ids(db) == [second]


@pytest.mark.parametrize("how", ["cancelled", "released", "expired at the start", "expired while waiting"])
def test_a_head_that_ends_or_is_released_makes_way_for_the_next_task(db: StoreHarness, how: str) -> None:
    first, second = send_line(db, 2)
    schema = sql.Identifier(db.target.schema)
    past = sql.SQL("update {}.tasks set good_until = now() - interval '1 minute' where id = %s").format(
        schema
    )
    match how:
        case "cancelled":
            db.run(tasks.cancel(first, channel=db.target.channel, call=uuid4()))
        case "released":
            (held,) = db.claim("w1")
            db.run(leases.release([(held.id, held.claim_id)], channel=db.target.channel))
            assert claimed_ids(db) == [first], "a released task keeps its place"
            return
        case "expired at the start":
            (held,) = db.claim("w1")
            db.connection.execute(past, [first])
            assert db.start(held) == ["expired"]
        case _:
            db.connection.execute(past, [first])
            assert claimed_ids(db) == []
            assert [each.id for each in db.run(expiry.expire(channel=db.target.channel))] == [first]
    assert claimed_ids(db) == [second]


def test_an_operator_retry_moves_the_task_to_the_end_of_its_line(db: StoreHarness) -> None:
    first, second, third = send_line(db, 3)
    db.run(tasks.cancel(first, channel=db.target.channel, call=uuid4()))
    db.run(tasks.retry(first, channel=db.target.channel, call=uuid4()))
    for expected in (second, third, first):
        (held,) = db.claim("w1")
        assert held.id == expected
        db.start(held)
        db.settle(held)


def test_the_end_of_a_head_notifies_workers_of_the_next_task(db: StoreHarness) -> None:
    send_line(db, 2)
    (held,) = db.claim("w1")
    db.start(held)
    with db.target.connect("everbeat test") as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(db.target.channel)))
        db.settle(held)
        heard = [note.payload for note in listener.notifies(timeout=10, stop_after=2)]
    assert "t:default" in heard


def test_concurrent_claimers_never_hold_two_tasks_of_a_line(db: StoreHarness) -> None:
    """Late commits insert tasks ahead of the head that is being claimed: PostgreSQL rejects the second claim."""
    rounds, claimers = 30, 4
    schema = sql.Identifier(db.target.schema)
    over, taken, broken = threading.Event(), list[UUID](), list[object]()

    def serve(name: str) -> None:
        database = Database(db.target)
        try:
            while not over.is_set():
                database.run(lines.apply_changes(readers=["work"], queues=None, channel=db.target.channel))
                for held in database.run(
                    claims.claim(
                        worker_id=name,
                        claim_call=uuid4(),
                        names=["work"],
                        limit=5,
                        queues=None,
                        queue_priorities={},
                    )
                ):
                    lease = (held.id, held.claim_id)
                    database.run(leases.start([lease], channel=db.target.channel))
                    taken.append(held.id)
                    settlement = leases.Settlement(id=held.id, claim_id=held.claim_id, outcome="COMPLETED")
                    database.run(leases.settle([settlement], channel=db.target.channel))
        except Exception as problem:  # noqa: BLE001 - the assertion below reports it
            broken.append(problem)
        finally:
            database.close()

    with ThreadPoolExecutor(claimers) as pool:
        served = [pool.submit(serve, name) for name in ("w1", "w2", "w3", "w1")]
        sent = []
        try:
            for _ in range(rounds):
                with db.target.connect("everbeat test") as late:
                    late.autocommit = False
                    slow = tasks.insert_task(
                        tasks.NewTask(
                            id=uuid4(), name="work", queue="default", priority=0, args=b"{}", serial=LINE
                        ),
                        channel=db.target.channel,
                    )
                    row = late.execute(db.text(slow.name), slow.parameters).fetchone()
                    assert row is not None
                    sent += [row[0], *send_line(db, 3)]
                    late.commit()
            waiting = sql.SQL("select count(*) from {}.tasks where state not in ('COMPLETED')").format(schema)
            for _ in range(600):
                row = db.connection.execute(waiting).fetchone()
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
    assert db.connection.execute(overlaps).fetchone() == (0,)


def test_a_unique_index_rejects_a_second_claimed_task_of_a_line(db: StoreHarness) -> None:
    _, second = send_line(db, 2)
    assert len(db.claim("w1")) == 1
    force = sql.SQL("update {}.tasks set state = 'CLAIMED', claim_id = gen_random_uuid() where id = %s")
    with pytest.raises(psycopg.errors.UniqueViolation, match="tasks_serial_held"):
        db.connection.execute(force.format(sql.Identifier(db.target.schema)), [second])


def test_suspects_are_claimed_only_by_workers_that_request_them(db: StoreHarness) -> None:  # E13
    plain, suspect = db.send(), db.send()
    mark = sql.SQL("update {}.tasks set suspect = true where id = %s").format(
        sql.Identifier(db.target.schema)
    )
    db.connection.execute(mark, [suspect])
    assert [(one.id, one.suspect) for one in db.claim("w1", suspects=False)] == [(plain, False)]
    (held,) = db.claim("w1", suspects=True)
    assert (held.id, held.suspect) == (suspect, True)
    db.start(held)
    db.settle(held, outcome="FAILED", error=b'{"code": "X", "message": "raised"}')
    assert db.row(suspect, "suspect") is False, "its code ended by itself"


@pytest.mark.parametrize("kind", ["task", "queue"])
def test_a_claim_skips_paused_tasks_and_queues(db: StoreHarness, kind: str) -> None:
    paused, other = db.send(queue="mail"), db.send(name="other")
    schema = sql.Identifier(db.target.schema)
    name = "work" if kind == "task" else "mail"
    pause = sql.SQL("insert into {}.pauses (kind, name, paused_by) values (%s, %s, 'test')").format(schema)
    db.connection.execute(pause, [kind, name])
    assert [one.id for one in db.claim("w1", names=("work", "other"))] == [other]
    db.connection.execute(sql.SQL("delete from {}.pauses").format(schema))
    assert claimed_ids(db) == [paused]
