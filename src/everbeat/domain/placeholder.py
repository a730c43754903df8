"""What stands for the result of a node while a workflow is built.

What lives here: `Placeholder`, which users hand on, and `Promise`, what it stands for. What may not: nodes and workflows
(`client.workflow`), where a placeholder is put (`composing`).

A placeholder has the type of the value for type checkers, and is none: whatever would need the value raises, and says which node has
not run yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol

from msgspec import Struct
from msgspec import inspect as types

from everbeat.domain.graph import Wanted
from everbeat.domain.settings import shown
from everbeat.domain.shapes import NoPart, Part, attribute, item, spelled
from everbeat.errors import NoSuchPart, PlaceholderUsed


class Origin(Protocol):
    """Where a promised value will come from: a node, the input of a workflow, an item of a map."""

    @property
    def owner(self) -> object:
        """The workflow in which it may be used."""

    @property
    def source(self) -> int:
        """The number of the node, INPUT or ITEM."""

    @property
    def title(self) -> str:
        """What messages call it: node 'pay'."""


class Promise(Struct, frozen=True, kw_only=True, eq=False):
    """What a placeholder stands for: the value at `path` in the JSON of what `origin` gives, or its whole outcome.

    `steps`: the path as it was written in Python. `whole`: why it has no parts that could be named.
    """

    origin: Origin
    wants: Wanted = "value"
    path: tuple[str | int, ...] = ()
    shape: types.Type
    steps: str = ""
    whole: str | None = None

    def __repr__(self) -> str:
        kind = "value" if self.origin.source < 0 else "result" if self.wants == "value" else "outcome"
        return f"<{kind}{self.steps} of {self.origin.title}>"

    @property
    def type_name(self) -> str:
        """Its type as it is annotated."""
        return spelled(self.shape)

    def part(self, find: Callable[[types.Type], Part], step: str) -> Placeholder:
        """The placeholder of a part of it; raises NoSuchPart."""
        if self.whole is not None:
            raise NoSuchPart(repr(self), step, self.whole)
        try:
            found = find(self.shape)
        except NoPart as error:
            raise NoSuchPart(repr(self), step, error.reason, choices=error.choices, fix=error.fix) from None
        return Placeholder(
            Promise(
                origin=self.origin,
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
_FIX: Final = "hand it on as an argument, and do that in the task that takes it"
_FIXES: Final = {
    "tested for truth": "let .when(...) or .unless(...) of a node decide, or decide in the task that takes it",
    "looped over": "write wf.map(task, ...) to run a task for each item, or loop in the task that takes it",
}


def _refusal(use: str) -> Callable[..., NoReturn]:
    def refuse(self: Placeholder, *_: object, **__: object) -> NoReturn:
        raise PlaceholderUsed(repr(self), use, fix=_FIXES.get(use, _FIX))

    return refuse


class Placeholder:
    """Stands for a value that is not there yet. Its attributes and items are placeholders of parts of the value."""

    # Any name may be an attribute of the value, so this has but one of its own.
    __slots__ = ("_everbeat_promise",)

    def __init__(self, promise: Promise) -> None:
        self._everbeat_promise = promise

    def __repr__(self) -> str:
        return repr(self._everbeat_promise)

    def __getattr__(self, name: str) -> Placeholder:
        # Python asks for some of these to find out what an object can; and without its promise it is half made.
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
    """What a value stands for, if it is a placeholder."""
    return value._everbeat_promise if isinstance(value, Placeholder) else None
