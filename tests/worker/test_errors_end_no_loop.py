"""Test that database errors end no service loop: heartbeats, claims and sweeps resume when the database works again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import sql

from everbeat.protocol import Beaten
from everbeat.runtime.events import ServiceFailed, ServiceRecovered
from everbeat.store import workers
from tests.store.conftest import StoreHarness, db
from tests.supervisor.test_registration import RegisteredSupervisor, make, until

__all__ = ["db"]


@contextmanager
def missing(db: StoreHarness, table: str) -> Iterator[None]:
    """Rename the table away for a while."""
    schema = db.target.schema
    rename = sql.SQL("alter table {} rename to {}")
    gone = f"{table}_gone"
    db.connection.execute(rename.format(sql.Identifier(schema, table), sql.Identifier(gone)))
    yield
    db.connection.execute(rename.format(sql.Identifier(schema, gone), sql.Identifier(table)))


def failed(registered: RegisteredSupervisor, name: str) -> list[ServiceFailed]:
    return [each for each in registered.events if isinstance(each, ServiceFailed) and each.name == name]


def recovered(registered: RegisteredSupervisor, name: str) -> bool:
    return any(isinstance(each, ServiceRecovered) and each.name == name for each in registered.events)


async def test_the_reaper_resumes_after_its_statements_were_refused(db: StoreHarness) -> None:  # F10
    running = db.running()
    db.run(workers.end_supervisor("s1", how="session"))
    registered = make(db.target)
    with missing(db, "recoveries"):
        await registered.open()
        await until(lambda: len(failed(registered, "reaper")) >= 2)
        assert db.row(running.id, "state") == "RUNNING"
    await until(lambda: db.row(running.id, "state") == "FAILED")
    await until(lambda: recovered(registered, "reaper"))
    await registered.supervision.close()


async def test_heartbeats_resume_after_errors_and_no_supervisor_is_declared_dead(
    db: StoreHarness,
) -> None:  # F10
    db.run(workers.end_supervisor("s1", how="left"))
    registered = make(db.target)
    await registered.open()
    before = registered.supervision.supervisor_id
    await registered.messages.next(Beaten)
    with missing(db, "supervisors"):
        await until(lambda: len(failed(registered, "heartbeat")) >= 2)
    registered.messages.received.clear()
    await registered.messages.next(Beaten)
    assert registered.supervision.supervisor_id == before
    await registered.supervision.close()


@pytest.mark.parametrize("times", [3])
async def test_a_supervisor_reopens_sessions_that_are_terminated_repeatedly(
    db: StoreHarness, times: int
) -> None:  # F10
    running = db.running()
    registered = make(db.target)
    await registered.open()
    for number in range(times):
        before = registered.supervision.disturbances
        db.connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like %s || ' %%'",
            [f"{registered.supervision.session_name} supervisor"],
        )
        await until(lambda: registered.supervision.disturbances > before)  # noqa: B023 - awaited in this very turn
        registered.messages.received.clear()
        assert await registered.messages.next(Beaten), f"after loss {number}"
    db.run(workers.end_supervisor("s1", how="session"))
    await until(lambda: db.row(running.id, "state") == "FAILED")
    await registered.supervision.close()
