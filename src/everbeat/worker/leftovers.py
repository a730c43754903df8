"""Takes messages of ended tasks out of the stream, where no worker takes them by a consumer.

A task can end without its message: a worker without NATS runs it, or an administrator's `max_deliver` is used up. The worker that has the
turn to publish compares what the stream holds with the rows, and publishes no further messages of a queue that nobody takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

from everbeat.domain.delivery import USELESS, judge
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.store.messages import look_at, messages_lying
from everbeat.store.session import Session
from everbeat.wake.carrier import Carrier, Stored

CHECK_S: Final = 5.0
SELDOM_S: Final = 20.0
"""The longest time between two checks while nothing is found."""
THOROUGH_S: Final = 25.0
"""How often messages are looked through that running tasks could account for."""
SETTLED_S: Final = 10.0
"""A younger message is left alone: a worker may be about to acknowledge it."""
URGENT_APART_S: Final = 1.0
PORTION: Final = 500


class MessagesNotTaken(Event, frozen=True, kw_only=True):
    """No worker takes the messages of this queue, and its tasks end all the same: the messages were removed from the stream.

    The queue is not carried until a worker asks for its messages; PostgreSQL notifies workers of its tasks.
    """

    room = "worker"
    level = logging.WARNING
    queue: str
    removed: int


class Leftovers:
    """A service. `publishes()`: this worker has the turn to publish. `removed`: how many messages were taken out."""

    name = "messages of ended tasks"
    interval_s = CHECK_S

    def __init__(
        self,
        session: Session,
        *,
        publishes: Callable[[], bool],
        carrier: Carrier,
        stale_ms: int,
        events: EventBus,
        clock: Clock,
    ) -> None:
        self.wake = asyncio.Event()
        self.removed = 0
        self._session = session
        self._publishes = publishes
        self._carrier = carrier
        self._stale_ms = stale_ms
        self._events = events
        self._clock = clock
        self._pause_s = CHECK_S
        self._is_urgent = False
        self._urgent_at = self._thorough_at = 0.0
        self._told: set[str] = set()

    def stream_full(self) -> None:
        """Check at once, but not more often than once a second: messages of ended tasks take the room of others."""
        now = self._clock.monotonic()
        if now >= self._urgent_at:
            self._urgent_at = now + URGENT_APART_S
            self._is_urgent = True
            self.wake.set()

    async def tick(self) -> float | None:
        """Check the stream once, if this worker publishes."""
        is_urgent, self._is_urgent = self._is_urgent, False
        if not self._publishes():
            self._carrier.not_taken.clear()
            self._told.clear()
            return None
        try:
            removed = await self._clear(older_s=0.0 if is_urgent else SETTLED_S)
            await self._settle_taken(removed)
        except (ConnectionError, DatabaseError):
            return None
        self._pause_s = CHECK_S if removed or self._carrier.not_taken else min(SELDOM_S, 2 * self._pause_s)
        return self._pause_s

    async def _clear(self, *, older_s: float) -> Counter[str]:
        """Remove what is of no use from each subject that holds more than the rows account for; counted by queue."""
        stock = self._carrier.stock
        held = await stock.count()
        removed: Counter[str] = Counter()
        if held:
            # A task that runs may have a message or not: what such tasks could account for is looked through more rarely.
            now = self._clock.monotonic()
            is_thorough = now >= self._thorough_at
            if is_thorough:
                self._thorough_at = now + THOROUGH_S
            lying = await self._session.run(messages_lying(), patience_s=0)
            expected = {
                stock.subject(queue): each.out + (0 if is_thorough else each.held)
                for queue, each in lying.items()
            }
            for subject, count in held.items():
                if count > expected.get(subject, 0):
                    removed += await self._clear_subject(subject, older_s=older_s)
        return removed

    async def _clear_subject(self, subject: str, *, older_s: float) -> Counter[str]:
        stock = self._carrier.stock
        removed: Counter[str] = Counter()
        first, all_gone = 1, True
        while read := await stock.read(subject, first=first, limit=PORTION, older_s=older_s):
            gone = await self._useless(read)
            kept = [each.place for each in read if each not in gone]
            before = min(kept, default=read[-1].place + 1) if all_gone and gone else None
            if gone:
                await stock.take_out(subject, [each.place for each in gone], before=before)
                removed.update("" if each.message is None else each.message.queue for each in gone)
                self.removed += len(gone)
            all_gone = all_gone and not kept
            first = read[-1].place + 1
        return removed

    async def _useless(self, read: Sequence[Stored]) -> set[Stored]:
        ids: list[UUID] = list({each.message.task_id for each in read if each.message is not None})
        facts = await self._session.run(look_at(ids, stale_ms=self._stale_ms), patience_s=0)
        return {
            each
            for each in read
            if (message := each.message) is None
            or judge(facts.get(message.task_id), fence=message.fence, worker_id="", names=()) in USELESS
        }

    async def _settle_taken(self, removed: Counter[str]) -> None:
        """Decide which queues are carried: those that left messages behind are not, until a worker asks for their messages."""
        not_taken = self._carrier.not_taken
        for queue in sorted({*removed, *not_taken} - {""}):
            if await self._carrier.stock.is_wanted(queue):
                not_taken.discard(queue)
            elif removed[queue]:
                not_taken.add(queue)
                if queue not in self._told:
                    self._told.add(queue)
                    self._events.emit(MessagesNotTaken(queue=queue, removed=removed[queue]))
