"""A NATS server beside the stage of a story, somebody who hears every message that is published, and hands that publish some themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self
from uuid import UUID

from everbeat.wake.carrier import Message, decode, encode
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan
from tests.nats_server import Counters, NatsServer
from tests.stories.stage import Stage

POLLS_NEVER: Mapping[str, Any] = {"poll_interval": "5m"}
"""Only messages tell such a worker of tasks."""


class Told:
    """The stage's tasks are told by this server's messages. Counters are the stream's own."""

    def __init__(self, stage: Stage, server: NatsServer) -> None:
        self.stage = stage
        self.server = server
        stage.wake = {"servers": [server.url]}
        self._left = (0, 0)
        self.plan = StreamPlan(stage.schema, NatsConfig(servers=[server.url]), 600.0)

    def counters(self) -> Counters:
        return asyncio.run(self.server.counters(self.plan.stream))

    def redeliver_soon(self) -> None:
        """Trees that are started from now on give a message that nobody acknowledged to the next one after 4 s; they need FAST recovery."""
        self.stage.wake = {"servers": [self.server.url], "ack_wait": "4s"}

    def ready(self) -> None:
        """A worker publishes, and all that live are told of tasks by messages and no more by the database."""
        self.stage.until(self._is_ready, within=20, what="messages tell the workers")

    def _is_ready(self) -> bool:
        (row,) = self.stage.query(
            """select exists (select from {schema}.relay where taken_until > now() and holder is not null)
               and not exists (select from {schema}.workers where listens and ended_at is null) as ready"""
        )
        return bool(row["ready"])

    def travelled(self) -> int:
        """How many messages were ever put into this stream."""
        counters = self.counters()
        return counters.last_seq - max(counters.config.get("first_seq", 1), 1) + 1

    def drained(self) -> bool:
        """Nothing is in the stream and nothing is to be published."""
        try:
            left = self.counters().messages, self.outbox()
        except KeyError:
            return False  # the stream is about to be made again
        if left != self._left:
            self._left = left
            print(f"in the stream {left[0]}, in the outbox {left[1]}")
        return left == (0, 0)

    def outbox(self) -> int:
        (row,) = self.stage.query("select count(*) as rows from {schema}.message_outbox")
        return int(row["rows"])

    def publish(self, messages: Iterable[Message], queue: str = "default") -> None:
        """Messages of nobody knows whom, one for each, even if they are equal."""
        self.publish_raw(*(encode(each) for each in messages), queue=queue)

    def publish_raw(self, *bodies: bytes, queue: str = "default") -> None:
        """Anything at all."""
        asyncio.run(self.server.publish(self.plan.subject(queue), *bodies))

    def do(self, action: Callable[[NatsServer, StreamPlan], Any]) -> None:
        """Something is done to the stream."""
        asyncio.run(action(self.server, self.plan))


def copy_of(task_id: UUID, *, queue: str = "default", number: int = 1, fence: int = 0) -> Message:
    return Message(task_id=task_id, queue=queue, number=number, fence=fence)


class Witness:
    """Hears every message as it is published, headers too."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._ready = threading.Event()
        self._over: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)
        self.heard: list[tuple[Message, dict[str, str]]] = []

    def of(self, task_id: UUID) -> list[tuple[Message, dict[str, str]]]:
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
