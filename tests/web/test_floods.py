"""A flood of connections: those above the limit get 503 or are ended, the log stays short, and the dashboard serves again after it."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import AsyncExitStack

import pytest
import uvicorn

from everbeat import App
from everbeat.errors import DatabaseUnreachable
from everbeat.testing.clock import ManualClock
from everbeat.web import Loopback, Role, User, Web
from everbeat.web.database_problems import DatabaseProblems
from everbeat.web.http_protocol import SPARE, BoundedWarnings
from everbeat.web.serving import configuration, listening

MOST = 10
WITHIN_S = 30
PAGE = b"GET /static/icon.svg HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_connections_above_the_limit_get_503_and_those_far_above_it_end_at_once(
    app: App, capsys: pytest.CaptureFixture[str]
) -> None:
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
                return (await asyncio.wait_for(reader.read(12), WITHIN_S))[9:]
            except ConnectionResetError:
                return b""

        async def silent(stack: AsyncExitStack) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)

        try:
            async with AsyncExitStack() as held:
                assert [await status(held) for _ in range(MOST)] == [b"200"] * MOST
                async with AsyncExitStack() as refused:
                    assert [await status(refused) for _ in range(20)] == [b"503"] * 20
                for _ in range(SPARE + 1):  # they never send a request
                    await silent(held)
                async with AsyncExitStack() as flood:
                    assert {await status(flood) for _ in range(20)} == {b""}
                assert len(server.server_state.connections) <= MOST + SPARE + 1
            async with AsyncExitStack() as later, asyncio.timeout(WITHIN_S):
                while await status(later) != b"200":
                    pass
        finally:
            server.should_exit = True
            await asyncio.to_thread(thread.join, WITHIN_S)
        assert capsys.readouterr().err.count("Exceeded concurrency limit") == 1


async def test_a_warning_of_the_server_is_logged_once_a_minute_with_the_number_of_those_left_out() -> None:
    clock = ManualClock()
    bounded = BoundedWarnings(clock=clock)

    def logged(message: str, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("uvicorn.error", level, "", 0, message, None, None)
        return record.getMessage() if bounded.filter(record) else None

    assert [logged("full") for _ in range(3)] == ["full", None, None]
    assert logged("broken") == "broken"
    assert [logged("an error", logging.ERROR) for _ in range(2)] == ["an error"] * 2
    await clock.advance(59)
    assert logged("full") is None
    await clock.advance(1)
    assert [logged("full") for _ in range(2)] == ["full (3 more since the last such line)", None]


async def test_each_problem_of_the_database_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Two problems can take turns, for example because the parts of a page end in different ways."""
    clock = ManualClock()
    problems, user = DatabaseProblems(clock=clock), User("ann", Role.SEE)
    for advanced_s, lines in ((0, 2), (59, 2), (1, 4)):
        await clock.advance(advanced_s)
        for _ in range(10):
            for reason in ("refused", "timed out"):
                problems.told(DatabaseUnreachable(reason), user)
        assert len(caplog.records) == lines
    for number in range(1_000):
        problems.told(DatabaseUnreachable(str(number)), user)
    assert len(problems._logged) <= 100, "its memory is bounded"
