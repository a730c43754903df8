"""The reading commands report the current state: after the death of every tree, and while one process is stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import ModuleType
from uuid import UUID

import psutil
import pytest

from everbeat import App
from everbeat.domain.doctor.findings import Check, CheckVerdict
from everbeat.domain.explain.reasons import Reason
from everbeat.examination import Examination
from tests.stories.scenario import SLACK, Scenario, Tree
from tests.stories.test_probes import Probed, free_port

pytestmark = pytest.mark.story


@pytest.fixture
def app(scenario: Scenario) -> Iterator[App]:
    """An operator's app with the default settings."""
    opened = App(scenario.url, schema=scenario.schema, auto_migrate=False)
    yield opened
    opened.close()


def examine(app: App) -> dict[str, Check]:
    return {check.code: check for check in Examination(app, long_transaction_s=300).checks()}


def reasons_of(app: App, task_id: UUID) -> dict[str, Reason]:
    return {reason.code: reason for reason in app.explain(task_id).reasons}


def lost_workers(app: App) -> int:
    return sum(worker.session_lost for worker in app.list_active_workers())


def a_running_task(scenario: Scenario, sample_tasks: ModuleType, tree: Tree) -> UUID:
    task = sample_tasks.wait_for.send("never")
    scenario.until(scenario.started(task.id), within=20, what="it runs", tree=tree)
    assert isinstance(task.id, UUID)
    return task.id


class TestEveryTreeIsKilled:
    @pytest.mark.long
    def test_explain_doctor_and_workers_report_that_every_tree_is_dead(
        self, scenario: Scenario, sample_tasks: ModuleType, app: App
    ) -> None:  # E4
        trees = [scenario.ready_tree(worker={"async_concurrency": 1, "prefetch": 0}) for _ in range(2)]
        running = a_running_task(scenario, sample_tasks, trees[0])
        scenario.until(
            lambda: all(each.session_held for each in app.list_supervisors()),
            within=10,
            what="both hold their session locks",
        )
        assert (examine(app)["TREES"].verdict, lost_workers(app)) == (CheckVerdict.OK, 0)
        trees[0].kill()
        trees[1].kill()
        pending = sample_tasks.quick.send().id
        scenario.until(lambda: lost_workers(app) == 2, within=1 * SLACK, what="no session is left")
        waits, held = reasons_of(app, pending), reasons_of(app, running)
        assert list(waits) == ["NO_WORKER"]
        assert (
            "the trees of the 2 workers that beat last have no session in PostgreSQL"
            in waits["NO_WORKER"].text
        )
        assert list(held) == ["HOLDER_WITHOUT_SESSION", "NOBODY_SWEEPS", "RUNNING"]
        assert held["HOLDER_WITHOUT_SESSION"].command == "everbeat worker MODULE:APP"
        found = examine(app)
        assert [found[code].verdict for code in ("WORKERS", "TREES", "SWEEPER")] == [CheckVerdict.FAIL] * 3
        assert "without a session in PostgreSQL, so dead or cut off: 2 of 2 trees" in found["TREES"].text
        assert f"pid {trees[0].pid} on " in found["TREES"].text
        assert found["TREES"].fix == "start a worker, which recovers them: everbeat worker MODULE:APP."

    @pytest.mark.long
    def test_a_dead_tree_beside_a_live_one_is_a_warning(
        self, scenario: Scenario, sample_tasks: ModuleType, app: App
    ) -> None:  # E4
        doomed = scenario.ready_tree(worker={"async_concurrency": 1, "prefetch": 0})
        running = a_running_task(scenario, sample_tasks, doomed)
        observer = scenario.ready_tree(
            recovery={"detect_session_loss": False}, worker={"async_concurrency": 1}
        )
        doomed.kill()
        scenario.until(lambda: lost_workers(app) == 1, within=1 * SLACK, what="no session is left")
        held = reasons_of(app, running)
        assert list(held) == ["HOLDER_WITHOUT_SESSION", "RUNNING"]
        assert "a live supervisor recovers the task" in held["HOLDER_WITHOUT_SESSION"].text
        assert (examine(app)["TREES"].verdict, examine(app)["WORKERS"].verdict) == (
            CheckVerdict.WARN,
            CheckVerdict.OK,
        )
        assert observer.process.poll() is None

    def test_missing_sessions_prove_nothing_after_a_restart_of_the_server(
        self, scenario: Scenario, app: App
    ) -> None:  # E4
        scenario.ready_tree()
        scenario.until(
            lambda: all(each.session_held for each in app.list_supervisors()),
            within=10,
            what="it holds its lock",
        )
        scenario.trees[0].kill()
        scenario.query("update {schema}.supervisors set session_server = 'before' returning id")
        assert lost_workers(app) == 0


class TestOneProcessIsStopped:
    @pytest.mark.long
    def test_the_doctor_explain_and_the_log_name_a_stopped_worker_process(
        self, scenario: Scenario, sample_tasks: ModuleType, app: App
    ) -> None:  # E4
        scenario.hold_processes()
        port = free_port()
        tree = scenario.ready_tree(
            recovery={"worker_state_snapshot_interval_ms": 1_000}, options=("--probe", f"127.0.0.1:{port}")
        )
        probed = Probed(scenario, tree, port)
        probed.until("/readyz", 200, "1 of 1")
        running = a_running_task(scenario, sample_tasks, tree)
        claimed = sample_tasks.wait_in_process_on_crash.send("never").id
        scenario.until(scenario.state_is(claimed, "CLAIMED"), within=20, what="the next one is claimed")
        (row,) = scenario.workers(tree)
        assert examine(app)["UNRESPONSIVE"].verdict is CheckVerdict.OK
        process = psutil.Process(row["pid"])
        process.send_signal(signal.SIGSTOP)
        scenario.until(
            lambda: examine(app)["UNRESPONSIVE"].verdict is CheckVerdict.WARN,
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
        probed.until("/readyz", 503, "None of 1 worker processes", within=5 * SLACK)
        assert probed.ask("/livez")[0] == 200
        assert tree.output().count("worker_unresponsive") == 1
        assert f"pid={row['pid']}" in next(
            line for line in tree.output().splitlines() if "worker_unresponsive" in line
        )
        process.send_signal(signal.SIGCONT)
        scenario.until_logged(tree, "worker_responds", within=5 * SLACK)
        probed.until("/readyz", 200, "1 of 1")
        scenario.until(
            lambda: examine(app)["UNRESPONSIVE"].verdict is CheckVerdict.OK,
            within=5 * SLACK,
            what="doctor sees that too",
        )
        assert "HOLDER_UNRESPONSIVE" not in reasons_of(app, running)


_STOPPED_S = 5.0


class TestOneSupervisorIsStopped:
    @pytest.mark.long
    def test_a_pause_of_the_supervisor_is_not_recorded_as_the_lag_of_its_workers(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E4
        tree = scenario.ready_tree(recovery={"worker_state_snapshot_interval_ms": 1_000})
        a_running_task(scenario, sample_tasks, tree)
        snapshots = "select loop_lag_ms from {schema}.worker_states"
        scenario.until(lambda: scenario.query(snapshots), within=5 * SLACK, what="the first snapshot")
        supervisor = psutil.Process(tree.pid)
        for _ in range(2):
            supervisor.send_signal(signal.SIGSTOP)
            # Longer than the interval, so a snapshot is overdue when the supervisor continues.
            time.sleep(_STOPPED_S)
            supervisor.send_signal(signal.SIGCONT)
            before = len(scenario.query(snapshots))
            scenario.until(
                lambda before=before: len(scenario.query(snapshots)) >= before + 2,
                within=5 * SLACK,
                what="two more",
            )
        assert max(row["loop_lag_ms"] for row in scenario.query(snapshots)) < _STOPPED_S * 600, (
            "a busy machine adds a lag of its own"
        )
