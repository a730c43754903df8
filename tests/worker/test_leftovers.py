"""What stays in the stream though its task has ended is taken out, precisely; a queue that nobody takes and a full stream cost no other."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from random import Random
from uuid import UUID, uuid4

import pytest

from everbeat.runtime.clock import SystemClock
from everbeat.runtime.service import ServiceRunner
from everbeat.store import tasks
from everbeat.wake.carrier import NOT_CARRIED, Message, decode, encode
from everbeat.worker import leftovers
from everbeat.worker.fullness import MessagesNotPublished
from everbeat.worker.leftovers import Leftovers, MessagesNotTaken
from tests.nats_server import ConsumerCounters, NatsServer
from tests.store.conftest import Hands
from tests.worker.stand import Stand
from tests.worker.test_relay import Relaying, in_stream, outbox, plan_of, relaying, until


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as made:
        yield made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are judged as soon as a check finds them."""
    monkeypatch.setattr(leftovers, "CHECK_S", 0.2)
    monkeypatch.setattr(leftovers, "SELDOM_S", 0.2)
    monkeypatch.setattr(leftovers, "SETTLED_S", 0.0)
    monkeypatch.setattr(leftovers, "THOROUGH_S", 1.0)


@asynccontextmanager
async def clearing(one: Relaying, stand: Stand) -> AsyncIterator[Leftovers]:
    made = Leftovers(
        one.giving, publishes=lambda: one.relay.has_turn, carrier=one.carrier, stale_ms=60_000,
        events=one.relay._events, clock=SystemClock(),
    )  # fmt: skip
    one.relay.fullness.on_full = made.stream_full
    runner = ServiceRunner(
        made, clock=SystemClock(), random=Random(4), emit=one.events.append, wake=made.wake
    )
    task = asyncio.create_task(runner.run())
    try:
        yield made
    finally:
        task.cancel()


def send(one: Relaying, stand: Stand, count: int, queue: str) -> list[UUID]:
    """Sends, and tells the relay as a worker that hears of it does."""
    new = [
        tasks.NewTask(id=uuid4(), name="double", queue=queue, priority=0, args=b'{"x": 1}')
        for _ in range(count)
    ]
    stand.run(tasks.insert_tasks(new, channel=stand.target.channel))
    one.relay.written()
    return [each.id for each in new]


def end(stand: Stand, task_id: UUID) -> None:
    stand.run(tasks.cancel(task_id, channel=stand.target.channel, call=uuid4()))
    assert stand.task(task_id)["state"] == "CANCELLED"


async def held(stand: Stand, server: NatsServer, places: Iterable[int]) -> set[UUID]:
    """The tasks whose messages are at these places."""
    found = set()
    for place in places:
        subject = f"STREAM.MSG.GET.{plan_of(stand, server).stream}"
        answer = await server.ask(subject, {"seq": place})
        message = decode(b64decode(answer["message"]["data"])) if "message" in answer else None
        if message is not None:
            found.add(message.task_id)
    return found


def places(stand: Stand) -> list[int]:
    return [row["place"] for row in stand.query("select place from {schema}.message_outbox")]


@pytest.mark.usefixtures("at_once")
async def test_only_messages_of_ended_tasks_are_taken_out_wherever_they_lie(
    stand: Stand, server: NatsServer
) -> None:  # N11
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        ids = send(one, stand, 20, "mail")
        await in_stream(stand, server, 20)
        await until(lambda: outbox(stand, "place is not null") == 20)
        published = places(stand)
        for task_id in [*ids[:5], *ids[8:12], ids[19]]:
            end(stand, task_id)
        await until(lambda: outbox(stand) == 10)
        async with clearing(one, stand) as clearer:
            await in_stream(stand, server, 10)
            assert clearer.removed == 10
            assert await held(stand, server, published) == {*ids[5:8], *ids[12:19]}
            assert outbox(stand) == 10


@pytest.mark.usefixtures("at_once")
async def test_a_queue_that_nobody_takes_is_not_carried_until_somebody_asks(
    stand: Stand, server: NatsServer
) -> None:  # N11
    async with relaying(stand, server, "one") as one, clearing(one, stand):
        await until(lambda: one.relay.has_turn)
        for task_id in send(one, stand, 3, "mail"):
            await until(lambda: outbox(stand, "place is null") == 0)
            end(stand, task_id)
        await until(lambda: any(isinstance(event, MessagesNotTaken) for event in one.events))
        await in_stream(stand, server, 0)
        assert one.carrier.not_taken == {"mail"}
        (task_id,) = send(one, stand, 1, "mail")
        await until(lambda: outbox(stand, f"place = {NOT_CARRIED}") == 1)
        (other,) = send(one, stand, 1, "default")
        await in_stream(stand, server, 1)
        tap = one.carrier.tap("mail", lambda delivered: delivered.ack())
        tap.want(1)
        await until(lambda: not one.carrier.not_taken)
        end(stand, task_id)
        end(stand, other)
        send(one, stand, 1, "mail")
        await until(lambda: outbox(stand, "place > 0") == 1)
        assert sum(isinstance(event, MessagesNotTaken) for event in one.events) <= 2


@pytest.mark.usefixtures("at_once")
async def test_messages_that_used_up_a_max_deliver_are_taken_out_when_their_task_has_ended(
    stand: Stand, server: NatsServer
) -> None:
    async with relaying(stand, server, "one") as one, clearing(one, stand):
        await until(lambda: one.relay.has_turn)
        ids = send(one, stand, 3, "mail")
        await in_stream(stand, server, 3)
        await until(lambda: outbox(stand, "place is not null") == 3)
        published = places(stand)
        plan = plan_of(stand, server)
        settings = {**plan.consumer_settings("mail")["config"], "max_deliver": 1, "ack_wait": 100_000_000}
        subject = f"CONSUMER.DURABLE.CREATE.{plan.stream}.mail"
        assert "error" not in await server.ask(subject, {"stream_name": plan.stream, "config": settings})
        one.carrier.tap("mail", lambda _: None).want(3)  # delivered, and never acknowledged
        async with asyncio.timeout(20):
            while not _is_used_up((await server.counters(plan.stream)).consumers["mail"]):
                await asyncio.sleep(0.05)  # the server's counters tell nobody that they change
        for task_id in ids[:2]:
            end(stand, task_id)
        await in_stream(stand, server, 1)
        assert await held(stand, server, published) == {ids[2]}


@pytest.mark.usefixtures("at_once")
async def test_running_tasks_without_a_message_hide_no_messages_of_ended_ones(
    stand: Stand, server: NatsServer
) -> None:  # N11
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        ids = send(one, stand, 3, "mail")
        await in_stream(stand, server, 3)
        await until(lambda: outbox(stand, "place is not null") == 3)
        for task_id in ids:
            end(stand, task_id)
        await until(lambda: outbox(stand) == 0)
        await one.relay.close()
        worker = stand.welcome()
        new = [
            tasks.NewTask(id=uuid4(), name="double", queue="mail", priority=0, args=b"{}") for _ in range(5)
        ]
        stand.run(tasks.insert_tasks(new, channel=stand.target.channel))
        hands = Hands(stand.target, stand.connection)
        assert len(hands.claim(worker.worker_id, names=["double"])) == 5
        made = Leftovers(
            one.giving, publishes=lambda: True, carrier=one.carrier, stale_ms=60_000,
            events=one.relay._events, clock=SystemClock(),
        )  # fmt: skip
        made._thorough_at = SystemClock().monotonic() + 0.5
        assert await made.tick() is not None
        assert made.removed == 0
        await asyncio.sleep(0.6)  # the time of the thorough check comes
        await made.tick()
        assert made.removed == 3


def _is_used_up(consumer: ConsumerCounters) -> bool:
    """Whether it has delivered everything and waits for nothing."""
    return consumer.delivered > 0 and consumer.num_pending == 0 and consumer.num_ack_pending == 0


async def test_a_full_stream_is_reported_and_holds_up_no_queue(stand: Stand, server: NatsServer) -> None:
    async with relaying(stand, server, "one", max_bytes=65_536) as one:
        await until(lambda: one.relay.has_turn)
        plan = plan_of(stand, server)
        await server.publish(
            plan.subject("fat"), encode(Message(task_id=uuid4(), queue="x" * 64_500, number=1))
        )
        ids = send(one, stand, 50, "mail")
        await until(lambda: outbox(stand, "place is not null and queue = 'mail'") == one.relay._window)
        (event,) = (event for event in one.events if isinstance(event, MessagesNotPublished))
        assert "maximum bytes exceeded" in event.problem
        assert "maximum bytes exceeded" in (one.relay.fullness.refusal or "")
        send(one, stand, 1, "another")
        await until(lambda: outbox(stand, f"place = {NOT_CARRIED} and queue = 'another'") == 1)
        assert not stand.query("select from {schema}.relay where failing")
        async with clearing(one, stand):
            for task_id in ids[:10]:  # what is published next finds no room, and so room is made at once
                end(stand, task_id)
            await until(lambda: outbox(stand, "place > 0") > 0)


async def test_one_queue_cannot_fill_a_bounded_stream_with_what_waits(
    stand: Stand, server: NatsServer
) -> None:
    async with relaying(stand, server, "one", max_bytes=65_536) as one:
        await until(lambda: one.relay.has_turn)
        send(one, stand, 600, "mail")
        await in_stream(stand, server, 16)
        send(one, stand, 1, "another")
        await until(lambda: outbox(stand, "place > 0 and queue = 'another'") == 1)
        assert not any(isinstance(event, MessagesNotPublished) for event in one.events)
