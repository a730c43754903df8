"""Computes digests of call arguments. The digests are the same in every process.

Equal values have equal digests, regardless of the order of a dict or set, or the form of a number. Connections, clients and
objects of classes without fields are represented only by the name of their type. The public functions never raise an exception.
"""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import PurePath
from types import MethodType
from typing import Any, Final, final
from uuid import UUID
from weakref import WeakKeyDictionary

import msgspec

DIGEST_BYTES: Final = 16
MOST_VALUES: Final = 100_000
"""An argument with more values is represented by its type and length. Hashing this many values takes up to 0.2 s."""
DEEPEST: Final = 60

_ABSENT: Final = object()
_PLAIN: Final = (type(None), bool, int, float, str)


class _TooMany(Exception):
    """The argument has more than `MOST_VALUES` values."""


@final
class Canonical:
    """Converts one argument to bytes, traversing each container only once."""

    __slots__ = ("_depth", "_known", "_left")

    def __init__(self) -> None:
        self._left = MOST_VALUES
        self._depth = 0
        self._known: dict[int, tuple[Any, bytes, int]] = {}

    def argument(self, value: Any) -> bytes:
        """Return the argument as self-delimiting bytes, so that the bytes of several arguments can be joined."""
        try:
            return self._of(value)
        except _TooMany:
            return _text(
                b"L", f"{type(value).__qualname__} {len(value) if hasattr(value, '__len__') else ''}"
            )
        except Exception:  # noqa: BLE001 - attributes of users' classes are read here and can raise anything
            return _by_type(value)

    def _of(self, value: Any) -> bytes:
        encode = _EXACT.get(type(value))
        if encode is not None:
            return encode(value)
        known = self._known.get(id(value))
        if known is not None:
            self._spend(known[2])
            return known[1]
        if self._depth == DEEPEST:
            return _by_type(value)
        before = self._left
        self._known[id(value)] = (
            value,
            _by_type(value),
            0,
        )  # a value that contains itself is represented there by its type
        self._depth += 1
        try:
            found = self._compound(value)
        except _TooMany:
            raise
        except Exception:  # noqa: BLE001 - as above
            found = _by_type(value)
        finally:
            self._depth -= 1
        self._known[id(value)] = (value, found, before - self._left)
        return found

    def _compound(self, value: Any) -> bytes:
        match value:
            case list() | tuple():
                return self._joined(b"l", value)
            case dict():
                return self._in_any_order(b"d", self._pairs(value.items()), len(value))
            case set() | frozenset():
                return self._in_any_order(b"S", map(self._of, value), len(value))
            case Enum() if not isinstance(value, str | int | float | bytes):
                return _text(b"e", type(value).__qualname__) + self._of(value.value)
            case partial():
                return self._joined(b"p", (value.func, value.args, value.keywords))
            case MethodType():
                return self._joined(b"m", (value.__func__, value.__self__))
            case _:
                pass
        for base, encode in _BASES:
            if isinstance(value, base):
                return encode(value)
        kind: Any = type(value)
        fields = _fields(kind)
        if fields is None:
            name = getattr(value, "__qualname__", None)  # for functions and classes
            return _text(b"q", name) if isinstance(name, str) else _by_type(value)
        pairs = self._pairs(_set_fields(value, fields))
        return _text(b"o", type(value).__qualname__) + self._in_any_order(b"d", pairs, len(fields))

    def _pairs(self, items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
        return (self._of(key) + self._of(value) for key, value in items)

    def _joined(self, tag: bytes, values: Sequence[Any]) -> bytes:
        self._spend(len(values) + 1)
        return tag + _hashed(b"".join(map(self._of, values)))

    def _in_any_order(self, tag: bytes, parts: Iterable[bytes], count: int) -> bytes:
        self._spend(count + 1)
        return tag + _hashed(b"".join(sorted(parts)))

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise _TooMany


def _hashed(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _text(tag: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"%b%d:%b" % (tag, len(data), data)


def _by_type(value: Any) -> bytes:
    return _text(b"t", type(value).__qualname__)


def _int(value: int) -> bytes:
    return b"n%x;" % value


def _float(value: float) -> bytes:
    if value.is_integer():
        return _int(int(value))
    return b"f%b;" % ("nan" if math.isnan(value) else repr(value)).encode()


def _decimal(value: Decimal) -> bytes:
    """Encode a Decimal as the equal int or float, or by its digits if neither is equal."""
    if not value.is_finite():
        return _float(math.nan if value.is_nan() else float(value))
    if value.adjusted() < 60 and value == value.to_integral_value():
        return _int(int(value))
    if (near := float(value)) == value:
        return _float(near)
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits))
    short = text.rstrip("0")
    return _text(b"D", f"{sign} {short.lstrip('0')} {int(exponent) + len(text) - len(short)}")


def _moment(value: datetime.datetime) -> bytes:
    if value.utcoffset() is not None:
        value = value.astimezone(datetime.UTC)
    return _text(b"T", datetime.datetime.isoformat(value))


def _span(value: datetime.timedelta) -> bytes:
    return b"y%d,%d,%d;" % (value.days, value.seconds, value.microseconds)


def _bytes(value: bytes | bytearray | memoryview) -> bytes:
    data = bytes(value)
    return b"b%d:%b" % (len(data), data)


_EXACT: Final[Mapping[type, Callable[[Any], bytes]]] = {
    str: partial(_text, b"s"),
    int: _int,
    bool: lambda value: b"1" if value else b"0",
    type(None): lambda _: b"N",
    float: _float,
    bytes: _bytes,
    bytearray: _bytes,
    datetime.datetime: _moment,
    UUID: lambda value: b"u%b" % value.bytes,
    Decimal: _decimal,
}
_BASES: Final[tuple[tuple[type, Callable[[Any], bytes]], ...]] = (
    (str, lambda value: _text(b"s", str.__str__(value))),
    (int, lambda value: _int(int.__int__(value))),
    (float, lambda value: _float(float.__float__(value))),
    (bytes, _bytes),
    (bytearray, _bytes),
    (memoryview, _bytes),
    (datetime.datetime, _moment),
    (datetime.date, lambda value: _text(b"a", datetime.date.isoformat(value))),
    (datetime.time, lambda value: _text(b"h", datetime.time.isoformat(value))),
    (datetime.timedelta, _span),
    (UUID, lambda value: b"u%b" % value.bytes),
    (Decimal, _decimal),
    (PurePath, lambda value: _text(b"P", str(value))),
    (complex, lambda value: _text(b"c", repr(complex(value)))),
    (range, lambda value: _text(b"r", repr(value))),
)


@lru_cache(maxsize=1_000)
def _fields(kind: type) -> Mapping[str, Any] | None:
    """Return the compared fields of a dataclass, struct, pydantic model or attrs class, with their plain defaults.

    Return None for other classes, and for classes whose objects are equal only to themselves, such as Context. Also return
    None for ORM tables, because the loaded columns can differ between attempts.
    """
    if hasattr(kind, "__mapper__"):
        return None
    config = getattr(kind, "__struct_config__", None) or getattr(kind, "__dataclass_params__", None)
    if config is not None and not config.eq:
        return None
    if hasattr(kind, "__struct_fields__"):
        return {each.name: each.default for each in msgspec.structs.fields(kind)}
    if dataclasses.is_dataclass(kind):
        return {each.name: each.default for each in dataclasses.fields(kind) if each.compare}
    model_fields = getattr(kind, "model_fields", None)
    if isinstance(model_fields, Mapping):
        return {name: getattr(each, "default", _ABSENT) for name, each in model_fields.items()}
    attributes = getattr(kind, "__attrs_attrs__", None)
    return None if attributes is None else {each.name: each.default for each in attributes if each.eq}


def _set_fields(value: Any, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that differ from their defaults, so that adding a field to the class does not change the bytes."""
    for name, default in fields.items():
        given = getattr(value, name, _ABSENT)
        if given is not _ABSENT and not (
            isinstance(default, _PLAIN) and isinstance(given, _PLAIN) and given == default
        ):
            yield name, given
    if extra := getattr(value, "__pydantic_extra__", None):
        yield "", extra


_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def digest_of_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the digest of a call's arguments. Never raises an exception.

    Arguments are bound as in Python, so `f(1)` and `f(x=1)` have the same digest. A `partial` counts as its function with
    all arguments, and a method as its function with the object as the first argument. Defaults are omitted.
    """
    function, args, kwargs = _flat(function, args, kwargs)
    with suppress(
        TypeError, ValueError
    ):  # a builtin without a signature, or a call that would raise TypeError
        bound = _signature(function).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    return digest_of_values(args, kwargs)


def digest_of_values(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the digest of bound arguments. Never raises an exception."""
    hashed = blake2b(digest_size=DIGEST_BYTES)
    for value in args:
        hashed.update(Canonical().argument(value))
    for name in sorted(kwargs):
        hashed.update(b"k" + Canonical().argument(name) + Canonical().argument(kwargs[name]))
    return hashed.hexdigest()


def _flat(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    while isinstance(function, partial):
        args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
    if inspect.ismethod(function):
        return function.__func__, (function.__self__, *args), kwargs
    if inspect.isroutine(function) or isinstance(function, type) or hasattr(function, "__wrapped__"):
        return function, args, kwargs
    return type(function).__call__, (function, *args), kwargs


def _signature(function: Any) -> inspect.Signature:
    with suppress(TypeError):  # a function that does not support weak references is not cached
        if (known := _signatures.get(function)) is not None:
            return known
    read = inspect.signature(function)
    with suppress(TypeError):
        _signatures[function] = read
    return read
