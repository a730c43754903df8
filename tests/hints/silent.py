"""Listeners without hints, for databases behind a transaction pooler and to test that polling alone is enough."""

from __future__ import annotations

import asyncio

from everbeat.hints import OnHint, OnState


class SilentHintSource:
    """Never hints and says so."""

    __slots__ = ()

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:  # nothing to deliver
        """Deliver no hints until cancelled."""
        on_state(False)
        await asyncio.Event().wait()


class SyncSilentHintSource:
    """Never hints and says so."""

    __slots__ = ()

    def start(self, on_hint: OnHint, on_state: OnState) -> None:  # nothing to deliver
        """Report once that no hints will come."""
        on_state(False)

    def stop(self, *, timeout_s: float = 5.0) -> None:  # nothing to wait for
        """Nothing runs, so nothing ends."""
