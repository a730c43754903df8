"""Move tasks to `history` as the caretaker does, and compare rows of the two tables."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from psycopg import sql
from psycopg.rows import dict_row

from everbeat.config import RecoveryConfig
from everbeat.maintenance.history import MovePass
from everbeat.runtime.clock import SystemClock
from everbeat.store.session import Session
from tests.store.conftest import StoreHarness

RECORDS = ("attempts", "steps", "signals", "recoveries")


def move(db: StoreHarness, *, age_s: float = 3_600, **options: Any) -> int:
    """Run one pass of the caretaker, and return how many tasks moved."""
    step_rows = options.pop("step_rows", 1_000)

    async def run() -> int:
        session = Session(db.target, "everbeat test caretaker")

        async def rest(seconds: float) -> bool:
            return True

        one = MovePass(
            session, RecoveryConfig(**options), rest=rest, clock=SystemClock(), age_s=age_s, step_rows=step_rows
        )  # fmt: skip
        try:
            await one.run()
        finally:
            await session.drop()
        return one.moved

    return asyncio.run(run())


def ids_in(db: StoreHarness, table: str) -> set[UUID]:
    return {row[0] for row in db.table(table, "id")}


def stored(db: StoreHarness, task_id: UUID) -> dict[str, Any]:
    """Return all rows about a task as text, wherever they are."""
    names = {"schema": sql.Identifier(db.target.schema)}
    with db.connection.cursor(row_factory=dict_row) as cursor:
        queries = {
            "tasks": "select t::text as row from {schema}.tasks t where t.id = %s",
            "attempts": "select x::text as row from {schema}.attempts x where x.task_id = %s order by attempt",
            "steps": "select x::text as row from {schema}.steps x where x.task_id = %s order by kind, name",
            "signals": "select x::text as row from {schema}.signals x where x.target = %s order by sent_at, id",
            "recoveries": "select x::text as row from {schema}.recoveries x where x.task_id = %s order by id",
        }
        return {
            table: [row["row"] for row in cursor.execute(sql.SQL(query).format(**names), [task_id])]  # type: ignore[arg-type]
            for table, query in queries.items()
        }


def records_left(db: StoreHarness) -> dict[str, int]:
    """Return how many rows the tables of records contain."""
    return {table: len(db.table(table, "1")) for table in RECORDS}
