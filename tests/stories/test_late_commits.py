"""Sends that begin while every worker is busy and commit after the workers are idle: no hint is sent, but no task waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.nats_server import NatsServer
from tests.stories.nats_scenario import POLLS_NEVER, NatsScenario
from tests.stories.scenario import SLACK, Scenario, program_of
from tests.stories.test_large_results import execute

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

HELD_BY = 15_016
SLOW = 77
"""A transaction that inserts a task with this priority commits only when the story allows it."""
SLOW_COMMIT = f"""
create function {{schema}}.wait_for_story() returns trigger language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared({HELD_BY});
    return null;
end
$$;
create constraint trigger slow_commit after insert on {{schema}}.tasks deferrable initially deferred
for each row when (new.priority = {SLOW}) execute function {{schema}}.wait_for_story()"""
NO_HINTS_WANTED = {
    "postgres": "select from {schema}.workers where not listens and ended_at is null",
    "nats": "select from {schema}.relay where not listens",
}
HINTS_WANTED = {
    "postgres": "select from {schema}.workers where listens and ended_at is null",
    "nats": "select from {schema}.relay where listens",
}


@pytest.fixture(params=["postgres", "nats"])
def by(request: pytest.FixtureRequest, scenario: Scenario) -> Iterator[str]:
    """Must run before `sample_tasks`, whose app gets the URL of the server."""
    if request.param == "postgres":
        yield "postgres"
        return
    with NatsServer() as server:
        NatsScenario(scenario, server)
        yield "nats"


@pytest.fixture
def sample_tasks(scenario: Scenario, by: str) -> Iterator[ModuleType]:
    with program_of(scenario, "sample_tasks") as program:
        yield program


@pytest.mark.parametrize(
    ("tasks", "commits_after_s"),
    [
        pytest.param(300, 2.0, marks=pytest.mark.long, id="many, long after"),
        pytest.param(1, 0.3, id="one, soon after"),
    ],
)
def test_a_task_that_commits_after_the_workers_became_idle_is_found_at_once(
    scenario: Scenario, sample_tasks: ModuleType, by: str, tasks: int, commits_after_s: float
) -> None:
    execute(scenario, SLOW_COMMIT)
    scenario.ready_tree(worker=POLLS_NEVER)
    if by == "nats":
        scenario.until(
            lambda: scenario.query("select from {schema}.relay where holder is not null"), within=20
        )
    scenario.query("select pg_advisory_lock(%s)", HELD_BY)
    is_over, handles = threading.Event(), []

    def keep_busy() -> None:
        while not is_over.is_set():
            sample_tasks.app.send_many(sample_tasks.swift.call(n) for n in range(300))

    def send() -> None:
        handles.extend(
            sample_tasks.app.send_many(
                sample_tasks.swift.with_options(priority=SLOW).call(n) for n in range(tasks)
            )
        )

    busy = threading.Thread(target=keep_busy)
    busy.start()
    scenario.until(lambda: scenario.query(NO_HINTS_WANTED[by]), within=30, what="nobody wants hints")
    late = threading.Thread(target=send)
    late.start()
    scenario.until(
        lambda: scenario.query(
            "select from pg_locks where locktype = 'advisory' and objid = %s and not granted", HELD_BY
        ),
        within=30,
        what="the late send waits for its commit",
    )
    is_over.set()
    busy.join(60)
    scenario.until(lambda: scenario.query(HINTS_WANTED[by]), within=60, what="hints are wanted again")
    time.sleep(commits_after_s)  # the commit comes this much later
    scenario.query("select pg_advisory_unlock(%s)", HELD_BY)
    late.join(60)
    committed = time.monotonic()
    assert handles[0].result(timeout=60) == 0
    took = time.monotonic() - committed
    print(f"found after {took:.2f} s")
    assert took < 0.5 * SLACK
