"""A TCP line to PostgreSQL that can be cut, slowed or stalled, and can lose the reply to a committed write."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, Self, TypeVar

from psycopg import conninfo

from tests.chaos.conversation import Conversation, is_outside_transaction

_CHUNK: Final = 65_536
_LONGEST_HOLD_S: Final = 2.0


class Line:
    """The connection of one tree, or of all producers, to the database. Its methods must be called in its thread's event loop."""

    def __init__(self, *server_urls: str) -> None:
        self._server_urls = server_urls
        self._connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self.url = ""
        self.passes = asyncio.Event()
        self.passes.set()
        self.cuts = 0
        self.stalls = 0
        self.delay_s = 0.0
        self.to_lose: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    async def open(self) -> Self:
        for url in self._server_urls:
            serve = partial(self._serve, _socket_of(url))
            self._servers.append(await asyncio.start_server(serve, host="127.0.0.1", port=0))
        ports = [str(server.sockets[0].getsockname()[1]) for server in self._servers]
        several = {"target_session_attrs": "read-write"} if len(ports) > 1 else {}
        self.url = conninfo.make_conninfo(
            self._server_urls[0],
            host=",".join("127.0.0.1" for _ in ports),
            port=",".join(ports),
            sslmode="disable",
            gssencmode="disable",
            **several,
        )
        return self

    def cut(self) -> None:
        """Close all connections and reject new ones."""
        self.cuts += 1
        self.hang_up()

    def join(self) -> None:
        """End one cut, so that new connections are accepted again."""
        self.cuts -= 1

    def stall(self) -> None:
        """Stop forwarding data, without closing connections."""
        self.stalls += 1
        self.passes.clear()

    def flow(self) -> None:
        """End one stall, and forward the data that was held back."""
        self.stalls -= 1
        if not self.stalls:
            self.passes.set()

    def hang_up(self) -> None:
        """Close every connection. Data that was held back never arrives."""
        for connection in tuple(self._connections):
            connection.end()

    def close(self) -> None:
        """Stop accepting connections, and close the existing ones."""
        for server in self._servers:
            server.close()
        self.passes.set()
        self.hang_up()

    async def _serve(
        self, server_path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.cuts:
            writer.transport.abort()
            return
        try:
            upstream, up = await asyncio.open_unix_connection(server_path)
        except OSError:
            writer.transport.abort()  # the server is down
            return
        connection = _Connection(self, writer, up)
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(connection.requests(reader))
                group.create_task(connection.replies(upstream))
        except* (OSError, EOFError):
            pass
        finally:
            self._connections.discard(connection)
            connection.end()


def _socket_of(server_url: str) -> str:
    given = conninfo.conninfo_to_dict(server_url)
    return f"{given['host']}/.s.PGSQL.{given.get('port') or 5432}"


class _Connection:
    def __init__(self, line: Line, down: asyncio.StreamWriter, up: asyncio.StreamWriter) -> None:
        self._line = line
        self._down = down
        self._up = up
        self._talk = Conversation()
        self._losing = ""  # the verb whose reply will be lost
        self._answers_before = 0
        self._failed = False
        self._held = bytearray()

    def end(self) -> None:
        self._down.transport.abort()
        self._up.transport.abort()

    async def requests(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK):
            for verb, before in self._talk.asked(data):
                if self._line.to_lose[verb] > 0 and not self._losing:
                    self._losing, self._answers_before, self._failed = verb, before, False
                    asyncio.get_running_loop().call_later(_LONGEST_HOLD_S, self._release)
            await self._pass(data, self._up)
        raise EOFError

    async def replies(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK):
            passed = bytearray()
            for kind, message in self._talk.answered(data):
                passed += self._kept_or_passed(kind, message)
            if passed:
                await self._pass(bytes(passed), self._down)
        raise EOFError

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if self._line.delay_s:
            await asyncio.sleep(self._line.delay_s)  # the delay is the fault
        await self._line.passes.wait()
        writer.write(data)
        await writer.drain()

    def _kept_or_passed(self, kind: bytes, message: bytes) -> bytes:
        if not self._losing:
            return message
        if self._answers_before:
            self._answers_before -= kind == b"Z"
            return message
        self._failed = self._failed or kind == b"E"
        self._held += message
        if kind != b"Z":
            return b""
        if self._failed or not is_outside_transaction(message) or self._line.to_lose[self._losing] <= 0:
            held, self._held, self._losing = bytes(self._held), bytearray(), ""
            return held
        # The write has been committed, so drop its reply.
        self._line.to_lose[self._losing] -= 1
        self._line.lost[self._losing] += 1
        raise EOFError

    def _release(self) -> None:
        """Forward data that was held back, because it is taking too long or the server is waiting for it."""
        if self._losing and self._held:
            with suppress(OSError):
                self._down.write(bytes(self._held))
        self._held.clear()
        self._losing = ""


class Served(Protocol):
    """The interface of an object that lives in the thread of the lines."""

    def close(self) -> None: ...


S = TypeVar("S", bound=Served)


class Lines:
    """A thread with an event loop for lines. Every method waits until its work in that thread is done."""

    def __init__(self) -> None:
        self._lines: list[Served] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="lines")
        self._thread.start()

    def open(self, *server_urls: str) -> Line:
        """Open a line to a server, or to a primary and its standby with two hosts in the URL."""
        return self.add(Line(*server_urls).open)

    def add(self, opening: Callable[[], Awaitable[S]]) -> S:
        """Open a line in the thread's event loop, and close it when the thread ends."""

        async def make() -> S:
            line = await opening()
            self._lines.append(line)
            return line

        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(timeout=10)

    def do(self, act: Callable[[], None]) -> None:
        """Call a line's method in the thread's event loop."""

        async def call() -> None:
            act()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout=10)

    def close(self) -> None:
        """Close all lines and end the thread."""

        async def end() -> None:
            for line in self._lines:
                line.close()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
