"""Deliveries from a real server: as many as there is room for, again when nobody ends them, and again whatever happened between."""

from __future__ import annotations

import asyncio
import time

import pytest

from everbeat.wake.carrier import Delivered, encode
from tests.nats_server import NatsServer
from tests.wake.stream_fixtures import PATIENCE_S, Running, message, messages, plan_for, running, tapped


async def drained(server: NatsServer, run: Running) -> bool:
    """Whether the stream becomes empty."""
    async with asyncio.timeout(PATIENCE_S):
        while (await server.counters(run.plan.stream)).messages:
            await asyncio.sleep(0.02)  # nobody tells when an acknowledgement has been dealt with
    return True


async def test_messages_are_delivered_and_leave_the_stream_when_acknowledged(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        tap = tapped(run.carrier)
        sent = [message(number=1), message(number=2, times=1, fence=4, cleared=True, reason="died")]
        await run.published(*sent)
        for delivered in await tap.expect(2):
            assert delivered.times == 1
            delivered.ack()
            delivered.ack()
        assert [each.message for each in tap.deliveries] == sent
        assert await drained(shared_nats, run)


async def test_a_tap_may_be_there_before_the_link_and_before_the_queue(nats_server: NatsServer) -> None:
    async with running(plan_for(nats_server.url), up=False) as run:
        tap = tapped(run.carrier)
        await run.expect_up()
        await run.published(message())
        await tap.expect(1)


async def test_no_more_come_than_there_is_room_for(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        await run.published(*messages(50))
        tap = tapped(run.carrier, room=3)
        await tap.expect(3)
        counters = (await shared_nats.counters(run.plan.stream)).consumers["mail"]
        assert (counters.num_ack_pending, counters.num_pending) == (3, 47)
        tap.want(20)
        await tap.expect(23)
        assert len(tap.deliveries) == 23
        tap.want(1_000)
        await tap.expect(50)
        assert sorted(tap.numbers) == list(range(1, 51))


async def test_without_room_no_request_stays_open(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        tap = tapped(run.carrier, room=10)
        await run.published(message())
        await tap.expect(1)
        assert (await shared_nats.counters(run.plan.stream)).consumers["mail"].num_waiting > 0
        tap.want(0)
        async with asyncio.timeout(PATIENCE_S):
            while (await shared_nats.counters(run.plan.stream)).consumers["mail"].num_waiting:
                await asyncio.sleep(0.1)  # a request ends by its age
        await run.published(message(number=2))
        tap.want(1)
        await tap.expect(2)


async def test_a_request_that_expired_is_made_again(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        tap = tapped(run.carrier)
        await run.published(message())
        await tap.expect(1)
        await asyncio.sleep(5.5)  # only time makes it expire
        before = time.monotonic()
        await run.published(message(number=2))
        await tap.expect(2)
        assert time.monotonic() - before < 1


async def test_what_nobody_ends_comes_again_and_what_is_kept_does_not(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url, ack_wait_s=1.0)) as run:
        tap = tapped(run.carrier)
        await run.published(message(number=1), message(number=2))
        kept = (await tap.expect(2))[tap.numbers.index(2)]
        for _ in range(6):
            kept.keep()
            await asyncio.sleep(0.4)  # only time makes it come again
        assert tap.numbers.count(2) == 1
        assert tap.numbers.count(1) >= 2
        assert max(each.times for each in tap.deliveries) >= 2
        kept.ack()
        for each in tap.deliveries:
            each.ack()
        assert await drained(shared_nats, run)


async def test_what_is_given_back_comes_again_at_once_or_later(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        tap = tapped(run.carrier)
        await run.published(message())
        before = time.monotonic()
        (await tap.expect(1))[0].give_back(delay_s=0)
        (await tap.expect(2))[1].give_back(delay_s=0.7)
        assert time.monotonic() - before < 0.6
        last = (await tap.expect(3))[2]
        assert time.monotonic() - before >= 0.65
        assert [each.times for each in tap.deliveries] == [1, 2, 3]
        last.ack()
        assert await drained(shared_nats, run)


async def test_what_makes_no_sense_can_be_rejected(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        tap = tapped(run.carrier)
        await run.published(message())
        await shared_nats.publish(run.plan.subject("mail"), b"", b"{}", b"\xff", headers={"Status": "408"})
        for delivered in await tap.expect(4):
            delivered.reject()
        assert [each.message is None for each in tap.deliveries] == [False, True, True, True]
        assert await drained(shared_nats, run)


async def test_two_workers_share_a_queue_and_none_gets_what_another_has(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url)
    async with running(plan) as run, running(plan) as other:
        taps = [tapped(run.carrier, room=150), tapped(other.carrier, room=150)]
        await run.published(*messages(300))
        await asyncio.gather(*(tap.expect(150) for tap in taps))
        assert sorted(taps[0].numbers + taps[1].numbers) == list(range(1, 301))


@pytest.mark.parametrize("lost", ["consumer", "stream"])
async def test_a_consumer_or_stream_that_was_deleted_is_made_again(
    shared_nats: NatsServer, lost: str
) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        tap = tapped(run.carrier)
        await run.published(message())
        await tap.expect(1)
        if lost == "consumer":
            await shared_nats.delete_consumer(run.plan.stream, "mail")
        else:
            await shared_nats.delete_stream(run.plan.stream)
        before = time.monotonic()
        await run.published(message(number=2))
        async with asyncio.timeout(PATIENCE_S):
            while 2 not in tap.numbers:
                await tap.expect(len(tap.deliveries) + 1)
        assert time.monotonic() - before < 6
        assert run.states == [True]


async def test_a_stream_deleted_while_nobody_publishes_is_made_again(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        await run.published(message())
        await shared_nats.delete_stream(run.plan.stream)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    found = await shared_nats.counters(run.plan.stream)
                except KeyError:
                    await asyncio.sleep(0.1)  # it is looked for every few seconds
                else:
                    break
        assert not run.plan.differs(found.config)


async def test_a_message_that_was_deleted_does_not_come(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        places = await run.published(*messages(3))
        await shared_nats.delete_message(run.plan.stream, places[1])
        tap = tapped(run.carrier)
        await tap.expect(2)
        assert tap.numbers == [1, 3]


@pytest.mark.parametrize("empty", [False, True])
async def test_a_tap_goes_on_after_the_server_was_away(nats_server: NatsServer, empty: bool) -> None:
    async with running(plan_for(nats_server.url)) as run:
        tap = tapped(run.carrier)
        await run.published(message())
        await tap.expect(1)
        nats_server.stop()
        await run.expect_down()
        tap.deliveries[0].keep()
        tap.deliveries[0].ack()
        if empty:
            nats_server.restart(empty=True)
        else:
            nats_server.start()
        await run.expect_up(times=2)
        await run.published(message(number=2))
        (await tap.expect(2))[1].ack()
        assert tap.numbers == [1, 2]
        assert await drained(nats_server, run)


async def test_a_handler_that_raises_ends_nothing(
    shared_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        tap = tapped(run.carrier)
        told = tap.on_delivered

        def fail(delivered: Delivered) -> None:
            told(delivered)
            assert tap.numbers != [1], "meant by the test"

        failing = run.carrier.tap("mail", fail)
        tap.close()
        failing.want(10)
        await run.published(*messages(2))
        await tap.expect(2)
    assert "meant by the test" in caplog.text


async def test_what_comes_after_the_end_is_given_back(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url)
    async with running(plan) as run, running(plan) as other:
        tap = tapped(run.carrier, room=10)
        await run.published(message())
        (await tap.expect(1))[0].ack()
        tap.close()
        tap.want(5)
        successor = tapped(other.carrier, room=1)
        await shared_nats.publish(plan.subject("mail"), encode(message(number=2)))
        await successor.expect(1)
        assert tap.numbers == [1]
