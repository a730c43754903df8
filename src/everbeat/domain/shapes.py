"""What a value of an annotation is in JSON, and which parts of it can be named.

What lives here: `shape_of`, and the way from an attribute or index in Python to the step in JSON. What may not: whether one shape fits
another (`fitting`), values.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import UnionType
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from everbeat.domain.fitting import fits, plain
from everbeat.domain.settings import shown

ANY: Final = types.AnyType()
NONE: Final = types.NoneType()
WithFields: TypeAlias = types.StructType | types.DataclassType | types.TypedDictType | types.NamedTupleType


class Part(Struct, frozen=True):
    """A part of a shape: its step in JSON, and its own shape."""

    step: str | int
    shape: types.Type


class NoPart(Exception):
    """Why there is none; `choices` are those that there are, written as they are in Python, `fix` another way."""

    def __init__(self, reason: str, *, choices: Iterable[str] = (), fix: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.choices = tuple(choices)
        self.fix = fix


def shape_of(annotation: Any) -> types.Type:
    """The shape of an annotation; that of Any for what cannot be described."""
    try:
        return _shape_of(annotation)
    except Exception:  # noqa: BLE001 - the annotated classes raise whatever they like; a task of theirs is refused elsewhere
        return ANY


@lru_cache(maxsize=1_024)
def _shape_of(annotation: Any) -> types.Type:
    return plain(types.type_info(annotation))


def spelled(shape: types.Type) -> str:
    """The shape as an annotation is written."""
    match plain(shape):
        case types.UnionType(types=alternatives):
            return " | ".join(map(spelled, alternatives))
        case types.ListType(item_type=item):
            return f"list[{spelled(item)}]"
        case types.SetType(item_type=item) | types.FrozenSetType(item_type=item):
            return f"set[{spelled(item)}]"
        case types.VarTupleType(item_type=item):
            return f"tuple[{spelled(item)}, ...]"
        case types.TupleType(item_types=items):
            return f"tuple[{', '.join(map(spelled, items))}]"
        case types.DictType(key_type=key, value_type=value):
            return f"dict[{spelled(key)}, {spelled(value)}]"
        case types.LiteralType(values=values):
            return f"Literal[{', '.join(map(repr, values))}]"
        case other if (cls := getattr(other, "cls", None)) is not None:
            arguments = ", ".join(spelled(shape_of(each)) for each in typing.get_args(cls))
            return f"{cls.__qualname__}[{arguments}]" if arguments else str(cls.__qualname__)
        case other:
            name = type(other).__name__.removesuffix("Type")
            return name if name in ("Any", "None", "UUID", "Decimal") else name.lower()


def attribute(shape: types.Type, name: str) -> Part:
    """The part at an attribute; raises NoPart."""
    return _among(shape, lambda each: _attribute(each, name))


def item(shape: types.Type, key: object) -> Part:
    """The part at an index or key; raises NoPart."""
    return _among(shape, lambda each: _item(each, key))


def items_of(shape: types.Type) -> types.Type | None:
    """The shape of the items of a list; None if it is none."""
    match plain(shape):
        case types.AnyType():
            return ANY
        case types.UnionType(types=alternatives):
            found = [item for each in alternatives if (item := items_of(each)) is not None]
            return None if not found else found[0] if len(found) == 1 else types.UnionType(tuple(found))
        case types.TupleType(item_types=parts):
            return types.UnionType(parts) if parts else ANY
        case types.ListType(item_type=part) | types.VarTupleType(item_type=part):
            return part
        case types.SetType(item_type=part) | types.FrozenSetType(item_type=part):
            return part
        case types.CustomType(cls=cls) if cls is object or getattr(cls, "__pydantic_root_model__", False):
            return ANY
        case _:
            return None


def inner(annotation: Any, step: str | int) -> Any:
    """The annotation of what stands at a key or index of a list, tuple or dict of an annotation; Any where it says nothing."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return inner(arguments[0], step)
    if typing.is_typeddict(annotation):
        return typing.get_type_hints(annotation).get(str(step), Any)
    if origin in (typing.Union, UnionType) or not isinstance(origin, type) or not arguments:
        # Of a union the alternative that holds anything, if there is but one.
        found = [each for each in (inner(one, step) for one in arguments) if each is not Any]
        return found[0] if len(found) == 1 else Any
    if issubclass(origin, Mapping):
        return arguments[1] if len(arguments) == 2 else Any
    if issubclass(origin, tuple) and arguments[-1] is not Ellipsis:
        return arguments[step] if isinstance(step, int) and step < len(arguments) else Any
    return arguments[0] if isinstance(step, int) else Any


def _among(shape: types.Type, find: Callable[[types.Type], Part]) -> Part:
    shape = plain(shape)
    if not isinstance(shape, types.UnionType):
        return find(shape)
    found: list[Part] = []
    missing: list[NoPart] = []
    for each in shape.types:
        try:
            if not isinstance(each, types.NoneType):
                found.append(find(plain(each)))
        except NoPart as error:
            missing.append(error)
    if not found:
        raise missing[0]
    if len({part.step for part in found}) > 1:
        raise NoPart(f"it is written differently in each of {spelled(shape)}")
    shapes = tuple(part.shape for part in found)
    return Part(found[0].step, shapes[0] if len(shapes) == 1 else types.UnionType(shapes))


def _attribute(shape: types.Type, name: str) -> Part:
    match shape:
        case types.AnyType():
            return Part(name, ANY)
        case types.TypedDictType() | types.DictType():
            raise NoPart(f"it is a {spelled(shape)}", fix=f"write [{name!r}].")
        case types.StructType() | types.DataclassType() | types.NamedTupleType():
            return _field(shape, name)
        case types.CustomType(cls=cls) if cls is object:
            return Part(name, ANY)
        case types.CustomType(cls=cls) if is_model(cls):
            return _model_field(cls, name)
        case _:
            raise NoPart(f"it is a {spelled(shape)}, which has no attributes in JSON")


def _field(shape: types.StructType | types.DataclassType | types.NamedTupleType, name: str) -> Part:
    for number, field in enumerate(shape.fields):
        if field.name != name:
            continue
        if isinstance(shape, types.NamedTupleType):
            return Part(number, field.type)
        if isinstance(shape, types.StructType):
            if shape.array_like:
                return Part(number + (shape.tag is not None), field.type)
            if not field.required and typing.get_origin(shape.cls) is None and _omits_defaults(shape.cls):
                raise NoPart(
                    f"{spelled(shape)} leaves it out of its JSON while it has its default (omit_defaults)"
                )
        return Part(field.encode_name, field.type)
    raise NoPart(
        f"{spelled(shape)} has no field of this name", choices=[field.name for field in shape.fields]
    )


def _omits_defaults(cls: type) -> bool:
    return bool(getattr(getattr(cls, "__struct_config__", None), "omit_defaults", False))


def _model_field(cls: Any, name: str) -> Part:
    fields = cls.model_fields
    if getattr(cls, "__pydantic_root_model__", False):
        raise NoPart(f"{cls.__qualname__} is a RootModel, whose JSON is that of its root")
    if name not in fields or fields[name].exclude:
        raise NoPart(f"{cls.__qualname__} has no field of this name in its JSON", choices=fields)
    field = fields[name]
    return Part(field.serialization_alias or field.alias or name, shape_of(field.annotation))


def is_model(cls: Any) -> bool:
    """Whether it is a class of pydantic models."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(cls, type) and issubclass(cls, pydantic.BaseModel)


def _item(shape: types.Type, key: object) -> Part:
    if isinstance(key, slice):
        raise NoPart("a slice would have to be cut out by a task", fix="add a task that returns it.")
    match shape:
        case types.AnyType() if isinstance(key, str | int) and not isinstance(key, bool):
            return Part(key, ANY)
        case types.CustomType(cls=cls) if cls is object and isinstance(key, str | int):
            return Part(key, ANY)
        case types.DictType(key_type=wanted, value_type=value):
            return Part(_key(key, wanted), value)
        case types.TypedDictType(fields=fields):
            found = next((each for each in fields if each.name == key), None)
            if found is None:
                reason = f"{spelled(shape)} has no such key"
                raise NoPart(reason, choices=[f"[{each.name!r}]" for each in fields])
            return Part(found.encode_name, found.type)
        case types.ListType(item_type=part) | types.VarTupleType(item_type=part) if _is_index(key):
            return Part(typing.cast(int, key), part)
        case types.TupleType(item_types=parts) if _is_index(key):
            return _at(shape, parts, typing.cast(int, key))
        case types.NamedTupleType(fields=fields) if _is_index(key):
            return _at(shape, [each.type for each in fields], typing.cast(int, key))
        case _:
            raise _no_item(shape, key)


def _no_item(shape: types.Type, key: object) -> NoPart:
    match shape:
        case types.StructType() | types.DataclassType():
            return NoPart(f"it is a {spelled(shape)}", fix=f"write .{key}.")
        case types.CustomType(cls=cls) if is_model(cls):
            return NoPart(f"it is a {spelled(shape)}", fix=f"write .{key}.")
        case types.SetType() | types.FrozenSetType():
            return NoPart(f"it is a {spelled(shape)}, which has no order")
        case _:
            return NoPart(f"it is a {spelled(shape)}, and {shown(key)} leads to no part of that in JSON")


def _is_index(key: object) -> bool:
    return isinstance(key, int) and not isinstance(key, bool)


def _at(shape: types.Type, parts: Sequence[types.Type], index: int) -> Part:
    if not -len(parts) <= index < len(parts):
        raise NoPart(f"{spelled(shape)} has {len(parts)} items")
    return Part(index % len(parts), parts[index])


def _key(key: object, wanted: types.Type) -> str:
    if not fits(shape_of(type(key)), wanted):
        raise NoPart(f"its keys are {spelled(wanted)}, and {shown(key)} is a {type(key).__qualname__}")
    try:
        (written,) = msgspec.to_builtins({key: None}, str_keys=True)
    except Exception:  # noqa: BLE001 - unhashable and unencodable keys fail in several ways
        raise NoPart(f"{shown(key)} is no key in JSON") from None
    return str(written)
