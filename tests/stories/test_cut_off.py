"""Trees that are cut off from the database, or whose parts freeze: no live tree is declared dead because of another's trouble."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest

from everbeat import Task
from tests.stories.scenario import BY_AGE, FAST, Scenario
from tests.stories.wire import Wire, wire

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def line(scenario: Scenario) -> Iterator[Wire]:
    with wire(scenario.target) as made:
        yield made


@pytest.mark.parametrize(
    ("task_name", "fault"),
    [
        pytest.param("fenced_coroutine", "stall", marks=pytest.mark.long),
        ("fenced_process", "cut"),
        pytest.param("fenced_coroutine", "cut", marks=pytest.mark.long),
        pytest.param("fenced_process", "stall", marks=pytest.mark.long),
    ],
)
def test_fenced_code_has_ended_before_another_tree_takes_it_over(
    scenario: Scenario, mischief: ModuleType, line: Wire, fault: str, task_name: str
) -> None:  # E15
    leads = cut_off_and_taken_over(scenario, line, [getattr(mischief, task_name)] * 2, fault)
    assert min(leads) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fenced_code_has_ended_before_another_tree_takes_it_over_in_twenty_rounds(
    scenario: Scenario, mischief: ModuleType, line: Wire
) -> None:  # E15
    for number in range(20):
        sample_tasks = [mischief.fenced_coroutine, mischief.fenced_process]
        leads = cut_off_and_taken_over(scenario, line, sample_tasks, ("cut", "stall")[number % 2])
        assert min(leads) > 0, f"round {number}"
        for tree in scenario.trees[-2:]:
            assert tree.stop() == 0


def cut_off_and_taken_over(
    scenario: Scenario, line: Wire, sample_tasks: list[Task[[str], str]], fault: str
) -> list[float]:
    """Cut off a fenced tree that runs these tasks; return by how many seconds each run ended before the takeover."""
    leads = []
    settings = {**FAST, **BY_AGE, "self_fence": True}
    scenario.ready_tree(program="mischief", recovery=settings, url=line.url)
    tasks = [task_name.send("never") for task_name in sample_tasks]
    for task in tasks:
        scenario.until(scenario.started(task.id), within=20, what="it runs")
    scenario.ready_tree(program="mischief", recovery=settings)
    getattr(line, fault)()
    for task in tasks:
        scenario.until(scenario.started(task.id, 2), within=30, what="taken over")
    time.sleep(0.5)  # an old attempt that still lived would record it
    for task in tasks:
        last = max(effect["at"] for effect in scenario.effects("alive", task.id) if effect["attempt"] == 1)
        second = scenario.effects("start", task.id)[1]["at"]
        print(f"{fault}: ended {second - last:.2f} s before it was taken over")
        leads.append(second - last)
    for task in tasks:
        assert task.result(timeout=20) == "done"
    line.mend()
    return leads


@pytest.mark.long
@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_a_stalled_connection_affects_no_other_tree_and_the_tree_returns(
    scenario: Scenario, mischief: ModuleType, line: Wire, ways: dict[str, object]
) -> None:  # E6, E14, promise 4
    settings = {**FAST, **ways}
    cut_off = scenario.ready_tree(
        program="mischief", recovery=settings, url=line.url, worker={"thread_concurrency": 0}
    )
    held = mischief.fenced_coroutine.send("over")
    scenario.until(scenario.started(held.id), within=20, what="it runs")
    others = [scenario.ready_tree(program="mischief", recovery=settings) for _ in range(2)]
    napping = [mischief.waits_in_a_thread.send("napped") for _ in range(6)]
    scenario.until(lambda: len(scenario.effects("start")) == 7, within=20, what="all run")
    alive = {row["id"] for tree in others for row in scenario.workers(tree)}
    line.stall()
    scenario.until(scenario.started(held.id, 2), within=30, what="its task is taken over")
    time.sleep(2)  # more silence
    line.mend()
    assert held.result(timeout=20) == "done"
    scenario.until(lambda: scenario.workers(cut_off), within=30, what="the tree is back under a new name")
    assert {row["id"] for tree in others for row in scenario.workers(tree)} == alive
    scenario.open_gate("napped")
    for task in napping:
        assert task.result(timeout=20) == "done"
        assert len(scenario.effects("start", task.id)) == 1
    for tree in others:
        assert tree.stop() == 0
    assert mischief.quickly.send(3).result(timeout=20) == 3
    assert cut_off.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_a_frozen_supervisor_does_not_cost_its_workers_their_tasks(
    scenario: Scenario, mischief: ModuleType, ways: dict[str, object]
) -> None:  # promise 4
    settings = {**FAST, **ways}
    tree = scenario.ready_tree(program="mischief", recovery=settings)
    held = mischief.fenced_coroutine.send("over")
    scenario.until(scenario.started(held.id), within=20, what="it runs")
    scenario.ready_tree(program="mischief", recovery=settings)
    tree.process.send_signal(signal.SIGSTOP)
    time.sleep(8)  # four thresholds
    assert len(scenario.effects("start", held.id)) == 1
    assert scenario.recoveries() == []
    tree.process.send_signal(signal.SIGCONT)
    time.sleep(2)  # a late wrong judgement has happened by now
    assert scenario.recoveries() == []
    scenario.open_gate("over")
    assert held.result(timeout=20) == "done"
    assert scenario.workers(tree)


@pytest.mark.long
@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_a_reaper_that_was_frozen_declares_no_tree_dead(
    scenario: Scenario, mischief: ModuleType, ways: dict[str, object]
) -> None:  # promise 4
    settings = {**FAST, **ways}
    observer = scenario.ready_tree(program="mischief", recovery=settings, options=("--queues", "none"))
    alive = scenario.ready_tree(program="mischief", recovery=settings)
    held = mischief.fenced_coroutine.send("over")
    scenario.until(scenario.started(held.id), within=20, what="it runs")
    for _ in range(3):
        observer.freeze()
        time.sleep(2.5)  # more than a threshold
        observer.thaw()
        time.sleep(0.5)  # it checks again, perhaps twice
    time.sleep(3)  # a wrong judgement has happened by now
    assert scenario.recoveries() == []
    assert [
        row["pid"]
        for row in scenario.query(
            "select pid from {schema}.supervisors where ended_at is null and pid = %s", alive.pid
        )
    ]
    scenario.open_gate("over")
    assert held.result(timeout=20) == "done"
    assert len(scenario.effects("start", held.id)) == 1


@pytest.mark.long
def test_a_frozen_worker_process_keeps_its_task(scenario: Scenario, mischief: ModuleType) -> None:  # E6
    settings = {**FAST, **BY_AGE}
    tree = scenario.ready_tree(program="mischief", recovery=settings)
    held = mischief.fenced_coroutine.send("over")
    scenario.until(scenario.started(held.id), within=20, what="it runs")
    scenario.ready_tree(program="mischief", recovery=settings)
    (worker,) = psutil.Process(tree.pid).children()
    worker.send_signal(signal.SIGSTOP)
    time.sleep(6)  # three thresholds, in which its supervisor vouches for it
    worker.send_signal(signal.SIGCONT)
    assert len(scenario.effects("start", held.id)) == 1
    scenario.open_gate("over")
    assert held.result(timeout=20) == "done"
    assert scenario.recoveries() == []
