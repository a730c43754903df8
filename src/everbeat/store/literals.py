"""Lists as PostgreSQL reads them in text: a whole batch in one parameter.

What lives here: literals of values that need no quoting. What may not: texts of users, which psycopg writes itself.

psycopg writes a list element by element in Python, which took more time than all the rest of a settle (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID


def uuids(values: Iterable[UUID]) -> str:
    """For `::uuid[]`."""
    return "{" + ",".join([value.hex for value in values]) + "}"


def integers(values: Iterable[int | None]) -> str:
    """For `::integer[]` and `::bigint[]`."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def booleans(values: Iterable[bool]) -> str:
    """For `::boolean[]`."""
    return "{" + ",".join(["t" if value else "f" for value in values]) + "}"


def words(values: Iterable[str]) -> str:
    """For `::text[]`, of our own words: letters and underscores only."""
    return "{" + ",".join(values) + "}"


def json_array(values: Iterable[bytes | None]) -> str:
    """For `::json`, of JSON texts; None becomes `null`."""
    return (b"[" + b",".join([b"null" if value is None else value for value in values]) + b"]").decode()
