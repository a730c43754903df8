"""No hints at all: for databases behind a transaction pooler, and to show that polling alone is enough."""

from __future__ import annotations

import asyncio

from everbeat.wake import OnHint, OnState


class SilentWake:
    """Never hints and says so."""

    __slots__ = ()

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:  # noqa: ARG002  # nothing to deliver
        """Stay deaf until cancelled."""
        on_state(False)
        await asyncio.Event().wait()


class SyncSilentWake:
    """Never hints and says so."""

    __slots__ = ()

    def start(self, on_hint: OnHint, on_state: OnState) -> None:  # noqa: ARG002  # nothing to deliver
        """Stay deaf."""
        on_state(False)

    def stop(self, *, timeout_s: float = 5.0) -> None:  # nothing to wait for
        """Nothing runs, so nothing ends."""
