"""A task's arguments and result as JSON, driven by its function's annotations.

What lives here: `CallCodec`. Arguments are one JSON object by parameter name; `*xs: int` is stored as the
list `xs`, `**options` as the object `options`. What may not live here: reading signatures (`signature`),
binding (`binding`), the JSON of one value (`typed_json`).

Rules of the codec, checked when sent and again when read:
- What arrives equals what was sent. A subclass that would lose fields, a NaN, a datetime in a parameter
  annotated `Any`, a str for a UUID are refused. A tuple may arrive as a list, and the other way round, as
  annotated.
- A naive datetime fits `datetime` and arrives naive; `Annotated[datetime, msgspec.Meta(tz=True)]` refuses
  it.
- Names that the signature does not know are refused, so that a renamed parameter is noticed and not
  dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, final

import msgspec

from everbeat.domain.binding import Binding
from everbeat.domain.fidelity import Misfit
from everbeat.domain.settings import shown
from everbeat.domain.signature import read_signature
from everbeat.domain.typed_json import TypedJson, encode_untyped
from everbeat.errors import PayloadError, nearest

_UNKNOWN_KEYWORD = re.compile(r"unexpected keyword argument '(\w+)'")
_NAME = re.compile(r"'(\w+)'")
_FIELD = re.compile(r"field `(\w+)`")
_REPEATED = re.compile(r"'(\w+)' is given twice")


@final
class CallCodec:
    """Turns the arguments of one task function into JSON and back, and its result; safe to share between
    threads.
    """

    __slots__ = (
        "_arguments",
        "_binding",
        "_result",
        "_task_name",
        "parameters",
        "signature",
        "takes_context",
    )

    def __init__(self, function: Callable[..., Any], /, *, task_name: str) -> None:
        read = read_signature(function, task_name=task_name)
        self.takes_context = read.takes_context
        self.parameters = tuple(read.annotations)
        self._task_name = task_name
        self.signature = str(read.bindable)
        self._binding = Binding(read, name="Arguments")
        self._arguments = TypedJson(self._binding.struct)
        self._result = TypedJson(read.returns)

    @classmethod
    def from_function(cls, function: Callable[..., Any], /, *, task_name: str) -> CallCodec:
        """The codec of a function; raises RegistrationError that says what cannot be sent, and where it is
        written.
        """
        return cls(function, task_name=task_name)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The arguments as one JSON object by parameter name; raises PayloadError naming the wrong one."""
        try:
            bound = self._binding.bind(*args, **kwargs)
        except TypeError:
            raise self._unbindable(args, kwargs) from None
        try:
            return self._arguments.encode(bound)
        except Misfit as misfit:
            raise self._unsendable(bound, misfit) from None

    def decode(self, data: bytes | str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for the function; raises PayloadError if they do not fit it (any
        more).
        """
        try:
            return self._binding.call(self._arguments.decode(data))
        except (Misfit, TypeError) as error:
            raise self._unreadable(error) from None

    def encode_result(self, value: Any) -> bytes:
        """What the function returned as JSON; raises PayloadError if its annotation or JSON cannot carry
        it.
        """
        try:
            return self._result.encode(value)
        except Misfit as misfit:
            place = f" at {misfit.path.lstrip('.')}" if misfit.path else ""
            message = f"The result of task {self._task_name!r}{place} {_predicate(misfit)}."
            fix = misfit.fix or "return what the function's annotation says"
            raise PayloadError(message, parameter="return", fix=f"{fix}.") from None

    def decode_result(self, data: bytes | str) -> Any:
        """The value that the function returned; raises PayloadError if its annotation no longer fits."""
        try:
            return self._result.decode(data)
        except Misfit as misfit:
            message = (
                f"The stored result of task {self._task_name!r} does not fit its annotation: {misfit.reason}."
            )
            fix = "read it with the code that wrote it, or keep the annotation compatible."
            raise PayloadError(message, parameter="return", fix=fix) from None

    def _unbindable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PayloadError:
        mistake = self._binding.mistake(args, kwargs)
        named = _NAME.search(mistake)
        parameter = named[1] if named else None
        unknown = _UNKNOWN_KEYWORD.search(mistake)
        guess = nearest(unknown[1], self.parameters) if unknown else None
        fix = f"did you mean {guess!r}?" if guess else f"call it as {self._task_name}{self.signature}."
        message = f"Task {self._task_name!r} cannot be called like this: {mistake}."
        return PayloadError(message, parameter=parameter, fix=fix)

    def _unsendable(self, bound: msgspec.Struct, misfit: Misfit) -> PayloadError:
        path = misfit.path.lstrip(".")
        parameter = re.match(r"\w*", path)[0]  # type: ignore[index]
        value = f" = {shown(getattr(bound, parameter))}" if parameter else ""
        place = f" (at {path})" if path != parameter else ""
        subject = f"Argument {parameter!r}{value}" if parameter else "The arguments"
        message = f"{subject} of task {self._task_name!r} {_predicate(misfit)}{place}."
        fix = misfit.fix or f"call it as {self._task_name}{self.signature}"
        return PayloadError(message, parameter=parameter or None, fix=f"{fix}.")

    def _unreadable(self, error: Misfit | TypeError) -> PayloadError:
        # The value itself is left out: this error is stored with the task and logged by its worker.
        reason, path = (error.reason, error.path) if isinstance(error, Misfit) else (str(error), "")
        named = re.match(r"(\w+)", path) or _REPEATED.match(reason) or _FIELD.search(reason)
        place = f" (at {path})" if path else ""
        message = (
            f"The stored arguments of task {self._task_name!r} do not fit its signature: {reason}{place}."
        )
        fix = f"keep the signature compatible while tasks wait; it is now {self._task_name}{self.signature}."
        return PayloadError(message, parameter=named[1] if named else None, fix=fix)


def encode_any(arguments: Mapping[str, Any], /, *, task_name: str) -> bytes:
    """Arguments by name for a task whose function is not known here; raises PayloadError.

    The worker checks them against the signature, so a UUID may be sent as one, or as text.
    """
    if not all(isinstance(each, str) for each in arguments):
        message = f"The names of the arguments of task {task_name!r} must be str: {shown([*arguments])}."
        raise PayloadError(message, fix="name arguments as the function names its parameters.")
    try:
        return encode_untyped(dict(arguments))
    except Misfit as misfit:
        name = next((each for each in arguments if misfit.path.startswith(f"[{each!r}]")), None)
        subject = "The arguments" if name is None else f"Argument {name!r} = {shown(arguments[name])}"
        rest = misfit.path[len(f"[{name!r}]") :] if name is not None else ""
        place = f" (at {name}{rest})" if rest else ""
        fix = f"{misfit.fix}." if misfit.fix else None
        message = f"{subject} of task {task_name!r} {_predicate(misfit)}{place}."
        raise PayloadError(message, parameter=name, fix=fix) from None


def _predicate(misfit: Misfit) -> str:
    """The reason as what follows a subject: msgspec says "expected `int`, got `str`", our own say "is a
    ...".
    """
    starts_well = misfit.reason.startswith(("is ", "has ", "holds ", "would take "))
    return misfit.reason if starts_well else f"does not fit: {misfit.reason}"
