"""Half of the trees disappear at once: killed on hosts that others cannot inspect, or cut off while they live."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

from tests.stories.scenario import Scenario, Tree
from tests.stories.wire import Wire, wire

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

TREES = 6
ONE_EACH = {"async_concurrency": 1, "thread_concurrency": 1, "process_concurrency": 1, "prefetch": 0}


@pytest.fixture
def line(scenario: Scenario) -> Iterator[Wire]:
    with wire(scenario.target) as made:
        yield made


def running_trees(
    scenario: Scenario, sample_tasks: ModuleType, *, recovery: Mapping[str, Any], away: str | None = None
) -> tuple[list[Tree], list[Any]]:
    """Start six trees with one running task each; the first three are on other hosts and use the URL `away` if given."""
    half = TREES // 2
    trees = [
        scenario.start_tree(recovery=recovery, worker=ONE_EACH, url=away if number < half else None)
        for number in range(TREES)
    ]
    scenario.until(lambda: all(scenario.workers(tree) for tree in trees), within=90, what="six trees claim")
    tasks = [sample_tasks.wait_for_on_crash.send("go") for _ in range(TREES)]
    scenario.until(lambda: len(scenario.effects("start")) == TREES, within=60, what="each tree runs one")
    # Pretend that they run on other machines: none of their processes, files or boots are visible here.
    for number, tree in enumerate(trees[:half]):
        scenario.query(
            "update {schema}.supervisors set boot_id = %s, machine_id = %s, lock_file = null where pid = %s returning id",
            f"boot {number}",
            f"machine {number}",
            tree.pid,
        )
    return trees, tasks


def finish(scenario: Scenario, tasks: list[Any], *, starts: int) -> None:
    """Let all tasks end; `starts` is the expected number of starts of their code."""
    scenario.open_gate("go")
    for task in tasks:
        assert task.result(timeout=60) == "done"
    assert len(scenario.effects("start")) == starts


@pytest.mark.long
@pytest.mark.parametrize(
    ("recovery", "within_s"),
    [
        pytest.param({}, 60.0, marks=pytest.mark.long, id="default settings"),
        pytest.param({"mass_session_grace_ms": 2_000}, 15.0, id="a short wait"),
    ],
)
def test_half_of_the_trees_killed_on_other_hosts_are_settled_after_the_grace(
    scenario: Scenario, sample_tasks: ModuleType, recovery: Mapping[str, Any], within_s: float
) -> None:  # E14
    trees, tasks = running_trees(scenario, sample_tasks, recovery=recovery)
    victims = [tree.pid for tree in trees[:3]]
    doomed = [process for tree in trees[:3] for process in tree.processes()]
    for process in doomed:  # at one moment: trees that are lost one after another are judged one by one
        process.kill()
    took = scenario.until(
        lambda: len(scenario.recoveries()) == 3, within=within_s, what="all three are settled"
    )
    print(f"settled after {took:.1f} s")
    recoveries = scenario.recoveries()
    assert {row["noticed_by"] for row in recoveries} == {"session"}
    assert sorted(
        row["pid"]
        for row in scenario.query("select pid from {schema}.supervisors where ended_how = 'session'")
    ) == sorted(victims)
    logs = "\n".join(tree.output() for tree in trees[3:])
    assert "mass_session_loss" in logs, "no alarm"
    assert "everbeat sweep --threshold" in logs, "the alarm names no command"
    for row in recoveries:
        assert scenario.task(row["task_id"])["state"] in ("PENDING", "CLAIMED", "RUNNING")
    for tree in trees[:3]:
        tree.kill()
        scenario.start_tree(recovery=recovery, worker=ONE_EACH)
    finish(scenario, tasks, starts=TREES + 3)


@pytest.mark.long
def test_half_of_the_trees_with_closed_connections_keep_their_tasks(
    scenario: Scenario, sample_tasks: ModuleType, line: Wire
) -> None:  # E14
    """The connections return before the grace is over. Until then the server sees three dead trees."""
    trees, tasks = running_trees(
        scenario, sample_tasks, recovery={"mass_session_grace_ms": 8_000}, away=line.url
    )
    line.cut()
    scenario.until(
        lambda: all("mass_session_loss" in tree.output() for tree in trees[3:]), within=15, what="an alarm"
    )
    line.mend()
    scenario.until(lambda: held_sessions(scenario) == TREES, within=15, what="all are back")
    time.sleep(9)  # the grace would be over by now
    assert scenario.recoveries() == []
    finish(scenario, tasks, starts=TREES)


def test_half_of_the_trees_behind_a_silent_connection_keep_their_tasks(
    scenario: Scenario, sample_tasks: ModuleType, line: Wire
) -> None:  # E14
    """No connection was closed, so the server keeps each session, and the grace for closed ones does not apply."""
    _, tasks = running_trees(scenario, sample_tasks, recovery={"mass_session_grace_ms": 1_000}, away=line.url)
    scenario.until(lambda: held_sessions(scenario) == TREES, within=15, what="each tree has its session lock")
    line.stall()
    time.sleep(8)  # several times the grace
    assert held_sessions(scenario) == TREES
    line.mend()
    scenario.until(lambda: held_sessions(scenario) == TREES, within=15, what="all are back")
    assert scenario.recoveries() == []
    finish(scenario, tasks, starts=TREES)


def held_sessions(scenario: Scenario) -> int:
    """Return how many session locks the server shows for supervisors that have not ended."""
    target = scenario.target
    names = scenario.query("select id from {schema}.supervisors where ended_at is null")
    keys = {target.lock_key(row["id"]) % 2**64 for row in names}
    locks = scenario.query(
        "select (classid::bigint << 32) | objid::bigint as key from pg_locks where locktype = 'advisory' and granted"
    )
    return len({row["key"] % 2**64 for row in locks} & keys)
