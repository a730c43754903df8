"""Moments that PostgreSQL can hold and Python cannot: read as the nearest one that Python can.

What lives here: the reading of timestamps. Otherwise one row (`infinity`, a year after 9999, or one that the session's time zone
puts there) would make every statement fail that reads it, and with it the claim of all others.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format

LATEST: Final = datetime(9998, 12, 31, 23, 59, 59, tzinfo=UTC)
EARLIEST: Final = datetime(2, 1, 1, tzinfo=UTC)

_OID: Final = psycopg.postgres.types["timestamptz"].oid
_Plain: Final[Any] = psycopg.adapters.get_loader(_OID, Format.TEXT)
"""psycopg's own, in C where there is one: it cannot be derived from."""


class NearestMoment(Loader):
    """The loader of our connections."""

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._plain = _Plain(oid, context)

    def load(self, data: Buffer) -> Any:
        """A datetime with a time zone."""
        try:
            return self._plain.load(data)
        except psycopg.DataError:
            text = bytes(data)
            return EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else LATEST


def read_every_moment(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """Makes a connection of ours do so."""
    connection.adapters.register_loader(_OID, NearestMoment)
