"""Remove messages of finished tasks from the stream, and stop publishing queues whose messages no worker takes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from everbeat.domain.delivery import USELESS, judge
from everbeat.errors import DatabaseError
from everbeat.nats.jetstream import JetStream
from everbeat.nats.relay import MessageRelay
from everbeat.nats.stream_plan import Stored
from everbeat.runtime.clock import Backoff
from everbeat.runtime.events import Event
from everbeat.store.messages import delivery_facts, messages_lying, queues_unserved
from everbeat.worker.environment import WorkerEnvironment

CHECK_S: Final = 5.0
LONGEST_PAUSE_S: Final = 20.0
"""The longest time in seconds between two checks while nothing is found."""
THOROUGH_S: Final = 25.0
"""Seconds between two checks that include the messages of running tasks."""
SETTLED_S: Final = 10.0
"""Messages younger than this many seconds are kept, because a worker might be about to acknowledge them."""
PORTION: Final = 500


class MessagesNotTaken(Event, frozen=True, kw_only=True):
    """No live worker that uses NATS serves this queue, so the messages of its finished tasks were removed from the stream.

    The queue is not published until a worker requests its messages. Until then, PostgreSQL notifies workers of its tasks.
    """

    component = "nats"
    level = logging.WARNING
    queue: str
    removed: int


class StreamSweeper:
    """A service that removes messages of finished tasks if this worker is the relay. `removed` counts the removed messages.

    `not_taken` holds the unpublished queues that no live worker serves through NATS. Other unpublished queues have such a worker, but the
    worker has no free slots, or was idle and has not yet requested the queue's messages.
    """

    name = "messages of ended tasks"
    interval_s = CHECK_S

    def __init__(self, environment: WorkerEnvironment, transport: JetStream, relay: MessageRelay) -> None:
        self.wake = relay.fullness.sweep_due
        self.removed = 0
        self.not_taken: frozenset[str] = frozenset()
        self._session = environment.session
        self._transport = transport
        self._relay = relay
        self._stale_ms = environment.plan.recovery.running_stale_threshold_ms
        self._events = environment.events
        self._clock = environment.clock
        self._checks = Backoff(first_s=CHECK_S, longest_s=LONGEST_PAUSE_S)
        self._urgent_sweeps = 0
        self._thorough_at = 0.0
        self._removed_of: Counter[str] = Counter()
        self._reported: set[str] = set()

    async def tick(self) -> float | None:
        """Check the stream once if this worker is the relay."""
        sweeps = self._relay.fullness.sweeps
        is_urgent, self._urgent_sweeps = sweeps > self._urgent_sweeps, sweeps
        if not self._relay.has_turn:
            self._transport.not_taken.clear()
            self.not_taken = frozenset()
            self._removed_of.clear()
            self._reported.clear()
            return None
        try:
            removed = await self._clear(older_s=0.0 if is_urgent else SETTLED_S)
            await self._settle_taken(removed)
            await self._report(removed)
        except (ConnectionError, DatabaseError):
            return None
        if removed or self._transport.not_taken:
            self._checks.reset()
        return self._checks.next()

    async def _clear(self, *, older_s: float) -> Counter[str]:
        """Remove useless messages from each subject with more messages than the rows explain. Return the number of removed messages by queue."""
        stored = self._transport.stored
        held = await stored.count()
        removed: Counter[str] = Counter()
        if held:
            # A running task might still have a message, so the messages of running tasks are checked less often.
            now = self._clock.monotonic()
            is_thorough = now >= self._thorough_at
            if is_thorough:
                self._thorough_at = now + THOROUGH_S
            lying = await self._session.run(messages_lying(), patience_s=0)
            expected = {
                stored.subject(queue): each.out + (0 if is_thorough else each.held)
                for queue, each in lying.items()
            }
            for subject, count in held.items():
                if count > expected.get(subject, 0):
                    removed += await self._clear_subject(subject, older_s=older_s)
        return removed

    async def _clear_subject(self, subject: str, *, older_s: float) -> Counter[str]:
        stored = self._transport.stored
        removed: Counter[str] = Counter()
        first, all_gone = 1, True
        while read := await stored.read(subject, first=first, limit=PORTION, older_s=older_s):
            gone = await self._useless(read)
            kept = [each.place for each in read if each not in gone]
            before = min(kept, default=read[-1].place + 1) if all_gone and gone else None
            if gone:
                await stored.remove(subject, [each.place for each in gone], before=before)
                removed.update("" if each.message is None else each.message.queue for each in gone)
                self.removed += len(gone)
            all_gone = all_gone and not kept
            first = read[-1].place + 1
        return removed

    async def _useless(self, read: Sequence[Stored]) -> set[Stored]:
        ids: list[UUID] = list({each.message.task_id for each in read if each.message is not None})
        facts = await self._session.run(delivery_facts(ids, stale_ms=self._stale_ms), patience_s=0)
        return {
            each
            for each in read
            if (message := each.message) is None
            or judge(facts.get(message.task_id), fence=message.fence, worker_id="", names=()) in USELESS
        }

    async def _settle_taken(self, removed: Counter[str]) -> None:
        """Decide which queues are published. A queue with useless messages is not published until a worker requests its messages."""
        not_taken = self._transport.not_taken
        for queue in sorted({*removed, *not_taken} - {""}):
            if await self._transport.stored.is_wanted(queue):
                not_taken.discard(queue)
            elif removed[queue]:
                not_taken.add(queue)

    async def _report(self, removed: Counter[str]) -> None:
        """Report each unpublished queue once if no live worker serves it through NATS."""
        not_carried = frozenset(self._transport.not_taken)
        self._removed_of = Counter({queue: self._removed_of[queue] + removed[queue] for queue in not_carried})
        unserved = await self._session.run(queues_unserved(not_carried), patience_s=0) if not_carried else []
        self.not_taken = frozenset(unserved)
        for queue in sorted(self.not_taken - self._reported):
            self._reported.add(queue)
            self._events.emit(MessagesNotTaken(queue=queue, removed=self._removed_of[queue]))
