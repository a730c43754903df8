"""Test that a task name with many crashes within a minute is paused."""

from __future__ import annotations

from psycopg import sql

from everbeat.domain.task.policy import StoredPolicy
from everbeat.recovering.orders import Death
from everbeat.recovering.recoverer import TaskTypePaused
from everbeat.runtime.processes import ExitReport
from everbeat.store import tasks
from everbeat.store.claims import Claimed
from tests.recovering.conftest import ManualObserver, StoreHarness

CRASH = ExitReport(pid=77, exit_code=139)
AGAIN = StoredPolicy(on_crash="retry", max_crashes=10).to_json()


async def crash(observer: ManualObserver, claimed: Claimed, **settings: object) -> None:
    recoverer = observer.recoverer(**settings)
    assert (
        await recoverer.recover_attempt(
            claimed.id, claimed.claim_id, Death.by_exit(CRASH, after_s=0.0, pid=CRASH.pid)
        )
        is not None
    )


async def test_a_task_name_with_many_crashes_is_paused(observer: ManualObserver, db: StoreHarness) -> None:
    for _ in range(2):
        await crash(observer, db.running(), brake_after_crashes=3)
    assert db.run(tasks.pauses()) == []
    await crash(observer, db.running(), brake_after_crashes=3)
    (pause,) = db.run(tasks.pauses())
    assert (pause.kind, pause.name, pause.paused_by, pause.crashes) == ("task", "work", "brake", 3)
    assert pause.reason == "3 or more of its tasks crashed within 60 s"
    (event,) = observer.told(TaskTypePaused)
    assert isinstance(event, TaskTypePaused)
    assert (event.name, event.crashes, event.window_s) == ("work", 3, 60.0)
    db.send()
    assert db.claim() == [], "claims skip it"
    db.send("other")
    assert len(db.claim(names=["other", "work"])) == 1
    db.run(tasks.resume(pause, channel=db.target.channel))
    assert len(db.claim()) == 1


async def test_crashes_of_a_single_task_do_not_pause_its_name(
    observer: ManualObserver, db: StoreHarness
) -> None:
    task_id = db.send(policy=AGAIN)
    for _ in range(5):
        (claimed,) = db.claim()
        db.start(claimed)
        await crash(observer, claimed, brake_after_crashes=3)
    assert db.row(task_id, "crash_count") == 5
    assert db.run(tasks.pauses()) == []


async def test_crashes_dated_in_the_future_do_not_count(
    observer: ManualObserver, db: StoreHarness
) -> None:  # I14
    """Crashes with a future time would stay in the window for an hour."""
    for _ in range(2):
        await crash(observer, db.running(), brake_after_crashes=3)
    db.connection.execute(db.plain("update {schema}.recoveries set noticed_at = now() + interval '59 min'"))
    await crash(observer, db.running(), brake_after_crashes=3)
    assert db.run(tasks.pauses()) == []


async def test_old_crashes_and_losses_do_not_pause_a_task_name(
    observer: ManualObserver, db: StoreHarness
) -> None:
    for _ in range(3):
        await crash(observer, db.running(), brake_after_crashes=4)
    db.connection.execute(
        sql.SQL("update {}.recoveries set noticed_at = now() - interval '61 s'").format(
            sql.Identifier(db.target.schema)
        )
    )
    for _ in range(3):
        await crash(observer, db.running(), brake_after_crashes=4)
    assert db.run(tasks.pauses()) == []
    for _ in range(5):
        db.running("w2")
    await observer.recoverer(brake_after_crashes=4).recover_worker("w2", CRASH, died_at=0.0)
    assert db.run(tasks.pauses()) == [], "five tasks that died together count as losses"
    await crash(observer, db.running(), brake_after_crashes=4)
    assert len(db.run(tasks.pauses())) == 1


async def test_the_crash_pause_can_be_switched_off(observer: ManualObserver, db: StoreHarness) -> None:
    for _ in range(3):
        await crash(observer, db.running(), brake_after_crashes=None)
    assert db.run(tasks.pauses()) == []
    assert observer.told(TaskTypePaused) == []
