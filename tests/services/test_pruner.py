"""Retention: what is old goes, table by table; what is younger, alive or half-finished stays, whatever happens to the pass."""

from __future__ import annotations

import asyncio
from random import Random
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import EventBus, ServiceFailed, event_text
from everbeat.runtime.service import Backoff, ServiceRunner
from everbeat.services.pruner import Pruned, PrunePass, count_old, prune
from everbeat.store import retention, tasks
from everbeat.store.session import Session
from tests.services.conftest import Hands, Onlooker
from tests.services.pruning import (
    Watched,
    a_pruner,
    backdate,
    beat_and_snapshot,
    ended,
    everything,
    holder,
    ids,
)
from tests.worker.supervising import supervision

KEEP = {
    "heartbeat_retention_hours": None,
    "worker_state_retention_hours": None,
    "terminal_record_retention_hours": None,
}
ENDED_TASKS = KEEP | {"terminal_record_retention_hours": 720}
HISTORY = ("tasks", "attempts", "recoveries", "steps", "signals")
HOLDERS = ("worker_states", "workers", "supervisors")


async def test_each_terminal_state_goes_when_it_ended_long_enough_ago(
    onlooker: Onlooker, hands: Hands
) -> None:  # H1
    states = ("COMPLETED", "FAILED", "CANCELLED", "EXPIRED")
    old = {ended(hands, hours=720.1, state=state) for state in states}
    young = {ended(hands, hours=719.9, state=state, sent_hours=5_000) for state in states}
    assert ids(hands, "attempts") | ids(hands, "recoveries") <= old | young
    await a_pruner(onlooker).tick()
    assert ids(hands, "tasks") == young
    assert ids(hands, "attempts") == ids(hands, "recoveries") != set()
    assert ids(hands, "attempts") < young
    (event,) = onlooker.told(Pruned)
    assert isinstance(event, Pruned)
    assert (event.tasks, event.attempts, event.recoveries) == (4, 4, 2)
    assert event_text(event).startswith("pruned tasks=4 attempts=4 recoveries=2 beats=0")


async def test_what_lives_or_is_half_finished_is_never_touched(
    onlooker: Onlooker, hands: Hands
) -> None:  # H1
    hands.send()  # waits
    (claimed,) = hands.claim("w2", limit=1)
    running = ended(hands, hours=5_000, state="RUNNING")
    retried = ended(hands, hours=5_000, state="FAILED")
    hands.run(tasks.retry(retried, channel=hands.target.channel, call=uuid4()))
    backdate(hands, "tasks", "sent_at", 9_000)
    backdate(hands, "tasks", "enqueued_at", 9_000)
    before = everything(hands)
    await a_pruner(onlooker).tick()
    after = everything(hands)
    assert [row[0] for row in after.pop("turns")] != []
    assert after == {name: rows for name, rows in before.items() if name != "turns"}
    assert hands.row(claimed.id, "state") == "CLAIMED"
    assert hands.row(running, "state") == "RUNNING"
    assert ids(hands, "attempts") == ids(hands, "recoveries") == {running, retried}


@pytest.mark.parametrize(
    ("settings", "goes"),
    [
        ({"heartbeat_retention_hours": 24}, ("beats",)),
        ({"worker_state_retention_hours": 168}, HOLDERS),
        ({"terminal_record_retention_hours": 720}, HISTORY),
        ({}, ()),
    ],
)
async def test_each_field_alone_and_none_keeps(
    onlooker: Onlooker, hands: Hands, settings: dict[str, int], goes: tuple[str, ...]
) -> None:  # H1, A6
    for hours in (24.1, 23.9, 168.1, 167.9, 720.1, 719.9):
        beat_and_snapshot(hands, hours=hours)
        holder(hands, f"s-{hours}", hours=hours)
        ended(hands, hours=hours)
    counts = {name: len(ids(hands, name)) for name in ("beats", *HOLDERS, *HISTORY)}
    await a_pruner(onlooker, **(KEEP | settings)).tick()
    gone = {name: number - len(ids(hands, name)) for name, number in counts.items()}
    expected = {"beats": 5} | dict.fromkeys(HOLDERS, 3) | dict.fromkeys(HISTORY, 1)
    assert gone == {name: expected[name] if name in goes else 0 for name in counts}
    assert bool(hands.table("turns")) == bool(settings), "nothing to do, nothing written"


async def test_an_ended_worker_stays_while_a_lease_names_it_and_a_supervisor_while_a_worker_does(
    onlooker: Onlooker, hands: Hands
) -> None:
    holder(hands, "holds", hours=None)
    task = hands.running("holds-w")
    holder(hands, "holds", hours=200)
    holder(hands, "recent", hours=200, worker_hours=1)
    holder(hands, "lives", hours=None, worker_hours=200)
    holder(hands, "gone", hours=200)
    pruner = a_pruner(onlooker)
    await pruner.tick()
    assert ids(hands, "supervisors") == {"me", "s1", "holds", "recent", "lives"}
    assert ids(hands, "workers") == {"w1", "w2", "holds-w", "recent-w"}
    (lease,) = hands.leases("holds")
    assert hands.recover(lease, "retry")
    await pruner.tick()
    assert ids(hands, "supervisors") == {"me", "s1", "recent", "lives"}
    assert hands.row(task.id, "state") == "PENDING"


async def test_a_row_that_somebody_holds_is_stepped_over_and_taken_by_the_next_pass(
    onlooker: Onlooker, hands: Hands
) -> None:
    held, other = ended(hands, hours=800), ended(hands, hours=800)
    locking = sql.SQL("select from {}.tasks where id = %s for update").format(
        sql.Identifier(hands.target.schema)
    )
    pruner = a_pruner(onlooker)
    with hands.connection.transaction():
        hands.connection.execute(locking, [held])
        await asyncio.wait_for(pruner.tick(), timeout=10)
        assert ids(hands, "tasks") == ids(hands, "attempts") == {held}
    assert other not in ids(hands, "tasks")
    await pruner.tick()
    assert ids(hands, "tasks") == ids(hands, "attempts") == set()


async def test_what_lost_its_task_by_other_means_goes_by_its_own_age(
    onlooker: Onlooker, hands: Hands
) -> None:
    old, young = ended(hands, hours=800), ended(hands, hours=600, sent_hours=5_000)
    hands.connection.execute(sql.SQL("delete from {}.tasks").format(sql.Identifier(hands.target.schema)))
    await a_pruner(onlooker, step_rows=1).tick()
    assert ids(hands, "attempts") == ids(hands, "recoveries") == {young}
    assert old != young


@pytest.mark.parametrize("sent_hours", [-24 * 365, 0])
async def test_ids_that_do_not_tell_the_time_are_pruned_too(
    onlooker: Onlooker, hands: Hands, sent_hours: int
) -> None:
    task = ended(hands, hours=800, sent_hours=sent_hours) if sent_hours else hands.send()
    if not sent_hours:
        hands.cancel(task)  # its id is a UUIDv4, as anybody's INSERT may give it
        backdate(hands, "tasks", "cancelled_at", 800)
    await a_pruner(onlooker, step_rows=2).tick()
    assert ids(hands, "tasks") == ids(hands, "attempts") == set()


async def test_the_longest_retention_is_no_mistake(onlooker: Onlooker, hands: Hands) -> None:
    task = ended(hands, hours=800)
    await a_pruner(onlooker, terminal_record_retention_hours=1_000_000).tick()
    assert ids(hands, "tasks") == {task}
    assert hands.run(retention.task_id_bounds(hours=1_000_000)).old == UUID(int=0), "nothing is looked at"


async def test_one_supervisor_in_each_interval_prunes(onlooker: Onlooker, hands: Hands) -> None:
    await a_pruner(onlooker, retention_interval_ms=60_000).tick()
    ended(hands, hours=800)
    other = Onlooker(hands, onlooker.session, supervisor_id="other")
    second = a_pruner(other, retention_interval_ms=60_000)
    assert second.interval_s == 60.0
    await second.tick()
    assert len(ids(hands, "tasks")) == 1
    backdate(hands, "turns", "taken_until", 0)
    await second.tick()
    assert ids(hands, "tasks") == set()


async def test_a_pass_ends_when_somebody_else_has_the_turn(onlooker: Onlooker, hands: Hands) -> None:
    for _ in range(3):
        ended(hands, hours=800)
    watched = Watched(Session(hands.target, "everbeat test pruner"))
    pruner = a_pruner(onlooker, step_rows=1, spare=watched, **ENDED_TASKS)
    ticking = asyncio.create_task(pruner.tick())
    await asyncio.wait_for(watched.stepped.wait(), timeout=10)
    hands.connection.execute(
        sql.SQL("update {}.turns set taken_by = 'other', taken_until = now() + '1 hour'").format(
            sql.Identifier(hands.target.schema)
        )
    )
    await ticking
    assert len(ids(hands, "tasks")) == 2


async def test_a_pass_that_dies_half_way_is_continued_by_the_next(onlooker: Onlooker, hands: Hands) -> None:
    old = {ended(hands, hours=800) for _ in range(5)}
    young = ended(hands, hours=1)
    dying = Watched(Session(hands.target, "everbeat test pruner"), cut_after=4)
    pruner = a_pruner(onlooker, step_rows=1, spare=dying, **ENDED_TASKS)
    with pytest.raises(asyncio.CancelledError):
        await pruner.tick()
    left = ids(hands, "tasks")
    assert young in left
    assert len(left & old) == 2
    (event,) = onlooker.told(Pruned)
    assert isinstance(event, Pruned)
    assert (event.tasks, event.attempts, event.recoveries) == (2, 4, 2), (
        "the answer to the third step of tasks never came"
    )
    await a_pruner(onlooker, step_rows=1).tick()
    assert ids(hands, "tasks") == {young}


async def test_every_step_is_bounded_and_the_walk_goes_on_past_what_stays(
    onlooker: Onlooker, hands: Hands
) -> None:  # H2
    order = [ended(hands, hours=800 - n, sent_hours=900 - n) for n in range(12)]
    kept = set(order[0:9:2])
    hands.connection.execute(
        sql.SQL("update {}.tasks set completed_at = now() where id = any(%s)").format(
            sql.Identifier(hands.target.schema)
        ),
        [list(kept)],
    )
    watched = Watched(Session(hands.target, "everbeat test pruner"))
    await a_pruner(onlooker, step_rows=3, spare=watched).tick()
    assert ids(hands, "tasks") == kept
    walked = [step for name, step in watched.steps if name == "retention/prune_tasks"]
    assert [step.deleted["tasks"] for step in walked] == [1, 2, 1, 3, 0, 0]
    after = [step.next_after for step in walked if step.next_after is not None]
    assert after == [order[2], order[5], order[8], order[11]]


async def test_an_error_in_one_table_spares_the_others_and_ends_no_loop(
    onlooker: Onlooker, hands: Hands
) -> None:
    beat_and_snapshot(hands, hours=800)
    task = ended(hands, hours=800)
    rename = "alter table {}.{} rename to {}"
    schema = hands.target.schema
    parts = [sql.Identifier(schema), sql.Identifier("worker_states"), sql.Identifier("away")]
    hands.connection.execute(sql.SQL(rename).format(*parts))
    failed = asyncio.Event()
    onlooker.events.subscribe(lambda event: failed.set() if isinstance(event, ServiceFailed) else None)
    runner = ServiceRunner(
        a_pruner(onlooker), clock=SystemClock(), random=Random(1), emit=onlooker.events.emit,
        backoff=Backoff(first_s=0.05, longest_s=0.1),
    )  # fmt: skip
    running = asyncio.create_task(runner.run())
    await asyncio.wait_for(failed.wait(), timeout=10)
    assert ids(hands, "beats") == set()
    assert task not in ids(hands, "tasks")
    parts[1], parts[2] = parts[2], parts[1]
    hands.connection.execute(sql.SQL(rename).format(*parts))
    async with asyncio.timeout(10):
        while not runner.ticks:
            await asyncio.sleep(0.01)  # the end of a tick is told to nobody
    assert ids(hands, "worker_states") == set()
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_dry_run_counts_what_a_pass_deletes_and_changes_no_byte(
    onlooker: Onlooker, hands: Hands
) -> None:
    for hours in (24.1, 23.9, 168.1, 167.9, 720.1, 719.9):
        beat_and_snapshot(hands, hours=hours)
        holder(hands, f"s-{hours}", hours=hours)
        ended(hands, hours=hours)
    holder(hands, "recent", hours=200, worker_hours=1)
    stray = ended(hands, hours=800)
    hands.connection.execute(
        sql.SQL("delete from {}.tasks where id = %s").format(sql.Identifier(hands.target.schema)), [stray]
    )
    for settings in ({}, KEEP, KEEP | {"terminal_record_retention_hours": 1}):
        config = RecoveryConfig(**settings)  # type: ignore[arg-type]
        before = everything(hands)
        counted = await count_old(onlooker.session, config)
        assert everything(hands) == before
        assert (counted.total == 0) == (settings == KEEP)
        assert await prune(onlooker.session, config, clock=SystemClock()) == counted
        assert (await count_old(onlooker.session, config)).total == 0


async def test_two_passes_at_once_delete_each_row_once(onlooker: Onlooker, hands: Hands) -> None:
    for _ in range(20):
        ended(hands, hours=800)
    sessions = [Session(hands.target, "everbeat test pruner") for _ in range(3)]

    async def one(session: Session) -> int:
        async def rest(_: float) -> bool:
            return True

        single = PrunePass(session, RecoveryConfig(), rest=rest, clock=SystemClock(), step_rows=2)
        await single.run()
        await session.drop()
        return single.result.tasks

    assert sum(await asyncio.gather(*(one(session) for session in sessions))) == 20
    assert ids(hands, "tasks") == ids(hands, "attempts") == ids(hands, "recoveries") == set()


async def test_a_supervisor_prunes_on_a_connection_of_its_own_that_it_closes(hands: Hands) -> None:
    ended(hands, hours=800)
    events, pruned = EventBus(), asyncio.Event()
    events.subscribe(lambda event: pruned.set() if isinstance(event, Pruned) else None)
    living = supervision(hands.target, RecoveryConfig(), events=events)
    await living.open()
    try:
        await asyncio.wait_for(pruned.wait(), timeout=10)
        assert ids(hands, "tasks") == set()
        async with asyncio.timeout(20):
            name = living.session_name
            while connections(hands, name) != {f"{name} supervisor", f"{name} supervisor beats"}:
                await asyncio.sleep(0.01)  # the server is looked at from outside: it closes in its own time
    finally:
        await living.close()


def connections(hands: Hands, session_name: str) -> set[str]:
    rows = hands.connection.execute(
        "select application_name from pg_stat_activity where application_name like %s", [f"{session_name}%"]
    ).fetchall()
    return {name.rpartition(" ")[0] for (name,) in rows}  # without the pid and the number


async def test_a_pass_that_cannot_begin_says_why(hands: Hands) -> None:
    hands.connection.execute(
        sql.SQL("drop table {}.beats cascade").format(sql.Identifier(hands.target.schema))
    )
    session = Session(hands.target, "everbeat test pruner")
    with pytest.raises(DatabaseError, match="beats"):
        await prune(session, RecoveryConfig(), clock=SystemClock())
    await session.drop()
