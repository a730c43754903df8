"""Retry policies: which failures are retried, and after what delay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, cast

from everbeat.domain.settings.checks import each as each_of
from everbeat.domain.settings.checks import error_code, one_of, optional, sequence_of, several, whole
from everbeat.domain.settings.settings import Settings, by, checked, refused, shown
from everbeat.domain.settings.units import Duration, span, spelled_duration
from everbeat.errors import Problem

BackoffStrategy = Literal["fixed", "exponential"]

MOST_RETRIES: Final = 20
SHORTEST_INTERVAL_S: Final = 1.0
LONGEST_INTERVAL_S: Final = 86_400.0
LONGEST_DELAY_S: Final = 365 * 86_400.0

_CLASS_NAME = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z]\w*")
_interval = span(SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S)


def _jitter(value: object, /, *, subject: str) -> float:
    match value:
        case bool():
            return 0.25 if value else 0.0
        case int() | float() if 0 <= value <= 1:
            return float(value)
        case int() | float():
            rule = "must be a fraction from 0 to 1, or True (0.25) or False (0)"
            raise refused(
                value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix="use 0.1 for up to 10 % more"
            )
        case _:
            rule = f"must be a fraction from 0 to 1, or True or False, not {type(value).__name__}"
            raise refused(
                value, subject=subject, code="WRONG_TYPE", rule=rule, fix="use 0.1 for up to 10 % more"
            )


def _reason(value: object, /, *, subject: str) -> str | type[BaseException]:
    """Return a validated entry of `auto_retry_for`, which is an error code or an exception class."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return value
    if not isinstance(value, str):
        rule = "must be an error code or an exception class"
        raise refused(
            value, subject=subject, code="WRONG_TYPE", rule=rule, fix="pass 'SMTP_DOWN' or TimeoutError"
        )
    if _CLASS_NAME.fullmatch(value):
        rule = "looks like the name of a class; text matches error codes only, classes match by isinstance"
        fix = f"pass the class itself ({value}, without quotes), or a code in capitals"
        raise refused(value, subject=subject, code="CLASS_AS_NAME", rule=rule, fix=fix)
    code: str = error_code(value, subject=subject)
    return code


def _reasons(value: object, /, *, subject: str) -> tuple[str | type[BaseException], ...]:
    return each_of(several(value, subject=subject), _reason, subject=subject)


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy(Settings):
    """A policy that determines which failures are retried, how often, and after what delay.

    `auto_retry_for` lists error codes and exception classes. Durations are numbers of seconds, timedeltas or strings such as "90s".
    Each interval is between 1 s and 1 day. `fixed` backoff takes one interval for all retries, or one interval per retry.
    `exponential` backoff takes one interval and doubles it for each retry. `jitter` lengthens each delay by up to this fraction;
    True means 0.25. `max_delay` (at most one year) limits the delay, including jitter. Raises ConfigurationError, which lists all
    problems, if a setting is invalid.

        RetryPolicy(max_retries=5, intervals=["10s"], auto_retry_for=["SMTP_DOWN", TimeoutError])
    """

    max_retries: int = field(default=3, metadata=by(whole(1, MOST_RETRIES)))
    backoff_strategy: BackoffStrategy = field(default="fixed", metadata=by(one_of("fixed", "exponential")))
    intervals: Sequence[Duration] = field(
        default=(1.0,), metadata=by(sequence_of(_interval, shortest=1, longest=MOST_RETRIES))
    )
    jitter: float | bool = field(default=0.1, metadata=by(_jitter))
    max_delay: Duration | None = field(
        default=None, metadata=by(optional(span(SHORTEST_INTERVAL_S, LONGEST_DELAY_S), none="sets no limit"))
    )
    auto_retry_for: Sequence[str | type[BaseException]] = field(default=(), metadata=by(_reasons))

    @property
    def intervals_s(self) -> tuple[float, ...]:
        """Return the intervals in seconds."""
        return cast(tuple[float, ...], self.intervals)

    @property
    def max_delay_s(self) -> float | None:
        """Return the maximum delay in seconds, or None if there is no limit."""
        return cast(float | None, self.max_delay)

    def delay(self, retry_number: int, random: Random) -> float:
        """Return the delay in seconds between the failure and retry `retry_number`, which counts from 1."""
        return delay_seconds(
            retry_number,
            strategy=self.backoff_strategy,
            intervals=self.intervals_s,
            jitter=float(self.jitter),
            max_delay=self.max_delay_s,
            random=random,
        )

    def matches(self, code: str, exception: BaseException | None) -> bool:
        """Return whether the policy retries a failure with this code or this exception."""
        return not set(self.reasons).isdisjoint(reasons_of(code, exception))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the error codes and the full names of the exception classes that are retried."""
        return tuple(each if isinstance(each, str) else class_name(each) for each in self.auto_retry_for)

    def warnings(self) -> list[str]:
        """Return warnings about settings that are valid but probably mistakes."""
        if self.auto_retry_for:
            return []
        return ["RetryPolicy.auto_retry_for is empty: no error is ever retried by this policy."]

    def _contradictions(self) -> Iterator[Problem]:
        intervals: object = self.intervals
        retries: object = self.max_retries
        if not isinstance(intervals, tuple) or not all(isinstance(each, float) for each in intervals):
            return  # the intervals themselves are invalid, which has already been reported
        match self.backoff_strategy:
            case "exponential" if len(intervals) > 1:
                rule = "exponential backoff doubles one interval, so exactly one is needed"
                fix = f"use intervals=[{intervals[0]:g}], or backoff_strategy='fixed'"
                yield self._problem("intervals", rule, fix)
            case "fixed" if type(retries) is int and len(intervals) not in (0, 1, retries):
                count = len(intervals)
                rule = f"fixed backoff takes one interval, or one per retry (max_retries is {retries}), not {count}"
                fix = f"give {max(1, min(retries, MOST_RETRIES))} intervals, or set max_retries={count}"
                yield self._problem("intervals", rule, fix)
            case _:
                pass
        longest: object = self.max_delay
        if isinstance(longest, float) and SHORTEST_INTERVAL_S <= longest < min(intervals, default=0.0):
            shortest = spelled_duration(min(intervals))
            rule = f"is shorter than every interval (the shortest is {shortest}), so no interval would apply"
            yield self._problem("max_delay", rule, f"use {shortest} or more, or shorter intervals")

    def _problem(self, name: str, rule: str, fix: str) -> Problem:
        value = shown(getattr(self, name))
        return Problem(code="CONTRADICTION", subject=f"RetryPolicy.{name}", value=value, rule=rule, fix=fix)


def reasons_of(code: str, exception: BaseException | None) -> tuple[str, ...]:
    """Return the reasons under which a policy can list a failure: its code, and the full names of its class and base classes."""
    return code, *(class_name(each) for each in type(exception).__mro__[:-1] if exception is not None)


def class_name(kind: type) -> str:
    """Return the full name of a class. The name is stored and compared as text. It is never used to import the class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def delay_seconds(
    retry_number: int,
    *,
    strategy: BackoffStrategy,
    intervals: Sequence[float],
    jitter: float,
    max_delay: float | None,
    random: Random,
) -> float:
    """Return the delay in seconds before retry `retry_number`, which counts from 1.

    Jitter only lengthens the delay. An interval often comes from another system ("retry after 60 s"), so a retry must not
    come early. `max_delay` is applied last.
    """
    if retry_number < 1:
        raise ValueError(f"retry_number is {retry_number}, but retries count from 1")
    interval = intervals[min(retry_number, len(intervals)) - 1]  # retries by an operator can exceed the list
    base = interval * 2.0 ** (min(retry_number, 64) - 1) if strategy == "exponential" else interval
    spread = base * (1.0 + jitter * random.random())
    return min(spread, LONGEST_DELAY_S if max_delay is None else max_delay)
