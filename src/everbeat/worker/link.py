"""The line between a worker and its supervisor, as the worker sees it: it tells, and it obeys.

What lives here: the `Link` protocol and the link over a channel. What may not: what follows from a message; that is
`Worker.obey`. A worker that is a guest in another program gets a link that hands the same messages to a supervision in
its own thread.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.frames import ChannelClosed
from everbeat.worker.protocol import FromWorker


class Link(Protocol):
    """What a worker needs of its supervisor.

    The other way, whoever holds the link calls `Worker.obey(message)` for every message of the supervisor, in the
    thread of the worker's event loop (from elsewhere by `loop.call_soon_threadsafe`).
    """

    def tell(self, message: FromWorker) -> None:
        """Hand over Ready, Held, Tick or Leaving, in order; called in the loop's thread, never blocks, never raises."""
        ...


class ChannelLink:
    """The link of a worker process."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel

    def tell(self, message: FromWorker) -> None:
        """Queue the message; without a supervisor there is nobody to tell, and this process is about to end."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send_nowait(message)
