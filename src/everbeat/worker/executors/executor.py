"""The interface of executors, and the code that calls a task function and turns its result into the end of an attempt."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final, Protocol

from msgspec import Struct

from everbeat.domain.task.context import ContextSource, entered
from everbeat.domain.task.context_backend import RESULT, is_suspension
from everbeat.domain.task.definition import TaskDefinition
from everbeat.domain.task.ending import Cancel, RetryLater, ending_of, terms_of
from everbeat.domain.task.middleware import AsyncSurrounded, Middleware, MiddlewareFailed, Surrounded
from everbeat.domain.task.needs import given_names
from everbeat.domain.task.outcome import error_from_exception, error_to_json, is_cut
from everbeat.domain.task.retry import reasons_of
from everbeat.domain.tracing.model import TracedAttempt
from everbeat.errors import (
    ARGUMENTS_INVALID,
    RESULT_UNSERIALISABLE,
    UNHANDLED_EXCEPTION,
    PayloadError,
    TaskError,
)
from everbeat.errors.wording import class_name, safe_text
from everbeat.runtime.blocking import strand
from everbeat.runtime.fork import UserCode
from everbeat.worker.attempt import (
    Attempt,
    AttemptEnd,
    CodeCancelled,
    CodeFailed,
    CodePostponed,
    CodeSuspended,
    Declined,
    Succeeded,
)
from everbeat.worker.context_backend import RequestingBackend
from everbeat.worker.traced_attempts import AttemptSpan

_NOTE_BYTES: Final = 500


class Executor(Protocol):
    """The interface of an executor, which runs the started attempts of one mode.

    In the loop's thread, an executor sends `AttemptEnded` once for each attempt, and `SlotFreed` whenever a slot might be free.
    """

    slots: int

    @property
    def free(self) -> int:
        """Return how many attempts can start right now."""
        ...

    @property
    def occupied(self) -> int:
        """Return the number of slots whose code is still running, including code whose attempt is already over."""
        ...

    @property
    def running(self) -> Collection[Attempt]:
        """Return the attempts in the occupied slots."""
        ...

    def prepare(self, wanted: int) -> None:
        """Prepare slots for `wanted` waiting attempts."""
        ...

    def begin(self, attempt: Attempt) -> None:
        """Run the code of an attempt whose start the database has acknowledged. Requires a free slot."""
        ...

    def stop(self, attempt: Attempt) -> None:
        """Stop the attempt's code for the reason in `attempt.stopped`. Stalled code gets no grace period."""
        ...

    def whereabouts(self, attempt: Attempt) -> str:
        """Return the stack of the attempt's code for the log. For code in a task process, return where the process writes its stack."""
        ...

    async def close(self) -> None:
        """Stop all running code within seconds."""
        ...


class PreparedCall(Struct, frozen=True):
    """A task function with its arguments, ready to be called."""

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.positional, **self.named)


class Invoker(Struct, frozen=True):
    """Calls task functions and determines how their attempts ended.

    `exception_codes` are the app's error codes for exceptions. A task's own codes take precedence. `run_coroutine` runs the coroutine
    of an async function in a thread without a running loop.
    """

    exception_codes: Mapping[type[BaseException], str]
    middleware: Middleware = Middleware()
    run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run

    def call(
        self, definition: TaskDefinition, args: str, context: ContextSource
    ) -> PreparedCall | CodeFailed | Declined:
        """Return the prepared call, or why the function cannot be called.

        The stored arguments are declined if their names do not fit the function. The attempt fails if a value is invalid.
        """
        try:
            positional, named = definition.codec.decode(args)
        except Exception as problem:  # noqa: BLE001 - the user's models validate themselves here, and may raise anything
            failed = self._failed(definition, problem, code=ARGUMENTS_INVALID)
            return _declined(definition, args, failed) or failed
        context.exception_codes = self._codes(definition)
        if definition.codec.takes_context:
            positional = (context.get(), *positional)
        call = PreparedCall(definition.function, positional, named)
        if not self.middleware.around_run:
            return call
        applied = self.middleware.applied_to(is_async=definition.is_async)
        surround = AsyncSurrounded if definition.is_async else Surrounded
        return PreparedCall(surround(applied, context.get(), call), (), {})

    def returned(self, definition: TaskDefinition, value: Any) -> AttemptEnd:
        """Return how the attempt ended after the function returned `value`. A value that cannot be stored is a failure."""
        if definition.options.ignore_result:
            return Succeeded(
                b"null"
            )  # a value that JSON cannot represent is not a failure, because it is not stored
        try:
            result = definition.codec.encode_result(value)
        except Exception as problem:  # noqa: BLE001 - as above
            return self._failed(definition, problem, code=RESULT_UNSERIALISABLE)
        return Succeeded(result)

    def raised(self, definition: TaskDefinition, exception: BaseException) -> CodeFailed:
        """Return how the attempt ended after the function raised an exception.

        A result given to `Context.commit` that cannot be stored gets the same error code as a returned result.
        """
        # Compare the exact class, because user classes may break isinstance.
        is_result = type(exception) is PayloadError and getattr(exception, "parameter", None) == RESULT
        return self._failed(definition, exception, code=RESULT_UNSERIALISABLE if is_result else None)

    def ended_by(self, definition: TaskDefinition, exception: BaseException) -> AttemptEnd:
        """Return how the attempt ended after the function raised an exception: suspended, postponed, cancelled or failed."""
        try:
            if is_suspension(exception):
                return CodeSuspended()
            if (ending := ending_of(exception)) is not None:
                return _chosen_by(ending)
        except BaseException as problem:  # noqa: BLE001 - a user's subclass of RetryLater or Cancel may break anything
            _note(exception, problem)
        return self.raised(definition, exception)

    def judged(self, definition: TaskDefinition, context: ContextSource, ended: AttemptEnd) -> AttemptEnd:
        """Return the final end of the attempt.

        If a step raised NonDeterministic, the attempt fails with that error, even if the code caught it and continued.
        """
        return ended if (misfit := context.misfit) is None else self.raised(definition, misfit)

    def run(
        self,
        definition: TaskDefinition,
        args: str,
        context: ContextSource,
        *,
        awaited: Callable[[PreparedCall, ContextSource], Coroutine[Any, Any, Any]] | None = None,
        traced: TracedAttempt | None = None,
        backend: RequestingBackend | None = None,
    ) -> AttemptEnd:
        """Run a task function until it finishes, blocking the thread, and return how the attempt ended.

        The function runs in its own copy of the context variables, so that no task sees the values that another task has set.
        `awaited` runs the coroutine of an async function. `traced` is what the tracers see, if there are any.
        `backend` gets the ids of the attempt's span.
        """
        run = contextvars.copy_context().run
        if (tracing := self.middleware.tracing) is not None and traced is not None:
            span = run(AttemptSpan, tracing, traced)
            if backend is not None:
                backend.trace_ids = span.ids
            ended = self.judged(
                definition, context, run(self._run, definition, args, context, awaited or _awaited)
            )
            run(span.close, ended, stopped=context.stop_reason())
            return ended
        return self.judged(
            definition, context, run(self._run, definition, args, context, awaited or _awaited)
        )

    def _run(
        self,
        definition: TaskDefinition,
        args: str,
        context: ContextSource,
        awaited: Callable[[PreparedCall, ContextSource], Coroutine[Any, Any, Any]],
    ) -> AttemptEnd:
        try:
            with entered(context):
                match self.call(definition, args, context):
                    case (CodeFailed() | Declined()) as refused:
                        return refused
                    case call if definition.is_async:
                        return self.returned(definition, self.run_coroutine(awaited(call, context)))
                    case call:
                        context.begin(strand())
                        with UserCode():
                            value = call()
                        return self.returned(definition, value)
        except BaseException as exception:  # noqa: BLE001 - any exception from user code ends its attempt, and nothing else
            return self.ended_by(definition, exception)

    def _codes(self, definition: TaskDefinition) -> Mapping[type[BaseException], str]:
        """Return the task's exception codes, followed by the app's. For a class in both, the task's code applies."""
        own = definition.options.exception_codes
        return {**own, **self.exception_codes, **own} if own else self.exception_codes

    def _failed(
        self, definition: TaskDefinition, exception: BaseException, *, code: str | None
    ) -> CodeFailed:
        logged: BaseException | None = None
        reasons: tuple[str, ...] = ()
        try:
            error = error_from_exception(exception, codes=self._codes(definition))
            if code is not None:
                error = TaskError(code, error.message, error.data, type=error.type, traceback=error.traceback)
            if type(exception) is MiddlewareFailed:
                # A policy can list the code, and also the class that the middleware raised or the code of that class.
                cause = error_from_exception(exception.cause, codes=self._codes(definition))
                error.type, reasons = cause.type, (error.code, *_reasons(cause.code, exception.cause))
            logged = None if is_cut(error) else exception
        except BaseException as problem:  # noqa: BLE001 - the exception's own class may break isinstance and more
            message = f"The error could not be read: {class_name(type(problem))}."
            error = TaskError(code or UNHANDLED_EXCEPTION, message, type=class_name(type(exception)))
        return CodeFailed(error_to_json(error), reasons or _reasons(error.code, exception), logged)


def _chosen_by(ending: RetryLater | Cancel) -> CodePostponed | CodeCancelled:
    terms = terms_of(ending)
    if isinstance(terms, TaskError):
        return CodeCancelled(error_to_json(terms))
    return CodePostponed(error_to_json(terms.error), terms.after_ms, terms.run_at, terms.counts)


def _note(exception: BaseException, problem: BaseException) -> None:
    """Note in the exception's traceback why it is a failure."""
    why = safe_text(problem, limit=_NOTE_BYTES).rstrip(".")
    note = f"This exception cannot decide how the attempt ends: {class_name(type(problem))}: {why}."
    with contextlib.suppress(BaseException):  # its class may break `add_note`
        BaseException.add_note(exception, f"{note} Fix: call super().__init__(...) in its class.")


def _reasons(code: str, exception: BaseException) -> tuple[str, ...]:
    try:
        return reasons_of(code, exception)
    except BaseException:  # noqa: BLE001 - its metaclass may break the names of classes
        return (code,)


def _declined(definition: TaskDefinition, args: str, failed: CodeFailed) -> Declined | None:
    """Return a decline if a different version of the code might accept the arguments that this code could not decode.

    Return None if the argument names fit this function or cannot be read.
    """
    given, accepts = given_names(args), definition.codec.accepts
    if given is None or accepts.fits(given):
        return None
    return Declined(failed, unknown=accepts.unknown(given), missing=accepts.missing(given))


async def _awaited(call: PreparedCall, context: ContextSource) -> Any:
    context.begin(strand())
    with UserCode():
        return await call()
