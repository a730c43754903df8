"""Placeholders for the results of other nodes, and the argument templates that contain them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, Protocol

import msgspec
from msgspec import UNSET, Struct
from msgspec import inspect as types

from everbeat.domain.settings.settings import shown
from everbeat.domain.task.definition import CallCodec
from everbeat.domain.typed_json import TOO_LARGE_FIX, fields_of
from everbeat.domain.workflow.graph import Hole, Template, Wanted
from everbeat.domain.workflow.shapes import ANY, NoPart, Part, attribute, fits, inner, item, shape_of, spelled
from everbeat.errors import NoSuchPart, PayloadError, PlaceholderUsed
from everbeat.errors.wording import amount


class Origin(Protocol):
    """The source of a placeholder's value: a node, the input of a workflow, or an item of a map."""

    @property
    def owner(self) -> object:
        """Return the workflow in which the placeholder can be used."""

    @property
    def source(self) -> int:
        """Return the number of the node, or INPUT or ITEM."""

    @property
    def title(self) -> str:
        """Return the name of the origin in messages, such as "node 'pay'"."""


class Promise(Struct, frozen=True, kw_only=True, eq=False):
    """The future value of a placeholder: the part at `path` in the JSON of `origin`, or the whole outcome.

    With `among`, it is the value of the first of these nodes that completes. The origin is then one of them.

    `steps` is the path as written in Python. If the parts of the value cannot be accessed, `whole` says why.
    """

    origin: Origin
    among: tuple[int, ...] = ()
    wants: Wanted = "value"
    path: tuple[str | int, ...] = ()
    shape: types.Type
    steps: str = ""
    whole: str | None = None

    def __repr__(self) -> str:
        if self.among:
            return f"<first result{self.steps} of {amount(len(self.among), 'node')}>"
        kind = "value" if self.origin.source < 0 else "result" if self.wants == "value" else "outcome"
        return f"<{kind}{self.steps} of {self.origin.title}>"

    @property
    def type_name(self) -> str:
        """Return the type of the value, written as an annotation."""
        return spelled(self.shape)

    @property
    def sources(self) -> tuple[int, ...]:
        """Return all nodes whose result can become the value."""
        return self.among or (self.origin.source,)

    def hole(self) -> Hole:
        """Return the place of this value in a template."""
        return Hole(self.among or self.origin.source, self.wants, self.path)

    def part(self, find: Callable[[types.Type], Part], step: str) -> Placeholder:
        """Return a placeholder for the part of the value that `find` selects. Raises NoSuchPart if the value has no such part."""
        if self.whole is not None:
            raise NoSuchPart(repr(self), step, self.whole)
        try:
            found = find(self.shape)
        except NoPart as error:
            raise NoSuchPart(repr(self), step, error.reason, choices=error.choices, fix=error.fix) from None
        return Placeholder(
            Promise(
                origin=self.origin,
                among=self.among,
                wants=self.wants,
                path=(*self.path, found.step),
                shape=found.shape,
                steps=self.steps + step,
            )
        )


_OPERATORS: Final = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor"
_USES: Final = {
    "tested for truth": "__bool__",
    "compared": "__eq__ __ne__ __lt__ __le__ __gt__ __ge__",
    "looped over": "__iter__ __aiter__ __reversed__",
    "measured": "__len__ __length_hint__",
    "searched": "__contains__",
    "called": "__call__",
    "awaited": "__await__",
    "entered": "__enter__ __exit__ __aenter__ __aexit__",
    "written as text": "__str__ __format__ __bytes__",
    "used as a number": "__int__ __float__ __complex__ __index__ __round__ __trunc__ __floor__ __ceil__",
    "calculated with": "__neg__ __pos__ __abs__ __invert__ __divmod__ __rdivmod__ "
    + " ".join(f"__{side}{name}__" for side in ("", "r", "i") for name in _OPERATORS.split()),
    "changed": "__setitem__ __delitem__",
}
_FIX: Final = "pass it as an argument, and do that in the task that receives it"
_FIXES: Final = {
    "tested for truth": "let .when(...) or .unless(...) of a node decide, or decide in the task that receives it",
    "looped over": "write wf.map(task, ...) to run a task for each item, or loop in the task that receives it",
}


def _refusal(use: str) -> Callable[..., NoReturn]:
    def refuse(self: Placeholder, *_: object, **__: object) -> NoReturn:
        raise PlaceholderUsed(repr(self), use, fix=_FIXES.get(use, _FIX))

    return refuse


class Placeholder:
    """A placeholder for a value that does not exist yet. Its attributes and items are placeholders for parts of the value."""

    # The value can have attributes with any name, so this class itself has only one attribute.
    __slots__ = ("_everbeat_promise",)

    def __init__(self, promise: Promise) -> None:
        self._everbeat_promise = promise

    def __repr__(self) -> str:
        return repr(self._everbeat_promise)

    def __getattr__(self, name: str) -> Placeholder:
        # Python probes for special methods, which a placeholder does not have. A placeholder under construction has no promise yet.
        if name == "_everbeat_promise" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"a placeholder of a workflow has no {name}", name=name, obj=None)
        return self._everbeat_promise.part(lambda shape: attribute(shape, name), f".{name}")

    def __getitem__(self, key: Any) -> Placeholder:
        step = f"[{key._everbeat_promise!r}]" if isinstance(key, Placeholder) else f"[{shown(key)}]"
        return self._everbeat_promise.part(lambda shape: item(shape, key), step)

    __hash__ = object.__hash__


for _use, _names in _USES.items():
    for _name in _names.split():
        setattr(Placeholder, _name, _refusal(_use))


def promise_of(value: object) -> Promise | None:
    """Return the promise of a placeholder, or None for any other value."""
    return value._everbeat_promise if isinstance(value, Placeholder) else None


class Placed(Struct, frozen=True, kw_only=True):
    """A placeholder inside an argument, with its location and the shape that is expected there."""

    promise: Promise
    parameter: str
    place: str
    expected: types.Type


class Composed(Struct, frozen=True, kw_only=True):
    """The arguments of a call: `args` if all of them are known, otherwise a template and its placeholders.

    `open_names` are the parameters whose arguments are not yet known.
    """

    args: str | None = None
    template: Template | None = None
    placed: tuple[Placed, ...] = ()
    open_names: frozenset[str] = frozenset()


def compose(
    codec: CallCodec, bound: msgspec.Struct, *, only_open: bool = False, largest: int | None = None
) -> Composed:
    """Return the arguments of a bound call that may contain placeholders. Raises PayloadError if an argument cannot be sent.

    If `only_open` is set, known arguments are checked but omitted from the template. `largest` is the limit in bytes of JSON.
    None means the codec's own limit.
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
    """Return whether the value is a placeholder, or a list, tuple or dict that contains one."""
    try:
        return _holds(value)
    except RecursionError:
        return False  # the encoder rejects a value that contains itself


def leaves(value: object, *, hidden: bool = False) -> Iterator[tuple[object, bool]]:
    """Yield each object in `value`, and whether it is out of reach of `compose`: in another object, a set or a dict key."""
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
    """A template under construction."""

    def __init__(self) -> None:
        self.parts: list[str | Hole] = []
        self.placed: list[Placed] = []

    def add(self, text: str) -> None:
        self.parts.append(text)

    def add_hole(self, placed: Placed) -> None:
        promise = placed.promise
        self.parts.append(promise.hole())
        self.placed.append(placed)

    def template(self) -> Template:
        """Return the parts of the template, with adjacent text parts joined."""
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
    """Adds one argument that contains placeholders to a template, part by part."""

    def __init__(self, codec: CallCodec, name: str, text: _Text) -> None:
        self._codec = codec
        self._name = name
        self._text = text

    def put(self, value: Any, annotation: Any, place: str) -> None:
        """Add the value at `place` in the argument. `annotation` is the expected type at that place."""
        promise = promise_of(value)
        if promise is not None:
            expected = shape_of(annotation)
            self._text.add_hole(
                Placed(promise=promise, parameter=self._name, place=f"{self._name}{place}", expected=expected)
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
        expected = shape_of(annotation)
        if not fits(shape, expected):
            kind = type(value).__name__
            raise self._refusal(f"{shown(value)} is a {kind} where {spelled(expected)} is expected", place)

    def _key(self, key: object, place: str) -> str:
        try:
            return msgspec.json.encode({key: None}).decode()[1:-6]
        except Exception:  # noqa: BLE001 - encoding a key can fail in several ways
            raise self._refusal(f"{shown(key)} cannot be a JSON key", place) from None

    def _refusal(self, reason: str, place: str) -> PayloadError:
        message = f"Argument {self._name!r} of {self._codec.owner} does not fit: {reason}{place and f' (at {self._name}{place})'}."
        return PayloadError(message, parameter=self._name, fix=f"{self._codec.usage}.")
