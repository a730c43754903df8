"""Errors of the database end no loop: beats, claims' hints and sweeps resume by themselves when it is sound again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import sql

from everbeat.runtime.events import ServiceFailed, ServiceRecovered
from everbeat.store import workers
from everbeat.worker.protocol import Beaten
from tests.store.conftest import Hands, hands
from tests.worker.test_supervision import Household, make, until

__all__ = ["hands"]


@contextmanager
def missing(hands: Hands, table: str) -> Iterator[None]:
    """For a while there is no such table."""
    schema = hands.target.schema
    rename = sql.SQL("alter table {} rename to {}")
    gone = f"{table}_gone"
    hands.connection.execute(rename.format(sql.Identifier(schema, table), sql.Identifier(gone)))
    yield
    hands.connection.execute(rename.format(sql.Identifier(schema, gone), sql.Identifier(table)))


def failed(household: Household, name: str) -> list[ServiceFailed]:
    return [each for each in household.events if isinstance(each, ServiceFailed) and each.name == name]


def recovered(household: Household, name: str) -> bool:
    return any(isinstance(each, ServiceRecovered) and each.name == name for each in household.events)


async def test_a_sweep_resumes_where_its_statements_were_refused(hands: Hands) -> None:  # F10
    running = hands.running()
    hands.run(workers.end_supervisor("s1", how="session"))
    household = make(hands.target)
    with missing(hands, "recoveries"):
        await household.move_in()
        await until(lambda: len(failed(household, "reaper")) >= 2)
        assert hands.row(running.id, "state") == "RUNNING"
    await until(lambda: hands.row(running.id, "state") == "FAILED")
    await until(lambda: recovered(household, "reaper"))
    await household.supervision.close()


async def test_beats_resume_and_nobody_is_declared_dead(hands: Hands) -> None:  # F10
    hands.run(workers.end_supervisor("s1", how="left"))
    household = make(hands.target)
    await household.move_in()
    before = household.supervision.supervisor_id
    await household.ears.next(Beaten)
    with missing(hands, "supervisors"):
        await until(lambda: len(failed(household, "heart")) >= 2)
    household.ears.heard.clear()
    await household.ears.next(Beaten)
    assert household.supervision.supervisor_id == before
    await household.supervision.close()


@pytest.mark.parametrize("times", [3])
async def test_sessions_that_are_terminated_again_and_again_are_opened_again(
    hands: Hands, times: int
) -> None:  # F10
    running = hands.running()
    household = make(hands.target)
    await household.move_in()
    for number in range(times):
        before = household.supervision.disturbances
        hands.connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like %s || ' %%'",
            [f"{household.supervision.session_name} supervisor"],
        )
        await until(lambda: household.supervision.disturbances > before)  # noqa: B023 - awaited in this very turn
        household.ears.heard.clear()
        assert await household.ears.next(Beaten), f"after loss {number}"
    hands.run(workers.end_supervisor("s1", how="session"))
    await until(lambda: hands.row(running.id, "state") == "FAILED")
    await household.supervision.close()
