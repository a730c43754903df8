"""Hints by NATS: each message says that its queue has work, and is done with once that was told.

What lives here: the face of a carrier as a transport of hints like the others. What may not: messages that somebody ends himself, for which
the carrier has taps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from everbeat.wake import OnHint, OnState
from everbeat.wake.carrier import Carrier, Delivered, Tap
from everbeat.wake.delivery import Delivery
from everbeat.wake.topics import TasksReady

ROOM: Final = 100
"""Messages of one queue that may be on their way here."""


class NatsWake:
    """Hints of these queues. Nobody else runs the carrier; what is told of it is called `name` in the log."""

    def __init__(self, carrier: Carrier, queues: Sequence[str], *, name: str = "nats") -> None:
        self._carrier = carrier
        self._queues = tuple(queues)
        self._name = name

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:
        """Deliver hints until cancelled."""
        delivery = Delivery(self._name, on_hint=on_hint, on_state=on_state)
        running = asyncio.current_task()

        def on_carrier_state(up: bool) -> None:
            if up:
                delivery.connected()
            elif running is not None and running.cancelling():
                delivery.ended()
            else:
                delivery.lost("the link to NATS is down")

        taps = [self._tap(queue, delivery) for queue in self._queues]
        try:
            await self._carrier.run(on_carrier_state)
        finally:
            for tap in taps:
                tap.close()
            delivery.ended()

    def _tap(self, queue: str, delivery: Delivery) -> Tap:
        def on_delivered(delivered: Delivered) -> None:
            if delivered.message is None:
                delivered.reject()
            else:
                delivery.hint(TasksReady(delivered.message.queue))
                delivered.ack()
            tap.want(ROOM)

        tap = self._carrier.tap(queue, on_delivered)
        tap.want(ROOM)
        return tap
