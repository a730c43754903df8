"""Clients that send or read slowly, on real sockets: their connections end, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from everbeat import App
from everbeat.web import Basic, Loopback, Role, Web, http_protocol, requests
from everbeat.web.serving import configuration, listening

LIMIT_S = 0.4
WITHIN_S = 30
"""A client that no limit stops is slow for longer than this. Only then, a test fails: each thread of a busy machine can be delayed for seconds."""
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect: TypeAlias = Callable[[], Any]


@contextmanager
def served(dashboard: ASGIApp) -> Iterator[Connect]:
    """Serve the dashboard as the command does. Yield a function that connects to it."""
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(configuration(dashboard, root_path=""))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        @asynccontextmanager
        async def connect() -> AsyncIterator[Streams]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                yield reader, writer
            finally:
                writer.close()

        try:
            yield connect
        finally:
            server.should_exit = True
            thread.join(20)


async def until_ended(streams: Streams, drip: bytes = b"") -> bytes:
    """Wait until the server ends the connection, and return what it answered. Send a byte again and again until then."""
    reader, writer = streams

    async def dripping() -> None:
        while drip:
            writer.write(drip)
            await asyncio.sleep(LIMIT_S / 5)  # it sends again before any limit of an idle connection

    slow = asyncio.ensure_future(dripping())
    try:
        return await asyncio.wait_for(reader.read(-1), WITHIN_S)
    except ConnectionResetError:
        return b""
    finally:
        slow.cancel()


PAGE = b"GET /static/icon.svg HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def page(streams: Streams) -> bytes:
    """Load a page on a connection and return the beginning of the answer."""
    reader, writer = streams
    writer.write(PAGE)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
    (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head


def limited_later(dashboard: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> ASGIApp:
    """Return the dashboard with a short limit after its first request. The test itself can be late with that request."""
    monkeypatch.setattr(http_protocol, "REQUEST_WITHIN_S", WITHIN_S)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            monkeypatch.setattr(http_protocol, "REQUEST_WITHIN_S", LIMIT_S)
        await dashboard(scope, receive, send)

    return served


@pytest.mark.parametrize(
    "begun",
    [b"", b"G", b"GET /static/icon.svg HTTP/1.1\r\nhost: localhost\r\nx-slow: "],
    ids=["nothing", "a letter", "a header"],
)
async def test_a_client_that_never_ends_its_headers_loses_its_connection(
    app: App, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "REQUEST_WITHIN_S", LIMIT_S)
    with served(Web(app, auth=Loopback())) as connect:
        async with connect() as slow:
            slow[1].write(begun)
            assert await until_ended(slow, drip=b"x" if begun else b"") == b""
        monkeypatch.setattr(http_protocol, "REQUEST_WITHIN_S", WITHIN_S)
        async with connect() as later:
            assert (await page(later)).startswith(b"HTTP/1.1 200")


async def test_the_second_request_of_a_connection_has_the_same_limit(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(limited_later(Web(app, auth=Loopback()), monkeypatch)) as connect:
        async with connect() as streams:
            assert (await page(streams)).startswith(b"HTTP/1.1 200")
            streams[1].write(b"GET /pulse HTTP/1.1\r\nx: ")
            assert await until_ended(streams, drip=b"y") == b""


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "application/json"])
async def test_a_form_that_does_not_arrive_is_refused_and_its_connection_ends(
    app: App, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "BODY_WITHIN_S", LIMIT_S)
    with served(limited_later(Web(app, auth=Loopback()), monkeypatch)) as connect:
        async with connect() as streams:
            streams[1].write(
                b"POST /preferences HTTP/1.1\r\nhost: localhost\r\nsec-fetch-site: same-origin\r\naccept: application/json\r\n"
                b"content-type: " + kind.encode() + b"\r\ncontent-length: 1000\r\n\r\ntheme="
            )
            answer = await until_ended(streams, drip=b"z")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"TOO_SLOW" in answer


async def test_a_stranger_cannot_hold_a_connection_by_a_body_that_is_not_read(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = Web(app, auth=Basic({"ann": ("correct-horse", Role.SEE)}))
    with served(limited_later(dashboard, monkeypatch)) as connect:
        async with connect() as streams:
            streams[1].write(
                b"POST /preferences HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
            )
            assert (await until_ended(streams, drip=b"z")).startswith(b"HTTP/1.1 401")


async def test_a_client_that_reads_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "READS_WITHIN_S", LIMIT_S)
    ended = threading.Event()

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(200):
            await send({"type": "http.response.body", "body": b"x" * 500_000, "more_body": True})
        ended.set()

    with served(large) as connect:
        async with connect() as (_, writer):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.transport.pause_reading()
            writer.write(PAGE)
            assert await asyncio.to_thread(ended.wait, WITHIN_S), (
                "the answer waits for a client that reads nothing"
            )


async def test_an_answer_that_takes_longer_than_a_request_may_is_sent_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "REQUEST_WITHIN_S", LIMIT_S)
    monkeypatch.setattr(http_protocol, "READS_WITHIN_S", LIMIT_S)

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        for _ in range(3):
            await asyncio.sleep(LIMIT_S / 1.5)  # a stream has such pauses, and no limit may end it
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def answered() -> bool:
        """Return whether the request arrived within the limit. A delayed thread sends it too late."""
        async with connect() as (reader, writer):
            writer.write(PAGE)
            try:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
            except (ConnectionResetError, asyncio.IncompleteReadError):
                return False
            assert await asyncio.wait_for(reader.readexactly(3), WITHIN_S) == b"xxx"
            return True

    with served(patient) as connect:
        async with asyncio.timeout(WITHIN_S):
            while not await answered():
                pass
