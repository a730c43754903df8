"""Hints that a worker process receives from its supervisor, which listens for all worker processes of its tree."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from everbeat.hints import OnHint, OnState
from everbeat.hints.delivery import HintDispatcher


class RelayedHintSource:
    """Hints that the owner of this source passes on. Call its methods in the thread of the event loop.

    A supervisor that is frozen passes on nothing. Therefore, hints count as arriving only until the supervisor has been silent for
    `silent_s` seconds.
    """

    def __init__(self, channel: str, *, silent_s: float) -> None:
        self._channel = channel
        self._silent_s = silent_s
        self._is_told = False
        self._dispatcher: HintDispatcher | None = None
        self._silence: asyncio.TimerHandle | None = None

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:
        """Deliver hints until cancelled or until the next call."""
        self._dispatcher = dispatcher = HintDispatcher(self._channel, on_hint=on_hint, on_state=on_state)
        self.heard()
        try:
            await asyncio.Event().wait()
        finally:
            if self._dispatcher is dispatcher:
                self._dispatcher = None
                self._expect_silence(None)
                dispatcher.ended()

    def deliver(self, payloads: Iterable[str]) -> None:
        """Deliver the hints in these payloads. While `run` is not running, they are dropped, because `run` begins with `Everything`."""
        if self._dispatcher is not None:
            for payload in payloads:
                self._dispatcher.payload(payload)

    def told(self, *, arrive: bool) -> None:
        """Record what the supervisor says: whether hints arrive at its connection."""
        self._is_told = arrive
        self.heard()

    def heard(self) -> None:
        """Record that the supervisor is not silent."""
        if self._dispatcher is None:
            return
        if not self._is_told:
            self._expect_silence(None)
            if self._dispatcher.is_listening:
                self._dispatcher.lost("the supervisor receives no notifications")
            return
        self._expect_silence(self._dispatcher)
        if not self._dispatcher.is_listening:
            self._dispatcher.connected()

    def _expect_silence(self, dispatcher: HintDispatcher | None) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        if dispatcher is not None:
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(self._silent_s, dispatcher.lost, "the supervisor is silent")
