"""The signatures of task functions: their parameters, and whether each can be sent as JSON."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from everbeat.domain.task.context import Context
from everbeat.domain.task.outcome import wire_type
from everbeat.domain.task.steps import is_async_function as is_async_function
from everbeat.domain.task.steps import location_of as location_of
from everbeat.domain.task.steps import returned_type
from everbeat.domain.typed_json import refusal
from everbeat.errors import RegistrationError


class TaskSignature(Struct, frozen=True, kw_only=True):
    """The parameters of a task function, except a leading Context. Annotations are resolved, and each argument can be sent as JSON."""

    bindable: inspect.Signature
    annotations: Mapping[str, Any]
    returns: Any
    takes_context: bool

    @property
    def parameters(self) -> tuple[inspect.Parameter, ...]:
        """Return the parameters in order."""
        return tuple(self.bindable.parameters.values())

    @property
    def required(self) -> tuple[str, ...]:
        """Return the names of the parameters that every call must pass."""
        rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return tuple(
            each.name for each in self.parameters if each.default is each.empty and each.kind not in rest
        )


def read_signature(
    function: Callable[..., Any], *, owner: str, leading: type = Context, sends_result: bool = True
) -> TaskSignature:
    """Return the signature of a task function. Raises RegistrationError, which lists every parameter that cannot be sent as JSON.

    `owner` is the function's name in messages. A first parameter that is annotated as `leading` is not sent.
    """
    where = location_of(function)
    if not inspect.isroutine(function):
        reason = f"{owner} must be a function, not a {type(function).__name__}."
        raise RegistrationError(reason, fix="write `def` or `async def` around it.", where=where)
    unwrapped = inspect.unwrap(function)
    if inspect.isgeneratorfunction(unwrapped) or inspect.isasyncgenfunction(unwrapped):
        reason = f"{owner} is a generator function, which does not return a value."
        raise RegistrationError(reason, fix="return a list, or send one task for each item.", where=where)
    try:
        signature = inspect.signature(function)
    except ValueError:
        reason = f"{owner} has no signature that Python can read."
        raise RegistrationError(reason, fix="write `def` or `async def` around it.", where=where) from None
    hints = _hints(function, signature, owner=owner, where=where)
    parameters = [
        each.replace(annotation=hints.get(each.name, each.empty)) for each in signature.parameters.values()
    ]
    if parameters and _is_bound_later(parameters[0], function):
        reason = f"{owner} is a method, but a worker has no object to call it on."
        fix = "write a function at the top level of the module, or make it a @staticmethod."
        raise RegistrationError(reason, fix=fix, where=where)
    takes_context = bool(parameters) and _is_first(parameters[0], hints, leading)
    if takes_context:
        parameters = parameters[1:]
    read = TaskSignature(
        bindable=signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty),
        annotations={each.name: _annotation(each, hints.get(each.name, Any)) for each in parameters},
        returns=returned_type(hints.get("return", Any)) if sends_result else None,
        takes_context=takes_context,
    )
    _require_codable(read, owner=owner, where=where)
    return read


def _hints(
    function: Callable[..., Any], signature: inspect.Signature, *, owner: str, where: str | None
) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # noqa: BLE001 - evaluating annotations can raise anything
        subject = _unresolvable(function, signature)
        name = getattr(error, "name", None)
        if isinstance(error, NameError) and name is not None:
            reason = f"{subject} is annotated {name!r}, which module {function.__module__} does not know."
            fix = f"define or import {name} at module level, not inside a function or under TYPE_CHECKING."
        else:
            reason = f"{subject} has an annotation that cannot be read: {type(error).__name__}: {error}."
            fix = "correct the annotation."
        message = f"{owner}: {reason}"
        raise RegistrationError(message, fix=fix, where=where) from None


def _unresolvable(function: Callable[..., Any], signature: inspect.Signature) -> str:
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            typing.get_type_hints(alone, globalns=scope)
        except Exception:  # noqa: BLE001 - as in _hints
            return f"parameter {name!r}" if name in signature.parameters else "its result"
    return "a parameter"


def _is_bound_later(first: inspect.Parameter, function: Callable[..., Any]) -> bool:
    in_class = "." in getattr(function, "__qualname__", "").rpartition("<locals>.")[2]
    return in_class and first.name in ("self", "cls") and first.annotation is first.empty


def _is_first(first: inspect.Parameter, hints: Mapping[str, Any], leading: type) -> bool:
    positional = first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return positional and _means(leading, hints.get(first.name))


def _means(leading: type, annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return _means(leading, typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_means(leading, each) for each in typing.get_args(annotation))
    return annotation is leading


def _annotation(parameter: inspect.Parameter, hint: Any) -> Any:
    match parameter.kind:
        case inspect.Parameter.VAR_POSITIONAL:
            return list[hint]
        case inspect.Parameter.VAR_KEYWORD:
            unpacked = typing.get_origin(hint) is typing.Unpack
            return typing.get_args(hint)[0] if unpacked else dict[str, hint]
        case _:
            return hint


def _require_codable(read: TaskSignature, *, owner: str, where: str | None) -> None:
    found = [
        (f"parameter {name!r}", refused)
        for name, annotation in read.annotations.items()
        if (refused := _refusal(name, annotation)) is not None
    ]
    returned = refusal(wire_type(read.returns))
    if returned is not None:
        found.append(("its result", (returned.reason, returned.fix)))
    if found:
        reasons = "; ".join(f"{subject}: {reason}" for subject, (reason, _) in found)
        message = f"{owner} cannot be sent: {reasons}."
        raise RegistrationError(message, fix=f"{_unique(fix for _, (_, fix) in found)}.", where=where)


def _refusal(name: str, annotation: Any) -> tuple[str, str] | None:
    if name.startswith("__"):
        return "its name starts with two underscores, which Python mangles", "rename it"
    if _means(Context, annotation):
        return "Context is only passed as the first positional parameter", "make it the first parameter"
    found = refusal(wire_type(annotation))
    return None if found is None else (found.reason, found.fix)


def _unique(fixes: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(fixes))
