"""Functions that read the rows of a statement: as values, as JSON documents, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast
from uuid import UUID

import msgspec

from everbeat.domain.inspection import Progress
from everbeat.domain.task.context_backend import FailedTry
from everbeat.domain.task.states import TaskState

T = TypeVar("T")
Row = tuple[Any, ...]


def as_they_are(found: Sequence[Row]) -> Sequence[Row]:
    """Return all rows unchanged."""
    return found


def nothing(_: Sequence[Row]) -> None:
    """Ignore the rows and return None."""


def any_row(found: Sequence[Row]) -> bool:
    """Return whether there are any rows."""
    return bool(found)


def only(make: Callable[..., T]) -> Callable[[Sequence[Row]], T]:
    """Return a reader that calls `make` with the columns of the first row."""
    return lambda found: make(*found[0])


def first(make: Callable[..., T]) -> Callable[[Sequence[Row]], T | None]:
    """Return a reader that calls `make` with the columns of the first row, and returns None if there is no row."""
    return lambda found: make(*found[0]) if found else None


def each(make: Callable[..., T]) -> Callable[[Sequence[Row]], list[T]]:
    """Return a reader that calls `make` with the columns of each row."""
    return lambda found: [make(*row) for row in found]


def by_name(make: Callable[..., T], names: Sequence[str]) -> Callable[..., T]:
    """Return a function that passes the columns of a row to `make` under these names."""
    return lambda *row: make(**dict(zip(names, row, strict=True)))


def as_uuid(value: object) -> UUID:
    """Return the value as a UUID. A user's connection may supply it as text, as psycopg2 does by default."""
    return value if isinstance(value, UUID) else UUID(str(value))


def first_column(found: Sequence[Row]) -> list[Any]:
    """Return the first column of each row."""
    return [row[0] for row in found]


UNREADABLE: Final = "unreadable"
"""The key, or the progress stage, under which the beginning of an unreadable value is shown."""
_SHOWN: Final = 200
_BROKEN: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
_any = msgspec.json.Decoder()
_object = msgspec.json.Decoder(dict[str, Any])
_progress = msgspec.json.Decoder(Progress)
_failed_try = msgspec.json.Decoder(FailedTry)


def document(text: str | None) -> Any:
    """Parse a JSON value. If it is unreadable, return `{"unreadable": …}` with the beginning of the text."""
    return _read(text, _any, marker=_marker)


def mapping(text: str | None) -> Mapping[str, Any]:
    """Parse a JSON object. Return an empty mapping if nothing is stored. Handle an unreadable value as `document` does."""
    return optional_mapping(text) or {}


def optional_mapping(text: str | None) -> Mapping[str, Any] | None:
    """Parse a JSON object. Return None if nothing is stored. Handle an unreadable value as `document` does."""
    return _read(text, _object, marker=_marker)


def is_marker(found: Mapping[str, Any]) -> bool:
    """Return whether this object is the marker for an unreadable value."""
    return [*found] == [UNREADABLE]


def progress(text: str | None) -> Progress | None:
    """Parse reported progress. Unreadable progress gets the stage "unreadable"."""
    return _read(text, _progress, marker=lambda shown: Progress(stage=UNREADABLE, message=shown[:_SHOWN]))


def failed_try(text: str | None) -> FailedTry | None:
    """Parse a step's failed try. Return None if it is unreadable."""
    return _read(text, _failed_try, marker=lambda _: None)


def names(found: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return the names in a text array. NULL elements and nested arrays are converted to text."""
    return None if found is None else tuple("NULL" if name is None else str(name) for name in found)


def state(name: str | None) -> TaskState | None:
    """Return a task's state. A text that is not a state is returned unchanged."""
    return cast(TaskState | None, TaskState._value2member_map_.get(name, name))


def _marker(text: str) -> Any:
    return {UNREADABLE: text[:_SHOWN]}


def _read(text: str | None, decoder: msgspec.json.Decoder[T], *, marker: Any) -> T | None:
    if text is None:
        return None
    try:
        return decoder.decode(text)
    except _BROKEN:
        return cast(T, marker(text))
