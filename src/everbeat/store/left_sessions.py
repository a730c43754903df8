"""Sessions on which a client hung up while they waited for a synchronous standby: the server keeps them until it returns.

Without a limit, a client that repeats would fill the server with them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from everbeat.errors import DatabaseUnreachable
from everbeat.store.hosts import Host
from everbeat.store.silence import WatchedAsyncConnection, WatchedConnection
from everbeat.store.statement import Row, Statement, rows

MOST_LEFT: Final = 8


class LeftSessions:
    """Those of one client; safe for many threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._left: dict[Host | None, set[int]] = {}

    def add(self, connection: WatchedConnection | WatchedAsyncConnection) -> None:
        """The client hangs up on this connection."""
        if (
            connection.prepare_threshold is not None
        ):  # behind a transaction pooler the pid may belong to another client by now
            with self._guard:
                self._left.setdefault(connection.host, set()).add(connection.server_pid)

    def question(
        self, connection: WatchedConnection | WatchedAsyncConnection
    ) -> Statement[Sequence[Row]] | None:
        """What a new connection asks first, if sessions were left on its server."""
        with self._guard:
            left = sorted(self._left.get(connection.host, ()))
        return None if not left else Statement("inspect/gone", {"pids": left}, rows)

    def require_room(
        self, connection: WatchedConnection | WatchedAsyncConnection, gone: Sequence[Row]
    ) -> None:
        """Forget those that are gone. Raise DatabaseUnreachable if the server still has the most that one client may leave."""
        with self._guard:
            left = self._left.setdefault(connection.host, set())
            left -= {pid for (pid,) in gone}  # another thread may have added one meanwhile
            count = len(left)
        if count >= MOST_LEFT:
            raise DatabaseUnreachable(
                f"{count} earlier statements of this process still wait for a synchronous standby; no more are sent.",
                fix="bring the standby back, or remove it from synchronous_standby_names.",
            )
