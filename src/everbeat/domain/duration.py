"""Lengths of time and moments as users write them: "30s", 1.5, timedelta(minutes=5), an aware datetime.

What lives here: reading them into seconds, milliseconds and UTC, and refusing what is ambiguous.
What may not: a clock. A moment relative to now stays a timedelta; the database knows what now is.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from everbeat.domain.settings import Check, refused
from everbeat.errors import ConfigurationError

Duration: TypeAlias = str | float | timedelta
When: TypeAlias = datetime | timedelta

LONGEST_S = 36_500 * 86_400.0
"""One hundred years: what is longer is a mistake in the unit."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_PART = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|h|d)"
_WHOLE = re.compile(rf"(?:{_PART}\s*)+")
_PARTS = re.compile(_PART)
_SHELL_FORMS = 'write "250ms", "30s", "5m", "1.5h", "2d" or "1h30m"'
_DELAYS = "pass timedelta(seconds=30), for example, or timedelta(0) for at once"
_FORMS = f"{_SHELL_FORMS}, a number of seconds, or a timedelta"


def to_seconds(value: object, *, subject: str) -> float:
    """A duration in seconds, 0 or more; raises ConfigurationError for what is no length of time."""
    match value:
        case bool():
            raise _wrong_type(value, subject)
        case timedelta():
            seconds = value.total_seconds()
        case int() | float():
            seconds = float(max(min(value, LONGEST_S * 2), -1.0))  # bounded first: a huge int has no float
        case str():
            seconds = _read(value, subject)
        case _:
            raise _wrong_type(value, subject)
    if math.isnan(seconds):
        raise _refused(value, subject, "is not a number, so it is no length of time")
    if seconds < 0:
        raise _refused(value, subject, "a length of time must not be negative")
    if seconds > LONGEST_S:
        raise _refused(value, subject, "a length of time must not exceed 100 years; numbers are seconds")
    return seconds


def to_milliseconds(value: object, *, subject: str) -> int:
    """A duration in whole milliseconds, rounded up so that it never becomes 0; errors as `to_seconds`."""
    return milliseconds(to_seconds(value, subject=subject))


def milliseconds(seconds: float) -> int:
    """Seconds as whole milliseconds, rounded up after the noise of binary fractions is removed."""
    return math.ceil(round(seconds * 1_000, 6))


def spelled(seconds: float) -> str:
    """Seconds in a form that `to_seconds` reads back: 90 is "90s", 3600 is "1h", 0.25 is "250ms"."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:.0f}{unit}"
    return f"{seconds * 1_000:.15g}ms" if 0 < seconds < 1 else f"{seconds:.15g}s"


def span(lowest_s: float, highest_s: float) -> Check:
    """The check of a duration between two bounds, both allowed; its normal form is seconds."""

    def check(value: object, /, *, subject: str) -> float:
        seconds = to_seconds(value, subject=subject)
        if lowest_s <= seconds <= highest_s:
            return seconds
        rule = f"must be {spelled(lowest_s)} to {spelled(highest_s)}"
        fix = (
            f"use {spelled(lowest_s)} or more" if seconds < lowest_s else f"use {spelled(highest_s)} or less"
        )
        raise refused(value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)

    return check


def to_utc(value: object, *, subject: str) -> datetime:
    """An aware datetime, in UTC; raises ConfigurationError for a naive one, which depends on the host."""
    if not isinstance(value, datetime):
        raise refused(
            value,
            subject=subject,
            code="WRONG_TYPE",
            rule=f"must be a datetime with a time zone, not {type(value).__name__}",
            fix="pass datetime.now(timezone.utc) + timedelta(...), for example",
        )
    if value.utcoffset() is None:
        raise refused(
            value,
            subject=subject,
            code="NAIVE_DATETIME",
            rule="a datetime without a time zone means another moment on each host",
            fix="pass datetime.now(timezone.utc) + timedelta(...), or value.astimezone() if it is local time",
        )
    # A year of margin at either end: no time zone in which it is read moves it out of what a datetime can hold.
    if not 2 <= value.year <= 9_998:
        rule = "lies outside the years 2 to 9998"
        fix = "use a moment nearer to now, or None where no deadline is meant"
        raise refused(value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)
    return value.astimezone(UTC)


def to_when(value: object, *, subject: str) -> When:
    """A moment in UTC, or a delay from the database's now, 0 or more; errors as `to_utc` and `to_seconds`."""
    match value:
        case timedelta() if value < timedelta():
            raise _refused(value, subject, "a delay must not be negative", fix=_DELAYS)
        case timedelta() if value.total_seconds() > LONGEST_S:
            raise _refused(value, subject, "a delay must not exceed 100 years", fix=_DELAYS)
        case timedelta():
            return value
        case datetime():
            return to_utc(value, subject=subject)
        case _:
            raise refused(
                value,
                subject=subject,
                code="WRONG_TYPE",
                rule=f"must be a timedelta or a datetime with a time zone, not {type(value).__name__}",
                fix="pass timedelta(seconds=30), or datetime.now(timezone.utc) + timedelta(...)",
            )


def _read(text: str, subject: str) -> float:
    if text.strip().startswith("-") and _WHOLE.fullmatch(text.strip().lstrip("-")):
        raise _refused(text, subject, "is negative: a duration is 0 or more")
    if not _WHOLE.fullmatch(text.strip()):
        raise _refused(text, subject, "is no duration: numbers need a unit of ms, s, m, h or d")
    parts = _PARTS.findall(text)
    sizes = [_UNITS[unit] for _, unit in parts]
    if sizes != sorted(set(sizes), reverse=True):
        raise _refused(text, subject, "units must come once each, from the longest to the shortest")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _refused(value: object, subject: str, rule: str, *, fix: str = _FORMS) -> ConfigurationError:
    shell_fix = _SHELL_FORMS if fix is _FORMS else None
    return refused(value, subject=subject, code="DURATION_INVALID", rule=rule, fix=fix, shell_fix=shell_fix)


def _wrong_type(value: object, subject: str) -> ConfigurationError:
    rule = f"must be a duration, not {type(value).__name__}"
    return refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=_FORMS, shell_fix=_SHELL_FORMS)
