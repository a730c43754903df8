"""What tests of retention share: old rows made by the ordinary statements and dated back, and a session that is watched."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, TypeVar
from uuid import UUID, uuid4

from psycopg import sql

from everbeat.config import RecoveryConfig
from everbeat.domain.identifiers import uuid7
from everbeat.runtime.clock import SystemClock
from everbeat.services.pruner import Pruner
from everbeat.store import tasks, workers
from everbeat.store.retention import Step
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from tests.services.conftest import Hands, Onlooker

T = TypeVar("T")


@dataclass
class Watched:
    """A session that remembers what each step of a pass did, and may be cut off after some of them."""

    session: Session
    steps: list[tuple[str, Step[Any]]] = field(default_factory=list)
    cut_after: int | None = None
    stepped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        answer = await self.session.run(statement, patience_s=patience_s)
        if isinstance(answer, Step):
            self.steps.append((statement.name, answer))
            self.stepped.set()
            if len(self.steps) == self.cut_after:
                raise asyncio.CancelledError
        return answer

    async def drop(self) -> None:
        await self.session.drop()


def a_pruner(onlooker: Onlooker, **options: Any) -> Pruner:
    spare = options.pop("spare", None)
    rows = options.pop("step_rows", 1_000)
    return Pruner(
        onlooker.session, RecoveryConfig(**options), observer=onlooker, events=onlooker.events, clock=SystemClock(),
        open_spare=lambda: spare or Session(onlooker.hands.target, "everbeat test pruner"), step_rows=rows,
    )  # fmt: skip


def ended(hands: Hands, *, hours: float, state: str = "COMPLETED", sent_hours: float | None = None) -> UUID:
    """A task that went through its life, and ended so long ago; its attempt and, if it crashed once, its recovery too."""
    ago = sent_hours or hours + 1
    number = round((datetime.now(UTC) - timedelta(hours=ago)).timestamp() * 1_000)
    task = tasks.NewTask(
        id=uuid7(unix_ms=number, random=Random(uuid4().int).randbytes(10)), name="work", queue="default",
        priority=0, args=b"{}", good_until=datetime.now(UTC) - timedelta(1) if state == "EXPIRED" else None,
    )  # fmt: skip
    sent = hands.run(tasks.insert_task(task, channel=hands.target.channel))
    assert sent is not None
    match state:
        case "EXPIRED":
            hands.run(tasks.expire(channel=hands.target.channel))
        case "CANCELLED":
            assert hands.cancel(sent) == "CANCELLED"
        case _:
            (claimed,) = hands.claim(limit=1)
            assert hands.start(claimed) == ["started"]
            (lease,) = [lease for lease in hands.leases() if lease.id == sent]
            assert hands.recover(lease, "retry")
            (claimed,) = hands.claim(limit=1)
            assert hands.start(claimed) == ["started"]
            outcome = {"COMPLETED": "COMPLETED", "FAILED": "FAILED"}.get(state)
            if outcome is not None:
                hands.settle(claimed, outcome, **({"error": b"{}"} if outcome == "FAILED" else {}))  # type: ignore[arg-type]
    record(hands, sent, hours=hours, random=Random(uuid4().int).randbytes(10), unix_ms=number)
    column = {"COMPLETED": "completed_at", "FAILED": "failed_at", "CANCELLED": "cancelled_at", "EXPIRED": "expired_at"}.get(state)  # fmt: skip
    if column is not None:
        backdate(hands, "tasks", column, hours, where=f"id = '{sent}'")
    backdate(hands, "attempts", "ended_at", hours, where=f"task_id = '{sent}'")
    backdate(hands, "recoveries", "noticed_at", hours, where=f"task_id = '{sent}'")
    return sent


def record(hands: Hands, task_id: UUID, *, hours: float, random: bytes, unix_ms: int) -> None:
    """A step of this task and a signal to it, of that age."""
    steps = "insert into {}.steps (task_id, kind, name, attempt, recorded_at) values (%s, 'step', 'charge', 1, statement_timestamp() - %s)"
    signals = "insert into {}.signals (id, target, name, value, sent_at) values (%s, %s, 'approved', '1', statement_timestamp() - %s)"
    schema, age = sql.Identifier(hands.target.schema), timedelta(hours=hours)
    hands.connection.execute(sql.SQL(steps).format(schema), [task_id, age])
    hands.connection.execute(
        sql.SQL(signals).format(schema), [uuid7(unix_ms=unix_ms, random=random), task_id, age]
    )


def backdate(hands: Hands, table: str, column: str, hours: float, *, where: str = "true") -> None:
    query = f"update {{}}.{table} set {column} = statement_timestamp() - %s where {where}"
    hands.connection.execute(
        sql.SQL(query).format(sql.Identifier(hands.target.schema)),  # type: ignore[arg-type]
        [timedelta(hours=hours)],
    )


def holder(hands: Hands, name: str, *, hours: float | None, worker_hours: float | None = None) -> None:
    """A supervisor with a worker, ended so long ago; None: not ended."""
    hands.supervisor(name, f"{name}-w")
    if worker_hours is not None or hours is not None:
        hands.run(workers.bury_workers(worker_ids=[f"{name}-w"], how="left"))
        backdate(hands, "workers", "ended_at", worker_hours or hours or 0, where=f"id = '{name}-w'")
    if hours is not None:
        hands.run(workers.end_supervisor(name, how="left"))
        backdate(hands, "supervisors", "ended_at", hours, where=f"id = '{name}'")


def beat_and_snapshot(hands: Hands, *, hours: float) -> None:
    hands.run(workers.beat("s1", [], draining=False))
    state = workers.WorkerState(
        worker_id="w1", running=0, claimed=0, slots=1, rss_bytes=1, cpu_percent=0.0, loop_lag_ms=0.0
    )
    hands.run(workers.record_states([state]))
    newest = "(select max({}) from {}.{})"
    schema = hands.target.schema
    backdate(hands, "beats", "sent_at", hours, where=f"seq = {newest.format('seq', schema, 'beats')}")
    backdate(hands, "worker_states", "at", hours, where=f"id = {newest.format('id', schema, 'worker_states')}")  # fmt: skip


def ids(hands: Hands, table: str) -> set[Any]:
    column = {"attempts": "task_id", "recoveries": "task_id", "steps": "task_id", "beats": "seq"}.get(
        table, "id"
    )
    return {row[0] for row in hands.table(table, column)}


def everything(hands: Hands) -> dict[str, list[Any]]:
    """Every byte of the schema, and where each row lies."""
    names = (
        "tasks", "attempts", "recoveries", "steps", "signals", "beats", "worker_states", "workers", "supervisors", "turns",
    )  # fmt: skip
    return {name: sorted(hands.table(name, "ctid, xmin, *"), key=str) for name in names}
