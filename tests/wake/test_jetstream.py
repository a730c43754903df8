"""The stream at a real server: made, mended, published to; and a link that comes back by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from uuid import uuid4

import pytest
from msgspec import structs

from everbeat.wake.jetstream import check
from everbeat.wake.stream_plan import StreamPlan
from tests.nats_cluster import NatsCluster
from tests.nats_server import NatsServer
from tests.wake.stream_fixtures import Running, message, messages, plan_for, running, tapped

NOTICED_S = 6.0


async def test_stream_and_consumers_are_made_as_planned(shared_nats: NatsServer) -> None:
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


async def test_a_stream_of_ours_that_is_set_otherwise_is_changed(shared_nats: NatsServer) -> None:
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


async def test_what_is_published_twice_with_one_id_is_there_once(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        sent = messages(250)
        places = await run.carrier.publish(sent)
        assert await run.carrier.publish(sent) == places
        assert len(set(places)) == 250
        assert (await shared_nats.counters(run.plan.stream)).messages == 250
        again = structs.replace(sent[0], times=1)
        assert await run.carrier.publish([again]) not in ([None], places[:1])


async def test_a_recovery_says_so_in_the_headers(shared_nats: NatsServer) -> None:
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


async def test_what_is_not_there_any_more_is_missing(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        sent = messages(3)
        places = await run.published(*sent)
        tasks = {place: each.task_id for place, each in zip(places, sent, strict=True)}
        assert await run.carrier.missing(tasks) == set()
        await shared_nats.delete_message(run.plan.stream, places[1])
        assert await run.carrier.missing(tasks) == {places[1]}
        assert await run.carrier.missing({places[0]: uuid4()}) == {places[0]}
        await shared_nats.delete_stream(run.plan.stream)
        assert await run.carrier.missing(tasks) == set(places)
        await run.published(message(number=9))
        assert await run.carrier.missing(tasks) == set(places)


async def test_while_the_server_is_away_nothing_is_published_and_nobody_waits(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    nats_server.kill()
    caplog.set_level(logging.INFO)
    async with running(plan_for(nats_server.url), up=False) as run:
        await run.expect_down()
        assert run.states == [False]
        before = time.monotonic()
        assert await run.carrier.publish(messages(3)) == [None] * 3
        assert time.monotonic() - before < 1
        with pytest.raises(ConnectionError):
            await run.carrier.missing({1: uuid4()})
        nats_server.start()
        await run.expect_up()
        await run.published(message())
        nats_server.restart(kill=True)
        await run.expect_up(times=2)
        assert run.states == [False, True, False, True]
        assert await run.carrier.publish([message()]) != [None]
    assert {record.name for record in caplog.records} <= {"everbeat.wake"}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]
    assert "Traceback" not in caplog.text


async def test_a_deleted_stream_is_made_again_by_the_next_publication(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        (first,) = await run.published(message())
        await shared_nats.delete_stream(run.plan.stream)
        (second,) = await run.carrier.publish([message(number=2)])
        assert second not in (None, first)
        assert run.states == [True]


async def test_a_server_that_lost_its_store_gets_stream_and_consumers_again(nats_server: NatsServer) -> None:
    async with running(plan_for(nats_server.url)) as run:
        tap = tapped(run.carrier)
        places = await run.published(*messages(3))
        await tap.expect(3)
        nats_server.restart(empty=True)
        await run.expect_up(times=2)
        sent = messages(3, first=10)
        assert not set(await run.published(*sent)) & set(places)
        for old in tap.deliveries[:3]:
            old.ack()  # of a stream that is no more: it must not take a message of the new one
        await tap.expect(6)
        assert sorted(tap.numbers[3:]) == [10, 11, 12]
        assert (await nats_server.counters(run.plan.stream)).messages == 3


async def test_a_frozen_server_is_noticed_and_its_return_too(nats_server: NatsServer) -> None:
    async with running(plan_for(nats_server.url)) as run:
        tap = tapped(run.carrier)
        await run.published(message())
        await tap.expect(1)
        second = message(number=2)
        nats_server.freeze()
        before = time.monotonic()
        tap.deliveries[0].ack()
        assert await run.carrier.publish([second]) == [None]
        assert time.monotonic() - before < NOTICED_S
        await run.expect_down(timeout_s=NOTICED_S)
        nats_server.thaw()
        await run.expect_up(times=2)
        await run.published(second)
        await tap.expect(2)
        # What was said in vain was said again: only the second is left.
        assert [each.times for each in tap.deliveries] == [1, 1]
        assert (await nats_server.counters(run.plan.stream)).messages == 1


async def test_the_end_is_prompt_at_whatever_moment_it_comes(shared_nats: NatsServer) -> None:
    """The client swallows some cancellations."""
    plan = plan_for(shared_nats.url)
    for moment in range(40):
        run = Running(plan)
        task = asyncio.create_task(run.carrier.run(run.on_state))
        for _ in range(moment):
            await asyncio.sleep(0)  # each is one step of the loop
        await asyncio.sleep(moment * 0.0005)  # and connecting takes some time too
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done, f"still running when cancelled at {moment}"


async def test_the_end_is_prompt_with_a_flood_under_way_to_a_frozen_server(nats_server: NatsServer) -> None:
    async with running(plan_for(nats_server.url)) as run:
        await run.published(message())
        nats_server.freeze()
        flood = [message(number=number, reason="x" * 2_000) for number in range(2, 4_000)]
        publishing = asyncio.create_task(run.carrier.publish(flood))
        await asyncio.sleep(0.2)  # as long as it takes to fill the socket
        before = time.monotonic()
    assert time.monotonic() - before < 5
    assert set(await publishing) == {None}


@pytest.mark.long
async def test_a_cluster_goes_on_when_its_leader_is_killed() -> None:
    with NatsCluster() as cluster:
        await cluster.ready()
        async with running(plan_for(cluster.url, replicas=3)) as run:
            tap = tapped(run.carrier)
            await run.published(*messages(50))
            await tap.expect(50)
            for each in tap.deliveries:
                each.ack()
            await cluster.kill_leader(run.plan.stream)
            sent = messages(50, first=100)
            await run.published(*sent)
            await tap.expect(100)
            assert {each.number for each in sent} <= set(tap.numbers)
