"""How full PostgreSQL's queue of notifications is, and which session keeps it so."""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg.errors import Diagnostic

from everbeat.domain.diagnosis import NotifyQueue, QueueHolder
from everbeat.store.refusals import is_refused_hint
from everbeat.store.statement import compose
from everbeat.store.target import Target

_CHANNEL: Final = "everbeat_doctor"
_NUMBER: Final = re.compile(r"\d+")


def look(target: Target) -> NotifyQueue:
    """Return how full the queue is. Raises a DatabaseError.

    No view shows which session keeps the queue full. PostgreSQL names its pid in a warning to a session that notifies, once in 5 s.
    """
    pids: list[int] = []

    def noticed(notice: Diagnostic) -> None:
        if found := _NUMBER.search(notice.message_detail or ""):
            pids.append(int(found[0]))

    try:
        with target.connect("everbeat doctor") as connection:
            connection.add_notice_handler(noticed)
            try:
                connection.execute("select pg_notify(%s, '')", [_CHANNEL])
            except psycopg.Error as problem:
                if not is_refused_hint(problem):
                    raise
            pid = pids[0] if pids else None
            found = connection.execute(
                compose("inspect/notify_queue", target.schema), {"pid": pid}
            ).fetchall()
    except psycopg.Error as problem:
        raise target.explain(problem) from problem
    holders = tuple(QueueHolder(*row[1:]) for row in found if row[1] is not None)
    return NotifyQueue(found[0][0], holders, is_named=pid is not None)
