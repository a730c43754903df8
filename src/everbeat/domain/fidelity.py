"""Why a value does not survive the way through JSON, told so that its sender can mend it.

What lives here: `Misfit`, and the searches for the guilty part of a value. They run only after something
was refused, so they may be slow. What may not live here: encoding and decoding (`typed_json`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from everbeat.domain.foreign_types import fields_of

ENDLESS = "is nested too deeply, or contains itself"


class Misfit(Exception):
    """A value that JSON or its annotation cannot carry: where in the value, what is wrong, what to do
    instead.
    """

    def __init__(self, path: str, reason: str, fix: str | None = None) -> None:
        super().__init__(path, reason, fix)
        self.path = path
        self.reason = reason
        self.fix = fix


def nonfinite(value: object, path: str = "") -> Misfit | None:
    """The first NaN or infinity in the value: JSON would turn it into null."""
    if isinstance(value, float):
        return None if math.isfinite(value) else _not_a_number(value, path)
    return next(filter(None, (nonfinite(part, path + step) for step, part in _parts(value))), None)


def unencodable(value: object, encode: Callable[[Any], bytes], error: Exception, path: str = "") -> Misfit:
    """The innermost part of the value that `encode` refuses; `error` is what it raised for the whole."""
    if isinstance(error, RecursionError):
        return Misfit(path, ENDLESS)
    keys = (("", key) for key in value) if isinstance(value, dict) else ()
    for step, part in chain(_parts(value), keys):
        try:
            encode(part)
        except Exception as inner:  # noqa: BLE001 - user classes are encoded here and fail in any way
            return unencodable(part, encode, inner, path + step)
    if isinstance(error, UnicodeEncodeError):
        wrong = error.object[error.start : error.start + 1]
        reason = f"holds the lone surrogate {wrong!a}, which is no Unicode character and cannot be stored"
        return Misfit(
            path, reason, 'decode the bytes it came from with errors="replace", or send them as bytes'
        )
    if isinstance(value, dict):
        return Misfit(path, f"has keys that JSON cannot carry ({error})", "use str keys")
    kind = type(value).__qualname__
    return Misfit(
        path, f"is of type {kind}, which cannot be JSON", "send its id, a dataclass or plain values instead"
    )


def difference(sent: Any, arrived: Any, path: str = "") -> Misfit | None:
    """The first part of `sent` that would arrive as something else; a tuple may arrive as a list and back."""
    if _equal(sent, arrived):
        return None
    if isinstance(sent, float) and not math.isfinite(sent):
        return _not_a_number(sent, path)
    match sent, arrived:
        case (list() | tuple(), list() | tuple()) if not _loses_names(sent, arrived):
            if _equal([*sent], [*arrived]):
                return None
            pairs = zip(sent, arrived, strict=True)
            return _first((one, other, f"{path}[{index}]") for index, (one, other) in enumerate(pairs))
        case dict(), dict():
            for key in sent:
                if key not in arrived:
                    return _lost_key(key, path)
            return _first((sent[key], arrived[key], f"{path}[{key!r}]") for key in sent)
        case _:
            pass
    fields, kept = fields_of(sent), fields_of(arrived)
    if fields is not None and kept is not None and type(sent) is type(arrived):
        return _first((fields[name], kept.get(name), f"{path}.{name}") for name in fields)
    return Misfit(path, *_changed(sent, arrived))


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    match value:
        case dict():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{index}]", part) for index, part in enumerate(value))
        case _:
            yield from ((f".{name}", part) for name, part in (fields_of(value) or {}).items())


def _first(pairs: Iterator[tuple[Any, Any, str]]) -> Misfit | None:
    return next(filter(None, (difference(*pair) for pair in pairs)), None)


def _equal(sent: Any, arrived: Any) -> bool:
    try:
        return bool(sent == arrived)
    except Exception:  # noqa: BLE001 - an __eq__ that raises says nothing; the parts are compared instead
        return False


def _loses_names(sent: object, arrived: object) -> bool:
    return hasattr(type(sent), "_fields") and type(sent) is not type(arrived)


def _not_a_number(value: float, path: str) -> Misfit:
    return Misfit(path, f"is {value}, which JSON does not have", "send None, or a str or Decimal, instead")


def _lost_key(key: object, path: str) -> Misfit:
    if isinstance(key, str):
        return Misfit(path, f"has the key {key!r}, which its annotation does not know and would lose")
    return Misfit(path, f"has the key {key!r}, which would arrive as a str", "annotate the type of the keys")


def _changed(sent: object, arrived: object) -> tuple[str, str]:
    was, becomes = type(sent).__qualname__, type(arrived).__qualname__
    if was == becomes:
        return f"is of type {was} and would arrive changed", "send what its annotation reads back equal"
    lost = (fields_of(sent) or {}).keys() - (fields_of(arrived) or {}).keys()
    if isinstance(sent, type(arrived)) and lost:
        return (
            f"is of type {was}, would arrive as {becomes} and lose {', '.join(sorted(lost))}",
            f"annotate {was}",
        )
    return f"is of type {was} and would arrive as {becomes}", f"annotate {was}, or send {becomes}"
