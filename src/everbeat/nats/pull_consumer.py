"""Pull messages of one queue from JetStream, and acknowledge, return or reject each delivery."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Final, Protocol

from msgspec import Struct
from nats.aio.msg import Msg

from everbeat.nats.stream_plan import TaskMessage, decode

EXPIRES_S: Final = 5
HEARTBEAT_S: Final = 1
MOST_QUIET_TICKS: Final = 3
"""After this many ticks without a message or heartbeat, the request or the consumer is considered lost."""
LARGEST_REQUEST: Final = 500

_NS: Final = 1_000_000_000

_logger = logging.getLogger("everbeat.nats")


class SendMessage(Protocol):
    """Sends a message if the link is up. If the link is down, a `kept` message is sent once the link is up again."""

    def __call__(self, subject: str, data: bytes, /, *, kept: bool) -> None: ...


class SendRequest(Protocol):
    """Sends a request over this consumer's link."""

    def __call__(self, subject: str, data: bytes, /, *, reply: str) -> None: ...


class JetStreamDelivery:
    """One delivery of a message. A call of `ack`, `give_back` or `reject` settles it. These methods neither raise nor wait.

    `message` is None if the message is unreadable. `times` is the number of its deliveries, including this one. NATS repeats an unsettled
    delivery after the acknowledgement wait, which `keep` restarts. NATS also accepts these calls for an outdated delivery, so they are not
    a fence.
    """

    __slots__ = ("_ended", "_reply", "_send_message", "message", "times")

    def __init__(self, arrived: Msg, send_message: SendMessage) -> None:
        self.message: TaskMessage | None = decode(arrived.data)
        self.times = _times(arrived.reply)
        self._reply = arrived.reply
        self._send_message = send_message
        self._ended = False

    def ack(self) -> None:
        """Acknowledge the message, which removes it from the stream."""
        self._end(b"+ACK")

    def keep(self) -> None:
        """Restart the acknowledgement wait, because a worker is running the task."""
        if not self._ended:
            self._send_message(self._reply, b"+WPI", kept=False)

    def give_back(self, *, delay_s: float) -> None:
        """Request redelivery to any worker after `delay_s` seconds."""
        self._end(b'-NAK {"delay": %d}' % round(delay_s * _NS) if delay_s > 0 else b"-NAK")

    def reject(self) -> None:
        """Reject an unusable message, which removes it from the stream."""
        self._end(b"+TERM")

    def _end(self, word: bytes) -> None:
        if not self._ended:
            self._ended = True
            self._send_message(self._reply, word, kept=True)


class _Request(Struct):
    """A request that is open on the server, and the number of messages that it may still receive."""

    number: int
    left: int
    ticks: int = 0


class PullConsumer:
    """Receives the messages of one queue.

    `on_trouble` is called if the consumer seems to be missing. `on_closed` is called once the consumer is closed and has no open requests.
    """

    def __init__(
        self,
        queue: str,
        on_delivered: Callable[[JetStreamDelivery], None],
        *,
        subject: str,
        send_message: SendMessage,
        on_trouble: Callable[[], None],
        on_closed: Callable[[PullConsumer], None],
    ) -> None:
        self.queue = queue
        self._on_delivered = on_delivered
        self._subject = subject
        self._send_message = send_message
        self._on_trouble = on_trouble
        self._on_closed = on_closed
        self._room = 0
        self._closed = False
        self._ask: SendRequest | None = None
        self._inbox = ""
        self._number = 0
        self._open: dict[int, _Request] = {}
        self._quiet_ticks = 0

    def want(self, room: int) -> None:
        """Set how many messages may arrive. Each received message reduces this number by one, and a later call replaces the number.

        A few more messages may arrive, because open requests cannot be withdrawn before they expire.
        """
        if not self._closed:
            self._room = max(0, room)
            self._top_up()

    def close(self) -> None:
        """Stop requesting messages. Messages that still arrive are returned to the stream."""
        self._room, self._closed = 0, True
        self._end_if_done()

    def attach(self, ask: SendRequest, inbox: str) -> None:
        """Use a new link, over which `ask` sends requests. Its messages to `inbox`, or to a subject below it, are passed to `receive`."""
        self._ask, self._inbox = ask, inbox
        self.begin_anew()

    def detach(self) -> None:
        """Record that the link is gone."""
        self._ask = None
        self._open.clear()
        self._end_if_done()

    @property
    def is_attached(self) -> bool:
        """Return whether the consumer has a link."""
        return self._ask is not None

    def begin_anew(self) -> None:
        """Forget all requests, because the server that held them has lost them."""
        self._open.clear()
        self._quiet_ticks = 0
        self._top_up()
        self._end_if_done()

    def tick(self) -> None:
        """Check the requests. Called once a second."""
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

    def receive(self, arrived: Msg) -> None:
        """Handle a message or a status from the server."""
        self._quiet_ticks = 0
        status = (arrived.headers or {}).get("Status")
        if status is None or arrived.reply.startswith("$JS.ACK."):
            self._take(arrived)
        elif status != "100":
            self._answered(arrived, status)
        self._end_if_done()

    def _take(self, arrived: Msg) -> None:
        self._room = max(0, self._room - 1)
        oldest = next(iter(self._open.values()), None)
        if oldest is not None:
            oldest.left -= 1
            if oldest.left <= 0:
                del self._open[oldest.number]
        delivered = JetStreamDelivery(arrived, self._send_message)
        if self._closed:
            delivered.give_back(delay_s=0)
        else:
            try:
                self._on_delivered(delivered)
            except Exception:
                # An error in the callback must not stop the consumer. NATS redelivers the message.
                _logger.exception("delivery_handler_failed queue=%s", self.queue)
            self._top_up()

    def _answered(self, arrived: Msg, status: str) -> None:
        number = arrived.subject.rpartition(".")[2]
        known = self._open.pop(int(number), None) if number.isdecimal() else None
        if status in ("404", "408"):
            self._top_up()
        elif known is not None:
            # The consumer or stream was deleted, the leader changed, or there is no responder. The stream keeper or the next tick restarts
            # the consumer.
            self._on_trouble()

    def _top_up(self) -> None:
        open_now = sum(request.left for request in self._open.values())
        # Wait until open requests cover at most half of the free places. Requesting each place separately would cause many small requests.
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
