"""The three ways to die of the page on heartbeats over NATS, in compressed time; a database that is away; and what is told of all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest

from tests.nats_server import NatsServer
from tests.stories.nats_stage import POLLS_NEVER, Told, Witness, copy_of
from tests.stories.stage import BY_AGE, FAST, SLACK, Stage
from tests.stories.wire import wire

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]


@pytest.fixture
def told(stage: Stage) -> Iterator[Told]:
    """Before `deeds`, whose app is told of the server."""
    with NatsServer() as server:
        yield Told(stage, server)


def test_a_pod_that_starts_again_finds_what_it_left(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N4 N10
    first = stage.ready_tree(worker=POLLS_NEVER)
    told.ready()
    task = deeds.wait_for_on_crash.send("go")
    ended = deeds.quick.send(7)
    assert ended.result(timeout=20) == 7
    stage.until(stage.started(task.id), within=20, what="it runs")
    first.kill()
    with Witness(told) as witness:
        began = time.monotonic()
        again = stage.start_tree(worker=POLLS_NEVER)
        stage.until(stage.started(task.id, 2), within=3 * SLACK, what="it runs again", tree=again)
        print(f"recovered {time.monotonic() - began:.2f} s after the new pod was started")
        assert "orphaned_tasks_detected" in again.output()
        assert "reconciliation_complete" in again.output()
        assert witness.of(ended.id) == []
    (recovery,) = stage.recoveries(task.id)
    assert recovery["noticed_by"] == "startup"
    assert stage.recoveries(ended.id) == []  # what has ended is never cleared
    stage.open_gate("go")
    assert task.result(timeout=20) == "done"


def test_a_crash_without_a_restart_is_found_by_age(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N4 N9 N10
    """The page's settings, 5 min and 30 s, a hundred and fifty and thirty times faster: 2 s and 1 s."""
    settings = {**FAST, **BY_AGE}
    told.redeliver_soon()
    first = stage.ready_tree(recovery=settings, worker=POLLS_NEVER)
    task = deeds.wait_for_on_crash.send("go")
    stage.until(stage.started(task.id), within=20, what="it runs")
    second = stage.ready_tree(recovery=settings, worker=POLLS_NEVER)
    died = first.kill()
    told.publish(
        [copy_of(task.id)] * 2
    )  # its holder is dead, and not yet known to be: nobody takes it over, nobody forgets it
    stage.until(stage.started(task.id, 2), within=3 * SLACK * 2, what="it runs again", tree=second)
    took_s = time.monotonic() - died
    threshold_s = FAST["running_stale_threshold_ms"] / 1_000
    print(f"recovered {took_s:.2f} s after the crash; the threshold is {threshold_s} s")
    assert took_s > threshold_s - FAST["runner_heartbeat_interval_ms"] / 1_000
    assert "stale_tasks_detected" in second.output()
    assert [row["noticed_by"] for row in stage.recoveries(task.id)] == ["age"]
    stage.open_gate("go")
    assert task.result(timeout=20) == "done"
    stage.until(told.drained, within=30, what="the stream is drained")


def test_a_deadlock_is_found_by_silence(stage: Stage, told: Told, deeds: ModuleType) -> None:  # N4 N10
    tree = stage.ready_tree(recovery=FAST, worker=POLLS_NEVER)
    told.ready()
    task = deeds.deadlocks_once.send()
    stage.until(stage.started(task.id, 2), within=4 * SLACK, what="it runs again", tree=tree)
    assert "stale_tasks_detected" in tree.output()
    assert stage.recoveries(task.id)[0]["noticed_by"] == "progress"
    assert task.result(timeout=20) == "done"
    assert told.travelled() > 0


def test_without_the_database_nothing_starts_and_nothing_is_acknowledged(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N8
    with wire(stage.target) as line:
        tree = stage.ready_tree(worker=POLLS_NEVER, url=line.url)
        told.ready()
        line.cut()
        handles = [deeds.quick.send(n) for n in range(20)]
        told.publish(copy_of(handle.id, number=n) for n, handle in enumerate(handles))
        stage.until(
            lambda: told.counters().consumers["default"].num_redelivered > 0,
            within=30,
            what="they come again and again",
        )
        counters = told.counters()
        assert counters.messages == 20
        assert counters.consumers["default"].ack_floor < counters.last_seq - 19
        assert stage.effects("start") == []
        line.mend()
        assert [handle.result(timeout=60) for handle in handles] == list(range(20))
        starts = [each["task"] for each in stage.effects("start")]
        assert len(starts) == len(set(starts)) == 20
        stage.until(told.drained, within=60, what="the stream is drained", tree=tree)


def test_a_message_is_kept_only_while_beats_are_acknowledged(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N5
    told.redeliver_soon()
    with wire(stage.target) as line:
        stage.ready_tree(recovery=FAST, worker=POLLS_NEVER, url=line.url)
        told.ready()
        task = deeds.wait_for_on_crash.send("go")
        stage.until(stage.started(task.id), within=20, what="it runs")
        stage.until(
            lambda: told.counters().consumers["default"].num_ack_pending == 1, within=20, what="it is in hand"
        )
        time.sleep(7)  # longer than the wait for an acknowledgement
        assert told.counters().consumers["default"].num_redelivered == 0
        line.cut()
        stage.until(
            lambda: told.counters().consumers["default"].num_redelivered > 0,
            within=30,
            what="nobody keeps it any more",
        )
        line.mend()
        stage.open_gate("go")
        assert task.result(timeout=60) == "done"
        stage.until(told.drained, within=60, what="the stream is drained")


def test_the_worker_that_publishes_is_killed(stage: Stage, told: Told, deeds: ModuleType) -> None:
    trees = [stage.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
    told.ready()
    (relay,) = stage.query("select holder from {schema}.relay")
    doomed = next(tree for tree in trees if stage.workers(tree)[0]["id"] == relay["holder"])
    before = told.travelled()
    died = doomed.kill()
    for n in range(40):
        sent = time.monotonic()
        assert deeds.quick.send(n).result(timeout=60) == n
        took_s = time.monotonic() - sent
        if took_s > 0.5:
            print(f"sent {sent - died:.2f} s after the kill, it took {took_s:.2f} s")
        assert took_s < 3 * SLACK
        time.sleep(0.2)  # the seconds of the takeover go by
    (relay,) = stage.query("select holder from {schema}.relay where taken_until > now()")
    assert relay["holder"] in {row["id"] for tree in trees for row in stage.workers(tree)}
    assert told.travelled() > before
    assert len(stage.effects("start")) == 40


def test_messages_in_the_hands_of_a_frozen_worker_keep_no_task_waiting(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:
    trees = [stage.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
    told.ready()
    (relay,) = stage.query("select holder from {schema}.relay")
    frozen = next(tree for tree in trees if stage.workers(tree)[0]["id"] != relay["holder"])
    stage.until(
        lambda: told.counters().consumers["default"].num_waiting >= 2, within=20, what="both ask for messages"
    )
    frozen.freeze()
    slow = 0
    for n in range(60):
        sent = time.monotonic()
        assert deeds.quick.send(n).result(timeout=4 * SLACK) == n
        slow += time.monotonic() - sent > 0.5
        time.sleep(0.05)  # the requests of the frozen one are open for seconds
    print(f"{slow} of 60 waited longer than half a second")
    frozen.thaw()
    stage.until(told.drained, within=60, what="the stream is drained")
    starts = [line["task"] for line in stage.effects("start")]
    assert len(starts) == len(set(starts)) == 60


def test_a_worker_is_replaced_also_when_nats_refuses_its_password(stage: Stage, deeds: ModuleType) -> None:
    with NatsServer(user="worker", password="swordfish") as server:
        told = Told(stage, server)
        tree = stage.ready_tree(recovery=FAST)
        told.ready()
        task = deeds.wait_for_on_crash.send("go")
        stage.until(stage.started(task.id), within=20, what="it runs")
        server.password = "second"
        server.restart()
        stage.until(
            lambda: "Authorization Violation" in tree.output(), within=20, what="the refusal is logged"
        )
        (worker,) = stage.workers(tree)
        psutil.Process(worker["pid"]).kill()
        stage.until(stage.started(task.id, 2), within=30, what="another worker runs it", tree=tree)
        stage.open_gate("go")
        assert task.result(timeout=20) == "done"
        assert "swordfish" not in tree.output()
        # But whoever starts a tree is told of the mistake.
        refused = stage.start_tree(recovery=FAST)
        assert refused.process.wait(timeout=30) == 1
        assert "refused the user 'worker'" in refused.output()
