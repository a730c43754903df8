"""The ordinary life of a task on a real worker: it runs once, in order, fails, retries, is cancelled and expires as promised."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import ModuleType

import psutil
import pytest

from everbeat import RetryPolicy, TaskFailed, WaitTimeout
from tests.stories.scenario import SLACK, Scenario

pytestmark = pytest.mark.story

FURTHER_EXCEPTIONS = ("plain", "unprintable", "nul", "huge", "keyboard")


def test_a_thousand_tasks_run_once_each_on_four_processes(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # B5
    scenario.ready_tree(worker={"processes": 4})
    handles = sample_tasks.app.send_many(sample_tasks.quick.call(n) for n in range(1_000))
    assert [handle.result(timeout=60) for handle in handles] == list(range(1_000))
    starts = [line["task"] for line in scenario.effects("start")]
    assert len(starts) == len(set(starts)) == 1_000
    assert len({line["pid"] for line in scenario.effects("start")}) > 1


def test_the_timestamps_of_a_completed_task_are_in_order(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # B2
    scenario.ready_tree()
    handle = sample_tasks.quick.send(7)
    assert handle.result(timeout=20) == 7
    info = handle.info()
    assert info.state == "COMPLETED"
    assert info.sent_at <= info.enqueued_at <= info.claimed_at <= info.started_at <= info.completed_at
    assert not info.claimed, "no worker holds it"
    (attempt,) = info.attempts
    assert (attempt.attempt, attempt.outcome) == (1, "COMPLETED")


@pytest.mark.parametrize(
    "what",
    ["task error", "exit", *(pytest.param(what, marks=pytest.mark.long) for what in FURTHER_EXCEPTIONS)],
)
def test_an_exception_of_any_kind_fails_its_task_and_the_worker_continues(
    scenario: Scenario, sample_tasks: ModuleType, what: str
) -> None:  # B3
    scenario.ready_tree()
    handle = sample_tasks.raise_something.send(what)
    with pytest.raises(TaskFailed) as failure:
        handle.result(timeout=60)
    error = failure.value.error
    assert error.code == ("NO_STOCK" if what == "task error" else "UNHANDLED_EXCEPTION")
    assert error.type
    assert "sample_tasks.py" in error.traceback
    info = handle.info()
    assert (info.state, info.completed_at) == ("FAILED", None)
    assert info.failed_at is not None
    if what == "task error":
        assert error.data == {"item": 7}
    assert len(error.message) < 20_000
    assert sample_tasks.quick.send(1).result(timeout=20) == 1


def test_a_result_that_is_not_json_fails_only_its_task(scenario: Scenario, sample_tasks: ModuleType) -> None:
    scenario.ready_tree()
    bad = sample_tasks.unserialisable.send()
    good = [sample_tasks.quick.send(n) for n in range(5)]
    assert bad.outcome(timeout=20).error.code == "RESULT_UNSERIALISABLE"
    assert [one.result(timeout=20) for one in good] == list(range(5))


@pytest.mark.parametrize("code", ["FLAKY", pytest.param("ValueError", marks=pytest.mark.long)])
def test_retries_follow_the_policy_of_the_task(
    scenario: Scenario, sample_tasks: ModuleType, code: str
) -> None:  # B4 B7
    scenario.ready_tree()
    handle = sample_tasks.flaky.send(1, code)
    assert handle.result(timeout=20) == 2
    first, second = (line["at"] for line in scenario.effects("start", handle.id))
    print(f"a 1 s retry started after {second - first:.3f} s")
    assert 1.0 <= second - first <= 1.0 + 0.3 * SLACK
    exhausted = sample_tasks.flaky.send(9, code)
    assert exhausted.outcome(timeout=30).error.message == "not this time"
    assert [one["will_retry"] for one in scenario.attempts(exhausted.id)] == [True, True, False]
    unlisted = sample_tasks.flaky.send(9, "OTHER")
    assert unlisted.outcome(timeout=20).error.code == "OTHER"
    assert len(scenario.attempts(unlisted.id)) == 1


def test_options_of_a_send_override_those_of_the_function(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    scenario.ready_tree()
    once = RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=["OTHER", LookupError])
    assert sample_tasks.flaky.with_options(retry=once).send(1, "OTHER").result(timeout=20) == 2
    listed_no_more = sample_tasks.flaky.with_options(retry=once).send(1, "ValueError")
    assert listed_no_more.outcome(timeout=20).error.type == "ValueError"
    never = sample_tasks.flaky.with_options(retry=None).send(1, "FLAKY")
    assert never.outcome(timeout=20).error.code == "FLAKY"
    assert len(scenario.attempts(never.id)) == 1
    unlimited = sample_tasks.too_slow.with_options(timeout=None).send()
    scenario.until(scenario.started(unlimited.id), within=20, what="it runs")
    time.sleep(1.5)  # longer than the function's timeout
    assert (unlimited.info().state, unlimited.info().claimed) == ("RUNNING", True)
    unlimited.cancel()
    assert unlimited.outcome(timeout=20).error.code == "TASK_CANCELLED"


@pytest.mark.long
def test_a_scheduled_task_starts_on_time_on_an_idle_worker(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # B7
    scenario.ready_tree()
    time.sleep(1)  # idle
    late = []
    for _ in range(3):
        began = time.time()
        handle = sample_tasks.quick.schedule(timedelta(seconds=1), 1)
        handle.result(timeout=20)
        (start,) = scenario.effects("start", handle.id)
        late.append(start["at"] - began)
    print(f"schedule(1 s) started after {[round(one, 3) for one in late]} s")
    assert min(late) >= 0.999
    assert sorted(late)[1] <= 1.0 + 0.3 * SLACK
    handle = sample_tasks.quick.schedule(datetime.now(UTC) + timedelta(seconds=1), 1)
    assert handle.info().state == "PENDING"
    assert handle.result(timeout=20) == 1


@pytest.mark.long
def test_one_process_runs_five_hundred_sleeping_tasks_at_once(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # B8
    tree = scenario.ready_tree(worker={"async_concurrency": 500})
    sample_tasks.quick.send(0).result(timeout=20)
    began = time.monotonic()
    handles = sample_tasks.app.send_many([sample_tasks.nap.call(1.0) for _ in range(500)])
    for handle in handles:
        handle.result(timeout=60)
    took = time.monotonic() - began
    (worker,) = scenario.workers(tree)
    rss = psutil.Process(worker["pid"]).memory_info().rss / 1e6
    print(f"500 sleepers ended in {took:.2f} s; the worker process has {rss:.0f} MB")
    assert took <= 3 * SLACK
    assert rss < 150


def test_async_thread_and_process_tasks_run_side_by_side(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # B9
    scenario.ready_tree()
    blocking = [sample_tasks.nap_in_thread.send(2), sample_tasks.nap_in_process.send(2)]
    scenario.until(lambda: len(scenario.effects("start")) == 2, within=20, what="both block")
    began = time.monotonic()
    assert [sample_tasks.quick.send(n).result(timeout=20) for n in range(20)] == list(range(20))
    assert time.monotonic() - began < 2 * SLACK
    for handle in blocking:
        handle.result(timeout=20)


class TestTimeout:
    @pytest.mark.parametrize(
        "task_name", [pytest.param("too_slow", marks=pytest.mark.long), "too_slow_in_process"]
    )
    def test_a_timeout_stops_async_and_process_tasks(
        self, scenario: Scenario, sample_tasks: ModuleType, task_name: str
    ) -> None:  # B10
        scenario.ready_tree()
        sibling = (
            sample_tasks.nap_in_process.send(4)
            if task_name == "too_slow_in_process"
            else sample_tasks.nap.send(4)
        )
        handle = getattr(sample_tasks, task_name).send()
        scenario.until(scenario.started(handle.id), within=20, what="it runs")
        took = scenario.until(scenario.state_is(handle.id, "FAILED"), within=2 * SLACK, what="timed out")
        assert took <= 2 * SLACK
        assert handle.outcome().error.code == "TASK_TIMEOUT"
        if task_name == "too_slow_in_process":
            pid = scenario.effects("start", handle.id)[0]["pid"]
            scenario.until(lambda: not psutil.pid_exists(pid), within=5, what="its process is gone")
        sibling.result(timeout=20)
        assert len(scenario.effects("end", sibling.id)) == 1

    def test_a_timed_out_thread_is_asked_to_stop(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # B10
        scenario.ready_tree(worker={"thread_concurrency": 1})
        handle = sample_tasks.too_slow_in_thread.send("a")
        assert handle.outcome(timeout=20).error.code == "TASK_TIMEOUT"
        scenario.until(lambda: scenario.effects("told", handle.id), within=5, what="the thread is told")


class TestCancel:
    @pytest.mark.parametrize("task_name", ["wait_for", "wait_in_process_on_crash", "wait_in_thread_on_crash"])
    def test_a_cancel_stops_running_code_within_two_seconds(
        self, scenario: Scenario, sample_tasks: ModuleType, task_name: str
    ) -> None:  # B11
        scenario.ready_tree()
        handle = getattr(sample_tasks, task_name).send("never")
        scenario.until(scenario.started(handle.id), within=20, what="it runs")
        handle.cancel()
        took = scenario.until(scenario.state_is(handle.id, "CANCELLED"), within=2 * SLACK, what="cancelled")
        assert took <= 2 * SLACK
        assert handle.outcome().error.code == "TASK_CANCELLED"
        assert len(scenario.effects("start", handle.id)) == 1
        if task_name == "wait_for":
            assert scenario.effects("told", handle.id)

    def test_a_pending_task_is_cancelled_at_once_and_an_ended_one_is_kept(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # B11
        handle = sample_tasks.quick.send(1)
        sample_tasks.app.cancel(handle.id)
        assert handle.info().state == "CANCELLED"
        sample_tasks.app.cancel(handle.id)
        assert handle.info().state == "CANCELLED"
        sample_tasks.app.retry(handle.id)
        scenario.ready_tree()
        assert handle.info().state in ("PENDING", "CLAIMED", "RUNNING", "COMPLETED")
        assert sample_tasks.app.handle(handle.id).result(timeout=20) == 1


class TestLeaving:
    def test_a_stopping_worker_releases_unfinished_tasks_without_charge(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # B12
        tree = scenario.ready_tree(worker={"async_concurrency": 2, "grace": 1})
        handles = [sample_tasks.wait_for_on_crash.send("a") for _ in range(3)]
        scenario.until(lambda: len(scenario.effects("start")) == 2, within=20, what="two run")
        assert tree.stop() == 0
        for handle in handles:
            row = scenario.task(handle.id)
            assert (row["state"], row["retry_count"], row["crash_count"], row["loss_count"]) == (
                "PENDING",
                0,
                0,
                0,
            )
        assert scenario.recoveries() == []
        scenario.open_gate("a")
        scenario.ready_tree()
        assert [handle.result(timeout=20) for handle in handles] == ["done"] * 3

    def test_a_second_signal_stops_the_worker_at_once(
        self, scenario: Scenario, sample_tasks: ModuleType
    ) -> None:  # B12
        tree = scenario.ready_tree(worker={"grace": 60})
        handle = sample_tasks.wait_for_on_crash.send("never")
        scenario.until(scenario.started(handle.id), within=20, what="it runs")
        tree.process.terminate()
        scenario.until(
            lambda: any(
                row["draining"] for row in scenario.query("select draining from {schema}.supervisors")
            ),
            within=10,
            what="draining",
        )
        began = time.monotonic()
        tree.process.terminate()
        assert tree.process.wait(timeout=20) == 0
        assert time.monotonic() - began < 3 * SLACK
        assert scenario.task(handle.id)["state"] == "PENDING"


def test_a_late_pending_task_expires(scenario: Scenario, sample_tasks: ModuleType) -> None:  # C1
    scenario.ready_tree(recovery={"check_interval_ms": 1_000}, options=("--queues", "none"))
    handle = sample_tasks.quick.with_options(good_until=datetime.now(UTC) + timedelta(seconds=1)).send(1)
    scenario.until(scenario.state_is(handle.id, "EXPIRED"), within=2 * SLACK, what="expired")
    assert handle.outcome().error.code == "TASK_EXPIRED"
    assert scenario.attempts(handle.id) == []
    assert scenario.effects() == []


def test_a_claimed_task_that_waits_too_long_for_its_slot_expires(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # C2
    scenario.hold_processes()
    scenario.ready_tree()
    late = sample_tasks.quick_in_process.with_options(
        good_until=datetime.now(UTC) + timedelta(seconds=1.5)
    ).send(1)
    scenario.until(scenario.state_is(late.id, "CLAIMED"), within=5, what="it waits CLAIMED for its process")
    time.sleep(1.6)  # its good_until passes
    scenario.release_processes()
    assert late.outcome(timeout=20).error.code == "TASK_EXPIRED"
    assert scenario.attempts(late.id) == []
    assert scenario.effects("start", late.id) == []


def test_a_task_with_an_unknown_name_stays_pending_and_explains_why(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # B13
    scenario.ready_tree()
    handle = sample_tasks.app.send_by_name("nobody.knows_me", {"n": 1})
    assert sample_tasks.quick.send(1).result(timeout=20) == 1
    with pytest.raises(WaitTimeout):
        handle.result(timeout=0.5)
    info = handle.info()
    assert info.state == "PENDING"
    assert "nobody.knows_me" in info.waiting_because
