"""Test deliveries from a real server: within the free room, and repeated until they are acknowledged."""

from __future__ import annotations

import asyncio
import time

import pytest

from everbeat.nats.pull_consumer import JetStreamDelivery
from everbeat.nats.stream_plan import encode
from tests.nats.stream_fixtures import (
    PATIENCE_S,
    Running,
    message,
    messages,
    plan_for,
    running,
    start_consumer,
)
from tests.nats_server import NatsServer


async def drained(server: NatsServer, run: Running) -> bool:
    """Return whether the stream becomes empty."""
    async with asyncio.timeout(PATIENCE_S):
        while (await server.counters(run.plan.stream)).messages:
            await asyncio.sleep(0.02)  # the server sends no event when it has processed an acknowledgement
    return True


async def test_acknowledged_messages_leave_the_stream(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        consumer = start_consumer(run.transport)
        sent = [message(number=1), message(number=2, times=1, fence=4, cleared=True, reason="died")]
        await run.published(*sent)
        for delivered in await consumer.expect(2):
            assert delivered.times == 1
            delivered.ack()
            delivered.ack()
        assert [each.message for each in consumer.deliveries] == sent
        assert await drained(shared_nats, run)


async def test_a_consumer_can_start_before_the_connection_and_the_queue(nats_server: NatsServer) -> None:
    async with running(plan_for(nats_server.url), up=False) as run:
        consumer = start_consumer(run.transport)
        await run.expect_up()
        await run.published(message())
        await consumer.expect(1)


async def test_a_consumer_gets_no_more_messages_than_it_has_room_for(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        await run.published(*messages(50))
        consumer = start_consumer(run.transport, room=3)
        await consumer.expect(3)
        counters = (await shared_nats.counters(run.plan.stream)).consumers["mail"]
        assert (counters.num_ack_pending, counters.num_pending) == (3, 47)
        consumer.want(20)
        await consumer.expect(23)
        assert len(consumer.deliveries) == 23
        consumer.want(1_000)
        await consumer.expect(50)
        assert sorted(consumer.numbers) == list(range(1, 51))


async def test_a_consumer_without_room_has_no_open_pull_request(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        consumer = start_consumer(run.transport, room=10)
        await run.published(message())
        await consumer.expect(1)
        assert (await shared_nats.counters(run.plan.stream)).consumers["mail"].num_waiting > 0
        consumer.want(0)
        async with asyncio.timeout(PATIENCE_S):
            while (await shared_nats.counters(run.plan.stream)).consumers["mail"].num_waiting:
                await asyncio.sleep(0.1)  # a request ends by its age
        await run.published(message(number=2))
        consumer.want(1)
        await consumer.expect(2)


async def test_an_expired_pull_request_is_repeated(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        consumer = start_consumer(run.transport)
        await run.published(message())
        await consumer.expect(1)
        await asyncio.sleep(5.5)  # the time until the request expires
        before = time.monotonic()
        await run.published(message(number=2))
        await consumer.expect(2)
        assert time.monotonic() - before < 1


async def test_a_message_is_redelivered_unless_it_is_acknowledged_or_kept_in_progress(
    shared_nats: NatsServer,
) -> None:
    async with running(plan_for(shared_nats.url, ack_wait_s=1.0)) as run:
        consumer = start_consumer(run.transport)
        await run.published(message(number=1), message(number=2))
        kept = (await consumer.expect(2))[consumer.numbers.index(2)]
        for _ in range(6):
            kept.keep()
            await asyncio.sleep(0.4)  # the time until the message is redelivered
        assert consumer.numbers.count(2) == 1
        assert consumer.numbers.count(1) >= 2
        assert max(each.times for each in consumer.deliveries) >= 2
        kept.ack()
        for each in consumer.deliveries:
            each.ack()
        assert await drained(shared_nats, run)


async def test_a_returned_message_is_redelivered_at_once_or_after_its_delay(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        consumer = start_consumer(run.transport)
        await run.published(message())
        before = time.monotonic()
        (await consumer.expect(1))[0].give_back(delay_s=0)
        (await consumer.expect(2))[1].give_back(delay_s=0.7)
        assert time.monotonic() - before < 0.6
        last = (await consumer.expect(3))[2]
        assert time.monotonic() - before >= 0.65
        assert [each.times for each in consumer.deliveries] == [1, 2, 3]
        last.ack()
        assert await drained(shared_nats, run)


async def test_an_unreadable_message_can_be_rejected(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        consumer = start_consumer(run.transport)
        await run.published(message())
        await shared_nats.publish(run.plan.subject("mail"), b"", b"{}", b"\xff", headers={"Status": "408"})
        for delivered in await consumer.expect(4):
            delivered.reject()
        assert [each.message is None for each in consumer.deliveries] == [False, True, True, True]
        assert await drained(shared_nats, run)


async def test_two_workers_share_the_messages_of_a_queue(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url)
    async with running(plan) as run, running(plan) as other:
        consumers = [start_consumer(run.transport, room=150), start_consumer(other.transport, room=150)]
        await run.published(*messages(300))
        await asyncio.gather(*(consumer.expect(150) for consumer in consumers))
        assert sorted(consumers[0].numbers + consumers[1].numbers) == list(range(1, 301))


@pytest.mark.parametrize("lost", ["consumer", "stream"])
async def test_a_deleted_consumer_or_stream_is_created_again(shared_nats: NatsServer, lost: str) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        consumer = start_consumer(run.transport)
        await run.published(message())
        await consumer.expect(1)
        if lost == "consumer":
            await shared_nats.delete_consumer(run.plan.stream, "mail")
        else:
            await shared_nats.delete_stream(run.plan.stream)
        before = time.monotonic()
        await run.published(message(number=2))
        async with asyncio.timeout(PATIENCE_S):
            while 2 not in consumer.numbers:
                await consumer.expect(len(consumer.deliveries) + 1)
        assert time.monotonic() - before < 6
        assert run.states == [True]


async def test_a_stream_deleted_while_no_message_is_published_is_created_again(
    shared_nats: NatsServer,
) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        await run.published(message())
        await shared_nats.delete_stream(run.plan.stream)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    found = await shared_nats.counters(run.plan.stream)
                except KeyError:
                    await asyncio.sleep(0.1)  # everbeat checks for it every few seconds
                else:
                    break
        assert not run.plan.differs(found.config)


async def test_a_deleted_message_is_not_delivered(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        places = await run.published(*messages(3))
        await shared_nats.delete_message(run.plan.stream, places[1])
        consumer = start_consumer(run.transport)
        await consumer.expect(2)
        assert consumer.numbers == [1, 3]


@pytest.mark.parametrize("empty", [False, True])
async def test_a_consumer_continues_after_a_nats_outage(nats_server: NatsServer, empty: bool) -> None:
    async with running(plan_for(nats_server.url)) as run:
        consumer = start_consumer(run.transport)
        await run.published(message())
        await consumer.expect(1)
        nats_server.stop()
        await run.expect_down()
        consumer.deliveries[0].keep()
        consumer.deliveries[0].ack()
        if empty:
            nats_server.restart(empty=True)
        else:
            nats_server.start()
        await run.expect_up(times=2)
        await run.published(message(number=2))
        (await consumer.expect(2))[1].ack()
        assert consumer.numbers == [1, 2]
        assert await drained(nats_server, run)


async def test_a_consumer_continues_after_its_handler_raises(
    shared_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        consumer = start_consumer(run.transport)
        told = consumer.on_delivered

        def fail(delivered: JetStreamDelivery) -> None:
            told(delivered)
            assert consumer.numbers != [1], "raised on purpose by the test"

        failing = run.transport.consume("mail", fail)
        consumer.close()
        failing.want(10)
        await run.published(*messages(2))
        await consumer.expect(2)
    assert "raised on purpose by the test" in caplog.text


async def test_a_closed_consumer_returns_messages_to_the_stream(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url)
    async with running(plan) as run, running(plan) as other:
        consumer = start_consumer(run.transport, room=10)
        await run.published(message())
        (await consumer.expect(1))[0].ack()
        consumer.close()
        consumer.want(5)
        successor = start_consumer(other.transport, room=1)
        await shared_nats.publish(plan.subject("mail"), encode(message(number=2)))
        await successor.expect(1)
        assert consumer.numbers == [1]
