"""The session lock of a supervisor: held on a connection of its own, taken again the moment that connection is lost.

PostgreSQL frees it milliseconds after the death of its client: the fastest way for other machines to notice one. The session is
`patient`: PostgreSQL keeps it for minutes when the network is silent, so an early end of the lock means that its socket was closed.
When another session of the supervisor is opened anew, the lock is taken again too: that session may have reached another server,
promoted meanwhile, while the idle connection of the lock still waits for a server that is frozen.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.store import workers
from everbeat.store.session import Session

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_log = logging.getLogger("everbeat.worker")


class SessionLock:
    """Keeps one lock. Behind a transaction pooler there is no session to hold it: `is_pooled` says so, and nothing is held."""

    def __init__(self, session: Session, *, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._is_due = asyncio.Event()

    def renew(self) -> None:
        """Take the lock again on the server that answers now."""
        self._is_due.set()

    @property
    def is_pooled(self) -> bool:
        """Whether the connection turned out to be shared with others."""
        return self._session.pooled

    async def keep(self, supervisor_id: str, lock_key: int) -> None:
        """Holds the lock until cancelled, or until the supervisor was ended."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                connection = await self._session.open()
                self._is_due.clear()
                if self._session.pooled:
                    _log.warning("session_lock_off reason=%r", "a transaction pooler is between")
                    await self._session.drop()
                    return
                match await self._session.run(workers.hold_session(supervisor_id, lock_key), patience_s=0):
                    case None:
                        return
                    case True if await self._session.open() is connection:
                        pause = _FIRST_PAUSE_S
                        await _until_readable(connection.fileno(), self._is_due)
                        continue  # mostly the end of the connection, which the statement finds out
                    case _:
                        pass  # the server has not noticed yet that our old connection is gone
            except (DatabaseError, OSError) as problem:
                _log.debug("session_lock_lost problem=%s", problem)
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Frees the lock by ending its connection."""
        await self._session.drop()


async def _until_readable(descriptor: int, is_due: asyncio.Event) -> None:
    """Return when the server says anything on an idle connection, its end included, or when `is_due` is set."""
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, is_due.set)
    try:
        await is_due.wait()
    finally:
        loop.remove_reader(descriptor)
