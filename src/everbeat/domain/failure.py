"""From an exception to the error that is stored, and between that error and JSON.

What lives here: `error_from_exception`, `error_to_json`, `error_from_json`. All three take whatever user
code throws at them: exceptions that cannot be printed, hold NUL, lone surrogates or 200 MB of text, refer
to themselves, or are groups. None of them raises. What may not live here: who stores the error, and whether
there is a retry.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import msgspec

from everbeat.domain.outcome import RESULT_NOT_AVAILABLE, UNHANDLED_EXCEPTION, TaskError
from everbeat.domain.stored_text import CUT, class_name, safe_text, storable

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
    """The exception as it is stored: code, message (at most 8 kB), data, class name and traceback (at most
    32 kB).

    The code is the exception's own if it is a TaskError, otherwise that of the first class in `codes` that
    fits, otherwise UNHANDLED_EXCEPTION.
    """
    kind = class_name(type(exception))
    text = _traceback_text(exception)
    if isinstance(exception, TaskError):
        # An own subclass may have broken these attributes; the class's promise is all we can rely on.
        values = vars(exception)
        code = safe_text(values.get("code", UNHANDLED_EXCEPTION), limit=_CODE_BYTES)
        message = safe_text(values.get("message", ""), limit=MESSAGE_BYTES)
        return TaskError(code, message, values.get("data"), type=kind, traceback=text)
    code = _mapped_code(exception, codes or {})
    return TaskError(code, safe_text(exception, limit=MESSAGE_BYTES), type=kind, traceback=text)


def error_to_json(error: TaskError) -> bytes:
    """The error as one JSON object without NUL; data that JSON cannot hold becomes its `repr` with a note."""
    fields = {
        "code": safe_text(error.code, limit=_CODE_BYTES),
        "message": safe_text(error.message, limit=MESSAGE_BYTES),
        "data": msgspec.Raw(_data_to_json(error.data)),
        "type": safe_text(error.type, limit=_CODE_BYTES),
        "traceback": storable(error.traceback, limit=TRACEBACK_BYTES, tail=TRACEBACK_BYTES * 3 // 4),
    }
    return msgspec.json.encode(fields)


def is_cut(error: TaskError) -> bool:
    """Whether text of this error was cut, or could not be made: Python's own formatter would copy the whole of it."""
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
    """The error that was stored; what cannot be read becomes a RESULT_NOT_AVAILABLE error that shows its
    start. A member that is missing or null is empty.
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
    except BaseException:  # noqa: BLE001, S110 - any class may refuse in its own way; its repr follows
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
    except BaseException as problem:  # noqa: BLE001 - e.g. a source file whose lines cannot be read back, or notes that exit
        text = f"<the traceback could not be formatted: {class_name(type(problem))}>"
    # The end tells most: the deepest frames and the exception itself.
    return storable(text, limit=TRACEBACK_BYTES, tail=TRACEBACK_BYTES * 3 // 4)


def _chain(exception: BaseException, *, seen: set[int], depth: int) -> Iterator[str]:
    """Python's own layout, written out here because the standard formatter copies messages whole, several
    times.
    """
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
        yield from _frames(exception.__traceback__)
    message = safe_text(exception, limit=MESSAGE_BYTES // 2)
    name = class_name(type(exception))
    yield f"{name}: {message}\n" if message else f"{name}\n"
    yield from _notes(exception)
    if isinstance(exception, BaseExceptionGroup):
        yield from _members(exception, seen=seen, depth=depth)


def _frames(trace: TracebackType) -> list[str]:
    count = sum(1 for _ in traceback.walk_tb(trace))
    lines = traceback.StackSummary.extract(traceback.walk_tb(trace), limit=-_MOST_FRAMES).format()
    left_out = count - _MOST_FRAMES
    return lines if left_out <= 0 else [f"  [{left_out:,} outer frames left out]\n", *lines]


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
        yield f"  +-- [{len(group.exceptions) - _WIDEST_GROUP:,} more members left out]\n"
