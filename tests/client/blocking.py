"""Waits until one session of the database waits for another."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any

import psycopg

_LONGEST_S = 30


def wait_until_blocked_by(holder: psycopg.Connection[Any], database_url: str) -> None:
    """Return when another session waits for a lock that `holder` has."""
    question = "select exists (select from pg_stat_activity where %s = any(pg_blocking_pids(pid)))"
    give_up_at = monotonic() + _LONGEST_S
    with psycopg.connect(database_url, autocommit=True) as watcher:
        while watcher.execute(question, [holder.info.backend_pid]).fetchone() != (True,):
            assert monotonic() < give_up_at, "no session waits for the sender"
            sleep(0.01)  # pg_stat_activity sends no notice of a blocked session
