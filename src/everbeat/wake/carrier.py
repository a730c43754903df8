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
"""The place of a message that is in no stream: its queue has no consumer or nobody takes its messages, or the stream is full.

PostgreSQL notifies workers of its task."""


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


class Stored(Struct, frozen=True, kw_only=True):
    """One message as the stream holds it. `message` is None where nobody understands it."""

    place: int
    message: Message | None


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


class Stock(Protocol):
    """The messages in the stream, whether a consumer delivers them or not. Each method raises ConnectionError where it cannot be asked."""

    async def count(self) -> Mapping[str, int]:
        """Count the messages by subject; subjects without any are left out."""
        ...

    def subject(self, queue: str) -> str:
        """Where messages of a queue are."""
        ...

    async def read(self, subject: str, *, first: int, limit: int, older_s: float) -> Sequence[Stored]:
        """Read at most `limit` messages from a place on, up to the first that is younger than `older_s` by the server's clock."""
        ...

    async def take_out(self, subject: str, places: Sequence[int], *, before: int | None) -> None:
        """Remove the messages at these places. `before`: every message of this subject in front of that place goes, by one request."""
        ...

    async def is_wanted(self, queue: str) -> bool:
        """Return whether a worker waits for messages of this queue at this moment."""
        ...


class Carrier(Protocol):
    """A link that keeps connecting again until it is closed."""

    stock: Stock
    not_taken: set[str]
    """Queues that are not carried because no worker takes their messages: whoever publishes fills this."""
    share: int | None
    """At most this many messages of one queue may be in the stream and wait, so that other queues have room. None: no bound."""

    @property
    def refusal(self) -> str | None:
        """Why the stream had no room for a message of the last publication, None where it had."""
        ...

    @property
    def without(self) -> Mapping[str, str]:
        """The queues for which the server refuses a consumer, each with its reason."""
        ...

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
