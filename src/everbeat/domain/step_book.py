"""The steps of one attempt: how they are named, what is known of them from earlier attempts, and the JSON of their results.

What lives here: `StepBook`, the rules of names, codecs by a function's annotation. What may not: asking for records (`durable`).
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from typing import Any, Final, final
from weakref import WeakKeyDictionary

from everbeat.domain.callables import returned_type
from everbeat.domain.codable import refusal
from everbeat.domain.fidelity import Misfit
from everbeat.domain.recorded import RECORD_LIMIT_BYTES, Recorded, StepKind
from everbeat.domain.settings import shown
from everbeat.domain.typed_json import TypedJson, encode_untyped, require_plain
from everbeat.errors import PayloadError

NAME_LIMIT: Final = 200

_within: ContextVar[str] = ContextVar("everbeat_step", default="")
_codecs: WeakKeyDictionary[Any, TypedJson] = WeakKeyDictionary()


@final
class StepBook:
    """Safe to use from several threads and coroutines of a task; names are numbered in the order in which they are drawn."""

    __slots__ = ("_records", "_uses", "is_read")

    def __init__(self, *, is_read: bool = False) -> None:
        self._uses: dict[tuple[StepKind, str], count[int]] = {}
        self._records: dict[tuple[StepKind, str], Recorded] = {}
        self.is_read = is_read
        """Whether all that earlier attempts recorded is here."""

    def draw(self, kind: StepKind, name: str) -> str:
        """The name of this use: `charge`, the second time `charge#2`; inside the step `pack` it is `pack#1/charge`."""
        name = f"{_within.get()}{name}"
        number = next(self._uses.setdefault((kind, name), count(1)))
        return name if number == 1 else f"{name}#{number}"

    def take(self, records: Iterable[Recorded]) -> None:
        """These were recorded by earlier attempts."""
        self._records.update({(each.kind, each.name): each for each in records})

    def find(self, kind: StepKind, name: str) -> Recorded | None:
        """What an earlier attempt recorded under this name; None where it has not ended."""
        found = self._records.get((kind, name))
        return None if found is None or found.state == "OPEN" or found.left_ms else found


@contextmanager
def inside(name: str) -> Iterator[None]:
    """What is named in here belongs to the step of this name: a re-run that skips the step does not count it."""
    token = _within.set(f"{name if '#' in name.rpartition('/')[2] else f'{name}#1'}/")
    try:
        yield
    finally:
        _within.reset(token)


def checked_name(name: object, *, what: str, task_name: str) -> str:
    """The name of a step or an event of a task; raises PayloadError for one that cannot be told from numbered ones."""
    return _checked(name, f"{what} in task {task_name!r}")


def checked_event(name: object) -> str:
    """The name of a signal; raises PayloadError for one that no wait can have."""
    return _checked(name, "a signal")


def _checked(name: object, what: str) -> str:
    is_text = isinstance(name, str) and 1 <= len(name) <= NAME_LIMIT and name.isprintable()
    if isinstance(name, str) and is_text and "#" not in name and "/" not in name:
        return name
    raise PayloadError(
        f"The name {shown(name)} of {what} is not a printable text of 1 to {NAME_LIMIT} characters without # and /.",
        parameter="name",
        fix="use a short text such as 'approved'; what is used again is numbered by itself.",
    )


def require_callable(function: object, *, task_name: str) -> None:
    """Raises PayloadError for what is no function."""
    if not callable(function):
        raise PayloadError(
            f"{shown(function)} is no step of task {task_name!r}: it is of type {type(function).__name__}, which cannot be called.",
            parameter="fn",
            fix="pass the function and then its arguments, and do not call it: ctx.step(charge, order).",
        )


def name_of(function: Callable[..., Any], *, task_name: str) -> str:
    """The name by which a step is recorded; raises PayloadError for what is no function, or has no name."""
    require_callable(function, task_name=task_name)
    name = getattr(_whole(function), "__name__", None)
    if name is None or name == "<lambda>":
        raise PayloadError(
            f"{shown(function)} has no name by which task {task_name!r} could record it as a step.",
            parameter="fn",
            fix="write a 'def', or give the step a name: ctx.named('charge').step(...).",
        )
    return checked_name(name, what="a step", task_name=task_name)


def codec_of(function: Callable[..., Any], *, step: str, task_name: str) -> TypedJson:
    """The JSON of what a function returns; raises PayloadError, before it is called, for an annotation that JSON cannot carry."""
    inner = _inner(function)
    with suppress(TypeError):  # what cannot be referred to weakly is read each time
        if (known := _codecs.get(inner)) is not None:
            return known
    annotation = _result_annotation(inner, step=step, task_name=task_name)
    refused = refusal(annotation)
    if refused is not None:
        raise PayloadError(
            f"What step {step!r} of task {task_name!r} returns cannot be recorded: its annotation {refused.reason}.",
            parameter=step,
            fix=f"{refused.fix}.",
        )
    codec = TypedJson(annotation)
    with suppress(TypeError):
        _codecs[inner] = codec
    return codec


def encode_result(codec: TypedJson, value: object, *, step: str, task_name: str) -> bytes:
    """What a step returned as JSON; raises PayloadError that names the step. It has been called by then, and is not recorded."""
    try:
        data = codec.encode(value)
    except Misfit as misfit:
        raise _unrecordable(misfit, f"result of step {step!r} of task {task_name!r}", step) from None
    if len(data) > RECORD_LIMIT_BYTES:
        raise PayloadError(
            f"The result of step {step!r} of task {task_name!r} takes {len(data):,} bytes of JSON; at most {RECORD_LIMIT_BYTES:,} are recorded.",
            parameter=step,
            fix="keep large data in files or tables of your own, and return where it is.",
        )
    return data


def decode_result(codec: TypedJson, recorded: Recorded, *, task_name: str) -> Any:
    """What an earlier attempt recorded; raises PayloadError where it does not fit the function any more."""
    try:
        return codec.decode(recorded.result or "null")
    except Misfit as misfit:
        raise PayloadError(
            f"What step {recorded.name!r} of task {task_name!r} recorded does not fit its annotation any more: {misfit.reason}.",
            parameter=recorded.name,
            fix="keep the annotation compatible while tasks are under way, or give the changed step another name: ctx.named(...).",
        ) from None


def decode_event(annotation: Any, value: str, *, event: str, task_name: str) -> Any:
    """The value of a signal; raises PayloadError where it is not of the type that was asked for."""
    try:
        return TypedJson(annotation).decode(value)
    except Misfit as misfit:
        place = f" (at {misfit.path})" if misfit.path else ""
        raise PayloadError(
            f"The value of event {event!r} of task {task_name!r} is not of the type that was asked for: {misfit.reason}{place}.",
            parameter=event,
            fix="send what the waiting code expects, or ask for another type.",
        ) from None


def require_carried(annotation: Any, *, event: str, task_name: str) -> None:
    """Raises PayloadError for a type that no value of a signal can have."""
    refused = refusal(annotation)
    if refused is not None:
        raise PayloadError(
            f"The type of event {event!r} of task {task_name!r} {refused.reason}.",
            parameter="type",
            fix=f"{refused.fix}.",
        )


def encode_signal(value: object, *, event: str) -> bytes:
    """The value of a signal as JSON; raises PayloadError for what JSON would change, or for more than 1 MB of it."""
    subject = f"value of signal {event!r}"
    try:
        data = encode_untyped(value)
        require_plain(value, data)
    except Misfit as misfit:
        raise _unrecordable(
            misfit, subject, "value", fix="send plain values, such as value.isoformat() or str(value)"
        ) from None
    if len(data) > RECORD_LIMIT_BYTES:
        raise PayloadError(
            f"The {subject} takes {len(data):,} bytes of JSON; at most {RECORD_LIMIT_BYTES:,} are stored.",
            parameter="value",
            fix="keep large data elsewhere, and send where it is.",
        )
    return data


def _unrecordable(misfit: Misfit, subject: str, parameter: str, *, fix: str | None = None) -> PayloadError:
    starts_well = misfit.reason.startswith(("is ", "has ", "holds ", "would take "))
    reason = misfit.reason if starts_well else f"does not fit: {misfit.reason}"
    place = f" at {misfit.path.lstrip('.')}" if misfit.path else ""
    fix = fix or misfit.fix or "return what the function's annotation says"
    return PayloadError(f"The {subject}{place} {reason}.", parameter=parameter, fix=f"{fix}.")


def _whole(function: Any) -> Any:
    """The function under a `partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _inner(function: Any) -> Any:
    """What has the annotations: under partials, wrappers, methods and objects that can be called."""
    function = inspect.unwrap(_whole(function))
    if inspect.ismethod(function):
        return function.__func__
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    return type(function).__call__


def _result_annotation(function: Any, *, step: str, task_name: str) -> Any:
    if isinstance(function, type):
        return function
    annotation = getattr(function, "__annotations__", {}).get("return", Any)
    alone = types.SimpleNamespace(__annotations__={"return": annotation})
    try:
        hints = typing.get_type_hints(
            alone, globalns=getattr(function, "__globals__", {}), include_extras=True
        )
    except Exception as error:  # noqa: BLE001 - annotations are evaluated here, and any expression may fail
        raise PayloadError(
            f"What step {step!r} of task {task_name!r} returns cannot be recorded: its annotation cannot be read"
            f" ({type(error).__name__}: {error}).",
            parameter=step,
            fix="define or import what it names at module level, not inside a function or under TYPE_CHECKING.",
        ) from None
    return returned_type(hints["return"])
