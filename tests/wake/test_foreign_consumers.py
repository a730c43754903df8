"""Consumers of other programs, changed ones, and rights on one queue alone: each concerns its own queue and no other."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from everbeat.domain.nats_checks import StreamFacts
from everbeat.wake import nats_stream
from everbeat.wake.carrier import NOT_CARRIED
from everbeat.wake.nats_look import look
from everbeat.wake.stream_plan import StreamPlan
from tests.nats_server import NatsServer
from tests.wake.stream_fixtures import message, messages, plan_for, running, tapped


async def add_consumer(server: NatsServer, plan: StreamPlan, name: str, **settings: Any) -> None:
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", **settings}
    body = {"stream_name": plan.stream, "config": config}
    answer = await server.ask(f"CONSUMER.DURABLE.CREATE.{plan.stream}.{name}", body)
    assert "error" not in answer, answer


async def test_a_queue_whose_consumer_is_refused_takes_no_other_queue_with_it(
    shared_nats: NatsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_stream, "RETRY_REFUSED_S", 1.0)
    plan = plan_for(shared_nats.url)
    caplog.set_level(logging.INFO)
    async with running(plan) as run:
        await add_consumer(shared_nats, plan, "theirs", filter_subject=plan.subject("mail"))
        mail, other = tapped(run.carrier, "mail"), tapped(run.carrier, "other")
        places = await run.published(*messages(2, "mail"), *messages(2, "other"))
        assert places[:2] == [NOT_CARRIED] * 2
        assert NOT_CARRIED not in places[2:]
        await other.expect(2)
        assert run.states == [True]
        assert "not unique" in run.carrier.without["mail"]
        assert caplog.text.count("nats_consumer_refused") == 1
        await shared_nats.delete_consumer(plan.stream, "theirs")
        async with asyncio.timeout(20):
            while (await run.carrier.publish([message("mail")])) == [NOT_CARRIED]:
                await asyncio.sleep(0.1)  # until the consumer is asked for again
        await mail.expect(1)
        assert run.carrier.without == {}
        assert caplog.text.count("nats_consumer_made") == 1


async def replace_consumer(server: NatsServer, plan: StreamPlan, name: str) -> None:
    """A push consumer takes its place before everbeat can make it again."""
    settings = {"filter_subject": plan.subject(name), "deliver_subject": "nobody"}
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", **settings}
    made = json.dumps({"stream_name": plan.stream, "config": config}).encode()
    async with asyncio.timeout(20), server.connected() as client:
        answer = {"error": "not asked yet"}
        while "error" in answer:
            await client.publish(f"$JS.API.CONSUMER.DELETE.{plan.stream}.{name}")
            subject = f"$JS.API.CONSUMER.DURABLE.CREATE.{plan.stream}.{name}"
            answer = json.loads((await client.request(subject, made, timeout=5)).data)


async def test_a_consumer_that_was_replaced_by_another_kind_does_not_disturb_other_queues(
    shared_nats: NatsServer,
) -> None:
    plan = plan_for(shared_nats.url)
    async with running(plan) as run:
        _, other = tapped(run.carrier, "mail"), tapped(run.carrier, "other", room=1)
        await run.published(*messages(1, "other"))
        await other.expect(1)
        await replace_consumer(shared_nats, plan, "mail")
        async with asyncio.timeout(20):
            while "mail" not in run.carrier.without:
                await asyncio.sleep(0.05)  # until the tap has noticed
        other.want(1)
        await asyncio.sleep(4)  # a tap that kept asking would make the other one ask anew each second
        waiting = (await shared_nats.counters(plan.stream)).consumers["other"].num_waiting
        assert waiting <= 2  # the last request, and one that is about to expire
        assert run.states == [True]


ONE_DENIED = """
authorization {{ users: [ {{ user: a, password: b, permissions: {{
    publish: {{ deny: ["$JS.API.CONSUMER.DURABLE.CREATE.*.mail"] }} }} }} ] }}
no_auth_user: a
"""


async def test_a_right_that_is_missing_for_one_queue_takes_no_other_queue_with_it() -> None:
    with NatsServer(extra=ONE_DENIED.format()) as server:
        plan = plan_for(server.url)
        async with running(plan) as run:
            tapped(run.carrier, "mail")
            other = tapped(run.carrier, "other")
            async with asyncio.timeout(20):
                while "mail" not in run.carrier.without:
                    await asyncio.sleep(0.05)  # a request without the right is not answered
            places = await run.published(*messages(1, "mail"), *messages(2, "other"))
            assert places[0] == NOT_CARRIED
            await other.expect(2)
            assert run.states == [True]


async def facts_of(plan: StreamPlan) -> StreamFacts:
    return await look(plan, plan.config)


async def test_doctor_sees_foreign_and_changed_consumers_and_what_is_not_delivered(
    shared_nats: NatsServer,
) -> None:
    plan = plan_for(shared_nats.url, max_bytes=1 << 20)
    async with running(plan) as run:
        mail = tapped(run.carrier, "mail", room=2)
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
                await asyncio.sleep(0.1)  # until the wait for acknowledgements is over
        assert seen.foreign == (f"'theirs' (takes {plan.subject('other')})",)
        assert seen.altered == ("'mail': max_deliver is 1, not -1",)
        assert seen.undeliverable >= 1
