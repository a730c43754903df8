"""Outcomes of attempts: results, errors created from exceptions, and their JSON forms."""

from __future__ import annotations

import math
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from everbeat.domain.settings.checks import public
from everbeat.errors import RESULT_NOT_AVAILABLE, UNHANDLED_EXCEPTION, TaskError
from everbeat.errors.wording import CUT, amount, class_name, safe_text, storable

public(TaskError)  # here, because the errors package must not import the checks of calls

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


# Tagged structs rather than dataclasses, because JSON needs the tag if a task takes `Completed | Failed`.
class Completed(msgspec.Struct, Generic[R_co], frozen=True, tag_field="outcome", tag="completed"):
    """The outcome of a task that returned `value`."""

    value: R_co


class Failed(msgspec.Struct, frozen=True, tag_field="outcome", tag="failed"):
    """The outcome of a task that is FAILED, CANCELLED or EXPIRED. `error` gives the reason."""

    error: TaskError


TaskResult: TypeAlias = Completed[R] | Failed


T = TypeVar("T")

_WITHIN: Final = (list, tuple, dict, Sequence, Mapping)


class WireOutcome(Struct, Generic[T], forbid_unknown_fields=True):
    """An outcome in its JSON form. Exactly one of the two fields is set. `failed` is None if no error was stored."""

    completed: T | UnsetType = UNSET
    failed: TaskError | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if (self.completed is UNSET) == (self.failed is UNSET):
            raise ValueError('expected either "completed" or "failed"')

    def __repr__(self) -> str:
        return repr(from_wire(self))


def wire_type(annotation: Any) -> Any:
    """Return the annotation with each `Completed[T] | Failed` replaced by a `WireOutcome`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = wire_type(arguments[0])
        return annotation if inner is arguments[0] else typing.Annotated[inner, *annotation.__metadata__]
    if origin in (typing.Union, types.UnionType):
        completed = next(filter(_is_completed, arguments), None)
        if completed is not None and Failed in arguments:
            value = next(map(wire_type, typing.get_args(completed)), Any)
            others = [wire_type(each) for each in arguments if each not in (completed, Failed)]
            return typing.Union[WireOutcome[value], *others]  # type: ignore[valid-type]
    elif origin not in _WITHIN:
        return annotation
    found = tuple(map(wire_type, arguments))
    if all(one is other for one, other in zip(found, arguments, strict=True)):
        return annotation
    return typing.Union[found] if origin in (typing.Union, types.UnionType) else origin[found]  # noqa: UP007


def to_wire(value: Any) -> Any:
    """Return the value with its outcomes in their JSON form. A value that contains itself is returned unchanged; encoding it then fails."""
    try:
        return _to_wire(value)
    except RecursionError:
        return value


def _to_wire(value: Any) -> Any:
    match value:
        case Completed():
            return WireOutcome(completed=_to_wire(value.value))
        case Failed():
            return WireOutcome(failed=value.error)
        case _:
            return _each(value, _to_wire)


def from_wire(value: Any) -> Any:
    """Return the original value from the JSON form that `to_wire` returned."""
    if not isinstance(value, WireOutcome):
        return _each(value, from_wire)
    if value.failed is UNSET:
        return Completed(from_wire(value.completed))
    lost = TaskError(RESULT_NOT_AVAILABLE, "No error is stored.")
    return Failed(lost if value.failed is None else value.failed)


def _each(value: Any, change: Any) -> Any:
    if type(value) is list or type(value) is tuple:
        return type(value)(map(change, value))
    return {key: change(part) for key, part in value.items()} if type(value) is dict else value


def _is_completed(annotation: Any) -> bool:
    return annotation is Completed or typing.get_origin(annotation) is Completed


MESSAGE_BYTES = 8_192
TRACEBACK_BYTES = 32_768
DATA_BYTES = 1_048_576
_CODE_BYTES = 200
_DEEPEST_CHAIN = 8
_WIDEST_GROUP = 8
_MOST_FRAMES = 100

_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def error_from_exception(
    exception: BaseException, *, codes: Mapping[type[BaseException], str] | None = None
) -> TaskError:
    """Return the error to store: code, message (at most 8 kB), data, class name and traceback (at most 32 kB).

    A TaskError keeps its own code. Other exceptions get the code of the first matching class in `codes`, or else UNHANDLED_EXCEPTION.
    """
    kind = class_name(type(exception))
    text = _traceback_text(exception)
    if isinstance(exception, TaskError):
        # A user's subclass can break these attributes, so they are read from the instance's `__dict__`.
        values = vars(exception)
        code = safe_text(values.get("code", UNHANDLED_EXCEPTION), limit=_CODE_BYTES)
        message = safe_text(values.get("message", ""), limit=MESSAGE_BYTES)
        return TaskError(code, message, values.get("data"), type=kind, traceback=text)
    code = _mapped_code(exception, codes or {})
    return TaskError(code, safe_text(exception, limit=MESSAGE_BYTES), type=kind, traceback=text)


def error_to_json(error: TaskError) -> bytes:
    """Return the error as one JSON object without NUL. Data that JSON cannot represent is replaced by its `repr` and a note."""
    fields = {
        "code": safe_text(error.code, limit=_CODE_BYTES),
        "message": safe_text(error.message, limit=MESSAGE_BYTES),
        "data": msgspec.Raw(_data_to_json(error.data)),
        "type": safe_text(error.type, limit=_CODE_BYTES),
        "traceback": storable(error.traceback, limit=TRACEBACK_BYTES, tail=TRACEBACK_BYTES * 3 // 4),
    }
    return msgspec.json.encode(fields)


def is_cut(error: TaskError) -> bool:
    """Return whether any text of this error was truncated or could not be formatted.

    Such an exception must not be logged with its traceback, because Python's formatter would copy the whole text.
    """
    return any(
        mark in text
        for text in (error.message, error.traceback)
        for mark in (CUT, "<the traceback could not be formatted")
    )


class _StoredError(msgspec.Struct):
    code: str | None = None
    message: str | None = None
    data: Any = None
    type: str | None = None
    traceback: str | None = None


_stored_error = msgspec.json.Decoder(_StoredError)


def error_from_json(data: bytes | str) -> TaskError:
    """Return the stored error. Unreadable data becomes a RESULT_NOT_AVAILABLE error that shows the start of the data.

    Missing and null members are treated as empty.
    """
    try:
        stored = _stored_error.decode(data)
        if stored.code is None and not stored.message:
            raise msgspec.ValidationError("Object has neither `code` nor `message`")
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
        shown = safe_text(data[:400], limit=400, render=repr)
        return TaskError(RESULT_NOT_AVAILABLE, f"The stored error cannot be read ({problem}): {shown}")
    return TaskError(
        stored.code or RESULT_NOT_AVAILABLE,
        stored.message or "",
        stored.data,
        type=stored.type or "",
        traceback=stored.traceback or "",
    )


def code_of(exception: BaseException, codes: Mapping[type[BaseException], str]) -> str:
    """Return the code by which a retry policy matches an exception: its own code, or that of the first matching class in `codes`."""
    try:
        return exception.code if isinstance(exception, TaskError) else _mapped_code(exception, codes)
    except Exception:  # noqa: BLE001 - users' classes can break isinstance
        return UNHANDLED_EXCEPTION


def _mapped_code(exception: BaseException, codes: Mapping[type[BaseException], str]) -> str:
    fitting = (code for cls, code in codes.items() if isinstance(exception, cls))
    return next(fitting, UNHANDLED_EXCEPTION)


def _data_to_json(data: object) -> bytes:
    note = "could not be stored as JSON: this is its repr"
    try:
        encoded = msgspec.json.encode(data)
        # NUL is legal in JSON, but `error->>'data'` fails on it; NaN would silently become null.
        if len(encoded) > DATA_BYTES:
            note = f"takes {len(encoded):,} bytes, above the limit of {DATA_BYTES:,}: this is its repr"
        elif b"\\u0000" not in encoded and not (
            b"null" in encoded and _holds_nan(msgspec.to_builtins(data, str_keys=True))
        ):
            return encoded
    except BaseException:  # noqa: BLE001, S110 - a user's class can raise anything; its repr is stored instead
        pass
    shown = safe_text(data, limit=MESSAGE_BYTES, render=repr)
    return msgspec.json.encode({"repr": shown, "note": f"{class_name(type(data))} {note}"})


def _holds_nan(plain: object) -> bool:
    match plain:
        case dict():
            return any(_holds_nan(value) for value in plain.values())
        case list():
            return any(_holds_nan(item) for item in plain)
        case float():
            return not math.isfinite(plain)
        case _:
            return False


def _traceback_text(exception: BaseException) -> str:
    try:
        text = "".join(_chain(exception, seen=set(), depth=0))
    except BaseException as problem:  # noqa: BLE001 - for example, an unreadable source file, or notes that raise SystemExit
        text = f"<the traceback could not be formatted: {class_name(type(problem))}>"
    # The end is the most informative part: the deepest frames and the exception itself.
    return storable(text, limit=TRACEBACK_BYTES, tail=TRACEBACK_BYTES * 3 // 4)


def _chain(exception: BaseException, *, seen: set[int], depth: int) -> Iterator[str]:
    """Yield the traceback in Python's layout. The standard formatter would copy whole messages several times."""
    seen.add(id(exception))
    earlier, link = exception.__cause__, _CAUSE
    if earlier is None and not exception.__suppress_context__:
        earlier, link = exception.__context__, _CONTEXT
    if earlier is not None and id(earlier) not in seen:
        if depth < _DEEPEST_CHAIN:
            yield from _chain(earlier, seen=seen, depth=depth + 1)
        else:
            yield "[earlier exceptions left out]\n"
        yield link
    if exception.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from _frames(_users_part(exception.__traceback__))
    message = safe_text(exception, limit=MESSAGE_BYTES // 2)
    name = class_name(type(exception))
    yield f"{name}: {message}\n" if message else f"{name}\n"
    yield from _notes(exception)
    if isinstance(exception, BaseExceptionGroup):
        yield from _members(exception, seen=seen, depth=depth)


def _users_part(trace: TracebackType) -> TracebackType:
    """Return the traceback from the first frame of the user's code. If only everbeat's own code failed, return all of it.

    Before it are the frames of everbeat that called the code, and those of the standard library between them.
    """
    part: TracebackType | None = trace
    is_called_here = False
    while part is not None:
        file = part.tb_frame.f_code.co_filename
        if file.startswith(_OWN) and not file.startswith(_EXAMPLES):
            is_called_here = True
        elif not _is_of_python(file):
            return part if is_called_here else trace
        part = part.tb_next
    return trace


def _is_of_python(file: str) -> bool:
    """Return whether a file belongs to the standard library."""
    return file.startswith("<frozen ") or (
        file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file and "dist-packages" not in file
    )


_PACKAGE: Final = Path(__file__).parents[2]
_OWN: Final = str(_PACKAGE / "_")[:-1]
_EXAMPLES: Final = (str(_PACKAGE / "demo" / "_")[:-1], str(_PACKAGE / "bench" / "_")[:-1])
"""Their task functions are users' code."""
_STANDARD_LIBRARY: Final = str(Path(traceback.__file__).with_name("_"))[:-1]


def _frames(trace: TracebackType) -> list[str]:
    count = sum(1 for _ in traceback.walk_tb(trace))
    lines = traceback.StackSummary.extract(traceback.walk_tb(trace), limit=-_MOST_FRAMES).format()
    left_out = count - _MOST_FRAMES
    return lines if left_out <= 0 else [f"  [{amount(left_out, 'outer frame')} left out]\n", *lines]


def _notes(exception: BaseException) -> Iterator[str]:
    notes = getattr(exception, "__notes__", ())
    for note in notes[:_WIDEST_GROUP] if isinstance(notes, list | tuple) else ():
        yield safe_text(note, limit=MESSAGE_BYTES // 8) + "\n"


def _members(group: BaseExceptionGroup[Any], *, seen: set[int], depth: int) -> Iterator[str]:
    for number, member in enumerate(group.exceptions[:_WIDEST_GROUP], 1):
        yield f"  +-- member {number} of {len(group.exceptions)}\n"
        if id(member) in seen or depth >= _DEEPEST_CHAIN:
            yield "  | [left out]\n"
            continue
        text = "".join(_chain(member, seen=seen, depth=depth + 1))
        yield "".join(f"  | {line}" for line in text.splitlines(keepends=True))
    if len(group.exceptions) > _WIDEST_GROUP:
        yield f"  +-- [{amount(len(group.exceptions) - _WIDEST_GROUP, 'more member')} left out]\n"
