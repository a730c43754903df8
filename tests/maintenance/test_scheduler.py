"""Test the scheduler: each due tick becomes one task, a broken schedule blocks no other, and idle supervisors do little work."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from everbeat.domain.limit.model import LimitDefinition
from everbeat.domain.schedule.model import Declared, Definition, Rule, ScheduledCall, Timing
from everbeat.maintenance.scheduler import (
    IDLE_S,
    Declarations,
    DeclarationsApplied,
    LimitNameTaken,
    ScheduleBroken,
    ScheduleNameTaken,
    SchedulePaused,
    Scheduler,
    TicksDecided,
    TicksMissed,
    ZoneUnknown,
)
from everbeat.store import schedules, workers
from everbeat.store.statement import Statement
from tests.recovering.conftest import ManualObserver, StoreHarness

T = TypeVar("T")
HOUR_MS = 3_600_000


def definition(name: str, *, task: str = "work", **rule: Any) -> Definition:
    timing = rule.pop("timing", Timing(every_ms=HOUR_MS))
    call = ScheduledCall(task=task, args="{}", queue="default", priority=0)
    return Definition(name=name, call=call, rule=Rule(timing=timing, **rule))


def make_due(db: StoreHarness, *names: str, hours: int = 1, **rule: Any) -> None:
    """Store schedules with an interval of an hour, for which this many ticks are due."""
    for name in names:
        db.run(schedules.put_schedule(definition(name, **rule)))
        change(
            db,
            name,
            f"decided_to = date_trunc('hour', now()) - interval '{hours} h' + interval '1 ms', next_at = now() - interval '1 s'",
        )


def change(db: StoreHarness, name: str, assignments: str) -> None:
    db.connection.execute(db.plain(f"update {{schema}}.schedules set {assignments} where name = %s"), [name])


def ticks(db: StoreHarness) -> list[tuple[str, str]]:
    """Return the schedule and the outcome of each decided tick."""
    rows = db.connection.execute(
        db.plain("select schedule, outcome from {schema}.ticks order by schedule, at")
    ).fetchall()
    return [(row[0], row[1]) for row in rows]


def sent(db: StoreHarness) -> list[str]:
    rows = db.connection.execute(
        db.plain("select schedule from {schema}.tasks where tick is not null order by schedule")
    ).fetchall()
    return [row[0] for row in rows]


class Counting:
    """Statements that counts the statements it runs."""

    def __init__(self, observer: ManualObserver) -> None:
        self.names: list[str] = []
        self._session = observer.session

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        self.names.append(statement.name)
        return await self._session.run(statement, patience_s=patience_s)


class Overtaken:
    """Statements of a supervisor that reads the due schedules just before another scheduler decides them."""

    def __init__(self, observer: ManualObserver, first: Scheduler) -> None:
        self.was_overtaken = False
        self._session = observer.session
        self._first = first

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        answer = await self._session.run(statement, patience_s=patience_s)
        if statement.name == "schedule/list_due" and not self.was_overtaken:
            self.was_overtaken = True
            await self._first.tick()
        return answer


async def test_a_due_tick_becomes_one_task_and_an_early_one_none(
    observer: ManualObserver, db: StoreHarness
) -> None:
    make_due(db, "due")
    db.run(schedules.put_schedule(definition("later")))
    scheduler = Scheduler(observer.environment())
    await scheduler.tick()
    assert ticks(db) == [("due", "SENT")]
    assert sent(db) == ["due"]
    assert await scheduler.tick() == IDLE_S
    assert ticks(db) == [("due", "SENT")]
    (event,) = observer.told(TicksDecided)
    assert isinstance(event, TicksDecided)
    assert (event.sent, event.skipped, event.missed) == (1, 0, 0)


async def test_the_scheduler_waits_until_the_next_tick_but_never_longer_than_its_interval(
    observer: ManualObserver, db: StoreHarness
) -> None:
    scheduler = Scheduler(observer.environment())
    assert await scheduler.tick() == IDLE_S
    db.run(schedules.put_schedule(definition("fast", timing=Timing(every_ms=1_000))))
    wait_s = await scheduler.tick()
    assert wait_s is not None
    assert 0 < wait_s <= 1.0
    change(db, "fast", "next_at = now() + interval '1.5 s'")
    wait_s = await scheduler.tick()
    assert wait_s is not None
    assert 0 <= wait_s < IDLE_S


async def test_an_idle_scheduler_runs_one_statement_per_tick(
    observer: ManualObserver, db: StoreHarness
) -> None:
    db.run(schedules.put_schedule(definition("later")))
    statements = Counting(observer)
    scheduler = Scheduler(replace(observer.environment(), statements=statements))
    await scheduler.tick()
    statements.names.clear()
    for _ in range(3):
        await scheduler.tick()
    assert statements.names == ["schedule/list_due"] * 3


async def test_pages_follow_at_once_while_more_schedules_are_due(
    observer: ManualObserver, db: StoreHarness
) -> None:
    names = [f"s{number}" for number in range(5)]
    make_due(db, *names)
    scheduler = Scheduler(observer.environment(), page=2)
    assert [await scheduler.tick() for _ in range(2)] == [0.0, 0.0]
    assert len(sent(db)) == 4
    await scheduler.tick()
    assert sent(db) == names


UNREADABLE = {
    "a timing that is no timing": """timing = '{{"every_ms": "often"}}'""",
    "a timing that is a list": "timing = '[]'",
    "a timing without ticks": "timing = '{{}}'",
    "a cron expression that is none": """timing = '{{"cron": ["61 * * * *"]}}'""",
    "a queue that no index can hold": "queue = (select string_agg(md5(n::text), '') from generate_series(1, 300) n)",
}


@pytest.mark.parametrize("damage", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_broken_schedule_is_logged_once_and_blocks_no_other(
    observer: ManualObserver, db: StoreHarness, damage: str
) -> None:
    make_due(db, "broken", "sound", "sound too")
    change(db, "broken", f"{damage}, next_at = now() - interval '1 h'")
    scheduler = Scheduler(observer.environment(), page=1)
    for _ in range(8):
        await scheduler.tick()
    assert sent(db) == ["sound", "sound too"]
    await observer.clock.advance(60)
    make_due(db, "another")
    for _ in range(4):
        await scheduler.tick()
    assert sent(db) == ["another", "sound", "sound too"]
    (event,) = observer.told(ScheduleBroken)
    assert isinstance(event, ScheduleBroken)
    assert event.schedule == "broken"
    assert event.problem


async def test_a_repaired_schedule_sends_again(observer: ManualObserver, db: StoreHarness) -> None:
    make_due(db, "broken")
    change(db, "broken", "timing = '[]'")
    scheduler = Scheduler(observer.environment())
    await scheduler.tick()
    change(db, "broken", f"""timing = '{{{{"every_ms": {HOUR_MS}}}}}'""")
    await observer.clock.advance(60)
    await scheduler.tick()
    assert sent(db) == ["broken"]


async def test_schedules_in_an_unknown_time_zone_are_left_to_others_and_the_zone_is_logged_once(
    observer: ManualObserver, db: StoreHarness
) -> None:
    make_due(db, "on earth", "on mars", "on mars too")
    for name in ("on mars", "on mars too"):
        change(
            db,
            name,
            """timing = '{{"cron": ["0 * * * *"], "timezone": "Mars/Olympus"}}', timezone = 'Mars/Olympus',
               next_at = now() - interval '1 h'""",
        )
    scheduler = Scheduler(observer.environment(), page=1)
    for _ in range(5):
        await scheduler.tick()
    assert sent(db) == ["on earth"]
    (event,) = observer.told(ZoneUnknown)
    assert isinstance(event, ZoneUnknown)
    assert event.zone == "Mars/Olympus"
    assert observer.told(ScheduleBroken) == []


async def test_a_supervisor_whose_decision_was_not_the_first_waits_longer(
    observer: ManualObserver, db: StoreHarness
) -> None:
    make_due(db, "contested")
    first = Scheduler(observer.environment())
    late = Overtaken(observer, first)
    second = Scheduler(replace(observer.environment(), statements=late))
    await second.tick()
    assert late.was_overtaken
    assert sent(db) == ["contested"]
    assert len(observer.told(TicksDecided)) == 1
    assert first._pause_s(0.5) == 0.5
    assert second._pause_s(0.5) > 0.5


async def test_missed_ticks_are_reported_in_one_event_unless_the_schedule_was_paused(
    observer: ManualObserver, db: StoreHarness
) -> None:
    make_due(db, "a", "b", hours=4)
    make_due(db, "paused", hours=4)
    change(db, "paused", "held_until = now(), held_because = 'PAUSED'")
    await Scheduler(observer.environment()).tick()
    (event,) = observer.told(TicksMissed)
    assert isinstance(event, TicksMissed)
    assert (event.schedules, event.ticks, event.first) == (2, 6, ("a", "b"))
    assert sent(db) == ["a", "b"]


async def test_a_schedule_is_paused_and_reported_after_its_last_runs_failed(
    observer: ManualObserver, db: StoreHarness
) -> None:
    make_due(db, "fails", pause_after_failures=1)
    scheduler = Scheduler(observer.environment())
    await scheduler.tick()
    (task,) = db.claim()
    db.start(task)
    db.settle(task, outcome="FAILED")
    change(db, "fails", "decided_to = decided_to - interval '1 h', next_at = now()")
    db.connection.execute(db.plain("update {schema}.ticks set at = at - interval '1 h'"))
    db.connection.execute(db.plain("update {schema}.tasks set tick = tick - interval '1 h'"))
    await scheduler.tick()
    (event,) = observer.told(SchedulePaused)
    assert isinstance(event, SchedulePaused)
    assert event.schedule == "fails"
    assert len(sent(db)) == 1


# Declarations.


def register(
    db: StoreHarness,
    worker_id: str,
    *names: str,
    version: str = "1",
    supervisor: str = "s1",
    starts_version: bool = True,
    owner: str = "app",
    limits: tuple[LimitDefinition, ...] = (),
) -> None:
    found = tuple(definition(name) for name in names)
    declared = Declared(owner=owner, version=version, schedules=found, limits=limits)
    row = workers.WorkerRow(
        id=worker_id,
        supervisor_id=supervisor,
        hostname="h",
        pid=1,
        process_started=None,
        queues=None,
        declared=declared,
        starts_version=starts_version,
    )
    assert db.run(workers.register_worker(row))


def stored(db: StoreHarness) -> dict[str, bool]:
    """Return whether each schedule is retired."""
    rows = db.connection.execute(db.plain("select name, retired_at is not null from {schema}.schedules"))
    return {row[0]: row[1] for row in rows.fetchall()}


async def test_one_supervisor_per_interval_applies_the_declarations_of_live_workers(
    observer: ManualObserver, db: StoreHarness
) -> None:
    calls: list[str] = []
    first = Declarations(observer.environment(), on_change=lambda: calls.append("first"))
    other = ManualObserver(db, observer.session, supervisor_id="other")
    second = Declarations(other.environment(), on_change=lambda: calls.append("second"))
    await first.tick()
    register(db, "v1", "nightly")
    await second.tick()
    assert stored(db) == {}
    await first.tick()
    assert stored(db) == {"nightly": False}
    assert calls == ["first"]
    (event,) = observer.told(DeclarationsApplied)
    assert isinstance(event, DeclarationsApplied)
    assert (event.owner, event.added, event.retired) == ("app", ("nightly",), ())
    register(db, "v2", "hourly", version="2")
    second.apply_now()
    await second.tick()
    assert stored(db) == {"nightly": True, "hourly": False}
    assert calls == ["first", "second"]


async def test_a_declared_name_that_is_taken_is_reported_once(
    observer: ManualObserver, db: StoreHarness
) -> None:
    db.run(schedules.put_schedule(definition("mine")))
    register(db, "v1", "mine", "yours")
    declarations = Declarations(observer.environment(), on_change=lambda: None)
    for _ in range(3):
        await declarations.tick()
    (event,) = observer.told(ScheduleNameTaken)
    assert isinstance(event, ScheduleNameTaken)
    assert (event.schedule, event.owner) == ("mine", "app")


async def test_a_limit_that_two_apps_declare_is_reported_once_for_the_older_one(
    observer: ManualObserver, db: StoreHarness
) -> None:
    def gpu(concurrency: int) -> tuple[LimitDefinition, ...]:
        return (LimitDefinition(name="gpu", concurrency=concurrency),)

    register(db, "v1", owner="shop", limits=gpu(1))
    register(db, "v2", owner="mail", version="2", limits=gpu(2))
    register(db, "v3", owner="mail", version="3", limits=gpu(3))
    declarations = Declarations(observer.environment(), on_change=lambda: None)
    for _ in range(3):
        await declarations.tick()
    (event,) = observer.told(LimitNameTaken)
    assert isinstance(event, LimitNameTaken)
    assert (event.limit, event.owner) == ("gpu", "shop")
    assert db.table("limits", "concurrency, declared_by") == [(3, "mail")]


async def test_a_replaced_process_of_an_older_version_does_not_bring_that_version_back(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """A process is replaced after a crash, or because it has reached a limit. This is not a deploy."""
    declarations = Declarations(observer.environment(), on_change=lambda: None)
    register(db, "old", "nightly")
    db.supervisor("s2")
    register(db, "new", "hourly", version="2", supervisor="s2")
    db.run(workers.bury_workers(worker_ids=["old"], how="child_exit"))
    register(db, "replacement of old", "nightly", starts_version=False)
    await declarations.tick()
    assert stored(db) == {"hourly": False}
    db.run(workers.bury_workers(worker_ids=["replacement of old"], how="left"))
    register(db, "of a new tree", "nightly")
    await declarations.tick()
    assert stored(db) == {"hourly": True, "nightly": False}
