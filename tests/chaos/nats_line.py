"""A TCP line to a NATS server that can be cut.

What lives here: the proxy. What may not: what passes through it, and when it is cut.
"""

from __future__ import annotations

import asyncio
from typing import Final, Self

_CHUNK: Final = 65_536


class NatsLine:
    """What one tree sees of NATS. Its methods are called in the loop of the lines' thread."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.cuts = 0

    async def open(self) -> Self:
        self._server = await asyncio.start_server(self._serve, host="127.0.0.1", port=0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def cut(self) -> None:
        """Connections end, and new ones are refused."""
        self.cuts += 1
        self._hang_up()

    def join(self) -> None:
        """The end of one cut."""
        self.cuts -= 1

    def close(self) -> None:
        """Takes no more connections and ends those there are."""
        if self._server is not None:
            self._server.close()
        self._hang_up()

    def _hang_up(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cuts:
            writer.transport.abort()
            return
        try:
            upstream, up = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()  # the server is down
            return
        ends = {writer, up}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, up))
                group.create_task(_carry(upstream, writer))
        except* (OSError, EOFError):
            pass
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    raise EOFError
