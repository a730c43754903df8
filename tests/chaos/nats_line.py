"""A TCP line to a NATS server that can be cut."""

from __future__ import annotations

import asyncio
from typing import Final, Self

_CHUNK: Final = 65_536


class NatsLine:
    """The connection of one tree to NATS. Its methods must be called in the event loop of the lines' thread."""

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
        """Close all connections and reject new ones."""
        self.cuts += 1
        self._hang_up()

    def join(self) -> None:
        """End one cut, so that new connections are accepted again."""
        self.cuts -= 1

    def close(self) -> None:
        """Stop accepting connections, and close the existing ones."""
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
