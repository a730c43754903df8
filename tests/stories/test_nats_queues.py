"""Queues that share a stream: one that no worker takes, one with a consumer of another program, and one that fills the stream."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from everbeat.nats.stream_plan import StreamPlan
from tests.nats_server import NatsServer
from tests.stories.nats_scenario import ONE_SLOT, POLLS_NEVER, NatsScenario, copy_of
from tests.stories.scenario import SLACK, Scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]


@pytest.fixture
def nats(scenario: Scenario) -> Iterator[NatsScenario]:
    """Must run before `sample_tasks`, whose app gets the URL of the server."""
    with NatsServer() as server:
        yield NatsScenario(scenario, server)


def publishes(scenario: Scenario) -> bool:
    return bool(scenario.query("select from {schema}.relay where taken_until > now() and holder is not null"))


@pytest.mark.long
def test_messages_of_ended_tasks_leave_the_stream_even_if_no_worker_takes_them(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:  # N11
    tree = scenario.ready_tree(worker={**POLLS_NEVER, "queues": ["default"]})
    scenario.until(lambda: publishes(scenario), within=20, what="a worker publishes")
    scenario.wake = None  # the next tree does not use NATS
    monkeypatch.delenv("STORY_WAKE")
    mail = sample_tasks.quick.with_options(queue="mail")
    handles = sample_tasks.app.send_many(mail.call(n) for n in range(1_000))
    scenario.until(lambda: nats.counters().messages == 1_000, within=20, what="all are published")
    scenario.ready_tree(worker={"queues": ["mail"]})
    assert [handle.result(timeout=60) for handle in handles] == list(range(1_000))
    ended = time.monotonic()
    scenario.until(lambda: nats.counters().messages == 0, within=60, what="the stream holds none of them")
    print(f"the messages of 1,000 ended tasks were gone after {time.monotonic() - ended:.1f} s")
    scenario.until_logged(tree, "messages_not_taken")
    for n in range(20):
        began = time.monotonic()
        assert sample_tasks.quick.send(n).result(timeout=20) == n
        assert time.monotonic() - began < 1 * SLACK
    before = nats.travelled()
    handles = sample_tasks.app.send_many(mail.call(n) for n in range(100))
    assert [handle.result(timeout=5 * SLACK) for handle in handles] == list(range(100))
    assert nats.travelled() == before  # no more messages are published for a queue that no worker takes


@pytest.mark.long
def test_messages_of_ended_tasks_are_not_reported_while_a_live_worker_serves_their_queue(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:  # N11
    """The killed worker had received them; its successor is busy and requests no messages when they are removed."""
    tree = scenario.ready_tree(worker=ONE_SLOT)
    nats.ready()
    mail = sample_tasks.wait_for.with_options(queue="mail")
    killed = mail.send("go")
    scenario.until(scenario.started(killed.id), within=20, what="a task runs")
    (line,) = scenario.effects("start", killed.id)
    os.kill(line["pid"], signal.SIGKILL)
    scenario.until(scenario.state_is(killed.id, "FAILED"), within=20, what="its worker is found dead")
    works = mail.send("go")
    scenario.until(scenario.started(works.id), within=20, what="the successor is busy")
    consumer = nats.plan.consumer("mail")
    scenario.until(
        lambda: nats.counters().consumers[consumer].num_waiting == 0,
        within=20,
        what="it asks for no messages",
    )
    nats.publish([copy_of(killed.id, queue="mail")] * 5, queue="mail")
    scenario.until(lambda: nats.counters().messages <= 1, within=60, what="they are removed")
    scenario.open_gate("go")
    assert works.result(timeout=20) == "done"
    assert tree.stop() == 0
    assert "messages_not_taken" not in tree.output()


def test_a_queue_that_no_worker_takes_does_not_fill_a_bounded_stream(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:  # N11
    """2,400 tasks end in bursts, far more than the stream can hold, and none of them is taken by its message."""
    scenario.wake = {"servers": [nats.server.url], "max_bytes": 65_536}
    scenario.ready_tree(worker={**POLLS_NEVER, "queues": ["default"]})
    scenario.until(lambda: publishes(scenario), within=20, what="a worker publishes")
    scenario.wake = None  # the next tree does not use NATS
    monkeypatch.delenv("STORY_WAKE")
    scenario.ready_tree(worker={"queues": ["mail"]})
    mail = sample_tasks.quick.with_options(queue="mail")
    took_s = []
    for burst in range(12):
        ended = sample_tasks.app.send_many(mail.call(n) for n in range(200))
        began = time.monotonic()
        assert sample_tasks.quick.send(burst).result(timeout=20) == burst
        took_s.append(time.monotonic() - began)
        ended[-1].result(timeout=60)
    print(f"the other queue: {min(took_s):.3f} to {max(took_s):.3f} s")
    assert max(took_s) < 1 * SLACK
    before = nats.travelled()

    def is_carried() -> bool:
        """Send once more: a task that completes before its message is published needs no message."""
        assert sample_tasks.quick.send(7).result(timeout=20) == 7
        return nats.travelled() > before

    # The stream is full until a sweep removes the messages of the queue that no worker takes.
    scenario.until(is_carried, within=60, what="the other queue is carried")


def nats_check(scenario: Scenario) -> tuple[str, str]:
    """Return the verdict and the text of the doctor's check of NATS."""
    done = subprocess.run(
        [sys.executable, "-m", "everbeat", "doctor", "sample_tasks:app", "--json"],
        env=scenario.environment(recovery={}, worker={}), cwd=scenario.folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    (check,) = [each for each in json.loads(done.stdout)["checks"] if each["code"] == "NATS"]
    return check["verdict"], check["text"]


async def limit_deliveries(server: NatsServer, plan: StreamPlan) -> None:
    config = {**plan.consumer_settings("default")["config"], "max_deliver": 3}
    body = {"stream_name": plan.stream, "config": config}
    assert "error" not in await server.ask(f"CONSUMER.DURABLE.CREATE.{plan.stream}.default", body)


async def take_mail(server: NatsServer, plan: StreamPlan) -> None:
    config = {
        "durable_name": "theirs",
        "ack_policy": "explicit",
        "filter_subject": plan.subject("mail"),
    }
    body = {"stream_name": plan.stream, "config": config}
    assert "error" not in await server.ask(f"CONSUMER.DURABLE.CREATE.{plan.stream}.theirs", body)


@pytest.mark.long
def test_a_consumer_of_another_program_on_one_queue_does_not_affect_other_queues(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:
    tree = scenario.ready_tree(worker=POLLS_NEVER)
    nats.ready()
    nats.do(take_mail)
    mail = sample_tasks.quick.with_options(queue="mail")
    assert mail.send(1).result(timeout=5 * SLACK) == 1
    before = nats.travelled()
    assert sample_tasks.quick.send(2).result(timeout=5 * SLACK) == 2
    scenario.until(lambda: nats.travelled() > before, within=20, what="the other queue is carried")
    scenario.until_logged(tree, "nats_consumer_refused")
    assert tree.output().count("nats_consumer_refused") == 1
    assert "nats_away" not in tree.output()
    assert nats.counters().consumers.keys() == {"default", "theirs"}
    nats.do(limit_deliveries)
    verdict, text = nats_check(scenario)
    assert verdict == "WARN"
    assert f"'theirs' (takes {nats.plan.subject('mail')})" in text
    assert "'default': max_deliver is 3, not -1" in text
    nats.do(lambda server, plan: server.delete_consumer(plan.stream, "theirs"))
    scenario.until(lambda: "mail" in nats.counters().consumers, within=60, what="its own consumer is made")
    scenario.until_logged(tree, "nats_consumer_made")
    before = nats.travelled()
    assert mail.send(3).result(timeout=5 * SLACK) == 3
    scenario.until(lambda: nats.travelled() > before, within=20, what="the queue is carried")
