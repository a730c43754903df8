"""Check whether one task's result is compatible with another task's parameter, by comparing the JSON shapes of their annotations."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from types import UnionType
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from everbeat.domain.settings.settings import shown
from everbeat.domain.task.outcome import Completed
from everbeat.errors.wording import amount

_Pairs: TypeAlias = frozenset[tuple[int, int]]
_Items: TypeAlias = types.ListType | types.SetType | types.FrozenSetType | types.VarTupleType
_Named: TypeAlias = types.StructType | types.DataclassType | types.TypedDictType

_ARRIVES: Final[Mapping[type, tuple[type, ...]]] = {
    types.IntType: (types.FloatType, types.DecimalType),
    types.FloatType: (types.DecimalType,),
    types.BytesType: (types.ByteArrayType, types.MemoryViewType),
    types.ByteArrayType: (types.BytesType, types.MemoryViewType),
}
"""For each plain type, the other types that accept its JSON."""


def fits(given: types.Type, wanted: types.Type) -> bool:
    """Return whether a value of shape `given` could be accepted where shape `wanted` is expected."""
    return _fits(given, wanted, frozenset())


def plain(shape: types.Type) -> types.Type:
    """Return the shape without its metadata."""
    while isinstance(shape, types.Metadata):
        shape = shape.type
    return shape


def _fits(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    given, wanted = plain(given), plain(wanted)
    if given is wanted or _is_any(given) or _is_any(wanted):
        return True
    if (one := _completed(given)) is not None and (other := _completed(wanted)) is not None:
        return _fits(one, other, seen)  # two outcome types always share Failed
    if isinstance(given, types.UnionType):
        return any(_fits(each, wanted, seen) for each in given.types)
    if isinstance(wanted, types.UnionType):
        return any(_fits(given, each, seen) for each in wanted.types)
    return _one_fits(given, wanted, seen)


def _one_fits(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    if isinstance(given, types.EnumType | types.LiteralType) or isinstance(
        wanted, types.EnumType | types.LiteralType
    ):
        return _chosen(given, wanted, seen)
    match given, wanted:
        case (types.CustomType(), _) | (_, types.CustomType()):
            return _custom(given, wanted)
        case types.DictType(), types.DictType():
            return _fits(given.key_type, wanted.key_type, seen) and _fits(
                given.value_type, wanted.value_type, seen
            )
        case (types.StructType(array_like=True), _) | (_, types.StructType(array_like=True)):
            return _array_like(given, wanted, seen)
        case (
            types.StructType() | types.DataclassType() | types.TypedDictType(),
            types.StructType() | types.DataclassType() | types.TypedDictType(),
        ):
            return _with_fields(given, wanted, seen)
        case types.NamedTupleType(), types.NamedTupleType():
            return _same_class(given.cls, wanted.cls)
        case _ if is_object(given) and is_object(wanted):
            return True
        case _ if is_list(given) and is_list(wanted):
            return _lists(given, wanted, seen)
        case _:
            return type(wanted) is type(given) or type(wanted) in _ARRIVES.get(type(given), ())


def _completed(shape: types.Type) -> types.Type | None:
    """Return the `Completed` alternative of a union, or None if the union has no such alternative."""
    alternatives = shape.types if isinstance(shape, types.UnionType) else ()
    return next((each for each in alternatives if _is_completed(each)), None)


def _is_completed(shape: types.Type) -> bool:
    return isinstance(shape, types.StructType) and _same_class(shape.cls, Completed)


def _is_any(shape: types.Type) -> bool:
    return isinstance(shape, types.AnyType | types.RawType) or (
        isinstance(shape, types.CustomType) and shape.cls is object
    )


def is_object(shape: types.Type) -> bool:
    """Return whether the JSON of the shape is an object."""
    return isinstance(shape, types.DictType | types.StructType | types.DataclassType | types.TypedDictType)


def is_list(shape: types.Type) -> bool:
    """Return whether the JSON of the shape is a list."""
    return isinstance(shape, _Items | types.TupleType | types.NamedTupleType)


def _chosen(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    """Compare two shapes if at least one is an Enum or Literal. Two such shapes must share a value. The class of an Enum is ignored."""
    some, others = _values(given), _values(wanted)
    if some is not None and others is not None:
        return any(one == other and type(one) is type(other) for one in some for other in others)
    if some is not None:
        return any(_fits(_kind(value), wanted, seen) for value in some)
    return any(_fits(given, _kind(value), seen) for value in others or ())


def _values(shape: types.Type) -> Sequence[Any] | None:
    match shape:
        case types.EnumType(cls=cls):
            return [each.value for each in cls]
        case types.LiteralType(values=values):
            return values
        case _:
            return None


def _kind(value: object) -> types.Type:
    kinds: Mapping[type, types.Type] = {
        bool: types.BoolType(),
        int: types.IntType(),
        str: types.StrType(),
        float: types.FloatType(),
        type(None): types.NoneType(),
    }
    return kinds.get(type(value), types.AnyType())


def _custom(given: types.Type, wanted: types.Type) -> bool:
    """Compare classes that msgspec does not know, such as pydantic models. Their JSON is unknown, so only clear mismatches fail."""
    if isinstance(given, types.CustomType) and isinstance(wanted, types.CustomType):
        return _same_class(given.cls, wanted.cls)
    custom, other = (given, wanted) if isinstance(given, types.CustomType) else (wanted, given)
    if getattr(typing.cast(Any, custom).cls, "__pydantic_root_model__", False):
        return True
    return isinstance(other, types.DictType | types.TypedDictType)


def _array_like(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    if isinstance(given, types.StructType) and isinstance(wanted, types.StructType):
        return given.array_like == wanted.array_like and _with_fields(given, wanted, seen)
    other = wanted if isinstance(given, types.StructType) else given
    return is_list(other)


def _with_fields(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    ours = typing.cast(_Named, given)
    theirs = typing.cast(_Named, wanted)
    by_name = {field.encode_name: field.type for field in ours.fields}
    if isinstance(given, types.TypedDictType) or isinstance(wanted, types.TypedDictType):
        # A TypedDict is compared by its keys, not by its name.
        if any(field.required and field.encode_name not in by_name for field in theirs.fields):
            return False
    elif not _same_class(ours.cls, theirs.cls):
        return False
    pair = (id(given), id(wanted))
    if pair in seen:  # a recursive shape refers to itself through the same object
        return True
    return all(
        _fits(by_name[field.encode_name], field.type, seen | {pair})
        for field in theirs.fields
        if field.encode_name in by_name
    )


def _same_class(given: Any, wanted: Any) -> bool:
    ours, theirs = typing.get_origin(given) or given, typing.get_origin(wanted) or wanted
    return ours is theirs or (
        isinstance(ours, type) and isinstance(theirs, type) and issubclass(ours, theirs)
    )


def _lists(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    ours, theirs = _item_types(given), _item_types(wanted)
    if isinstance(ours, Sequence) and isinstance(theirs, Sequence) and len(ours) != len(theirs):
        return False
    return all(_fits(one, other, seen) for one, other in zip(ours, theirs, strict=False))


def _item_types(shape: types.Type) -> Iterable[types.Type]:
    """Return the types of the items. If all items have the same type, that type is repeated endlessly."""
    match shape:
        case types.TupleType(item_types=items):
            return items
        case types.NamedTupleType(fields=fields):
            return [field.type for field in fields]
        case _:
            return repeat(typing.cast(_Items, shape).item_type, 100)


ANY: Final = types.AnyType()
NONE: Final = types.NoneType()


class Part(Struct, frozen=True):
    """A part of a shape, with its key or index in JSON and its own shape."""

    step: str | int
    shape: types.Type


class NoPart(Exception):
    """Raised if a part does not exist. `choices` lists the existing parts, written as in Python, and `fix` suggests an alternative."""

    def __init__(self, reason: str, *, choices: Iterable[str] = (), fix: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.choices = tuple(choices)
        self.fix = fix


def shape_of(annotation: Any) -> types.Type:
    """Return the shape of an annotation, or the shape of Any if msgspec cannot describe the annotation."""
    try:
        return _shape_of(annotation)
    except Exception:  # noqa: BLE001 - users' classes can raise anything; registration rejects such tasks
        return ANY


@lru_cache(maxsize=1_024)
def _shape_of(annotation: Any) -> types.Type:
    return plain(types.type_info(annotation))


def spelled(shape: types.Type) -> str:
    """Return the shape as text, in the form of a Python annotation."""
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
    """Return the part that an attribute refers to. Raises NoPart if the shape has no such attribute."""
    return _among(shape, lambda each: _attribute(each, name))


def item(shape: types.Type, key: object) -> Part:
    """Return the part at an index or key. Raises NoPart if the shape has no such part."""
    return _among(shape, lambda each: _item(each, key))


def items_of(shape: types.Type) -> types.Type | None:
    """Return the shape of the items of a list, or None if the shape is not a list."""
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
    """Return the annotation of the part at a key or index of a list, tuple or dict, or Any if that annotation is unknown."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return inner(arguments[0], step)
    if typing.is_typeddict(annotation):
        return typing.get_type_hints(annotation).get(str(step), Any)
    if origin in (typing.Union, UnionType) or not isinstance(origin, type) or not arguments:
        # A union yields a part only if exactly one of its alternatives has that part.
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
    """Return whether a class is a pydantic model."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(cls, type) and issubclass(cls, pydantic.BaseModel)


def _item(shape: types.Type, key: object) -> Part:
    if isinstance(key, slice):
        raise NoPart("only a task can take a slice", fix="add a task that returns it.")
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
            return NoPart(f"it is a {spelled(shape)}, which has no part {shown(key)} in JSON")


def _is_index(key: object) -> bool:
    return isinstance(key, int) and not isinstance(key, bool)


def _at(shape: types.Type, parts: Sequence[types.Type], index: int) -> Part:
    if not -len(parts) <= index < len(parts):
        raise NoPart(f"{spelled(shape)} has {amount(len(parts), 'item')}")
    return Part(index % len(parts), parts[index])


def _key(key: object, wanted: types.Type) -> str:
    if not fits(shape_of(type(key)), wanted):
        raise NoPart(f"its keys are {spelled(wanted)}, and {shown(key)} is a {type(key).__qualname__}")
    try:
        (written,) = msgspec.to_builtins({key: None}, str_keys=True)
    except Exception:  # noqa: BLE001 - unhashable and unencodable keys can fail in several ways
        raise NoPart(f"{shown(key)} cannot be a JSON key") from None
    return str(written)
