"""A statement as a value: which .sql file, with which parameters, and how its rows are read. Running it is a session's business."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

from msgspec import Struct
from psycopg import AsyncCursor, Cursor, sql

T = TypeVar("T")
Row = tuple[Any, ...]


class Statement(Struct, Generic[T], frozen=True):
    """One question to the database. Every statement may be repeated after a lost reply and gives the same answer.

    `of_sessions`: it acts on sessions, which belong to no client behind a transaction pooler. It is not run there and has no rows.
    """

    name: str
    parameters: Mapping[str, Any]
    read: Callable[[Sequence[Row]], T]
    of_sessions: bool = False


@cache
def source(name: str) -> str:
    """The text of `sql/<name>.sql`, its schema still open."""
    return (files("everbeat") / "sql" / f"{name}.sql").read_text(encoding="utf-8")


def without(part: str, *, name: str) -> str:
    """Return the name of a statement without its lines between `-- [part` and `-- part]`."""
    return f"{name}-{part}"


def parted(name: str) -> tuple[str, str]:
    """Return the file of a statement's name, and the part that it is run without (empty: none)."""
    file, _, part = name.partition("-")
    return file, part


def shortened(text: str, *, part: str) -> str:
    """Return the text without this part, if there is one."""
    lines = rf"^ *-- \[{part}\n.*?^ *-- {part}\]\n"
    return re.sub(lines, "", text, flags=re.MULTILINE | re.DOTALL) if part else text


@cache
def compose(name: str, schema: str, *, concurrently: bool = False) -> bytes:
    """The statement for one schema, whose name is quoted safely; `concurrently`: for one that is in use, where `{concurrently}` is a word."""
    file, part = parted(name)
    template = sql.SQL(shortened(source(file), part=part))  # from our own package, never from data
    word = sql.SQL("concurrently" if concurrently else "")
    return template.format(schema=sql.Identifier(schema), concurrently=word).as_bytes(None)


def has_rows(cursor: Cursor[Any] | AsyncCursor[Any]) -> bool:
    """Whether the statement answers with rows, be it none: `cursor.description` tells the same, and describes every column first."""
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def rows(found: Sequence[Row]) -> Sequence[Row]:
    """Reads all rows as they are."""
    return found


def nothing(_: Sequence[Row]) -> None:
    """Reads nothing."""


def one_or_none(found: Sequence[Row]) -> Row | None:
    """Reads the first row, if there is one."""
    return found[0] if found else None


def any_row(found: Sequence[Row]) -> bool:
    """Reads whether there was a row."""
    return bool(found)
