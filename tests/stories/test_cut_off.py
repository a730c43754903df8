"""Trees that are cut off from the database, or whose parts are frozen: nobody alive is declared dead for another's trouble."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest

from everbeat import Task
from tests.stories.stage import BY_AGE, FAST, Stage
from tests.stories.wire import Wire, wire

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def line(stage: Stage) -> Iterator[Wire]:
    with wire(stage.target) as made:
        yield made


@pytest.mark.parametrize(
    ("deed", "blow"),
    [
        ("fenced_coroutine", "stall"),
        ("fenced_process", "cut"),
        pytest.param("fenced_coroutine", "cut", marks=pytest.mark.long),
        pytest.param("fenced_process", "stall", marks=pytest.mark.long),
    ],
)
def test_fenced_code_has_ended_before_anybody_takes_it_over(
    stage: Stage, mischief: ModuleType, line: Wire, blow: str, deed: str
) -> None:  # E15
    leads = cut_off_and_taken_over(stage, line, [getattr(mischief, deed)] * 2, blow)
    assert min(leads) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fenced_code_has_ended_before_anybody_takes_it_over_in_twenty_rounds(
    stage: Stage, mischief: ModuleType, line: Wire
) -> None:  # E15
    for number in range(20):
        deeds = [mischief.fenced_coroutine, mischief.fenced_process]
        leads = cut_off_and_taken_over(stage, line, deeds, ("cut", "stall")[number % 2])
        assert min(leads) > 0, f"round {number}"
        for tree in stage.trees[-2:]:
            assert tree.stop() == 0


def cut_off_and_taken_over(stage: Stage, line: Wire, deeds: list[Task[[str], str]], blow: str) -> list[float]:
    """A fenced tree runs these, and when the blow falls another takes them over: by how many seconds after their end."""
    leads = []
    settings = {**FAST, **BY_AGE, "self_fence": True}
    stage.ready_tree(program="mischief", recovery=settings, url=line.url)
    tasks = [deed.send("never") for deed in deeds]
    for task in tasks:
        stage.until(stage.started(task.id), within=20, what="it runs")
    stage.ready_tree(program="mischief", recovery=settings)
    getattr(line, blow)()
    for task in tasks:
        stage.until(stage.started(task.id, 2), within=30, what="taken over")
    time.sleep(0.5)  # an old attempt that still lives would say so
    for task in tasks:
        last = max(effect["at"] for effect in stage.effects("alive", task.id) if effect["attempt"] == 1)
        second = stage.effects("start", task.id)[1]["at"]
        print(f"{blow}: ended {second - last:.2f} s before it was taken over")
        leads.append(second - last)
    for task in tasks:
        assert task.result(timeout=20) == "done"
    line.mend()
    return leads


@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_a_stalled_line_harms_nobody_else_and_the_tree_comes_back(
    stage: Stage, mischief: ModuleType, line: Wire, ways: dict[str, object]
) -> None:  # E6, E14, promise 4
    settings = {**FAST, **ways}
    cut_off = stage.ready_tree(
        program="mischief", recovery=settings, url=line.url, worker={"thread_concurrency": 0}
    )
    held = mischief.fenced_coroutine.send("over")
    stage.until(stage.started(held.id), within=20, what="it runs")
    others = [stage.ready_tree(program="mischief", recovery=settings) for _ in range(2)]
    napping = [mischief.waits_in_a_thread.send("napped") for _ in range(6)]
    stage.until(lambda: len(stage.effects("start")) == 7, within=20, what="all run")
    alive = {row["id"] for tree in others for row in stage.workers(tree)}
    line.stall()
    stage.until(stage.started(held.id, 2), within=30, what="its task is taken over")
    time.sleep(2)  # more silence
    line.mend()
    assert held.result(timeout=20) == "done"
    stage.until(lambda: stage.workers(cut_off), within=30, what="the tree is back under a new name")
    assert {row["id"] for tree in others for row in stage.workers(tree)} == alive
    stage.open_gate("napped")
    for task in napping:
        assert task.result(timeout=20) == "done"
        assert len(stage.effects("start", task.id)) == 1
    for tree in others:
        assert tree.stop() == 0
    assert mischief.quickly.send(3).result(timeout=20) == 3
    assert cut_off.stop() == 0


@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_a_frozen_supervisor_does_not_cost_its_workers_their_tasks(
    stage: Stage, mischief: ModuleType, ways: dict[str, object]
) -> None:  # promise 4
    settings = {**FAST, **ways}
    tree = stage.ready_tree(program="mischief", recovery=settings)
    held = mischief.fenced_coroutine.send("over")
    stage.until(stage.started(held.id), within=20, what="it runs")
    stage.ready_tree(program="mischief", recovery=settings)
    tree.process.send_signal(signal.SIGSTOP)
    time.sleep(8)  # four thresholds
    assert len(stage.effects("start", held.id)) == 1
    assert stage.recoveries() == []
    tree.process.send_signal(signal.SIGCONT)
    time.sleep(2)  # whoever would be declared dead late, is by now
    assert stage.recoveries() == []
    stage.open_gate("over")
    assert held.result(timeout=20) == "done"
    assert stage.workers(tree)


@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_a_reaper_that_was_frozen_judges_nobody_by_what_it_slept_through(
    stage: Stage, mischief: ModuleType, ways: dict[str, object]
) -> None:  # promise 4
    settings = {**FAST, **ways}
    observer = stage.ready_tree(program="mischief", recovery=settings, options=("--queues", "none"))
    alive = stage.ready_tree(program="mischief", recovery=settings)
    held = mischief.fenced_coroutine.send("over")
    stage.until(stage.started(held.id), within=20, what="it runs")
    for _ in range(3):
        observer.freeze()
        time.sleep(2.5)  # more than a threshold
        observer.thaw()
        time.sleep(0.5)  # it looks again, and may look twice
    time.sleep(3)  # whoever is wrongly judged would be so by now
    assert stage.recoveries() == []
    assert [
        row["pid"]
        for row in stage.query(
            "select pid from {schema}.supervisors where ended_at is null and pid = %s", alive.pid
        )
    ]
    stage.open_gate("over")
    assert held.result(timeout=20) == "done"
    assert len(stage.effects("start", held.id)) == 1


def test_a_frozen_worker_process_is_told_when_it_thaws_or_keeps_its_work(
    stage: Stage, mischief: ModuleType
) -> None:  # E6
    settings = {**FAST, **BY_AGE}
    tree = stage.ready_tree(program="mischief", recovery=settings)
    held = mischief.fenced_coroutine.send("over")
    stage.until(stage.started(held.id), within=20, what="it runs")
    stage.ready_tree(program="mischief", recovery=settings)
    (worker,) = psutil.Process(tree.pid).children()
    worker.send_signal(signal.SIGSTOP)
    time.sleep(6)  # three thresholds, in which its supervisor vouches for it
    worker.send_signal(signal.SIGCONT)
    assert len(stage.effects("start", held.id)) == 1
    stage.open_gate("over")
    assert held.result(timeout=20) == "done"
    assert stage.recoveries() == []
