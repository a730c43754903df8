"""Queues that share a stream: one that nobody takes, one with a consumer of another program, and one that fills the stream."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from everbeat.wake.stream_plan import StreamPlan
from tests.nats_server import NatsServer
from tests.stories.nats_stage import POLLS_NEVER, Told
from tests.stories.stage import SLACK, Stage

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]


@pytest.fixture
def told(stage: Stage) -> Iterator[Told]:
    """Before `deeds`, whose app is told of the server."""
    with NatsServer() as server:
        yield Told(stage, server)


def publishes(stage: Stage) -> bool:
    return bool(stage.query("select from {schema}.relay where taken_until > now() and holder is not null"))


def test_messages_of_ended_tasks_leave_the_stream_where_nobody_takes_them(
    stage: Stage, told: Told, deeds: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:  # N11
    tree = stage.ready_tree(worker={**POLLS_NEVER, "queues": ["default"]})
    stage.until(lambda: publishes(stage), within=20, what="a worker publishes")
    stage.wake = None  # the next tree does not use NATS
    monkeypatch.delenv("STORY_WAKE")
    mail = deeds.quick.with_options(queue="mail")
    handles = deeds.app.send_many(mail.call(n) for n in range(1_000))
    stage.until(lambda: told.counters().messages == 1_000, within=20, what="all are published")
    stage.ready_tree(worker={"queues": ["mail"]})
    assert [handle.result(timeout=60) for handle in handles] == list(range(1_000))
    ended = time.monotonic()
    stage.until(lambda: told.counters().messages == 0, within=60, what="the stream holds none of them")
    print(f"the messages of 1,000 ended tasks were gone after {time.monotonic() - ended:.1f} s")
    stage.until(lambda: "messages_not_taken" in tree.output(), within=20, what="it is reported")
    for n in range(20):
        began = time.monotonic()
        assert deeds.quick.send(n).result(timeout=20) == n
        assert time.monotonic() - began < 1 * SLACK
    before = told.travelled()
    handles = deeds.app.send_many(mail.call(n) for n in range(100))
    assert [handle.result(timeout=5 * SLACK) for handle in handles] == list(range(100))
    assert told.travelled() == before  # nothing more is published of what nobody takes


def test_a_stream_with_a_bound_is_filled_by_no_queue_that_nobody_takes(
    stage: Stage, told: Told, deeds: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:  # N11
    """2,400 tasks end in bursts, far more than the stream has room for, and none of them is taken by its message."""
    stage.wake = {"servers": [told.server.url], "max_bytes": 65_536}
    stage.ready_tree(worker={**POLLS_NEVER, "queues": ["default"]})
    stage.until(lambda: publishes(stage), within=20, what="a worker publishes")
    stage.wake = None  # the next tree does not use NATS
    monkeypatch.delenv("STORY_WAKE")
    stage.ready_tree(worker={"queues": ["mail"]})
    mail = deeds.quick.with_options(queue="mail")
    took_s = []
    for burst in range(12):
        ended = deeds.app.send_many(mail.call(n) for n in range(200))
        began = time.monotonic()
        assert deeds.quick.send(burst).result(timeout=20) == burst
        took_s.append(time.monotonic() - began)
        ended[-1].result(timeout=60)
    print(f"the other queue: {min(took_s):.3f} to {max(took_s):.3f} s")
    assert max(took_s) < 1 * SLACK
    before = told.travelled()
    for n in range(5):
        assert deeds.quick.send(n).result(timeout=20) == n
    stage.until(lambda: told.travelled() > before, within=20, what="the other queue is carried")


def doctor_says(stage: Stage) -> tuple[str, str]:
    """Verdict and text of the check of NATS."""
    done = subprocess.run(
        [sys.executable, "-m", "everbeat", "doctor", "deeds:app", "--json"],
        env=stage.environment(recovery={}, worker={}), cwd=stage.folder, capture_output=True, text=True, timeout=60,
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


def test_a_consumer_of_another_program_on_one_queue_takes_nats_from_no_other(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:
    tree = stage.ready_tree(worker=POLLS_NEVER)
    told.ready()
    told.do(take_mail)
    mail = deeds.quick.with_options(queue="mail")
    assert mail.send(1).result(timeout=5 * SLACK) == 1
    before = told.travelled()
    assert deeds.quick.send(2).result(timeout=5 * SLACK) == 2
    stage.until(lambda: told.travelled() > before, within=20, what="the other queue is carried")
    assert tree.output().count("nats_consumer_refused") == 1
    assert "nats_away" not in tree.output()
    assert told.counters().consumers.keys() == {"default", "theirs"}
    told.do(limit_deliveries)
    verdict, text = doctor_says(stage)
    assert verdict == "WARN"
    assert f"'theirs' (takes {told.plan.subject('mail')})" in text
    assert "'default': max_deliver is 3, not -1" in text
    told.do(lambda server, plan: server.delete_consumer(plan.stream, "theirs"))
    stage.until(lambda: "mail" in told.counters().consumers, within=60, what="its own consumer is made")
    stage.until(lambda: "nats_consumer_made" in tree.output(), within=20, what="it is reported")
    before = told.travelled()
    assert mail.send(3).result(timeout=5 * SLACK) == 3
    stage.until(lambda: told.travelled() > before, within=20, what="the queue is carried")
