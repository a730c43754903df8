"""A full notification queue, as any role can cause it: one session listens inside a transaction, and another one notifies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import psycopg
import pytest

SETTINGS: Final = {"max_notify_queue_pages": "64"}
"""The smallest queue, 512 kB; the default is 8 GB."""
ROLE: Final = "everbeat_nobody"


def require_small_queue(url: str) -> None:
    """Skip the test if the size of the queue is fixed."""
    with psycopg.connect(url) as connection:
        if connection.info.server_version < 170_000:
            pytest.skip(
                "LOUD: max_notify_queue_pages takes PostgreSQL 17 or newer; 8 GB take minutes to fill."
            )


def usage(url: str) -> float:
    """Return the used share of the queue. This call lets PostgreSQL remove notifications that all listeners have read."""
    with psycopg.connect(url) as connection:
        (found,) = connection.execute("select pg_notification_queue_usage()").fetchone() or (0.0,)
    return float(found)


def fill(url: str) -> None:
    """Notify until PostgreSQL rejects it."""
    with (
        psycopg.connect(url, user=ROLE, autocommit=True) as flood,
        suppress(psycopg.errors.ProgramLimitExceeded),
    ):
        for number in range(10_000):
            flood.execute("select pg_notify('x', %s)", [f"{number:7000}"])


@contextmanager
def holding(url: str) -> Iterator[int]:
    """Let a session of a role without rights hold every notification; yield its pid on the server."""
    with psycopg.connect(url, autocommit=True) as owner:
        known = owner.execute("select 1 from pg_roles where rolname = %s", [ROLE]).fetchone()
        if known is None:
            owner.execute(f"create role {ROLE} login".encode())
    with psycopg.connect(url, user=ROLE, autocommit=True) as holder:
        usage(url)  # removes the notifications of an earlier holder
        holder.execute("listen x")
        holder.execute("begin")
        holder.execute("select 1")
        yield holder.info.backend_pid


@contextmanager
def full_queue(url: str) -> Iterator[int]:
    """Keep the queue full until the block ends; yield the pid of the session that holds it."""
    with holding(url) as pid:
        fill(url)
        assert usage(url) > 0.9
        yield pid
