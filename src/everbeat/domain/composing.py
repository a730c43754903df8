"""Arguments of which some are not known yet, as a template of JSON text with holes.

What lives here: `compose`, which encodes what is known and checks it as a send does. What may not: whose placeholders may be used
where, and whether they fit: who asks gets them as `Placed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from msgspec import inspect as types

from everbeat.domain.codec import CallCodec
from everbeat.domain.fitting import fits
from everbeat.domain.foreign_types import fields_of
from everbeat.domain.graph import Hole, Template
from everbeat.domain.placeholder import Promise, promise_of
from everbeat.domain.settings import shown
from everbeat.domain.shapes import ANY, inner, shape_of, spelled
from everbeat.domain.typed_json import TOO_LARGE_FIX
from everbeat.errors import PayloadError


class Placed(Struct, frozen=True, kw_only=True):
    """A placeholder in an argument: where it stands, and the shape that is wanted there."""

    promise: Promise
    parameter: str
    place: str
    wanted: types.Type


class Composed(Struct, frozen=True, kw_only=True):
    """The arguments of a call: `args` when all are known, otherwise a template, and what was placed in it.

    `open_names`: the parameters whose arguments are not known.
    """

    args: str | None = None
    template: Template | None = None
    placed: tuple[Placed, ...] = ()
    open_names: frozenset[str] = frozenset()


def compose(
    codec: CallCodec, bound: msgspec.Struct, *, only_open: bool = False, largest: int | None = None
) -> Composed:
    """The arguments of a bound call that may hold placeholders; raises PayloadError as a send does.

    `only_open`: those that are known are checked, and left out of the template. `largest`: bytes of JSON; None takes the codec's.
    """
    largest = codec.largest if largest is None else largest
    given = {name: value for name in codec.parameters if (value := getattr(bound, name)) is not UNSET}
    open_ones = {name for name, value in given.items() if holds_placeholder(value)}
    if not open_ones:
        return Composed(args=codec.encode_bound(bound).decode())
    text = _Text()
    for name, value in given.items():
        known = None if name in open_ones else codec.encode_part(value, codec.annotations[name], name)
        if known is not None and only_open:
            continue
        text.add(f"{',' if text.parts else '{'}{msgspec.json.encode(name).decode()}:")
        if known is None:
            _Argument(codec, name, text).put(value, codec.annotations[name], "")
        else:
            text.add(known.decode())
    text.add("}")
    template = text.template()
    size = sum(len(part.encode()) for part in template if isinstance(part, str))
    if size > largest:
        message = f"The arguments of {codec.owner} would take {size:,} bytes of JSON; App.payload_limit allows {largest:,}."
        raise PayloadError(message, fix=f"{TOO_LARGE_FIX}.")
    return Composed(template=template, placed=tuple(text.placed), open_names=frozenset(open_ones))


def holds_placeholder(value: object) -> bool:
    """Whether the value is one, or a list, tuple or dict with one in it."""
    try:
        return _holds(value)
    except RecursionError:
        return False  # what contains itself is refused when it is encoded


def leaves(value: object, *, hidden: bool = False) -> Iterator[tuple[object, bool]]:
    """The objects in a value, and of each whether it is hidden from `compose`: in another object, in a set, or as a key."""
    match value:
        case dict():
            for key, part in value.items():
                yield from leaves(key, hidden=True)
                yield from leaves(part, hidden=hidden)
        case list() | tuple():
            for part in value:
                yield from leaves(part, hidden=hidden)
        case set() | frozenset():
            for part in value:
                yield from leaves(part, hidden=True)
        case _:
            yield value, hidden
            fields = None if promise_of(value) is not None else fields_of(value)
            for part in (fields or {}).values():
                yield from leaves(part, hidden=True)


def _holds(value: object) -> bool:
    if promise_of(value) is not None:
        return True
    if isinstance(value, list | tuple):
        return any(map(_holds, value))
    return isinstance(value, dict) and any(map(_holds, value.values()))


class _Text:
    """A template as it grows."""

    def __init__(self) -> None:
        self.parts: list[str | Hole] = []
        self.placed: list[Placed] = []

    def add(self, text: str) -> None:
        self.parts.append(text)

    def add_hole(self, placed: Placed) -> None:
        promise = placed.promise
        self.parts.append(Hole(promise.origin.source, promise.wants, promise.path))
        self.placed.append(placed)

    def template(self) -> Template:
        """The parts, with texts that meet made one."""
        joined: list[str | Hole] = []
        run: list[str] = []
        for part in [*self.parts, None]:
            if isinstance(part, str):
                run.append(part)
                continue
            if run:
                joined.append("".join(run))
                run = []
            if part is not None:
                joined.append(part)
        return tuple(joined)


class _Argument:
    """One argument with placeholders, put into a template part by part."""

    def __init__(self, codec: CallCodec, name: str, text: _Text) -> None:
        self._codec = codec
        self._name = name
        self._text = text

    def put(self, value: Any, annotation: Any, place: str) -> None:
        """The value at a place of the argument, whose annotation there this is."""
        promise = promise_of(value)
        if promise is not None:
            wanted = shape_of(annotation)
            self._text.add_hole(
                Placed(promise=promise, parameter=self._name, place=f"{self._name}{place}", wanted=wanted)
            )
        elif not holds_placeholder(value):
            self._text.add(self._codec.encode_part(value, annotation, f"{self._name}{place}").decode())
        elif isinstance(value, dict):
            self._require(types.DictType(ANY, ANY), value, annotation, place)
            for number, (key, part) in enumerate(value.items()):
                self._text.add(f"{',' if number else '{'}{self._key(key, place)}:")
                self.put(part, inner(annotation, key), f"{place}[{key!r}]")
            self._text.add("}")
        else:
            self._require(types.ListType(ANY), value, annotation, place)
            for number, part in enumerate(value):
                self._text.add("," if number else "[")
                self.put(part, inner(annotation, number), f"{place}[{number}]")
            self._text.add("]")

    def _require(self, shape: types.Type, value: object, annotation: Any, place: str) -> None:
        wanted = shape_of(annotation)
        if not fits(shape, wanted):
            kind = type(value).__name__
            raise self._refusal(f"{shown(value)} is a {kind} where {spelled(wanted)} is wanted", place)

    def _key(self, key: object, place: str) -> str:
        try:
            return msgspec.json.encode({key: None}).decode()[1:-6]
        except Exception:  # noqa: BLE001 - keys are encoded here and fail in several ways
            raise self._refusal(f"{shown(key)} is no key that JSON can carry", place) from None

    def _refusal(self, reason: str, place: str) -> PayloadError:
        message = f"Argument {self._name!r} of {self._codec.owner} does not fit: {reason}{place and f' (at {self._name}{place})'}."
        return PayloadError(message, parameter=self._name, fix=f"{self._codec.usage}.")
