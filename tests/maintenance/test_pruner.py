"""Test retention: old rows are deleted table by table; younger, live and unfinished rows stay in every case."""

from __future__ import annotations

import asyncio
from random import Random
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseError
from everbeat.maintenance.cleanup import Pruned, PrunePass, prune
from everbeat.maintenance.counting import count_old
from everbeat.runtime.clock import Backoff, SystemClock
from everbeat.runtime.events import EventBus, ServiceFailed, event_text
from everbeat.runtime.task_scope import ServiceRunner
from everbeat.store import retention, tasks
from everbeat.store.session import Session
from tests.maintenance.pruning import (
    Watched,
    a_pruner,
    backdate,
    beat_and_snapshot,
    ended,
    everything,
    holder,
    ids,
)
from tests.recovering.conftest import ManualObserver, StoreHarness
from tests.supervisor.supervising import supervision

KEEP = {
    "heartbeat_retention_hours": None,
    "worker_state_retention_hours": None,
    "terminal_record_retention_hours": None,
}
ENDED_TASKS = KEEP | {"terminal_record_retention_hours": 720}
HISTORY = ("tasks", "attempts", "recoveries", "steps", "signals")
HOLDERS = ("worker_states", "workers", "supervisors")


async def test_ended_tasks_are_pruned_after_the_retention_time_of_their_state(
    observer: ManualObserver, db: StoreHarness
) -> None:  # H1
    states = ("COMPLETED", "FAILED", "CANCELLED", "EXPIRED")
    old = {ended(db, hours=720.1, state=state) for state in states}
    young = {ended(db, hours=719.9, state=state, sent_hours=5_000) for state in states}
    assert ids(db, "attempts") | ids(db, "recoveries") <= old | young
    await a_pruner(observer).tick()
    assert ids(db, "tasks") == young
    assert ids(db, "attempts") == ids(db, "recoveries") != set()
    assert ids(db, "attempts") < young
    (event,) = observer.told(Pruned)
    assert isinstance(event, Pruned)
    assert (event.tasks, event.attempts, event.recoveries) == (4, 4, 2)
    assert event_text(event).startswith("pruned tasks=4 attempts=4 recoveries=2 beats=0")


async def test_live_and_unfinished_tasks_are_never_pruned(
    observer: ManualObserver, db: StoreHarness
) -> None:  # H1
    db.send()  # waits
    (claimed,) = db.claim("w2", limit=1)
    running = ended(db, hours=5_000, state="RUNNING")
    retried = ended(db, hours=5_000, state="FAILED")
    db.run(tasks.retry(retried, channel=db.target.channel, call=uuid4()))
    backdate(db, "tasks", "sent_at", 9_000)
    backdate(db, "tasks", "enqueued_at", 9_000)
    before = everything(db)
    await a_pruner(observer).tick()
    after = everything(db)
    assert [row[0] for row in after.pop("turns")] != []
    assert after == {name: rows for name, rows in before.items() if name != "turns"}
    assert db.row(claimed.id, "state") == "CLAIMED"
    assert db.row(running, "state") == "RUNNING"
    assert ids(db, "attempts") == ids(db, "recoveries") == {running, retried}


@pytest.mark.parametrize(
    ("settings", "goes"),
    [
        ({"heartbeat_retention_hours": 24}, ("beats",)),
        ({"worker_state_retention_hours": 168}, HOLDERS),
        ({"terminal_record_retention_hours": 720}, HISTORY),
        ({}, ()),
    ],
)
async def test_each_retention_setting_prunes_only_its_own_tables(
    observer: ManualObserver, db: StoreHarness, settings: dict[str, int], goes: tuple[str, ...]
) -> None:  # H1, A6
    for hours in (24.1, 23.9, 168.1, 167.9, 720.1, 719.9):
        beat_and_snapshot(db, hours=hours)
        holder(db, f"s-{hours}", hours=hours)
        ended(db, hours=hours)
    counts = {name: len(ids(db, name)) for name in ("beats", *HOLDERS, *HISTORY)}
    await a_pruner(observer, **(KEEP | settings)).tick()
    gone = {name: number - len(ids(db, name)) for name, number in counts.items()}
    expected = {"beats": 5} | dict.fromkeys(HOLDERS, 3) | dict.fromkeys(HISTORY, 1)
    assert gone == {name: expected[name] if name in goes else 0 for name in counts}
    assert bool(db.table("turns")) == bool(settings), "a pruner without work must write nothing"


async def test_ended_workers_and_supervisors_are_kept_while_rows_refer_to_them(
    observer: ManualObserver, db: StoreHarness
) -> None:
    holder(db, "holds", hours=None)
    task = db.running("holds-w")
    holder(db, "holds", hours=200)
    holder(db, "recent", hours=200, worker_hours=1)
    holder(db, "lives", hours=None, worker_hours=200)
    holder(db, "gone", hours=200)
    pruner = a_pruner(observer)
    await pruner.tick()
    assert ids(db, "supervisors") == {"me", "s1", "holds", "recent", "lives"}
    assert ids(db, "workers") == {"w1", "w2", "holds-w", "recent-w"}
    (lease,) = db.leases("holds")
    assert db.recover(lease, "retry")
    await pruner.tick()
    assert ids(db, "supervisors") == {"me", "s1", "recent", "lives"}
    assert db.row(task.id, "state") == "PENDING"


async def test_the_pruner_skips_a_locked_row_and_deletes_it_in_the_next_pass(
    observer: ManualObserver, db: StoreHarness
) -> None:
    held, other = ended(db, hours=800), ended(db, hours=800)
    locking = sql.SQL("select from {}.tasks where id = %s for update").format(
        sql.Identifier(db.target.schema)
    )
    pruner = a_pruner(observer)
    with db.connection.transaction():
        db.connection.execute(locking, [held])
        await asyncio.wait_for(pruner.tick(), timeout=10)
        assert ids(db, "tasks") == ids(db, "attempts") == {held}
    assert other not in ids(db, "tasks")
    await pruner.tick()
    assert ids(db, "tasks") == ids(db, "attempts") == set()


async def test_attempts_and_recoveries_without_a_task_are_pruned_by_their_own_age(
    observer: ManualObserver, db: StoreHarness
) -> None:
    old, young = ended(db, hours=800), ended(db, hours=600, sent_hours=5_000)
    db.connection.execute(sql.SQL("delete from {}.tasks").format(sql.Identifier(db.target.schema)))
    await a_pruner(observer, step_rows=1).tick()
    assert ids(db, "attempts") == ids(db, "recoveries") == {young}
    assert old != young


@pytest.mark.parametrize("sent_hours", [-24 * 365, 0])
async def test_tasks_with_ids_that_are_not_time_ordered_are_pruned(
    observer: ManualObserver, db: StoreHarness, sent_hours: int
) -> None:
    task = ended(db, hours=800, sent_hours=sent_hours) if sent_hours else db.send()
    if not sent_hours:
        db.cancel(task)  # its id is a UUIDv4, as an INSERT by hand can give it
        backdate(db, "tasks", "cancelled_at", 800)
    await a_pruner(observer, step_rows=2).tick()
    assert ids(db, "tasks") == ids(db, "attempts") == set()


async def test_the_longest_retention_prunes_nothing(observer: ManualObserver, db: StoreHarness) -> None:
    task = ended(db, hours=800)
    await a_pruner(observer, terminal_record_retention_hours=1_000_000).tick()
    assert ids(db, "tasks") == {task}
    assert db.run(retention.task_id_bounds(hours=1_000_000)).old == UUID(int=0), "no row must be in the range"


async def test_only_one_supervisor_prunes_in_each_interval(
    observer: ManualObserver, db: StoreHarness
) -> None:
    await a_pruner(observer, retention_interval_ms=60_000).tick()
    ended(db, hours=800)
    other = ManualObserver(db, observer.session, supervisor_id="other")
    second = a_pruner(other, retention_interval_ms=60_000)
    assert second.interval_s == 60.0
    await second.tick()
    assert len(ids(db, "tasks")) == 1
    backdate(db, "turns", "taken_until", 0)
    await second.tick()
    assert ids(db, "tasks") == set()


async def test_a_pruner_pass_ends_when_another_supervisor_has_the_turn(
    observer: ManualObserver, db: StoreHarness
) -> None:
    for _ in range(3):
        ended(db, hours=800)
    watched = Watched(Session(db.target, "everbeat test pruner"))
    pruner = a_pruner(observer, step_rows=1, spare=watched, **ENDED_TASKS)
    ticking = asyncio.create_task(pruner.tick())
    await asyncio.wait_for(watched.stepped.wait(), timeout=10)
    db.connection.execute(
        sql.SQL("update {}.turns set taken_by = 'other', taken_until = now() + '1 hour'").format(
            sql.Identifier(db.target.schema)
        )
    )
    await ticking
    assert len(ids(db, "tasks")) == 2


async def test_an_interrupted_pruner_pass_is_continued_by_the_next(
    observer: ManualObserver, db: StoreHarness
) -> None:
    old = {ended(db, hours=800) for _ in range(5)}
    young = ended(db, hours=1)
    dying = Watched(Session(db.target, "everbeat test pruner"), cut_after=5)
    pruner = a_pruner(observer, step_rows=1, spare=dying, **ENDED_TASKS)
    with pytest.raises(asyncio.CancelledError):
        await pruner.tick()
    left = ids(db, "tasks")
    assert young in left
    assert len(left & old) == 2
    (event,) = observer.told(Pruned)
    assert isinstance(event, Pruned)
    assert (event.tasks, event.attempts, event.recoveries) == (2, 4, 2), (
        "the answer to the third step of tasks was lost"
    )
    await a_pruner(observer, step_rows=1).tick()
    assert ids(db, "tasks") == {young}


async def test_each_pruner_step_is_bounded_and_passes_rows_that_are_kept(
    observer: ManualObserver, db: StoreHarness
) -> None:  # H2
    order = [ended(db, hours=800 - n, sent_hours=900 - n) for n in range(12)]
    kept = set(order[0:9:2])
    db.connection.execute(
        sql.SQL("update {}.tasks set completed_at = now() where id = any(%s)").format(
            sql.Identifier(db.target.schema)
        ),
        [list(kept)],
    )
    watched = Watched(Session(db.target, "everbeat test pruner"))
    await a_pruner(observer, step_rows=3, spare=watched).tick()
    assert ids(db, "tasks") == kept
    walked = [step for name, step in watched.steps if name == "retention/prune_tasks"]
    assert [step.deleted["tasks"] for step in walked] == [1, 2, 1, 3, 0, 0]
    after = [step.next_after for step in walked if step.next_after is not None]
    assert after == [order[2], order[5], order[8], order[11]]


async def test_an_error_in_one_table_does_not_stop_the_pruner(
    observer: ManualObserver, db: StoreHarness
) -> None:
    beat_and_snapshot(db, hours=800)
    task = ended(db, hours=800)
    rename = "alter table {}.{} rename to {}"
    schema = db.target.schema
    parts = [sql.Identifier(schema), sql.Identifier("worker_states"), sql.Identifier("away")]
    db.connection.execute(sql.SQL(rename).format(*parts))
    failed = asyncio.Event()
    observer.events.subscribe(lambda event: failed.set() if isinstance(event, ServiceFailed) else None)
    runner = ServiceRunner(
        a_pruner(observer), clock=SystemClock(), random=Random(1), emit=observer.events.emit,
        backoff=Backoff(first_s=0.05, longest_s=0.1),
    )  # fmt: skip
    running = asyncio.create_task(runner.run())
    await asyncio.wait_for(failed.wait(), timeout=10)
    assert ids(db, "beats") == set()
    assert task not in ids(db, "tasks")
    parts[1], parts[2] = parts[2], parts[1]
    db.connection.execute(sql.SQL(rename).format(*parts))
    async with asyncio.timeout(10):
        while not runner.ticks:
            await asyncio.sleep(0.01)  # the service sends no event at the end of a tick
    assert ids(db, "worker_states") == set()
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_dry_run_of_the_pruner_counts_rows_and_deletes_nothing(
    observer: ManualObserver, db: StoreHarness
) -> None:
    for hours in (24.1, 23.9, 168.1, 167.9, 720.1, 719.9):
        beat_and_snapshot(db, hours=hours)
        holder(db, f"s-{hours}", hours=hours)
        ended(db, hours=hours)
    holder(db, "recent", hours=200, worker_hours=1)
    stray = ended(db, hours=800)
    db.connection.execute(
        sql.SQL("delete from {}.tasks where id = %s").format(sql.Identifier(db.target.schema)), [stray]
    )
    for settings in ({}, KEEP, KEEP | {"terminal_record_retention_hours": 1}):
        config = RecoveryConfig(**settings)  # type: ignore[arg-type]
        before = everything(db)
        counted = await count_old(observer.session, config)
        assert everything(db) == before
        assert (counted.total == 0) == (settings == KEEP)
        assert await prune(observer.session, config, clock=SystemClock()) == counted
        assert (await count_old(observer.session, config)).total == 0


async def test_two_concurrent_pruner_passes_delete_each_row_once(
    observer: ManualObserver, db: StoreHarness
) -> None:
    for _ in range(20):
        ended(db, hours=800)
    sessions = [Session(db.target, "everbeat test pruner") for _ in range(3)]

    async def one(session: Session) -> int:
        async def rest(_: float) -> bool:
            return True

        single = PrunePass(session, RecoveryConfig(), rest=rest, clock=SystemClock(), step_rows=2)
        await single.run()
        await session.drop()
        return single.result.tasks

    assert sum(await asyncio.gather(*(one(session) for session in sessions))) == 20
    assert ids(db, "tasks") == ids(db, "attempts") == ids(db, "recoveries") == set()


async def test_a_supervisor_prunes_on_a_separate_connection_that_it_closes(db: StoreHarness) -> None:
    ended(db, hours=800)
    events, pruned = EventBus(), asyncio.Event()
    events.subscribe(lambda event: pruned.set() if isinstance(event, Pruned) else None)
    living = supervision(db.target, RecoveryConfig(), events=events)
    await living.open()
    try:
        await asyncio.wait_for(pruned.wait(), timeout=10)
        assert ids(db, "tasks") == set()
        async with asyncio.timeout(20):
            name = living.session_name
            while connections(db, name) != {f"{name} supervisor", f"{name} supervisor beats"}:
                await asyncio.sleep(0.01)  # PostgreSQL closes the session a moment later
    finally:
        await living.close()


def connections(db: StoreHarness, session_name: str) -> set[str]:
    rows = db.connection.execute(
        "select application_name from pg_stat_activity where application_name like %s", [f"{session_name}%"]
    ).fetchall()
    return {name.rpartition(" ")[0] for (name,) in rows}  # removes the pid and the number


async def test_a_pruner_pass_that_cannot_begin_raises_its_error(db: StoreHarness) -> None:
    db.connection.execute(sql.SQL("drop table {}.beats cascade").format(sql.Identifier(db.target.schema)))
    session = Session(db.target, "everbeat test pruner")
    with pytest.raises(DatabaseError, match="beats"):
        await prune(session, RecoveryConfig(), clock=SystemClock())
    await session.drop()
