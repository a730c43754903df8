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
from everbeat.domain.outcome_json import carried, received, sent
from everbeat.domain.parameters import Parameters
from everbeat.domain.settings import shown
from everbeat.domain.signature import TaskSignature, read_signature
from everbeat.domain.typed_json import LARGEST_BYTES, TypedJson, encode_untyped, typed_json
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
        "_name",
        "_outcomes",
        "_result",
        "_results_in_outcomes",
        "accepts",
        "annotations",
        "largest",
        "owner",
        "parameters",
        "returns",
        "signature",
        "takes_context",
        "usage",
    )

    def __init__(
        self, read: TaskSignature, /, *, owner: str, name: str, largest: int = LARGEST_BYTES
    ) -> None:
        self.largest = largest
        self.takes_context = read.takes_context
        self.annotations = read.annotations
        self.returns = read.returns
        self.parameters = tuple(read.annotations)
        self.accepts = Parameters(self.parameters, read.required)
        self.owner = owner
        self.signature = str(read.bindable)
        self._name = name
        self._binding = Binding(read, name="Arguments")
        self._arguments = TypedJson(self._binding.struct, largest=largest)
        self._result = TypedJson(carried(read.returns), largest=largest)
        self._outcomes = [
            name for name, annotation in read.annotations.items() if carried(annotation) is not annotation
        ]
        self._results_in_outcomes = carried(read.returns) is not read.returns
        self.usage = f"call it as {name}{self.signature}"

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], /, *, task_name: str, largest: int = LARGEST_BYTES
    ) -> CallCodec:
        """The codec of a function; raises RegistrationError that says what cannot be sent, and where it is
        written. `largest`: bytes of its arguments, and of its result.
        """
        read = read_signature(function, owner=f"Task {task_name!r}")
        return cls(read, owner=f"task {task_name!r}", name=task_name, largest=largest)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The arguments as one JSON object by parameter name; raises PayloadError naming the wrong one."""
        return self.encode_bound(self.bind(args, kwargs))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> msgspec.Struct:
        """The arguments as a struct of the parameters, their values unseen; raises PayloadError for a call that cannot be."""
        try:
            return self._binding.bind(*args, **kwargs)
        except TypeError:
            raise self._unbindable(args, kwargs) from None

    def encode_bound(self, bound: msgspec.Struct) -> bytes:
        """Bound arguments as one JSON object; raises PayloadError naming the wrong one."""
        for name in self._outcomes:
            setattr(bound, name, sent(getattr(bound, name)))
        try:
            return self._arguments.encode(bound)
        except Misfit as misfit:
            guilty = getattr(bound, _first_name(misfit.path), None)
            raise self._unsendable(guilty, misfit) from None

    def encode_part(self, value: Any, annotation: Any, place: str) -> bytes:
        """An argument, or a part of one, alone; `place` begins with the name of its parameter. Raises PayloadError."""
        single = typed_json(carried(annotation))
        try:
            return single.encode(sent(value) if carried(annotation) is not annotation else value)
        except Misfit as misfit:
            joint = "" if not misfit.path or misfit.path.startswith(("[", ".")) else "."
            misfit.path = f"{place}{joint}{misfit.path}"
            raise self._unsendable(value, misfit) from None

    def call(self, bound: msgspec.Struct) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bound arguments to pass to the function; raises TypeError if further keywords repeat a parameter."""
        for name in self._outcomes:
            setattr(bound, name, received(getattr(bound, name)))
        return self._binding.call(bound)

    def decode(self, data: bytes | str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for the function; raises PayloadError if they do not fit it (any
        more).
        """
        try:
            return self.call(self._arguments.decode(data))
        except (Misfit, TypeError) as error:
            raise self._unreadable(error) from None

    def encode_result(self, value: Any) -> bytes:
        """What the function returned as JSON; raises PayloadError if its annotation or JSON cannot carry
        it.
        """
        try:
            return self._result.encode(sent(value) if self._results_in_outcomes else value)
        except Misfit as misfit:
            place = f" at {misfit.path.lstrip('.')}" if misfit.path else ""
            message = f"The result of {self.owner}{place} {_predicate(misfit)}."
            fix = misfit.fix or "return what the function's annotation says"
            raise PayloadError(message, parameter="return", fix=f"{fix}.") from None

    def decode_result(self, data: bytes | str) -> Any:
        """The value that the function returned; raises PayloadError if its annotation no longer fits."""
        try:
            value = self._result.decode(data)
            return received(value) if self._results_in_outcomes else value
        except Misfit as misfit:
            message = f"The stored result of {self.owner} does not fit its annotation: {misfit.reason}."
            fix = "read it with the code that wrote it, or keep the annotation compatible."
            raise PayloadError(message, parameter="return", fix=fix) from None

    def _unbindable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PayloadError:
        mistake = self._binding.mistake(args, kwargs)
        named = _NAME.search(mistake)
        parameter = named[1] if named else None
        unknown = _UNKNOWN_KEYWORD.search(mistake)
        guess = nearest(unknown[1], self.parameters) if unknown else None
        fix = f"did you mean {guess!r}?" if guess else f"{self.usage}."
        message = f"{_capital(self.owner)} cannot be called like this: {mistake}."
        return PayloadError(message, parameter=parameter, fix=fix)

    def _unsendable(self, guilty: object, misfit: Misfit) -> PayloadError:
        path = misfit.path.lstrip(".")
        parameter = _first_name(path)
        value = f" = {shown(guilty)}" if parameter else ""
        place = f" (at {path})" if path != parameter else ""
        subject = f"Argument {parameter!r}{value}" if parameter else "The arguments"
        message = f"{subject} of {self.owner} {_predicate(misfit)}{place}."
        fix = misfit.fix or self.usage
        return PayloadError(message, parameter=parameter or None, fix=f"{fix}.")

    def _unreadable(self, error: Misfit | TypeError) -> PayloadError:
        # The value itself is left out: this error is stored with the task and logged by its worker.
        reason, path = (error.reason, error.path) if isinstance(error, Misfit) else (str(error), "")
        named = re.match(r"(\w+)", path) or _REPEATED.match(reason) or _FIELD.search(reason)
        place = f" (at {path})" if path else ""
        message = f"The stored arguments of {self.owner} do not fit its signature: {reason}{place}."
        fix = f"keep the signature compatible while tasks wait; it is now {self._name}{self.signature}."
        return PayloadError(message, parameter=named[1] if named else None, fix=fix)


def encode_any(arguments: Mapping[str, Any], /, *, task_name: str, largest: int = LARGEST_BYTES) -> bytes:
    """Arguments by name for a task whose function is not known here; raises PayloadError.

    The worker checks them against the signature, so a UUID may be sent as one, or as text.
    """
    if not all(isinstance(each, str) for each in arguments):
        message = f"The names of the arguments of task {task_name!r} must be str: {shown([*arguments])}."
        raise PayloadError(message, fix="name arguments as the function names its parameters.")
    try:
        return encode_untyped(dict(arguments), largest=largest)
    except Misfit as misfit:
        name = next((each for each in arguments if misfit.path.startswith(f"[{each!r}]")), None)
        subject = "The arguments" if name is None else f"Argument {name!r} = {shown(arguments[name])}"
        rest = misfit.path[len(f"[{name!r}]") :] if name is not None else ""
        place = f" (at {name}{rest})" if rest else ""
        fix = f"{misfit.fix}." if misfit.fix else None
        message = f"{subject} of task {task_name!r} {_predicate(misfit)}{place}."
        raise PayloadError(message, parameter=name, fix=fix) from None


def _first_name(path: str) -> str:
    return re.match(r"\w*", path.lstrip("."))[0]  # type: ignore[index]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _predicate(misfit: Misfit) -> str:
    """The reason as what follows a subject: msgspec says "expected `int`, got `str`", our own say "is a
    ...".
    """
    starts_well = misfit.reason.startswith(("is ", "has ", "holds ", "would take "))
    return misfit.reason if starts_well else f"does not fit: {misfit.reason}"
