"""Tasks announced by NATS JetStream: messages are lost, repeated, delayed and overtaken without any effect on the tasks.

The workers of most stories poll every five minutes, so only messages notify them; the stream's counters prove it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from everbeat.nats.stream_plan import StreamPlan
from tests.nats_server import NatsServer
from tests.stories.nats_scenario import ONE_SLOT, POLLS_NEVER, NatsScenario, Witness, copy_of
from tests.stories.scenario import FAST, SLACK, Scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]


@pytest.fixture
def nats(scenario: Scenario) -> Iterator[NatsScenario]:
    """Must run before `sample_tasks`, whose app gets the URL of the server."""
    with NatsServer() as server:
        yield NatsScenario(scenario, server)


def test_tasks_are_announced_by_messages(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N1
    scenario.ready_tree(worker=POLLS_NEVER)
    nats.ready()
    handles = [sample_tasks.quick.send(n) for n in range(20)]
    assert [handle.result(timeout=20) for handle in handles] == list(range(20))
    handles = sample_tasks.app.send_many(sample_tasks.quick.call(n) for n in range(50))
    assert [handle.result(timeout=20) for handle in handles] == list(range(50))
    assert len(scenario.effects("start")) == 70
    scenario.until(nats.drained, within=20, what="the stream is drained")
    counters = nats.counters()
    assert nats.travelled() > 0  # a row is not published if a claim that another message caused was faster
    assert (
        counters.consumers["default"].delivered
        == counters.consumers["default"].ack_floor
        == counters.last_seq
    )


@pytest.mark.long
def test_a_quiet_tree_leaves_messages_to_others_until_it_is_resumed(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # J1 N1
    quiet = scenario.ready_tree(worker=POLLS_NEVER)
    nats.ready()
    sample_tasks.quick.send(1).result(timeout=20)
    (tree,) = sample_tasks.app.quiet_workers([scenario.workers(quiet)[0]["id"]])
    assert tree.quiet_since is not None
    sent = [sample_tasks.quick.send(2)]

    def one_waits() -> bool:
        time.sleep(1)  # longer than a message takes to a worker that requests it
        if scenario.task(sent[-1].id)["state"] != "PENDING":
            sent.append(sample_tasks.quick.send(2))  # the order had not arrived yet
            return False
        return True

    scenario.until(one_waits, within=20, what="a task waits")
    waits, before = sent[-1], len(scenario.effects("start"))
    scenario.ready_tree(worker=POLLS_NEVER)
    assert waits.result(timeout=20) == 2
    scenario.until(nats.drained, within=20, what="the stream is drained")
    for n in range(10):
        sample_tasks.quick.send(n).result(timeout=20)
    ran = {line["pid"] for line in scenario.effects("start")[before:]}
    assert scenario.workers(quiet)[0]["pid"] not in ran
    sample_tasks.app.resume_workers(everyone=True)
    assert sample_tasks.quick.send(3).result(timeout=20) == 3


def test_a_message_about_a_task_that_runs_elsewhere_is_acknowledged_without_running_code(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N1 N10
    scenario.ready_tree(worker=ONE_SLOT)
    nats.ready()
    task = sample_tasks.wait_for.send("go")
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    other = scenario.ready_tree(worker=ONE_SLOT)
    before = nats.travelled()
    nats.publish(
        [copy_of(task.id)] * 5
    )  # the holder may get one or two, since its old requests are still open
    scenario.until_logged(other, "task_skipped_active_elsewhere")
    assert nats.travelled() == before + 5
    scenario.open_gate("go")
    assert task.result(timeout=20) == "done"
    assert len(scenario.effects("start")) == 1
    scenario.until(nats.drained, within=20, what="the stream is drained")


def test_five_shuffled_copies_of_each_message_run_each_task_once(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N2
    first = scenario.ready_tree(worker=POLLS_NEVER)
    nats.ready()
    first.stop()
    handles = sample_tasks.app.send_many(sample_tasks.quick.call(n) for n in range(200))
    copies = [copy_of(handle.id, number=1_000 + n) for n, handle in enumerate(handles)] * 5
    random.Random(7).shuffle(copies)
    nats.publish(copies)
    scenario.ready_tree(worker={**POLLS_NEVER, "processes": 4})
    assert sorted(handle.result(timeout=60) for handle in handles) == list(range(200))
    starts = [line["task"] for line in scenario.effects("start")]
    assert len(starts) == len(set(starts)) == 200
    scenario.until(nats.drained, within=30, what="the stream is drained")
    assert nats.travelled() >= 1_000


@pytest.mark.long
def test_recovered_tasks_are_published_once_more_with_the_reason(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N3 N10
    nats.redeliver_soon()
    sweepers = [scenario.ready_tree(recovery=FAST, worker=ONE_SLOT) for _ in range(2)]
    blockers = [sample_tasks.wait_for.send("block") for _ in sweepers]
    scenario.until(lambda: len(scenario.effects("start")) == 2, within=20, what="the sweepers have no room")
    first = scenario.ready_tree(recovery=FAST, worker=ONE_SLOT)
    nats.ready()
    task = sample_tasks.wait_for_on_crash.send("go")
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    (holder,) = scenario.workers(first)
    with Witness(nats) as witness:
        first.kill()
        scenario.until(
            lambda: any(message.cleared for message, _ in witness.of(task.id)),
            within=30,
            what="it is told of",
        )
        scenario.open_gate("block")
        scenario.until(scenario.started(task.id, 2), within=30, what="it runs again")
        cleared = [(message, headers) for message, headers in witness.of(task.id) if message.cleared]
    (recovery,) = scenario.recoveries(task.id)
    reason = f"Worker {holder['id']} stopped responding"
    assert [message.reason for message, _ in cleared] == [reason]
    assert (cleared[0][1]["cleared"], cleared[0][1]["clear_reason"]) == ("true", reason)
    assert cleared[0][0].fence == recovery["fence"] == 1
    held = scenario.task(task.id)
    scenario.open_gate("go")
    assert task.result(timeout=20) == "done"
    assert scenario.task(task.id)["fence"] == held["fence"] == 2  # the new holder has kept its claim
    assert [blocker.result(timeout=20) for blocker in blockers] == ["done", "done"]
    scenario.until(nats.drained, within=20, what="the stream is drained")

    def reports() -> int:
        return sum(sweeper.output().count("task_reenqueued") for sweeper in sweepers)

    scenario.until(reports, within=20, what="the publication is logged")
    assert reports() == 1


def test_a_send_without_nats_is_fast_and_its_task_still_runs(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N6
    tree = scenario.ready_tree()
    nats.ready()
    assert sample_tasks.quick.send(0).result(timeout=20) == 0
    before = nats.travelled()
    nats.server.kill()
    began = time.monotonic()
    first = sample_tasks.quick.send(1)
    took_s = time.monotonic() - began
    print(f"a send without NATS: {took_s * 1_000:.1f} ms")
    assert took_s < 0.1 * SLACK
    assert first.result(timeout=5 * SLACK) == 1
    print(f"and it had run after {time.monotonic() - began:.2f} s")
    rest = sample_tasks.app.send_many(sample_tasks.quick.call(n) for n in range(2, 100))
    assert [handle.result(timeout=5 * SLACK) for handle in rest] == list(range(2, 100))
    scenario.until_logged(tree, "nats_away")
    nats.server.restart()
    scenario.until_logged(tree, "nats_back")
    scenario.until(nats.drained, within=5 * SLACK, what="outbox and stream are empty")
    last = sample_tasks.quick.send(100)
    assert last.result(timeout=20) == 100
    scenario.until(lambda: nats.travelled() > before, within=20, what="messages travel again")
    starts = [line["task"] for line in scenario.effects("start")]
    assert len(starts) == len(set(starts)) == 101


def test_tasks_run_after_nats_restarts_with_an_empty_store(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N6
    scenario.ready_tree(worker=ONE_SLOT)
    nats.ready()
    holding = sample_tasks.wait_for.send("go")
    scenario.until(scenario.started(holding.id), within=20, what="the only slot is taken")
    waiting = [sample_tasks.quick.send(n) for n in range(30)]
    scenario.until(lambda: nats.counters().messages >= 30, within=20, what="the others' messages wait")
    nats.server.restart(empty=True)
    scenario.open_gate("go")
    assert [handle.result(timeout=60) for handle in waiting] == list(range(30))
    starts = [line["task"] for line in scenario.effects("start")]
    assert len(starts) == len(set(starts)) == 31
    scenario.until(nats.drained, within=20, what="the stream is drained")


@pytest.mark.long
def test_tasks_run_while_the_nats_server_is_frozen(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N6
    scenario.ready_tree()
    nats.ready()
    assert sample_tasks.quick.send(0).result(timeout=20) == 0
    nats.server.freeze()
    thaw = threading.Timer(5, nats.server.thaw)
    thaw.start()
    try:
        handles = [sample_tasks.quick.send(n) for n in range(1, 50)]
        assert [handle.result(timeout=30) for handle in handles] == list(range(1, 50))
    finally:
        thaw.join()
    assert sample_tasks.quick.send(50).result(timeout=30) == 50
    starts = [line["task"] for line in scenario.effects("start")]
    assert len(starts) == len(set(starts)) == 51
    scenario.until(nats.drained, within=30, what="the stream is drained")


async def delete_messages(server: NatsServer, plan: StreamPlan) -> None:
    newest = (await server.counters(plan.stream)).last_seq
    for place in (newest, newest - 1):
        await server.delete_message(plan.stream, place)


async def delete_consumer(server: NatsServer, plan: StreamPlan) -> None:
    await server.delete_consumer(plan.stream, plan.consumer("default"))


async def delete_stream(server: NatsServer, plan: StreamPlan) -> None:
    await server.delete_stream(plan.stream)


@pytest.mark.parametrize(
    "delete",
    [
        *(pytest.param(one, marks=pytest.mark.long) for one in (delete_messages, delete_consumer)),
        delete_stream,
    ],
)
def test_deleted_messages_consumers_and_streams_are_created_again(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType, delete: object
) -> None:  # N7
    tree = scenario.ready_tree(worker=ONE_SLOT)
    nats.ready()
    holding = sample_tasks.wait_for.send("go")
    scenario.until(scenario.started(holding.id), within=20, what="the only slot is taken")
    waiting = [sample_tasks.quick.send(n) for n in range(5)]
    scenario.until(lambda: nats.counters().messages >= 5, within=20, what="the others' messages wait")
    nats.do(delete)  # type: ignore[arg-type]
    if delete is not delete_consumer:
        scenario.until_logged(tree, "messages_republished")
    scenario.open_gate("go")
    assert [handle.result(timeout=60) for handle in waiting] == list(range(5))
    assert sample_tasks.quick.send(5).result(timeout=60) == 5
    starts = [line["task"] for line in scenario.effects("start")]
    assert len(starts) == len(set(starts)) == 7
    scenario.until(nats.drained, within=20, what="the stream is drained")


def test_redelivered_messages_to_the_holder_do_not_run_the_task_again(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N7
    scenario.ready_tree(worker=POLLS_NEVER)
    nats.ready()
    task = sample_tasks.wait_for.send("go")
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    nats.publish([copy_of(task.id)] * 3)
    scenario.until(
        lambda: nats.counters().consumers["default"].num_ack_pending >= 4,
        within=20,
        what="all copies are delivered",
    )
    assert sample_tasks.quick.send(1).result(timeout=20) == 1
    assert len(scenario.effects("start", task.id)) == 1
    scenario.open_gate("go")
    assert task.result(timeout=20) == "done"
    scenario.until(nats.drained, within=20, what="the stream is drained")
    assert len(scenario.effects("start", task.id)) == 1


def test_messages_that_cannot_be_decoded_are_removed(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:
    scenario.ready_tree(worker=ONE_SLOT)
    nats.ready()
    nats.publish_raw(b"not JSON", b"{}", *([b"\x00"] * 8))
    scenario.until(nats.drained, within=20, what="the stream is drained")
    assert sample_tasks.quick.send(1).result(timeout=20) == 1


@pytest.mark.long
def test_a_full_window_of_waiting_tasks_does_not_block_other_tasks(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:
    scenario.ready_tree(worker=POLLS_NEVER)
    nats.ready()
    first = sample_tasks.wait_for.with_options(serial="one by one").send("go")
    scenario.until(scenario.started(first.id), within=20, what="the head of the line runs")
    line = sample_tasks.app.send_many(
        sample_tasks.quick.with_options(serial="one by one").call(n) for n in range(1_100)
    )
    scenario.until(lambda: nats.counters().messages >= 1_000, within=20, what="the window is full")
    for n in range(20):
        assert sample_tasks.quick.send(n).result(timeout=2 * SLACK) == n
    scenario.until(lambda: nats.outbox() <= 1_101, within=20, what="what has ended is gone")
    scenario.open_gate("go")
    assert line[-1].result(timeout=120) == 1_099
    scenario.until(nats.drained, within=60, what="the stream is drained")
