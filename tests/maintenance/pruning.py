"""Make old rows with the ordinary statements and date them back, and record the steps of a pruner pass."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, TypeVar
from uuid import UUID, uuid4

from msgspec.structs import replace
from psycopg import sql

from everbeat.domain.identifiers import uuid7
from everbeat.maintenance.cleanup import Pruner
from everbeat.runtime.clock import SystemClock
from everbeat.store import expiry, tasks, workers
from everbeat.store.retention import PruneStep
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from tests.recovering.conftest import ManualObserver, StoreHarness

T = TypeVar("T")


@dataclass
class Watched:
    """A session that records each step of a pass and can be cut off after some steps."""

    session: Session
    steps: list[tuple[str, PruneStep[Any]]] = field(default_factory=list)
    cut_after: int | None = None
    stepped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        answer = await self.session.run(statement, patience_s=patience_s)
        if isinstance(answer, PruneStep):
            self.steps.append((statement.name, answer))
            self.stepped.set()
            if len(self.steps) == self.cut_after:
                raise asyncio.CancelledError
        return answer

    async def drop(self) -> None:
        await self.session.drop()


def a_pruner(observer: ManualObserver, **options: Any) -> Pruner:
    spare = options.pop("spare", None)
    rows = options.pop("step_rows", 1_000)
    environment = replace(observer.environment(**options), clock=SystemClock())
    return Pruner(
        environment,
        open_spare=lambda: spare or Session(observer.db.target, "everbeat test pruner"),
        step_rows=rows,
    )


def ended(
    db: StoreHarness, *, hours: float, state: str = "COMPLETED", sent_hours: float | None = None
) -> UUID:
    """Create a task that ended this many hours ago, with its attempt and, if it crashed once, its recovery."""
    ago = sent_hours or hours + 1
    number = round((datetime.now(UTC) - timedelta(hours=ago)).timestamp() * 1_000)
    task = tasks.NewTask(
        id=uuid7(unix_ms=number, random=Random(uuid4().int).randbytes(10)), name="work", queue="default",
        priority=0, args=b"{}", good_until=datetime.now(UTC) - timedelta(1) if state == "EXPIRED" else None,
    )  # fmt: skip
    sent = db.run(tasks.insert_task(task, channel=db.target.channel))
    assert sent is not None
    match state:
        case "EXPIRED":
            db.run(expiry.expire(channel=db.target.channel))
        case "CANCELLED":
            assert db.cancel(sent) == "CANCELLED"
        case _:
            (claimed,) = db.claim(limit=1)
            assert db.start(claimed) == ["started"]
            (lease,) = [lease for lease in db.leases() if lease.id == sent]
            assert db.recover(lease, "retry")
            (claimed,) = db.claim(limit=1)
            assert db.start(claimed) == ["started"]
            outcome = {"COMPLETED": "COMPLETED", "FAILED": "FAILED"}.get(state)
            if outcome is not None:
                db.settle(claimed, outcome, **({"error": b"{}"} if outcome == "FAILED" else {}))  # type: ignore[arg-type]
    record(db, sent, hours=hours, random=Random(uuid4().int).randbytes(10), unix_ms=number)
    column = {"COMPLETED": "completed_at", "FAILED": "failed_at", "CANCELLED": "cancelled_at", "EXPIRED": "expired_at"}.get(state)  # fmt: skip
    if column is not None:
        backdate(db, "tasks", column, hours, where=f"id = '{sent}'")
    backdate(db, "attempts", "ended_at", hours, where=f"task_id = '{sent}'")
    backdate(db, "recoveries", "noticed_at", hours, where=f"task_id = '{sent}'")
    return sent


def record(db: StoreHarness, task_id: UUID, *, hours: float, random: bytes, unix_ms: int) -> None:
    """Insert a step of this task and a signal to it, both of this age."""
    steps = "insert into {}.steps (task_id, kind, name, attempt, recorded_at) values (%s, 'step', 'charge', 1, statement_timestamp() - %s)"
    signals = "insert into {}.signals (id, target, name, value, sent_at) values (%s, %s, 'approved', '1', statement_timestamp() - %s)"
    schema, age = sql.Identifier(db.target.schema), timedelta(hours=hours)
    db.connection.execute(sql.SQL(steps).format(schema), [task_id, age])
    db.connection.execute(
        sql.SQL(signals).format(schema), [uuid7(unix_ms=unix_ms, random=random), task_id, age]
    )


def backdate(db: StoreHarness, table: str, column: str, hours: float, *, where: str = "true") -> None:
    query = f"update {{}}.{table} set {column} = statement_timestamp() - %s where {where}"
    db.connection.execute(
        sql.SQL(query).format(sql.Identifier(db.target.schema)),  # type: ignore[arg-type]
        [timedelta(hours=hours)],
    )


def holder(db: StoreHarness, name: str, *, hours: float | None, worker_hours: float | None = None) -> None:
    """Insert a supervisor with a worker that ended this many hours ago; None means not ended."""
    db.supervisor(name, f"{name}-w")
    if worker_hours is not None or hours is not None:
        db.run(workers.bury_workers(worker_ids=[f"{name}-w"], how="left"))
        backdate(db, "workers", "ended_at", worker_hours or hours or 0, where=f"id = '{name}-w'")
    if hours is not None:
        db.run(workers.end_supervisor(name, how="left"))
        backdate(db, "supervisors", "ended_at", hours, where=f"id = '{name}'")


def beat_and_snapshot(db: StoreHarness, *, hours: float) -> None:
    db.run(workers.beat("s1", [], draining=False))
    state = workers.WorkerState(
        worker_id="w1", running=0, claimed=0, slots=1, rss_bytes=1, cpu_percent=0.0, loop_lag_ms=0.0
    )
    db.run(workers.record_states([state]))
    newest = "(select max({}) from {}.{})"
    schema = db.target.schema
    backdate(db, "beats", "sent_at", hours, where=f"seq = {newest.format('seq', schema, 'beats')}")
    backdate(db, "worker_states", "at", hours, where=f"id = {newest.format('id', schema, 'worker_states')}")  # fmt: skip


def ids(db: StoreHarness, table: str) -> set[Any]:
    column = {"attempts": "task_id", "recoveries": "task_id", "steps": "task_id", "beats": "seq"}.get(
        table, "id"
    )
    return {row[0] for row in db.table(table, column)}


def everything(db: StoreHarness) -> dict[str, list[Any]]:
    """Return all rows of the schema with their physical places."""
    names = (
        "tasks", "attempts", "recoveries", "steps", "signals", "beats", "worker_states", "workers", "supervisors", "turns",
    )  # fmt: skip
    return {name: sorted(db.table(name, "ctid, xmin, *"), key=str) for name in names}
