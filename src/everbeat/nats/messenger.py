"""A worker's messenger. It receives task messages while the worker has free slots, and can publish the message outbox."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.delivery import ACKNOWLEDGED, DeliveryVerdict, Facts, judge
from everbeat.errors import DatabaseError
from everbeat.hints.topics import MessagesWritten
from everbeat.nats.jetstream import JetStream
from everbeat.nats.pull_consumer import JetStreamDelivery, PullConsumer
from everbeat.nats.relay import MessageRelay
from everbeat.nats.stream_plan import TaskMessage
from everbeat.nats.stream_sweeper import StreamSweeper
from everbeat.runtime.clock import Backoff
from everbeat.runtime.events import Event
from everbeat.store.messages import delivery_facts, queues_told
from everbeat.worker.claim.slots import Slots
from everbeat.worker.environment import Messenger, MessengerService, WorkerEnvironment
from everbeat.worker.leases import LeaseTable
from everbeat.worker.messages import TasksEnqueued

NAMED: Final = 20
"""The maximum number of queues or tasks that are listed in one field of a worker's state or of an event."""
MOST_ROOM: Final = 500
JUDGE_AFTER_S: Final = 0.05
"""Seconds before a message is judged. By then, the claim that the message triggered has usually run and the rest of its batch has arrived."""
JUDGE_AGAIN_S: Final = 0.25
CHECKS: Final = 2
"""A message is returned after its task has been found claimable but unclaimed this many times."""
AT_ONCE: Final = 500
LATER_S: Final = 1.0


class TaskSkippedActiveElsewhere(Event, frozen=True, kw_only=True):
    """Messages arrived for tasks that are running on another worker. The messages were acknowledged, and no code ran."""

    component = "nats"
    count: int
    task_ids: tuple[UUID, ...]


class _Held(Struct):
    """A delivery that has not been settled. `checks` counts how often its task has been found claimable."""

    delivered: JetStreamDelivery
    message: TaskMessage
    judge_at: float
    kept_at: float
    checks: int = 0


class Deliveries:
    """A service that requests messages of queues, and holds each message until its delivery is settled.

    `ack_wait_s` is the number of seconds after which NATS redelivers an unacknowledged message.
    """

    name = "deliveries"

    def __init__(
        self,
        environment: WorkerEnvironment,
        transport: JetStream,
        *,
        table: LeaseTable,
        slots: Slots,
        ack_wait_s: float,
    ) -> None:
        self.wake = asyncio.Event()
        self.interval_s = 1.0
        self.verdicts: Counter[str] = Counter()
        self._session = environment.session
        self._identity = environment.identity
        self._definitions = environment.plan.definitions
        self._stale_ms = environment.plan.recovery.running_stale_threshold_ms
        self._events = environment.events
        self._clock = environment.clock
        self._unreachable = Backoff(first_s=1.0, longest_s=30.0, spread=(0.5, 1.0), random=environment.random)
        # A worker that can take the message also polls for tasks, more often than every 15 s.
        self._untaken = Backoff(first_s=0.05, longest_s=15.0)
        self._send = environment.send
        self._table = table
        self._slots = slots
        self._ack_wait_s = ack_wait_s
        self._transport = transport
        self._consumers: dict[str, PullConsumer] = {}
        self._is_leaving = False
        self._held: list[_Held] = []
        self._next_at = math.inf

    def __len__(self) -> int:
        return len(self._held)

    def consumes(self, queue: str) -> bool:
        """Return whether messages of this queue are received."""
        return queue in self._consumers

    def consume(self, queue: str) -> None:
        """Receive messages of this queue from now on."""
        if queue not in self._consumers and not self._is_leaving:
            self._consumers[queue] = self._transport.consume(queue, self._arrived)
            self.request()

    def request(self) -> None:
        """Request one message for each task that this worker can still claim, less the held messages of unclaimed tasks."""
        if self._is_leaving:
            return
        unclaimed = sum(self._table.by_task(each.message.task_id) is None for each in self._held)
        room = min(MOST_ROOM, max(0, self._slots.room - unclaimed))
        for consumer in self._consumers.values():
            consumer.want(room)

    def _arrived(self, delivered: JetStreamDelivery) -> None:
        if self._is_leaving:
            delivered.give_back(delay_s=0.0)
            return
        message = delivered.message
        if message is None:
            self.verdicts["unreadable"] += 1
            delivered.reject()
            self.request()
            return
        now = self._clock.monotonic()
        self._held.append(_Held(delivered, message, judge_at=now + JUDGE_AFTER_S, kept_at=now))
        self._send(TasksEnqueued(message.queue))
        if self._next_at > now + JUDGE_AFTER_S:
            self._next_at = now + JUDGE_AFTER_S
            self.wake.set()

    def beaten(self) -> None:
        """Extend the acknowledgement wait for tasks that are running on this worker, after PostgreSQL has acknowledged a heartbeat.

        The wait is extended only here, so that a message's wait never outlives the lease of its task.
        """
        now = self._clock.monotonic()
        for each in self._held:
            ours = self._table.by_task(each.message.task_id) is not None
            if ours and now - each.kept_at >= self._ack_wait_s / 3:
                each.delivered.keep()
                each.kept_at = now

    async def tick(self) -> float | None:
        """Judge the messages that are due. Return the seconds until the next message is due, or None if no message is held."""
        now = self._clock.monotonic()
        asked: list[_Held] = []
        for each in self._held:
            if each.judge_at > now:
                continue
            if self._table.by_task(each.message.task_id) is not None:
                each.judge_at = now + JUDGE_AGAIN_S
            elif len(asked) < AT_ONCE:
                asked.append(each)
        if asked:
            await self._judge(asked)
        self._next_at = min((each.judge_at for each in self._held), default=math.inf)
        return max(0.0, self._next_at - self._clock.monotonic()) if self._held else None

    def leave(self) -> None:
        """Stop receiving messages, and return those of tasks that this worker does not hold, because it no longer claims tasks."""
        self._is_leaving = True
        for consumer in self._consumers.values():
            consumer.close()
        self._give_back([each for each in self._held if self._table.by_task(each.message.task_id) is None])

    def close(self) -> None:
        """Return all messages, because this worker is shutting down. The next receiver of each message reads the state of its task."""
        self._give_back(self._held)

    def _give_back(self, returned: Sequence[_Held]) -> None:
        for each in returned:
            each.delivered.give_back(delay_s=0.0)
        self._forget(returned)

    async def _judge(self, asked: Sequence[_Held]) -> None:
        ids = list({each.message.task_id for each in asked})
        try:
            facts = await self._session.run(delivery_facts(ids, stale_ms=self._stale_ms), patience_s=0)
        except DatabaseError:
            # The tasks' states are unknown, so no message is acknowledged. Another worker might reach the database, or this worker might later.
            for each in asked:
                each.delivered.give_back(delay_s=self._unreachable.delay(each.delivered.times))
                self.verdicts["unreachable"] += 1
            self._forget(asked)
            return
        over: list[_Held] = []
        elsewhere: list[UUID] = []
        for each in asked:
            message = each.message
            known = facts.get(message.task_id)
            verdict = judge(
                known,
                fence=message.fence,
                worker_id=self._identity.worker_id,
                names=self._definitions,
                is_understood=known is None or self._understands(known),
            )
            if self._ends(each, verdict):
                over.append(each)
                self.verdicts[verdict] += 1
                if verdict is DeliveryVerdict.ELSEWHERE:
                    elsewhere.append(message.task_id)
        self._forget(over)
        if elsewhere:
            self._events.emit(
                TaskSkippedActiveElsewhere(count=len(elsewhere), task_ids=tuple(elsewhere[:NAMED]))
            )

    def _understands(self, facts: Facts) -> bool:
        definition = self._definitions.get(facts.name)
        return facts.needs is None or definition is None or definition.codec.accepts.fits_needs(facts.needs)

    def _ends(self, each: _Held, verdict: DeliveryVerdict) -> bool:
        """Apply the verdict, and return whether the delivery is settled."""
        match verdict:
            case DeliveryVerdict.OURS:
                each.judge_at = self._clock.monotonic() + JUDGE_AGAIN_S
                return False
            case DeliveryVerdict.UNKNOWN:
                each.delivered.reject()
            case DeliveryVerdict.STALE:
                each.delivered.give_back(delay_s=LATER_S)
            case DeliveryVerdict.CLAIMABLE if each.checks + 1 < CHECKS and self._slots.room > 0:
                each.checks += 1
                self._send(TasksEnqueued(each.message.queue))
                each.judge_at = self._clock.monotonic() + JUDGE_AFTER_S * 2
                return False
            case DeliveryVerdict.CLAIMABLE | DeliveryVerdict.FOREIGN | DeliveryVerdict.KEPT_BACK:
                each.delivered.give_back(delay_s=self._untaken.delay(each.delivered.times))
            case _:
                assert verdict in ACKNOWLEDGED
                each.delivered.ack()
        return True

    def _forget(self, ended: Sequence[_Held]) -> None:
        gone = {id(each) for each in ended}
        self._held = [each for each in self._held if id(each) not in gone]
        self.request()


DISCOVER_EVERY_S: Final = 10.0
DISCOVER_APART_S: Final = 0.2
"""Hints about unknown queues cause at most one query per this many seconds, however many hints arrive."""


class QueueDiscovery:
    """A service of a worker that serves all queues. It makes the worker receive the messages of every queue with rows in the outbox."""

    name = "queues of messages"
    interval_s = DISCOVER_EVERY_S

    def __init__(self, environment: WorkerEnvironment, deliveries: Deliveries) -> None:
        self.wake = asyncio.Event()
        self._session = environment.session
        self._clock = environment.clock
        self._deliveries = deliveries

    async def tick(self) -> float | None:
        """Query the queues once. The next query follows at least `DISCOVER_APART_S` seconds later."""
        try:
            for queue in await self._session.run(queues_told(), patience_s=0):
                self._deliveries.consume(queue)
        except DatabaseError:
            pass  # the next tick repeats the query
        await self._clock.sleep(DISCOVER_APART_S)
        return None


class NatsAway(Event, frozen=True, kw_only=True):
    """Messages are not reaching this worker. PostgreSQL notifies it in the meantime, so no task has to wait for messages."""

    component = "nats"
    level = logging.WARNING
    worker_id: str


class NatsBack(Event, frozen=True, kw_only=True):
    """Messages are reaching this worker again."""

    component = "nats"
    worker_id: str


class NatsMessenger(Messenger):
    """The `Messenger` of a worker, over one link to NATS."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        transport: JetStream,
        *,
        table: LeaseTable,
        slots: Slots,
        ack_wait_s: float,
    ) -> None:
        self._environment = environment
        self._transport = transport
        self._was_up: bool | None = None
        self._is_leaving = False
        self.deliveries = Deliveries(environment, transport, table=table, slots=slots, ack_wait_s=ack_wait_s)
        self.relay = MessageRelay(environment, transport)
        self._sweeper = StreamSweeper(environment, transport, self.relay)
        queues = environment.plan.queues
        self._first = {"default", *environment.plan.queue_priorities} if queues is None else set(queues)
        self._discovery = QueueDiscovery(environment, self.deliveries) if queues is None else None
        parts = (self.relay, self.deliveries, self._sweeper, self._discovery)
        self.parts: Sequence[MessengerService] = [part for part in parts if part is not None]

    @property
    def delivers(self) -> bool:
        """Return whether messages arrive and a relay publishes them."""
        return self._transport.is_up and self.relay.has_publisher

    def start(self) -> None:
        """Connect, and receive messages of every known queue."""
        self._environment.scope.start(self._transport.run(self._on_state), name="messages")
        for queue in sorted(self._first):
            self.deliveries.consume(queue)

    def written(self, hint: MessagesWritten) -> None:
        """Publish rows that were written to the outbox. If this worker does not know the queue in the hint, query the queues.

        A consumer is created only for a queue that has rows, because the queue name in a hint might be made up.
        """
        if self._discovery is not None and hint.queue and not self.deliveries.consumes(hint.queue):
            self._discovery.wake.set()
        self.relay.written()

    def turn_free(self) -> None:
        """Try to become the relay, because the previous relay has stopped."""
        self.relay.wake.set()

    def beaten(self) -> None:
        """Extend the acknowledgement wait for tasks that are running on this worker."""
        self.deliveries.beaten()

    def room_changed(self) -> None:
        """Request one message for each task that this worker can still claim."""
        self.deliveries.request()

    def state(self) -> dict[str, Any]:
        """Return the state as JSON: whether messages arrive (null: unknown), whether this worker is the relay, and message counts.

        `refusal` says why the stream has no room. `refused` lists queues whose consumer NATS rejects, with the reason. `not_taken` lists
        queues that are not published because no live worker serves them through NATS. Both fields contain only the first few queues.
        `denied` lists the permissions that the NATS user lacks.
        """
        return {
            "up": None if self._was_up is None else self._transport.is_up,
            "relay": self.relay.has_turn,
            "held": len(self.deliveries),
            "published": self.relay.published,
            "republished": self.relay.auditor.republished,
            "removed": self._sweeper.removed,
            "refusal": self.relay.fullness.refusal,
            "refused": dict(sorted(self._transport.without.items())[:NAMED]),
            "not_taken": sorted(self._sweeper.not_taken)[:NAMED],
            "denied": list(self._transport.denied),
            "ended": dict(self.deliveries.verdicts),
        }

    async def leave(self) -> None:
        """Stop receiving messages, return those of tasks that are not running here, and stop being the relay."""
        self._is_leaving = True
        self.deliveries.leave()
        await self.relay.close()

    async def close(self) -> None:
        """Leave, and return all held messages."""
        await self.leave()
        self.deliveries.close()

    def _on_state(self, is_up: bool) -> None:
        if self._was_up is not is_up and not self._is_leaving:
            worker_id = self._environment.identity.worker_id
            if not is_up:
                self._environment.events.emit(NatsAway(worker_id=worker_id))
            elif self._was_up is not None:
                self._environment.events.emit(NatsBack(worker_id=worker_id))
            self._was_up = is_up
        self.relay.wake.set()
        self.deliveries.request()
        self._environment.send(TasksEnqueued())
