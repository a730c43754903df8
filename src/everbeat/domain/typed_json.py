"""Encode and decode values of annotated types as JSON, and check that the received value equals the sent value."""

from __future__ import annotations

import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from everbeat.domain.task.outcome import error_from_json, error_to_json
from everbeat.errors import TaskError


def is_carried(cls: type) -> bool:
    """Return whether values of a class that msgspec does not support natively survive a JSON round trip unchanged."""
    return cls in (object, TaskError) or _is_pydantic_model(cls)


def encode_foreign(value: Any) -> Any:
    """Encode a value that msgspec does not support, as the `enc_hook` of every encoder. Raises TypeError if it cannot be encoded."""
    if isinstance(value, TaskError):
        return msgspec.Raw(error_to_json(value))
    if _is_pydantic_model(type(value)):
        # Pydantic's own JSON, not its dict, because strict models accept a date as text only in JSON mode.
        return msgspec.Raw(value.model_dump_json(by_alias=True, round_trip=True).encode())
    # Safe strings of template engines and NumPy scalars are subclasses without additional data.
    for plain in (str, int, float):
        if isinstance(value, plain):
            return getattr(plain, f"__{plain.__name__}__")(value)
    raise TypeError(f"{type(value).__qualname__} is not JSON")


def decode_foreign(cls: type, value: Any) -> Any:
    """Decode a value that msgspec does not support, as the `dec_hook` of every decoder."""
    if cls is object:
        return value
    if cls is TaskError:
        return error_from_json(msgspec.json.encode(value))
    if _is_pydantic_model(cls):
        return cls.model_validate_json(msgspec.json.encode(value))  # type: ignore[attr-defined]
    raise NotImplementedError(f"{cls.__qualname__} cannot be made from JSON")


def fields_of(value: object) -> Mapping[str, Any] | None:
    """Return the fields of a struct, dataclass, attrs object or pydantic model by name, or None for other values."""
    cls = type(value)
    names = (
        getattr(cls, "__struct_fields__", None)
        or getattr(cls, "__dataclass_fields__", None)
        or getattr(cls, "model_fields", None)
        or [attribute.name for attribute in getattr(cls, "__attrs_attrs__", ())]
    )
    if not names:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_pydantic_model(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(cls, type) and issubclass(cls, pydantic.BaseModel)


ENDLESS = "is nested too deeply, or contains itself"


class Misfit(Exception):
    """Raised for a value that JSON or its annotation cannot represent. Holds the path in the value, the reason and the fix."""

    def __init__(self, path: str, reason: str, fix: str | None = None) -> None:
        super().__init__(path, reason, fix)
        self.path = path
        self.reason = reason
        self.fix = fix

    @property
    def predicate(self) -> str:
        """Return the reason as a clause without its subject. Reasons from msgspec, such as "expected `int`", have no verb."""
        has_verb = self.reason.startswith(("is ", "has ", "holds ", "would take "))
        return self.reason if has_verb else f"does not fit: {self.reason}"


def nonfinite(value: object, path: str = "") -> Misfit | None:
    """Return a Misfit for the first NaN or infinity in `value`, or None. JSON would turn such a number into null."""
    if isinstance(value, float):
        return None if math.isfinite(value) else _not_a_number(value, path)
    return next(filter(None, (nonfinite(part, path + step) for step, part in _parts(value))), None)


def unencodable(value: object, encode: Callable[[Any], bytes], error: Exception, path: str = "") -> Misfit:
    """Return a Misfit for the innermost part of the value that `encode` rejects. `error` is the exception for the whole value."""
    if isinstance(error, RecursionError):
        return Misfit(path, ENDLESS)
    keys = (("", key) for key in value) if isinstance(value, dict) else ()
    for step, part in chain(_parts(value), keys):
        try:
            encode(part)
        except Exception as inner:  # noqa: BLE001 - encoding users' classes can raise anything
            return unencodable(part, encode, inner, path + step)
    if isinstance(error, UnicodeEncodeError):
        wrong = error.object[error.start : error.start + 1]
        reason = f"holds the lone surrogate {wrong!a}, which is not a Unicode character and cannot be stored"
        return Misfit(
            path, reason, 'decode the bytes it came from with errors="replace", or send them as bytes'
        )
    if isinstance(value, dict):
        return Misfit(path, f"has keys that JSON cannot carry ({error})", "use str keys")
    kind = type(value).__qualname__
    return Misfit(
        path, f"is of type {kind}, which cannot be JSON", "send its id, a dataclass or plain values instead"
    )


def difference(sent: Any, arrived: Any, path: str = "") -> Misfit | None:
    """Return a Misfit for the first part of `sent` that would arrive changed. Tuples may arrive as lists, and lists as tuples."""
    if _equal(sent, arrived):
        return None
    if isinstance(sent, float) and not math.isfinite(sent):
        return _not_a_number(sent, path)
    match sent, arrived:
        case (list() | tuple(), list() | tuple()) if not _loses_names(sent, arrived):
            if _equal([*sent], [*arrived]):
                return None
            pairs = zip(sent, arrived, strict=True)
            return _first((one, other, f"{path}[{index}]") for index, (one, other) in enumerate(pairs))
        case dict(), dict():
            for key in sent:
                if key not in arrived:
                    return _lost_key(key, path)
            return _first((sent[key], arrived[key], f"{path}[{key!r}]") for key in sent)
        case _:
            pass
    fields, kept = fields_of(sent), fields_of(arrived)
    if fields is not None and kept is not None and type(sent) is type(arrived):
        return _first((fields[name], kept.get(name), f"{path}.{name}") for name in fields)
    return Misfit(path, *_changed(sent, arrived))


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    match value:
        case dict():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{index}]", part) for index, part in enumerate(value))
        case _:
            yield from ((f".{name}", part) for name, part in (fields_of(value) or {}).items())


def _first(pairs: Iterator[tuple[Any, Any, str]]) -> Misfit | None:
    return next(filter(None, (difference(*pair) for pair in pairs)), None)


def _equal(sent: Any, arrived: Any) -> bool:
    try:
        return bool(sent == arrived)
    except Exception:  # noqa: BLE001 - an __eq__ that raises says nothing; the parts are compared instead
        return False


def _loses_names(sent: object, arrived: object) -> bool:
    return hasattr(type(sent), "_fields") and type(sent) is not type(arrived)


def _not_a_number(value: float, path: str) -> Misfit:
    return Misfit(path, f"is {value}, which JSON does not have", "send None, or a str or Decimal, instead")


def _lost_key(key: object, path: str) -> Misfit:
    if isinstance(key, str):
        return Misfit(path, f"has the key {key!r}, which its annotation does not know and would lose")
    return Misfit(path, f"has the key {key!r}, which would arrive as a str", "annotate the type of the keys")


def _changed(sent: object, arrived: object) -> tuple[str, str]:
    was, becomes = type(sent).__qualname__, type(arrived).__qualname__
    if was == becomes:
        return f"is of type {was} and would arrive changed", "send what its annotation reads back equal"
    lost = (fields_of(sent) or {}).keys() - (fields_of(arrived) or {}).keys()
    if isinstance(sent, type(arrived)) and lost:
        return (
            f"is of type {was}, would arrive as {becomes} and lose {', '.join(sorted(lost))}",
            f"annotate {was}",
        )
    return f"is of type {was} and would arrive as {becomes}", f"annotate {was}, or send {becomes}"


LARGEST_BYTES: Final = 256 * 1024 * 1024
"""The largest payload that an app can allow. PostgreSQL's limit is 1 GB, and the sender and worker each hold several copies."""

TOO_LARGE_FIX: Final = (
    "store large data elsewhere and send a reference to it, or raise App(payload_limit=...)"
)

encode_json = msgspec.json.Encoder(enc_hook=encode_foreign).encode
decode_json = msgspec.json.Decoder().decode

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")


class TypedJson:
    """Encodes and decodes values of one annotated type. `encode` and `decode` raise `Misfit`."""

    __slots__ = ("_largest", "_read")

    def __init__(self, annotation: Any, *, largest: int = LARGEST_BYTES) -> None:
        self._largest = largest
        self._read = msgspec.json.Decoder(annotation, dec_hook=decode_foreign).decode

    def encode(self, value: Any) -> bytes:
        """Return the value as JSON, after checking that the receiver will decode an equal value."""
        try:
            data = encode_json(value)
            arrived = self._read(data)
            faithful = arrived == value
        except Exception as error:  # noqa: BLE001 - fields, hooks and __eq__ are user code and can raise anything
            raise _explained(value, error) from None
        # An equality check costs less than encoding and detects everything: NaN, lost fields, changed types.
        if not faithful:
            _require_faithful(value, arrived)
        require_room(data, largest=self._largest)
        return data

    def decode(self, data: bytes | str) -> Any:
        """Return the value from its JSON."""
        try:
            return self._read(data)
        except Exception as error:  # noqa: BLE001 - __post_init__ and validators are user code and can raise anything
            raise _unreadable(error) from None


def typed_json(annotation: Any) -> TypedJson:
    """Return the `TypedJson` for an annotation, from a cache if possible."""
    try:
        return _typed_json(annotation)
    except TypeError:  # unhashable
        return TypedJson(annotation)


@lru_cache(maxsize=256)
def _typed_json(annotation: Any) -> TypedJson:
    return TypedJson(annotation)


def encode_untyped(value: Any, *, largest: int = LARGEST_BYTES) -> bytes:
    """Encode a value whose annotation is unknown here. Raises Misfit if JSON would change the value or exceed `largest` bytes."""
    try:
        data = encode_json(value)
        # NaN and infinities become null, so JSON without a null contains none.
        misfit = nonfinite(value) if b"null" in data else None
    except Exception as error:  # noqa: BLE001 - fields and hooks are user code and can raise anything
        raise unencodable(value, encode_json, error) from None
    if misfit is not None:
        raise misfit
    require_room(data, largest=largest)
    return data


def require_plain(value: Any, data: bytes) -> None:
    """Raise Misfit unless `data`, the value's JSON, decodes to an equal value without any annotation."""
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
    except Exception as refused:  # noqa: BLE001 - as above; distinguishes encoding errors from decoding errors
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
            text = " ".join(str(error).split())  # pydantic's message has several lines
            place = _PLACE.search(text)
            reason = text[: place.start()] if place else text
            return Misfit(place["path"] if place else "", reason[:1].lower() + reason[1:])
        case msgspec.DecodeError() | UnicodeError():
            return Misfit("", f"is not JSON: {error}")
        case _:
            return Misfit("", f"is rejected by its own class: {type(error).__qualname__}: {error}")


def require_room(data: bytes, *, largest: int) -> None:
    """Raise Misfit if the JSON is larger than `largest` bytes."""
    if len(data) > largest:
        reason = f"would take {len(data):,} bytes of JSON; App.payload_limit allows {largest:,}"
        raise Misfit("", reason, TOO_LARGE_FIX)


_ADVICE: Final = {
    "Callable": "send the name of what to call",
    "function": "send the name of what to call",
    "Path": "annotate it as str and create the Path inside the task",
    "PosixPath": "annotate it as str and create the Path inside the task",
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
    """The reason why values of an annotation cannot be sent as JSON, and the annotation to use instead."""

    reason: str
    fix: str


def refusal(annotation: Any) -> Refusal | None:
    """Return why values of this annotation cannot be sent as JSON, or None if they can."""
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
    except Exception as error:  # noqa: BLE001 - msgspec raises TypeError, and the annotated classes can raise anything
        fix = (
            "use one of them, or msgspec.Struct classes with tag=True"
            if "union" in str(error)
            else _OTHERWISE
        )
        return Refusal(f"cannot be carried by JSON: {str(error).rstrip('.')}", fix)
    return _refusal(described, "", set())


def _refusal(described: types.Type, place: str, seen: set[int]) -> Refusal | None:
    if id(described) in seen:  # a recursive type refers to itself through the same object
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
