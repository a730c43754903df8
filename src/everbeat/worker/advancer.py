"""Moves workflows on, whoever ended what they waited for: when this worker settled a node, when a hint says so, and now and then.

What lives here: when a step is taken, and what is done about a workflow that cannot take one. What may not: what a step does
(`store.advance`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final
from uuid import UUID

from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.clock import Clock
from everbeat.store.advance import MOST_WORKFLOWS, Step, step
from everbeat.store.plan import aperform
from everbeat.store.session import Session
from everbeat.store.workflows import happened

POLL_S: Final = 10.0
"""What nobody told of is found within this time even by a worker that is busy; an idle one asks whenever it looks for tasks."""
SET_ASIDE_S: Final = 60.0
_log = logging.getLogger("everbeat.worker")


class Advancer:
    """A service. `on_enqueued()`: there are tasks to claim."""

    name = "advancer"
    interval_s = POLL_S

    def __init__(self, session: Session, *, on_enqueued: Callable[[], None], clock: Clock) -> None:
        self.wake = asyncio.Event()
        self._session = session
        self._on_enqueued = on_enqueued
        self._clock = clock
        self._is_told = True
        self._is_asked = False
        self._at: Collection[UUID] = ()
        self._set_aside: dict[UUID, float] = {}

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
        if not self._is_told and (self._was_asked() or not await self._session.run(happened())):
            return None
        self._is_told = False
        now = self._clock.monotonic()
        self._set_aside = {one: until for one, until in self._set_aside.items() if until > now}
        most = MOST_WORKFLOWS
        while True:
            self._at = ()
            try:
                done = await self._step(most)
            except (DatabaseUnreachable, DatabaseReadOnly):
                raise
            except Exception as problem:
                # One that cannot take its step must not keep all others from theirs: from here on each takes its own.
                if not self._at:
                    raise
                if len(self._at) == 1:
                    self._put_aside(problem)
                most = 1
                continue
            if done.enqueued:
                self._on_enqueued()
            if not done.workflows:
                return None

    async def _step(self, most: int) -> Step:
        channel = self._session.target.channel
        return await self._session.transact(
            lambda run: aperform(
                step(channel=channel, without=self._set_aside, most=most, on_locked=self._is_at), run
            )
        )

    def _is_at(self, ids: Collection[UUID]) -> None:
        self._at = ids

    def _put_aside(self, problem: Exception) -> None:
        for one in self._at:
            self._set_aside[one] = self._clock.monotonic() + SET_ASIDE_S
            _log.error(
                "workflow_cannot_go_on workflow=%s again_in_s=%d error=%r",
                one,
                SET_ASIDE_S,
                str(problem)[:500],
            )

    def _was_asked(self) -> bool:
        # Since the last look: each answer spares one question.
        was_asked, self._is_asked = self._is_asked, False
        return was_asked
