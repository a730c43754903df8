"""Run a worker of an app in the event loop of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from everbeat import App


@asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    """Run a worker of the app; at the end stop it and wait until it has ended."""
    async with asyncio.TaskGroup() as group:
        group.create_task(app.arun_worker())
        try:
            yield
        finally:
            app.stop_worker()
