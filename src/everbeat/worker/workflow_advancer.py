"""Advances workflows and batches: after this worker has settled a task of theirs, after a hint, and periodically."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Final
from uuid import UUID

from everbeat.domain.plan import aperform
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.hints.delivery import HintRate
from everbeat.runtime.clock import Backoff
from everbeat.store.advance import MOST_WORKFLOWS, AdvanceResult, step
from everbeat.store.batches import advance_batches
from everbeat.store.workflows import happened
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.messages import TasksEnqueued

POLL_S: Final = 10.0
"""How often a busy worker checks for workflow changes that no hint reported, in seconds. An idle worker checks at each poll."""
FIRST_PAUSE_S: Final = 0.1
"""The pause before the first retry for workflows that another session has locked, in seconds. It doubles with each retry."""
_SET_ASIDE: Final = Backoff(first_s=60.0, longest_s=3_600.0)
"""How long a workflow is skipped after it could not be advanced. The time grows with each failure."""
_log = logging.getLogger("everbeat.worker")


class Advancer:
    """A service that advances workflows, and ends batches."""

    name = "advancer"
    interval_s = POLL_S

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.wake = asyncio.Event()
        self._session = environment.session
        self._clock = environment.clock
        self._send = environment.send
        self._hint_rate = HintRate()
        self._is_told = True
        self._asked_at = -POLL_S
        self._checks = Backoff(first_s=FIRST_PAUSE_S, longest_s=POLL_S)
        self._at: Collection[UUID] = ()
        self._set_aside: dict[UUID, float] = {}
        self._failures: dict[UUID, int] = {}

    def advance_soon(self) -> None:
        """Advance workflows and batches soon, because they might have changed."""
        self._is_told = True
        self.wake.set()

    def asked(self, happened: bool) -> None:
        """Record that the claimer has just checked for changes of workflows and batches. `happened` is whether there are any."""
        self._asked_at = self._clock.monotonic()
        if happened:
            self.advance_soon()

    async def tick(self) -> float | None:
        """Advance workflows and batches until nothing is left to do, except for those that another session has locked."""
        now = self._clock.monotonic()
        if not self._is_told:
            # The claimer's last check makes this query unnecessary until that check is as old as the poll interval.
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
                # A workflow that cannot be advanced must not block the others, so from here on each workflow gets its own
                # transaction.
                if not self._at:
                    raise
                if len(self._at) == 1:
                    self._put_aside(problem)
                most = 1
                continue
            if done.enqueued:
                self._send(TasksEnqueued())
            if not done.workflows:
                await self._advance_batches()
                return await self._left_over()
            for one in self._failures.keys() & self._at:
                del self._failures[one]
            self._checks.reset()
            self._hint_rate.paid_off()

    async def _advance_batches(self) -> None:
        while True:
            done = await self._session.run(advance_batches(channel=self._session.target.channel))
            if done.enqueued:
                self._send(TasksEnqueued())
            if not done.advanced:
                return
            self._checks.reset()
            self._hint_rate.paid_off()

    async def _left_over(self) -> float | None:
        """Return how many seconds to wait before trying again, or None if no workflow or batch is left to advance.

        Those that are left are locked by another worker, or briefly by a signal or a send.
        """
        if not await self._session.run(happened()):
            self._checks.reset()
            return None
        self._is_told = True
        return self._checks.next()

    async def _step(self, most: int) -> AdvanceResult:
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
            failures = self._failures[one] = self._failures.get(one, 0) + 1
            pause_s = _SET_ASIDE.delay(failures)
            self._set_aside[one] = self._clock.monotonic() + pause_s
            _log.error(
                "workflow_cannot_go_on workflow=%s again_in_s=%d error=%r",
                one,
                pause_s,
                str(problem)[:500],
            )
