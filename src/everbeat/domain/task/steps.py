"""The steps of one attempt: their names, numbers and records, and the JSON of step results and events."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from typing import Any, Final, final
from weakref import WeakKeyDictionary

from msgspec import Struct

from everbeat.domain.settings.checks import instance_of, optional
from everbeat.domain.settings.settings import shown
from everbeat.domain.settings.units import Duration, span
from everbeat.domain.task.context_backend import RECORD_LIMIT_BYTES, Recorded, StepKind
from everbeat.domain.task.policy import LONGEST_TIMEOUT_S
from everbeat.domain.task.retry import RetryPolicy
from everbeat.domain.typed_json import Misfit, TypedJson, encode_untyped, refusal, require_plain
from everbeat.errors import NonDeterministic, PayloadError

NAME_LIMIT: Final = 200
ANSWER_PREFIX: Final = "answer/"
"""The events of answers have names that begin with this prefix. No signal of a program can, because names contain no slash."""

_within: ContextVar[str] = ContextVar("everbeat_step", default="")
_home: ContextVar[int | None] = ContextVar("everbeat_strand", default=None)


class StepRecord(Struct, frozen=True):
    """The name of a step's record. `instead` is the name that an earlier version, which numbered all steps, might have used."""

    name: str
    instead: str | None = None


@final
class StepBook:
    """The steps of an attempt. Repeated names are numbered in the order of use. Safe for concurrent use by threads and coroutines."""

    __slots__ = ("_records", "_uses", "exception_codes", "home", "is_read", "misfit")

    def __init__(self, *, is_read: bool = False) -> None:
        self._uses: dict[tuple[str, str], count[int]] = {}
        self.home: int | None = None
        """The strand in which the attempt's code started, or None if all strands count as one."""
        self._records: dict[tuple[StepKind, str], Recorded] = {}
        self.is_read = is_read
        """Whether the records of all earlier attempts have been loaded."""
        self.exception_codes: Mapping[type[BaseException], str] = {}
        """The error codes of the task and the app, which a step's retry policy uses to match exceptions."""
        self.misfit: NonDeterministic | None = None
        """Set if the code deviates from the records of earlier attempts. The attempt then fails even if the code catches the error."""

    def draw(self, kind: StepKind, name: str) -> str:
        """Return the numbered name for this use: `charge`, then `charge#2`. Inside the step `pack`, the name is `pack#1/charge`."""
        return self._numbered(kind, f"{_within.get()}{name}")

    def draw_question(self) -> str:
        """Return the name of the event that answers this use of `Context.ask`: `answer/ask`, then `answer/ask#2`."""
        return f"{ANSWER_PREFIX}{self._numbered('asked', f'{_within.get()}ask')}"

    def place(self, name: str, *, digest: str, strand: int) -> StepRecord:
        """Return the place of this use of a step.

        In the strand in which the code started, steps are identified by their number. Other strands (asyncio tasks and threads that
        the code started) reach their steps in an order that depends on timing. Their steps are identified by the digest of the
        arguments, and by the number among equal digests.
        """
        whole = f"{_within.get()}{name}"
        began = self._numbered("begun", whole)
        home = _home.get() or self.home
        if home is None or home == strand:
            return StepRecord(self._numbered("step", whole))
        return StepRecord(self._numbered("step", f"{whole}@{digest[:12]}"), instead=began)

    def _numbered(self, kind: str, name: str) -> str:
        number = next(self._uses.setdefault((kind, name), count(1)))
        return name if number == 1 else f"{name}#{number}"

    def take(self, records: Iterable[Recorded]) -> None:
        """Add records from earlier attempts."""
        self._records.update({(each.kind, each.name): each for each in records})

    def restart(self, name: str) -> None:
        """Restart the numbering of names inside this step, so that the step can be retried."""
        within = f"{place_of(name)}/"
        for kind, used in [*self._uses]:
            if used.startswith(within):
                del self._uses[kind, used]

    def has(self, kind: StepKind, name: str) -> bool:
        """Return whether an earlier attempt recorded this name, even if the recorded sleep or wait has not ended."""
        return (kind, name) in self._records

    def find(self, kind: StepKind, name: str) -> Recorded | None:
        """Return an earlier attempt's record with this name. Return None if there is no record, or its sleep or wait has not ended."""
        found = self._records.get((kind, name))
        return None if found is None or found.state == "OPEN" or found.left_ms else found

    def find_matching(
        self,
        kind: StepKind,
        name: str,
        *,
        digest: str | None,
        task_name: str,
        title: str | None = None,
        is_begun: bool = False,
    ) -> Recorded | None:
        """Return the same record as `find`. Raises NonDeterministic, with `title` as the type of operation, if the arguments differ.

        `is_begun`: return the record even if its operation was only begun.
        """
        found = self._records.get((kind, name)) if is_begun else self.find(kind, name)
        if found is None or digest is None or found.digest in (None, digest):
            return found
        same = (each.name for each in self._records.values() if (each.kind, each.digest) == (kind, digest))
        moved = next((each for each in sorted(same) if _unnumbered(each) == _unnumbered(name)), None)
        self.misfit = NonDeterministic(
            name,
            kind=title or kind,
            recorded=found.digest or "",
            given=digest,
            task_name=task_name,
            elsewhere=moved,
        )
        raise self.misfit

    def find_step(self, place: StepRecord, *, digest: str, task_name: str) -> Recorded | None:
        """Return an earlier attempt's record of the step at `place`, if any. Raises NonDeterministic if the arguments differ."""
        found = self.find_matching("step", place.name, digest=digest, task_name=task_name)
        if found is not None or place.instead is None:
            return found
        found = self.find("step", place.instead)
        return found if found is not None and found.digest in (None, digest) else None

    def require_deterministic(self) -> None:
        """Raise NonDeterministic again if this attempt has raised it, so that the code cannot continue by catching the error."""
        if self.misfit is not None:
            raise self.misfit


def place_of(name: str) -> str:
    """Return the name of a step with its number, such as `charge#1`. It is the prefix of all names inside the step."""
    return name if "#" in name.rpartition("/")[2] else f"{name}#1"


def _unnumbered(name: str) -> str:
    parts, _, last = name.rpartition("/")
    return f"{parts}/{last.partition('#')[0]}"


@contextmanager
def inside(name: str, *, strand: int | None = None) -> Iterator[None]:
    """Number the names used in the `with` block as names inside the step `name`, which starts in `strand`.

    A later attempt that skips the step does not count these names.
    """
    within, home = _within.set(f"{place_of(name)}/"), _home.set(strand)
    try:
        yield
    finally:
        _home.reset(home)
        _within.reset(within)


def checked_name(name: object, *, owner: str) -> str:
    """Return a validated name of a step, event or signal. Raises PayloadError if the name is invalid or resembles a numbered name."""
    fix = "use a short text such as 'approved'; repeated names are numbered automatically."
    return _checked_name(name, owner=owner, fix=fix)


def checked_stream_name(name: object, *, owner: str) -> str:
    """Return a validated name of a stream. Raises PayloadError if the name is invalid."""
    return _checked_name(name, owner=owner, fix="use a short text such as 'tokens'.")


def _checked_name(name: object, *, owner: str, fix: str) -> str:
    is_text = isinstance(name, str) and 1 <= len(name) <= NAME_LIMIT and name.isprintable()
    if isinstance(name, str) and is_text and "#" not in name and "/" not in name:
        return name
    raise PayloadError(
        f"The name {shown(name)} of {owner} is not a printable string of 1 to {NAME_LIMIT} characters without # or /.",
        parameter="name",
        fix=fix,
    )


def require_callable(function: object, *, task_name: str) -> None:
    """Raise PayloadError unless `function` is callable."""
    if not callable(function):
        raise PayloadError(
            f"{shown(function)} cannot be a step of task {task_name!r}: it is of type {type(function).__name__}, which is not callable.",
            parameter="fn",
            fix="pass the function and then its arguments, without calling it: ctx.step(charge, order).",
        )


def name_of(function: Callable[..., Any], *, task_name: str) -> str:
    """Return the name under which a step is recorded. Raises PayloadError unless `function` is a function with a name."""
    require_callable(function, task_name=task_name)
    name = getattr(whole_of(function), "__name__", None)
    if name is None or name == "<lambda>":
        raise PayloadError(
            f"{shown(function)} has no name by which task {task_name!r} could record it as a step.",
            parameter="fn",
            fix="write a 'def', or name the step: ctx.named('charge').step(...).",
        )
    return checked_name(name, owner=f"a step in task {task_name!r}")


def whole_of(function: Any) -> Any:
    """Return the function that a `partial` wraps, or the function itself if it is not a `partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


_retry: Final = optional(instance_of(RetryPolicy), none="never calls it again")
_timeout: Final = optional(span(0.1, LONGEST_TIMEOUT_S), none="sets no limit")


class StepOptions(Struct, frozen=True):
    """The options of `Context.with_options` for the next step."""

    retry: RetryPolicy | None = None
    timeout_s: float | None = None

    @classmethod
    def checked(cls, *, retry: RetryPolicy | None, timeout: Duration | None) -> StepOptions:
        """Return the validated options. Raises ConfigurationError if an option is invalid."""
        return cls(
            _retry(retry, subject="retry of Context.with_options"),
            _timeout(timeout, subject="timeout of Context.with_options"),
        )


def is_async_function(function: Callable[..., Any]) -> bool:
    """Return whether calling the function, decorated or not, returns an awaitable."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function)):
        return True
    returned = getattr(function, "__annotations__", {}).get("return")
    origin = typing.get_origin(returned)
    return isinstance(origin, type) and issubclass(origin, Awaitable)


def location_of(function: Callable[..., Any]) -> str | None:
    """Return the `file:line` of the function's definition, or None if the function is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def returned_type(hint: Any) -> Any:
    """Return the type of a function's result, given its annotation. For an awaitable, return the type of the awaited value."""
    if hint in (typing.NoReturn, typing.Never):
        return None
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Awaitable):
        return typing.get_args(hint)[-1]
    return hint


_codecs: WeakKeyDictionary[Any, TypedJson] = WeakKeyDictionary()


def codec_of(function: Callable[..., Any], *, step: str, task_name: str) -> TypedJson:
    """Return the codec of a step's result. Raises PayloadError, before the step runs, if JSON cannot represent the annotation."""
    inner = _inner(function)
    with suppress(TypeError):  # functions that do not support weak references are not cached
        if (known := _codecs.get(inner)) is not None:
            return known
    annotation = _result_annotation(inner, step=step, task_name=task_name)
    refused = refusal(annotation)
    if refused is not None:
        raise PayloadError(
            f"The result of step {step!r} of task {task_name!r} cannot be recorded: its annotation {refused.reason}.",
            parameter=step,
            fix=f"{refused.fix}.",
        )
    codec = TypedJson(annotation)
    with suppress(TypeError):
        _codecs[inner] = codec
    return codec


def encode_result(codec: TypedJson, value: object, *, step: str, task_name: str) -> bytes:
    """Return the result of a step as JSON. Raises PayloadError, after the step has run, if the result cannot be recorded."""
    try:
        data = codec.encode(value)
    except Misfit as misfit:
        raise _unrecordable(misfit, f"result of step {step!r} of task {task_name!r}", step) from None
    if len(data) > RECORD_LIMIT_BYTES:
        raise PayloadError(
            f"The result of step {step!r} of task {task_name!r} takes {len(data):,} bytes of JSON; at most {RECORD_LIMIT_BYTES:,} are recorded.",
            parameter=step,
            fix="store large data in files or tables, and return a reference to it.",
        )
    return data


def decode_result(codec: TypedJson, recorded: Recorded, *, task_name: str) -> Any:
    """Return a recorded result, decoded from JSON. Raises PayloadError if it no longer matches the function's annotation."""
    try:
        return codec.decode(recorded.result or "null")
    except Misfit as misfit:
        raise PayloadError(
            f"The recorded result of step {recorded.name!r} of task {task_name!r} no longer fits its annotation: {misfit.reason}.",
            parameter=recorded.name,
            fix="keep the annotation compatible until the running tasks end, or give the changed step another name: ctx.named(...).",
        ) from None


def decode_event(annotation: Any, value: str | bytes, *, event: str, task_name: str) -> Any:
    """Return the value of a signal. Raises PayloadError if the value does not have the requested type."""
    try:
        return TypedJson(annotation).decode(value)
    except Misfit as misfit:
        place = f" (at {misfit.path})" if misfit.path else ""
        raise PayloadError(
            f"The value of event {event!r} of task {task_name!r} is not of the expected type: {misfit.reason}{place}.",
            parameter=event,
            fix="send a value of that type, or pass another type to Context.wait_event.",
        ) from None


def require_carried(annotation: Any, *, event: str, task_name: str) -> None:
    """Raise PayloadError if no signal value can have the annotated type."""
    refused = refusal(annotation)
    if refused is not None:
        raise PayloadError(
            f"The type of event {event!r} of task {task_name!r} {refused.reason}.",
            parameter="type",
            fix=f"{refused.fix}.",
        )


def encode_signal(value: object, *, event: str) -> bytes:
    """Return the value of a signal as JSON. Raises PayloadError if JSON would change the value, or the value exceeds 1 MB."""
    return _encode_sent(
        value,
        subject=f"value of signal {event!r}",
        fix="send plain values, such as value.isoformat() or str(value)",
    )


def encode_answer(value: object) -> bytes:
    """Return the answer to a question as JSON. Raises PayloadError as `encode_signal` does."""
    return _encode_sent(
        value, subject="answer", fix="answer with plain values, such as member.value for an enum"
    )


def _encode_sent(value: object, *, subject: str, fix: str) -> bytes:
    try:
        data = encode_untyped(value)
        require_plain(value, data)
    except Misfit as misfit:
        raise _unrecordable(misfit, subject, "value", fix=fix) from None
    if len(data) > RECORD_LIMIT_BYTES:
        raise PayloadError(
            f"The {subject} takes {len(data):,} bytes of JSON; at most {RECORD_LIMIT_BYTES:,} are stored.",
            parameter="value",
            fix="store large data elsewhere, and send a reference to it.",
        )
    return data


def _unrecordable(misfit: Misfit, subject: str, parameter: str, *, fix: str | None = None) -> PayloadError:
    place = f" at {misfit.path.lstrip('.')}" if misfit.path else ""
    fix = fix or misfit.fix or "return a value of the annotated type"
    return PayloadError(f"The {subject}{place} {misfit.predicate}.", parameter=parameter, fix=f"{fix}.")


def _inner(function: Any) -> Any:
    """Return the annotated function underneath partials, wrappers, methods and callable objects."""
    function = inspect.unwrap(whole_of(function))
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
    except Exception as error:  # noqa: BLE001 - evaluating annotations can raise anything
        raise PayloadError(
            f"The result of step {step!r} of task {task_name!r} cannot be recorded: its annotation cannot be read"
            f" ({type(error).__name__}: {error}).",
            parameter=step,
            fix="define or import the annotated type at module level, not inside a function or under TYPE_CHECKING.",
        ) from None
    return returned_type(hints["return"])
