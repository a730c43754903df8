"""Whether this worker has use for hints: not while it finds more tasks whenever it looks. Senders are told, and save themselves the hint.

What lives here: when that is said. What may not: looking.

Who commits a task in the very moment in which a worker says that it listens again may have read the word before: it looks once more
right after that word, and again a little later. A worker that messages tell of tasks has no use for hints either, as long as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from everbeat.runtime.clock import Clock
from everbeat.store.session import Session
from everbeat.store.workers import listen
from everbeat.worker.lane import Lane

BUSY_AFTER_S: Final = 0.25
"""Words cost a statement each: a short burst is not worth them."""
LOOK_AGAIN_MS: Final = 50.0


class Attention:
    """`listens`: what this worker last said of itself; who is registered and has said nothing is believed to listen."""

    def __init__(
        self, session: Session, *, worker_id: Callable[[], str], is_told: Callable[[], bool], clock: Clock
    ) -> None:
        self.listens = True
        self._is_told = is_told
        self._session = session
        self._worker_id = worker_id
        self._clock = clock
        self._said_by = worker_id()
        self._busy_since: float | None = None

    @property
    def is_blind(self) -> bool:
        """Nobody tells this worker of tasks: it has to look."""
        return not (self.listens or self._is_told())

    async def busy(self, lanes: Iterable[Lane]) -> None:
        """A look is followed by another one at once. For lanes that found nothing hints are wanted all the same."""
        self._know_myself()
        if self._is_told():
            await self._be_told()
            return
        if any(lane.wanted and not lane.has_more for lane in lanes if not lane.suspects):
            self._busy_since = None
            return
        now = self._clock.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        elif self.listens and now - self._busy_since >= BUSY_AFTER_S:
            await self._say(False)

    async def rests(self) -> bool:
        """There is nothing to do; answers whether to look once more before."""
        self._know_myself()
        self._busy_since = None
        if self._is_told():
            await self._be_told()
            return False
        if self.listens:
            return False
        await self._say(True)
        return True

    async def _be_told(self) -> None:
        if self.listens:
            await self._say(False)

    async def _say(self, listens: bool) -> None:
        await self._session.run(listen(self._said_by, listens=listens))
        self.listens = listens

    def _know_myself(self) -> None:
        # A worker that was declared dead goes on under another name, of which nothing was said yet.
        if self._said_by != self._worker_id():
            self.listens, self._said_by = True, self._worker_id()
