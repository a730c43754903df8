"""Workers die, freeze and are cut off; their tasks survive. Every death here is a real signal to a real process."""

from __future__ import annotations

import signal
import time
from types import ModuleType
from uuid import UUID

import psutil
import pytest

from everbeat import App
from tests.stories.scenario import BY_AGE, FAST, SLACK, Scenario, Tree

pytestmark = pytest.mark.story


def worker_of(scenario: Scenario, tree: Tree, task_id: UUID) -> psutil.Process:
    """Return the worker process that holds a task."""
    holder = scenario.task(task_id)["claimed_by_worker_id"]
    (row,) = [row for row in scenario.workers(tree) if row["id"] == holder]
    return psutil.Process(row["pid"])


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TestKilledWorkerProcess:
    def test_the_tasks_of_a_killed_worker_process_are_settled_within_a_second(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E4
        tree = scenario.ready_tree(worker={"processes": 2, "async_concurrency": 1, "prefetch": 0})
        doomed, sibling = sample_tasks.wait_for_on_crash.send("a"), sample_tasks.wait_for_on_crash.send("b")
        scenario.until(lambda: len(scenario.effects("start")) == 2, within=20, what="both run")
        before = {row["id"] for row in scenario.workers(tree)}
        worker_of(scenario, tree, doomed.id).kill()
        took = scenario.until(
            lambda: scenario.recoveries(doomed.id),
            within=1 * SLACK,
            what="settled after the kill of a worker process",
        )
        assert took <= 1 * SLACK
        (recovery,) = scenario.recoveries(doomed.id)
        assert (recovery["noticed_by"], recovery["was"], recovery["action"]) == (
            "child_exit",
            "RUNNING",
            "retry",
        )
        assert "SIGKILL" in recovery["cause"]
        scenario.until(
            lambda: len({row["id"] for row in scenario.workers(tree)} - before) == 1,
            within=10,
            what="the process is replaced",
        )
        scenario.until(scenario.started(doomed.id, 2), within=10, what="runs again")
        scenario.open_gate("a")
        scenario.open_gate("b")
        assert (doomed.result(timeout=20), sibling.result(timeout=20)) == ("done", "done")
        assert scenario.recoveries(sibling.id) == []
        assert len(scenario.effects("start", sibling.id)) == 1

    @pytest.mark.long
    def test_claimed_tasks_of_a_killed_worker_process_are_requeued_without_charge(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E1
        scenario.hold_processes()
        tree = scenario.ready_tree(worker={"process_concurrency": 3})
        first = sample_tasks.wait_for_on_crash.send("a")
        scenario.until(scenario.started(first.id), within=20, what="the first runs")
        waiting = [sample_tasks.quick_in_process.send(n) for n in range(3)]
        scenario.until(
            lambda: scenario.states().get("CLAIMED") == 3, within=10, what="three wait CLAIMED for processes"
        )
        worker_of(scenario, tree, first.id).kill()
        scenario.release_processes()
        scenario.open_gate("a")
        for handle in waiting:
            handle.result(timeout=30)
            row = scenario.task(handle.id)
            assert (row["retry_count"], row["crash_count"], row["loss_count"], row["attempt"]) == (0, 0, 0, 1)
            (recovery,) = scenario.recoveries(handle.id)
            assert (recovery["was"], recovery["action"]) == ("CLAIMED", "requeue")
            assert len(scenario.effects("start", handle.id)) == 1


class TestKilledTree:
    @pytest.mark.long
    def test_another_tree_settles_the_tasks_of_a_killed_tree_within_three_seconds(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E4
        doomed_tree = scenario.ready_tree()
        task = sample_tasks.wait_for_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        scenario.ready_tree()
        time.sleep(10.5)  # an observer trusts sessions only after it and the server have been up for 10 s
        doomed_tree.kill()
        scenario.until(
            lambda: scenario.recoveries(task.id), within=3 * SLACK, what="settled after the kill of a tree"
        )
        (recovery,) = scenario.recoveries(task.id)
        assert (recovery["noticed_by"], recovery["was"], recovery["action"]) == (
            "session",
            "RUNNING",
            "retry",
        )
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert len(scenario.effects("start", task.id)) == 2

    @pytest.mark.long
    def test_claimed_tasks_of_a_killed_tree_are_requeued_by_age(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E1
        settings = {**FAST, **BY_AGE}
        scenario.hold_processes()
        doomed_tree = scenario.ready_tree(recovery=settings, worker={"process_concurrency": 2})
        first = sample_tasks.wait_for.send("a")
        scenario.until(scenario.started(first.id), within=20, what="the first runs")
        waiting = [sample_tasks.quick_in_process.send(n) for n in range(2)]
        scenario.until(lambda: scenario.states().get("CLAIMED") == 2, within=10, what="two wait CLAIMED")
        scenario.ready_tree(recovery=settings)
        time.sleep(1.5)  # the observer has checked at least once
        doomed_tree.kill()
        scenario.release_processes()
        scenario.until(lambda: len(scenario.recoveries()) == 3, within=4 * SLACK, what="all recovered by age")
        for handle in waiting:
            handle.result(timeout=20)
            row = scenario.task(handle.id)
            assert (row["retry_count"], row["loss_count"], row["crash_count"]) == (0, 0, 0)
            assert [one["noticed_by"] for one in scenario.recoveries(handle.id)] == ["age"]
            assert len(scenario.effects("start", handle.id)) == 1
        assert scenario.task(first.id)["state"] == "FAILED"

    @pytest.mark.long
    def test_the_workers_of_a_killed_supervisor_die_with_it(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E5
        tree = scenario.ready_tree(worker={"processes": 2})
        task = sample_tasks.wait_in_process_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        scenario.ready_tree()
        time.sleep(10.5)  # an observer trusts sessions only after it and the server have been up for 10 s
        everybody = tree.processes()
        assert len(everybody) >= 4
        tree.process.kill()
        tree.process.wait()
        scenario.until(
            lambda: not any(is_alive(one) for one in everybody), within=2 * SLACK, what="no process left"
        )
        scenario.until(
            lambda: scenario.recoveries(task.id),
            within=3 * SLACK,
            what="recovered after the kill of the supervisor",
        )
        scenario.open_gate("a")
        assert task.result(timeout=30) == "done"


class TestPolicies:
    def test_a_task_without_a_policy_fails_with_a_death_certificate(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E2
        tree = scenario.ready_tree()
        task = sample_tasks.wait_for.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        victim = worker_of(scenario, tree, task.id)
        victim.kill()
        failed = task.outcome(timeout=20)
        assert failed.error.code == "WORKER_CRASHED"
        certificate = failed.error.data
        for fact in ("worker_id", "hostname", "pid", "cause", "started_at", "last_beat", "detected_at"):
            assert certificate[fact], fact
        assert certificate["pid"] == victim.pid
        (attempt,) = scenario.attempts(task.id)
        assert attempt["will_retry"] is False

    @pytest.mark.long
    def test_a_task_with_a_retry_policy_runs_again_until_its_retries_are_used_up(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E3
        tree = scenario.ready_tree()
        task = sample_tasks.crash_twice.send("never")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        worker_of(scenario, tree, task.id).kill()
        scenario.until(
            lambda: scenario.task(task.id)["retry_count"] == 1, within=10, what="it is scheduled again"
        )
        row = scenario.task(task.id)
        assert row["next_retry_at"] is not None
        scenario.until(scenario.started(task.id, 2), within=10, what="it runs again")
        worker_of(scenario, tree, task.id).kill()
        failed = task.outcome(timeout=20)
        assert failed.error.code == "WORKER_CRASHED"
        assert [one["will_retry"] for one in scenario.attempts(task.id)] == [True, False]

    def test_a_task_sent_by_name_is_recovered_by_the_policy_of_its_function(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E12
        tree = scenario.ready_tree()
        stranger = App(scenario.url, schema=scenario.schema)
        task = stranger.send_by_name("wait_for_on_crash", {"gate_name": "a"})
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        worker_of(scenario, tree, task.id).kill()
        scenario.until(scenario.started(task.id, 2), within=10, what="it runs again")
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"
        stranger.close()

    def test_a_poison_task_is_stopped_after_max_crashes_and_other_tasks_complete(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E8
        scenario.ready_tree(worker={"process_concurrency": 2})
        poisons = [sample_tasks.poison.send("exit"), sample_tasks.poison.send("signal")]
        others = sample_tasks.app.send_many([sample_tasks.quick.call(n) for n in range(200)])
        for handle, cause in zip(poisons, ("139", "SIGSEGV"), strict=True):
            failed = handle.outcome(timeout=60)
            assert failed.error.code == "WORKER_CRASHED"
            assert failed.error.data["poison"] is True
            assert len(scenario.effects("start", handle.id)) == 3
            attempts = scenario.attempts(handle.id)
            assert [one["outcome"] for one in attempts] == ["CRASHED"] * 3
            assert all(cause in one["cause"] for one in scenario.recoveries(handle.id))
            assert scenario.task(handle.id)["crash_count"] == 3
        assert [one.result(timeout=60) for one in others] == list(range(200))
        assert all(one["worker_id"] is not None for one in scenario.recoveries())


class TestZombie:
    def test_a_thawed_worker_changes_nothing_and_its_code_is_asked_to_stop(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E6
        frozen = scenario.ready_tree(recovery=FAST)
        task = sample_tasks.wait_for_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        scenario.ready_tree(recovery=FAST)
        time.sleep(1.5)  # the observer has checked at least once
        frozen.freeze()
        scenario.until(scenario.started(task.id, 2), within=6 * SLACK, what="it runs elsewhere")
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"
        finished = scenario.task(task.id)
        frozen.thaw()
        scenario.until(
            lambda: scenario.effects("told", task.id) or len(scenario.effects("end", task.id)) == 2,
            within=10,
            what="the old code hears of it",
        )
        scenario.until_logged(frozen, "zombie_refused", within=10)
        assert scenario.task(task.id) == finished
        assert [one["outcome"] for one in scenario.attempts(task.id)] == ["LOST", "COMPLETED"]
        quick = sample_tasks.quick.send(1)
        assert quick.result(timeout=20) == 1, "the thawed tree works again"

    @pytest.mark.long
    def test_a_thread_of_a_thawed_worker_is_asked_to_stop(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E6
        frozen = scenario.ready_tree(recovery=FAST)
        task = sample_tasks.wait_in_thread_on_crash.send("a")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        scenario.ready_tree(recovery=FAST)
        time.sleep(1.5)  # the observer has checked at least once
        frozen.freeze()
        scenario.until(scenario.started(task.id, 2), within=6 * SLACK, what="it runs elsewhere")
        frozen.thaw()
        scenario.until(lambda: scenario.effects("told", task.id), within=10, what="the old thread is told")
        scenario.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert [one["outcome"] for one in scenario.attempts(task.id)] == ["LOST", "COMPLETED"]


class TestDatabase:
    @pytest.mark.long
    def test_terminated_sessions_do_not_affect_running_tasks(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E7
        scenario.ready_tree()
        task = sample_tasks.nap.send(6)
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        for _ in range(2):
            scenario.query(
                """select pg_terminate_backend(a.pid) from pg_stat_activity a join {schema}.supervisors s
                   on split_part(a.application_name, ' ', 1) = s.session_name"""
            )
            time.sleep(1)  # lets them reconnect before the second termination
        task.result(timeout=30)
        assert len(scenario.effects("start", task.id)) == 1
        assert scenario.recoveries() == []
        began = time.monotonic()
        sample_tasks.quick.send(1).result(timeout=2 * SLACK)
        print(f"next task after the sessions were terminated: {time.monotonic() - began:.2f} s")


class TestMany:
    @pytest.mark.long
    def test_fifty_tasks_of_a_killed_tree_are_recovered_once_each(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E9
        settings = {**FAST, **BY_AGE}
        doomed = scenario.ready_tree(recovery=settings)
        tasks = sample_tasks.app.send_many([sample_tasks.wait_for_on_crash.call("a") for _ in range(50)])
        scenario.until(lambda: len(scenario.effects("start")) == 50, within=20, what="all run")
        for _ in range(4):
            scenario.start_tree(recovery=settings)
        scenario.until(
            lambda: len(scenario.query("select id from {schema}.workers where ended_at is null")) == 5,
            within=60,
            what="five workers",
        )
        time.sleep(1.5)  # the observers have checked at least once
        doomed.kill()
        scenario.until(lambda: len(scenario.recoveries()) >= 50, within=6 * SLACK, what="fifty recoveries")
        scenario.open_gate("a")
        assert [one.result(timeout=30) for one in tasks] == ["done"] * 50
        assert len(scenario.recoveries()) == 50
        assert len({one["task_id"] for one in scenario.recoveries()}) == 50

    @pytest.mark.long
    def test_five_hundred_tasks_of_a_killed_tree_are_settled_within_fifteen_seconds(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # E9
        settings = {**FAST, **BY_AGE}
        doomed = scenario.ready_tree(recovery=settings, worker={"async_concurrency": 500})
        sample_tasks.app.send_many([sample_tasks.wait_for.call("never") for _ in range(500)])
        scenario.until(lambda: len(scenario.effects("start")) == 500, within=40, what="all run")
        scenario.ready_tree(recovery=settings, options=("--queues", "none"))
        time.sleep(1.5)  # the observer has checked at least once
        doomed.kill()
        scenario.until(lambda: scenario.states().get("FAILED") == 500, within=15 * SLACK, what="500 settled")
        assert len(scenario.recoveries()) == 500


@pytest.mark.long
def test_a_frozen_tree_that_is_killed_is_recovered_by_its_session(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    """SIGSTOP, then SIGKILL: the session ends with the kill, regardless of the beats."""
    tree = scenario.ready_tree()
    task = sample_tasks.wait_for_on_crash.send("a")
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    scenario.ready_tree()
    time.sleep(10.5)  # an observer trusts sessions only after it and the server have been up for 10 s
    tree.freeze()
    tree.signal_all(signal.SIGKILL)
    tree.process.wait()
    scenario.until(lambda: scenario.recoveries(task.id), within=3 * SLACK, what="recovered")
    scenario.open_gate("a")
    assert task.result(timeout=20) == "done"
