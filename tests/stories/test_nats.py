"""Tasks told by NATS JetStream: messages are lost, repeated, delayed and overtaken, and nothing of that is seen in what the tasks do.

The workers of most stories poll every five minutes, so that only messages tell them; the stream's counters say that they travelled.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from everbeat.wake.stream_plan import StreamPlan
from tests.nats_server import NatsServer
from tests.stories.nats_stage import POLLS_NEVER, Told, Witness, copy_of
from tests.stories.stage import FAST, SLACK, Stage

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ONE_SLOT = {
    **POLLS_NEVER,
    "async_concurrency": 1,
    "prefetch": 0,
    "thread_concurrency": 0,
    "process_concurrency": 0,
}


@pytest.fixture
def told(stage: Stage) -> Iterator[Told]:
    """Before `deeds`, whose app is told of the server."""
    with NatsServer() as server:
        yield Told(stage, server)


def test_tasks_travel_as_messages(stage: Stage, told: Told, deeds: ModuleType) -> None:  # N1
    stage.ready_tree(worker=POLLS_NEVER)
    told.ready()
    handles = [deeds.quick.send(n) for n in range(20)]
    assert [handle.result(timeout=20) for handle in handles] == list(range(20))
    handles = deeds.app.send_many(deeds.quick.call(n) for n in range(50))
    assert [handle.result(timeout=20) for handle in handles] == list(range(50))
    assert len(stage.effects("start")) == 70
    stage.until(told.drained, within=20, what="the stream is drained")
    counters = told.counters()
    assert told.travelled() > 0  # a row is not published once a claim that another message caused was faster
    assert (
        counters.consumers["default"].delivered
        == counters.consumers["default"].ack_floor
        == counters.last_seq
    )


def test_a_quiet_tree_leaves_the_messages_to_others_until_it_is_resumed(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # J1 N1
    quiet = stage.ready_tree(worker=POLLS_NEVER)
    told.ready()
    deeds.quick.send(1).result(timeout=20)
    (tree,) = deeds.app.quiet_workers([stage.workers(quiet)[0]["id"]])
    assert tree.quiet_since is not None
    sent = [deeds.quick.send(2)]

    def one_waits() -> bool:
        time.sleep(1)  # longer than a message takes to a worker that asks for it
        if stage.task(sent[-1].id)["state"] != "PENDING":
            sent.append(deeds.quick.send(2))  # the order had not arrived yet
            return False
        return True

    stage.until(one_waits, within=20, what="a task waits")
    waits, before = sent[-1], len(stage.effects("start"))
    stage.ready_tree(worker=POLLS_NEVER)
    assert waits.result(timeout=20) == 2
    stage.until(told.drained, within=20, what="the stream is drained")
    for n in range(10):
        deeds.quick.send(n).result(timeout=20)
    ran = {line["pid"] for line in stage.effects("start")[before:]}
    assert stage.workers(quiet)[0]["pid"] not in ran
    deeds.app.resume_workers(everyone=True)
    assert deeds.quick.send(3).result(timeout=20) == 3


def test_a_message_of_what_runs_elsewhere_is_acknowledged_and_calls_no_code(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N1 N10
    stage.ready_tree(worker=ONE_SLOT)
    told.ready()
    task = deeds.wait_for.send("go")
    stage.until(stage.started(task.id), within=20, what="it runs")
    other = stage.ready_tree(worker=ONE_SLOT)
    before = told.travelled()
    told.publish([copy_of(task.id)] * 5)  # one or two may go to the holder, whose old requests are still open
    stage.until(
        lambda: "task_skipped_active_elsewhere" in other.output(), within=20, what="the other one skips it"
    )
    assert told.travelled() == before + 5
    stage.open_gate("go")
    assert task.result(timeout=20) == "done"
    assert len(stage.effects("start")) == 1
    stage.until(told.drained, within=20, what="the stream is drained")


def test_five_copies_of_each_shuffled_have_one_effect_each(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N2
    first = stage.ready_tree(worker=POLLS_NEVER)
    told.ready()
    first.stop()
    handles = deeds.app.send_many(deeds.quick.call(n) for n in range(200))
    copies = [copy_of(handle.id, number=1_000 + n) for n, handle in enumerate(handles)] * 5
    random.Random(7).shuffle(copies)
    told.publish(copies)
    stage.ready_tree(worker={**POLLS_NEVER, "processes": 4})
    assert sorted(handle.result(timeout=60) for handle in handles) == list(range(200))
    starts = [line["task"] for line in stage.effects("start")]
    assert len(starts) == len(set(starts)) == 200
    stage.until(told.drained, within=30, what="the stream is drained")
    assert told.travelled() >= 1_000


def test_recovered_tasks_are_published_again_once_with_the_reason(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N3 N10
    told.redeliver_soon()
    sweepers = [stage.ready_tree(recovery=FAST, worker=ONE_SLOT) for _ in range(2)]
    blockers = [deeds.wait_for.send("block") for _ in sweepers]
    stage.until(lambda: len(stage.effects("start")) == 2, within=20, what="the sweepers have no room")
    first = stage.ready_tree(recovery=FAST, worker=ONE_SLOT)
    told.ready()
    task = deeds.wait_for_on_crash.send("go")
    stage.until(stage.started(task.id), within=20, what="it runs")
    (holder,) = stage.workers(first)
    with Witness(told) as witness:
        first.kill()
        stage.until(
            lambda: any(message.cleared for message, _ in witness.of(task.id)),
            within=30,
            what="it is told of",
        )
        stage.open_gate("block")
        stage.until(stage.started(task.id, 2), within=30, what="it runs again")
        cleared = [(message, headers) for message, headers in witness.of(task.id) if message.cleared]
    (recovery,) = stage.recoveries(task.id)
    reason = f"Worker {holder['id']} stopped responding"
    assert [message.reason for message, _ in cleared] == [reason]
    assert (cleared[0][1]["cleared"], cleared[0][1]["clear_reason"]) == ("true", reason)
    assert cleared[0][0].fence == recovery["fence"] == 1
    assert sum(sweeper.output().count("task_reenqueued") for sweeper in sweepers) == 1
    held = stage.task(task.id)
    stage.open_gate("go")
    assert task.result(timeout=20) == "done"
    assert stage.task(task.id)["fence"] == held["fence"] == 2  # the new holder has kept its claim
    assert [blocker.result(timeout=20) for blocker in blockers] == ["done", "done"]
    stage.until(told.drained, within=20, what="the stream is drained")


def test_nats_away_at_a_send_costs_the_send_nothing_and_the_work_goes_on(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N6
    tree = stage.ready_tree()
    told.ready()
    assert deeds.quick.send(0).result(timeout=20) == 0
    before = told.travelled()
    told.server.kill()
    began = time.monotonic()
    first = deeds.quick.send(1)
    took_s = time.monotonic() - began
    print(f"a send without NATS: {took_s * 1_000:.1f} ms")
    assert took_s < 0.1 * SLACK
    assert first.result(timeout=5 * SLACK) == 1
    print(f"and it had run after {time.monotonic() - began:.2f} s")
    rest = deeds.app.send_many(deeds.quick.call(n) for n in range(2, 100))
    assert [handle.result(timeout=5 * SLACK) for handle in rest] == list(range(2, 100))
    assert "nats_away" in tree.output()
    told.server.restart()
    stage.until(lambda: "nats_back" in tree.output(), within=20, what="NATS is back")
    stage.until(told.drained, within=5 * SLACK, what="outbox and stream are empty")
    last = deeds.quick.send(100)
    assert last.result(timeout=20) == 100
    stage.until(lambda: told.travelled() > before, within=20, what="messages travel again")
    starts = [line["task"] for line in stage.effects("start")]
    assert len(starts) == len(set(starts)) == 101


def test_a_server_that_comes_back_with_an_empty_store(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N6
    stage.ready_tree(worker=ONE_SLOT)
    told.ready()
    holding = deeds.wait_for.send("go")
    stage.until(stage.started(holding.id), within=20, what="the only slot is taken")
    waiting = [deeds.quick.send(n) for n in range(30)]
    stage.until(lambda: told.counters().messages >= 30, within=20, what="the others' messages wait")
    told.server.restart(empty=True)
    stage.open_gate("go")
    assert [handle.result(timeout=60) for handle in waiting] == list(range(30))
    starts = [line["task"] for line in stage.effects("start")]
    assert len(starts) == len(set(starts)) == 31
    stage.until(told.drained, within=20, what="the stream is drained")


def test_a_frozen_server(stage: Stage, told: Told, deeds: ModuleType) -> None:  # N6
    stage.ready_tree()
    told.ready()
    assert deeds.quick.send(0).result(timeout=20) == 0
    told.server.freeze()
    thaw = threading.Timer(5, told.server.thaw)
    thaw.start()
    try:
        handles = [deeds.quick.send(n) for n in range(1, 50)]
        assert [handle.result(timeout=30) for handle in handles] == list(range(1, 50))
    finally:
        thaw.join()
    assert deeds.quick.send(50).result(timeout=30) == 50
    starts = [line["task"] for line in stage.effects("start")]
    assert len(starts) == len(set(starts)) == 51
    stage.until(told.drained, within=30, what="the stream is drained")


async def delete_messages(server: NatsServer, plan: StreamPlan) -> None:
    newest = (await server.counters(plan.stream)).last_seq
    for place in (newest, newest - 1):
        await server.delete_message(plan.stream, place)


async def delete_consumer(server: NatsServer, plan: StreamPlan) -> None:
    await server.delete_consumer(plan.stream, plan.consumer("default"))


async def delete_stream(server: NatsServer, plan: StreamPlan) -> None:
    await server.delete_stream(plan.stream)


@pytest.mark.parametrize("delete", [delete_messages, delete_consumer, delete_stream])
def test_what_is_deleted_is_made_and_published_again(
    stage: Stage, told: Told, deeds: ModuleType, delete: object
) -> None:  # N7
    tree = stage.ready_tree(worker=ONE_SLOT)
    told.ready()
    holding = deeds.wait_for.send("go")
    stage.until(stage.started(holding.id), within=20, what="the only slot is taken")
    waiting = [deeds.quick.send(n) for n in range(5)]
    stage.until(lambda: told.counters().messages >= 5, within=20, what="the others' messages wait")
    told.do(delete)  # type: ignore[arg-type]
    if delete is not delete_consumer:
        stage.until(lambda: "messages_republished" in tree.output(), within=20, what="it is noticed")
    stage.open_gate("go")
    assert [handle.result(timeout=60) for handle in waiting] == list(range(5))
    assert deeds.quick.send(5).result(timeout=60) == 5
    starts = [line["task"] for line in stage.effects("start")]
    assert len(starts) == len(set(starts)) == 7
    stage.until(told.drained, within=20, what="the stream is drained")


def test_a_redelivery_to_the_process_that_runs_the_task(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:  # N7
    stage.ready_tree(worker=POLLS_NEVER)
    told.ready()
    task = deeds.wait_for.send("go")
    stage.until(stage.started(task.id), within=20, what="it runs")
    told.publish([copy_of(task.id)] * 3)
    stage.until(
        lambda: told.counters().consumers["default"].num_ack_pending >= 4,
        within=20,
        what="all copies are delivered",
    )
    assert deeds.quick.send(1).result(timeout=20) == 1
    assert len(stage.effects("start", task.id)) == 1
    stage.open_gate("go")
    assert task.result(timeout=20) == "done"
    stage.until(told.drained, within=20, what="the stream is drained")
    assert len(stage.effects("start", task.id)) == 1


def test_what_nobody_understands_takes_no_room(stage: Stage, told: Told, deeds: ModuleType) -> None:
    stage.ready_tree(worker=ONE_SLOT)
    told.ready()
    told.publish_raw(b"not JSON", b"{}", *([b"\x00"] * 8))
    stage.until(told.drained, within=20, what="the stream is drained")
    assert deeds.quick.send(1).result(timeout=20) == 1


def test_more_messages_than_may_be_out_of_tasks_that_wait_hold_up_no_others(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:
    stage.ready_tree(worker=POLLS_NEVER)
    told.ready()
    first = deeds.wait_for.with_options(serial="one by one").send("go")
    stage.until(stage.started(first.id), within=20, what="the head of the line runs")
    line = deeds.app.send_many(deeds.quick.with_options(serial="one by one").call(n) for n in range(1_100))
    stage.until(lambda: told.counters().messages >= 1_000, within=20, what="the window is full")
    for n in range(20):
        assert deeds.quick.send(n).result(timeout=2 * SLACK) == n
    stage.until(lambda: told.outbox() <= 1_101, within=20, what="what has ended is gone")
    stage.open_gate("go")
    assert line[-1].result(timeout=120) == 1_099
    stage.until(told.drained, within=60, what="the stream is drained")
