"""The line to NATS carries both ways, and cut it ends what there is and refuses what is new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.chaos.nats_line import NatsLine


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server that sends back what it gets."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1_000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, host="127.0.0.1", port=0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def said_back(line: NatsLine) -> bytes:
    """What comes back over a connection of its own; nothing where there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(line.url.rpartition(":")[2]))
    try:
        writer.write(b"PING")
        return await asyncio.wait_for(reader.read(4), 20)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_what_is_said_comes_back_until_the_line_is_cut_and_again_when_it_is_joined(echo: int) -> None:
    line = await NatsLine(echo).open()
    try:
        assert await said_back(line) == b"PING"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(line.url.rpartition(":")[2]))
        writer.write(b"PING")
        assert await reader.readexactly(4) == b"PING"
        line.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        writer.transport.abort()
        assert await said_back(line) == b""
        line.join()
        assert await said_back(line) == b"PING"
    finally:
        line.close()


async def test_where_no_server_is_connections_end_at_once() -> None:
    line = await NatsLine(1).open()
    try:
        assert await said_back(line) == b""
    finally:
        line.close()
