"""A real NATS server and a carrier beside it, for the tests of both ends of a stream.

What lives here: fixtures and what awaits them. What may not: assertions of the tests themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from uuid import uuid4

from everbeat.wake.carrier import Delivered, Message, Tap
from everbeat.wake.jetstream import JetStream
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan

PATIENCE_S = 20.0


def message(queue: str = "mail", number: int = 1, **fields: object) -> Message:
    return Message(task_id=uuid4(), queue=queue, number=number, **fields)  # type: ignore[arg-type]


def messages(count: int, queue: str = "mail", *, first: int = 1) -> list[Message]:
    return [message(queue, number) for number in range(first, first + count)]


def plan_for(
    url: str, schema: str | None = None, *, ack_wait_s: float = 30.0, **settings: object
) -> StreamPlan:
    """A plan for a schema that nobody else uses."""
    parsed = NatsConfig.parse(url)
    assert parsed is not None
    return StreamPlan(schema or f"s{uuid4().hex[:8]}", parsed.replace(**settings), ack_wait_s)


class Running:
    """A carrier, and what it said of itself."""

    def __init__(self, plan: StreamPlan) -> None:
        self.plan = plan
        self.carrier = JetStream(plan, plan.config, name="tests", random=Random())
        self.states: list[bool] = []
        self.change = asyncio.Event()

    def on_state(self, up: bool) -> None:
        self.states.append(up)
        self.change.set()

    async def expect(self, true: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        """Until a state was told that makes `true` true."""
        async with asyncio.timeout(timeout_s):
            while not true():
                self.change.clear()
                await self.change.wait()

    async def expect_up(self, *, times: int = 1) -> None:
        await self.expect(lambda: self.states.count(True) >= times)

    async def expect_down(self, *, times: int = 1, timeout_s: float = PATIENCE_S) -> None:
        await self.expect(lambda: self.states.count(False) >= times, timeout_s=timeout_s)

    async def published(self, *sent: Message) -> list[int]:
        """Publish until everything arrived; the places."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                places = await self.carrier.publish(sent)
                if None not in places:
                    return [place for place in places if place is not None]
                await asyncio.sleep(
                    0.1
                )  # a publication that failed is repeated after a while, as a relay does


@asynccontextmanager
async def running(plan: StreamPlan, *, up: bool = True) -> AsyncIterator[Running]:
    """A carrier that runs until the end of the block; `up`: its link is there at the beginning of it."""
    found = Running(plan)
    task = asyncio.create_task(found.carrier.run(found.on_state))
    try:
        if up:
            await found.expect_up()
        yield found
    finally:
        task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            with suppress(asyncio.CancelledError):
                await task
        assert not found.carrier.is_up


class Tapped:
    """What a tap delivered, in order."""

    def __init__(self) -> None:
        self.deliveries: list[Delivered] = []
        self.arrival = asyncio.Event()
        self.tap: Tap | None = None

    def on_delivered(self, delivered: Delivered) -> None:
        self.deliveries.append(delivered)
        self.arrival.set()

    @property
    def numbers(self) -> list[int]:
        return [each.message.number for each in self.deliveries if each.message is not None]

    async def expect(self, count: int, *, timeout_s: float = PATIENCE_S) -> Sequence[Delivered]:
        """Until so many have come."""
        async with asyncio.timeout(timeout_s):
            while len(self.deliveries) < count:
                self.arrival.clear()
                await self.arrival.wait()
        return self.deliveries

    def want(self, room: int) -> None:
        assert self.tap is not None
        self.tap.want(room)

    def close(self) -> None:
        assert self.tap is not None
        self.tap.close()


def tapped(carrier: JetStream, queue: str = "mail", *, room: int = 100) -> Tapped:
    found = Tapped()
    found.tap = carrier.tap(queue, found.on_delivered)
    found.tap.want(room)
    return found
