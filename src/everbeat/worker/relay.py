"""Publishes what stands in the message outbox, one worker of all at a time, and finds out what was lost on the way.

What lives here: whose turn it is, when to look, and publishing again. What may not: how a message travels.

Anything may be published twice: what a message says is only that its task may be claimable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, TypeVar
from uuid import UUID

from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.store import messages
from everbeat.store.messages import OutboxRow
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from everbeat.wake.carrier import Carrier, Message
from everbeat.wake.topics import MessagesWritten

T = TypeVar("T")

WINDOW: Final = 1_000
"""So many messages of a queue are out at most; the others wait in their rows, where they cost the stream nothing."""
PORTION: Final = 250
TURN_S: Final = 3.0
"""After this long without a word of it, the turn is somebody else's; at once if it is found dead before."""
KEEP_EVERY_S: Final = 1.0
LOOK_EVERY_S: Final = 5.0
"""It is told of what is written, and knows when the next row is due."""
RETRY_S: Final = 0.25
CLEAN_EVERY_S: Final = 0.25
DOUBT_EVERY_S: Final = 1.0
DOUBT_AFTER_S: Final = 1.5
"""A message whose task waits after this long is asked after."""
SELDOM_S: Final = 3.0
"""Both of these two are done no more rarely than this while messages are out."""
DOUBTS: Final = 100
MANY_WORDS: Final = 4
"""More than so many words at once: looking is cheaper than being told, for the senders too."""
LINGER_S: Final = 0.1
LOOK_BUSY_S: Final = 0.01
LOOK_FULL_S: Final = 0.02
"""While a queue has as many messages out as it may have, most new rows are of no interest, and those of other queues are looked for."""
_PATIENCE_S: Final = 2.0


class TaskReenqueued(Event, frozen=True, kw_only=True):
    """A task that was taken from a dead worker was published again."""

    room = "worker"
    task_id: UUID
    reason: str


class MessagesRepublished(Event, frozen=True, kw_only=True):
    """Messages of tasks that still wait were not in the stream any more: they are published again."""

    room = "worker"
    level = logging.WARNING
    task_ids: tuple[UUID, ...]


class Relay:
    """A service. It has a connection of its own while it has the turn. `is_manned`: this worker publishes, or knows that another one does."""

    name = "relay"
    interval_s = KEEP_EVERY_S

    def __init__(
        self,
        target: Target,
        *,
        giving: Session,
        session_name: Callable[[], str],
        carrier: Carrier,
        worker_id: Callable[[], str],
        events: EventBus,
        clock: Clock,
        random: Random,
    ) -> None:
        self.wake = asyncio.Event()
        self.has_turn = False
        self.is_manned = False
        self.published = 0
        self.republished = 0
        self._target = target
        self._giving = giving
        self._own: Session | None = None
        self._session_name = session_name
        self._carrier = carrier
        self._worker_id = worker_id
        self._events = events
        self._clock = clock
        self._random = random
        self._holder = worker_id()
        self._words: list[Message] = []
        self._listens = True
        self._busy_at = self._look_at = self._clean_at = self._doubt_at = self._keep_at = 0.0
        self._lying = self._is_full = False
        self._clean_every_s, self._doubt_every_s = CLEAN_EVERY_S, DOUBT_EVERY_S
        self._is_closed = False

    def written(self, hint: MessagesWritten) -> None:
        """Rows were written. Only whoever has the turn is interested."""
        if not self.has_turn:
            return
        if hint.number is None or hint.task_id is None or hint.queue is None:
            self._look_at = 0.0
        else:
            self._words.append(Message(number=hint.number, task_id=hint.task_id, queue=hint.queue))
        self.wake.set()

    async def tick(self) -> float | None:
        """One round of what is due of: keeping the turn, publishing, cleaning, doubting."""
        if self._is_closed or not self._carrier.is_up:
            self.is_manned = False
            await self.let_go()
            return KEEP_EVERY_S
        if not await self._has_turn():
            return TURN_S * self._random.uniform(0.5, 0.75)
        try:
            return await self._round()
        except (DatabaseUnreachable, DatabaseReadOnly):
            self._look_at = 0.0  # what was on its way is in its row
            return KEEP_EVERY_S

    async def close(self) -> None:
        """Publish no more."""
        self._is_closed = True
        await self.let_go()

    async def let_go(self) -> None:
        """Others may publish from now on."""
        if not self.has_turn:
            return
        self.has_turn = False
        self._words.clear()
        session, self._own = self._own, None
        try:
            await self._giving.run(messages.let_relay_go(self._holder), patience_s=0)
        except DatabaseError:
            pass  # the turn ends by itself
        finally:
            if session is not None:
                await session.drop()

    async def _has_turn(self) -> bool:
        now = self._clock.monotonic()
        if self.has_turn and now < self._keep_at:
            return True
        session = self._giving if self._own is None else self._own
        holder = self._worker_id() if not self.has_turn else self._holder
        hold = messages.hold_relay(holder, taken_ms=int(TURN_S * 1_000), channel=self._target.channel)
        try:
            has_turn = await session.run(hold, patience_s=_PATIENCE_S)
            self.is_manned = True
        except DatabaseError:
            has_turn = False
        self._keep_at = now + KEEP_EVERY_S
        if has_turn and not self.has_turn:
            self._holder, self.has_turn, self._listens = holder, True, True
            self._own = Session(
                self._target, f"{self._session_name()} relay", random=self._random, keyed=True
            )
            self._look_at = self._clean_at = self._doubt_at = 0.0
        elif not has_turn and self.has_turn:
            await self.let_go()
        return has_turn

    async def _round(self) -> float:
        now = self._clock.monotonic()
        words, self._words = self._words, []
        if words:
            if len(words) > MANY_WORDS:
                await self._busy(now)
            await self._publish(words)
        if now >= self._look_at or not self._listens:
            self._look_at = now + LOOK_EVERY_S
            if await self._publish_due(now):
                return 0.0
            if not self._listens:
                if self._is_full:
                    await self._tidy(now)
                    return LOOK_FULL_S
                if now - self._busy_at < LINGER_S:
                    return LOOK_BUSY_S
                await self._say(True)
                self._look_at = 0.0  # what was written before the word came is found by one more look
                return 0.0
        await self._tidy(now)
        return max(0.0, min(self._look_at, self._clean_at, self._keep_at) - self._clock.monotonic())

    async def _tidy(self, now: float) -> None:
        if now >= self._clean_at:
            await self._clean(now)
        if self._lying and now >= self._doubt_at:
            await self._doubt(now)

    async def _publish_due(self, now: float) -> bool:
        """Whether there was anything, and may be more."""
        portion = await self._run(messages.due_messages(portion=PORTION, window=WINDOW))
        self._is_full = portion.is_full
        if portion.due_in_ms is not None:
            self._look_at = min(self._look_at, now + portion.due_in_ms / 1_000 + 0.001)
        if portion.is_full or len(portion.rows) + portion.gone >= PORTION:
            await self._busy(now)
        if portion.rows and not await self._publish([_message(row) for row in portion.rows]):
            return False
        return bool(portion.rows or portion.gone)

    async def _publish(self, published: Sequence[Message]) -> bool:
        """Whether all of them have arrived, as far as is known."""
        places = await self._carrier.publish(published)
        arrived = {
            each.number: place for each, place in zip(published, places, strict=True) if place is not None
        }
        if len(arrived) < len(published):
            self._look_at = self._clock.monotonic() + RETRY_S
        if not arrived:
            return False
        self.published += len(arrived)
        for each in published:
            if each.cleared and each.number in arrived and not each.times:
                self._events.emit(TaskReenqueued(task_id=each.task_id, reason=each.reason or ""))
        await self._run(messages.mark_published(arrived))
        if not self._lying:
            self._lying, now = True, self._clock.monotonic()
            self._clean_every_s, self._doubt_every_s = CLEAN_EVERY_S, DOUBT_EVERY_S
            self._clean_at, self._doubt_at = now + CLEAN_EVERY_S, now + DOUBT_AFTER_S
        return len(arrived) == len(published)

    async def _clean(self, now: float) -> None:
        cleaned = await self._run(messages.clean_outbox(limit=WINDOW))
        self._lying = cleaned.lying > cleaned.gone
        # Where nobody has room for long, nothing changes for long.
        self._clean_every_s = CLEAN_EVERY_S if cleaned.gone else min(SELDOM_S, 2 * self._clean_every_s)
        self._clean_at = now + (self._clean_every_s if cleaned.lying else LOOK_EVERY_S)
        if cleaned.gone:
            self._look_at = min(self._look_at, now)  # the window has room

    async def _doubt(self, now: float) -> None:
        self._doubt_every_s = min(SELDOM_S, 1.5 * self._doubt_every_s)
        self._doubt_at = now + self._doubt_every_s
        doubtful = await self._run(
            messages.doubtful_messages(older_ms=int(DOUBT_AFTER_S * 1_000), limit=DOUBTS)
        )
        if not doubtful:
            return
        try:
            missing = await self._carrier.missing({each.place: each.task_id for each in doubtful})
        except ConnectionError:
            return
        lost = {each.id: each.place for each in doubtful if each.place in missing}
        if lost:
            self._doubt_every_s = DOUBT_EVERY_S
            task_ids = await self._run(messages.publish_again(lost))
            if task_ids:
                self.republished += len(task_ids)
                self._events.emit(MessagesRepublished(task_ids=tuple(task_ids)))
            self._look_at = 0.0
            if len(lost) == DOUBTS:
                self._doubt_at = 0.0  # the whole stream may be gone

    async def _busy(self, now: float) -> None:
        self._busy_at = now
        if self._listens:
            await self._say(False)

    async def _say(self, listens: bool) -> None:
        await self._run(messages.relay_listens(self._holder, listens=listens))
        self._listens = listens

    async def _run(self, statement: Statement[T]) -> T:
        session = self._own
        if session is None:  # let go while the round went on
            raise DatabaseUnreachable("The turn to publish was let go meanwhile.", fix="none is needed.")
        return await session.run(statement, patience_s=_PATIENCE_S)


def _message(row: OutboxRow) -> Message:
    return Message(
        number=row.id,
        task_id=row.task_id,
        queue=row.queue,
        times=row.times,
        fence=row.fence,
        cleared=row.reason is not None,
        reason=row.reason,
    )
