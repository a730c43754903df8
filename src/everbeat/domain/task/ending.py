"""The exceptions that running code raises to decide how its attempt ends: RetryLater, RateLimited and Cancel."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from datetime import datetime
from typing import Any, ClassVar, Final, NamedTuple

from everbeat.domain.settings.checks import instance_of, public, switch
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import Duration, milliseconds, span, spelled_duration, to_utc
from everbeat.domain.task.retry import LONGEST_DELAY_S
from everbeat.errors import RATE_LIMITED, RETRY_LATER, RETRY_LATER_EXHAUSTED, TASK_CANCELLED, TaskError
from everbeat.errors.wording import class_name, safe_text

_MESSAGE_BYTES: Final = 8_192
_delay = span(0, LONGEST_DELAY_S)
_pause = span(0.001, LONGEST_DELAY_S)
_text = instance_of(str)


def _reason(value: str | None, subject: str) -> str | None:
    """Return the reason, or None if it is None or an empty text. Raises ConfigurationError if it is not a text."""
    return None if value is None else _text(value, subject=f"{subject}.reason") or None


def _limit(value: str) -> str:
    subject = "RateLimited.limit"
    if name := _text(value, subject=subject):
        return str(name)
    rule, fix = "must be the name of a limit of the task", "write RateLimited('stripe', ...), for example"
    raise refused(value, subject=subject, code="WRONG_NAME", rule=rule, fix=fix)


class Postponement(NamedTuple):
    """When a task runs again: at `run_at`, or after `after_ms` milliseconds. `counts`: the attempt costs one retry."""

    error: TaskError
    after_ms: int
    run_at: datetime | None
    counts: bool


class _Ending(Exception):
    """Base class of the exceptions that end an attempt without being a failure. `code` is the error code that the attempt stores."""

    code: ClassVar[str]
    reason: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The usual form calls the class with `args`, which loses the keyword arguments.
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self._shown() if value not in (None, False)]
        return f"{type(self).__name__}({', '.join(given)})"

    def _shown(self) -> Iterator[tuple[str, object]]:
        yield "reason", self.reason

    @property
    def error(self) -> TaskError:
        """Return the error to store with the attempt. The error has no traceback, because nothing failed."""
        message = safe_text(self, limit=_MESSAGE_BYTES)
        return TaskError(self.code, message, type=class_name(type(self)))


@public
class RetryLater(_Ending):
    """Raise this exception in a task to end the attempt and run the task again later.

    The task runs again `after` this time (a duration, counted by the database's clock from the end of the attempt), or `at` this
    timezone-aware datetime. By default, this costs no retry. The task fails with RETRY_LATER_EXHAUSTED after `max_retry_later` such
    attempts, or if its `good_until` passes first. `counts=True` costs one retry, as a failure does, and the task fails if none is left.
    The `reason` is stored with the attempt. Raises ConfigurationError if an argument is invalid.

        raise RetryLater(after="30s", reason="the mail server is busy")
    """

    code: ClassVar[str] = RETRY_LATER

    def __init__(
        self,
        after: Duration | None = None,
        *,
        at: datetime | None = None,
        counts: bool = False,
        reason: str | None = None,
    ) -> None:
        name = type(self).__name__
        if (after is None) == (at is None):
            raise refused(
                after,
                subject=f"{name}.after",
                code="WRONG_TYPE",
                rule="exactly one of after and at must be set",
                fix=f'write {name}(after="30s"), or {name}(at=datetime.now(timezone.utc) + timedelta(...))',
            )
        self.after_s: float | None = None if after is None else _delay(after, subject=f"{name}.after")
        self.at = None if at is None else to_utc(at, subject=f"{name}.at")
        self.counts = switch(counts, subject=f"{name}.counts")
        self.reason = _reason(reason, name)
        super().__init__(self.reason)

    def _shown(self) -> Iterator[tuple[str, object]]:
        after = None if self.after_s is None else spelled_duration(self.after_s)
        yield from (("after", after), ("at", self.at), ("counts", self.counts), ("reason", self.reason))

    def __str__(self) -> str:
        return "The code asked to run again later." if self.reason is None else str(self.reason)

    @property
    def after_ms(self) -> int:
        """Return the delay in milliseconds. If `at` is set, the delay is 0."""
        return 0 if self.after_s is None else milliseconds(self.after_s)

    def _postponement(self) -> Postponement:
        """Return when the task runs again. Raises if a subclass has not set the attributes of this class to valid values."""
        name, after_s, at = type(self).__name__, self.after_s, self.at
        if (after_s is None) == (at is None):
            raise ValueError(f"exactly one of {name}.after_s and {name}.at must be set")
        if after_s is not None:
            _delay(after_s, subject=f"{name}.after_s")
        return Postponement(
            error=self.error,
            after_ms=self.after_ms,
            run_at=None if at is None else to_utc(at, subject=f"{name}.at"),
            counts=switch(self.counts, subject=f"{name}.counts"),
        )


@public
class RateLimited(RetryLater):
    """Raise this exception in a task if another system refuses more calls, for example with the HTTP status 429.

    No task of the limit starts before the end of `retry_after`. If the limit has keys, this applies to tasks with the same key. The task
    runs again after that time, which costs no retry. It fails with RETRY_LATER_EXHAUSTED after `max_retry_later` such attempts, or if its
    `good_until` passes first. It fails with UNKNOWN_LIMIT if it does not have the limit. Raises ConfigurationError if an argument is
    invalid.

        raise RateLimited("stripe", retry_after="30s")
    """

    code: ClassVar[str] = RATE_LIMITED

    def __init__(self, limit: str, retry_after: Duration, *, reason: str | None = None) -> None:
        super().__init__(_pause(retry_after, subject="RateLimited.retry_after"), reason=reason)
        self.limit = _limit(limit)

    def _shown(self) -> Iterator[tuple[str, object]]:
        after = spelled_duration(self.after_s or 0.0)
        yield from (("limit", self.limit), ("retry_after", after), ("reason", self.reason))

    def __str__(self) -> str:
        why = "" if self.reason is None else f": {self.reason}"
        return f"The rate of limit {self.limit!r} is reached{why}"

    @property
    def error(self) -> TaskError:
        """Return the error to store with the attempt. Its data names the limit, whose gate the settlement closes."""
        plain = super().error
        return TaskError(plain.code, plain.message, {"limit": self.limit}, type=plain.type)


@public
class Cancel(_Ending):
    """Raise this exception in a task to end the task as CANCELLED, for the given reason. The task is never retried automatically.

    Tasks that this task has sent with `ctx.send`, and workflows that it has started with `ctx.start`, are cancelled too. Raises
    ConfigurationError if the reason is not a text.

        raise Cancel("the order was withdrawn")
    """

    code: ClassVar[str] = TASK_CANCELLED

    def __init__(self, reason: str | None = None) -> None:
        self.reason = _reason(reason, "Cancel")
        super().__init__(self.reason)

    def __str__(self) -> str:
        return "cancelled by its own code" if self.reason is None else str(self.reason)


for _each in (RetryLater, RateLimited, Cancel):
    _each.__module__ = "everbeat"  # the name by which users import the class, which is stored with attempts
del _each


def ending_of(exception: BaseException) -> RetryLater | Cancel | None:
    """Return the exception that decides how the attempt ends, or None if this exception is a failure.

    An exception group counts if it contains only such exceptions. A Cancel then takes precedence, followed by the first RetryLater.
    """
    found: list[RetryLater | Cancel] = []
    for each in _leaves(exception):
        # Checks the class itself, because a user's exception class might override `isinstance`.
        if not issubclass(type(each), _Ending):
            return None
        found.append(each)  # type: ignore[arg-type]
    return next((each for each in found if issubclass(type(each), Cancel)), found[0] if found else None)


def terms_of(ending: RetryLater | Cancel) -> Postponement | TaskError:
    """Return when the task runs again after this RetryLater, or the error to store after this Cancel.

    Raises any exception if the user's subclass is broken, for example because it does not call `super().__init__()`.
    """
    return ending.error if issubclass(type(ending), Cancel) else ending._postponement()  # type: ignore[union-attr]


def exhausted(error: TaskError, *, why: str) -> TaskError:
    """Return the error of a task that cannot run later. `why` is a sentence that precedes the message."""
    return TaskError(RETRY_LATER_EXHAUSTED, f"{why} {error.message}", error.data, type=error.type)


def _leaves(exception: BaseException) -> Iterator[BaseException]:
    if not issubclass(type(exception), BaseExceptionGroup):
        yield exception
        return
    for each in BaseExceptionGroup.exceptions.__get__(exception):
        yield from _leaves(each)
