"""The relay: one of all workers publishes, another goes on for it, and what was lost on the way is published again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from random import Random
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.service import ServiceRunner
from everbeat.store import messages, tasks
from everbeat.store.messages import WINDOW
from everbeat.store.session import Session
from everbeat.wake.jetstream import JetStream
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan
from everbeat.worker.fullness import MessagesNotPublished
from everbeat.worker.patrol import MessagesRepublished
from everbeat.worker.relay import TURN_S, Relay
from tests.nats_server import NatsServer
from tests.worker.stand import Stand

PATIENCE_S = 30.0


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as made:
        yield made


def plan_of(stand: Stand, server: NatsServer, *, max_bytes: int | None = None) -> StreamPlan:
    return StreamPlan(stand.target.schema, NatsConfig(servers=[server.url], max_bytes=max_bytes), 600.0)


class Relaying:
    """A relay with a link and a runner of its own, as a worker has them."""

    def __init__(self, stand: Stand, server: NatsServer, name: str, *, max_bytes: int | None) -> None:
        self.stand = stand
        self.events: list[Event] = []
        plan = plan_of(stand, server, max_bytes=max_bytes)
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.carrier = JetStream(plan, plan.config, name=name, random=Random(1))
        self.giving = Session(stand.target, f"{name} worker")
        self.relay = Relay(
            stand.target, giving=self.giving, session_name=lambda: name, carrier=self.carrier, worker_id=lambda: name,
            events=bus, clock=SystemClock(), random=Random(2),
        )  # fmt: skip
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        runner = ServiceRunner(
            self.relay, clock=SystemClock(), random=Random(3), emit=self.events.append, wake=self.relay.wake
        )
        wake = self.relay.wake
        self._running = [
            asyncio.create_task(self.carrier.run(lambda _: wake.set())),
            asyncio.create_task(runner.run()),
        ]

    async def vanish(self) -> None:
        """It stops in the middle of everything, and says nothing."""
        for task in self._running:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for session in (self.giving, self.relay._own):
            if session is not None:
                await session.drop()


@asynccontextmanager
async def relaying(
    stand: Stand, server: NatsServer, name: str, *, max_bytes: int | None = None
) -> AsyncIterator[Relaying]:
    made = Relaying(stand, server, name, max_bytes=max_bytes)
    stand.run(messages.use_messages(channel=stand.target.channel))
    made.start()
    try:
        yield made
    finally:
        await made.vanish()


async def until(true: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.02)  # rows and counters are looked at from outside


async def in_stream(stand: Stand, server: NatsServer, count: int, *, within_s: float = PATIENCE_S) -> None:
    stream = plan_of(stand, server).stream
    async with asyncio.timeout(within_s):
        while (await server.counters(stream)).messages != count:
            await asyncio.sleep(0.05)  # the server's counters tell nobody that they change


def send(stand: Stand, count: int) -> list[UUID]:
    new = [
        tasks.NewTask(id=uuid4(), name="double", queue="default", priority=0, args=b'{"x": 1}')
        for _ in range(count)
    ]
    stand.run(tasks.insert_tasks(new, channel=stand.target.channel))
    return [each.id for each in new]


def outbox(stand: Stand, condition: str = "true") -> int:
    (row,) = stand.query("select count(*) as rows from {schema}.message_outbox where " + condition)
    return int(row["rows"])


async def test_one_of_two_publishes_and_the_other_goes_on_when_it_vanishes(
    stand: Stand, server: NatsServer
) -> None:
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        async with relaying(stand, server, "two") as two:
            send(stand, 5)
            await in_stream(stand, server, 5)
            await until(lambda: two.relay.is_manned)
            assert not two.relay.has_turn
            await one.vanish()
            send(stand, 5)
            await in_stream(stand, server, 10, within_s=5 * TURN_S)
            assert two.relay.has_turn


async def test_whoever_leaves_gives_the_turn_away_at_once(stand: Stand, server: NatsServer) -> None:
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        await one.relay.close()
        assert stand.run(
            messages.hold_relay("two", taken_ms=60_000, channel=stand.target.channel)
        )  # by a statement of its own
        one.relay.wake.set()
        send(stand, 1)
        await until(lambda: not one.relay.has_turn)
        assert outbox(stand, "place is null") == 1


def sessions_of_relays(stand: Stand) -> list[str]:
    """What each session of a relay waits for."""
    rows = stand.query(
        "select coalesce(wait_event_type, '') as waits_for from pg_stat_activity"
        " where split_part(application_name, ' ', 2) = 'relay' and datname = current_database()"
    )
    return [row["waits_for"] for row in rows]


async def test_a_relay_that_leaves_during_a_statement_leaves_no_session(
    stand: Stand, server: NatsServer
) -> None:
    table = sql.Identifier(stand.target.schema, "message_outbox")
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        with stand.target.connect("everbeat test") as other, other.transaction():
            other.execute(sql.SQL("lock table {} in access exclusive mode").format(table))
            one.relay.written()
            await until(lambda: "Lock" in sessions_of_relays(stand))
            former = one.relay._own
            assert former is not None
            await one.relay.close()
            # The statement is repeated over a new connection, and waits for the lock again.
            await until(lambda: former.connected)
        await until(lambda: not sessions_of_relays(stand))


async def test_no_more_than_a_window_is_out(stand: Stand, server: NatsServer) -> None:
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        send(stand, WINDOW + 300)
        await in_stream(stand, server, WINDOW)
        await until(lambda: outbox(stand, "place is null") == 300)
        for row in stand.query(
            "select task_id from {schema}.message_outbox where place is not null limit 100"
        ):
            stand.run(tasks.cancel(row["task_id"], channel=stand.target.channel, call=uuid4()))
        await in_stream(
            stand, server, WINDOW + 100
        )  # those of what has ended are there all the same: nobody takes them
        assert outbox(stand) == WINDOW + 200


async def test_what_the_stream_lost_is_published_again(stand: Stand, server: NatsServer) -> None:  # N7
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        ids = send(stand, 20)
        await in_stream(stand, server, 20)
        await until(lambda: outbox(stand, "place is not null") == 20)
        stream = plan_of(stand, server).stream
        newest = (await server.counters(stream)).last_seq
        for place in range(newest - 4, newest + 1):
            await server.delete_message(stream, place)
        await in_stream(stand, server, 20)
        await until(lambda: any(isinstance(event, MessagesRepublished) for event in one.events))
        (event,) = (event for event in one.events if isinstance(event, MessagesRepublished))
        assert set(event.task_ids) <= set(ids)
        assert len(event.task_ids) == 5


async def test_a_burst_makes_the_relay_look_instead_of_being_told(stand: Stand, server: NatsServer) -> None:
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        for _ in range(4):
            send(stand, 250)
        one.relay.written()  # as after a hint that a listening worker heard
        await until(lambda: not listens(stand))
        await in_stream(stand, server, WINDOW)
        await until(lambda: listens(stand))
        assert one.relay.published == WINDOW


async def test_a_stream_that_takes_nothing_is_told_of_and_costs_little(
    stand: Stand, server: NatsServer
) -> None:
    async with relaying(stand, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        await in_stream(stand, server, 0)
        await allow_messages(stand, server, 1)  # bytes
        with stand.target.connect("everbeat test") as ear:
            ear.execute(sql.SQL("listen {}").format(sql.Identifier(stand.target.channel)))
            send(stand, 600)
            one.relay.written()
            await until(lambda: any(isinstance(event, MessagesNotPublished) for event in one.events))
            await until(lambda: says(stand, "failing"))
            # What was sent before is told too, after any number of other hints.
            assert any(each.payload == "t:default" for each in ear.notifies(timeout=20))
        assert outbox(stand, "place is not null") == 0
        before = one.relay._own.answers if one.relay._own is not None else 0
        await asyncio.sleep(2)  # what it does meanwhile is counted
        assert one.relay._own is not None
        assert one.relay._own.answers - before < 40
        await allow_messages(stand, server, -1)
        await until(lambda: not says(stand, "failing"))


async def allow_messages(stand: Stand, server: NatsServer, largest: int) -> None:
    """Somebody changes the stream so that it takes messages up to this size."""
    stream = plan_of(stand, server).stream
    config = (await server.counters(stream)).config
    answer = await server.ask(f"STREAM.UPDATE.{stream}", {**config, "max_msg_size": largest})
    assert "error" not in answer, answer


def says(stand: Stand, what: str) -> bool:
    (row,) = stand.query(f"select {what} from {{schema}}.relay")
    return bool(row[what])


def listens(stand: Stand) -> bool:
    return says(stand, "listens")
