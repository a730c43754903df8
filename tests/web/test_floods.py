"""A flood of connections: those above the limit are answered with 503 or ended, and the dashboard serves again after it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack

import uvicorn

from everbeat import App
from everbeat.web import Loopback, Web
from everbeat.web.http_protocol import SPARE
from everbeat.web.serving import configuration, listening

MOST = 10
PAGE = b"GET /static/icon.svg HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_connections_above_the_limit_get_503_and_those_far_above_it_end_at_once(app: App) -> None:
    config = configuration(Web(app, auth=Loopback()), root_path="", connections=MOST)
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        async def status(stack: AsyncExitStack) -> bytes:
            """Open a connection that stays open, and return the beginning of its answer, or nothing if it is ended."""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(PAGE)
            try:
                return (await asyncio.wait_for(reader.read(12), 5))[9:]
            except ConnectionResetError:
                return b""

        async def silent(stack: AsyncExitStack) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)

        async with AsyncExitStack() as held:
            assert [await status(held) for _ in range(MOST)] == [b"200"] * MOST
            async with AsyncExitStack() as refused:
                assert await status(refused) == b"503"
            for _ in range(SPARE + 1):  # they never send a request
                await silent(held)
            async with AsyncExitStack() as flood:
                assert {await status(flood) for _ in range(20)} == {b""}
            assert len(server.server_state.connections) <= MOST + SPARE + 1
        async with AsyncExitStack() as later:
            for _ in range(100):
                if (answer := await status(later)) == b"200":
                    break
            assert answer == b"200"
        server.should_exit = True
        thread.join(20)
