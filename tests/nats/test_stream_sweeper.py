"""Test the outbox sweeper: it deletes exactly the messages of ended tasks, and full streams or unused queues block no others."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from random import Random
from uuid import UUID, uuid4

import pytest

from everbeat.nats import relay, stream_sweeper
from everbeat.nats.relay import MessageRelay, MessagesNotPublished
from everbeat.nats.stream_plan import NOT_CARRIED, TaskMessage, decode, encode
from everbeat.nats.stream_sweeper import MessagesNotTaken, StreamSweeper
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.task_scope import ServiceRunner
from everbeat.store import tasks
from tests.nats.test_relay import Relaying, in_stream, outbox, plan_of, relaying, until
from tests.nats_server import ConsumerCounters, NatsServer
from tests.store.conftest import StoreHarness
from tests.worker.harness import WorkerHarness


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as made:
        yield made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sweeper judge messages as soon as a check finds them."""
    monkeypatch.setattr(stream_sweeper, "CHECK_S", 0.2)
    monkeypatch.setattr(relay, "SELDOM_S", 0.2)
    monkeypatch.setattr(stream_sweeper, "SETTLED_S", 0.0)
    monkeypatch.setattr(stream_sweeper, "THOROUGH_S", 1.0)


@asynccontextmanager
async def clearing(one: Relaying, harness: WorkerHarness) -> AsyncIterator[StreamSweeper]:
    made = StreamSweeper(one.environment, one.transport, one.relay)
    runner = ServiceRunner(
        made, clock=SystemClock(), random=Random(4), emit=one.events.append, wake=made.wake
    )
    task = asyncio.create_task(runner.run())
    try:
        yield made
    finally:
        task.cancel()


def send(one: Relaying, harness: WorkerHarness, count: int, queue: str) -> list[UUID]:
    """Send tasks and notify the relay, as a worker does when it gets the hint."""
    new = [
        tasks.NewTask(id=uuid4(), name="double", queue=queue, priority=0, args=b'{"x": 1}')
        for _ in range(count)
    ]
    harness.run(tasks.insert_tasks(new, channel=harness.target.channel))
    one.relay.written()
    return [each.id for each in new]


def end(harness: WorkerHarness, task_id: UUID) -> None:
    harness.run(tasks.cancel(task_id, channel=harness.target.channel, call=uuid4()))
    assert harness.task(task_id)["state"] == "CANCELLED"


async def held(harness: WorkerHarness, server: NatsServer, places: Iterable[int]) -> set[UUID]:
    """Return the tasks whose messages are at these places."""
    found = set()
    for place in places:
        subject = f"STREAM.MSG.GET.{plan_of(harness, server).stream}"
        answer = await server.ask(subject, {"seq": place})
        message = decode(b64decode(answer["message"]["data"])) if "message" in answer else None
        if message is not None:
            found.add(message.task_id)
    return found


def places(harness: WorkerHarness) -> list[int]:
    return [row["place"] for row in harness.query("select place from {schema}.message_outbox")]


@pytest.mark.usefixtures("at_once")
async def test_the_sweeper_deletes_only_messages_of_ended_tasks(
    harness: WorkerHarness, server: NatsServer
) -> None:  # N11
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        ids = send(one, harness, 20, "mail")
        await in_stream(harness, server, 20)
        await until(lambda: outbox(harness, "place is not null") == 20)
        published = places(harness)
        for task_id in [*ids[:5], *ids[8:12], ids[19]]:
            end(harness, task_id)
        await until(lambda: outbox(harness) == 10)
        async with clearing(one, harness) as clearer:
            await in_stream(harness, server, 10)
            assert clearer.removed == 10
            assert await held(harness, server, published) == {*ids[5:8], *ids[12:19]}
            assert outbox(harness) == 10


@pytest.mark.usefixtures("at_once")
async def test_a_queue_without_consumers_is_not_published_until_a_worker_pulls(
    harness: WorkerHarness, server: NatsServer
) -> None:  # N11
    async with relaying(harness, server, "one") as one, clearing(one, harness):
        await until(lambda: one.relay.has_turn)
        for task_id in send(one, harness, 3, "mail"):
            await until(lambda: outbox(harness, "place is null") == 0)
            end(harness, task_id)
        await until(lambda: any(isinstance(event, MessagesNotTaken) for event in one.events))
        await in_stream(harness, server, 0)
        assert one.transport.not_taken == {"mail"}
        (task_id,) = send(one, harness, 1, "mail")
        await until(lambda: outbox(harness, f"place = {NOT_CARRIED}") == 1)
        (other,) = send(one, harness, 1, "default")
        await in_stream(harness, server, 1)
        consumer = one.transport.consume("mail", lambda delivered: delivered.ack())
        consumer.want(1)
        await until(lambda: not one.transport.not_taken)
        end(harness, task_id)
        end(harness, other)
        send(one, harness, 1, "mail")
        await until(lambda: outbox(harness, "place > 0") == 1)
        assert sum(isinstance(event, MessagesNotTaken) for event in one.events) <= 2


@pytest.mark.usefixtures("at_once")
async def test_a_queue_is_reported_only_if_no_live_worker_serves_it_by_nats(
    harness: WorkerHarness, server: NatsServer
) -> None:  # N11
    """The live worker has no room or has not pulled from this queue yet, and neither is a problem."""
    worker = harness.welcome()
    async with relaying(harness, server, "one") as one, clearing(one, harness) as clearer:
        await until(lambda: one.relay.has_turn)
        for task_id in send(one, harness, 3, "mail"):
            await until(lambda: outbox(harness, "place is null") == 0)
            end(harness, task_id)
        await until(lambda: one.transport.not_taken == {"mail"})
        await in_stream(harness, server, 0)
        assert clearer.not_taken == set()
        assert not any(isinstance(event, MessagesNotTaken) for event in one.events)
        harness.query(
            "update {schema}.workers set ended_at = now() where id = %s returning id", worker.worker_id
        )
        await until(lambda: any(isinstance(event, MessagesNotTaken) for event in one.events))
        (event,) = (event for event in one.events if isinstance(event, MessagesNotTaken))
        assert (event.queue, event.removed) == ("mail", 3)
        assert clearer.not_taken == {"mail"}


@pytest.mark.usefixtures("at_once")
async def test_messages_at_max_deliver_are_deleted_when_their_task_has_ended(
    harness: WorkerHarness, server: NatsServer
) -> None:
    async with relaying(harness, server, "one") as one, clearing(one, harness):
        await until(lambda: one.relay.has_turn)
        ids = send(one, harness, 3, "mail")
        await in_stream(harness, server, 3)
        await until(lambda: outbox(harness, "place is not null") == 3)
        published = places(harness)
        plan = plan_of(harness, server)
        settings = {**plan.consumer_settings("mail")["config"], "max_deliver": 1, "ack_wait": 100_000_000}
        subject = f"CONSUMER.DURABLE.CREATE.{plan.stream}.mail"
        assert "error" not in await server.ask(subject, {"stream_name": plan.stream, "config": settings})
        one.transport.consume("mail", lambda _: None).want(3)  # delivered and never acknowledged
        async with asyncio.timeout(20):
            while not _is_used_up((await server.counters(plan.stream)).consumers["mail"]):
                await asyncio.sleep(0.05)  # the server sends no event when its counters change
        for task_id in ids[:2]:
            end(harness, task_id)
        await in_stream(harness, server, 1)
        assert await held(harness, server, published) == {ids[2]}


@pytest.mark.usefixtures("at_once")
async def test_running_tasks_without_a_message_do_not_hide_messages_of_ended_tasks(
    harness: WorkerHarness, server: NatsServer
) -> None:  # N11
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        ids = send(one, harness, 3, "mail")
        await in_stream(harness, server, 3)
        await until(lambda: outbox(harness, "place is not null") == 3)
        for task_id in ids:
            end(harness, task_id)
        await until(lambda: outbox(harness) == 0)
        await one.relay.close()
        worker = harness.welcome()
        new = [
            tasks.NewTask(id=uuid4(), name="double", queue="mail", priority=0, args=b"{}") for _ in range(5)
        ]
        harness.run(tasks.insert_tasks(new, channel=harness.target.channel))
        db = StoreHarness(harness.target, harness.connection)
        assert len(db.claim(worker.worker_id, names=["double"])) == 5
        publishing = MessageRelay(one.environment, one.transport)
        publishing.has_turn = True
        made = StreamSweeper(one.environment, one.transport, publishing)
        made._thorough_at = SystemClock().monotonic() + 0.5
        assert await made.tick() is not None
        assert made.removed == 0
        await asyncio.sleep(0.6)  # until the thorough check is due
        await made.tick()
        assert made.removed == 3


def _is_used_up(consumer: ConsumerCounters) -> bool:
    """Return whether the consumer has delivered all messages and waits for no acknowledgement."""
    return consumer.delivered > 0 and consumer.num_pending == 0 and consumer.num_ack_pending == 0


async def test_a_full_stream_is_reported_and_blocks_no_queue(
    harness: WorkerHarness, server: NatsServer
) -> None:
    async with relaying(harness, server, "one", max_bytes=65_536) as one:
        await until(lambda: one.relay.has_turn)
        plan = plan_of(harness, server)
        await server.publish(
            plan.subject("fat"), encode(TaskMessage(task_id=uuid4(), queue="x" * 64_500, number=1))
        )
        ids = send(one, harness, 50, "mail")
        await until(lambda: outbox(harness, "place is not null and queue = 'mail'") == one.relay._window)
        (event,) = (event for event in one.events if isinstance(event, MessagesNotPublished))
        assert "maximum bytes exceeded" in event.problem
        assert "maximum bytes exceeded" in (one.relay.fullness.refusal or "")
        send(one, harness, 1, "another")
        await until(lambda: outbox(harness, f"place = {NOT_CARRIED} and queue = 'another'") == 1)
        assert not harness.query("select from {schema}.relay where failing")
        async with clearing(one, harness):
            for task_id in ids[:10]:  # the next publications find no room, so the sweeper makes room at once
                end(harness, task_id)
            await until(lambda: outbox(harness, "place > 0") > 0)


async def test_one_queue_cannot_fill_a_bounded_stream(harness: WorkerHarness, server: NatsServer) -> None:
    async with relaying(harness, server, "one", max_bytes=65_536) as one:
        await until(lambda: one.relay.has_turn)
        send(one, harness, 600, "mail")
        await in_stream(harness, server, 16)
        send(one, harness, 1, "another")
        await until(lambda: outbox(harness, "place > 0 and queue = 'another'") == 1)
        assert not any(isinstance(event, MessagesNotPublished) for event in one.events)
