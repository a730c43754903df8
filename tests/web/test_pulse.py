"""The live pages: one statement a second serves all viewers, a stream ends with the server, and a slow viewer holds no memory."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from everbeat import App
from everbeat.client.pulse import EVERY_S, LINGER_S
from everbeat.store.target import Target
from everbeat.web import Web
from everbeat.web.serving import listening
from tests.store.conftest import StoreHarness
from tests.web.browser import dashboard_process
from tests.web.conftest import by_header

ADMIN = {"x-test-role": "admin"}
VIEWERS = 20
WATCHED_S = 4.0
PAGES = ("/pulse/stream", "/workers/stream", "/recoveries/stream", "/changes/stream?of=tasks&after=x.0.0")
MOST_PER_S = 3.0
STOPS_WITHIN_S = 2.8
"""Without an end of its own, a stream would be cut off after three seconds."""


@pytest.fixture
def db(migrated: Target) -> Any:
    connection = migrated.connect("everbeat test")
    harness = StoreHarness(migrated, connection)
    harness.supervisor("s1", "w1", "w2")
    yield harness
    harness.database.close()
    connection.close()


@asynccontextmanager
async def served(web: Web) -> AsyncIterator[str]:
    """Serve a dashboard on a real socket."""
    with listening("127.0.0.1", 0) as socket:
        config = uvicorn.Config(
            web, log_level="warning", lifespan="on", ws="none", timeout_graceful_shutdown=3
        )
        server = uvicorn.Server(config)
        server.config.load()
        running = asyncio.ensure_future(server.serve(sockets=[socket]))
        while not server.started:
            await asyncio.sleep(0.01)  # uvicorn has no event for it
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            await web.aclose()
            server.should_exit = True
            await running


async def events(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    """Yield the events of a stream."""
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


class Viewer:
    """Receives the parts of a page, and counts the events."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.received = 0

    async def watch(self, client: httpx.AsyncClient, address: str, *, until: int | None = None) -> None:
        async with client.stream("GET", f"{address}{self.path}", headers=ADMIN, timeout=30) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for name, _ in events(answer):
                self.received += name == "parts"
                if self.received == until:
                    break


class Counter:
    """Counts the statements that the pages' connections send to the server."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self.count = 0

    async def begin(self) -> None:
        reading = await self._web.reading()
        plain = reading._arows

        async def counted(connection: Any, statement: Any) -> Any:
            self.count += 1
            return await plain(connection, statement)

        reading._arows = counted  # type: ignore[method-assign]


async def test_twenty_viewers_cost_less_than_three_statements_a_second(app: App, db: StoreHarness) -> None:
    web = Web(app, auth=by_header)
    counter = Counter(web)
    await counter.begin()
    viewers = [Viewer(PAGES[number % len(PAGES)]) for number in range(VIEWERS)]
    async with served(web) as address, httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
        watching = [group.create_task(viewer.watch(client, address)) for viewer in viewers]
        while web.live.viewers < VIEWERS:
            await asyncio.sleep(0.05)  # the streams open one after the other
        await asyncio.sleep(EVERY_S)  # the first look also reads the stored heartbeats
        began, before = time.monotonic(), counter.count
        await asyncio.sleep(WATCHED_S)  # the rate is measured over this time
        rate = (counter.count - before) / (time.monotonic() - began)
        for each in watching:
            each.cancel()
    received = [viewer.received for viewer in viewers if viewer.path == PAGES[0]]
    print(
        f"{VIEWERS} viewers: {rate:.2f} statements a second, {min(received)} to {max(received)} events each"
    )
    assert min(received) >= WATCHED_S / EVERY_S / 2
    assert rate < MOST_PER_S
    await app.aclose()


async def test_nothing_is_sampled_without_a_viewer(app: App, db: StoreHarness) -> None:
    web = Web(app, auth=by_header)
    counter = Counter(web)
    await counter.begin()
    async with served(web) as address, httpx.AsyncClient() as client:
        await Viewer(PAGES[0]).watch(client, address, until=1)
        while web.live.viewers:
            await asyncio.sleep(0.05)  # the server notices a closed connection later
        await asyncio.sleep(LINGER_S + EVERY_S)  # then sampling has ended
        before = counter.count
        await asyncio.sleep(2 * EVERY_S)  # nothing happens in this time
        assert counter.count == before
    await app.aclose()


async def test_a_stream_ends_when_the_server_stops(db: StoreHarness, tmp_path: Path) -> None:
    with dashboard_process(db.target, log=tmp_path / "web.log") as process:
        async with (
            httpx.AsyncClient() as client,
            client.stream("GET", f"{process.address}/pulse/stream", timeout=30) as answer,
        ):
            stream = events(answer)
            while (await anext(stream))[0] != "parts":
                pass
            began = time.monotonic()
            process.terminate()
            with suppress(httpx.RemoteProtocolError):  # the stream is cut off between two events
                async for _ in stream:
                    pass
        assert await asyncio.to_thread(process.wait) in (0, -signal.SIGTERM)
    print(f"the stream and the server ended {time.monotonic() - began:.2f} s after the signal")
    assert time.monotonic() - began < STOPS_WITHIN_S
    assert "Traceback" not in (tmp_path / "web.log").read_text()
