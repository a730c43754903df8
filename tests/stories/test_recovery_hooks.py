"""Decisions of an app about the tasks of dead workers. The supervisor imports no user code, so a worker process runs the hooks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any
from uuid import UUID

import psutil
import pytest

from tests.stories.scenario import FAST, SLACK, Scenario, Tree, program_of

pytestmark = pytest.mark.story


@pytest.fixture
def hooked(scenario: Scenario) -> Iterator[ModuleType]:
    """Import the program as a sender does."""
    with program_of(scenario, "hooked") as program:
        yield program


def trees(scenario: Scenario, **recovery: Any) -> tuple[Tree, Tree]:
    """Start one tree that will be killed and one that survives."""
    settings = FAST | {"hook_timeout_ms": 1_000} | recovery
    doomed = scenario.ready_tree(program="hooked", recovery=settings)
    return doomed, scenario.start_tree(program="hooked", recovery=settings, options=("--queues", "nothing"))


def survivor(scenario: Scenario, tree: Tree) -> None:
    scenario.until(lambda: scenario.workers(tree), within=30, what="the other tree is ready", tree=tree)


def asked(scenario: Scenario, task_id: Any) -> list[dict[str, Any]]:
    return scenario.effects("asked", task_id)


class TestWholeTreeDies:
    def test_each_task_of_a_dead_tree_gets_the_answer_of_its_hook(
        self, scenario: Scenario, hooked: ModuleType
    ) -> None:  # F7
        doomed, other = trees(scenario)
        names = ("plain", "later", "backoff", "left", "raising", "hanging")
        sent = {name: getattr(hooked, name).send("gate").id for name in names}
        scenario.until(lambda: len(scenario.effects("start")) == len(sent), within=20, what="all run")
        survivor(scenario, other)
        (holder,) = scenario.workers(doomed)
        doomed.kill()
        scenario.until(
            lambda: len(scenario.recoveries()) == len(sent) - 1, within=5 * SLACK, what="all but the one left"
        )
        rows = {row["task_id"]: row for row in scenario.recoveries()}
        actions = {name: rows[task_id]["action"] for name, task_id in sent.items() if task_id in rows}
        assert actions == {
            "plain": "fail", "later": "reschedule", "backoff": "retry", "raising": "fail", "hanging": "fail",
        }  # fmt: skip
        later = rows[sent["later"]]
        assert (later["next_retry_at"] - later["noticed_at"]).total_seconds() == pytest.approx(1, abs=0.001)
        left = scenario.task(sent["left"])
        assert (left["state"], left["left_claim_id"]) == ("RUNNING", left["claim_id"])
        (answer,) = asked(scenario, sent["plain"])
        assert (answer["reason"], answer["previous"]) == ("worker_crashed", holder["id"])
        asynchronous = asked(scenario, sent["later"])[0]
        assert answer["arguments"] == asynchronous["arguments"] == {"gate": "gate"}, "a hook can ask for them"
        assert answer["sweeping"] != holder["id"]
        assert answer["pid"] in [each.pid for each in psutil.Process(other.pid).children()]
        scenario.until(lambda: scenario.effects("recovered"), within=5, what="the pass is told")
        told = [line["task"] for line in scenario.effects("interrupted")]
        assert sorted(told) == sorted(str(task_id) for name, task_id in sent.items() if name != "left")
        passes = scenario.effects("recovered")
        assert sum(line["count"] for line in passes) == len(sent) - 1
        assert all(line["workers"] == [holder["id"]] for line in passes)
        scenario.until(lambda: len(asked(scenario, sent["left"])) >= 2, within=10, what="offered again")
        log = other.output()
        assert "hook_failed hook=on_recovery" in log
        assert "ValueError: no idea" in log
        assert "did not answer within 1s" in log
        scenario.query(
            "update {schema}.tasks set cancel_requested_at = now() where id = %s returning id", left["id"]
        )
        scenario.until(scenario.state_is(sent["left"], "CANCELLED"), within=10, what="a cancel ends it")

    @pytest.mark.long
    def test_a_hook_that_kills_its_process_harms_only_that_process(
        self, scenario: Scenario, hooked: ModuleType
    ) -> None:
        doomed, other = trees(scenario)
        task_id = hooked.murder.send("gate").id
        scenario.until(scenario.started(task_id), within=20, what="it runs")
        survivor(scenario, other)
        before = {row["id"] for row in scenario.workers(other)}
        doomed.kill()
        scenario.until(scenario.state_is(task_id, "FAILED"), within=8 * SLACK, what="settled as by default")
        assert len(asked(scenario, task_id)) == 1, "not asked again elsewhere"
        scenario.until(
            lambda: scenario.workers(other) and not before & {row["id"] for row in scenario.workers(other)},
            within=10,
            what="the process is replaced",
        )
        assert "died while it was asked" in other.output()
        assert other.stop() == 0
        (lost,) = [
            line for line in other.output().splitlines() if "hook_news_lost hook=on_interrupted" in line
        ]
        assert f"task_ids={task_id}" in lost, "hooks rested until the end: what was not told is named"
        assert "was not called: hooks rest, and the supervisor is shutting down" in lost


class TestWorkerProcessDies:
    @pytest.mark.long
    def test_a_supervisor_runs_hooks_in_the_replacement_of_its_dead_worker(
        self, scenario: Scenario, hooked: ModuleType
    ) -> None:  # F7
        tree = scenario.ready_tree(program="hooked", recovery=FAST)
        task_id = hooked.later.send("gate").id
        scenario.until(scenario.started(task_id), within=20, what="it runs")
        (row,) = scenario.workers(tree)
        psutil.Process(row["pid"]).kill()
        scenario.until(
            lambda: scenario.recoveries(task_id), within=5 * SLACK, what="recovered by the hook's answer"
        )
        (recovery,) = scenario.recoveries(task_id)
        assert (recovery["action"], recovery["noticed_by"]) == ("reschedule", "child_exit")
        scenario.open_gate("gate")
        scenario.until(scenario.state_is(task_id, "COMPLETED"), within=20, what="runs again in its time")
        assert scenario.effects("interrupted", task_id)


class TestTaskProcessDies:
    SETTINGS: Mapping[str, Any] = {
        "process_concurrency": 1,
        "thread_concurrency": 1,
        "prefetch": 2,
        "grace": 2.0,
    }

    def left_by_their_hook(self, scenario: Scenario, hooked: ModuleType, *, count: int) -> list[UUID]:
        """Kill the process of several tasks, one after another, each of which its hook leaves; return their ids."""
        left = []
        for _ in range(count):
            task_id = hooked.left_alone.send("gate").id
            scenario.until(scenario.started(task_id), within=20, what="it runs")
            (start,) = scenario.effects("start", task_id)
            psutil.Process(start["pid"]).kill()
            scenario.until(
                lambda task_id=task_id: scenario.task(task_id)["left_at"],
                within=5 * SLACK,
                what="its hook leaves it",
            )
            left.append(task_id)
        return left

    @pytest.mark.long
    def test_a_task_that_its_hook_leaves_occupies_no_slot_and_no_worker(
        self, scenario: Scenario, hooked: ModuleType
    ) -> None:
        # More than twice the slots: that many unsettled outcomes would block new starts.
        tree = scenario.ready_tree(program="hooked", recovery=FAST, worker=self.SETTINGS)
        left = self.left_by_their_hook(scenario, hooked, count=3)
        sent = [hooked.brief.send().id for _ in range(4)]
        for task_id in sent:
            scenario.until(scenario.state_is(task_id, "COMPLETED"), within=20, what="the lane goes on")
        began = time.monotonic()
        assert tree.stop() == 0
        assert time.monotonic() - began < 2 * SLACK
        assert "grace_exceeded" not in tree.output()
        for task_id in left:
            row = scenario.task(task_id)
            assert (row["state"], row["left_claim_id"]) == ("RUNNING", row["claim_id"]), "as the hook said"
        assert scenario.recoveries() == []
        assert [row["ended_how"] for row in scenario.query("select ended_how from {schema}.workers")] == [
            "left"
        ]
        scenario.start_tree(program="hooked", recovery=FAST, worker=self.SETTINGS)
        before = len(asked(scenario, left[0]))
        scenario.until(
            lambda: len(asked(scenario, left[0])) > before, within=20, what="a sweep offers it again"
        )
        scenario.query(
            "update {schema}.tasks set cancel_requested_at = now() where state = 'RUNNING' returning id"
        )
        for task_id in left:
            scenario.until(scenario.state_is(task_id, "CANCELLED"), within=10, what="a cancel ends it")

    @pytest.mark.long
    def test_a_retired_process_does_not_wait_for_a_task_that_its_hook_leaves(
        self, scenario: Scenario, hooked: ModuleType
    ) -> None:
        settings = {**self.SETTINGS, "max_tasks_per_process": 1}
        tree = scenario.ready_tree(program="hooked", recovery=FAST, worker=settings)
        (first,) = scenario.workers(tree)
        (task_id,) = self.left_by_their_hook(scenario, hooked, count=1)
        scenario.open_gate("gate")
        hooked.plain.send("gate")  # a task of the worker process itself, which then reaches its maximum
        scenario.until(
            lambda: first["id"] not in {row["id"] for row in scenario.workers(tree)},
            within=20,
            what="it leaves",
        )
        before = len(asked(scenario, task_id))
        scenario.until(
            lambda: len(asked(scenario, task_id)) > before, within=20, what="a sweep offers it again"
        )
        assert scenario.state_is(task_id, "RUNNING")()
        assert scenario.recoveries() == []
