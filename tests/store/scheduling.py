"""Helpers of the tests about schedules: definitions, decisions, and functions that run the statements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from psycopg import sql

from everbeat.domain.schedule.model import (
    DecidedTick,
    Declared,
    Definition,
    DueSchedule,
    Rule,
    ScheduledCall,
    TickDecision,
    Timing,
)
from everbeat.store import schedules, workers
from everbeat.store.schedules import DecidedTicks, DeclaredChange, DueSchedules
from everbeat.store.workers import WorkerRow
from tests.store.conftest import StoreHarness

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
HOURLY = Timing(every_ms=3_600_000)
STALE_MS = 60_000


def definition(
    name: str = "hourly",
    *,
    timing: Timing = HOURLY,
    note: str | None = None,
    call: dict[str, Any] | None = None,
    **rule: Any,
) -> Definition:
    plain = {"task": "work", "args": '{"n": 1}', "queue": "default", "priority": 5}
    return Definition(
        name=name, call=ScheduledCall(**(plain | (call or {}))), rule=Rule(timing=timing, **rule), note=note
    )


def put(db: StoreHarness, name: str = "hourly", **more: Any) -> str:
    """Put the schedule. If it is new, make it an hour old, so that its next ticks are in the past."""
    verdict = db.run(schedules.put_schedule(definition(name, **more))).verdict
    if verdict == "created":
        text = "update {schema}.schedules set decided_to = decided_to - interval '1 hour' where name = %s"
        db.connection.execute(db.plain(text), [name])
    return verdict


def due(db: StoreHarness, *, limit: int = 100, **more: Any) -> DueSchedules:
    return db.run(schedules.list_due(limit=limit, **more))


def due_one(db: StoreHarness, name: str = "hourly") -> DueSchedule:
    (found,) = (each for each in due(db).due if each.name == name)
    return found


def sent(seen: DueSchedule, number: int = 1, **more: Any) -> DecidedTick:
    """Return the tick that is this many seconds after the last decided one, as a tick that is sent."""
    at = seen.decided_to + number * SECOND
    return DecidedTick(**({"at": at, "outcome": "SENT", "task_id": uuid4()} | more))


def decision(seen: DueSchedule, *ticks: DecidedTick, **more: Any) -> TickDecision:
    plain = {
        "name": seen.name, "seen_decided_to": seen.decided_to, "seen_changed_at": seen.changed_at, "ticks": ticks,
        "decided_to": max((tick.last_at or tick.at for tick in ticks), default=seen.decided_to), "next_at": seen.now + HOUR,
    }  # fmt: skip
    return TickDecision(**(plain | more))


def decide(db: StoreHarness, *decisions: TickDecision) -> DecidedTicks:
    return db.run(schedules.decide_ticks(decisions, channel=db.target.channel, decided_by="s1"))


def make_due(db: StoreHarness, name: str = "hourly") -> DueSchedule:
    """Make the schedule due again and return it."""
    db.connection.execute(db.plain("update {schema}.schedules set next_at = now() where name = %s"), [name])
    return due_one(db, name)


def send_tick(db: StoreHarness, name: str = "hourly", **more: Any) -> UUID:
    """Decide one more tick of the schedule, and return the id of its task."""
    seen = make_due(db, name)
    tick = sent(seen, **more)
    assert decide(db, decision(seen, tick)).sent == 1
    assert tick.task_id is not None
    return tick.task_id


def start_worker(db: StoreHarness, worker: str, declared: Declared | None) -> None:
    row = WorkerRow(
        id=worker, supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=None, declared=declared,
    )  # fmt: skip
    assert db.run(workers.register_worker(row))


def end_worker(db: StoreHarness, worker: str, *, ago_ms: int = 0) -> None:
    db.run(workers.bury_workers(worker_ids=[worker], how="exited"))
    text = "update {schema}.workers set ended_at = now() - %s * interval '1 millisecond' where id = %s"
    db.connection.execute(db.plain(text), [ago_ms, worker])


def version(number: int, *names: str, owner: str = "shop", **more: Any) -> Declared:
    return Declared(
        owner=owner, version=f"v{number}", schedules=tuple(definition(name, **more) for name in names)
    )


def apply(db: StoreHarness) -> dict[str, str]:
    """Apply the declarations. Return what changed by name."""
    changes: list[DeclaredChange] = db.run(schedules.apply_declared(after_ms=STALE_MS))
    return {each.name: each.verdict + (f" {each.because}" if each.because else "") for each in changes}


@contextmanager
def heard(db: StoreHarness) -> Iterator[Callable[[], list[str]]]:
    """Listen to the channel of the schema. Yield a function that returns the payloads that were sent so far."""
    with db.target.connect("everbeat test") as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(db.target.channel)))
        yield lambda: [each.payload for each in listener.notifies(timeout=0.2)]
