"""A worker that messages tell of tasks: it takes deliveries as far as it has room, and publishes when it is its turn.

What lives here: the taps, and what follows when the carrier is away. What may not: judging and publishing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event
from everbeat.store.messages import queues_told
from everbeat.wake.carrier import Carrier, Delivered, Tap
from everbeat.wake.topics import MessagesWritten
from everbeat.worker.deliveries import Deliveries
from everbeat.worker.leftovers import Leftovers
from everbeat.worker.messenger import Part, Surroundings
from everbeat.worker.relay import Relay

MOST_ROOM: Final = 500
NAMED: Final = 20
"""The snapshot of a worker names at most this many queues of a kind."""
LEARN_EVERY_S: Final = 10.0
LEARN_APART_S: Final = 0.2
"""Hints of unknown queues cause at most one query in this time, however many arrive."""


class NatsAway(Event, frozen=True, kw_only=True):
    """Messages do not reach this worker: the database tells it of tasks meanwhile, and nothing waits for messages."""

    room = "worker"
    level = logging.WARNING
    worker_id: str


class NatsBack(Event, frozen=True, kw_only=True):
    """Messages reach this worker."""

    room = "worker"
    worker_id: str


class Courier:
    """Messages by one carrier. `ack_wait_s`: what the carrier waits for a word before it delivers a message again."""

    def __init__(self, around: Surroundings, carrier: Carrier, *, ack_wait_s: float) -> None:
        plan = around.plan
        self._around = around
        self._carrier = carrier
        self._taps: dict[str, Tap] = {}
        self._was_up: bool | None = None
        self._is_leaving = False
        self.deliveries = Deliveries(
            around.session, table=around.table, room=self._room, look=around.look, on_ended=self.room_changed,
            worker_id=around.worker_id, definitions=plan.definitions, ack_wait_s=ack_wait_s,
            stale_ms=plan.recovery.running_stale_threshold_ms, events=around.events, clock=around.clock, random=around.random,
        )  # fmt: skip
        self.relay = Relay(
            plan.target, giving=around.session, session_name=around.session_name, carrier=carrier, worker_id=around.worker_id,
            events=around.events, clock=around.clock, random=around.random,
        )  # fmt: skip
        self._leftovers = Leftovers(
            around.session, publishes=lambda: self.relay.has_turn, carrier=carrier,
            stale_ms=plan.recovery.running_stale_threshold_ms, events=around.events, clock=around.clock,
        )  # fmt: skip
        self.relay.fullness.on_full = self._leftovers.stream_full
        queues = plan.config.queues
        self._first = {"default", *plan.queue_priorities} if queues is None else set(queues)
        self._learning = _Learning(self._learn, around.clock) if queues is None else None
        own = (self.relay, self.deliveries, self._leftovers)
        self.parts: Sequence[Part] = own if self._learning is None else (*own, self._learning)

    @property
    def tells(self) -> bool:
        """Whether messages arrive, and somebody publishes what is to be told."""
        return self._carrier.is_up and self.relay.is_manned

    def start(self) -> None:
        """Connect, and take deliveries of every queue that is known."""
        self._around.nursery.start(self._carrier.run(self._on_state), name="messages")
        for queue in sorted(self._first):
            self._tap(queue)

    def written(self, hint: MessagesWritten) -> None:
        """Query the outbox: it might have something to publish, and a queue that this worker does not know.

        A consumer is made only for a queue that has rows: the name in the hint might be invented.
        """
        if self._learning is not None and hint.queue and hint.queue not in self._taps:
            self._learning.wake.set()
        self.relay.written()

    def turn_free(self) -> None:
        """Whoever published has ended: perhaps it is this worker's turn."""
        self.relay.wake.set()

    def beaten(self) -> None:
        """What runs here is in progress."""
        self.deliveries.beaten()

    def room_changed(self) -> None:
        """Take as many deliveries as tasks could be claimed, less those in hand that may be."""
        if self._is_leaving:
            return
        room = min(MOST_ROOM, max(0, self._room() - self.deliveries.unclaimed))
        for tap in self._taps.values():
            tap.want(room)

    def state(self) -> dict[str, Any]:
        """As JSON: whether messages arrive (null: not known yet), whether this worker publishes, how many are in hand, and what was done with
        the others. `refusal`: why the stream has no room. `refused`: queues whose consumer NATS refuses, with the reason; `not_taken`: queues
        whose messages no worker takes; both name the first few."""
        return {
            "up": None if self._was_up is None else self._carrier.is_up,
            "relay": self.relay.has_turn,
            "held": len(self.deliveries),
            "published": self.relay.published,
            "republished": self.relay.patrol.republished,
            "removed": self._leftovers.removed,
            "refusal": self.relay.fullness.refusal,
            "refused": dict(sorted(self._carrier.without.items())[:NAMED]),
            "not_taken": sorted(self._carrier.not_taken)[:NAMED],
            "ended": dict(self.deliveries.verdicts),
        }

    async def leave(self) -> None:
        """Take no more, give back what is not at work here, and leave publishing to others."""
        self._is_leaving = True
        for tap in self._taps.values():
            tap.close()
        self.deliveries.give_back_unclaimed()
        await self.relay.close()

    async def close(self) -> None:
        """Give back whatever is in hand."""
        await self.leave()
        self.deliveries.give_all_back()

    def _room(self) -> int:
        if self._around.is_quiet():
            return 0
        return sum(lane.wanted for lane in self._around.lanes if not lane.suspects)

    def _tap(self, queue: str) -> None:
        if queue not in self._taps and not self._is_leaving:
            self._taps[queue] = self._carrier.tap(queue, self._arrived)
            self.room_changed()

    def _arrived(self, delivered: Delivered) -> None:
        if self._is_leaving:
            delivered.give_back(delay_s=0.0)
        else:
            self.deliveries.arrived(delivered)

    def _on_state(self, is_up: bool) -> None:
        if self._was_up is not is_up and not self._is_leaving:
            worker_id = self._around.worker_id()
            if not is_up:
                self._around.events.emit(NatsAway(worker_id=worker_id))
            elif self._was_up is not None:
                self._around.events.emit(NatsBack(worker_id=worker_id))
            self._was_up = is_up
        self.relay.wake.set()
        self.room_changed()
        self._around.look(None)

    async def _learn(self) -> None:
        """Take deliveries of every queue that has rows in the outbox."""
        try:
            for queue in await self._around.session.run(queues_told(), patience_s=0):
                self._tap(queue)
        except DatabaseError:
            pass  # the next time


class _Learning:
    """A service: a worker of any queue learns which there are."""

    name = "queues of messages"
    interval_s = LEARN_EVERY_S

    def __init__(self, learn: Callable[[], Awaitable[None]], clock: Clock) -> None:
        self.wake = asyncio.Event()
        self._learn = learn
        self._clock = clock

    async def tick(self) -> float | None:
        """Query the queues once; the next query does not follow before `LEARN_APART_S`."""
        await self._learn()
        await self._clock.sleep(LEARN_APART_S)
        return None
