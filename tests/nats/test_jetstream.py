"""Test the stream on a real server: it is created, repaired and published to, and the connection recovers by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from uuid import uuid4

import pytest
from msgspec import structs

from everbeat.nats import jetstream
from everbeat.nats.jetstream import check
from everbeat.nats.stream_plan import StreamPlan
from tests.nats.stream_fixtures import (
    PATIENCE_S,
    Running,
    message,
    messages,
    plan_for,
    running,
    start_consumer,
)
from tests.nats_cluster import NatsCluster
from tests.nats_server import NatsServer

NOTICED_S = 6.0


async def test_the_stream_and_its_consumers_are_created_as_planned(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url, 'a"b; ünï.*>', ack_wait_s=1.5, max_bytes="1MB")
    await check(plan, plan.config)
    async with running(plan) as run:
        await run.published(message("mail.x"), message("> *", 2))
        found = await shared_nats.counters(plan.stream)
        assert not plan.differs(found.config)
        assert found.config["retention"] == "workqueue"
        assert found.config["discard"] == "new"
        assert set(found.consumers) == {"mail%2Ex", "%3E%20%2A"}
        listed = await shared_nats.ask(f"CONSUMER.INFO.{plan.stream}.mail%2Ex")
        assert listed["config"]["ack_wait"] == 1_500_000_000
        assert listed["config"]["filter_subject"] == plan.subject("mail.x")
        assert listed["config"].get("max_deliver", -1) == -1


async def test_a_stream_with_other_settings_is_updated(shared_nats: NatsServer) -> None:
    old = plan_for(shared_nats.url, ack_wait_s=5)
    async with running(old) as run:
        await run.published(message())
    new = StreamPlan(old.schema, old.config.replace(max_bytes="2MB"), 7.0)
    async with running(new) as run:
        await run.published(message(number=2))
    found = await shared_nats.counters(new.stream)
    assert found.config["max_bytes"] == 2 << 20
    assert found.messages == 2
    assert (await shared_nats.ask(f"CONSUMER.INFO.{new.stream}.mail"))["config"]["ack_wait"] == 7_000_000_000


LIMITS: dict[str, dict[str, Any]] = {
    "fewer messages": {"max_msgs": 1},
    "one message of a queue": {"max_msgs_per_subject": 1, "discard_new_per_subject": True},
    "smaller messages": {"max_msg_size": 1},
    "a shorter life and window": {"max_age": 1_000_000_000, "duplicate_window": 1_000_000_000},
    "the oldest dropped": {"discard": "old", "max_msgs": 1},
    "no answers": {"no_ack": True},
}


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_limit_set_on_the_stream_by_hand_is_reverted(
    shared_nats: NatsServer, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(jetstream, "CHECK_INTERVAL_S", 0.2)
    plan = plan_for(shared_nats.url)
    async with running(plan) as run:
        await run.published(message())
        config = (await shared_nats.counters(plan.stream)).config
        await shared_nats.ask(f"STREAM.UPDATE.{plan.stream}", {**config, **LIMITS[limit]})
        assert plan.differs({**config, **LIMITS[limit]})
        async with asyncio.timeout(PATIENCE_S):
            while plan.differs((await shared_nats.counters(plan.stream)).config):
                await asyncio.sleep(0.05)  # the server sends no event when a stream changes
        await run.published(message(number=2), message(number=3))
        assert run.states == [True]


async def test_a_message_published_twice_with_one_id_is_stored_once(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        sent = messages(250)
        places = await run.transport.publish(sent)
        assert await run.transport.publish(sent) == places
        assert len(set(places)) == 250
        assert (await shared_nats.counters(run.plan.stream)).messages == 250
        again = structs.replace(sent[0], times=1)
        assert await run.transport.publish([again]) not in ([None], places[:1])


async def test_a_recovered_task_is_marked_in_the_message_headers(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        sent = message(cleared=True, reason="HEARTBEAT_LOST", times=1, fence=3)
        (place,) = await run.published(sent)
        async with shared_nats.connected() as client:
            found = await client.jetstream().get_msg(run.plan.stream, place)
        assert found.headers == {
            "Nats-Msg-Id": f"{run.plan.schema}.{sent.id}",
            "Everbeat-Task": str(sent.task_id),
            "cleared": "true",
            "clear_reason": "HEARTBEAT_LOST",
        }


async def test_missing_reports_messages_that_are_no_longer_in_the_stream(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        sent = messages(3)
        places = await run.published(*sent)
        tasks = {place: each.task_id for place, each in zip(places, sent, strict=True)}
        assert await run.transport.missing(tasks) == set()
        await shared_nats.delete_message(run.plan.stream, places[1])
        assert await run.transport.missing(tasks) == {places[1]}
        assert await run.transport.missing({places[0]: uuid4()}) == {places[0]}
        await shared_nats.delete_stream(run.plan.stream)
        assert await run.transport.missing(tasks) == set(places)
        await run.published(message(number=9))
        assert await run.transport.missing(tasks) == set(places)


async def test_publish_returns_at_once_while_the_nats_server_is_away(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    nats_server.kill()
    caplog.set_level(logging.INFO)
    async with running(plan_for(nats_server.url), up=False) as run:
        await run.expect_down()
        assert run.states == [False]
        before = time.monotonic()
        assert await run.transport.publish(messages(3)) == [None] * 3
        assert time.monotonic() - before < 1
        with pytest.raises(ConnectionError):
            await run.transport.missing({1: uuid4()})
        nats_server.start()
        await run.expect_up()
        await run.published(message())
        nats_server.restart(kill=True)
        await run.expect_up(times=2)
        assert run.states == [False, True, False, True]
        assert await run.transport.publish([message()]) != [None]
    assert {record.name for record in caplog.records} <= {"everbeat.nats"}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]
    assert "Traceback" not in caplog.text


async def test_the_next_publication_creates_a_deleted_stream_again(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        (first,) = await run.published(message())
        await shared_nats.delete_stream(run.plan.stream)
        (second,) = await run.transport.publish([message(number=2)])
        assert second not in (None, first)
        assert run.states == [True]


async def test_a_nats_server_that_lost_its_store_gets_the_stream_and_consumers_again(
    nats_server: NatsServer,
) -> None:
    async with running(plan_for(nats_server.url)) as run:
        consumer = start_consumer(run.transport)
        places = await run.published(*messages(3))
        await consumer.expect(3)
        nats_server.restart(empty=True)
        await run.expect_up(times=2)
        sent = messages(3, first=10)
        assert not set(await run.published(*sent)) & set(places)
        for old in consumer.deliveries[:3]:
            old.ack()  # from the lost stream: it must not remove a message of the new one
        await consumer.expect(6)
        assert sorted(consumer.numbers[3:]) == [10, 11, 12]
        assert (await nats_server.counters(run.plan.stream)).messages == 3


async def test_a_frozen_nats_server_and_its_return_are_noticed(nats_server: NatsServer) -> None:
    async with running(plan_for(nats_server.url)) as run:
        consumer = start_consumer(run.transport)
        await run.published(message())
        await consumer.expect(1)
        second = message(number=2)
        nats_server.freeze()
        before = time.monotonic()
        consumer.deliveries[0].ack()
        assert await run.transport.publish([second]) == [None]
        assert time.monotonic() - before < NOTICED_S
        await run.expect_down(timeout_s=NOTICED_S)
        nats_server.thaw()
        await run.expect_up(times=2)
        await run.published(second)
        await consumer.expect(2)
        # The lost acknowledgement was repeated: only the second message is left. The thawed server might have sent it to the old
        # connection, too.
        first, *others = consumer.deliveries
        assert first.times == 1
        assert all(each.message == second for each in others)
        assert (await nats_server.counters(run.plan.stream)).messages == 1


async def test_the_nats_connection_closes_promptly_at_any_moment(shared_nats: NatsServer) -> None:
    """The NATS client catches some cancellations."""
    plan = plan_for(shared_nats.url)
    for moment in range(40):
        run = Running(plan)
        task = asyncio.create_task(run.transport.run(run.on_state))
        for _ in range(moment):
            await asyncio.sleep(0)  # each is one iteration of the event loop
        await asyncio.sleep(moment * 0.0005)  # connecting takes some time too
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done, f"still running when cancelled at {moment}"


async def test_the_nats_connection_closes_promptly_while_it_publishes_to_a_frozen_server(
    nats_server: NatsServer,
) -> None:
    async with running(plan_for(nats_server.url)) as run:
        await run.published(message())
        nats_server.freeze()
        flood = [message(number=number, reason="x" * 2_000) for number in range(2, 4_000)]
        publishing = asyncio.create_task(run.transport.publish(flood))
        await asyncio.sleep(0.2)  # long enough to fill the socket buffer
        before = time.monotonic()
    assert time.monotonic() - before < 5
    assert set(await publishing) == {None}


@pytest.mark.long
async def test_messages_flow_after_the_leader_of_a_nats_cluster_is_killed() -> None:
    with NatsCluster() as cluster:
        await cluster.ready()
        async with running(plan_for(cluster.url, replicas=3)) as run:
            consumer = start_consumer(run.transport)
            await run.published(*messages(50))
            await consumer.expect(50)
            for each in consumer.deliveries:
                each.ack()
            await cluster.kill_leader(run.plan.stream)
            sent = messages(50, first=100)
            await run.published(*sent)
            await consumer.expect(100)
            assert {each.number for each in sent} <= set(consumer.numbers)
