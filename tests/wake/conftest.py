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
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from everbeat.wake.postgres import PostgresWake, SyncPostgresWake
from everbeat.wake.silent import SilentWake, SyncSilentWake
from everbeat.wake.topics import Hint

PROMPT_S = 2.0


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
    """One kind of wake, run until the `async with` ends."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @asynccontextmanager
    async def listening(
        self, url: str, channel: str, *, fails: bool = False, **options: Any
    ) -> AsyncIterator[Heard]:
        """Listen on `channel`; with `fails` the callbacks raise after noting what they were told."""
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

        if self.kind in ("loop", "silent"):
            wake = (
                SilentWake()
                if self.kind == "silent"
                else PostgresWake(lambda: psycopg.AsyncConnection.connect(url), channel, **options)
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


@pytest.fixture(params=["loop", "thread"])
def listener(request: pytest.FixtureRequest) -> Listener:
    """A listener that hears."""
    return Listener(request.param)


@pytest.fixture(params=["loop", "thread", "silent", "silent thread"])
def any_listener(request: pytest.FixtureRequest) -> Listener:
    """Any listener, also one that hears nothing."""
    return Listener(request.param)


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
