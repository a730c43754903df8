"""Test batches of recoveries that PostgreSQL refuses: which refusals fail a task, and that the other tasks are recovered."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.errors import DatabaseError
from everbeat.recovering.orders import RefusedOrders
from everbeat.runtime.processes import ExitReport
from everbeat.store import workers
from everbeat.store.leases import Recovered, RecoveryOrder
from tests.recovering.conftest import ManualObserver, StoreHarness
from tests.recovering.notice.test_age import FAST, look

AGAIN = StoredPolicy(on_crash="retry").to_json()
KILLED = ExitReport(pid=2, signal_number=signal.SIGKILL, signal_name="SIGKILL")
HELD = 40
BAD = (0, 17, 18, 39)
"""The first, the last and two neighbouring leases of the batch."""
VALUE, INTERNAL, OWN_RULE = "22023", "XX001", "P0001"


@contextmanager
def refused(db: StoreHarness, task_id: object, sqlstate: str) -> Iterator[None]:
    """Make PostgreSQL refuse every change of this row."""
    schema = db.target.schema
    db.connection.execute(
        db.plain(
            f"""create function {{schema}}.refuse() returns trigger language plpgsql as $$
                begin raise exception 'refused' using errcode = '{sqlstate}'; end $$"""
        )
    )
    db.connection.execute(
        db.plain(
            f"""create trigger refuse before update on {{schema}}.tasks for each row
                when (old.id = '{task_id}') execute function {{schema}}.refuse()"""
        )
    )
    yield
    db.connection.execute(f"drop function {schema}.refuse() cascade".encode())


@pytest.mark.parametrize("sqlstate", [VALUE, INTERNAL, OWN_RULE])
async def test_the_recovery_of_a_process_ends_despite_a_refused_row(
    sqlstate: str, observer: ManualObserver, db: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:  # J17
    others = [db.running(policy=AGAIN)]
    bad = db.running(policy=AGAIN)
    others += [db.running(policy=AGAIN) for _ in range(4)]
    db.run(workers.bury_workers(worker_ids=["w1"], how="child_exit", cause=KILLED.cause))
    recoverer = observer.recoverer()
    with refused(db, bad.id, sqlstate):
        async with asyncio.timeout(30):
            burial = asyncio.ensure_future(recoverer.recover_worker("w1", KILLED, died_at=0.0))
            while not burial.done():
                await observer.clock.advance(1.0)
                await asyncio.sleep(0.01)  # real statements run meanwhile
        assert burial.result() == 5
        assert {db.row(task.id, "state") for task in others} == {"PENDING"}
        assert db.row(bad.id, "state") == "RUNNING"
        for _ in range(3):
            await observer.clock.advance(60.0)
            await recoverer.recover_ended()  # later sweeps try it again, and it is refused again
    said = [record for record in caplog.records if "recovery_blocked" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.ERROR
    assert str(bad.id) in said[0].getMessage()
    assert "BAD_ROWS" in said[0].getMessage()
    db.connection.execute(
        db.plain("update {schema}.workers set ended_at = now() - interval '1 hour' where id = 'w1'")
    )
    await observer.clock.advance(60.0)
    assert await recoverer.recover_ended() == 1, "it is recovered after its row is repaired"
    assert db.row(bad.id, "state") == "PENDING"


@pytest.mark.parametrize("sqlstate", [VALUE, INTERNAL])
async def test_a_dead_supervisor_is_ended_despite_a_refused_row(
    sqlstate: str, observer: ManualObserver, db: StoreHarness
) -> None:  # J17
    other, bad = db.running(policy=AGAIN), db.running("w2", policy=AGAIN)
    db.supervisor("s2", "w3")
    neighbour = db.running("w3", policy=AGAIN)
    db.supervisor("s3")
    db.supervisor("s4")
    reaper = observer.reaper(**FAST)
    with refused(db, bad.id, sqlstate):
        for _ in range(8):
            await observer.clock.advance(1.0)
            observer.beat("me", "s3", "s4")
            await reaper.tick()
        assert observer.living() == {"me", "s3", "s4"}
        assert [db.row(task.id, "state") for task in (other, bad, neighbour)] == [
            "PENDING",
            "RUNNING",
            "PENDING",
        ]
    observer.beat("me")
    await observer.clock.advance(2.0)
    await reaper.tick()
    assert db.row(bad.id, "state") == "PENDING", "the row is repaired"


async def test_a_temporary_internal_error_fails_no_task(observer: ManualObserver, db: StoreHarness) -> None:
    task = db.running(policy=AGAIN)
    db.run(workers.bury_workers(worker_ids=["w1"], how="age", cause="vanished"))
    recoverer = observer.recoverer()
    with refused(db, task.id, INTERNAL):
        assert await recoverer.recover_ended() == 0
    assert await recoverer.recover_ended() == 1
    assert db.row(task.id, "state") == "PENDING"


async def test_bad_rows_of_a_dead_worker_do_not_block_other_rows_in_the_same_pass(
    observer: ManualObserver, db: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:  # J17
    held = await recovered_with_bad_rows(observer, db)
    states = {each: db.row(each, "state") for each in held}
    neighbours = Counter(states[each] for place, each in enumerate(held) if place not in BAD)
    assert neighbours == {"PENDING": HELD - len(BAD)}
    assert {states[held[place]] for place in BAD} == {"FAILED"}, (
        "an ended row is not in the index of waiting tasks"
    )
    recovered = Counter(row[0] for row in db.table("recoveries", "task_id"))
    assert recovered == dict.fromkeys(held, 1)
    assert {
        place for place, each in enumerate(held) if f"recovery_refused task_id={each}" in caplog.text
    } == {*BAD}


async def test_an_undivided_recovery_would_block_every_row_beside_a_bad_one(
    observer: ManualObserver, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:  # J17
    """The mutant of the test above: it proves that the division of the batch recovers the other tasks."""

    async def undivided(
        _: RefusedOrders,
        orders: Sequence[RecoveryOrder],
        recover: Callable[[Sequence[RecoveryOrder]], Awaitable[list[Recovered]]],
    ) -> list[Recovered]:
        return await recover(orders)

    monkeypatch.setattr(RefusedOrders, "recover", undivided)
    with pytest.raises(DatabaseError, match="index row"):
        await recovered_with_bad_rows(observer, db)
    assert {state for (state,) in db.table("tasks", "state")} == {"RUNNING"}


async def recovered_with_bad_rows(observer: ManualObserver, db: StoreHarness) -> list[UUID]:
    """Let the reaper recover the tasks of a silent worker in one pass; four of them cannot become PENDING again."""
    sent = [db.send(policy=AGAIN) for _ in range(HELD)]
    held = sorted(db.claim(limit=HELD), key=lambda each: sent.index(each.id))
    assert db.start(*held) == ["started"] * HELD
    too_long_for_an_index = db.plain(
        "update {schema}.tasks set queue = (select string_agg(md5(n::text), '') from generate_series(1, 300) n) where id = any(%s)"
    )
    db.connection.execute(too_long_for_an_index, [[held[place].id for place in BAD]])
    reaper = observer.reaper(**FAST)
    for after_s in (1.0, 1.0, 0.9, 0.2):
        await look(observer, reaper, after_s=after_s)
    return sent
