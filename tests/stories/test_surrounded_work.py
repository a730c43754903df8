"""Resources and middleware of an app in real processes: opened once in each process, closed in order, around every kind of code."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from tests.stories.scenario import FAST, Scenario, Tree, program_of

pytestmark = pytest.mark.story

WORKER = {"processes": 2, "process_concurrency": 1, "grace": 5}
KINDS = ("on_loop", "in_thread", "in_process", "async_in_process")


@pytest.fixture
def program(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "surrounded") as imported:
        yield imported


def send(scenario: Scenario, program: ModuleType, name: str, *, tree: Tree, state: str = "COMPLETED") -> UUID:
    task_id: UUID = getattr(program, name).send().id
    scenario.until(scenario.state_is(task_id, state), within=40, what=f"{name} is {state}", tree=tree)
    return task_id


def steps(scenario: Scenario, task_id: UUID) -> list[str]:
    return [line["step"] for line in scenario.effects(task_id=task_id)]


def test_each_process_opens_the_resources_once_and_closes_them_in_reverse_order_on_sigterm(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="surrounded", worker=WORKER)
    for name in KINDS * 2:
        send(scenario, program, name, tree=tree)
    workers = {row["pid"] for row in scenario.workers(tree)}
    assert tree.stop() == 0

    by_process: dict[int, list[str]] = {}
    for line in scenario.effects():
        if line["step"].startswith(("opened", "closed")):
            by_process.setdefault(line["pid"], []).append(line["step"])
    assert workers < by_process.keys(), "worker processes, and at least one task process"
    assert set(map(tuple, by_process.values())) == {
        ("opened outer", "opened inner", "closed inner", "closed outer")
    }
    for line in scenario.effects("code"):
        assert line["values"] == [f"outer of {line['pid']}", f"inner of {line['pid']}"]
    assert os.getpid() not in by_process, "the sender opens nothing"


def test_a_killed_process_closes_nothing_and_its_successor_opens_the_resources_again(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="surrounded", worker={"processes": 1})
    (row,) = scenario.workers(tree)
    os.kill(row["pid"], signal.SIGKILL)
    scenario.until(
        lambda: len(scenario.effects("opened inner")) == 2, within=20, what="a second process", tree=tree
    )
    send(scenario, program, "on_loop", tree=tree)
    assert scenario.effects("closed inner") == []
    assert tree.stop() == 0
    assert [line["pid"] == row["pid"] for line in scenario.effects("closed inner")] == [False]


def test_a_resource_that_cannot_be_opened_keeps_the_worker_from_starting_and_is_named(
    scenario: Scenario, program: ModuleType
) -> None:
    scenario.open_gate("broken")
    tree = scenario.start_tree(program="surrounded", worker=WORKER)
    assert tree.process.wait(30) == 1
    output = tree.output()
    assert "Resource 'inner' (" in output
    assert "surrounded.py:" in output
    assert "cannot be opened: ConnectionError: no answer from cache.example.org" in output
    assert 'raise ConnectionError("no answer' in output, "the log has the traceback"
    assert [line["step"] for line in scenario.effects()] == ["opened outer", "closed outer"]


def test_a_resource_that_breaks_later_is_the_start_problem_of_the_tree(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="surrounded", worker={"processes": 1})
    send(scenario, program, "on_loop", tree=tree)  # a tree whose first worker never gets ready ends
    scenario.open_gate("broken")
    (row,) = scenario.workers(tree)
    os.kill(row["pid"], signal.SIGKILL)

    def problem() -> str:
        """Return the stored reason; a supervisor that the machine froze for long registers again, and is not listed meanwhile."""
        return next((each.start_problem or "" for each in program.app.list_supervisors(ended=False)), "")

    scenario.until(problem, within=40, what="the reason is stored", tree=tree)
    assert problem().startswith("Resource 'inner' (")
    (scenario.gates / "broken").unlink()
    scenario.until(
        lambda: scenario.workers(tree) and not problem(), within=90, what="a worker again", tree=tree
    )


@pytest.mark.long
def test_a_resource_that_does_not_close_is_reported_and_delays_the_shutdown_by_seconds_only(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="surrounded", worker={"processes": 1})
    send(scenario, program, "on_loop", tree=tree)
    scenario.open_gate("stuck")
    assert tree.stop() == 0
    assert "resource_hangs name=inner" in tree.output()


def test_one_middleware_surrounds_async_thread_and_process_tasks_where_their_code_runs(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="surrounded", worker=WORKER)
    for name in KINDS:
        task_id = send(scenario, program, name, tree=tree)
        is_async = name in ("on_loop", "async_in_process")
        both = (["before async"], ["after async"]) if is_async else ([], [])
        found = [step for step in steps(scenario, task_id) if step != "loop"]
        assert found == ["before", *both[0], "code", *both[1], "finally"]
        loops = scenario.effects("loop", task_id)
        assert [line["is_that_of_the_resource"] for line in loops] == [True] * is_async
        lines = scenario.effects(task_id=task_id)
        assert len({line["pid"] for line in lines}) == 1
        assert len({line["thread"] for line in lines if "thread" in line}) == 1
        (code,) = scenario.effects("code", task_id)
        assert code["tenant"] == f"tenant of {name}"
    failed = send(scenario, program, "fails", tree=tree, state="FAILED")
    assert steps(scenario, failed) == ["before", "before async", "seen", "finally"]
    assert scenario.task(failed)["error"]["type"] == "ValueError"


@pytest.mark.long
def test_a_timeout_and_a_lost_lease_run_the_finally_of_the_middleware(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="surrounded", worker={"processes": 1, "grace": 1}, recovery=FAST)
    for name in ("too_long", "too_long_in_process"):
        task_id = send(scenario, program, name, tree=tree, state="FAILED")
        assert scenario.task(task_id)["error"]["code"] == "TASK_TIMEOUT"
        scenario.until(
            lambda task_id=task_id: steps(scenario, task_id)[-1:] == ["finally"], within=10, what="finally"
        )
        assert "seen" not in steps(scenario, task_id), "a stop is no error"

    lost = program.loses_its_lease.send().id
    scenario.until(lambda: "code" in steps(scenario, lost), within=20, what="it runs", tree=tree)
    (row,) = scenario.workers(tree)
    program.app.release_workers([row["id"]])
    scenario.until(scenario.state_is(lost, "COMPLETED"), within=40, what="a second attempt", tree=tree)
    wanted = Counter({"before": 2, "before async": 2, "code": 2, "after async": 1, "finally": 2})
    scenario.until(lambda: Counter(steps(scenario, lost)) == wanted, within=10, what="both ran the finally")


@pytest.mark.long
def test_a_suspended_task_leaves_the_middleware_as_if_it_had_ended_and_enters_it_again(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="surrounded", worker={"processes": 1})
    task_id = send(scenario, program, "sleeps", tree=tree)
    once = ["before", "before async", "after async", "finally"]
    assert steps(scenario, task_id) == once * 2
    assert scenario.task(task_id)["retry_count"] == 0


def fields_of_lines(tree: Tree) -> list[dict[str, str]]:
    found = [line for line in tree.output().splitlines() if "packing the order" in line]
    return [dict(part.split("=", 1) for part in line.split(" ") if "=" in part) for line in found]


def test_log_lines_of_code_carry_the_task_the_attempt_and_the_worker(
    scenario: Scenario, program: ModuleType
) -> None:
    tree = scenario.ready_tree(program="surrounded", worker={"processes": 1})
    (row,) = scenario.workers(tree)
    wanted: list[dict[str, Any]] = []
    for name in KINDS:
        task_id = send(scenario, program, name, tree=tree)
        wanted.append({"task_id": str(task_id), "task_name": name, "attempt": "1", "worker_id": row["id"]})
    assert tree.stop() == 0
    assert fields_of_lines(tree) == wanted
