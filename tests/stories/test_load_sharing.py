"""No worker is idle while tasks wait behind the busy slots of another one."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import pytest

from tests.stories.scenario import SLACK, Scenario

pytestmark = pytest.mark.story
ONE_SLOT = {"async_concurrency": 1, "process_concurrency": 1}


def shares(scenario: Scenario) -> list[int]:
    """Return how many tasks each worker ran."""
    ran = scenario.query("select claimed_by_worker_id from {schema}.tasks where state = 'COMPLETED'")
    return sorted(Counter(row["claimed_by_worker_id"] for row in ran).values())


def took_s(scenario: Scenario) -> float:
    """Return the seconds from the first start to the last end."""
    ends = [line["at"] for line in scenario.effects("end")]
    return float(max(ends) - min(line["at"] for line in scenario.effects("start")))


@pytest.mark.parametrize(
    "kind",
    ["nap", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("nap_in_thread", "nap_in_process"))],
)
def test_two_workers_with_one_slot_each_run_five_tasks_in_three_rounds(
    scenario: Scenario, sample_tasks: ModuleType, kind: str
) -> None:  # J5
    for _ in range(2):
        scenario.ready_tree(worker={**ONE_SLOT, "thread_concurrency": 1})
    task = getattr(sample_tasks, kind)
    for handle in sample_tasks.app.send_many([task.call(1.0) for _ in range(5)]):
        handle.result(timeout=20 * SLACK)
    print(f"five tasks of 1 s took {took_s(scenario):.2f} s")
    assert shares(scenario) == [2, 3]


@pytest.mark.long
def test_two_workers_share_six_process_tasks(scenario: Scenario, sample_tasks: ModuleType) -> None:  # J5
    for _ in range(2):
        scenario.ready_tree(worker={"process_concurrency": 2})
    for handle in sample_tasks.app.send_many([sample_tasks.nap_in_process.call(1.0) for _ in range(6)]):
        handle.result(timeout=20 * SLACK)
    print(f"six tasks of 1 s took {took_s(scenario):.2f} s")
    assert min(shares(scenario)) >= 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nap", "nap_in_process"])
def test_five_tasks_of_five_seconds_end_within_three_rounds(
    scenario: Scenario, sample_tasks: ModuleType, kind: str
) -> None:  # J5
    for _ in range(2):
        scenario.ready_tree(worker=ONE_SLOT)
    task = getattr(sample_tasks, kind)
    for handle in sample_tasks.app.send_many([task.call(5.0) for _ in range(5)]):
        handle.result(timeout=60)
    assert shares(scenario) == [2, 3]
    assert took_s(scenario) <= 1.15 * 15
