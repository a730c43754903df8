"""The only loop: calls a service's `tick` at its rate, survives its failures, and never runs two at once.

What lives here: when the next tick is due. What may not: what a tick does.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from random import Random
from typing import Final, Protocol

from msgspec import Struct

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import ServiceFailed, ServiceRecovered

JITTER: Final = 0.1
"""A period is up to this share *shorter* than the interval: never longer, since intervals are promises."""

_log = logging.getLogger("everbeat.runtime")


class Service(Protocol):
    """A periodic caretaker."""

    @property
    def name(self) -> str:
        """What logs and events call it."""
        ...

    @property
    def interval_s(self) -> float:
        """Seconds from the start of one tick to the start of the next; read anew before every wait."""
        ...

    async def tick(self) -> float | None:
        """Do one pass; a number asks for the next one that many seconds after this, 0 for at once."""
        ...


class Backoff(Struct, frozen=True, kw_only=True):
    """Seconds to wait after failures in a row: doubling from `first_s` to `longest_s`, with chance added.

    Never beyond the interval of the service (or `first_s`): a failing heartbeat must not beat more rarely
    than a sound one.
    """

    first_s: float = 0.5
    longest_s: float = 30.0

    def delay(self, consecutive: int, *, interval_s: float, random: Random) -> float:
        """Seconds after the `consecutive`-th failure in a row, counted from 1."""
        longest = min(self.longest_s, max(interval_s, self.first_s))
        # The exponent is bounded because 2.0 ** 1100 raises OverflowError after an outage of some hours.
        doubled = self.first_s * 2.0 ** min(consecutive - 1, 32)
        return min(longest, doubled * (1.0 + 0.25 * random.random()))


class ServiceRunner:
    """Runs one service until cancelled.

    `emit` is told of failures and of the first success after them. A set `wake` (or `wake_now`) brings the
    next tick forward; the event belongs to this runner, which clears it. `tick_timeout_s` ends a tick that
    hangs, which would otherwise end the service in silence.
    """

    def __init__(
        self,
        service: Service,
        *,
        clock: Clock,
        random: Random,
        emit: Callable[[ServiceFailed | ServiceRecovered], None],
        wake: asyncio.Event | None = None,
        backoff: Backoff | None = None,
        tick_timeout_s: float | None = None,
        first_delay_s: float = 0.0,
    ) -> None:
        self.service = service
        self.ticks = 0
        self.consecutive_failures = 0
        self._clock = clock
        self._random = random
        self._emit = emit
        self._wake = asyncio.Event() if wake is None else wake
        self._backoff = Backoff() if backoff is None else backoff
        self._tick_timeout_s = tick_timeout_s
        self._first_delay_s = first_delay_s

    def wake_now(self) -> None:
        """Make the next tick start at once, or right after the one in flight; from the loop's thread only."""
        self._wake.set()

    async def run(self) -> None:
        """Tick for ever; ends only by cancellation, and then promptly."""
        await self._pause(self._first_delay_s)
        while True:
            # Cleared before the tick: a wake during the tick speaks of news the tick may not have seen.
            self._wake.clear()
            started = self._clock.monotonic()
            try:
                async with asyncio.timeout(self._tick_timeout_s):
                    wanted = await self.service.tick()
            except asyncio.CancelledError as error:
                if _is_being_cancelled():
                    raise
                await self._pause_after_failure(error)
            except Exception as error:  # noqa: BLE001 - no failure of a tick may end the loop
                await self._pause_after_failure(error)
            else:
                self._succeeded()
                if _is_being_cancelled():
                    raise asyncio.CancelledError  # The tick swallowed it.
                await self._pause(self._due_in(started, wanted))

    def _due_in(self, started: float, wanted: float | None) -> float:
        if wanted is not None and not math.isnan(wanted):
            return max(0.0, wanted)
        period = self.service.interval_s * (1.0 - JITTER * self._random.random())
        # A tick longer than its interval is followed at once; ticks missed meanwhile are not made up for.
        return max(0.0, started + period - self._clock.monotonic())

    async def _pause(self, seconds: float) -> None:
        if seconds > 0.0 and not self._wake.is_set():
            await self._clock.wait(self._wake, timeout_s=seconds)
        else:
            # A service that is always due must still let others run, and be cancelled.
            await asyncio.sleep(0)

    async def _pause_after_failure(self, error: BaseException) -> None:
        self.consecutive_failures += 1
        delay = self._backoff.delay(
            self.consecutive_failures, interval_s=self.service.interval_s, random=self._random
        )
        self._tell(
            ServiceFailed(
                name=self.service.name,
                error=error,
                consecutive=self.consecutive_failures,
                retry_in_s=delay,
            )
        )
        # Hints that pour in must not turn a failing service into a busy loop: a wake counts after the first
        # delay only.
        unconditional = min(delay, self._backoff.first_s)
        await self._clock.sleep(unconditional)
        await self._pause(delay - unconditional)

    def _succeeded(self) -> None:
        self.ticks += 1
        failures, self.consecutive_failures = self.consecutive_failures, 0
        if failures:
            self._tell(ServiceRecovered(name=self.service.name, failures=failures))

    def _tell(self, event: ServiceFailed | ServiceRecovered) -> None:
        try:
            self._emit(event)
        except Exception:  # noqa: BLE001 - a broken listener must not end the loop either
            _log.exception("event_lost service=%s", self.service.name)


def _is_being_cancelled() -> bool:
    # A tick can also raise CancelledError by itself, from some inner future: an error like any other.
    current = asyncio.current_task()
    return current is None or current.cancelling() > 0
