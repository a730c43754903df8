"""What carries messages of tasks from a relay to workers, as both see it: NATS JetStream, or whatever else keeps its promises.

What lives here: the message and the protocols of both ends. What may not: connections, and truth. A message may be lost, repeated, late,
overtaken or stuck; whoever gets one asks the database what to make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol
from uuid import UUID

import msgspec
from msgspec import Struct

NOT_CARRIED: Final = 0
"""The place of a message whose queue has no consumer: it is in no stream, and the database tells workers of its task."""


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """This task may be claimable. `number` is that of its row in the outbox, `times` how often that row was published before.

    `cleared`: it was taken from a worker that died, for this `reason`. `fence` is that of its last claim, 0 before the first.
    """

    task_id: UUID
    queue: str
    number: int
    times: int = 0
    fence: int = 0
    cleared: bool = False
    reason: str | None = None

    @property
    def id(self) -> str:
        """What makes a repeated publication of the same one harmless. Numbers begin anew with a schema that is made anew."""
        return f"{self.task_id}.{self.number}.{self.times}"


class Delivered(Protocol):
    """One delivery of a message; exactly one of `ack`, `give_back` and `reject` ends it. None of them raises or waits.

    What is not ended is delivered again after the acknowledgement wait; `keep` begins that wait anew. The word of a delivery that
    is old by now is obeyed all the same: nothing here is a fence.
    """

    message: Message | None
    """None where nobody understands it."""
    times: int
    """How often it has been delivered, this one included."""

    def ack(self) -> None:
        """It is done with, and leaves the stream."""
        ...

    def keep(self) -> None:
        """Somebody is at work on it."""
        ...

    def give_back(self, *, delay_s: float) -> None:
        """Deliver it again, to anybody, in so many seconds."""
        ...

    def reject(self) -> None:
        """It makes no sense, and leaves the stream."""
        ...


class Tap(Protocol):
    """The deliveries of one queue, to this worker."""

    def want(self, room: int) -> None:
        """So many deliveries have room from now on, less one for each that comes; a later word replaces this one.

        A few more than asked for may come: requests that are under way cannot be taken back before they expire.
        """
        ...

    def close(self) -> None:
        """Want nothing more; what comes all the same is given back."""
        ...


class Carrier(Protocol):
    """A link that keeps connecting again until it is closed."""

    @property
    def is_up(self) -> bool:
        """Whether messages can be carried at this moment, as far as is known; a dead link is noticed within seconds."""
        ...

    async def run(self, on_state: Callable[[bool], None]) -> None:
        """Connect, stay connected, see to the stream, which is made again where it is gone; until cancelled.

        `on_state` is told on every change, and at first; never raises for what the other side does.
        """
        ...

    async def publish(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """Puts messages into the stream; answers the place of each there, `NOT_CARRIED`, or None for those of which it is not known.

        What is published twice with one `Message.id` within the stream's window for duplicates is there once. Never raises for a link
        that is down: then all are None. Waits for at most a few seconds.
        """
        ...

    async def missing(self, places: Mapping[int, UUID]) -> set[int]:
        """Those of these places at which the stream holds no message of the task named; raises ConnectionError where it cannot be asked.

        A stream that was made anew counts anew: there may be another message at that place.
        """
        ...

    def tap(self, queue: str, on_delivered: Callable[[Delivered], None]) -> Tap:
        """Deliveries of a queue from now on, whenever the link is up; `on_delivered` is called in the loop, and must not block."""
        ...


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return msgspec.json.encode(message)


_decoder = msgspec.json.Decoder(Message)


def decode(data: bytes) -> Message | None:
    """The message in these bytes; None where there is none."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
