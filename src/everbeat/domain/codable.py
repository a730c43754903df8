"""Which annotations JSON can carry, decided when a task is registered.

What lives here: walking through an annotation, and the advice for what is refused. What may not: functions
and their parameters (`signature`), values (`fidelity`).
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from everbeat.domain.foreign_types import is_carried

_ADVICE: Final = {
    "Callable": "send the name of what to call",
    "function": "send the name of what to call",
    "Path": "annotate it as str and make the Path inside the task",
    "PosixPath": "annotate it as str and make the Path inside the task",
    "complex": "send the two parts as tuple[float, float]",
    "Iterable": "annotate it as list[...]",
    "Iterator": "annotate it as list[...]",
    "Generator": "annotate it as list[...]",
    "deque": "annotate it as list[...]",
    "range": "annotate it as tuple[int, int], or list[int]",
    "OrderedDict": "annotate it as dict[...]",
    "defaultdict": "annotate it as dict[...]",
    "tzinfo": "annotate it as str and send the zone's name",
    "ZoneInfo": "annotate it as str and send the zone's name",
    "type": "send the name of the class",
    "Context": "make it the function's first parameter",
}
_OTHERWISE: Final = "send its id, or annotate a dataclass, TypedDict, msgspec.Struct or pydantic model"

_KEYS: Final = (
    types.AnyType,
    types.StrType,
    types.IntType,
    types.FloatType,
    types.EnumType,
    types.LiteralType,
    types.UUIDType,
    types.DecimalType,
    types.DateTimeType,
    types.DateType,
    types.TimeType,
    types.TimeDeltaType,
    types.BytesType,
)


class Refusal(Struct, frozen=True):
    """Why an annotation cannot be carried, and what to annotate instead."""

    reason: str
    fix: str


def refusal(annotation: Any) -> Refusal | None:
    """Why values of this annotation cannot be sent through JSON, or None when they can."""
    variable = next(_type_variables(annotation), None)
    if variable is not None:
        return Refusal(
            f"is generic in {variable}, and a stored task has no type arguments", "name a concrete type"
        )
    try:
        described = types.type_info(annotation)
        msgspec.json.Decoder(annotation)
    except NameError as error:
        return Refusal(
            f"refers to {error.name!r}, which its module does not know", "define it at module level"
        )
    except Exception as error:  # noqa: BLE001 - msgspec raises TypeError, the annotated classes whatever they like
        fix = (
            "use one of them, or msgspec.Struct classes with tag=True"
            if "union" in str(error)
            else _OTHERWISE
        )
        return Refusal(f"cannot be carried by JSON: {str(error).rstrip('.')}", fix)
    return _refusal(described, "", set())


def _refusal(described: types.Type, place: str, seen: set[int]) -> Refusal | None:
    if id(described) in seen:  # recursive types describe themselves by the same object
        return None
    seen.add(id(described))
    match described:
        case types.CustomType() if not is_carried(described.cls):
            cls = described.cls
            return Refusal(
                f"{place}{cls.__qualname__} cannot be carried by JSON", _ADVICE.get(cls.__name__, _OTHERWISE)
            )
        case types.RawType() | types.ExtType():
            return Refusal(f"{place}{type(described).__name__} is not checked by anything", "annotate Any")
        case types.DictType() if not all(
            isinstance(each, _KEYS) for each in _alternatives(described.key_type)
        ):
            return Refusal(
                f"{place}has keys that JSON cannot carry", "use str, int, UUID or another plain key"
            )
        case _:
            pass
    for inner, where in _inner(described):
        found = _refusal(inner, place + where, seen)
        if found is not None:
            return found
    return None


def _alternatives(described: types.Type) -> tuple[types.Type, ...]:
    return described.types if isinstance(described, types.UnionType) else (described,)


def _inner(described: types.Type) -> Iterator[tuple[types.Type, str]]:
    match described:
        case types.UnionType():
            yield from ((each, "") for each in described.types)
        case types.DictType():
            yield described.value_type, ""
        case types.TupleType():
            yield from ((each, "") for each in described.item_types)
        case types.ListType() | types.SetType() | types.FrozenSetType() | types.VarTupleType():
            yield described.item_type, ""
        case types.StructType() | types.DataclassType() | types.TypedDictType() | types.NamedTupleType():
            yield from (
                (each.type, f"field {each.name!r} of {described.cls.__qualname__}: ")
                for each in described.fields
            )
        case _:
            return


def _type_variables(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, typing.TypeVar):
        yield annotation.__name__
    for argument in typing.get_args(annotation):
        yield from _type_variables(argument)
