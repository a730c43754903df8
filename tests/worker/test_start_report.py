"""What a supervisor stores of its starts: only changes, under the id that it bears now."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from everbeat.domain.starts import StartProblem
from everbeat.runtime.clock import SystemClock
from everbeat.store import inspect
from everbeat.store.session import Session
from everbeat.worker.start_report import StartReport
from tests.worker.stand import Stand


class Supervisor:
    """What the report asks of its supervisor."""

    def __init__(self, stand: Stand) -> None:
        self.id = stand.supervisor_id
        self.problem: StartProblem | None = None
        self.session = Session(stand.target, "everbeat test")
        self.report = StartReport(
            self.session,
            supervisor_id=lambda: self.id,
            problems=lambda: [None, self.problem],
            clock=SystemClock(),
        )


@pytest.fixture
async def supervisor(stand: Stand) -> AsyncIterator[Supervisor]:
    made = Supervisor(stand)
    yield made
    await made.session.drop()


def stored(stand: Stand, supervisor_id: str) -> tuple[int | None, str | None, float]:
    """The processes, the problem, and how long it has lasted."""
    found = stand.run(inspect.supervisors(stale_ms=10_000, ended_too=True, limit=10))
    (row,) = (each for each in found if each.supervisor_id == supervisor_id)
    at = row.start_problem_at
    return (
        row.processes,
        row.start_problem,
        0.0 if at is None else (row.last_heartbeat_at - at).total_seconds(),
    )


async def test_a_problem_is_stored_with_its_age_and_removed(
    stand: Stand, supervisor: Supervisor
) -> None:  # J8
    assert stored(stand, supervisor.id) == (None, None, 0.0)
    await supervisor.report.tick()
    assert stored(stand, supervisor.id) == (2, None, 0.0)
    supervisor.problem = StartProblem("no module 'shop'", SystemClock().monotonic() - 60)
    await supervisor.report.tick()
    processes, problem, age_s = stored(stand, supervisor.id)
    assert (processes, problem) == (2, "no module 'shop'")
    assert 30 < age_s <= 60
    supervisor.problem = None
    await supervisor.report.tick()
    assert stored(stand, supervisor.id) == (2, None, 0.0)


async def test_nothing_is_written_while_nothing_changes(stand: Stand, supervisor: Supervisor) -> None:  # J8
    supervisor.problem = StartProblem("no module 'shop'", SystemClock().monotonic())
    await supervisor.report.tick()
    tries = supervisor.session.tries
    await supervisor.report.tick()
    assert supervisor.session.tries == tries


async def test_a_supervisor_that_goes_on_under_a_new_id_stores_it_again(  # J8
    stand: Stand, supervisor: Supervisor
) -> None:
    supervisor.problem = StartProblem("no module 'shop'", SystemClock().monotonic())
    await supervisor.report.tick()
    supervisor.id = "another"
    stand.register_supervisor(supervisor.id)
    await supervisor.report.tick()
    assert stored(stand, supervisor.id)[:2] == (2, "no module 'shop'")
