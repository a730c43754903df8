"""What an app decides about the tasks of dead workers. The supervisor imports no user code: a worker process answers for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any
from uuid import UUID

import psutil
import pytest

from tests.stories.stage import FAST, SLACK, Stage, Tree, program_of

pytestmark = pytest.mark.story


@pytest.fixture
def hooked(stage: Stage) -> Iterator[ModuleType]:
    """The program as a sender imports it."""
    with program_of(stage, "hooked") as program:
        yield program


def trees(stage: Stage, **recovery: Any) -> tuple[Tree, Tree]:
    """One tree that will be killed, one that lives."""
    settings = FAST | {"hook_timeout_ms": 1_000} | recovery
    doomed = stage.ready_tree(program="hooked", recovery=settings)
    return doomed, stage.start_tree(program="hooked", recovery=settings, options=("--queues", "nothing"))


def survivor(stage: Stage, tree: Tree) -> None:
    stage.until(lambda: stage.workers(tree), within=30, what="the other tree is ready", tree=tree)


def asked(stage: Stage, task_id: Any) -> list[dict[str, Any]]:
    return stage.effects("asked", task_id)


class TestWholeTreeDies:
    def test_each_of_its_tasks_gets_the_answer_of_its_hook(
        self, stage: Stage, hooked: ModuleType
    ) -> None:  # F7
        doomed, other = trees(stage)
        names = ("plain", "later", "backoff", "left", "raising", "hanging")
        sent = {name: getattr(hooked, name).send("gate").id for name in names}
        stage.until(lambda: len(stage.effects("start")) == len(sent), within=20, what="all run")
        survivor(stage, other)
        (holder,) = stage.workers(doomed)
        doomed.kill()
        stage.until(
            lambda: len(stage.recoveries()) == len(sent) - 1, within=5 * SLACK, what="all but the one left"
        )
        rows = {row["task_id"]: row for row in stage.recoveries()}
        actions = {name: rows[task_id]["action"] for name, task_id in sent.items() if task_id in rows}
        assert actions == {
            "plain": "fail", "later": "reschedule", "backoff": "retry", "raising": "fail", "hanging": "fail",
        }  # fmt: skip
        later = rows[sent["later"]]
        assert (later["next_retry_at"] - later["noticed_at"]).total_seconds() == pytest.approx(1, abs=0.001)
        left = stage.task(sent["left"])
        assert (left["state"], left["left_claim_id"]) == ("RUNNING", left["claim_id"])
        (answer,) = asked(stage, sent["plain"])
        assert (answer["reason"], answer["previous"]) == ("worker_crashed", holder["id"])
        assert answer["sweeping"] != holder["id"]
        assert answer["pid"] in [each.pid for each in psutil.Process(other.pid).children()]
        stage.until(lambda: stage.effects("recovered"), within=5, what="the pass is told")
        told = [line["task"] for line in stage.effects("interrupted")]
        assert sorted(told) == sorted(str(task_id) for name, task_id in sent.items() if name != "left")
        passes = stage.effects("recovered")
        assert sum(line["count"] for line in passes) == len(sent) - 1
        assert all(line["workers"] == [holder["id"]] for line in passes)
        stage.until(lambda: len(asked(stage, sent["left"])) >= 2, within=10, what="offered again")
        log = other.output()
        assert "hook_failed hook=on_recovery" in log
        assert "ValueError: no idea" in log
        assert "did not answer within 1s" in log
        stage.query(
            "update {schema}.tasks set cancel_requested_at = now() where id = %s returning id", left["id"]
        )
        stage.until(stage.state_is(sent["left"], "CANCELLED"), within=10, what="a cancel ends it")

    def test_a_hook_that_kills_the_process_it_is_asked_in_harms_that_one_only(
        self, stage: Stage, hooked: ModuleType
    ) -> None:
        doomed, other = trees(stage)
        task_id = hooked.murder.send("gate").id
        stage.until(stage.started(task_id), within=20, what="it runs")
        survivor(stage, other)
        before = {row["id"] for row in stage.workers(other)}
        doomed.kill()
        stage.until(stage.state_is(task_id, "FAILED"), within=8 * SLACK, what="settled as by default")
        assert len(asked(stage, task_id)) == 1, "not asked again elsewhere"
        stage.until(
            lambda: stage.workers(other) and not before & {row["id"] for row in stage.workers(other)},
            within=10,
            what="the process is replaced",
        )
        assert "died while it was asked" in other.output()
        assert other.stop() == 0
        (lost,) = [
            line for line in other.output().splitlines() if "hook_news_lost hook=on_interrupted" in line
        ]
        assert f"task_ids={task_id}" in lost, "hooks rested until the end: what was not told is named"
        assert "was not told: hooks rest, and the supervisor ends" in lost


class TestWorkerProcessDies:
    def test_its_own_supervisor_asks_the_replacement(self, stage: Stage, hooked: ModuleType) -> None:  # F7
        tree = stage.ready_tree(program="hooked", recovery=FAST)
        task_id = hooked.later.send("gate").id
        stage.until(stage.started(task_id), within=20, what="it runs")
        (row,) = stage.workers(tree)
        psutil.Process(row["pid"]).kill()
        stage.until(
            lambda: stage.recoveries(task_id), within=5 * SLACK, what="recovered by the hook's answer"
        )
        (recovery,) = stage.recoveries(task_id)
        assert (recovery["action"], recovery["noticed_by"]) == ("reschedule", "child_exit")
        stage.open_gate("gate")
        stage.until(stage.state_is(task_id, "COMPLETED"), within=20, what="runs again in its time")
        assert stage.effects("interrupted", task_id)


class TestTaskProcessDies:
    SETTINGS: Mapping[str, Any] = {
        "process_concurrency": 1,
        "thread_concurrency": 1,
        "prefetch": 2,
        "grace": 2.0,
    }

    def left_by_their_hook(self, stage: Stage, hooked: ModuleType, *, count: int) -> list[UUID]:
        """Tasks whose process was killed, one after another, each left by its hook."""
        left = []
        for _ in range(count):
            task_id = hooked.left_alone.send("gate").id
            stage.until(stage.started(task_id), within=20, what="it runs")
            (start,) = stage.effects("start", task_id)
            psutil.Process(start["pid"]).kill()
            stage.until(lambda: stage.task(task_id)["left_at"], within=5 * SLACK, what="its hook leaves it")  # noqa: B023
            left.append(task_id)
        return left

    def test_what_its_hook_leaves_keeps_no_slot_and_no_worker(self, stage: Stage, hooked: ModuleType) -> None:
        # More than twice its slots: that many outcomes on their way would be a reason to begin nothing.
        tree = stage.ready_tree(program="hooked", recovery=FAST, worker=self.SETTINGS)
        left = self.left_by_their_hook(stage, hooked, count=3)
        sent = [hooked.brief.send().id for _ in range(4)]
        for task_id in sent:
            stage.until(stage.state_is(task_id, "COMPLETED"), within=20, what="the lane goes on")
        began = time.monotonic()
        assert tree.stop() == 0
        assert time.monotonic() - began < 2 * SLACK
        assert "grace_exceeded" not in tree.output()
        for task_id in left:
            row = stage.task(task_id)
            assert (row["state"], row["left_claim_id"]) == ("RUNNING", row["claim_id"]), "as the hook said"
        assert stage.recoveries() == []
        assert [row["ended_how"] for row in stage.query("select ended_how from {schema}.workers")] == ["left"]
        stage.start_tree(program="hooked", recovery=FAST, worker=self.SETTINGS)
        before = len(asked(stage, left[0]))
        stage.until(lambda: len(asked(stage, left[0])) > before, within=20, what="a sweep offers it again")
        stage.query(
            "update {schema}.tasks set cancel_requested_at = now() where state = 'RUNNING' returning id"
        )
        for task_id in left:
            stage.until(stage.state_is(task_id, "CANCELLED"), within=10, what="a cancel ends it")

    def test_what_its_hook_leaves_is_not_waited_for_by_a_retired_process(
        self, stage: Stage, hooked: ModuleType
    ) -> None:
        settings = {**self.SETTINGS, "max_tasks_per_process": 1}
        tree = stage.ready_tree(program="hooked", recovery=FAST, worker=settings)
        (first,) = stage.workers(tree)
        (task_id,) = self.left_by_their_hook(stage, hooked, count=1)
        stage.open_gate("gate")
        hooked.plain.send("gate")  # a task of the worker process itself, which then has done enough
        stage.until(
            lambda: first["id"] not in {row["id"] for row in stage.workers(tree)}, within=20, what="it leaves"
        )
        before = len(asked(stage, task_id))
        stage.until(lambda: len(asked(stage, task_id)) > before, within=20, what="a sweep offers it again")
        assert stage.state_is(task_id, "RUNNING")()
        assert stage.recoveries() == []
