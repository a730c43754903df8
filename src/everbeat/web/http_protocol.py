"""The protocol of the server's connections. It closes those whose client is slow on purpose, or has gone without a word."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from everbeat.runtime.clock import Clock, SystemClock

REQUEST_WITHIN_S: Final = 10.0
"""How long a client may take to send the headers of a request, from the connection or from the end of the answer before."""
READS_WITHIN_S: Final = 30.0
"""How long an answer waits for a client that reads nothing of it."""
SPARE: Final = 64
"""How many connections above the limit may wait for their refusal, the status 503."""
_AGAIN_AFTER_S: Final = 60.0


class BoundedWarnings(logging.Filter):
    """Lets each warning of the server pass once a minute. Clients cause them, so a flood of refused requests would fill the disk."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__()
        self._clock = SystemClock() if clock is None else clock
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged. A warning that passes again says how many were left out before it."""
        if record.levelno != logging.WARNING:
            return True
        now = self._clock.monotonic()
        again_at, left_out = self._passed.get(record.msg, (now, 0))
        if now < again_at:
            self._passed[record.msg] = (again_at, left_out + 1)
            return False
        self._passed[record.msg] = (now + _AGAIN_AFTER_S, 0)
        if left_out:
            record.msg = f"{record.msg} ({left_out:,} more since the last such line)"
        return True


class BoundedProtocol(H11Protocol):
    """HTTP with limits for slow clients. Without them, a client that sends a byte a minute holds its connection forever.

    An idle connection ends sooner, after uvicorn's own `timeout_keep_alive`. The dashboard itself limits the time of a body.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._request_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, for some time. If `SPARE` connections wait for their refusal already, end this one at once."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency + SPARE:
            transport.abort()
            return
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request. The first part that completes its headers ends the wait."""
        super().data_received(data)
        if self._is_answering:
            self._stop_request_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request. An unread rest of the last one counts as a part of that wait."""
        super().on_response_complete()
        if not self._is_answering:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_request_timer()
        self._stop_reading_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the client to read, for some time."""
        super().pause_writing()
        self._stop_reading_timer()
        self._reading_timer = self.loop.call_later(READS_WITHIN_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue, because the client has read."""
        self._stop_reading_timer()
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._stop_request_timer()
        self._request_timer = self.loop.call_later(REQUEST_WITHIN_S, self.transport.abort)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None
