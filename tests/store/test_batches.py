"""Batches and gathers in the database: concurrent ends, seals and sends, zombies, and tasks that moved to the history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from everbeat.domain.batch import BatchCallback, BatchInfo
from everbeat.domain.task.context_backend import NewChild, SendChildren
from everbeat.domain.task.gathering import NewGather
from everbeat.store import batches, leases, steps, tasks
from everbeat.store.claims import Claimed
from everbeat.store.leases import Settlement
from everbeat.store.statement import Statement
from tests.maintenance.moving import move
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario
from tests.store.test_schedule_races import until_one_waits_for
from tests.store.test_steps import again

__all__ = ["scenario"]

ADVANCE = "schema/0019_around_the_work/58_advance_batches"
EVENT = "schema/0019_around_the_work/56_note_batch_event"


def new_task(**more: Any) -> tasks.NewTask:
    return tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}", **more)


def open_batch(db: StoreHarness, *, with_callbacks: bool = True) -> UUID:
    batch_id = uuid4()
    calls = [
        BatchCallback(id=uuid4(), task="callback", queue="default", priority=0, args="{}") for _ in range(2)
    ]
    on_end, on_success = calls if with_callbacks else (None, None)
    db.run(batches.open_batch(batch_id, name="import", on_end=on_end, on_success=on_success))
    return batch_id


def fill(db: StoreHarness, batch_id: UUID, count: int = 1) -> batches.SentToBatch:
    return db.run(
        batches.send_to_batch(batch_id, [new_task() for _ in range(count)], channel=db.target.channel)
    )


def advance(db: StoreHarness) -> batches.AdvancedBatches:
    return db.run(batches.advance_batches(channel=db.target.channel))


def status(db: StoreHarness, batch_id: UUID) -> BatchInfo:
    found = db.run(batches.read_batch(batch_id))
    assert found is not None
    return found


def callbacks(db: StoreHarness) -> int:
    found = db.connection.execute(
        db.plain("select count(*) from {schema}.tasks where name = 'callback'")
    ).fetchone()
    assert found is not None
    return int(found[0])


def started(db: StoreHarness, count: int) -> list[Claimed]:
    claimed = db.claim(limit=count)
    assert db.start(*claimed) == ["started"] * count
    return claimed


def completion(db: StoreHarness, held: Claimed) -> Statement[Any]:
    settlement = Settlement(id=held.id, claim_id=held.claim_id, outcome="COMPLETED", result=b"1")
    return leases.complete([settlement], channel=db.target.channel)


@contextmanager
def uncommitted(db: StoreHarness, statement: Statement[Any]) -> Iterator[psycopg.Connection[Any]]:
    """Run a statement in another session, and leave its transaction open during the block."""
    with psycopg.connect(db.target.url) as connection:
        connection.execute(db.text(statement.name), statement.parameters)
        yield connection
        connection.commit()


def portion(parent: UUID, count: int = 2, *, first: int = 0, until: int | None = None) -> SendChildren:
    children = [
        NewChild(name="work", queue="default", priority=0, args="{}", digest=str(n)) for n in range(count)
    ]
    gather = NewGather.of(children)
    batch_id = gather.id_in(parent, "gather")
    last = count if until is None else until
    return SendChildren(
        "gather",
        batch_id,
        gather.ids(batch_id)[first:last],
        tuple(children[first:last]),
        gather.digest,
        is_last=last == count,
    )


def send_children(db: StoreHarness, held: Claimed, sent: SendChildren) -> bool | None:
    return db.run(steps.send_children(held.id, held.claim_id, sent, channel=db.target.channel))


def join(held: Claimed) -> Statement[bool | None]:
    return steps.join_children(held.id, held.claim_id, step="gather", batch_id=portion(held.id).batch_id)


def gathering(db: StoreHarness, count: int = 2) -> tuple[Claimed, list[Claimed]]:
    """Return a suspended task that waits for its running children."""
    parent = db.running()
    assert send_children(db, parent, portion(parent.id, count)) is False
    assert db.run(join(parent)) is False
    db.settle(parent, "SUSPENDED")
    return parent, started(db, count)


def test_two_last_tasks_that_end_at_the_same_time_end_their_batch(db: StoreHarness) -> None:
    batch_id = open_batch(db)
    fill(db, batch_id, 2)
    db.run(batches.seal_batch(batch_id))
    first, second = started(db, 2)
    with uncommitted(db, completion(db, first)):
        db.complete(second)
        assert advance(db).ended == 0
    assert advance(db) == batches.AdvancedBatches(1, 1, 2)
    assert (status(db, batch_id).ended, callbacks(db)) == (True, 2)


def test_two_last_children_that_end_at_the_same_time_wake_their_parent(db: StoreHarness) -> None:
    parent, (first, second) = gathering(db)
    assert db.claim() == [], "the parent waits"
    with uncommitted(db, completion(db, first)):
        db.complete(second)
        assert advance(db).enqueued == 0
    assert advance(db).enqueued == 1
    resumed = again(db)
    assert resumed.id == parent.id
    assert db.run(join(resumed)) is True
    assert [one.state for one in db.run(steps.list_children(portion(parent.id).ids))] == ["COMPLETED"] * 2


def test_a_parent_is_woken_once_for_many_children(db: StoreHarness) -> None:
    parent, children = gathering(db, 5)
    for child in children[:-1]:
        db.complete(child)
        assert advance(db).enqueued == 0
    db.complete(children[-1])
    assert advance(db).enqueued == 1
    assert advance(db).enqueued == 0
    assert again(db).id == parent.id
    assert db.row(parent.id, "attempt") == 2


def test_a_task_that_begins_to_wait_while_its_gather_ends_sees_the_end(db: StoreHarness) -> None:
    parent = db.running()
    send_children(db, parent, portion(parent.id, 1))
    (child,) = started(db, 1)
    db.complete(child)
    with ThreadPoolExecutor(1) as pool:
        with uncommitted(db, batches.advance_batches(channel=db.target.channel)) as ending:
            waiting = pool.submit(
                db.run,
                steps.join_children(
                    parent.id, parent.claim_id, step="gather", batch_id=portion(parent.id, 1).batch_id
                ),
            )
            until_one_waits_for(db, ending.info.backend_pid)
        assert waiting.result(timeout=60) is True
    assert db.row(parent.id, "waits_for") is None


def test_a_gather_that_ends_before_its_parent_is_suspended_makes_it_due_at_once(db: StoreHarness) -> None:
    parent = db.running()
    send_children(db, parent, portion(parent.id, 1))
    (child,) = started(db, 1)
    assert (
        db.run(
            steps.join_children(
                parent.id, parent.claim_id, step="gather", batch_id=portion(parent.id, 1).batch_id
            )
        )
        is False
    )
    db.complete(child)
    assert advance(db).enqueued == 1
    db.settle(parent, "SUSPENDED")
    assert again(db).id == parent.id


def test_a_repeated_portion_sends_no_child_twice(db: StoreHarness) -> None:
    parent = db.running()
    for first, until in ((0, 3), (0, 3), (3, 5), (3, 5), (0, 3)):
        assert send_children(db, parent, portion(parent.id, 5, first=first, until=until)) is False
    assert len(db.table("tasks", "id")) == 6
    assert db.table("steps", "kind, name, state") == [("child", "gather", "DONE")]
    db.settle(parent, "FAILED", error=b'{"code": "X"}')
    db.complete(*started(db, 5))
    assert advance(db).ended == 1


def test_a_gather_does_not_end_between_two_portions(db: StoreHarness) -> None:
    parent = db.running()
    send_children(db, parent, portion(parent.id, 2, until=1))
    db.complete(*started(db, 1))
    assert advance(db).ended == 0
    send_children(db, parent, portion(parent.id, 2, first=1))
    assert advance(db).ended == 0
    db.complete(*started(db, 1))
    assert advance(db).ended == 1


def test_a_zombie_and_a_cancelled_task_gather_nothing(db: StoreHarness) -> None:  # I2
    old = db.running()
    db.settle(old, "RELEASED")
    new = again(db)
    assert send_children(db, old, portion(old.id)) is None
    assert db.run(join(old)) is None
    db.cancel(new.id)
    assert send_children(db, new, portion(new.id)) is True
    assert len(db.table("tasks", "id")) == 1
    assert db.table("batches") == []


def test_a_new_task_of_a_node_takes_over_the_wait_of_the_earlier_task(db: StoreHarness) -> None:
    """The retry of a workflow copies the records of a node's task to a new task."""
    parent, children = gathering(db)
    db.cancel(parent.id)
    heir = db.running()
    batch_id = portion(parent.id).batch_id
    assert db.run(steps.join_children(heir.id, heir.claim_id, step="gather", batch_id=batch_id)) is False
    db.settle(heir, "SUSPENDED")
    db.complete(*children)
    assert advance(db).enqueued == 1
    assert again(db).id == heir.id


def test_a_seal_at_the_same_time_as_the_last_end_loses_neither(db: StoreHarness) -> None:
    for is_sealed_first in (True, False):
        batch_id = open_batch(db)
        fill(db, batch_id)
        (last,) = started(db, 1)
        both = [batches.seal_batch(batch_id), completion(db, last)]
        early, late = both if is_sealed_first else reversed(both)
        with uncommitted(db, early):
            db.run(late)
            assert advance(db).ended == 0
        assert advance(db).ended == 1
        assert status(db, batch_id).completed == 1


def test_a_seal_ends_a_batch_whose_tasks_have_all_ended(db: StoreHarness) -> None:
    batch_id = open_batch(db)
    fill(db, batch_id)
    db.complete(*started(db, 1))
    assert advance(db).ended == 0
    db.run(batches.seal_batch(batch_id))
    assert advance(db).ended == 1


def test_a_seal_waits_for_a_send_in_flight_so_the_batch_does_not_end_before_it(db: StoreHarness) -> None:
    batch_id = open_batch(db)
    with ThreadPoolExecutor(1) as pool:
        with uncommitted(
            db, batches.send_to_batch(batch_id, [new_task()], channel=db.target.channel)
        ) as sending:
            sealing = pool.submit(db.run, batches.seal_batch(batch_id))
            until_one_waits_for(db, sending.info.backend_pid)
            assert advance(db).ended == 0
        assert sealing.result(timeout=60)
    assert advance(db).ended == 0
    db.complete(*started(db, 1))
    assert advance(db).ended == 1


def test_a_sealed_batch_refuses_tasks_and_a_repeated_send_still_finds_its_own(db: StoreHarness) -> None:
    batch_id, mine = open_batch(db), [new_task()]
    send = batches.send_to_batch(batch_id, mine, channel=db.target.channel)
    assert db.run(send) == batches.SentToBatch([mine[0].id], "open")
    db.run(batches.seal_batch(batch_id))
    assert db.run(send) == batches.SentToBatch([mine[0].id], "sealed")
    assert fill(db, batch_id) == batches.SentToBatch([None], "sealed")
    assert fill(db, uuid4()) == batches.SentToBatch([None], None)
    assert status(db, batch_id).total == 1


def test_a_running_task_adds_tasks_to_its_sealed_batch_and_the_batch_waits_for_them(db: StoreHarness) -> None:
    batch_id = open_batch(db)
    fill(db, batch_id)
    db.run(batches.seal_batch(batch_id))
    (own,) = started(db, 1)
    child = NewChild(name="work", queue="default", priority=0, args="{}")
    send = steps.send_child(
        own.id, own.claim_id, step="work", child=child, channel=db.target.channel, in_batch=True
    )
    assert db.run(send) == db.run(send)
    with uncommitted(db, completion(db, own)):
        assert advance(db).ended == 0
    assert advance(db).ended == 0
    assert status(db, batch_id).total == 2
    db.complete(*started(db, 1))
    assert advance(db).ended == 1


def test_a_task_without_a_batch_adds_nothing(db: StoreHarness) -> None:
    own = db.running()
    child = NewChild(name="work", queue="default", priority=0, args="{}")
    found = db.run(
        steps.send_child(
            own.id, own.claim_id, step="work", child=child, channel=db.target.channel, in_batch=True
        )
    )
    assert found == steps.ChildVerdict("no_batch", None)
    assert len(db.table("tasks", "id")) == 1


def test_the_callbacks_are_sent_once_although_events_follow_the_end(db: StoreHarness) -> None:
    batch_id = open_batch(db)
    fill(db, batch_id)
    db.run(batches.seal_batch(batch_id))
    (last,) = started(db, 1)
    db.settle(last, "FAILED", error=b'{"code": "X"}')
    assert advance(db) == batches.AdvancedBatches(1, 1, 1)
    db.connection.execute(db.plain("delete from {schema}.tasks where name = 'callback'"))
    db.run(tasks.retry(last.id, channel=db.target.channel, call=uuid4()))
    assert (status(db, batch_id).failed, status(db, batch_id).waiting) == (0, 1)
    db.complete(*started(db, 1))
    assert advance(db) == batches.AdvancedBatches(1, 0, 0)
    assert (status(db, batch_id).completed, callbacks(db)) == (1, 0)


def test_code_of_an_earlier_version_can_end_the_tasks_of_a_batch(db: StoreHarness) -> None:
    """Statements of earlier versions know neither the column nor the events."""
    batch_id = open_batch(db)
    fill(db, batch_id, 2)
    db.run(batches.seal_batch(batch_id))
    first, second = started(db, 2)
    db.complete(first)
    db.connection.execute(
        db.plain(
            "with gone as (update {schema}.tasks set state = 'COMPLETED', completed_at = now(), claim_id = null, claim_call = null where id = %s"
            " returning id, attempt, fence) insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at,"
            " outcome, will_retry) select id, attempt, %s, fence, 'w1', now(), now(), 'COMPLETED', false from gone"
        ),
        [second.id, second.claim_id],
    )
    assert advance(db).ended == 1


def test_tasks_of_a_live_batch_can_move_to_the_history_and_still_count(db: StoreHarness) -> None:
    batch_id = open_batch(db)
    fill(db, batch_id, 2)
    first, second = started(db, 2)
    db.settle(first, "FAILED", error=b'{"code": "X"}')
    db.connection.execute(
        db.plain("update {schema}.tasks set failed_at = now() - interval '2 hours' where id = %s"), [first.id]
    )
    assert move(db) == 1
    assert (status(db, batch_id).total, status(db, batch_id).failed) == (2, 1)
    db.run(batches.seal_batch(batch_id))
    db.complete(second)
    assert advance(db).ended == 1
    assert callbacks(db) == 1


def test_a_cancel_ends_the_batch_and_its_running_tasks(db: StoreHarness) -> None:
    batch_id = open_batch(db)
    fill(db, batch_id, 3)
    (running,) = started(db, 1)
    assert db.run(batches.mark_cancelled(batch_id)) is False
    assert db.run(batches.cancel_tasks(batch_id, channel=db.target.channel)) == 3
    assert db.run(batches.cancel_tasks(batch_id, channel=db.target.channel)) == 0
    assert advance(db).ended == 0
    db.settle(running, "CANCELLED")
    assert advance(db).ended == 1
    assert (status(db, batch_id).cancelled, callbacks(db)) == (3, 1)
    assert db.run(batches.mark_cancelled(batch_id)) is True


def test_a_batch_whose_tasks_another_program_deleted_is_repaired(db: StoreHarness) -> None:
    batch_id = open_batch(db)
    fill(db, batch_id, 2)
    db.run(batches.seal_batch(batch_id))
    (first,) = started(db, 1)
    db.complete(first)
    db.connection.execute(db.plain("delete from {schema}.tasks where state = 'PENDING'"))
    assert advance(db).ended == 0
    db.connection.execute(db.plain("update {schema}.batches set sealed_at = now() - interval '1 minute'"))
    repair = batches.repair_batches(limit=10)
    with uncommitted(db, repair):
        db.run(repair)  # neither of the two supervisors sees what the other one has done
    assert advance(db).ended == 1
    assert db.run(repair) == 0
    found = status(db, batch_id)
    assert (found.total, found.completed, callbacks(db)) == (1, 1, 2)


def test_a_callback_that_cannot_be_stored_does_not_block_other_batches(db: StoreHarness) -> None:
    broken, healthy = open_batch(db), open_batch(db)
    db.connection.execute(
        db.plain('update {schema}.batches set on_end = \'{{"id": "x"}}\' where id = %s'), [broken]
    )
    db.run(batches.seal_batch(broken))
    db.run(batches.seal_batch(healthy))
    assert advance(db).ended == 2
    assert callbacks(db) == 2
    found = db.connection.execute(
        db.plain("select problem from {schema}.batches where id = %s"), [broken]
    ).fetchone()
    assert found is not None
    assert "uuid" in found[0]
    db.connection.execute(db.plain("delete from {schema}.batches where id = %s"), [broken])


def test_events_of_a_deleted_batch_are_deleted(db: StoreHarness) -> None:
    """Retention has deleted the batch, and then an operator retries a task of it. Events that stay would keep the workers busy for ever."""
    deleted, kept = open_batch(db, with_callbacks=False), open_batch(db, with_callbacks=False)
    fill(db, deleted)
    (held,) = started(db, 1)
    db.settle(held, "FAILED", error=b'{"code": "BROKEN"}')
    db.run(batches.seal_batch(deleted))
    assert advance(db).ended == 1
    db.connection.execute(db.plain("delete from {schema}.batches where id = %s"), [deleted])
    db.run(tasks.retry(held.id, call=uuid4(), channel=db.target.channel))
    fill(db, kept)
    assert [advance(db).advanced for _ in range(2)] == [1, 0]
    assert db.table("batch_events") == []
    assert status(db, kept).total == 1


MUTANTS = [
    Mutant(
        "an event only of the task that finds no other one live", EVENT,
        "        insert into {schema}.batch_events (batch_id, state, number) values (new.batch_id, new.state, 1);",
        "        if not exists (select from {schema}.tasks t where t.batch_id = new.batch_id and t.id <> new.id and t.state = 'RUNNING') then"
        " insert into {schema}.batch_events (batch_id, state, number) values (new.batch_id, new.state, 1); end if;",
        test_two_last_tasks_that_end_at_the_same_time_end_their_batch,
    ),
    Mutant(
        "the same for a gather", EVENT,
        "        insert into {schema}.batch_events (batch_id, state, number) values (new.batch_id, new.state, 1);",
        "        if not exists (select from {schema}.tasks t where t.batch_id = new.batch_id and t.id <> new.id and t.state = 'RUNNING') then"
        " insert into {schema}.batch_events (batch_id, state, number) values (new.batch_id, new.state, 1); end if;",
        test_two_last_children_that_end_at_the_same_time_wake_their_parent,
    ),
    Mutant(
        "a seal without an event", "batch/seal_batch", "select s.id, 0 from sealed s", "select s.id, 0 from sealed s where false",
        test_a_seal_ends_a_batch_whose_tasks_have_all_ended,
    ),
    Mutant(
        "a send that does not lock the batch", "task/insert_tasks", "where b.id = %(batch_id)s for share", "where b.id = %(batch_id)s",
        test_a_seal_waits_for_a_send_in_flight_so_the_batch_does_not_end_before_it,
    ),
    Mutant(
        "a send to a sealed batch", "task/insert_tasks", "where exists (select from batch where is_open)", "where exists (select from batch)",
        test_a_sealed_batch_refuses_tasks_and_a_repeated_send_still_finds_its_own,
    ),
    Mutant(
        "a wait that does not lock the gather", "step/join_children", "where b.id = %(batch_id)s for no key update", "where b.id = %(batch_id)s",
        test_a_task_that_begins_to_wait_while_its_gather_ends_sees_the_end,
    ),
    Mutant(
        "an end that ends again", ADVANCE, "and b.sealed_at is not null and b.ended_at is null", "and b.sealed_at is not null",
        test_the_callbacks_are_sent_once_although_events_follow_the_end,
    ),
    Mutant(
        "an end of an open batch", ADVANCE, "b.id = any(v_batches) and b.sealed_at is not null", "b.id = any(v_batches)",
        test_a_gather_does_not_end_between_two_portions,
    ),
    Mutant(
        "a gather that is sealed by its first portion", "step/send_children", "case when %(is_last)s then statement_timestamp() end",
        "statement_timestamp()", test_a_gather_does_not_end_between_two_portions,
    ),
    Mutant(
        "unfenced children", "step/send_children", "t.claim_id = %(claim_id)s", "%(claim_id)s::uuid is not null",
        test_a_zombie_and_a_cancelled_task_gather_nothing,
    ),
    Mutant(
        "children of a cancelled task", "step/send_children", "t.cancel_requested_at is not null as is_cancelled", "false as is_cancelled",
        test_a_zombie_and_a_cancelled_task_gather_nothing,
    ),
    Mutant(
        "a wait that stays with the earlier task", "step/join_children", "h.waits and b.waiter_id is distinct from h.id", "false",
        test_a_new_task_of_a_node_takes_over_the_wait_of_the_earlier_task,
    ),
    Mutant(
        "a child whose event is missing", "step/send_child", "select h.batch_id, 1 from held h cross join sent",
        "select h.batch_id, 1 from held h where false",
        test_a_running_task_adds_tasks_to_its_sealed_batch_and_the_batch_waits_for_them,
    ),
    Mutant(
        "an end that counts no live task", ADVANCE,
        "          and b.completed + b.failed + b.cancelled + b.expired >= b.total\n"
        "          and not exists (select from {schema}.batch_events e where e.batch_id = b.id)\n"
        "          and not exists (select from {schema}.tasks t where t.batch_id = b.id and t.state in ('PENDING', 'CLAIMED', 'RUNNING'))\n",
        "", test_a_seal_waits_for_a_send_in_flight_so_the_batch_does_not_end_before_it,
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_the_guards_of_batches_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
