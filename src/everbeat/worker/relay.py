"""Publishes what stands in the message outbox, one worker of all at a time.

What lives here: whose turn it is, and when to look. What may not: how a message travels, and what became of it (`patrol`).

Anything may be published twice: what a message says is only that its task may be claimable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, TypeVar
from uuid import UUID

from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.store import messages
from everbeat.store.messages import WINDOW, OutboxRow
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from everbeat.wake.carrier import NOT_CARRIED, Carrier, Message
from everbeat.wake.hint_rate import HintRate
from everbeat.worker.fullness import Fullness, MessagesNotPublished
from everbeat.worker.patrol import Patrol

T = TypeVar("T")

PORTION: Final = 250
TURN_S: Final = 3.0
"""After this long without a word of it, the turn is somebody else's; at once if it is found dead before."""
KEEP_EVERY_S: Final = 1.0
LOOK_EVERY_S: Final = 5.0
"""It is told of what is written, and knows when the next row is due."""
FIRST_RETRY_S: Final = 0.25
LONGEST_RETRY_S: Final = 2.0
NOTHING_S: Final = 1.0
"""After this long without anything arriving, senders are to tell the workers."""
GIVE_UP_S: Final = 10.0
APART_S: Final = 20.0
"""After so long without anything arriving somebody else may try, for so long."""
MANY_HINTS: Final = 4
"""After more hints than this in one round, the relay polls instead, which is cheaper for senders too."""
LINGER_S: Final = 0.1
LOOK_BUSY_S: Final = 0.01
LOOK_FULL_S: Final = 0.02
LOOK_FULL_SELDOM_S: Final = 0.1
"""While a queue has as many messages out as it may have, most new rows are of no interest, and those of other queues are looked for:
seldom, where none came for a second."""
_NO_ANSWER: Final = "it does not acknowledge messages"
_PATIENCE_S: Final = 2.0


class TaskReenqueued(Event, frozen=True, kw_only=True):
    """A task that was taken from a dead worker was published again."""

    room = "worker"
    task_id: UUID
    reason: str


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
        self.patrol = Patrol(self._run, carrier=carrier, channel=target.channel, events=events)
        self.fullness = Fullness(worker_id=worker_id, events=events, clock=clock)
        self._target = target
        self._giving = giving
        self._own: Session | None = None
        self._session_name = session_name
        self._carrier = carrier
        self._worker_id = worker_id
        self._events = events
        self._clock = clock
        self._random = random
        self._window = WINDOW if carrier.share is None else min(WINDOW, carrier.share)
        self._holder = worker_id()
        self._hints = 0
        self._hint_rate = HintRate()
        self._queues: set[str] = set()
        self._listens = True
        self._is_closed = False
        self._full: Mapping[str, int] = {}
        self._says_failing: bool | None = None
        self._nothing_since: float | None = None
        self._retry_s = FIRST_RETRY_S
        self._busy_at = self._look_at = self._keep_at = self._told_at = self._apart_until = 0.0

    def written(self) -> None:
        """Query the outbox: it might have new rows. Only the worker that has the turn does so.

        Nothing is published from the hint itself, which any role that can connect might have sent.
        """
        if not self.has_turn or self._nothing_since is not None:
            return
        self._hints += 1
        self._look_at = 0.0
        self.wake.set()

    async def tick(self) -> float | None:
        """One round of what is due of: keeping the turn, publishing, going through the outbox."""
        if self._hints or not self.has_turn:
            await self._clock.sleep(self._hint_rate.pause_s(self._clock.monotonic()))
        apart_s = self._apart_until - self._clock.monotonic()
        if self._is_closed or not self._carrier.is_up or apart_s > 0:
            self.is_manned = False
            await self.let_go()
            return max(KEEP_EVERY_S, apart_s)
        if not await self._keeps_turn():
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
        self._hints = 0
        session, self._own = self._own, None
        try:
            await self._giving.run(messages.let_relay_go(self._holder), patience_s=0)
        except DatabaseError:
            pass  # the turn ends by itself
        finally:
            if session is not None:
                await session.drop()

    async def _keeps_turn(self) -> bool:
        now = self._clock.monotonic()
        if self.has_turn and now < self._keep_at:
            return True
        session = self._giving if self._own is None else self._own
        holder = self._holder if self.has_turn else self._worker_id()
        hold = messages.hold_relay(holder, taken_ms=int(TURN_S * 1_000), channel=self._target.channel)
        try:
            has_turn = await session.run(hold, patience_s=_PATIENCE_S)
            self.is_manned = True
        except DatabaseError:
            has_turn = False
        finally:
            if session is not self._giving and session is not self._own:
                await session.drop()  # let go meanwhile: a repetition has connected again
        if self._is_closed:
            return False  # if the statement took the turn, the turn ends by itself
        self._keep_at = now + KEEP_EVERY_S
        if has_turn and not self.has_turn:
            self._begin(holder)
        elif not has_turn and self.has_turn:
            await self.let_go()
        return has_turn

    def _begin(self, holder: str) -> None:
        self._holder, self.has_turn, self._listens, self._says_failing = holder, True, True, None
        self._own = Session(self._target, f"{self._session_name()} relay", random=self._random, keyed=True)
        self._nothing_since, self._look_at = None, 0.0
        self._queues.clear()
        self.patrol.begin()

    async def _round(self) -> float:
        now = self._clock.monotonic()
        hints, self._hints = self._hints, 0
        if hints > MANY_HINTS:
            await self._busy(now)
        if now >= self._look_at or (not self._listens and self._nothing_since is None):
            self._look_at = now + LOOK_EVERY_S
            if await self._publish_due(now):
                return 0.0
        if now >= self.patrol.next_at and await self.patrol.go(now):
            self._look_at = 0.0
            return 0.0
        if self._nothing_since is None and not self._listens:
            if self._full:
                return LOOK_FULL_S if now - self._told_at < 1.0 else LOOK_FULL_SELDOM_S
            if now - self._busy_at < LINGER_S:
                return LOOK_BUSY_S
            await self._say(True)
            self._look_at = 0.0  # what was written before the word came is found by one more look
            return 0.0
        return max(0.0, min(self._look_at, self.patrol.next_at, self._keep_at) - self._clock.monotonic())

    async def _publish_due(self, now: float) -> bool:
        """Whether there was anything, and may be more."""
        portion = await self._run(messages.due_messages(portion=PORTION, window=self._window))
        await self._tell_of_full(portion.full)
        if portion.due_in_ms is not None:
            self._look_at = min(self._look_at, now + portion.due_in_ms / 1_000 + 0.001)
        if portion.full or len(portion.rows) + portion.gone >= PORTION:
            await self._busy(now)
        if portion.rows and not await self._publish([_message(row) for row in portion.rows]):
            return False
        return bool(portion.rows or portion.gone)

    async def _tell_of_full(self, full: Mapping[str, int]) -> None:
        """What is written into a full queue waits for messages of others, which nobody may be able to claim: workers look instead."""
        new = {queue for queue, last in full.items() if last != self._full.get(queue)}
        self._full = full
        if new:
            self._told_at = self._clock.monotonic()
            await self._run(messages.tell_workers(new, channel=self._target.channel))

    async def _publish(self, published: Sequence[Message]) -> bool:
        """Whether all of them have arrived, as far as is known."""
        if new := {each.queue for each in published} - self._queues:
            self._queues |= new
            await self._run(messages.tell_queues(new, channel=self._target.channel))
        places = await self._carrier.publish(published)
        self.fullness.judge(self._carrier.refusal)
        arrived = {
            each.number: place for each, place in zip(published, places, strict=True) if place is not None
        }
        now = self._clock.monotonic()
        if not arrived:
            await self._nothing_arrived(now)
            return False
        self._nothing_since, self._retry_s = None, FIRST_RETRY_S
        if self._says_failing is not False:
            await self._say_failing(False)
        self._hint_rate.paid_off()
        self.published += sum(place != NOT_CARRIED for place in arrived.values())
        for each in published:
            if each.cleared and each.number in arrived and not each.times:
                self._events.emit(TaskReenqueued(task_id=each.task_id, reason=each.reason or ""))
        await self._run(messages.mark_published(arrived))
        if untold := {each.queue for each in published if arrived.get(each.number) == NOT_CARRIED}:
            await self._run(messages.tell_workers(untold, channel=self._target.channel))
        self.patrol.published(len(arrived), now=now)
        if len(arrived) < len(published):
            self._look_at = now + FIRST_RETRY_S
            return False
        return True

    async def _nothing_arrived(self, now: float) -> None:
        if self._nothing_since is None:
            self._nothing_since = now
        self._look_at, self._retry_s = now + self._retry_s, min(LONGEST_RETRY_S, 2 * self._retry_s)
        if now - self._nothing_since >= NOTHING_S and self._carrier.is_up and not self._says_failing:
            self._events.emit(MessagesNotPublished(worker_id=self._worker_id(), problem=_NO_ANSWER))
            await self._say_failing(True)
            # Senders notify workers from now on. What they wrote before is notified here.
            waiting = await self._run(messages.queues_told())
            await self._run(messages.tell_workers(waiting, channel=self._target.channel))
        if now - self._nothing_since >= GIVE_UP_S:
            self._apart_until = now + APART_S

    async def _busy(self, now: float) -> None:
        self._busy_at = now
        if self._listens:
            await self._say(False)

    async def _say(self, listens: bool) -> None:
        await self._run(messages.relay_listens(self._holder, listens=listens))
        self._listens = listens

    async def _say_failing(self, failing: bool) -> None:
        await self._run(messages.relay_failing(self._holder, failing=failing))
        self._says_failing = failing

    async def _run(self, statement: Statement[T]) -> T:
        session = self._own
        if session is None:  # let go while the round went on
            raise DatabaseUnreachable("The turn to publish was let go meanwhile.", fix="none is needed.")
        try:
            return await session.run(statement, patience_s=_PATIENCE_S)
        finally:
            if self._own is not session:
                await session.drop()  # let go meanwhile: a repetition has connected again


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
