"""Whether what one task returns can be what another takes, judged by their annotations.

What lives here: `fits`, which says no only where it clearly cannot be. What may not: parts of values (`shapes`), values themselves.

The rule is the codec's: what arrives equals what was sent. So a str is no UUID, and 1 is no True, but an int is a float; lists, tuples
and sets are all lists in JSON; where alternatives overlap, the value decides when it is there.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias

from msgspec import inspect as types

from everbeat.domain.outcome import Completed

_Pairs: TypeAlias = frozenset[tuple[int, int]]
_Items: TypeAlias = types.ListType | types.SetType | types.FrozenSetType | types.VarTupleType
_Named: TypeAlias = types.StructType | types.DataclassType | types.TypedDictType

_ARRIVES: Final[Mapping[type, tuple[type, ...]]] = {
    types.IntType: (types.FloatType, types.DecimalType),
    types.FloatType: (types.DecimalType,),
    types.BytesType: (types.ByteArrayType, types.MemoryViewType),
    types.ByteArrayType: (types.BytesType, types.MemoryViewType),
}
"""What a plain value may be besides its own kind."""


def fits(given: types.Type, wanted: types.Type) -> bool:
    """Whether a value of one shape may be one of the other."""
    return _fits(given, wanted, frozenset())


def plain(shape: types.Type) -> types.Type:
    """The shape without what is said about it besides."""
    while isinstance(shape, types.Metadata):
        shape = shape.type
    return shape


def _fits(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    given, wanted = plain(given), plain(wanted)
    if given is wanted or _is_any(given) or _is_any(wanted):
        return True
    if (one := _completed(given)) is not None and (other := _completed(wanted)) is not None:
        return _fits(one, other, seen)  # two outcomes always share Failed
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
        case _ if _is_object(given) and _is_object(wanted):
            return True
        case _ if _is_list(given) and _is_list(wanted):
            return _lists(given, wanted, seen)
        case _:
            return type(wanted) is type(given) or type(wanted) in _ARRIVES.get(type(given), ())


def _completed(shape: types.Type) -> types.Type | None:
    """Of a union with `Completed`, that."""
    alternatives = shape.types if isinstance(shape, types.UnionType) else ()
    return next((each for each in alternatives if _is_completed(each)), None)


def _is_completed(shape: types.Type) -> bool:
    return isinstance(shape, types.StructType) and _same_class(shape.cls, Completed)


def _is_any(shape: types.Type) -> bool:
    return isinstance(shape, types.AnyType | types.RawType) or (
        isinstance(shape, types.CustomType) and shape.cls is object
    )


def _is_object(shape: types.Type) -> bool:
    return isinstance(shape, types.DictType | types.StructType | types.DataclassType | types.TypedDictType)


def _is_list(shape: types.Type) -> bool:
    return isinstance(shape, _Items | types.TupleType | types.NamedTupleType)


def _chosen(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    """One of both is a choice of values. Of two choices of values they must share one; of an Enum its class is not asked for."""
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
    """Classes that msgspec does not know, such as pydantic models: their JSON is their own affair, unless it clearly is none of theirs."""
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
    return _is_list(other)


def _with_fields(given: types.Type, wanted: types.Type, seen: _Pairs) -> bool:
    ours = typing.cast(_Named, given)
    theirs = typing.cast(_Named, wanted)
    by_name = {field.encode_name: field.type for field in ours.fields}
    if isinstance(given, types.TypedDictType) or isinstance(wanted, types.TypedDictType):
        # A TypedDict is known by its keys, not by its name.
        if any(field.required and field.encode_name not in by_name for field in theirs.fields):
            return False
    elif not _same_class(ours.cls, theirs.cls):
        return False
    pair = (id(given), id(wanted))
    if pair in seen:  # recursive shapes describe themselves by the same object
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
    """Those of its places, or the one of all places, several times: two of these are compared once."""
    match shape:
        case types.TupleType(item_types=items):
            return items
        case types.NamedTupleType(fields=fields):
            return [field.type for field in fields]
        case _:
            return repeat(typing.cast(_Items, shape).item_type, 100)
