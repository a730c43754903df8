"""The commands that only look say what is so now: after the death of every tree, and while one process stands still."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import ModuleType
from uuid import UUID

import psutil
import pytest

from everbeat import App
from everbeat.cli.examination import Examination
from everbeat.domain.diagnosis import Check, Verdict
from everbeat.domain.explanation import Reason
from tests.stories.stage import SLACK, Stage, Tree

pytestmark = pytest.mark.story


@pytest.fixture
def app(stage: Stage) -> Iterator[App]:
    """An operator's app, with the default settings."""
    opened = App(stage.url, schema=stage.schema, auto_migrate=False)
    yield opened
    opened.close()


def examine(app: App) -> dict[str, Check]:
    return {check.code: check for check in Examination(app, long_transaction_s=300).checks()}


def reasons_of(app: App, task_id: UUID) -> dict[str, Reason]:
    return {reason.code: reason for reason in app.explain(task_id).reasons}


def lost_workers(app: App) -> int:
    return sum(worker.session_lost for worker in app.list_active_workers())


def a_running_task(stage: Stage, deeds: ModuleType, tree: Tree) -> UUID:
    task = deeds.wait_for.send("never")
    stage.until(stage.started(task.id), within=20, what="it runs", tree=tree)
    assert isinstance(task.id, UUID)
    return task.id


class TestEveryTreeIsKilled:
    def test_no_look_calls_it_healthy_at_the_default_settings(
        self, stage: Stage, deeds: ModuleType, app: App
    ) -> None:  # E4
        trees = [stage.ready_tree(worker={"async_concurrency": 1, "prefetch": 0}) for _ in range(2)]
        running = a_running_task(stage, deeds, trees[0])
        stage.until(
            lambda: all(each.session_held for each in app.list_supervisors()),
            within=10,
            what="both hold their session locks",
        )
        assert (examine(app)["TREES"].verdict, lost_workers(app)) == (Verdict.OK, 0)
        trees[0].kill()
        trees[1].kill()
        pending = deeds.quick.send().id
        stage.until(lambda: lost_workers(app) == 2, within=1 * SLACK, what="no session is left")
        waits, held = reasons_of(app, pending), reasons_of(app, running)
        assert list(waits) == ["NO_WORKER"]
        assert "has no session any more of the 2 workers that beat last" in waits["NO_WORKER"].text
        assert list(held) == ["HOLDER_WITHOUT_SESSION", "NOBODY_SWEEPS", "RUNNING"]
        assert held["HOLDER_WITHOUT_SESSION"].command == "everbeat worker MODULE:APP"
        found = examine(app)
        assert [found[code].verdict for code in ("WORKERS", "TREES", "SWEEPER")] == [Verdict.FAIL] * 3
        assert "2 of 2 trees without a session" in found["TREES"].text
        assert f"pid {trees[0].pid} on " in found["TREES"].text
        assert found["TREES"].fix == "start a worker, which recovers them: everbeat worker MODULE:APP."

    def test_a_tree_that_lives_makes_it_a_warning(
        self, stage: Stage, deeds: ModuleType, app: App
    ) -> None:  # E4
        doomed = stage.ready_tree(worker={"async_concurrency": 1, "prefetch": 0})
        running = a_running_task(stage, deeds, doomed)
        observer = stage.ready_tree(recovery={"detect_session_loss": False}, worker={"async_concurrency": 1})
        doomed.kill()
        stage.until(lambda: lost_workers(app) == 1, within=1 * SLACK, what="no session is left")
        held = reasons_of(app, running)
        assert list(held) == ["HOLDER_WITHOUT_SESSION", "RUNNING"]
        assert "a live supervisor recovers it" in held["HOLDER_WITHOUT_SESSION"].text
        assert (examine(app)["TREES"].verdict, examine(app)["WORKERS"].verdict) == (Verdict.WARN, Verdict.OK)
        assert observer.process.poll() is None

    def test_after_a_restart_of_the_server_nothing_is_concluded_from_missing_sessions(
        self, stage: Stage, app: App
    ) -> None:  # E4
        stage.ready_tree()
        stage.until(
            lambda: all(each.session_held for each in app.list_supervisors()),
            within=10,
            what="it holds its lock",
        )
        stage.trees[0].kill()
        stage.query("update {schema}.supervisors set session_server = 'before' returning id")
        assert lost_workers(app) == 0


class TestOneProcessIsStopped:
    def test_doctor_explain_and_the_log_name_it_and_say_when_it_responds_again(
        self, stage: Stage, deeds: ModuleType, app: App
    ) -> None:  # E4
        tree = stage.ready_tree(
            recovery={"worker_state_snapshot_interval_ms": 1_000},
            worker={"async_concurrency": 1, "prefetch": 1},
        )
        running = a_running_task(stage, deeds, tree)
        claimed = deeds.wait_for.send("never").id
        stage.until(stage.state_is(claimed, "CLAIMED"), within=20, what="the next one is claimed")
        (row,) = stage.workers(tree)
        assert examine(app)["UNRESPONSIVE"].verdict is Verdict.OK
        process = psutil.Process(row["pid"])
        process.send_signal(signal.SIGSTOP)
        stage.until(
            lambda: examine(app)["UNRESPONSIVE"].verdict is Verdict.WARN,
            within=15 * SLACK,
            what="doctor sees it",
        )
        check = examine(app)["UNRESPONSIVE"]
        assert f"{row['id']} (pid {row['pid']} on " in check.text
        assert "with 2 tasks" in check.text
        assert f"everbeat workers release {row['id']}" in (check.fix or "")
        for task, state in ((claimed, "CLAIMED"), (running, "RUNNING")):
            found = reasons_of(app, task)
            assert list(found) == ["HOLDER_UNRESPONSIVE", state]
            assert "had not responded for " in found["HOLDER_UNRESPONSIVE"].text
            assert found["HOLDER_UNRESPONSIVE"].command == f"everbeat workers release {row['id']}"
        assert "had claimed it, and its code had not started" in reasons_of(app, claimed)["CLAIMED"].text
        assert tree.output().count("worker_unresponsive") == 1
        assert f"pid={row['pid']}" in next(
            line for line in tree.output().splitlines() if "worker_unresponsive" in line
        )
        process.send_signal(signal.SIGCONT)
        stage.until(lambda: "worker_responds" in tree.output(), within=5 * SLACK, what="it responds again")
        stage.until(
            lambda: examine(app)["UNRESPONSIVE"].verdict is Verdict.OK,
            within=5 * SLACK,
            what="doctor sees that too",
        )
        assert "HOLDER_UNRESPONSIVE" not in reasons_of(app, running)
