"""A NATS server beside a scenario, a listener to every published message, and helpers that publish messages directly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self
from uuid import UUID

from everbeat.nats.options import NatsConfig
from everbeat.nats.stream_plan import StreamPlan, TaskMessage, decode, encode
from tests.nats_server import Counters, NatsServer
from tests.stories.scenario import Scenario

POLLS_NEVER: Mapping[str, Any] = {"poll_interval": "5m"}
"""Only messages notify such a worker of tasks."""
ONE_SLOT: Mapping[str, Any] = {
    **POLLS_NEVER,
    "async_concurrency": 1,
    "prefetch": 0,
    "thread_concurrency": 0,
    "process_concurrency": 0,
}


class NatsScenario:
    """A scenario whose tasks are announced by messages of this server. Counters are those of the stream."""

    def __init__(self, scenario: Scenario, server: NatsServer) -> None:
        self.scenario = scenario
        self.server = server
        scenario.wake = {"servers": [server.url]}
        self._left = (0, 0)
        self.plan = StreamPlan(scenario.schema, NatsConfig(servers=[server.url]), 600.0)

    def counters(self) -> Counters:
        return asyncio.run(self.server.counters(self.plan.stream))

    def redeliver_soon(self) -> None:
        """Let trees that start from now on redeliver an unacknowledged message after 4 s; they need FAST recovery."""
        self.scenario.wake = {"servers": [self.server.url], "ack_wait": "4s"}

    def ready(self) -> None:
        """Wait until a worker publishes and all live workers get messages instead of notifications."""
        self.scenario.until(self._is_ready, within=20, what="messages tell the workers")

    def _is_ready(self) -> bool:
        (row,) = self.scenario.query(
            """select exists (select from {schema}.relay where taken_until > now() and holder is not null)
               and not exists (select from {schema}.workers where listens and ended_at is null) as ready"""
        )
        return bool(row["ready"])

    def travelled(self) -> int:
        """Return how many messages were ever stored in this stream."""
        counters = self.counters()
        return counters.last_seq - max(counters.config.get("first_seq", 1), 1) + 1

    def drained(self) -> bool:
        """Whether the stream holds no messages and none wait to be published."""
        try:
            left = self.counters().messages, self.outbox()
        except KeyError:
            return False  # the stream is about to be created again
        if left != self._left:
            self._left = left
            print(f"in the stream {left[0]}, in the outbox {left[1]}")
        return left == (0, 0)

    def outbox(self) -> int:
        (row,) = self.scenario.query("select count(*) as rows from {schema}.message_outbox")
        return int(row["rows"])

    def publish(self, messages: Iterable[TaskMessage], queue: str = "default") -> None:
        """Publish messages of an unknown sender, all of them, even if they are equal."""
        self.publish_raw(*(encode(each) for each in messages), queue=queue)

    def publish_raw(self, *bodies: bytes, queue: str = "default") -> None:
        """Publish arbitrary bytes."""
        asyncio.run(self.server.publish(self.plan.subject(queue), *bodies))

    def do(self, action: Callable[[NatsServer, StreamPlan], Any]) -> None:
        """Apply an action to the stream."""
        asyncio.run(action(self.server, self.plan))


def copy_of(task_id: UUID, *, queue: str = "default", number: int = 1, fence: int = 0) -> TaskMessage:
    return TaskMessage(task_id=task_id, queue=queue, number=number, fence=fence)


class Witness:
    """Record every message with its headers as it is published."""

    def __init__(self, nats: NatsScenario) -> None:
        self._told = nats
        self._ready = threading.Event()
        self._over: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)
        self.heard: list[tuple[TaskMessage, dict[str, str]]] = []

    def of(self, task_id: UUID) -> list[tuple[TaskMessage, dict[str, str]]]:
        return [each for each in self.heard if each[0].task_id == task_id]

    async def _listen(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()

        async def hear(arrived: Any) -> None:
            message = decode(arrived.data)
            if message is not None:
                self.heard.append((message, dict(arrived.headers or {})))

        async with self._told.server.connected() as client:
            await client.subscribe(self._told.plan.subjects, cb=hear)
            await client.flush()
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)
