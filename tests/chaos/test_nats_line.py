"""The line to NATS forwards data in both directions, and a cut closes connections and rejects new ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.chaos.nats_line import NatsLine


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """Yield the port of a server that echoes its input."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1_000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, host="127.0.0.1", port=0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def echo_of(line: NatsLine) -> bytes:
    """Return the data echoed over a new connection, or empty bytes if there is no echo."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(line.url.rpartition(":")[2]))
    try:
        writer.write(b"PING")
        return await asyncio.wait_for(reader.read(4), 20)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_the_nats_line_carries_data_except_while_it_is_cut(echo: int) -> None:
    line = await NatsLine(echo).open()
    try:
        assert await echo_of(line) == b"PING"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(line.url.rpartition(":")[2]))
        writer.write(b"PING")
        assert await reader.readexactly(4) == b"PING"
        line.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        writer.transport.abort()
        assert await echo_of(line) == b""
        line.join()
        assert await echo_of(line) == b"PING"
    finally:
        line.close()


async def test_the_nats_line_ends_connections_at_once_without_a_server() -> None:
    line = await NatsLine(1).open()
    try:
        assert await echo_of(line) == b""
    finally:
        line.close()
