"""JSON of one annotated type, both ways, checked so that what arrives equals what was sent.

What lives here: the hot path of every send and every result. What may not: explanations (`fidelity`),
signatures (`signature`), names of tasks.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

import msgspec

from everbeat.domain.fidelity import ENDLESS, Misfit, difference, nonfinite, unencodable
from everbeat.domain.foreign_types import decode_foreign, encode_foreign

LARGEST_BYTES: Final = 256 * 1024 * 1024
"""The largest payload that an app can allow: PostgreSQL ends at 1 GB, and both ends hold several copies while they work."""

TOO_LARGE_FIX: Final = "keep large data elsewhere and send where it is, or raise App(payload_limit=...)"

encode_json = msgspec.json.Encoder(enc_hook=encode_foreign).encode
decode_json = msgspec.json.Decoder().decode

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")


class TypedJson:
    """The JSON of one annotation; `encode` and `decode` raise `Misfit`."""

    __slots__ = ("_largest", "_read")

    def __init__(self, annotation: Any, *, largest: int = LARGEST_BYTES) -> None:
        self._largest = largest
        self._read = msgspec.json.Decoder(annotation, dec_hook=decode_foreign).decode

    def encode(self, value: Any) -> bytes:
        """The value as JSON, after reading it back the way its receiver will."""
        try:
            data = encode_json(value)
            arrived = self._read(data)
            faithful = arrived == value
        except Exception as error:  # noqa: BLE001 - fields, hooks and __eq__ are user code and fail in any way
            raise _explained(value, error) from None
        # Equality costs less than encoding, and sees everything at once: NaN, lost fields, changed types.
        if not faithful:
            _require_faithful(value, arrived)
        require_room(data, largest=self._largest)
        return data

    def decode(self, data: bytes | str) -> Any:
        """The value that was encoded."""
        try:
            return self._read(data)
        except Exception as error:  # noqa: BLE001 - __post_init__ and validators are user code and fail in any way
            raise _unreadable(error) from None


def typed_json(annotation: Any) -> TypedJson:
    """The JSON of an annotation, made once for those that are asked for often."""
    try:
        return _typed_json(annotation)
    except TypeError:  # unhashable
        return TypedJson(annotation)


@lru_cache(maxsize=256)
def _typed_json(annotation: Any) -> TypedJson:
    return TypedJson(annotation)


def encode_untyped(value: Any, *, largest: int = LARGEST_BYTES) -> bytes:
    """The JSON of a value whose receiver's annotations are unknown here; refuses what JSON would silently
    change, and more than `largest` bytes.
    """
    try:
        data = encode_json(value)
        # NaN and infinities become null, so without a null there is none to look for.
        misfit = nonfinite(value) if b"null" in data else None
    except Exception as error:  # noqa: BLE001 - fields and hooks are user code and fail in any way
        raise unencodable(value, encode_json, error) from None
    if misfit is not None:
        raise misfit
    require_room(data, largest=largest)
    return data


def require_plain(value: Any, data: bytes) -> None:
    """Raises Misfit unless `data`, which is the value's JSON, comes back equal without any annotation."""
    arrived = decode_json(data)
    try:
        if arrived == value:
            return
    except Exception:  # noqa: BLE001, S110 - an __eq__ that raises says nothing; the parts are compared instead
        pass
    _require_faithful(value, arrived)


def _require_faithful(value: Any, arrived: Any) -> None:
    try:
        misfit = difference(value, arrived)
    except RecursionError:
        misfit = Misfit("", ENDLESS)
    if misfit is not None:
        raise misfit


def _explained(value: Any, error: Exception) -> Misfit:
    try:
        encode_json(value)
    except Exception as refused:  # noqa: BLE001 - as above: tells encoding from decoding errors
        return unencodable(value, encode_json, refused)
    try:
        return nonfinite(value) or _unreadable(error)
    except RecursionError:
        return Misfit("", ENDLESS)


def _unreadable(error: Exception) -> Misfit:
    match error:
        case RecursionError():
            return Misfit("", ENDLESS)
        case msgspec.ValidationError():
            text = " ".join(str(error).split())  # pydantic writes several lines
            place = _PLACE.search(text)
            reason = text[: place.start()] if place else text
            return Misfit(place["path"] if place else "", reason[:1].lower() + reason[1:])
        case msgspec.DecodeError() | UnicodeError():
            return Misfit("", f"is not JSON: {error}")
        case _:
            return Misfit("", f"is refused by its own class: {type(error).__qualname__}: {error}")


def require_room(data: bytes, *, largest: int) -> None:
    """Raises Misfit for more than `largest` bytes of JSON."""
    if len(data) > largest:
        reason = f"would take {len(data):,} bytes of JSON; App.payload_limit allows {largest:,}"
        raise Misfit("", reason, TOO_LARGE_FIX)
