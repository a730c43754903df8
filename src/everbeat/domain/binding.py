"""Arguments of a call as one struct with a field for each parameter, and that struct as a call again.

What lives here: `Binding`, which follows Python's own rules for `/`, `*`, defaults, `*args` and `**kwargs`.
What may not: JSON and error messages (`codec`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, final

import msgspec
from msgspec import UNSET, UnsetType

from everbeat.domain.outcome_json import carried
from everbeat.domain.signature import TaskSignature

_POSITIONAL_ONLY: Final = inspect.Parameter.POSITIONAL_ONLY
_EITHER: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
_REST: Final = inspect.Parameter.VAR_POSITIONAL
_KEYWORD_ONLY: Final = inspect.Parameter.KEYWORD_ONLY
_NAMED_REST: Final = inspect.Parameter.VAR_KEYWORD


@final
class Binding:
    """The way from `(*args, **kwargs)` to a struct, and back.

    A parameter that is left out stays out: its field is unset, and the function's default applies when it
    runs.
    """

    __slots__ = ("_names", "_parameters", "_plain", "_positional", "_signature", "bind", "struct")

    def __init__(self, signature: TaskSignature, *, name: str) -> None:
        self._signature = signature.bindable
        self._parameters = tuple((each.name, each.kind, each.default) for each in signature.parameters)
        self._names = tuple(name for name, _, _ in self._parameters)
        self._positional = sum(1 for _, kind, _ in self._parameters if kind is _EITHER)
        # A struct binds in 0.1 µs what inspect binds in 2 µs, but it knows neither `/` nor `*xs` nor `**kw`.
        self._plain = all(kind in (_EITHER, _KEYWORD_ONLY) for _, kind, _ in self._parameters)
        self.struct = _struct(signature, name=name, keywords_only=not self._plain)
        self.bind: Callable[..., msgspec.Struct] = self.struct if self._plain else self._bind_slowly

    def mistake(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What is wrong with a call that `bind` refused with TypeError, in Python's words."""
        # A name that is mistyped is missing, too; what was written says more than what was not.
        if not any(kind is _NAMED_REST for _, kind, _ in self._parameters):
            for name in kwargs:
                if name not in self._names:
                    return f"got an unexpected keyword argument {name!r}"
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            return str(error)
        # Python 3.13.0 takes a keyword among the further ones for a positional-only parameter of that name.
        optional = (_REST, _NAMED_REST)
        for name, kind, default in self._parameters:
            if kind not in optional and default is inspect.Parameter.empty and name not in given:
                return f"missing a required argument: {name!r}"
        return "the arguments do not fit"

    def call(self, bound: msgspec.Struct) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to pass to the function; raises TypeError if extra keywords repeat a parameter."""
        values = msgspec.structs.astuple(bound)
        if self._plain:
            split = end = self._positional
            while end and values[end - 1] is UNSET:
                end -= 1
            kept, named = values[:end], values[split:]
            # By identity: values of users may compare in ways of their own.
            if not any(map(_is_unset, kept)) and not any(map(_is_unset, named)):
                return kept, dict(zip(self._names[split:], named, strict=True)) if named else {}
        return self._call_with_gaps(values)

    def _call_with_gaps(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A wrapper may name its parameters otherwise, so what can be passed by position is."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        # What stands before `*xs` cannot be left out once there are xs.
        filled = any(
            kind is _REST and value for (_, kind, _), value in zip(self._parameters, values, strict=True)
        )
        gap = False
        for (name, kind, default), value in zip(self._parameters, values, strict=True):
            unset = value is UNSET
            if unset and (kind is _POSITIONAL_ONLY or (kind is _EITHER and filled)):
                positional.append(default)
            elif unset:
                gap = True
            elif kind is _REST:
                positional.extend(value)
            elif kind is _NAMED_REST:
                self._require_new(value)
                named.update(value)
            elif kind is _KEYWORD_ONLY or gap:
                named[name] = value
            else:
                positional.append(value)
        return tuple(positional), named

    def _bind_slowly(self, /, *args: Any, **kwargs: Any) -> msgspec.Struct:
        values = self._signature.bind(*args, **kwargs).arguments
        for name, kind, _ in self._parameters:
            if kind is _REST and name in values:
                values[name] = [*values[name]]
        return self.struct(**values)

    def _require_new(self, rest: dict[str, Any]) -> None:
        for name, kind, _ in self._parameters:
            if name in rest and kind in (_EITHER, _KEYWORD_ONLY):
                raise TypeError(f"{name!r} is given twice, as a parameter and among the further keywords")


def _is_unset(value: object) -> bool:
    return value is UNSET


def _struct(signature: TaskSignature, *, name: str, keywords_only: bool) -> type[msgspec.Struct]:
    positional: list[Any] = []
    named: list[Any] = []
    for each in signature.parameters:
        annotation = carried(signature.annotations[each.name])
        required = each.name in signature.required
        fields = named if keywords_only or each.kind is _KEYWORD_ONLY else positional
        fields.append((each.name, annotation) if required else (each.name, annotation | UnsetType, UNSET))
    # Named fields come last in a struct, as keyword-only parameters do in a signature.
    base = msgspec.defstruct(name, positional)
    return msgspec.defstruct(name, named, bases=(base,), kw_only=True, forbid_unknown_fields=True)
