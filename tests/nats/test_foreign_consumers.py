"""Test foreign and changed consumers and missing permissions: each affects only its own queue."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from everbeat.domain.doctor.nats import StreamFacts
from everbeat.nats import stream
from everbeat.nats.inspection import find_stream_facts
from everbeat.nats.jetstream import PUBLISH_TIMEOUT_S
from everbeat.nats.stream_plan import NOT_CARRIED, StreamPlan
from tests.nats.stream_fixtures import message, messages, plan_for, running, start_consumer
from tests.nats_server import NatsServer


async def add_consumer(server: NatsServer, plan: StreamPlan, name: str, **settings: Any) -> None:
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", **settings}
    body = {"stream_name": plan.stream, "config": config}
    answer = await server.ask(f"CONSUMER.DURABLE.CREATE.{plan.stream}.{name}", body)
    assert "error" not in answer, answer


async def test_a_refused_consumer_affects_only_its_own_queue(
    shared_nats: NatsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "RETRY_REFUSED_S", 1.0)
    plan = plan_for(shared_nats.url)
    caplog.set_level(logging.INFO)
    async with running(plan) as run:
        await add_consumer(shared_nats, plan, "theirs", filter_subject=plan.subject("mail"))
        mail, other = start_consumer(run.transport, "mail"), start_consumer(run.transport, "other")
        places = await run.published(*messages(2, "mail"), *messages(2, "other"))
        assert places[:2] == [NOT_CARRIED] * 2
        assert NOT_CARRIED not in places[2:]
        await other.expect(2)
        assert run.states == [True]
        assert "not unique" in run.transport.without["mail"]
        assert caplog.text.count("nats_consumer_refused") == 1
        await shared_nats.delete_consumer(plan.stream, "theirs")
        async with asyncio.timeout(20):
            while (await run.transport.publish([message("mail")])) == [NOT_CARRIED]:
                await asyncio.sleep(0.1)  # until the consumer is requested again
        await mail.expect(1)
        assert run.transport.without == {}
        assert caplog.text.count("nats_consumer_made") == 1


async def replace_consumer(server: NatsServer, plan: StreamPlan, name: str) -> None:
    """Replace the consumer by a push consumer before everbeat can create it again."""
    settings = {"filter_subject": plan.subject(name), "deliver_subject": "nobody"}
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", **settings}
    made = json.dumps({"stream_name": plan.stream, "config": config}).encode()
    async with asyncio.timeout(20), server.connected() as client:
        answer = {"error": "not asked yet"}
        while "error" in answer:
            await client.publish(f"$JS.API.CONSUMER.DELETE.{plan.stream}.{name}")
            subject = f"$JS.API.CONSUMER.DURABLE.CREATE.{plan.stream}.{name}"
            answer = json.loads((await client.request(subject, made, timeout=5)).data)


async def test_a_consumer_replaced_by_another_kind_affects_only_its_own_queue(
    shared_nats: NatsServer,
) -> None:
    plan = plan_for(shared_nats.url)
    async with running(plan) as run:
        _, other = start_consumer(run.transport, "mail"), start_consumer(run.transport, "other", room=1)
        await run.published(*messages(1, "other"))
        await other.expect(1)
        await replace_consumer(shared_nats, plan, "mail")
        async with asyncio.timeout(20):
            while "mail" not in run.transport.without:
                await asyncio.sleep(0.05)  # until the pull consumer has noticed
        other.want(1)
        await asyncio.sleep(4)  # time for requests that the first consumer must not repeat
        waiting = (await shared_nats.counters(plan.stream)).consumers["other"].num_waiting
        assert waiting <= 2  # the last request, and one that is about to expire
        assert run.states == [True]


ONE_DENIED = """
authorization {{ users: [ {{ user: a, password: b, permissions: {{
    publish: {{ deny: ["$JS.API.CONSUMER.DURABLE.CREATE.*.mail"] }} }} }} ] }}
no_auth_user: a
"""


async def test_a_missing_permission_for_one_queue_affects_only_that_queue() -> None:
    with NatsServer(extra=ONE_DENIED.format()) as server:
        plan = plan_for(server.url)
        async with running(plan) as run:
            start_consumer(run.transport, "mail")
            other = start_consumer(run.transport, "other")
            async with asyncio.timeout(20):
                while "mail" not in run.transport.without:
                    await asyncio.sleep(0.05)  # a request without the right is not answered
            places = await run.published(*messages(1, "mail"), *messages(2, "other"))
            assert places[0] == NOT_CARRIED
            await other.expect(2)
            assert run.states == [True]


DENIED = """
authorization {{ users: [ {{ user: a, password: b, permissions: {{ publish: {{ deny: ["{subject}"] }} }} }} ] }}
no_auth_user: a
"""


async def test_a_queue_without_publish_permission_is_reported_and_delays_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with NatsServer(extra=DENIED.format(subject="everbeat.*.mail")) as server:
        async with running(plan_for(server.url)) as run:
            other = start_consumer(run.transport, "other")
            async with asyncio.timeout(
                PUBLISH_TIMEOUT_S / 2
            ):  # no publication waits for an answer that never comes
                for number in range(3):
                    sent = message("mail", number), message("other", number)
                    places = await run.transport.publish(sent)
                    assert places[0] == NOT_CARRIED
                    assert places[1]
            await other.expect(3)
            assert ".mail" in " ".join(run.transport.denied)
            assert caplog.text.count("nats_right_missing") == 1
            assert run.states == [True]


@pytest.mark.parametrize("subject", ["$JS.ACK.>", "$JS.API.CONSUMER.MSG.NEXT.>"])
async def test_a_missing_permission_is_reported_once_for_all_messages(
    caplog: pytest.LogCaptureFixture, subject: str
) -> None:
    caplog.set_level(logging.INFO)
    with NatsServer(extra=DENIED.format(subject=subject)) as server:
        async with running(plan_for(server.url)) as run:
            mail = start_consumer(run.transport, "mail")
            await run.published(*messages(3, "mail"))
            if subject == "$JS.ACK.>":
                for delivered in await mail.expect(3):
                    delivered.ack()
            async with asyncio.timeout(20):
                while not run.transport.denied:
                    await asyncio.sleep(0.05)  # until the server has reported the permission
            await run.published(*messages(3, "mail", first=4))
            assert len(run.transport.denied) == caplog.text.count("nats_right_missing") == 1
            assert run.states == [True]


async def test_queues_that_reach_the_limit_of_consumers_all_get_a_consumer(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url)
    async with running(plan) as run:
        config = (await shared_nats.counters(plan.stream)).config
        answer = await shared_nats.ask(f"STREAM.UPDATE.{plan.stream}", {**config, "max_consumers": 1})
        assert "error" not in answer
        places = await run.published(*(message(f"q{n}") for n in range(10)))
        assert NOT_CARRIED not in places
        assert run.transport.without == {}


CHANGES: dict[str, dict[str, Any]] = {
    "max_ack_pending is 1, not 100000": {"max_ack_pending": 1},
    "headers_only is set": {"headers_only": True},
    "max_batch is set": {"max_batch": 1},
    "max_expires is set": {"max_expires": 1_000_000},
    "inactive_threshold is set": {"inactive_threshold": 3_600_000_000_000},
    "it takes everbeat.nobody": {"filter_subject": ""},
}


async def test_doctor_names_each_consumer_setting_that_reduces_deliveries(
    shared_nats: NatsServer,
) -> None:
    plan = plan_for(shared_nats.url)
    async with running(plan) as run:
        await run.published(message("mail"))
    for said, change in CHANGES.items():
        change = {
            name: plan.subject("nobody") if name == "filter_subject" else value
            for name, value in change.items()
        }
        await add_consumer(shared_nats, plan, **{**plan.consumer_settings("mail")["config"], **change})
        (altered,) = (await facts_of(plan)).altered
        assert altered == f"'mail': {said.replace('everbeat.nobody', plan.subject('nobody'))}"
    await add_consumer(shared_nats, plan, **plan.consumer_settings("mail")["config"])
    assert (await facts_of(plan)).altered == ()


async def facts_of(plan: StreamPlan) -> StreamFacts:
    return await find_stream_facts(plan, plan.config)


async def test_doctor_reports_foreign_and_changed_consumers_and_undeliverable_messages(
    shared_nats: NatsServer,
) -> None:
    plan = plan_for(shared_nats.url, max_bytes=1 << 20)
    async with running(plan) as run:
        mail = start_consumer(run.transport, "mail", room=2)
        await run.published(*messages(2, "mail"))
        await mail.expect(2)
        seen = await facts_of(plan)
        assert (seen.foreign, seen.altered, seen.undeliverable, seen.max_bytes) == ((), (), 0, 1 << 20)
        assert 0 < seen.bytes < 2_000
        assert not seen.is_full
        settings = {**plan.consumer_settings("mail")["config"], "max_deliver": 1, "ack_wait": 100_000_000}
        await add_consumer(shared_nats, plan, **settings)  # type: ignore[arg-type]
        await add_consumer(shared_nats, plan, "theirs", filter_subject=plan.subject("other"))
        await run.published(*messages(1, "mail", first=3))
        mail.want(5)
        async with asyncio.timeout(20):
            while not (seen := await facts_of(plan)).undeliverable:
                await asyncio.sleep(0.1)  # until the acknowledgement wait is over
        assert seen.foreign == (f"'theirs' (takes {plan.subject('other')})",)
        assert seen.altered == ("'mail': max_deliver is 1, not -1",)
        assert seen.undeliverable >= 1
