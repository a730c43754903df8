"""Stored values as Python has them; a value that cannot be read becomes a marker, so that one row never hides the others of a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec

from everbeat.domain.inspection import Progress
from everbeat.domain.states import TaskState

T = TypeVar("T")

UNREADABLE: Final = "unreadable"
"""The key, or the stage of a progress, under which the start of an unreadable value is shown."""
_SHOWN: Final = 200
_BROKEN: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
_any = msgspec.json.Decoder()
_object = msgspec.json.Decoder(dict[str, Any])
_progress = msgspec.json.Decoder(Progress)


def document(text: str | None) -> Any:
    """A JSON value; an unreadable one as `{"unreadable": "its start"}`."""
    return _read(text, _any, marker=_marker)


def mapping(text: str | None) -> Mapping[str, Any]:
    """A JSON object, empty where nothing is stored; an unreadable one as for `document`."""
    return optional_mapping(text) or {}


def optional_mapping(text: str | None) -> Mapping[str, Any] | None:
    """A JSON object, None where nothing is stored; an unreadable one as for `document`."""
    return _read(text, _object, marker=_marker)


def is_marker(found: Mapping[str, Any]) -> bool:
    """Whether an object stands for one that cannot be read."""
    return [*found] == [UNREADABLE]


def progress(text: str | None) -> Progress | None:
    """Reported progress; an unreadable one has the stage "unreadable"."""
    return _read(text, _progress, marker=lambda shown: Progress(stage=UNREADABLE, message=shown[:_SHOWN]))


def names(found: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Names from a text array; NULL elements and inner arrays are shown as such."""
    return None if found is None else tuple("NULL" if name is None else str(name) for name in found)


def state(name: str | None) -> TaskState | None:
    """A task's state; a text that is no state stays as it is."""
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
