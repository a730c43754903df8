"""A proxy between a worker and PostgreSQL, with which a test can cut connections or drop a reply."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Self

from psycopg import conninfo

from everbeat.store.target import Target

_BUFFER = 64 << 20
_LARGE = 10_000


def statement_marker(name: str) -> bytes:
    """Return the first line of a statement, by which a proxy recognizes the statement on the wire."""
    return (files("everbeat") / "sql" / f"{name}.sql").read_text().partition("\n")[0].encode()


class Proxy:
    """A proxy that listens on its own Unix socket.

    The text of a prepared statement is sent only once per connection, so a test must arrange for a lost reply early.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        given = conninfo.conninfo_to_dict(target.url)
        self._server_path = f"{given['host']}/.s.PGSQL.{given.get('port') or 5432}"
        self._path = folder / ".s.PGSQL.5432"
        self.target = Target(
            url=conninfo.make_conninfo(target.url, host=str(folder), port="5432"), schema=target.schema
        )
        self.lost = 0
        self.is_cut = False
        self.pause_s = 0.0
        self._passes = asyncio.Event()
        self._passes.set()
        self._lose: bytes | None = None
        self._released: asyncio.Event | None = None
        self._lines: set[asyncio.StreamWriter] = set()
        self._served: set[asyncio.Future[None]] = set()

    @classmethod
    @asynccontextmanager
    async def before(cls, target: Target) -> AsyncIterator[Self]:
        with tempfile.TemporaryDirectory(prefix="eb-") as folder:
            proxy = cls(Path(folder), target)
            async with await asyncio.start_unix_server(proxy._accept, path=proxy._path) as server:
                try:
                    yield proxy
                finally:
                    await accept_no_more(server)
                    server.close()
                    await proxy._end()  # from Python 3.12, the server waits for its connections

    def lose_reply(self, marker: bytes) -> None:
        """Forward the next statement whose text contains the marker, but drop the reply and close the connection."""
        self._lose = marker

    def hold_reply(self, marker: bytes) -> None:
        """Hold back the reply to the next statement whose text contains the marker, until `release` is called."""
        self._lose, self._released = marker, asyncio.Event()

    def release(self) -> None:
        """Forward the reply that was held back."""
        assert self._released is not None
        self._released.set()

    def slow_down(self, pause_s: float) -> None:
        """Delay every large chunk of data by `pause_s` seconds. The server is not slowed down, as behind a pooler."""
        self.pause_s = pause_s

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        self.is_cut = True
        self._hang_up()

    def refuse(self) -> None:
        """Refuse new connections, and keep serving existing ones."""
        self.is_cut = True

    def stall(self) -> None:
        """Stop forwarding without an error: connections stay open, and new connections are accepted."""
        self._passes.clear()

    def resume_new_connections(self) -> None:
        """Forward new connections again. Stalled connections remain stalled."""
        self._passes = asyncio.Event()
        self._passes.set()

    def mend(self) -> None:
        """Forward new connections again, and resume stalled ones."""
        self.is_cut = False
        self._passes.set()

    def _hang_up(self) -> None:
        for line in tuple(self._lines):
            line.close()

    async def _end(self) -> None:
        """Close all connections of the proxy, including those that are waiting."""
        served, lines = tuple(self._served), tuple(self._lines)
        for each in served:
            each.cancel()
        await asyncio.gather(*served, return_exceptions=True)
        for line in lines:
            line.transport.abort()
            with suppress(OSError):
                await line.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The proxy creates these tasks itself, because the server does not wait for its own tasks. `_end` closes the connection of a
        # task that was cancelled before it began.
        self._lines.add(writer)
        line = asyncio.ensure_future(self._serve(reader, writer))
        self._served.add(line)
        line.add_done_callback(self._served.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            self._lines.discard(writer)
            writer.close()
            return
        upstream, up = await asyncio.open_unix_connection(self._server_path, limit=_BUFFER)
        self._lines.add(up)
        swallow = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, up, swallow))
                group.create_task(self._replies(upstream, writer, up, swallow))
        except* (OSError, EOFError):
            pass
        finally:
            # Leave the wait to `_end`: a connection whose reader is frozen closes only once its data has been read. If this task waited
            # here, its cancellation would disturb the wait in `_end`.
            for line in (writer, up):
                line.close()

    async def _requests(
        self, reader: asyncio.StreamReader, up: asyncio.StreamWriter, swallow: asyncio.Event
    ) -> None:
        while data := await reader.read(65_536):
            if self._lose is not None and self._lose in data:
                self._lose = None
                swallow.set()
            await self._passes.wait()
            await self._delay(data)
            up.write(data)
        raise EOFError

    async def _delay(self, data: bytes) -> None:
        if len(data) > _LARGE:
            await asyncio.sleep(self.pause_s)  # simulates a slow network

    async def _replies(
        self,
        upstream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up: asyncio.StreamWriter,
        swallow: asyncio.Event,
    ) -> None:
        while data := await upstream.read(65_536):
            await self._passes.wait()
            await self._delay(data)
            if swallow.is_set() and self._released is not None:
                await self._released.wait()
            elif swallow.is_set():
                self.lost += 1
                raise EOFError
            writer.write(data)
        raise EOFError


async def accept_no_more(server: asyncio.Server) -> None:
    """Stop accepting connections, and wait until each accepted socket has a connection task.

    Python 3.11 leaves a socket open if it was accepted just before its server closed.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening)
    for _ in range(10):  # more loop iterations than an accepted socket needs
        await asyncio.sleep(0)
