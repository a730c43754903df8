"""A wire between a worker and PostgreSQL that a test can cut, or make lose one reply."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from psycopg import conninfo

from everbeat.store.target import Target

_BUFFER = 64 << 20
_LARGE = 10_000


class Proxy:
    """Listens on a Unix socket of its own. Prepared statements are named only once, so lose a reply early."""

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
                    await proxy._end()  # from Python 3.12 on, the server waits for its lines

    def lose_reply(self, marker: bytes) -> None:
        """The next statement whose text holds the marker reaches the server; its answer reaches nobody."""
        self._lose = marker

    def hold_reply(self, marker: bytes) -> None:
        """The answer to that statement is held back until `release`."""
        self._lose, self._released = marker, asyncio.Event()

    def release(self) -> None:
        """Let the answer that was held back pass."""
        assert self._released is not None
        self._released.set()

    def slow_down(self, pause_s: float) -> None:
        """Every large piece takes this long to pass. The server is rid of its answers at once, as behind a pooler."""
        self.pause_s = pause_s

    def cut(self) -> None:
        """Nothing passes, and nobody can connect."""
        self.is_cut = True
        self._hang_up()

    def refuse(self) -> None:
        """Nobody can connect; whoever is connected is served."""
        self.is_cut = True

    def stall(self) -> None:
        """Nothing passes, and nobody is told: connections stay open, new ones are accepted."""
        self._passes.clear()

    def mend_for_new_lines(self) -> None:
        """New connections pass; what was stalled never comes."""
        self._passes = asyncio.Event()
        self._passes.set()

    def mend(self) -> None:
        """New connections pass again; stalled ones go on."""
        self.is_cut = False
        self._passes.set()

    def _hang_up(self) -> None:
        for line in tuple(self._lines):
            line.close()

    async def _end(self) -> None:
        """No line outlives its proxy, whatever it waits for."""
        served, lines = tuple(self._served), tuple(self._lines)
        for each in served:
            each.cancel()
        await asyncio.gather(*served, return_exceptions=True)
        for line in lines:
            line.transport.abort()
            with suppress(OSError):
                await line.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Tasks of our own: the server does not wait for those that it makes. One that ends before it began closes nothing.
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
            # Kept for `_end`: a line whose reader is frozen closes only once its text is read. Waiting for it here would let a
            # cancellation of this task spoil the wait of `_end`.
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
            await asyncio.sleep(self.pause_s)  # the slow line

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
    """End accepting, and wait until what was accepted is a line.

    Python 3.11 leaves a socket open that was accepted just before its server was closed.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening)
    for _ in range(10):  # more turns of the loop than an accepted socket needs
        await asyncio.sleep(0)
