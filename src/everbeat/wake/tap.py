"""Deliveries of one queue: asked for as there is room for them, asked for again whatever became of the request.

What lives here: JetStream's requests, statuses and acknowledgements. What may not: connections, and what to do with a message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from msgspec import Struct

from everbeat.wake.carrier import Delivered, Message, decode

EXPIRES_S: Final = 5
HEARTBEAT_S: Final = 1
MOST_QUIET_TICKS: Final = 3
"""So many ticks without a word, heartbeats included, and the request was lost, or the consumer is."""
LARGEST_REQUEST: Final = 500

_NS: Final = 1_000_000_000

_logger = logging.getLogger("everbeat.wake")


class Arrived(Protocol):
    """What a client hands over: a message or a status."""

    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str] | None: ...


class Speech(Protocol):
    """Sends a word if the link is up; a `kept` one is sent when it is up again."""

    def __call__(self, subject: str, data: bytes, /, *, kept: bool) -> None: ...


class Ask(Protocol):
    """Sends a request over the link that this tap is attached to."""

    def __call__(self, subject: str, data: bytes, /, *, reply: str) -> None: ...


class JetDelivered:
    """One delivery from a stream."""

    __slots__ = ("_ended", "_reply", "_speak", "message", "times")

    def __init__(self, arrived: Arrived, speak: Speech) -> None:
        self.message: Message | None = decode(arrived.data)
        self.times = _times(arrived.reply)
        self._reply = arrived.reply
        self._speak = speak
        self._ended = False

    def ack(self) -> None:
        """It is done with, and leaves the stream."""
        self._end(b"+ACK")

    def keep(self) -> None:
        """Somebody is at work on it."""
        if not self._ended:
            self._speak(self._reply, b"+WPI", kept=False)

    def give_back(self, *, delay_s: float) -> None:
        """Deliver it again, to anybody, in so many seconds."""
        self._end(b'-NAK {"delay": %d}' % round(delay_s * _NS) if delay_s > 0 else b"-NAK")

    def reject(self) -> None:
        """It makes no sense, and leaves the stream."""
        self._end(b"+TERM")

    def _end(self, word: bytes) -> None:
        if not self._ended:
            self._ended = True
            self._speak(self._reply, word, kept=True)


class _Request(Struct):
    """A request that the server has, and what is left of it."""

    number: int
    left: int
    ticks: int = 0


class JetTap:
    """The deliveries of one queue. `on_trouble` is told when the consumer seems to be gone, `on_closed` when nothing is open any more."""

    def __init__(
        self,
        queue: str,
        on_delivered: Callable[[Delivered], None],
        *,
        subject: str,
        speak: Speech,
        on_trouble: Callable[[], None],
        on_closed: Callable[[JetTap], None],
    ) -> None:
        self.queue = queue
        self._on_delivered = on_delivered
        self._subject = subject
        self._speak = speak
        self._on_trouble = on_trouble
        self._on_closed = on_closed
        self._room = 0
        self._closed = False
        self._ask: Ask | None = None
        self._inbox = ""
        self._number = 0
        self._open: dict[int, _Request] = {}
        self._quiet_ticks = 0

    def want(self, room: int) -> None:
        """So many deliveries have room from now on, less one for each that comes; a later word replaces this one."""
        if not self._closed:
            self._room = max(0, room)
            self._top_up()

    def close(self) -> None:
        """Want nothing more; what comes all the same is given back."""
        self._room, self._closed = 0, True
        self._end_if_done()

    def attach(self, ask: Ask, inbox: str) -> None:
        """There is a link, and what comes to `inbox`, or below it, is handed to `hear`."""
        self._ask, self._inbox = ask, inbox
        self.begin_anew()

    def detach(self) -> None:
        """There is no link."""
        self._ask = None
        self._open.clear()
        self._end_if_done()

    @property
    def is_attached(self) -> bool:
        """Whether it has a link."""
        return self._ask is not None

    def begin_anew(self) -> None:
        """Forget all requests: who had them forgot them, or is gone."""
        self._open.clear()
        self._quiet_ticks = 0
        self._top_up()
        self._end_if_done()

    def tick(self) -> None:
        """A second has gone by."""
        for request in list(self._open.values()):
            request.ticks += 1
            if request.ticks > EXPIRES_S + MOST_QUIET_TICKS:
                del self._open[request.number]
        if self._open:
            self._quiet_ticks += 1
            if self._quiet_ticks > MOST_QUIET_TICKS:
                self._open.clear()
                self._on_trouble()
        if not self._open:
            self._quiet_ticks = 0
        self._top_up()
        self._end_if_done()

    def hear(self, arrived: Arrived) -> None:
        """What came from the server."""
        self._quiet_ticks = 0
        status = (arrived.headers or {}).get("Status")
        if status is None or arrived.reply.startswith("$JS.ACK."):
            self._take(arrived)
        elif status != "100":
            self._answered(arrived, status)
        self._end_if_done()

    def _take(self, arrived: Arrived) -> None:
        self._room = max(0, self._room - 1)
        oldest = next(iter(self._open.values()), None)
        if oldest is not None:
            oldest.left -= 1
            if oldest.left <= 0:
                del self._open[oldest.number]
        delivered = JetDelivered(arrived, self._speak)
        if self._closed:
            delivered.give_back(delay_s=0)
        else:
            try:
                self._on_delivered(delivered)
            except Exception:  # deliveries go on whatever becomes of one, which comes again
                _logger.exception("delivery_handler_failed queue=%s", self.queue)
            self._top_up()

    def _answered(self, arrived: Arrived, status: str) -> None:
        number = arrived.subject.rpartition(".")[2]
        known = self._open.pop(int(number), None) if number.isdecimal() else None
        if status in ("404", "408"):
            self._top_up()
        elif known is not None:
            # Consumer or stream deleted, leader changed, nobody there: who sees to them begins this anew, or the next tick does.
            self._on_trouble()

    def _top_up(self) -> None:
        open_now = sum(request.left for request in self._open.values())
        # Not for every place that falls vacant: requests would become many and small.
        if self._ask is None or self._room == 0 or 2 * open_now > self._room:
            return
        batch = min(self._room - open_now, LARGEST_REQUEST)
        self._number += 1
        self._open[self._number] = _Request(self._number, batch)
        body = {"batch": batch, "expires": EXPIRES_S * _NS, "idle_heartbeat": HEARTBEAT_S * _NS}
        self._ask(self._subject, json.dumps(body).encode(), reply=f"{self._inbox}.{self._number}")

    def _end_if_done(self) -> None:
        if self._closed and not self._open:
            self._on_closed(self)


def _times(reply: str) -> int:
    # $JS.ACK.<stream>.<consumer>.<times>... or, with domain and account, $JS.ACK.<domain>.<account>.<stream>.<consumer>.<times>...
    tokens = reply.split(".")
    found = tokens[4] if len(tokens) == 9 else tokens[6] if len(tokens) >= 11 else ""
    return int(found) if found.isdecimal() else 1
