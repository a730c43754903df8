"""Test the relay: one worker publishes for all, another takes over, and lost messages are published again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from random import Random
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.nats import jetstream
from everbeat.nats.jetstream import JetStream
from everbeat.nats.options import NatsConfig
from everbeat.nats.relay import TURN_S, MessageRelay, MessagesNotPublished, MessagesRepublished
from everbeat.nats.stream_plan import StreamPlan
from everbeat.protocol import FromWorker, Welcome
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.task_scope import ServiceRunner, TaskScope
from everbeat.store import messages, tasks
from everbeat.store.messages import WINDOW
from everbeat.store.session import Session
from everbeat.worker.environment import WorkerEnvironment, WorkerIdentity, WorkerPlan
from tests.nats_server import NatsServer
from tests.worker.harness import WorkerHarness

PATIENCE_S = 30.0


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as made:
        yield made


def plan_of(harness: WorkerHarness, server: NatsServer, *, max_bytes: int | None = None) -> StreamPlan:
    return StreamPlan(harness.target.schema, NatsConfig(servers=[server.url], max_bytes=max_bytes), 600.0)


class NoLink:
    """A relay sends nothing to a supervisor."""

    def tell(self, message: FromWorker) -> None:
        raise AssertionError(message)


class Relaying:
    """A relay with its own connection and task, as in a worker."""

    def __init__(
        self, harness: WorkerHarness, server: NatsServer, name: str, *, max_bytes: int | None
    ) -> None:
        self.harness = harness
        self.events: list[Event] = []
        plan = plan_of(harness, server, max_bytes=max_bytes)
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.transport = JetStream(plan, plan.config, name=name, random=Random(1))
        session = Session(harness.target, f"{name} worker")
        self.environment = WorkerEnvironment(
            plan=WorkerPlan(
                target=harness.target,
                definitions={},
                config=WorkerConfig(),
                recovery=RecoveryConfig(running_stale_threshold_ms=60_000),
            ),
            identity=WorkerIdentity(Welcome(name, "the supervisor", name)),
            link=NoLink(),
            clock=SystemClock(),
            random=Random(2),
            events=bus,
            scope=TaskScope(name=name),
            claim_session=session,
            session=session,
            send=lambda _: None,
        )
        self.relay = MessageRelay(self.environment, self.transport)
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        runner = ServiceRunner(
            self.relay, clock=SystemClock(), random=Random(3), emit=self.events.append, wake=self.relay.wake
        )
        wake = self.relay.wake
        self._running = [
            asyncio.create_task(self.transport.run(lambda _: wake.set())),
            asyncio.create_task(runner.run()),
        ]

    async def vanish(self) -> None:
        """Stop the relay at any point without releasing its turn."""
        for task in self._running:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for session in (self.environment.session, self.relay._own):
            if session is not None:
                await session.drop()


@asynccontextmanager
async def relaying(
    harness: WorkerHarness, server: NatsServer, name: str, *, max_bytes: int | None = None
) -> AsyncIterator[Relaying]:
    made = Relaying(harness, server, name, max_bytes=max_bytes)
    harness.run(messages.use_messages(channel=harness.target.channel))
    made.start()
    try:
        yield made
    finally:
        await made.vanish()


async def until(true: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.02)  # rows and counters send no events


async def in_stream(
    harness: WorkerHarness, server: NatsServer, count: int, *, within_s: float = PATIENCE_S
) -> None:
    stream = plan_of(harness, server).stream
    async with asyncio.timeout(within_s):
        while (await server.counters(stream)).messages != count:
            await asyncio.sleep(0.05)  # the server sends no event when its counters change


def send(harness: WorkerHarness, count: int) -> list[UUID]:
    new = [
        tasks.NewTask(id=uuid4(), name="double", queue="default", priority=0, args=b'{"x": 1}')
        for _ in range(count)
    ]
    harness.run(tasks.insert_tasks(new, channel=harness.target.channel))
    return [each.id for each in new]


def outbox(harness: WorkerHarness, condition: str = "true") -> int:
    (row,) = harness.query("select count(*) as rows from {schema}.message_outbox where " + condition)
    return int(row["rows"])


async def test_a_second_relay_continues_when_the_first_vanishes(
    harness: WorkerHarness, server: NatsServer
) -> None:
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        async with relaying(harness, server, "two") as two:
            send(harness, 5)
            await in_stream(harness, server, 5)
            await until(lambda: two.relay.has_publisher)
            assert not two.relay.has_turn
            await one.vanish()
            send(harness, 5)
            await in_stream(harness, server, 10, within_s=5 * TURN_S)
            assert two.relay.has_turn


async def test_a_closing_relay_releases_its_turn_at_once(harness: WorkerHarness, server: NatsServer) -> None:
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        await one.relay.close()
        assert harness.run(
            messages.hold_relay("two", taken_ms=60_000, channel=harness.target.channel)
        )  # released by its own statement
        one.relay.wake.set()
        send(harness, 1)
        await until(lambda: not one.relay.has_turn)
        assert outbox(harness, "place is null") == 1


def sessions_of_relays(harness: WorkerHarness) -> list[str]:
    """Return the wait event type of each session of a relay."""
    rows = harness.query(
        "select coalesce(wait_event_type, '') as waits_for from pg_stat_activity"
        " where split_part(application_name, ' ', 2) = 'relay' and datname = current_database()"
    )
    return [row["waits_for"] for row in rows]


async def test_a_relay_that_closes_during_a_statement_leaves_no_session(
    harness: WorkerHarness, server: NatsServer
) -> None:
    table = sql.Identifier(harness.target.schema, "message_outbox")
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        with harness.target.connect("everbeat test") as other, other.transaction():
            other.execute(sql.SQL("lock table {} in access exclusive mode").format(table))
            one.relay.written()
            await until(lambda: "Lock" in sessions_of_relays(harness))
            former = one.relay._own
            assert former is not None
            await one.relay.close()
            # The statement is repeated on a new connection and waits for the lock again.
            await until(lambda: former._connection is not None)
        await until(lambda: not sessions_of_relays(harness))


async def test_a_relay_publishes_no_more_than_one_window(harness: WorkerHarness, server: NatsServer) -> None:
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        send(harness, WINDOW + 300)
        await in_stream(harness, server, WINDOW)
        await until(lambda: outbox(harness, "place is null") == 300)
        for row in harness.query(
            "select task_id from {schema}.message_outbox where place is not null limit 100"
        ):
            harness.run(tasks.cancel(row["task_id"], channel=harness.target.channel, call=uuid4()))
        await in_stream(
            harness, server, WINDOW + 100
        )  # messages of ended tasks stay in the stream, because no consumer takes them
        assert outbox(harness) == WINDOW + 200


async def test_a_relay_publishes_messages_again_that_the_stream_lost(
    harness: WorkerHarness, server: NatsServer
) -> None:  # N7
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        ids = send(harness, 20)
        await in_stream(harness, server, 20)
        await until(lambda: outbox(harness, "place is not null") == 20)
        stream = plan_of(harness, server).stream
        newest = (await server.counters(stream)).last_seq
        for place in range(newest - 4, newest + 1):
            await server.delete_message(stream, place)
        await in_stream(harness, server, 20)
        await until(lambda: any(isinstance(event, MessagesRepublished) for event in one.events))
        (event,) = (event for event in one.events if isinstance(event, MessagesRepublished))
        assert set(event.task_ids) <= set(ids)
        assert len(event.task_ids) == 5


async def test_a_relay_polls_instead_of_listening_during_a_burst(
    harness: WorkerHarness, server: NatsServer
) -> None:
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        for _ in range(4):
            send(harness, 250)
        one.relay.written()  # as after a hint that a listening worker got
        await until(lambda: not listens(harness))
        await in_stream(harness, server, WINDOW)
        await until(lambda: listens(harness))
        assert one.relay.published == WINDOW


async def test_a_stream_that_refuses_messages_is_reported_and_polled_rarely(
    harness: WorkerHarness, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        jetstream, "CHECK_INTERVAL_S", 600.0
    )  # the relay does not revert the limit of the stream
    async with relaying(harness, server, "one") as one:
        await until(lambda: one.relay.has_turn)
        await in_stream(harness, server, 0)
        await allow_messages(harness, server, 1)  # bytes
        with harness.target.connect("everbeat test") as ear:
            ear.execute(sql.SQL("listen {}").format(sql.Identifier(harness.target.channel)))
            send(harness, 600)
            one.relay.written()
            await until(lambda: any(isinstance(event, MessagesNotPublished) for event in one.events))
            (event,) = (event for event in one.events if isinstance(event, MessagesNotPublished))
            assert "message size exceeds maximum" in event.problem
            await until(lambda: says(harness, "failing"))
            # Hints of earlier sends arrive too, after any number of other hints.
            await until(lambda: any(each.payload == "t:default" for each in ear.notifies(timeout=0)))
        assert outbox(harness, "place is not null") == 0
        before = one.relay._own.answers if one.relay._own is not None else 0
        await asyncio.sleep(2)  # the period in which the test counts statements
        assert one.relay._own is not None
        assert one.relay._own.answers - before < 40
        await allow_messages(harness, server, -1)
        await until(lambda: not says(harness, "failing"))


async def allow_messages(harness: WorkerHarness, server: NatsServer, largest: int) -> None:
    """Change the stream so that it accepts only messages up to this size."""
    stream = plan_of(harness, server).stream
    config = (await server.counters(stream)).config
    answer = await server.ask(f"STREAM.UPDATE.{stream}", {**config, "max_msg_size": largest})
    assert "error" not in answer, answer


def says(harness: WorkerHarness, what: str) -> bool:
    (row,) = harness.query(f"select {what} from {{schema}}.relay")
    return bool(row[what])


def listens(harness: WorkerHarness) -> bool:
    return says(harness, "listens")
