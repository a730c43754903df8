"""The JSON of a parameter or result that is `Completed[T] | Failed`: `{"completed": value}` or `{"failed": error}`.

What lives here: `carried`, which finds such unions in an annotation, and the way from outcomes to what JSON carries of them and back.
What may not: the JSON of errors (`failure`), encoding and decoding (`typed_json`).

It is looked for in lists, tuples, dicts and unions, where what another task came to may be put, and in no class: fields of a class are
written and read as msgspec does.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from msgspec import UNSET, Struct, UnsetType

from everbeat.domain.outcome import RESULT_NOT_AVAILABLE, Completed, Failed, TaskError

T = TypeVar("T")

_WITHIN: Final = (list, tuple, dict, Sequence, Mapping)


class CarriedOutcome(Struct, Generic[T], forbid_unknown_fields=True):
    """An outcome on its way through JSON: one of the two is set. `failed` is None if no error was stored."""

    completed: T | UnsetType = UNSET
    failed: TaskError | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if (self.completed is UNSET) == (self.failed is UNSET):
            raise ValueError('expected either "completed" or "failed"')

    def __repr__(self) -> str:
        return repr(received(self))


def carried(annotation: Any) -> Any:
    """The annotation with a `CarriedOutcome` for each `Completed[T] | Failed`; itself if there is none."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = carried(arguments[0])
        return annotation if inner is arguments[0] else typing.Annotated[inner, *annotation.__metadata__]
    if origin in (typing.Union, types.UnionType):
        completed = next(filter(_is_completed, arguments), None)
        if completed is not None and Failed in arguments:
            value = next(map(carried, typing.get_args(completed)), Any)
            others = [carried(each) for each in arguments if each not in (completed, Failed)]
            return typing.Union[CarriedOutcome[value], *others]  # type: ignore[valid-type]
    elif origin not in _WITHIN:
        return annotation
    found = tuple(map(carried, arguments))
    if all(one is other for one, other in zip(found, arguments, strict=True)):
        return annotation
    return typing.Union[found] if origin in (typing.Union, types.UnionType) else origin[found]  # noqa: UP007


def sent(value: Any) -> Any:
    """The value with its outcomes as JSON carries them; itself if it has no end, which its encoder will say."""
    try:
        return _sent(value)
    except RecursionError:
        return value


def _sent(value: Any) -> Any:
    match value:
        case Completed():
            return CarriedOutcome(completed=_sent(value.value))
        case Failed():
            return CarriedOutcome(failed=value.error)
        case _:
            return _each(value, _sent)


def received(value: Any) -> Any:
    """The value that was `sent`."""
    if not isinstance(value, CarriedOutcome):
        return _each(value, received)
    if value.failed is UNSET:
        return Completed(received(value.completed))
    lost = TaskError(RESULT_NOT_AVAILABLE, "No error is stored.")
    return Failed(lost if value.failed is None else value.failed)


def _each(value: Any, change: Any) -> Any:
    if type(value) is list or type(value) is tuple:
        return type(value)(map(change, value))
    return {key: change(part) for key, part in value.items()} if type(value) is dict else value


def _is_completed(annotation: Any) -> bool:
    return annotation is Completed or typing.get_origin(annotation) is Completed
