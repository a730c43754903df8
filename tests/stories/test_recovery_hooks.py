"""What an app decides about the tasks of dead workers. The supervisor imports no user code: a worker process answers for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.stories.stage import FAST, SLACK, Stage, Tree

pytestmark = pytest.mark.story


@pytest.fixture
def hooked(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program as a sender imports it."""
    for name, value in stage.environment(recovery={}, worker={}).items():
        if name.startswith("STORY_"):
            monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "programs"))
    sys.modules.pop("hooked", None)
    import hooked as program  # type: ignore[import-not-found]  # the environment must be there before

    yield program
    program.app.close()
    sys.modules.pop("hooked", None)


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
        told = [line["task"] for line in stage.effects("interrupted")]
        stage.until(lambda: stage.effects("recovered"), within=5, what="the pass is told")
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
