"""Calling a task function and reading how it ended, alike on the loop, in a thread and in a task process.

What lives here: arguments from JSON, the call, the value or exception to JSON. What may not: what is done about it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from everbeat.domain.commit import RESULT
from everbeat.domain.context import Context
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.failure import error_from_exception, error_to_json, is_cut
from everbeat.domain.outcome import ARGUMENTS_INVALID, RESULT_UNSERIALISABLE, UNHANDLED_EXCEPTION, TaskError
from everbeat.domain.parameters import given_names
from everbeat.domain.retry import reasons_of
from everbeat.domain.stops import is_suspension
from everbeat.domain.stored_text import class_name
from everbeat.errors import PayloadError
from everbeat.runtime.fork import UserCode
from everbeat.worker.attempt import Declined, Ended, Failed, Succeeded, Suspended


class Call(Struct, frozen=True):
    """A task function with its arguments, ready to be called."""

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.positional, **self.named)


class Invoker(Struct, frozen=True):
    """Reads calls and their ends; `exception_codes` are the app's, asked after the task's own."""

    exception_codes: Mapping[type[BaseException], str]

    def call(self, definition: TaskDefinition, args: str, context: Context) -> Call | Failed | Declined:
        """Return the call. The stored arguments are declined if their names do not fit the function, and fail if a value does not."""
        try:
            positional, named = definition.codec.decode(args)
        except Exception as problem:  # noqa: BLE001 - models of the user validate themselves here, and may raise anything
            failed = self._failed(definition, problem, code=ARGUMENTS_INVALID)
            return _declined(definition, args, failed) or failed
        if definition.codec.takes_context:
            positional = (context, *positional)
        return Call(definition.function, positional, named)

    def returned(self, definition: TaskDefinition, value: Any) -> Ended:
        """What the function returned, or why that cannot be stored."""
        try:
            result = definition.codec.encode_result(value)
        except Exception as problem:  # noqa: BLE001 - as above
            return self._failed(definition, problem, code=RESULT_UNSERIALISABLE)
        return Succeeded(result)

    def raised(self, definition: TaskDefinition, exception: BaseException) -> Failed:
        """What the function raised; the result of a `Context.commit` that cannot be stored is told like one that it returned."""
        # The exact class: user classes may break isinstance.
        is_result = type(exception) is PayloadError and exception.parameter == RESULT
        return self._failed(definition, exception, code=RESULT_UNSERIALISABLE if is_result else None)

    def ended_by(self, definition: TaskDefinition, exception: BaseException) -> Ended:
        """What an exception out of the function means: a suspension, or a failure."""
        return Suspended() if is_suspension(exception) else self.raised(definition, exception)

    def run(self, definition: TaskDefinition, args: str, context: Context) -> Ended:
        """The whole of it, blocking; in a context of its own, so that nothing a task sets is left to the next."""
        return contextvars.copy_context().run(self._run, definition, args, context)

    def _run(self, definition: TaskDefinition, args: str, context: Context) -> Ended:
        try:
            with context.entered():
                match self.call(definition, args, context):
                    case (Failed() | Declined()) as refused:
                        return refused
                    case call if definition.is_async:
                        return self.returned(definition, asyncio.run(_awaited(call)))
                    case call:
                        with UserCode():
                            value = call()
                        return self.returned(definition, value)
        except BaseException as exception:  # noqa: BLE001 - whatever user code raises ends its attempt, and nothing else
            return self.ended_by(definition, exception)

    def _failed(self, definition: TaskDefinition, exception: BaseException, *, code: str | None) -> Failed:
        logged: BaseException | None = None
        try:
            codes = {**definition.options.exception_codes, **self.exception_codes}
            codes.update(definition.options.exception_codes)
            error = error_from_exception(exception, codes=codes)
            if code is not None:
                error = TaskError(code, error.message, error.data, type=error.type, traceback=error.traceback)
            logged = None if is_cut(error) else exception
        except BaseException as problem:  # noqa: BLE001 - the exception's own class may break isinstance and more
            message = f"The error could not be read: {class_name(type(problem))}."
            error = TaskError(code or UNHANDLED_EXCEPTION, message, type=class_name(type(exception)))
        return Failed(error_to_json(error), _reasons(error.code, exception), logged)


def _reasons(code: str, exception: BaseException) -> tuple[str, ...]:
    try:
        return reasons_of(code, exception)
    except BaseException:  # noqa: BLE001 - its metaclass may break the names of classes
        return (code,)


def _declined(definition: TaskDefinition, args: str, failed: Failed) -> Declined | None:
    """Return what other code might understand in arguments that could not be read; None if the names fit this function."""
    given, accepts = given_names(args), definition.codec.accepts
    if given is None or accepts.fits(given):
        return None
    return Declined(failed, unknown=accepts.unknown(given), missing=accepts.missing(given))


async def _awaited(call: Call) -> Any:
    with UserCode():
        return await call()
