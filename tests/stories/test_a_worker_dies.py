"""Workers die, freeze and are cut off; their tasks do not. Every death here is a real signal to a real process."""

from __future__ import annotations

import signal
import time
from types import ModuleType
from uuid import UUID

import psutil
import pytest

from everbeat import App
from tests.stories.stage import BY_AGE, FAST, SLACK, Stage, Tree

pytestmark = pytest.mark.story


def worker_of(stage: Stage, tree: Tree, task_id: UUID) -> psutil.Process:
    """The worker process that holds a task."""
    holder = stage.task(task_id)["claimed_by_worker_id"]
    (row,) = [row for row in stage.workers(tree) if row["id"] == holder]
    return psutil.Process(row["pid"])


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class TestKilledWorkerProcess:
    def test_its_tasks_are_settled_within_a_second_and_siblings_are_untouched(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E4
        tree = stage.ready_tree(worker={"processes": 2, "async_concurrency": 1, "prefetch": 0})
        doomed, sibling = deeds.wait_for_on_crash.send("a"), deeds.wait_for_on_crash.send("b")
        stage.until(lambda: len(stage.effects("start")) == 2, within=20, what="both run")
        before = {row["id"] for row in stage.workers(tree)}
        worker_of(stage, tree, doomed.id).kill()
        took = stage.until(
            lambda: stage.recoveries(doomed.id),
            within=1 * SLACK,
            what="settled after the kill of a worker process",
        )
        assert took <= 1 * SLACK
        (recovery,) = stage.recoveries(doomed.id)
        assert (recovery["noticed_by"], recovery["was"], recovery["action"]) == (
            "child_exit",
            "RUNNING",
            "retry",
        )
        assert "SIGKILL" in recovery["cause"]
        stage.until(
            lambda: len({row["id"] for row in stage.workers(tree)} - before) == 1,
            within=10,
            what="the process is replaced",
        )
        stage.until(stage.started(doomed.id, 2), within=10, what="runs again")
        stage.open_gate("a")
        stage.open_gate("b")
        assert (doomed.result(timeout=20), sibling.result(timeout=20)) == ("done", "done")
        assert stage.recoveries(sibling.id) == []
        assert len(stage.effects("start", sibling.id)) == 1

    def test_claimed_tasks_cost_nothing(self, stage: Stage, deeds: ModuleType) -> None:  # E1
        tree = stage.ready_tree(worker={"async_concurrency": 1, "prefetch": 3})
        first = deeds.wait_for_on_crash.send("a")
        stage.until(stage.started(first.id), within=20, what="the first runs")
        waiting = [deeds.quick.send(n) for n in range(3)]
        stage.until(
            lambda: stage.states().get("CLAIMED") == 3, within=10, what="three wait CLAIMED behind it"
        )
        worker_of(stage, tree, first.id).kill()
        stage.open_gate("a")
        for handle in waiting:
            handle.result(timeout=30)
            row = stage.task(handle.id)
            assert (row["retry_count"], row["crash_count"], row["loss_count"], row["attempt"]) == (0, 0, 0, 1)
            (recovery,) = stage.recoveries(handle.id)
            assert (recovery["was"], recovery["action"]) == ("CLAIMED", "requeue")
            assert len(stage.effects("start", handle.id)) == 1


class TestKilledTree:
    def test_another_worker_settles_it_within_three_seconds(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E4
        doomed_tree = stage.ready_tree()
        task = deeds.wait_for_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        stage.ready_tree()
        time.sleep(10.5)  # an observer trusts sessions only when itself and the server have been up for 10 s
        doomed_tree.kill()
        stage.until(
            lambda: stage.recoveries(task.id), within=3 * SLACK, what="settled after the kill of a tree"
        )
        (recovery,) = stage.recoveries(task.id)
        assert (recovery["noticed_by"], recovery["was"], recovery["action"]) == (
            "session",
            "RUNNING",
            "retry",
        )
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert len(stage.effects("start", task.id)) == 2

    def test_claimed_tasks_are_pending_again_by_age(self, stage: Stage, deeds: ModuleType) -> None:  # E1
        settings = {**FAST, **BY_AGE}
        doomed_tree = stage.ready_tree(recovery=settings, worker={"async_concurrency": 1, "prefetch": 2})
        first = deeds.wait_for.send("a")
        stage.until(stage.started(first.id), within=20, what="the first runs")
        waiting = [deeds.quick.send(n) for n in range(2)]
        stage.until(lambda: stage.states().get("CLAIMED") == 2, within=10, what="two wait CLAIMED")
        stage.ready_tree(recovery=settings)
        time.sleep(1.5)  # the observer has looked at least once
        doomed_tree.kill()
        stage.until(lambda: len(stage.recoveries()) == 3, within=4 * SLACK, what="all recovered by age")
        for handle in waiting:
            handle.result(timeout=20)
            row = stage.task(handle.id)
            assert (row["retry_count"], row["loss_count"], row["crash_count"]) == (0, 0, 0)
            assert [one["noticed_by"] for one in stage.recoveries(handle.id)] == ["age"]
            assert len(stage.effects("start", handle.id)) == 1
        assert stage.task(first.id)["state"] == "FAILED"

    def test_only_the_supervisor_killed_takes_its_workers_along(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E5
        tree = stage.ready_tree(worker={"processes": 2})
        task = deeds.wait_in_process_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        stage.ready_tree()
        time.sleep(10.5)  # an observer trusts sessions only when itself and the server have been up for 10 s
        everybody = tree.processes()
        assert len(everybody) >= 4
        tree.process.kill()
        tree.process.wait()
        stage.until(
            lambda: not any(is_alive(one) for one in everybody), within=2 * SLACK, what="no process left"
        )
        stage.until(
            lambda: stage.recoveries(task.id),
            within=3 * SLACK,
            what="recovered after the kill of the supervisor",
        )
        stage.open_gate("a")
        assert task.result(timeout=30) == "done"


class TestPolicies:
    def test_without_a_policy_it_fails_with_a_death_certificate(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E2
        tree = stage.ready_tree()
        task = deeds.wait_for.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        victim = worker_of(stage, tree, task.id)
        victim.kill()
        failed = task.outcome(timeout=20)
        assert failed.error.code == "WORKER_CRASHED"
        certificate = failed.error.data
        for fact in ("worker_id", "hostname", "pid", "cause", "started_at", "last_beat", "detected_at"):
            assert certificate[fact], fact
        assert certificate["pid"] == victim.pid
        (attempt,) = stage.attempts(task.id)
        assert attempt["will_retry"] is False

    def test_a_retry_policy_runs_it_again_elsewhere_until_it_is_exhausted(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E3
        tree = stage.ready_tree()
        task = deeds.crash_twice.send("never")
        stage.until(stage.started(task.id), within=20, what="it runs")
        worker_of(stage, tree, task.id).kill()
        stage.until(lambda: stage.task(task.id)["retry_count"] == 1, within=10, what="it is scheduled again")
        row = stage.task(task.id)
        assert row["next_retry_at"] is not None
        stage.until(stage.started(task.id, 2), within=10, what="it runs again")
        worker_of(stage, tree, task.id).kill()
        failed = task.outcome(timeout=20)
        assert failed.error.code == "WORKER_CRASHED"
        assert [one["will_retry"] for one in stage.attempts(task.id)] == [True, False]

    def test_a_task_sent_by_a_stranger_is_recovered_by_the_same_policy(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E12
        tree = stage.ready_tree()
        stranger = App(stage.url, schema=stage.schema)
        task = stranger.send_by_name("wait_for_on_crash", {"gate_name": "a"})
        stage.until(stage.started(task.id), within=20, what="it runs")
        worker_of(stage, tree, task.id).kill()
        stage.until(stage.started(task.id, 2), within=10, what="it runs again")
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"
        stranger.close()

    def test_poison_is_stopped_after_its_crashes_and_neighbours_complete(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E8
        stage.ready_tree(worker={"process_concurrency": 2})
        poisons = [deeds.poison.send("exit"), deeds.poison.send("signal")]
        others = deeds.app.send_many([deeds.quick.call(n) for n in range(200)])
        for handle, cause in zip(poisons, ("139", "SIGSEGV"), strict=True):
            failed = handle.outcome(timeout=60)
            assert failed.error.code == "WORKER_CRASHED"
            assert failed.error.data["poison"] is True
            assert len(stage.effects("start", handle.id)) == 3
            attempts = stage.attempts(handle.id)
            assert [one["outcome"] for one in attempts] == ["CRASHED"] * 3
            assert all(cause in one["cause"] for one in stage.recoveries(handle.id))
            assert stage.task(handle.id)["crash_count"] == 3
        assert [one.result(timeout=60) for one in others] == list(range(200))
        assert all(one["worker_id"] is not None for one in stage.recoveries())


class TestZombie:
    def test_a_thawed_worker_changes_nothing_and_its_code_is_told(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E6
        frozen = stage.ready_tree(recovery=FAST)
        task = deeds.wait_for_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        stage.ready_tree(recovery=FAST)
        time.sleep(1.5)  # the observer has looked at least once
        frozen.freeze()
        stage.until(stage.started(task.id, 2), within=6 * SLACK, what="it runs elsewhere")
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"
        finished = stage.task(task.id)
        frozen.thaw()
        stage.until(
            lambda: stage.effects("told", task.id) or len(stage.effects("end", task.id)) == 2,
            within=10,
            what="the old code hears of it",
        )
        stage.until(lambda: "zombie_refused" in frozen.output(), within=10, what="the loss is reported")
        assert stage.task(task.id) == finished
        assert [one["outcome"] for one in stage.attempts(task.id)] == ["LOST", "COMPLETED"]
        quick = deeds.quick.send(1)
        assert quick.result(timeout=20) == 1, "the thawed tree is of use again"

    def test_a_thawed_thread_is_told_too(self, stage: Stage, deeds: ModuleType) -> None:  # E6
        frozen = stage.ready_tree(recovery=FAST)
        task = deeds.wait_in_thread_on_crash.send("a")
        stage.until(stage.started(task.id), within=20, what="it runs")
        stage.ready_tree(recovery=FAST)
        time.sleep(1.5)  # the observer has looked at least once
        frozen.freeze()
        stage.until(stage.started(task.id, 2), within=6 * SLACK, what="it runs elsewhere")
        frozen.thaw()
        stage.until(lambda: stage.effects("told", task.id), within=10, what="the old thread is told")
        stage.open_gate("a")
        assert task.result(timeout=20) == "done"
        assert [one["outcome"] for one in stage.attempts(task.id)] == ["LOST", "COMPLETED"]


class TestDatabase:
    def test_terminated_sessions_disturb_nothing(self, stage: Stage, deeds: ModuleType) -> None:  # E7
        stage.ready_tree()
        task = deeds.nap.send(6)
        stage.until(stage.started(task.id), within=20, what="it runs")
        for _ in range(2):
            stage.query(
                """select pg_terminate_backend(a.pid) from pg_stat_activity a join {schema}.supervisors s
                   on split_part(a.application_name, ' ', 1) = s.session_name"""
            )
            time.sleep(1)  # lets them reconnect before the second blow
        task.result(timeout=30)
        assert len(stage.effects("start", task.id)) == 1
        assert stage.recoveries() == []
        began = time.monotonic()
        deeds.quick.send(1).result(timeout=2 * SLACK)
        print(f"next task after the sessions were terminated: {time.monotonic() - began:.2f} s")


class TestMany:
    def test_fifty_tasks_of_a_killed_tree_are_recovered_once_each(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E9
        settings = {**FAST, **BY_AGE}
        doomed = stage.ready_tree(recovery=settings)
        tasks = deeds.app.send_many([deeds.wait_for_on_crash.call("a") for _ in range(50)])
        stage.until(lambda: len(stage.effects("start")) == 50, within=20, what="all run")
        for _ in range(4):
            stage.start_tree(recovery=settings)
        stage.until(
            lambda: len(stage.query("select id from {schema}.workers where ended_at is null")) == 5,
            within=60,
            what="five workers",
        )
        time.sleep(1.5)  # the observers have looked at least once
        doomed.kill()
        stage.until(lambda: len(stage.recoveries()) >= 50, within=6 * SLACK, what="fifty recoveries")
        stage.open_gate("a")
        assert [one.result(timeout=30) for one in tasks] == ["done"] * 50
        assert len(stage.recoveries()) == 50
        assert len({one["task_id"] for one in stage.recoveries()}) == 50

    def test_five_hundred_tasks_are_settled_within_fifteen_seconds(
        self, stage: Stage, deeds: ModuleType
    ) -> None:  # E9
        settings = {**FAST, **BY_AGE}
        doomed = stage.ready_tree(recovery=settings)
        deeds.app.send_many([deeds.wait_for.call("never") for _ in range(500)])
        stage.until(lambda: len(stage.effects("start")) == 500, within=40, what="all run")
        stage.ready_tree(recovery=settings, options=("--queues", "none"))
        time.sleep(1.5)  # the observer has looked at least once
        doomed.kill()
        stage.until(lambda: stage.states().get("FAILED") == 500, within=15 * SLACK, what="500 settled")
        assert len(stage.recoveries()) == 500


@pytest.mark.long
def test_a_frozen_tree_that_is_killed_in_its_sleep(stage: Stage, deeds: ModuleType) -> None:
    """SIGSTOP, then SIGKILL: the session ends with the kill, whatever the beats said."""
    tree = stage.ready_tree()
    task = deeds.wait_for_on_crash.send("a")
    stage.until(stage.started(task.id), within=20, what="it runs")
    stage.ready_tree()
    time.sleep(10.5)  # an observer trusts sessions only when itself and the server have been up for 10 s
    tree.freeze()
    tree.signal_all(signal.SIGKILL)
    tree.process.wait()
    stage.until(lambda: stage.recoveries(task.id), within=3 * SLACK, what="recovered")
    stage.open_gate("a")
    assert task.result(timeout=20) == "done"
