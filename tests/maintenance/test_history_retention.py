"""Test that retention drops partitions of `history`, and keeps what can still be retried."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from msgspec.structs import replace

from everbeat.maintenance.cleanup import Pruned
from everbeat.maintenance.counting import count_old
from everbeat.maintenance.history import PASSES_PER_SCAN, HistoryKeeper, TasksMoved
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import event_text
from everbeat.store.session import Session
from tests.maintenance.moving import ids_in, move
from tests.maintenance.pruning import a_pruner, ended
from tests.recovering.conftest import ManualObserver
from tests.store.conftest import StoreHarness

DAYS = 24


async def test_a_partition_is_dropped_once_the_retention_of_its_last_task_is_over(
    observer: ManualObserver, db: StoreHarness
) -> None:  # H1
    old, young = ended(db, hours=7 * DAYS), ended(db, hours=5 * DAYS)
    environment = replace(observer.environment(), clock=SystemClock())
    keeper = HistoryKeeper(environment, open_spare=lambda: Session(db.target, "everbeat test"))
    await keeper.tick()
    assert ids_in(db, "history") == {old, young}
    (moved,) = observer.told(TasksMoved)
    assert event_text(moved).startswith("tasks_moved tasks=2 ")
    await a_pruner(observer, terminal_record_retention_hours=9 * DAYS).tick()
    assert ids_in(db, "history") == {old, young}
    db.connection.execute(db.plain("delete from {schema}.turns"))
    counted = await count_old(
        observer.environment().statements,
        observer.environment(terminal_record_retention_hours=6 * DAYS - 1).config,
    )
    assert (counted.history_parts, counted.tasks, counted.attempts) == (1, 1, 2)
    await a_pruner(observer, terminal_record_retention_hours=6 * DAYS - 1).tick()
    assert ids_in(db, "history") == {young}
    assert len(db.table("history_parts", "name")) == 1
    last = observer.told(Pruned)[-1]
    assert isinstance(last, Pruned)
    assert (last.history_parts, last.tasks, last.attempts) == (1, 1, 2)


async def test_a_partition_with_tasks_of_an_existing_workflow_stays_and_the_others_are_deleted(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """The workflow ended later than its tasks, and can be retried until its own retention is over."""
    flow, needed, other = uuid4(), ended(db, hours=7 * DAYS), ended(db, hours=7 * DAYS)
    db.connection.execute(
        db.plain(
            "insert into {schema}.workflows (id, name, state, on_error, node_count, ended_at)"
            " values (%s, 'w', 'FAILED', 'fail', 1, now() - interval '2 days')"
        ),
        [flow],
    )
    db.connection.execute(
        db.plain("update {schema}.tasks set workflow_id = %s, node = 0 where id = %s"), [flow, needed]
    )
    assert await_moved(db) == 2
    assert ids_in(db, "history") == {needed, other}
    await a_pruner(observer, terminal_record_retention_hours=5 * DAYS).tick()
    assert ids_in(db, "history") == {needed}
    last = observer.told(Pruned)[-1]
    assert isinstance(last, Pruned)
    assert (last.tasks, last.attempts, last.recoveries, last.steps, last.signals) == (1, 2, 1, 1, 1)
    db.connection.execute(db.plain("delete from {schema}.turns"))
    db.connection.execute(
        db.plain("update {schema}.workflows set ended_at = now() - interval '6 days' where id = %s"), [flow]
    )
    await a_pruner(observer, terminal_record_retention_hours=5 * DAYS).tick()
    assert ids_in(db, "history") == set()
    assert db.table("history_parts", "name") == []


async def test_a_locked_partition_is_dropped_by_a_later_pass(
    observer: ManualObserver, db: StoreHarness
) -> None:
    ended(db, hours=7 * DAYS)
    assert await_moved(db) == 1
    with db.target.connect("everbeat test reader") as reader, reader.transaction():
        reader.execute(
            db.plain("select count(*) from {schema}.history")
        )  # an open transaction of another program
        await a_pruner(observer, terminal_record_retention_hours=5 * DAYS).tick()
        assert len(ids_in(db, "history")) == 1
    db.connection.execute(db.plain("delete from {schema}.turns"))
    await a_pruner(observer, terminal_record_retention_hours=5 * DAYS).tick()
    assert ids_in(db, "history") == set()


async def test_a_task_that_could_not_move_is_read_again_in_each_sixth_pass(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """The child of a live task stays. When its parent has ended, it moves with the next pass that scans all tasks."""
    parent, child = db.running(), ended(db, hours=2)
    db.connection.execute(
        db.plain("update {schema}.tasks set parent_id = %s where id = %s"), [parent.id, child]
    )
    environment = replace(observer.environment(), clock=SystemClock())
    keeper = HistoryKeeper(environment, open_spare=lambda: Session(db.target, "everbeat test"), age_s=0)
    await keeper.tick()
    assert ids_in(db, "history") == set()
    assert db.complete(parent)
    moved = {parent.id}  # its id is random, so it does not show when the task was sent
    for _ in range(PASSES_PER_SCAN - 1):
        moved.add(ended(db, hours=1e-9, sent_hours=1e-9))
        await keeper.tick()
        assert ids_in(db, "history") == moved, "these passes read only later tasks"
    await keeper.tick()
    assert ids_in(db, "history") == {*moved, child}


async def test_an_interrupted_scan_is_repeated(observer: ManualObserver, db: StoreHarness) -> None:
    """If the turn is lost after the first step, the next pass must not begin after tasks that were not read."""
    old = {ended(db, hours=hours) for hours in (5, 4, 3)}
    environment = replace(observer.environment(), clock=SystemClock())
    keeper = HistoryKeeper(environment, open_spare=lambda: Session(db.target, "everbeat test"), step_rows=1)
    rests = 0

    async def lose_the_turn(seconds: float) -> bool:
        nonlocal rests
        rests += 1
        return rests < 3

    session = Session(db.target, "everbeat test")
    await keeper._run_pass(session, lose_the_turn)
    await session.drop()
    assert 0 < len(ids_in(db, "history")) < 3
    await keeper.tick()
    assert ids_in(db, "history") == old


async def test_with_a_short_retention_nothing_moves(observer: ManualObserver, db: StoreHarness) -> None:
    ended(db, hours=2)
    environment = observer.environment(terminal_record_retention_hours=47)
    await HistoryKeeper(environment, open_spare=lambda: Session(db.target, "everbeat test")).tick()
    assert ids_in(db, "history") == set()


def await_moved(db: StoreHarness) -> int:
    """Run a pass of the caretaker in another thread, because this one runs an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(move, db).result()
