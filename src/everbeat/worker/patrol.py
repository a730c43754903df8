"""Goes through the outbox behind the relay: takes away rows of what waits no more, and finds messages that lead nowhere.

What lives here: how often, and what follows. What may not: publishing, and whose turn it is.

A message may be lost, or with a worker that does nothing, or stuck in the stream: what is not there is published again, and of what is
there the database tells the workers after all. So a task that waits without reason waits for seconds, whatever became of its message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar
from uuid import UUID

from everbeat.runtime.events import Event, EventBus
from everbeat.store import messages
from everbeat.store.messages import BEGINNING, Doubtful
from everbeat.store.statement import Statement
from everbeat.wake.carrier import NOT_CARRIED, Carrier

T = TypeVar("T")
EVERY_S: Final = 0.25
SELDOM_S: Final = 2.0
"""Where nothing changes, rows are looked at no more rarely than this while any is out."""
AT_ONCE_S: Final = 0.02
ROWS: Final = 1_000
DOUBT_AFTER_S: Final = 1.5
"""A message whose task waits after this long is asked after."""
ASKED: Final = 200
TELL_EVERY_S: Final = 1.5
TELL_SELDOM_S: Final = 5.0
LATER_EVERY_S: Final = 15.0
LATER_SOON_S: Final = 1.0


class MessagesRepublished(Event, frozen=True, kw_only=True):
    """Messages of tasks that still wait were not in the stream any more: they are published again."""

    room = "worker"
    level = logging.WARNING
    task_ids: tuple[UUID, ...]


class Run(Protocol):
    """Runs a statement on the relay's connection."""

    async def __call__(self, statement: Statement[T], /) -> T: ...


class Patrol:
    """`out`: about how many messages are published. `next_at`: when to go again, by the monotonic clock."""

    def __init__(self, run: Run, *, carrier: Carrier, channel: str, events: EventBus) -> None:
        self.out = 0
        self.next_at = 0.0
        self.republished = 0
        self._run = run
        self._carrier = carrier
        self._channel = channel
        self._events = events
        self.begin()

    def begin(self) -> None:
        """It is this worker's turn: nothing is known."""
        self.out = self._seen = 0
        self.next_at = self._later_at = self._tell_at = 0.0
        self._every_s, self._tell_every_s = EVERY_S, TELL_EVERY_S
        self._place = self._later_place = BEGINNING

    def published(self, count: int, *, now: float) -> None:
        """So many more are out."""
        self.out += count
        self.next_at = min(self.next_at, now + EVERY_S)

    async def go(self, now: float) -> bool:
        """A part of the way; answers whether there may be something to publish that could not be before."""
        walked = await self._run(
            messages.walk_published(self._place, older_ms=int(DOUBT_AFTER_S * 1_000), limit=ROWS)
        )
        self._place = BEGINNING if walked.next is None else walked.next
        self._seen += walked.seen - walked.gone
        if walked.next is None:
            self.out, self._seen = self._seen, 0
        else:
            self.out = max(0, self.out - walked.gone)
        lost = bool(walked.doubtful) and await self._asked_after(walked.doubtful, now)
        if not walked.doubtful:
            self._tell_every_s = TELL_EVERY_S
        self._every_s = EVERY_S if walked.gone or lost else min(SELDOM_S, 2 * self._every_s)
        pause_s = AT_ONCE_S if walked.next is not None and walked.gone else self._every_s
        self.next_at = now + (pause_s if self.out or walked.next is not None else LATER_EVERY_S)
        if now >= self._later_at:
            after = await self._run(messages.walk_later(self._later_place, limit=ROWS))
            self._later_place = BEGINNING if after is None else after
            self._later_at = now + (LATER_EVERY_S if after is None else LATER_SOON_S)
        return bool(walked.gone or lost)

    async def _asked_after(self, doubtful: Sequence[Doubtful], now: float) -> bool:
        """Whether any was lost."""
        asked = [each for each in doubtful if each.place != NOT_CARRIED][:ASKED]
        try:
            missing = await self._carrier.missing({each.place: each.task_id for each in asked})
        except ConnectionError:
            return False
        lost = {each.id: each.place for each in asked if each.place in missing}
        if lost:
            task_ids = await self._run(messages.publish_again(lost))
            self.out = max(0, self.out - len(task_ids))
            if task_ids:
                self.republished += len(task_ids)
                self._events.emit(MessagesRepublished(task_ids=tuple(task_ids)))
        there: set[str] = {each.queue for each in doubtful if each.id not in lost}
        if there and now >= self._tell_at:
            self._tell_at = now + self._tell_every_s
            self._tell_every_s = min(TELL_SELDOM_S, 1.5 * self._tell_every_s)
            await self._run(messages.tell_workers(there, channel=self._channel))
        return bool(lost)
