"""Run a JetStream connection for the tests of both ends of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from uuid import uuid4

from everbeat.nats.jetstream import JetStream
from everbeat.nats.options import NatsConfig
from everbeat.nats.pull_consumer import JetStreamDelivery, PullConsumer
from everbeat.nats.stream_plan import StreamPlan, TaskMessage

PATIENCE_S = 20.0


def message(queue: str = "mail", number: int = 1, **fields: object) -> TaskMessage:
    return TaskMessage(task_id=uuid4(), queue=queue, number=number, **fields)  # type: ignore[arg-type]


def messages(count: int, queue: str = "mail", *, first: int = 1) -> list[TaskMessage]:
    return [message(queue, number) for number in range(first, first + count)]


def plan_for(
    url: str, schema: str | None = None, *, ack_wait_s: float = 30.0, **settings: object
) -> StreamPlan:
    """Return a plan for a schema that no other test uses."""
    parsed = NatsConfig.parse(url)
    assert parsed is not None
    return StreamPlan(schema or f"s{uuid4().hex[:8]}", parsed.replace(**settings), ack_wait_s)


class Running:
    """A JetStream connection and the states that it reported."""

    def __init__(self, plan: StreamPlan) -> None:
        self.plan = plan
        self.transport = JetStream(plan, plan.config, name="tests", random=Random())
        self.states: list[bool] = []
        self.change = asyncio.Event()

    def on_state(self, up: bool) -> None:
        self.states.append(up)
        self.change.set()

    async def expect(self, true: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a reported state makes `true` true."""
        async with asyncio.timeout(timeout_s):
            while not true():
                self.change.clear()
                await self.change.wait()

    async def expect_up(self, *, times: int = 1) -> None:
        await self.expect(lambda: self.states.count(True) >= times)

    async def expect_down(self, *, times: int = 1, timeout_s: float = PATIENCE_S) -> None:
        await self.expect(lambda: self.states.count(False) >= times, timeout_s=timeout_s)

    async def published(self, *sent: TaskMessage) -> list[int]:
        """Publish until all messages are in the stream; return their places."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                places = await self.transport.publish(sent)
                if None not in places:
                    return [place for place in places if place is not None]
                await asyncio.sleep(0.1)  # a failed publication is repeated after a while, as a relay does


@asynccontextmanager
async def running(plan: StreamPlan, *, up: bool = True) -> AsyncIterator[Running]:
    """Run a JetStream connection until the end of the block; with `up`, wait first until it is connected."""
    found = Running(plan)
    task = asyncio.create_task(found.transport.run(found.on_state))
    try:
        if up:
            await found.expect_up()
        yield found
    finally:
        task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            with suppress(asyncio.CancelledError):
                await task
        assert not found.transport.is_up


class RecordedDeliveries:
    """Records the deliveries of a pull consumer, in order."""

    def __init__(self) -> None:
        self.deliveries: list[JetStreamDelivery] = []
        self.arrival = asyncio.Event()
        self.consumer: PullConsumer | None = None

    def on_delivered(self, delivered: JetStreamDelivery) -> None:
        self.deliveries.append(delivered)
        self.arrival.set()

    @property
    def numbers(self) -> list[int]:
        return [each.message.number for each in self.deliveries if each.message is not None]

    async def expect(self, count: int, *, timeout_s: float = PATIENCE_S) -> Sequence[JetStreamDelivery]:
        """Wait for this many deliveries and return them."""
        async with asyncio.timeout(timeout_s):
            while len(self.deliveries) < count:
                self.arrival.clear()
                await self.arrival.wait()
        return self.deliveries

    def want(self, room: int) -> None:
        assert self.consumer is not None
        self.consumer.want(room)

    def close(self) -> None:
        assert self.consumer is not None
        self.consumer.close()


def start_consumer(transport: JetStream, queue: str = "mail", *, room: int = 100) -> RecordedDeliveries:
    found = RecordedDeliveries()
    found.consumer = transport.consume(queue, found.on_delivered)
    found.consumer.want(room)
    return found
