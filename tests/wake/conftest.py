"""Listeners of every kind behind one face, and a wire between client and server that can be made bad.

What lives here: fixtures of the wake tests.
"""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol
from uuid import uuid4

import nats
import psycopg
import pytest

from everbeat.wake import Wake
from everbeat.wake.carrier import encode as encode_message
from everbeat.wake.jetstream import JetStream
from everbeat.wake.nats import NatsWake
from everbeat.wake.postgres import PostgresWake, SyncPostgresWake
from everbeat.wake.silent import SilentWake, SyncSilentWake
from everbeat.wake.topics import Hint, TasksReady, decode
from tests.conftest import NewServer
from tests.nats_server import NatsServer
from tests.notify_queue import SETTINGS, require_small_queue
from tests.wake.stream_fixtures import message, plan_for
from tests.worker.proxy import accept_no_more

PROMPT_S = 2.0
TELLABLE = ("mail", "first", "second", "other")
"""The queues whose hints are heard by NATS."""


@dataclass
class Heard:
    """What the callbacks were told, in order."""

    hints: list[Hint] = field(default_factory=list)
    states: list[bool] = field(default_factory=list)
    change: asyncio.Event = field(default_factory=asyncio.Event)

    async def expect(self, true: Callable[[Heard], bool], *, timeout_s: float = 20.0) -> None:
        """Wait for the callbacks to have told what makes `true` true."""
        async with asyncio.timeout(timeout_s):
            while not true(self):
                self.change.clear()
                await self.change.wait()

    async def expect_connected(self, *, times: int = 1) -> None:
        await self.expect(lambda heard: heard.states.count(True) >= times)


class Listener:
    """One kind of wake, run until the `async with` ends. `url` is where hints of this kind are told."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    async def tell(self, channel: str, *payloads: str, url: str | None = None) -> None:
        """Tell these on `channel`; of hints by NATS those of `TELLABLE` have a queue, what is no hint comes with the first of them."""
        if self.kind != "nats":
            await asyncio.to_thread(notify, url or self.url, channel, *payloads)
            return
        plan = plan_for(url or self.url, channel)
        client = await nats.connect(url or self.url, allow_reconnect=False)
        for number, payload in enumerate(payloads):
            hint = decode(payload)
            queue = hint.queue if isinstance(hint, TasksReady) else TELLABLE[0]
            body = (
                encode_message(message(queue, number)) if isinstance(hint, TasksReady) else payload.encode()
            )
            await client.publish(plan.subject(queue), body)
        await client.flush()
        await client.close()

    @asynccontextmanager
    async def listening(
        self, channel: str, *, url: str | None = None, fails: bool = False, **options: Any
    ) -> AsyncIterator[Heard]:
        """Listen on `channel`; with `fails` the callbacks raise after noting what they were told. `options` are PostgreSQL's."""
        url = url or self.url
        heard = Heard()
        loop = asyncio.get_running_loop()

        def on_hint(hint: Hint) -> None:
            heard.hints.append(hint)
            loop.call_soon_threadsafe(heard.change.set)
            assert not fails, "meant by the test"

        def on_state(hearing: bool) -> None:
            heard.states.append(hearing)
            loop.call_soon_threadsafe(heard.change.set)
            assert not fails, "meant by the test"

        if self.kind in ("loop", "silent", "nats"):
            wake: Wake
            if self.kind == "silent":
                wake = SilentWake()
            elif self.kind == "nats":
                plan = plan_for(url, channel)
                carrier = JetStream(plan, plan.config, name="tests", random=Random())
                wake = NatsWake(carrier, TELLABLE, name=channel)
            else:
                wake = PostgresWake(lambda: psycopg.AsyncConnection.connect(url), channel, **options)
            task = asyncio.create_task(wake.run(on_hint, on_state))
            try:
                yield heard
            finally:
                task.cancel()
                async with asyncio.timeout(PROMPT_S):
                    with suppress(asyncio.CancelledError):
                        await task
        else:
            thread = (
                SyncSilentWake()
                if self.kind == "silent thread"
                else SyncPostgresWake(lambda: psycopg.connect(url), channel, **options)
            )
            thread.start(on_hint, on_state)
            try:
                yield heard
            finally:
                async with asyncio.timeout(PROMPT_S):
                    await asyncio.to_thread(thread.stop)


def notify(url: str, channel: str, *payloads: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for payload in payloads:
            connection.execute("select pg_notify(%s, %s)", (channel, payload))


def _listener(request: pytest.FixtureRequest) -> Listener:
    kind: str = request.param
    if kind == "nats":
        return Listener(kind, request.getfixturevalue("shared_nats").url)
    return Listener(kind, request.getfixturevalue("database_url"))


@pytest.fixture(params=["loop", "thread"])
def postgres_listener(request: pytest.FixtureRequest) -> Listener:
    """A listener that hears what PostgreSQL tells."""
    return _listener(request)


@pytest.fixture(params=["loop", "thread", "nats"])
def listener(request: pytest.FixtureRequest) -> Listener:
    """A listener that hears."""
    return _listener(request)


@pytest.fixture(params=["loop", "thread", "nats", "silent", "silent thread"])
def any_listener(request: pytest.FixtureRequest) -> Listener:
    """Any listener, also one that hears nothing."""
    return _listener(request)


@dataclass
class OwnServer:
    """A server of the listener's kind that nobody else uses; `restart` ends it at once where it runs."""

    url: str
    stop: Callable[[], object]
    restart: Callable[[], None]


@pytest.fixture
def own_server(listener: Listener, request: pytest.FixtureRequest) -> OwnServer:
    if listener.kind == "nats":
        alone: NatsServer = request.getfixturevalue("nats_server")
        return OwnServer(alone.url, alone.kill, lambda: alone.restart(kill=True))
    new_server: NewServer = request.getfixturevalue("new_server")
    server = new_server()
    return OwnServer(server.url, lambda: server.stop("immediate"), lambda: server.restart("immediate"))


@pytest.fixture
def channel() -> str:
    return f"everbeat_test_{uuid4().hex[:12]}"


class Wire:
    """A Unix socket that carries bytes to the server and back, until it is told not to."""

    def __init__(self, folder: Path, server: str) -> None:
        self._folder = folder
        self._server = server
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.feigns_backend = False
        self.connections = 0
        self.connected = asyncio.Event()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self._folder}&port=5432"

    def freeze(self) -> None:
        """Carry nothing more and say nothing, like a cable that was pulled."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Wire]:
        async with asyncio.TaskGroup() as group:

            async def carry_both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self.connections += 1
                self.connected.set()
                upstream, downstream = await asyncio.open_unix_connection(self._server)
                there = group.create_task(self._carry(reader, downstream))
                await self._carry(upstream, writer, answers=True)
                there.cancel()

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                # Also where it is cancelled before it began.
                line = group.create_task(carry_both(reader, writer))
                line.add_done_callback(lambda _: writer.close())

            service = await asyncio.start_unix_server(accept, self._folder / ".s.PGSQL.5432")
            try:
                yield self
            finally:
                await accept_no_more(service)
                service.close()
                for task in [task for task in asyncio.all_tasks() if "Wire." in repr(task.get_coro())]:
                    task.cancel()

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, answers: bool = False
    ) -> None:
        try:
            while data := await source.read(65536):
                await self._flowing.wait()
                target.write(self._feigned(data) if answers and self.feigns_backend else data)
                await target.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            target.close()

    @staticmethod
    def _feigned(data: bytes) -> bytes:
        # Like a pooler, which hands out backend keys of its own: the pid of BackendKeyData is replaced.
        head, key, rest = data.partition(b"K\0\0\0\x0c")
        return head + key + struct.pack("!i", 1_234_567_890) + rest[4:] if key else data


@pytest.fixture
def wire_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        yield Path(folder)


@pytest.fixture
async def wire(wire_folder: Path, database_url: str) -> AsyncIterator[Wire]:
    """A wire to the shared server."""
    with psycopg.connect(database_url) as connection:
        server = f"{connection.info.host}/.s.PGSQL.{connection.info.port}"
    async with Wire(wire_folder, server).open() as wire:
        yield wire


class BadLine(Protocol):
    """What is between a listener and its server, or that server itself: it can fall silent without a word."""

    @property
    def url(self) -> str: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


@pytest.fixture
def bad_line(listener: Listener, request: pytest.FixtureRequest) -> BadLine:
    line: BadLine = request.getfixturevalue("nats_server" if listener.kind == "nats" else "wire")
    return line


@pytest.fixture(scope="session")
def shared_nats() -> Iterator[NatsServer]:
    """A server that nobody stops; each test has a schema of its own."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    """A server of the test's own."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def small_queue(new_server: NewServer, database_url: str) -> str:
    """The URL of a server whose queue of notifications is soon full."""
    require_small_queue(database_url)
    return new_server(settings=dict(SETTINGS)).url
