"""The connections of a client on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from everbeat.store.silence import WatchedAsyncConnection

MOST_CONNECTIONS: Final = 8
"""On each loop, and for all threads together."""


class LoopConnections:
    """A pool of them."""

    def __init__(self) -> None:
        self.idle: list[WatchedAsyncConnection] = []
        self.free = asyncio.Semaphore(MOST_CONNECTIONS)
        self.until_loop_ends: AsyncGenerator[None] | None = None
        self._is_over = False

    async def put_back(self, connection: WatchedAsyncConnection) -> None:
        """A task is done with it."""
        if self._is_over:
            await connection.close()
        elif not connection.closed:
            self.idle.append(connection)

    async def close(self) -> None:
        """Closes the connections that no task is using; the others follow when they are put back."""
        self._is_over = True
        await self.close_idle()

    async def close_idle(self) -> None:
        """Closes the connections that no task is using."""
        while self.idle:
            await self.idle.pop().close()
