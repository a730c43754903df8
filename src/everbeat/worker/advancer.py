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
from everbeat.wake.hint_rate import HintRate

POLL_S: Final = 10.0
"""What nobody told of is found within this time even by a worker that is busy; an idle one asks whenever it looks for tasks."""
FIRST_PAUSE_S: Final = 0.1
"""Before the second look at workflows that somebody was at; it doubles."""
SET_ASIDE_S: Final = 60.0
"""After the first step that failed; it doubles with each further one."""
LONGEST_ASIDE_S: Final = 3_600.0
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
        self._hint_rate = HintRate()
        self._is_told = True
        self._asked_at = -POLL_S
        self._pause_s = FIRST_PAUSE_S
        self._at: Collection[UUID] = ()
        self._set_aside: dict[UUID, float] = {}
        self._pauses_s: dict[UUID, float] = {}

    def look(self) -> None:
        """Something may have happened to workflows."""
        self._is_told = True
        self.wake.set()

    def asked(self, happened: bool) -> None:
        """Somebody has just asked the database whether something has."""
        self._asked_at = self._clock.monotonic()
        if happened:
            self.look()

    async def tick(self) -> float | None:
        """Steps until nothing is left that nobody is at."""
        now = self._clock.monotonic()
        if not self._is_told:
            # What somebody was answered a moment ago spares the question, until that answer is as old as one of our own may be.
            if (rest_s := self._asked_at + POLL_S - now) > 0:
                return rest_s
            if not await self._session.run(happened()):
                return None
        await self._clock.sleep(self._hint_rate.pause_s(now))
        self._is_told = False
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
                return await self._left_over()
            for one in self._pauses_s.keys() & self._at:
                del self._pauses_s[one]
            self._pause_s = FIRST_PAUSE_S
            self._hint_rate.paid_off()

    async def _left_over(self) -> float | None:
        """Somebody is at those that are left: another worker, which sees to them, or a signal that holds one for a moment."""
        if not await self._session.run(happened()):
            self._pause_s = FIRST_PAUSE_S
            return None
        self._is_told = True
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, POLL_S)
        return pause_s

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
            pause_s = self._pauses_s[one] = min(2 * self._pauses_s.get(one, SET_ASIDE_S / 2), LONGEST_ASIDE_S)
            self._set_aside[one] = self._clock.monotonic() + pause_s
            _log.error(
                "workflow_cannot_go_on workflow=%s again_in_s=%d error=%r",
                one,
                pause_s,
                str(problem)[:500],
            )
