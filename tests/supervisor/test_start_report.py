"""Test the start report of a supervisor: it stores only changes, under its current id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from everbeat.domain.doctor.work import StartProblem
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.store import inspection
from everbeat.store.session import Session
from everbeat.supervisor.processes import StartReport
from tests.worker.harness import WorkerHarness


class Supervisor:
    """A stand-in for a supervisor with two processes."""

    def __init__(self, harness: WorkerHarness) -> None:
        self.supervisor_id = harness.supervisor_id
        self.environment = ProcessEnvironment()
        self.session = Session(harness.target, "everbeat test")
        self.process = SimpleNamespace(start_problem=None)
        processes = [SimpleNamespace(start_problem=None), self.process]
        self.report = StartReport(self, processes)  # type: ignore[arg-type]


@pytest.fixture
async def supervisor(harness: WorkerHarness) -> AsyncIterator[Supervisor]:
    made = Supervisor(harness)
    yield made
    await made.session.drop()


def stored(harness: WorkerHarness, supervisor_id: str) -> tuple[int | None, str | None, float]:
    """Return the stored processes, the problem and its age."""
    found = harness.run(inspection.supervisors(stale_ms=10_000, ended_too=True, limit=10))
    (row,) = (each for each in found if each.supervisor_id == supervisor_id)
    at = row.start_problem_at
    return (
        row.processes,
        row.start_problem,
        0.0 if at is None else (row.last_heartbeat_at - at).total_seconds(),
    )


async def test_a_start_problem_is_stored_with_its_age_and_removed(
    harness: WorkerHarness, supervisor: Supervisor
) -> None:  # J8
    assert stored(harness, supervisor.supervisor_id) == (None, None, 0.0)
    await supervisor.report.tick()
    assert stored(harness, supervisor.supervisor_id) == (2, None, 0.0)
    supervisor.process.start_problem = StartProblem("no module 'shop'", SystemClock().monotonic() - 60)
    await supervisor.report.tick()
    processes, problem, age_s = stored(harness, supervisor.supervisor_id)
    assert (processes, problem) == (2, "no module 'shop'")
    assert 30 < age_s <= 60
    supervisor.process.start_problem = None
    await supervisor.report.tick()
    assert stored(harness, supervisor.supervisor_id) == (2, None, 0.0)


async def test_the_start_report_writes_nothing_while_nothing_changes(
    harness: WorkerHarness, supervisor: Supervisor
) -> None:  # J8
    supervisor.process.start_problem = StartProblem("no module 'shop'", SystemClock().monotonic())
    await supervisor.report.tick()
    tries = supervisor.session.tries
    await supervisor.report.tick()
    assert supervisor.session.tries == tries


async def test_a_supervisor_that_continues_under_a_new_id_stores_its_start_problem_again(  # J8
    harness: WorkerHarness, supervisor: Supervisor
) -> None:
    supervisor.process.start_problem = StartProblem("no module 'shop'", SystemClock().monotonic())
    await supervisor.report.tick()
    supervisor.supervisor_id = "another"
    harness.register_supervisor(supervisor.supervisor_id)
    await supervisor.report.tick()
    assert stored(harness, supervisor.supervisor_id)[:2] == (2, "no module 'shop'")
