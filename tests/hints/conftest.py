"""Fixtures: hint listeners of every type behind one interface, and a server connection that a test can break."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from everbeat.hints import HintSource
from everbeat.hints.postgres import PostgresHintSource, SyncPostgresHintSource
from everbeat.hints.topics import Hint
from tests.conftest import NewServer
from tests.hints.silent import SilentHintSource, SyncSilentHintSource
from tests.notify_queue import SETTINGS, require_small_queue
from tests.worker.proxy import accept_no_more

PROMPT_S = 2.0


@dataclass
class CallbackLog:
    """Records the hints and states that the callbacks receive, in order."""

    hints: list[Hint] = field(default_factory=list)
    states: list[bool] = field(default_factory=list)
    change: asyncio.Event = field(default_factory=asyncio.Event)

    async def expect(self, true: Callable[[CallbackLog], bool], *, timeout_s: float = 20.0) -> None:
        """Wait until `true(log)` returns true for this log. Fail if this takes longer than `timeout_s` seconds."""
        async with asyncio.timeout(timeout_s):
            while not true(self):
                self.change.clear()
                await self.change.wait()

    async def expect_connected(self, *, times: int = 1) -> None:
        await self.expect(lambda heard: heard.states.count(True) >= times)


class Listener:
    """One type of hint listener, which runs until its `async with` block ends. Hints for it are sent on the server at `url`."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    async def tell(self, channel: str, *payloads: str, url: str | None = None) -> None:
        """Send a notification on `channel` for each payload."""
        await asyncio.to_thread(notify, url or self.url, channel, *payloads)

    @asynccontextmanager
    async def listening(
        self, channel: str, *, url: str | None = None, fails: bool = False, **options: Any
    ) -> AsyncIterator[CallbackLog]:
        """Listen on `channel`. If `fails` is true, the callbacks raise an exception after they have recorded the call.

        `options` are the options of PostgresWake.
        """
        url = url or self.url
        heard = CallbackLog()
        loop = asyncio.get_running_loop()

        def on_hint(hint: Hint) -> None:
            heard.hints.append(hint)
            loop.call_soon_threadsafe(heard.change.set)
            assert not fails, "raised on purpose by the test"

        def on_state(hearing: bool) -> None:
            heard.states.append(hearing)
            loop.call_soon_threadsafe(heard.change.set)
            assert not fails, "raised on purpose by the test"

        if self.kind in ("loop", "silent"):
            wake: HintSource
            connect = lambda: psycopg.AsyncConnection.connect(url)  # noqa: E731
            wake = (
                SilentHintSource()
                if self.kind == "silent"
                else PostgresHintSource(connect, channel, **options)
            )
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
                SyncSilentHintSource()
                if self.kind == "silent thread"
                else SyncPostgresHintSource(lambda: psycopg.connect(url), channel, **options)
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
    return Listener(kind, request.getfixturevalue("database_url"))


@pytest.fixture(params=["loop", "thread"])
def listener(request: pytest.FixtureRequest) -> Listener:
    """Return a listener that delivers hints."""
    return _listener(request)


@pytest.fixture(params=["loop", "thread", "silent", "silent thread"])
def any_listener(request: pytest.FixtureRequest) -> Listener:
    """Return any listener, including one that delivers no hints."""
    return _listener(request)


@dataclass
class OwnServer:
    """A server for this test alone, of the type that the listener needs. `restart` stops a running server first."""

    url: str
    stop: Callable[[], object]
    restart: Callable[[], None]


@pytest.fixture
def own_server(listener: Listener, request: pytest.FixtureRequest) -> OwnServer:
    new_server: NewServer = request.getfixturevalue("new_server")
    server = new_server()
    return OwnServer(server.url, lambda: server.stop("immediate"), lambda: server.restart("immediate"))


@pytest.fixture
def channel() -> str:
    return f"everbeat_test_{uuid4().hex[:12]}"


class Wire:
    """A Unix socket that forwards bytes to the server and back, until a test freezes it."""

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
        """Stop forwarding without closing anything, like an unplugged cable."""
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
                # The connection is closed even if the task is cancelled before it begins.
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
        # Replace the pid in BackendKeyData, because a pooler also sends its own backend keys.
        head, key, rest = data.partition(b"K\0\0\0\x0c")
        return head + key + struct.pack("!i", 1_234_567_890) + rest[4:] if key else data


@pytest.fixture
def wire_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        yield Path(folder)


@pytest.fixture
async def wire(wire_folder: Path, database_url: str) -> AsyncIterator[Wire]:
    """Yield a connection to the shared server that a test can break."""
    with psycopg.connect(database_url) as connection:
        server = f"{connection.info.host}/.s.PGSQL.{connection.info.port}"
    async with Wire(wire_folder, server).open() as wire:
        yield wire


@pytest.fixture
def small_queue(new_server: NewServer, database_url: str) -> str:
    """Return the URL of a server whose notification queue fills up quickly."""
    require_small_queue(database_url)
    return new_server(settings=dict(SETTINGS)).url
