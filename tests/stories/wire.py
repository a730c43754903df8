"""A connection between a tree and PostgreSQL that a story can cut or stall: the proxy of the worker tests in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everbeat.store.target import Target
from tests.worker.proxy import Proxy


class Wire:
    """Control a proxy that runs in another thread."""

    def __init__(self, proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
        self.url = proxy.target.url
        self._proxy = proxy
        self._loop = loop

    def cut(self) -> None:
        """End connections and reject new ones."""
        self._in_loop(self._proxy.cut)

    def stall(self) -> None:
        """Let nothing pass without closing connections, like a firewall that dropped its state."""
        self._in_loop(self._proxy.stall)

    def mend(self) -> None:
        """Restore the connection."""
        self._in_loop(self._proxy.mend)

    def _in_loop(self, act: Callable[[], None]) -> None:
        async def do() -> None:
            act()

        asyncio.run_coroutine_threadsafe(do(), self._loop).result(timeout=10)


@contextmanager
def wire(target: Target) -> Iterator[Wire]:
    """Run a wire until the block ends."""
    ready = threading.Event()
    made: list[Wire] = []
    over: list[asyncio.Event] = []

    async def serve() -> None:
        end = asyncio.Event()
        async with Proxy.before(target) as proxy:
            made.append(Wire(proxy, asyncio.get_running_loop()))
            over.append(end)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield made[0]
    finally:
        made[0]._loop.call_soon_threadsafe(over[0].set)
        thread.join(10)
