"""Registered task functions: the JSON of their arguments and results, and their options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from everbeat.domain.settings.settings import shown
from everbeat.domain.task.needs import Parameters
from everbeat.domain.task.outcome import from_wire, to_wire, wire_type
from everbeat.domain.task.policy import RunIn, TaskOptions
from everbeat.domain.task.signature import TaskSignature, read_signature
from everbeat.domain.typed_json import LARGEST_BYTES, Misfit, TypedJson, encode_untyped, typed_json
from everbeat.errors import PayloadError
from everbeat.errors.wording import nearest

_POSITIONAL_ONLY: Final = inspect.Parameter.POSITIONAL_ONLY
_EITHER: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
_REST: Final = inspect.Parameter.VAR_POSITIONAL
_KEYWORD_ONLY: Final = inspect.Parameter.KEYWORD_ONLY
_NAMED_REST: Final = inspect.Parameter.VAR_KEYWORD


@final
class Binding:
    """Converts `(*args, **kwargs)` to a struct and back.

    The field of an omitted parameter stays unset, so the function's default applies when the function runs.
    """

    __slots__ = ("_names", "_parameters", "_plain", "_positional", "_signature", "bind", "struct")

    def __init__(self, signature: TaskSignature, *, name: str) -> None:
        self._signature = signature.bindable
        self._parameters = tuple((each.name, each.kind, each.default) for each in signature.parameters)
        self._names = tuple(name for name, _, _ in self._parameters)
        self._positional = sum(1 for _, kind, _ in self._parameters if kind is _EITHER)
        # A struct binds a call in 0.1 µs instead of 2 µs with inspect, but supports neither `/` nor `*xs` nor `**kw`.
        self._plain = all(kind in (_EITHER, _KEYWORD_ONLY) for _, kind, _ in self._parameters)
        self.struct = _struct(signature, name=name, keywords_only=not self._plain)
        self.bind: Callable[..., msgspec.Struct] = self.struct if self._plain else self._bind_slowly

    def default_of(self, parameter: str) -> Any:
        """Return the default of a parameter, or None if it has none."""
        default = next((each for name, _, each in self._parameters if name == parameter), None)
        return None if default is inspect.Parameter.empty else default

    def mistake(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why `bind` rejected a call with TypeError, in Python's own wording."""
        # A mistyped name also makes the intended name missing. The message about the mistyped name is more useful.
        if not any(kind is _NAMED_REST for _, kind, _ in self._parameters):
            for name in kwargs:
                if name not in self._names:
                    return f"got an unexpected keyword argument {name!r}"
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            return str(error)
        # Python 3.13.0 confuses an extra keyword with a positional-only parameter of the same name.
        optional = (_REST, _NAMED_REST)
        for name, kind, default in self._parameters:
            if kind not in optional and default is inspect.Parameter.empty and name not in given:
                return f"missing a required argument: {name!r}"
        return "the arguments do not fit"

    def call(self, bound: msgspec.Struct) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for the function. Raises TypeError if an extra keyword repeats a parameter."""
        values = msgspec.structs.astuple(bound)
        if self._plain:
            split = end = self._positional
            while end and values[end - 1] is UNSET:
                end -= 1
            kept, named = values[:end], values[split:]
            # Compared by identity, because users' values can define their own `__eq__`.
            if not any(map(_is_unset, kept)) and not any(map(_is_unset, named)):
                return kept, dict(zip(self._names[split:], named, strict=True)) if named else {}
        return self._call_with_gaps(values)

    def _call_with_gaps(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, positional where possible, because a wrapper can use different parameter names."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        # Parameters before `*xs` cannot be omitted if the call has extra positional arguments.
        filled = any(
            kind is _REST and value for (_, kind, _), value in zip(self._parameters, values, strict=True)
        )
        gap = False
        for (name, kind, default), value in zip(self._parameters, values, strict=True):
            unset = value is UNSET
            if unset and (kind is _POSITIONAL_ONLY or (kind is _EITHER and filled)):
                positional.append(default)
            elif unset:
                gap = True
            elif kind is _REST:
                positional.extend(value)
            elif kind is _NAMED_REST:
                self._require_new(value)
                named.update(value)
            elif kind is _KEYWORD_ONLY or gap:
                named[name] = value
            else:
                positional.append(value)
        return tuple(positional), named

    def _bind_slowly(self, /, *args: Any, **kwargs: Any) -> msgspec.Struct:
        values = self._signature.bind(*args, **kwargs).arguments
        for name, kind, _ in self._parameters:
            if kind is _REST and name in values:
                values[name] = [*values[name]]
        return self.struct(**values)

    def _require_new(self, rest: dict[str, Any]) -> None:
        for name, kind, _ in self._parameters:
            if name in rest and kind in (_EITHER, _KEYWORD_ONLY):
                raise TypeError(f"{name!r} is given twice: as a parameter and as an extra keyword")


def _is_unset(value: object) -> bool:
    return value is UNSET


def _struct(signature: TaskSignature, *, name: str, keywords_only: bool) -> type[msgspec.Struct]:
    positional: list[Any] = []
    named: list[Any] = []
    for each in signature.parameters:
        annotation = wire_type(signature.annotations[each.name])
        required = each.name in signature.required
        fields = named if keywords_only or each.kind is _KEYWORD_ONLY else positional
        fields.append((each.name, annotation) if required else (each.name, annotation | UnsetType, UNSET))
    # Keyword-only fields come last in a struct, like keyword-only parameters in a signature.
    base = msgspec.defstruct(name, positional)
    return msgspec.defstruct(name, named, bases=(base,), kw_only=True, forbid_unknown_fields=True)


_UNKNOWN_KEYWORD = re.compile(r"unexpected keyword argument '(\w+)'")
_NAME = re.compile(r"'(\w+)'")
_FIELD = re.compile(r"field `(\w+)`")
_REPEATED = re.compile(r"'(\w+)' is given twice")


@final
class CallCodec:
    """Converts the arguments and the result of one task function to JSON and back. Thread-safe."""

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
        self._result = TypedJson(wire_type(read.returns), largest=largest)
        self._outcomes = [
            name for name, annotation in read.annotations.items() if wire_type(annotation) is not annotation
        ]
        self._results_in_outcomes = wire_type(read.returns) is not read.returns
        self.usage = f"call it as {name}{self.signature}"

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], /, *, task_name: str, largest: int = LARGEST_BYTES
    ) -> CallCodec:
        """Return the codec of a function. Raises RegistrationError, which lists all parameters that cannot be sent as JSON.

        `largest` is the maximum JSON size, in bytes, of the arguments and of the result.
        """
        read = read_signature(function, owner=f"Task {task_name!r}")
        return cls(read, owner=f"task {task_name!r}", name=task_name, largest=largest)

    def default_of(self, parameter: str) -> Any:
        """Return the default of a parameter, or None if it has none."""
        return self._binding.default_of(parameter)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return the arguments as a JSON object with the parameter names as keys.

        Raises PayloadError, which names the parameter, if an argument is invalid.
        """
        return self.encode_bound(self.bind(args, kwargs))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> msgspec.Struct:
        """Return the arguments as a struct without checking their values. Raises PayloadError if they do not match the signature."""
        try:
            return self._binding.bind(*args, **kwargs)
        except TypeError:
            raise self._unbindable(args, kwargs) from None

    def encode_bound(self, bound: msgspec.Struct) -> bytes:
        """Return bound arguments as a JSON object. Raises PayloadError, which names the parameter, if an argument is invalid."""
        for name in self._outcomes:
            setattr(bound, name, to_wire(getattr(bound, name)))
        try:
            return self._arguments.encode(bound)
        except Misfit as misfit:
            guilty = getattr(bound, _first_name(misfit.path), None)
            raise self._unsendable(guilty, misfit) from None

    def encode_part(self, value: Any, annotation: Any, place: str) -> bytes:
        """Return an argument, or a part of one, as JSON. Raises PayloadError if the value is invalid.

        `place` is the path of the value for error messages. The path starts with the name of the parameter.
        """
        single = typed_json(wire_type(annotation))
        try:
            return single.encode(to_wire(value) if wire_type(annotation) is not annotation else value)
        except Misfit as misfit:
            joint = "" if not misfit.path or misfit.path.startswith(("[", ".")) else "."
            misfit.path = f"{place}{joint}{misfit.path}"
            raise self._unsendable(value, misfit) from None

    def call(self, bound: msgspec.Struct) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return bound arguments as positional and keyword arguments. Raises TypeError if an extra keyword repeats a parameter."""
        for name in self._outcomes:
            setattr(bound, name, from_wire(getattr(bound, name)))
        return self._binding.call(bound)

    def decode(self, data: bytes | str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments, decoded from JSON. Raises PayloadError if they no longer match the signature."""
        try:
            return self.call(self._arguments.decode(data))
        except (Misfit, TypeError) as error:
            raise self._unreadable(error) from None

    def encode_result(self, value: Any) -> bytes:
        """Return the function's result as JSON. Raises PayloadError if JSON cannot represent it, or it does not match the annotation."""
        try:
            return self._result.encode(to_wire(value) if self._results_in_outcomes else value)
        except Misfit as misfit:
            place = f" at {misfit.path.lstrip('.')}" if misfit.path else ""
            message = f"The result of {self.owner}{place} {misfit.predicate}."
            fix = misfit.fix or "return a value of the annotated type"
            raise PayloadError(message, parameter="return", fix=f"{fix}.") from None

    def decode_result(self, data: bytes | str) -> Any:
        """Return the function's result, decoded from JSON. Raises PayloadError if the result no longer matches the annotation."""
        try:
            value = self._result.decode(data)
            return from_wire(value) if self._results_in_outcomes else value
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
        fix = f"did you mean {guess!r}? {_capital(self.usage)}." if guess else f"{self.usage}."
        message = f"{_capital(self.owner)} cannot be called like this: {mistake}."
        return PayloadError(message, parameter=parameter, fix=fix)

    def _unsendable(self, guilty: object, misfit: Misfit) -> PayloadError:
        path = misfit.path.lstrip(".")
        parameter = _first_name(path)
        value = f" = {shown(guilty)}" if parameter else ""
        place = f" (at {path})" if path != parameter else ""
        subject = f"Argument {parameter!r}{value}" if parameter else "The arguments"
        message = f"{subject} of {self.owner} {misfit.predicate}{place}."
        fix = misfit.fix or self.usage
        return PayloadError(message, parameter=parameter or None, fix=f"{fix}.")

    def _unreadable(self, error: Misfit | TypeError) -> PayloadError:
        # The message omits the value, because the error is stored with the task and logged by the worker.
        reason, path = (error.reason, error.path) if isinstance(error, Misfit) else (str(error), "")
        named = re.match(r"(\w+)", path) or _REPEATED.match(reason) or _FIELD.search(reason)
        place = f" (at {path})" if path else ""
        message = f"The stored arguments of {self.owner} do not fit its signature: {reason}{place}."
        fix = f"keep the signature compatible while tasks wait; it is now {self._name}{self.signature}."
        return PayloadError(message, parameter=named[1] if named else None, fix=fix)


def encode_any(arguments: Mapping[str, Any], /, *, task_name: str, largest: int = LARGEST_BYTES) -> bytes:
    """Return named arguments as JSON, for a task whose function is not registered in this process.

    The worker checks the arguments against the signature, so a UUID can be sent as a UUID or a string. Raises PayloadError if
    JSON cannot represent an argument.
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
        message = f"{subject} of task {task_name!r} {misfit.predicate}{place}."
        raise PayloadError(message, parameter=name, fix=fix) from None


def _first_name(path: str) -> str:
    return re.match(r"\w*", path.lstrip("."))[0]  # type: ignore[index]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


class TaskDefinition(Struct, frozen=True, kw_only=True):
    """One registered task function. `where` is the `file:line` of its definition."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    codec: CallCodec
    options: TaskOptions
    where: str

    @property
    def run_in(self) -> RunIn:
        """Return where the function runs. By default, `async def` functions run on the event loop, and `def` functions in a thread."""
        return self.options.run_in or ("async" if self.is_async else "thread")
