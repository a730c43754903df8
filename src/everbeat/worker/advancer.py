"""Moves workflows on, whoever ended what they waited for: when this worker settled a node, when a hint says so, and now and then.

What lives here: when a step is taken. What may not: what a step does (`store.advance`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from everbeat.store.advance import step
from everbeat.store.plan import aperform
from everbeat.store.session import Session
from everbeat.store.workflows import happened

POLL_S: Final = 10.0
"""What nobody told of is found within this time even by a worker that is busy; an idle one asks whenever it looks for tasks."""


class Advancer:
    """A service. `on_enqueued()`: there are tasks to claim."""

    name = "advancer"
    interval_s = POLL_S

    def __init__(self, session: Session, *, on_enqueued: Callable[[], None]) -> None:
        self.wake = asyncio.Event()
        self._session = session
        self._on_enqueued = on_enqueued
        self._is_told = True
        self._is_asked = False

    def look(self) -> None:
        """Something may have happened to workflows."""
        self._is_told = True
        self.wake.set()

    def asked(self, happened: bool) -> None:
        """Somebody has just asked the database whether something has."""
        self._is_asked = True
        if happened:
            self.look()

    async def tick(self) -> float | None:
        """Steps until nothing is left that nobody is at."""
        channel = self._session.target.channel
        if not self._is_told and (self._was_asked() or not await self._session.run(happened())):
            return None
        self._is_told = False
        while True:
            done = await self._session.transact(lambda run: aperform(step(channel=channel), run))
            if done.enqueued:
                self._on_enqueued()
            if not done.workflows:
                return None

    def _was_asked(self) -> bool:
        # Since the last look: each answer spares one question.
        was_asked, self._is_asked = self._is_asked, False
        return was_asked
