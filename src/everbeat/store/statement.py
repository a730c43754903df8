"""Statements as values: the name of an .sql file, its parameters, and a function that reads the rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import psycopg
from msgspec import Struct
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, sql
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format

from everbeat.store.rows import Row

T = TypeVar("T")


class Statement(Struct, Generic[T], frozen=True):
    """One SQL statement. It is idempotent: if it is repeated after a lost reply, it returns the same result.

    `of_sessions`: the statement acts on sessions. Behind a transaction pooler, a client has no dedicated session, so the statement is not
    run and returns no rows. `hints` are the payloads that `Database.run` announces after the statement's commit. A statement inside a
    transaction notifies by itself and has none.
    """

    name: str
    parameters: Mapping[str, Any]
    read: Callable[[Sequence[Row]], T]
    of_sessions: bool = False
    hints: Sequence[str] = ()


_PLACEHOLDER: Final = re.compile(r"%(?:\((\w+)\)s|%)")
_FRAGMENT: Final = re.compile(r"\{(fragment/\w+)\}")
_OPENING_COMMENT: Final = re.compile(r"\A(?:--.*\n)+")


@cache
def source(name: str) -> str:
    """Return the text of `sql/<name>.sql`. Each `{fragment/x}` is replaced by that file's SQL; `{schema}` is not replaced yet."""
    text = (files("everbeat") / "sql" / f"{name}.sql").read_text(encoding="utf-8")
    return _FRAGMENT.sub(lambda found: _OPENING_COMMENT.sub("", source(found[1])).rstrip(), text)


def without(*parts: str, name: str) -> str:
    """Return the name of the variant of a statement that omits the lines between `-- [part` and `-- part]` for each of these parts."""
    return "-".join([name, *parts])


def parted(name: str) -> tuple[str, Sequence[str]]:
    """Split a statement's name into the name of its file and the parts to omit."""
    file, *parts = name.split("-")
    return file, parts


def shortened(text: str, *, parts: Iterable[str]) -> str:
    """Return the text without the given parts. Parts that the text does not contain are ignored."""
    for part in parts:
        lines = rf"^ *-- \[{part}\n.*?^ *-- {part}\]\n"
        text = re.sub(lines, "", text, flags=re.MULTILINE | re.DOTALL)
    return text


@cache
def compose(name: str, schema: str, *, concurrently: bool = False) -> bytes:
    """Return the statement for one schema, with the schema's name quoted.

    If `concurrently` is set, `{concurrently}` becomes the SQL keyword, for a schema that is in use. Otherwise, it is removed.
    """
    file, parts = parted(name)
    template = sql.SQL(shortened(source(file), parts=parts))  # from our own package, never from data
    word = sql.SQL("concurrently" if concurrently else "")
    return template.format(schema=sql.Identifier(schema), concurrently=word).as_bytes(None)


@cache
def with_numbers(text: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Return a statement's text with the placeholders `$1`, `$2` …, and the names of its parameters in this order."""
    names: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        return f"${names.setdefault(found[1], len(names) + 1)}" if found[1] else "%"

    return _PLACEHOLDER.sub(number, text.decode()).encode(), tuple(names)


def request(statement: Statement[Any], schema: str) -> tuple[bytes, Sequence[Any]]:
    """Return the text and the parameters of a statement for a raw cursor.

    psycopg's other cursors replace the placeholders at each execution of a text of more than 4 KiB, which can take 0.1 ms.
    """
    text, names = with_numbers(compose(statement.name, schema))
    return text, [statement.parameters[name] for name in names]


def has_rows(cursor: Cursor[Any] | AsyncCursor[Any]) -> bool:
    """Return whether the statement has a result set, even an empty one.

    `cursor.description` gives the same information but reads every column first.
    """
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def uuids(values: Iterable[UUID]) -> str:
    """Return the values as the text of a `uuid[]`."""
    return "{" + ",".join([value.hex for value in values]) + "}"


def integers(values: Iterable[int | None]) -> str:
    """Return the values as the text of an `integer[]` or a `bigint[]`."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def booleans(values: Iterable[bool]) -> str:
    """Return the values as the text of a `boolean[]`."""
    return "{" + ",".join(["t" if value else "f" for value in values]) + "}"


def moments(values: Iterable[datetime | None]) -> str:
    """Return the values, which must have a time zone, as the text of a `timestamptz[]`."""
    texts = ["NULL" if value is None else f'"{value.isoformat()}"' for value in values]
    return "{" + ",".join(texts) + "}"


def texts(values: Iterable[str]) -> str:
    """Return the values as the text of a `text[]`. They must not contain NUL characters."""
    quoted = [value.replace("\\", "\\\\").replace('"', '\\"') for value in values]
    return "{" + ",".join([f'"{value}"' for value in quoted]) + "}"


def words(values: Iterable[str]) -> str:
    """Return the values as the text of a `text[]`. They must contain only letters and underscores, because they are not quoted."""
    return "{" + ",".join(values) + "}"


def json_array(values: Iterable[bytes | None]) -> str:
    """Return JSON texts as the text of one JSON array. None becomes `null`."""
    return (b"[" + b",".join([b"null" if value is None else value for value in values]) + b"]").decode()


LATEST: Final = datetime(9998, 12, 31, 23, 59, 59, tzinfo=UTC)
EARLIEST: Final = datetime(2, 1, 1, tzinfo=UTC)

_OID: Final = psycopg.postgres.types["timestamptz"].oid
_Plain: Final[Any] = psycopg.adapters.get_loader(_OID, Format.TEXT)
"""psycopg's own loader, in C where available. It cannot be subclassed."""


class NearestMoment(Loader):
    """A loader for timestamps. It returns EARLIEST or LATEST in place of a timestamp that Python cannot represent."""

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._plain = _Plain(oid, context)

    def load(self, data: Buffer) -> Any:
        """Return the timestamp as a datetime with a time zone."""
        try:
            return self._plain.load(data)
        except psycopg.DataError:
            text = bytes(data)
            return EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else LATEST


def read_every_moment(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """Make this connection load every timestamp, even one that Python cannot represent (see `NearestMoment`)."""
    connection.adapters.register_loader(_OID, NearestMoment)
