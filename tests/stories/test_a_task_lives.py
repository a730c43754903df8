"""A task's ordinary life under a real worker: it runs once, in order, in time; it fails, retries, is cancelled and expires as promised."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import ModuleType

import psutil
import pytest

from everbeat import RetryPolicy, TaskFailed, WaitTimeout
from tests.stories.stage import SLACK, Stage

pytestmark = pytest.mark.story


def test_a_thousand_tasks_run_once_each_on_four_processes(stage: Stage, deeds: ModuleType) -> None:  # B5
    stage.ready_tree(worker={"processes": 4})
    handles = deeds.app.send_many(deeds.quick.call(n) for n in range(1_000))
    assert [handle.result(timeout=60) for handle in handles] == list(range(1_000))
    starts = [line["task"] for line in stage.effects("start")]
    assert len(starts) == len(set(starts)) == 1_000
    assert len({line["pid"] for line in stage.effects("start")}) > 1


def test_a_life_in_timestamps(stage: Stage, deeds: ModuleType) -> None:  # B2
    stage.ready_tree()
    handle = deeds.quick.send(7)
    assert handle.result(timeout=20) == 7
    info = handle.info()
    assert info.state == "COMPLETED"
    assert info.sent_at <= info.enqueued_at <= info.claimed_at <= info.started_at <= info.completed_at
    (attempt,) = info.attempts
    assert (attempt.attempt, attempt.outcome) == (1, "COMPLETED")


@pytest.mark.parametrize("what", ["plain", "task error", "unprintable", "nul", "huge", "exit", "keyboard"])
def test_whatever_is_raised_ends_failed_and_the_worker_goes_on(
    stage: Stage, deeds: ModuleType, what: str
) -> None:  # B3
    stage.ready_tree()
    handle = deeds.raise_something.send(what)
    with pytest.raises(TaskFailed) as failure:
        handle.result(timeout=60)
    error = failure.value.error
    assert error.code == ("NO_STOCK" if what == "task error" else "UNHANDLED_EXCEPTION")
    assert error.type
    assert "deeds.py" in error.traceback
    info = handle.info()
    assert (info.state, info.completed_at) == ("FAILED", None)
    assert info.failed_at is not None
    if what == "task error":
        assert error.data == {"item": 7}
    assert len(error.message) < 20_000
    assert deeds.quick.send(1).result(timeout=20) == 1


def test_a_result_that_is_no_json_fails_alone(stage: Stage, deeds: ModuleType) -> None:
    stage.ready_tree()
    bad = deeds.unserialisable.send()
    good = [deeds.quick.send(n) for n in range(5)]
    assert bad.outcome(timeout=20).error.code == "RESULT_UNSERIALISABLE"
    assert [one.result(timeout=20) for one in good] == list(range(5))


@pytest.mark.parametrize("code", ["FLAKY", "ValueError"])
def test_retries_follow_the_policy(stage: Stage, deeds: ModuleType, code: str) -> None:  # B4 B7
    stage.ready_tree()
    handle = deeds.flaky.send(1, code)
    assert handle.result(timeout=20) == 2
    first, second = (line["at"] for line in stage.effects("start", handle.id))
    print(f"a 1 s retry started after {second - first:.3f} s")
    assert 1.0 <= second - first <= 1.0 + 0.3 * SLACK
    exhausted = deeds.flaky.send(9, code)
    assert exhausted.outcome(timeout=30).error.message == "not this time"
    assert [one["will_retry"] for one in stage.attempts(exhausted.id)] == [True, True, False]
    unlisted = deeds.flaky.send(9, "OTHER")
    assert unlisted.outcome(timeout=20).error.code == "OTHER"
    assert len(stage.attempts(unlisted.id)) == 1


def test_what_is_asked_for_at_the_send_goes_before_what_the_function_says(
    stage: Stage, deeds: ModuleType
) -> None:
    stage.ready_tree()
    once = RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=["OTHER", LookupError])
    assert deeds.flaky.with_options(retry=once).send(1, "OTHER").result(timeout=20) == 2
    listed_no_more = deeds.flaky.with_options(retry=once).send(1, "ValueError")
    assert listed_no_more.outcome(timeout=20).error.type == "ValueError"
    never = deeds.flaky.with_options(retry=None).send(1, "FLAKY")
    assert never.outcome(timeout=20).error.code == "FLAKY"
    assert len(stage.attempts(never.id)) == 1
    unlimited = deeds.too_slow.with_options(timeout=None).send()
    stage.until(stage.started(unlimited.id), within=20, what="it runs")
    time.sleep(1.5)  # longer than the function's own timeout
    assert unlimited.info().state == "RUNNING"
    unlimited.cancel()
    assert unlimited.outcome(timeout=20).error.code == "TASK_CANCELLED"


def test_a_scheduled_task_starts_on_time_on_an_idle_worker(stage: Stage, deeds: ModuleType) -> None:  # B7
    stage.ready_tree()
    time.sleep(1)  # idle
    late = []
    for _ in range(3):
        began = time.time()
        handle = deeds.quick.schedule(timedelta(seconds=1), 1)
        handle.result(timeout=20)
        (start,) = stage.effects("start", handle.id)
        late.append(start["at"] - began)
    print(f"schedule(1 s) started after {[round(one, 3) for one in late]} s")
    assert min(late) >= 0.999
    assert sorted(late)[1] <= 1.0 + 0.3 * SLACK
    handle = deeds.quick.schedule(datetime.now(UTC) + timedelta(seconds=1), 1)
    assert handle.info().state == "PENDING"
    assert handle.result(timeout=20) == 1


def test_five_hundred_sleepers_on_one_process(stage: Stage, deeds: ModuleType) -> None:  # B8
    tree = stage.ready_tree()
    deeds.quick.send(0).result(timeout=20)
    began = time.monotonic()
    handles = deeds.app.send_many([deeds.nap.call(1.0) for _ in range(500)])
    for handle in handles:
        handle.result(timeout=60)
    took = time.monotonic() - began
    (worker,) = stage.workers(tree)
    rss = psutil.Process(worker["pid"]).memory_info().rss / 1e6
    print(f"500 sleepers ended in {took:.2f} s; the worker process has {rss:.0f} MB")
    assert took <= 3 * SLACK
    assert rss < 150


def test_async_thread_and_process_tasks_run_side_by_side(stage: Stage, deeds: ModuleType) -> None:  # B9
    stage.ready_tree()
    blocking = [deeds.nap_in_thread.send(2), deeds.nap_in_process.send(2)]
    stage.until(lambda: len(stage.effects("start")) == 2, within=20, what="both block")
    began = time.monotonic()
    assert [deeds.quick.send(n).result(timeout=20) for n in range(20)] == list(range(20))
    assert time.monotonic() - began < 2 * SLACK
    for handle in blocking:
        handle.result(timeout=20)


class TestTimeout:
    @pytest.mark.parametrize("deed", ["too_slow", "too_slow_in_process"])
    def test_code_that_can_be_stopped_is_stopped(
        self, stage: Stage, deeds: ModuleType, deed: str
    ) -> None:  # B10
        stage.ready_tree()
        sibling = deeds.nap_in_process.send(4) if deed == "too_slow_in_process" else deeds.nap.send(4)
        handle = getattr(deeds, deed).send()
        stage.until(stage.started(handle.id), within=20, what="it runs")
        took = stage.until(stage.state_is(handle.id, "FAILED"), within=2 * SLACK, what="timed out")
        assert took <= 2 * SLACK
        assert handle.outcome().error.code == "TASK_TIMEOUT"
        if deed == "too_slow_in_process":
            pid = stage.effects("start", handle.id)[0]["pid"]
            stage.until(lambda: not psutil.pid_exists(pid), within=5, what="its process is gone")
        sibling.result(timeout=20)
        assert len(stage.effects("end", sibling.id)) == 1

    def test_a_thread_is_told_and_keeps_its_slot(self, stage: Stage, deeds: ModuleType) -> None:  # B10
        stage.ready_tree(worker={"thread_concurrency": 1})
        handle = deeds.too_slow_in_thread.send("a")
        assert handle.outcome(timeout=20).error.code == "TASK_TIMEOUT"
        stage.until(lambda: stage.effects("told", handle.id), within=5, what="the thread is told")


class TestCancel:
    @pytest.mark.parametrize("deed", ["wait_for", "wait_in_process_on_crash", "wait_in_thread_on_crash"])
    def test_running_code_is_stopped_within_two_seconds(
        self, stage: Stage, deeds: ModuleType, deed: str
    ) -> None:  # B11
        stage.ready_tree()
        handle = getattr(deeds, deed).send("never")
        stage.until(stage.started(handle.id), within=20, what="it runs")
        handle.cancel()
        took = stage.until(stage.state_is(handle.id, "CANCELLED"), within=2 * SLACK, what="cancelled")
        assert took <= 2 * SLACK
        assert handle.outcome().error.code == "TASK_CANCELLED"
        assert len(stage.effects("start", handle.id)) == 1
        if deed == "wait_for":
            assert stage.effects("told", handle.id)

    def test_pending_ends_at_once_and_ended_ones_stay(self, stage: Stage, deeds: ModuleType) -> None:  # B11
        handle = deeds.quick.send(1)
        deeds.app.cancel(handle.id)
        assert handle.info().state == "CANCELLED"
        deeds.app.cancel(handle.id)
        assert handle.info().state == "CANCELLED"
        deeds.app.retry(handle.id)
        stage.ready_tree()
        assert handle.info().state in ("PENDING", "CLAIMED", "RUNNING", "COMPLETED")
        assert deeds.app.handle(handle.id).result(timeout=20) == 1


class TestLeaving:
    def test_unfinished_work_goes_back_at_no_cost(self, stage: Stage, deeds: ModuleType) -> None:  # B12
        tree = stage.ready_tree(worker={"async_concurrency": 2, "prefetch": 1, "grace": 1})
        handles = [deeds.wait_for_on_crash.send("a") for _ in range(3)]
        stage.until(lambda: len(stage.effects("start")) == 2, within=20, what="two run")
        assert tree.stop() == 0
        for handle in handles:
            row = stage.task(handle.id)
            assert (row["state"], row["retry_count"], row["crash_count"], row["loss_count"]) == (
                "PENDING",
                0,
                0,
                0,
            )
        assert stage.recoveries() == []
        stage.open_gate("a")
        stage.ready_tree()
        assert [handle.result(timeout=20) for handle in handles] == ["done"] * 3

    def test_a_second_signal_leaves_at_once(self, stage: Stage, deeds: ModuleType) -> None:  # B12
        tree = stage.ready_tree(worker={"grace": 60})
        handle = deeds.wait_for_on_crash.send("never")
        stage.until(stage.started(handle.id), within=20, what="it runs")
        tree.process.terminate()
        stage.until(
            lambda: any(row["draining"] for row in stage.query("select draining from {schema}.supervisors")),
            within=10,
            what="draining",
        )
        began = time.monotonic()
        tree.process.terminate()
        assert tree.process.wait(timeout=20) == 0
        assert time.monotonic() - began < 3 * SLACK
        assert stage.task(handle.id)["state"] == "PENDING"


def test_a_late_pending_task_expires(stage: Stage, deeds: ModuleType) -> None:  # C1
    stage.ready_tree(recovery={"check_interval_ms": 1_000}, options=("--queues", "none"))
    handle = deeds.quick.with_options(good_until=datetime.now(UTC) + timedelta(seconds=1)).send(1)
    stage.until(stage.state_is(handle.id, "EXPIRED"), within=2 * SLACK, what="expired")
    assert handle.outcome().error.code == "TASK_EXPIRED"
    assert stage.attempts(handle.id) == []
    assert stage.effects() == []


def test_a_task_that_waits_too_long_behind_a_busy_slot_expires(stage: Stage, deeds: ModuleType) -> None:  # C2
    stage.ready_tree(worker={"async_concurrency": 1, "prefetch": 1})
    first = deeds.wait_for.send("a")
    stage.until(stage.started(first.id), within=20, what="the first runs")
    late = deeds.quick.with_options(good_until=datetime.now(UTC) + timedelta(seconds=1.5)).send(1)
    stage.until(stage.state_is(late.id, "CLAIMED"), within=5, what="the next waits CLAIMED")
    time.sleep(1.6)  # its deadline passes
    stage.open_gate("a")
    assert late.outcome(timeout=20).error.code == "TASK_EXPIRED"
    assert stage.attempts(late.id) == []
    assert stage.effects("start", late.id) == []
    assert first.result(timeout=20) == "done"


def test_a_name_that_nobody_knows_stays_pending_and_says_why(stage: Stage, deeds: ModuleType) -> None:  # B13
    stage.ready_tree()
    handle = deeds.app.send_by_name("nobody.knows_me", {"n": 1})
    assert deeds.quick.send(1).result(timeout=20) == 1
    with pytest.raises(WaitTimeout):
        handle.result(timeout=0.5)
    info = handle.info()
    assert info.state == "PENDING"
    assert "nobody.knows_me" in info.waiting_because
