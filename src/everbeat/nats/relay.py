"""Publish the message outbox from one worker at a time, and republish messages that the stream has lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar
from uuid import UUID

from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseUnreachable
from everbeat.hints.delivery import HintRate
from everbeat.nats.jetstream import JetStream
from everbeat.nats.stream_plan import NOT_CARRIED, TaskMessage
from everbeat.runtime.clock import Backoff
from everbeat.runtime.events import Event, EventBus
from everbeat.store import messages
from everbeat.store.messages import BEGINNING, WINDOW, Doubtful, OutboxRow
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.worker.claim.claimer import LATE_COMMITS_S
from everbeat.worker.environment import WorkerEnvironment

T = TypeVar("T")

AGAIN_S: Final = 60.0
SWEEPS_APART_S: Final = 1.0


class MessagesNotPublished(Event, frozen=True, kw_only=True):
    """The stream does not accept messages, although the link is up: it is full, has no leader, or the user cannot publish.

    In the meantime, PostgreSQL notifies workers, and the relay keeps retrying. `problem` is the reply of NATS.
    """

    component = "nats"
    level = logging.WARNING
    worker_id: str
    problem: str


class StreamFullness:
    """Records whether the last publications found room in the stream.

    A publication that found no room requests a sweep of the stream, at most once per second. The sweep removes messages of finished tasks.
    `sweeps` counts these requests, and `sweep_due` is the event that wakes the sweeper.
    """

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.sweeps = 0
        self.sweep_due = asyncio.Event()
        self._environment = environment
        self._clock = environment.clock
        self._refusal: str | None = None
        self._refused_at = self._reported_at = -AGAIN_S
        self._next_sweep_at = 0.0

    @property
    def refusal(self) -> str | None:
        """Return why the stream had no room for messages within the last minute, or None if it had room."""
        return self._refusal if self._clock.monotonic() - self._refused_at < AGAIN_S else None

    def judge(self, refusal: str | None) -> None:
        """Record the result of a publication. If `refusal` says why it found no room, PostgreSQL notifies workers of the affected tasks."""
        self._refusal = refusal
        if refusal is None:
            return
        now = self._refused_at = self._clock.monotonic()
        if now >= self._next_sweep_at:
            self._next_sweep_at = now + SWEEPS_APART_S
            self.sweeps += 1
            self.sweep_due.set()
        if now - self._reported_at >= AGAIN_S:
            self._reported_at = now
            worker_id = self._environment.identity.worker_id
            self._environment.events.emit(MessagesNotPublished(worker_id=worker_id, problem=refusal))


EVERY_S: Final = 0.25
SELDOM_S: Final = 2.0
"""The longest pause in seconds between two scans while messages are published and nothing changes."""
AT_ONCE_S: Final = 0.02
ROWS: Final = 1_000
DOUBT_AFTER_S: Final = 1.5
"""If a message's task is not claimed within this many seconds, the relay checks whether the stream still has the message."""
ASKED: Final = 200
NOTIFY_EVERY_S: Final = 1.5
NOTIFY_SELDOM_S: Final = 5.0
LATER_EVERY_S: Final = 15.0
LATER_SOON_S: Final = 1.0


class MessagesRepublished(Event, frozen=True, kw_only=True):
    """Messages of waiting tasks were missing from the stream and are being republished."""

    component = "nats"
    level = logging.WARNING
    task_ids: tuple[UUID, ...]


class RelayStatements(Protocol):
    """Runs a statement on the relay's connection."""

    async def __call__(self, statement: Statement[T], /) -> T: ...


class MessageAuditor:
    """Finds published messages that the stream has lost.

    `out` is an estimate of how many published messages are still in the outbox. `next_at` is the time of the next scan on the monotonic
    clock.
    """

    def __init__(self, run: RelayStatements, *, transport: JetStream, channel: str, events: EventBus) -> None:
        self.out = 0
        self.next_at = 0.0
        self.republished = 0
        self._run = run
        self._transport = transport
        self._channel = channel
        self._events = events
        self.begin()

    def begin(self) -> None:
        """Start from the beginning, because this worker has become the relay."""
        self.out = self._seen = 0
        self.next_at = self._later_at = self._notify_at = 0.0
        self._walks = Backoff(first_s=EVERY_S, longest_s=SELDOM_S)
        self._notifications = Backoff(first_s=NOTIFY_EVERY_S, longest_s=NOTIFY_SELDOM_S, factor=1.5)
        self._place = self._later_place = BEGINNING

    def published(self, count: int, *, now: float) -> None:
        """Count published messages."""
        self.out += count
        self.next_at = min(self.next_at, now + EVERY_S)

    async def go(self, now: float) -> bool:
        """Scan some of the rows. Return whether there might be more to publish now."""
        walked = await self._run(
            messages.walk_published(self._place, older_ms=int(DOUBT_AFTER_S * 1_000), limit=ROWS)
        )
        self._place = BEGINNING if walked.next is None else walked.next
        self._seen += walked.seen - walked.gone
        if walked.next is None:
            self.out, self._seen = self._seen, 0
        else:
            self.out = max(0, self.out - walked.gone)
        lost = bool(walked.doubtful) and await self._found_lost(walked.doubtful, now)
        if not walked.doubtful:
            self._notifications.reset()
        if walked.gone or lost:
            self._walks.reset()
        every_s = self._walks.next()
        pause_s = AT_ONCE_S if walked.next is not None and walked.gone else every_s
        self.next_at = now + (pause_s if self.out or walked.next is not None else LATER_EVERY_S)
        if now >= self._later_at:
            after = await self._run(messages.walk_later(self._later_place, limit=ROWS))
            self._later_place = BEGINNING if after is None else after
            self._later_at = now + (LATER_EVERY_S if after is None else LATER_SOON_S)
        return bool(walked.gone or lost)

    async def _found_lost(self, doubtful: Sequence[Doubtful], now: float) -> bool:
        """Check these messages in the stream, and return whether any of them was lost."""
        asked = [each for each in doubtful if each.place != NOT_CARRIED][:ASKED]
        try:
            missing = await self._transport.missing({each.place: each.task_id for each in asked})
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
        if there and now >= self._notify_at:
            self._notify_at = now + self._notifications.next()
            await self._run(messages.tell_workers(there, channel=self._channel))
        return bool(lost)


PORTION: Final = 250
TURN_S: Final = 3.0
"""After this many seconds without a renewal, another worker may become the relay. If the relay is declared dead, this may happen at once."""
KEEP_EVERY_S: Final = 1.0
CHECK_EVERY_S: Final = 5.0
"""The longest time in seconds between two polls. Notifications report new rows, and the relay knows when the next row is due."""
FIRST_RETRY_S: Final = 0.25
LONGEST_RETRY_S: Final = 2.0
NOTHING_S: Final = 1.0
"""After this many seconds without an accepted message, senders notify the workers."""
GIVE_UP_S: Final = 10.0
APART_S: Final = 20.0
"""After `GIVE_UP_S` seconds without an accepted message, this worker lets others publish for this many seconds."""
MANY_HINTS: Final = 4
"""If more hints than this arrive in one round, the relay polls instead, which is also cheaper for senders."""
LINGER_S: Final = 0.1
CHECK_BUSY_S: Final = 0.01
CHECK_FULL_S: Final = 0.02
CHECK_FULL_SELDOM_S: Final = 0.1
"""While a queue has its maximum number of messages in the stream, most new rows cannot be published. The relay then polls for rows of other
queues. The relay polls less often once no row has arrived for a second."""
_NO_ANSWER: Final = "it does not acknowledge messages"
_PATIENCE_S: Final = 2.0


class TaskReenqueued(Event, frozen=True, kw_only=True):
    """The message of a task that was recovered from a dead worker was published."""

    component = "nats"
    task_id: UUID
    reason: str


class MessageRelay:
    """A service that publishes the outbox. The service holds a separate connection while this worker is the relay.

    `has_publisher` is set if this worker publishes, or knows that another worker does.
    """

    name = "relay"
    interval_s = KEEP_EVERY_S

    def __init__(self, environment: WorkerEnvironment, transport: JetStream) -> None:
        self.wake = asyncio.Event()
        self.has_turn = False
        self.has_publisher = False
        self.published = 0
        self._target = environment.plan.target
        self.auditor = MessageAuditor(
            self._run, transport=transport, channel=self._target.channel, events=environment.events
        )
        self.fullness = StreamFullness(environment)
        self._session = environment.session
        self._own: Session | None = None
        self._identity = environment.identity
        self._transport = transport
        self._events = environment.events
        self._clock = environment.clock
        self._random = environment.random
        self._window = WINDOW if transport.share is None else min(WINDOW, transport.share)
        self._holder = self._identity.worker_id
        self._hints = 0
        self._hint_rate = HintRate()
        self._queues: set[str] = set()
        self._listens = True
        self._is_closed = False
        self._full: Mapping[str, int] = {}
        self._recorded_failing: bool | None = None
        self._nothing_since: float | None = None
        self._late_at: list[float] = []
        self._retries = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S)
        self._busy_at = self._check_at = self._keep_at = self._full_at = self._apart_until = 0.0

    def written(self) -> None:
        """Query the outbox soon, because it might have new rows. The call has no effect unless this worker is the relay.

        Nothing is published from the hint itself, because any role that can connect might have sent it.
        """
        if not self.has_turn or self._nothing_since is not None:
            return
        self._hints += 1
        self._check_at = 0.0
        self.wake.set()

    async def tick(self) -> float | None:
        """Do the work that is due: renew the turn as relay, publish, or check a part of the outbox."""
        if self._hints or not self.has_turn:
            await self._clock.sleep(self._hint_rate.pause_s(self._clock.monotonic()))
        apart_s = self._apart_until - self._clock.monotonic()
        if self._is_closed or not self._transport.is_up or apart_s > 0:
            self.has_publisher = False
            await self.release()
            return max(KEEP_EVERY_S, apart_s)
        if not await self._keeps_turn():
            return TURN_S * self._random.uniform(0.5, 0.75)
        try:
            return await self._round()
        except (DatabaseUnreachable, DatabaseReadOnly):
            self._check_at = 0.0  # the rows of unconfirmed messages are still in the outbox
            return KEEP_EVERY_S

    async def close(self) -> None:
        """Stop publishing."""
        self._is_closed = True
        await self.release()

    async def release(self) -> None:
        """Stop being the relay, so that another worker can publish."""
        if not self.has_turn:
            return
        self.has_turn = False
        self._hints = 0
        session, self._own = self._own, None
        try:
            await self._session.run(messages.let_relay_go(self._holder), patience_s=0)
        except DatabaseError:
            pass  # the turn expires by itself
        finally:
            if session is not None:
                await session.drop()

    async def _keeps_turn(self) -> bool:
        now = self._clock.monotonic()
        if self.has_turn and now < self._keep_at:
            return True
        session = self._session if self._own is None else self._own
        holder = self._holder if self.has_turn else self._identity.worker_id
        hold = messages.hold_relay(holder, taken_ms=int(TURN_S * 1_000), channel=self._target.channel)
        try:
            has_turn = await session.run(hold, patience_s=_PATIENCE_S)
            self.has_publisher = True
        except DatabaseError:
            has_turn = False
        finally:
            if session is not self._session and session is not self._own:
                await session.drop()  # the turn was released in the meantime, but a retry has reconnected
        if self._is_closed:
            return False  # if the statement took the turn, the turn expires by itself
        self._keep_at = now + KEEP_EVERY_S
        if has_turn and not self.has_turn:
            self._begin(holder)
        elif not has_turn and self.has_turn:
            await self.release()
        return has_turn

    def _begin(self, holder: str) -> None:
        self._holder, self.has_turn, self._listens, self._recorded_failing = holder, True, True, None
        self._own = Session(
            self._target, f"{self._identity.tree_session} relay", random=self._random, keyed=True
        )
        self._nothing_since, self._check_at = None, 0.0
        self._queues.clear()
        self.auditor.begin()

    async def _round(self) -> float:
        now = self._clock.monotonic()
        hints, self._hints = self._hints, 0
        if hints > MANY_HINTS:
            await self._busy(now)
        if now >= self._check_at or (not self._listens and self._nothing_since is None):
            self._late_at = [at for at in self._late_at if at > now]
            self._check_at = min([now + CHECK_EVERY_S, *self._late_at])
            if await self._publish_due(now):
                return 0.0
        if now >= self.auditor.next_at and await self.auditor.go(now):
            self._check_at = 0.0
            return 0.0
        if self._nothing_since is None and not self._listens:
            if self._full:
                return CHECK_FULL_S if now - self._full_at < 1.0 else CHECK_FULL_SELDOM_S
            if now - self._busy_at < LINGER_S:
                return CHECK_BUSY_S
            await self._record_listens(True)
            # One more poll finds rows written before senders saw the change. The polls after it find late commits.
            self._check_at, self._late_at = 0.0, [now + seconds for seconds in LATE_COMMITS_S]
            return 0.0
        return max(0.0, min(self._check_at, self.auditor.next_at, self._keep_at) - self._clock.monotonic())

    async def _publish_due(self, now: float) -> bool:
        """Publish the rows that are due, and return whether there might be more."""
        portion = await self._run(messages.due_messages(portion=PORTION, window=self._window))
        await self._notify_of_full(portion.full)
        if portion.due_in_ms is not None:
            self._check_at = min(self._check_at, now + portion.due_in_ms / 1_000 + 0.001)
        if portion.full or len(portion.rows) + portion.gone >= PORTION:
            await self._busy(now)
        if portion.rows and not await self._publish([_message(row) for row in portion.rows]):
            return False
        return bool(portion.rows or portion.gone)

    async def _notify_of_full(self, full: Mapping[str, int]) -> None:
        """Notify workers of a full queue. The queue's new rows are waiting behind messages that perhaps no worker can claim."""
        new = {queue for queue, last in full.items() if last != self._full.get(queue)}
        self._full = full
        if new:
            self._full_at = self._clock.monotonic()
            await self._run(messages.tell_workers(new, channel=self._target.channel))

    async def _publish(self, published: Sequence[TaskMessage]) -> bool:
        """Publish these messages, and return whether all of them are known to have arrived."""
        if new := {each.queue for each in published} - self._queues:
            self._queues |= new
            await self._run(messages.tell_queues(new, channel=self._target.channel))
        places = await self._transport.publish(published)
        self.fullness.judge(self._transport.refusal)
        arrived = {
            each.number: place for each, place in zip(published, places, strict=True) if place is not None
        }
        now = self._clock.monotonic()
        if not arrived:
            await self._nothing_arrived(now)
            return False
        self._nothing_since = None
        self._retries.reset()
        if self._recorded_failing is not False:
            await self._record_failing(False)
        self._hint_rate.paid_off()
        self.published += sum(place != NOT_CARRIED for place in arrived.values())
        for each in published:
            if each.cleared and each.number in arrived and not each.times:
                self._events.emit(TaskReenqueued(task_id=each.task_id, reason=each.reason or ""))
        await self._run(messages.mark_published(arrived))
        if unsent := {each.queue for each in published if arrived.get(each.number) == NOT_CARRIED}:
            await self._run(messages.tell_workers(unsent, channel=self._target.channel))
        self.auditor.published(len(arrived), now=now)
        if len(arrived) < len(published):
            self._check_at = now + FIRST_RETRY_S
            return False
        return True

    async def _nothing_arrived(self, now: float) -> None:
        if self._nothing_since is None:
            self._nothing_since = now
        self._check_at = now + self._retries.next()
        if now - self._nothing_since >= NOTHING_S and self._transport.is_up and not self._recorded_failing:
            problem = self._transport.problem or _NO_ANSWER
            self._events.emit(MessagesNotPublished(worker_id=self._identity.worker_id, problem=problem))
            await self._record_failing(True)
            # Senders notify workers from now on. For their earlier rows, the workers are notified here.
            waiting = await self._run(messages.queues_told())
            await self._run(messages.tell_workers(waiting, channel=self._target.channel))
        if now - self._nothing_since >= GIVE_UP_S:
            self._apart_until = now + APART_S

    async def _busy(self, now: float) -> None:
        self._busy_at = now
        if self._listens:
            await self._record_listens(False)

    async def _record_listens(self, listens: bool) -> None:
        await self._run(messages.relay_listens(self._holder, listens=listens))
        self._listens = listens

    async def _record_failing(self, failing: bool) -> None:
        await self._run(messages.relay_failing(self._holder, failing=failing))
        self._recorded_failing = failing

    async def _run(self, statement: Statement[T]) -> T:
        session = self._own
        if session is None:  # the turn was released during this round
            raise DatabaseUnreachable("The turn to publish was released meanwhile.", fix="none is needed.")
        try:
            return await session.run(statement, patience_s=_PATIENCE_S)
        finally:
            if self._own is not session:
                await session.drop()  # the turn was released in the meantime, but a retry has reconnected


def _message(row: OutboxRow) -> TaskMessage:
    return TaskMessage(
        number=row.id,
        task_id=row.task_id,
        queue=row.queue,
        times=row.times,
        fence=row.fence,
        cleared=row.reason is not None,
        reason=row.reason,
    )
