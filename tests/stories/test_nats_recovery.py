"""Recovery with NATS: a restart, a crash and a deadlock in compressed time, an unreachable database, and the events of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest

from tests.nats_server import NatsServer
from tests.stories.nats_scenario import POLLS_NEVER, NatsScenario, Witness, copy_of
from tests.stories.scenario import BY_AGE, FAST, SLACK, Scenario
from tests.stories.wire import wire

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]


@pytest.fixture
def nats(scenario: Scenario) -> Iterator[NatsScenario]:
    """Must run before `sample_tasks`, whose app gets the URL of the server."""
    with NatsServer() as server:
        yield NatsScenario(scenario, server)


def test_a_restarted_pod_recovers_its_own_tasks(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N4 N10
    first = scenario.ready_tree(worker=POLLS_NEVER)
    nats.ready()
    task = sample_tasks.wait_for_on_crash.send("go")
    ended = sample_tasks.quick.send(7)
    assert ended.result(timeout=20) == 7
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    first.kill()
    with Witness(nats) as witness:
        began = time.monotonic()
        again = scenario.start_tree(worker=POLLS_NEVER)
        scenario.until(scenario.started(task.id, 2), within=3 * SLACK, what="it runs again", tree=again)
        print(f"recovered {time.monotonic() - began:.2f} s after the new pod was started")
        assert "orphaned_tasks_detected" in again.output()  # it is logged before the task is recovered
        scenario.until_logged(again, "reconciliation_complete")
        (recovery,) = scenario.recoveries(task.id)
        assert recovery["noticed_by"] == "startup"
        assert scenario.recoveries(ended.id) == []  # an ended task is never cleared
        scenario.open_gate("go")
        assert task.result(timeout=20) == "done"
        assert witness.of(ended.id) == []


@pytest.mark.long
def test_a_crash_without_a_restart_is_recovered_by_age(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N4 N9 N10
    """The documented settings, 5 min and 30 s, run 150 and 30 times faster: 2 s and 1 s."""
    settings = {**FAST, **BY_AGE}
    nats.redeliver_soon()
    first = scenario.ready_tree(recovery=settings, worker=POLLS_NEVER)
    task = sample_tasks.wait_for_on_crash.send("go")
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    second = scenario.ready_tree(recovery=settings, worker=POLLS_NEVER)
    died = first.kill()
    nats.publish(
        [copy_of(task.id)] * 2
    )  # its holder is dead but not yet known to be: the message must neither cause a takeover nor be lost
    scenario.until(scenario.started(task.id, 2), within=3 * SLACK * 2, what="it runs again", tree=second)
    took_s = time.monotonic() - died
    threshold_s = FAST["running_stale_threshold_ms"] / 1_000
    print(f"recovered {took_s:.2f} s after the crash; the threshold is {threshold_s} s")
    assert took_s > threshold_s - FAST["runner_heartbeat_interval_ms"] / 1_000
    assert "stale_tasks_detected" in second.output()  # it is logged before the task is recovered
    assert [row["noticed_by"] for row in scenario.recoveries(task.id)] == ["age"]
    scenario.open_gate("go")
    assert task.result(timeout=20) == "done"
    scenario.until(nats.drained, within=30, what="the stream is drained")


@pytest.mark.long
def test_a_deadlocked_task_is_recovered_by_its_missing_progress(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N4 N10
    tree = scenario.ready_tree(recovery=FAST, worker=POLLS_NEVER)
    nats.ready()
    task = sample_tasks.deadlocks_once.send()
    scenario.until(scenario.started(task.id, 2), within=4 * SLACK, what="it runs again", tree=tree)
    assert "stale_tasks_detected" in tree.output()  # it is logged before the task is recovered
    assert scenario.recoveries(task.id)[0]["noticed_by"] == "progress"
    assert task.result(timeout=20) == "done"
    assert nats.travelled() > 0


def test_without_the_database_no_task_starts_and_no_message_is_acknowledged(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N8
    with wire(scenario.target) as line:
        tree = scenario.ready_tree(worker=POLLS_NEVER, url=line.url)
        nats.ready()
        line.cut()
        handles = [sample_tasks.quick.send(n) for n in range(20)]
        nats.publish(copy_of(handle.id, number=n) for n, handle in enumerate(handles))
        scenario.until(
            lambda: nats.counters().consumers["default"].num_redelivered > 0,
            within=30,
            what="they come again and again",
        )
        counters = nats.counters()
        assert counters.messages == 20
        assert counters.consumers["default"].ack_floor < counters.last_seq - 19
        assert scenario.effects("start") == []
        line.mend()
        assert [handle.result(timeout=60) for handle in handles] == list(range(20))
        starts = [each["task"] for each in scenario.effects("start")]
        assert len(starts) == len(set(starts)) == 20
        scenario.until(nats.drained, within=60, what="the stream is drained", tree=tree)


def test_a_message_is_kept_in_progress_only_while_beats_succeed(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N5
    nats.redeliver_soon()
    with wire(scenario.target) as line:
        scenario.ready_tree(recovery=FAST, worker=POLLS_NEVER, url=line.url)
        nats.ready()
        task = sample_tasks.wait_for_on_crash.send("go")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        scenario.until(
            lambda: nats.counters().consumers["default"].num_ack_pending == 1, within=20, what="it is in hand"
        )
        time.sleep(7)  # longer than the wait for an acknowledgement
        assert nats.counters().consumers["default"].num_redelivered == 0
        line.cut()
        scenario.until(
            lambda: nats.counters().consumers["default"].num_redelivered > 0,
            within=30,
            what="nobody keeps it any more",
        )
        line.mend()
        scenario.open_gate("go")
        assert task.result(timeout=60) == "done"
        scenario.until(nats.drained, within=60, what="the stream is drained")


@pytest.mark.long
def test_tasks_run_after_the_publishing_worker_was_killed(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:
    trees = [scenario.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
    nats.ready()
    (relay,) = scenario.query("select holder from {schema}.relay")
    doomed = next(tree for tree in trees if scenario.workers(tree)[0]["id"] == relay["holder"])
    before = nats.travelled()
    died = doomed.kill()
    for n in range(40):
        sent = time.monotonic()
        assert sample_tasks.quick.send(n).result(timeout=60) == n
        took_s = time.monotonic() - sent
        if took_s > 0.5:
            print(f"sent {sent - died:.2f} s after the kill, it took {took_s:.2f} s")
        assert took_s < 3 * SLACK
        time.sleep(0.2)  # covers the seconds of the takeover
    (relay,) = scenario.query("select holder from {schema}.relay where taken_until > now()")
    assert relay["holder"] in {row["id"] for tree in trees for row in scenario.workers(tree)}
    assert nats.travelled() > before
    assert len(scenario.effects("start")) == 40


@pytest.mark.long
def test_messages_delivered_to_a_frozen_worker_do_not_delay_their_tasks(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:
    trees = [scenario.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
    nats.ready()
    (relay,) = scenario.query("select holder from {schema}.relay")
    frozen = next(tree for tree in trees if scenario.workers(tree)[0]["id"] != relay["holder"])
    scenario.until(
        lambda: nats.counters().consumers["default"].num_waiting >= 2, within=20, what="both ask for messages"
    )
    frozen.freeze()
    slow = 0
    for n in range(60):
        sent = time.monotonic()
        assert sample_tasks.quick.send(n).result(timeout=4 * SLACK) == n
        slow += time.monotonic() - sent > 0.5
        time.sleep(0.05)  # the requests of the frozen worker stay open for seconds
    print(f"{slow} of 60 waited longer than half a second")
    frozen.thaw()
    scenario.until(nats.drained, within=60, what="the stream is drained")
    starts = [line["task"] for line in scenario.effects("start")]
    assert len(starts) == len(set(starts)) == 60


@pytest.mark.long
def test_a_worker_is_replaced_even_if_nats_rejects_its_password(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    with NatsServer(user="worker", password="swordfish") as server:
        nats = NatsScenario(scenario, server)
        tree = scenario.ready_tree(recovery=FAST)
        nats.ready()
        task = sample_tasks.wait_for_on_crash.send("go")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        server.password = "second"
        server.restart()
        scenario.until_logged(tree, "Authorization Violation")
        (worker,) = scenario.workers(tree)
        psutil.Process(worker["pid"]).kill()
        scenario.until(scenario.started(task.id, 2), within=30, what="another worker runs it", tree=tree)
        scenario.open_gate("go")
        assert task.result(timeout=20) == "done"
        assert "swordfish" not in tree.output()
        # But the start of a new tree fails with the error.
        refused = scenario.start_tree(recovery=FAST)
        assert refused.process.wait(timeout=30) == 1
        assert "refused the user 'worker'" in refused.output()
