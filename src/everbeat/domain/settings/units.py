"""Durations, times and sizes as users write them: "30s", 1.5, timedelta(minutes=5), an aware datetime, "512MB"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias

from msgspec.structs import replace

from everbeat.domain.settings.checks import as_number, require_between, whole
from everbeat.domain.settings.settings import FieldCheck, make_or_gather, refused
from everbeat.domain.typed_json import LARGEST_BYTES
from everbeat.errors import ConfigurationError

Duration: TypeAlias = str | float | timedelta
When: TypeAlias = datetime | timedelta
Until: TypeAlias = datetime | Duration
WholeUnit: TypeAlias = Literal["milliseconds", "hours"]

LONGEST_S = 36_500 * 86_400.0
"""One hundred years in seconds. A longer duration must have the wrong unit."""

NEVER = "never"

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_SECONDS_IN: Final[Mapping[WholeUnit, float]] = {"milliseconds": 0.001, "hours": 3_600.0}
_PART = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|h|d)"
_WHOLE = re.compile(rf"(?:{_PART}\s*)+")
_PARTS = re.compile(_PART)
_WORDED = re.compile(
    r"([0-9]+(?:\.[0-9]+)?)\s*(msecs?|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?)?\.?",
    re.IGNORECASE,
)
_DURATION_SHELL_FORMS = 'write "250ms", "30s", "5m", "1.5h", "2d" or "1h30m"'
_LATER = "datetime.now(timezone.utc) + timedelta(...)"
_EARLIER = "datetime.now(timezone.utc) - timedelta(...)"
_DELAYS = "pass timedelta(seconds=30), for example, or timedelta(0) for at once"
_DURATION_FORMS = f"{_DURATION_SHELL_FORMS}, a number of seconds, or a timedelta"


def to_seconds(value: object, *, subject: str) -> float:
    """Return a duration in seconds, at least 0. Raises ConfigurationError if the value is not a duration."""
    match value:
        case bool():
            raise _wrong_type(value, subject)
        case timedelta():
            seconds = value.total_seconds()
        case int() | float():
            seconds = float(max(min(value, LONGEST_S * 2), -1.0))  # clamped: a huge int does not fit a float
        case str():
            seconds = _read(value, subject)
        case _:
            raise _wrong_type(value, subject)
    if math.isnan(seconds):
        raise _refused(value, subject, "is not a number, so it cannot be a duration")
    if seconds < 0:
        raise _refused(value, subject, "a duration must not be negative")
    if seconds > LONGEST_S:
        raise _refused(value, subject, "a duration must not exceed 100 years; numbers are seconds")
    return seconds


def shown_moment(moment: datetime) -> str:
    """Format a time for people: in the local time zone of this process, to the millisecond."""
    return moment.astimezone().isoformat(sep=" ", timespec="milliseconds")


def to_milliseconds(value: object, *, subject: str) -> int:
    """Return a duration in whole milliseconds, rounded up. Raises ConfigurationError if the value is not a duration."""
    return milliseconds(to_seconds(value, subject=subject))


def milliseconds(seconds: float) -> int:
    """Convert seconds to whole milliseconds, rounded up after removing floating-point noise."""
    return math.ceil(round(seconds * 1_000, 6))


def spelled_duration(seconds: float) -> str:
    """Return seconds as text that `to_seconds` can read: 90 is "90s", 3600 is "1h", 0.25 is "250ms"."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _DURATION_UNITS[unit] == 0:
            return f"{seconds / _DURATION_UNITS[unit]:.0f}{unit}"
    return f"{seconds * 1_000:.15g}ms" if 0 < seconds < 1 else f"{seconds:.15g}s"


def respelled(value: object) -> object:
    """Return a number of seconds as people write it, for messages, and any other value unchanged."""
    return spelled_duration(value) if isinstance(value, float) else value


def whole_time(lowest: int, highest: int, *, unit: WholeUnit) -> FieldCheck:
    """Return a check that accepts a whole number of a unit. If a duration has another form, the fix proposes the number."""

    def read(value: object) -> tuple[int, str] | None:
        if (found := as_number(value)) is not None:
            return found
        if not isinstance(value, str | timedelta):
            return None
        try:
            seconds = to_seconds(value, subject=unit)
        except ConfigurationError:
            return None
        exact = round(seconds / _SECONDS_IN[unit], 6)
        rounded = "" if exact.is_integer() else ", rounded up"
        return math.ceil(exact), f" ({spelled_duration(seconds)} in {unit}{rounded})"

    return whole(lowest, highest, read=read)


def span(lowest_s: float, highest_s: float) -> FieldCheck:
    """Return a check that accepts durations between two inclusive bounds. The normal form is seconds."""

    def check(value: object, /, *, subject: str) -> float:
        seconds = to_seconds(value, subject=subject)
        require_between(value, seconds, lowest_s, highest_s, subject=subject, spell=spelled_duration)
        return seconds

    return check


def span_or_never(lowest_s: float, highest_s: float, *, never: str) -> FieldCheck:
    """Return a check that accepts durations between two bounds, or "never". The text `never` describes the effect of "never"."""
    limits = span(lowest_s, highest_s)

    def check(value: object, /, *, subject: str) -> float | str:
        if isinstance(value, str) and value == NEVER:
            return NEVER
        try:
            seconds: float = limits(value, subject=subject)
        except ConfigurationError as error:
            raise ConfigurationError(
                [replace(each, fix=f'{each.fix}, or "{NEVER}", which {never}') for each in error.problems]
            ) from None
        return seconds

    return check


def to_utc(value: object, *, subject: str, example: str = _LATER) -> datetime:
    """Return an aware datetime in UTC. Raises ConfigurationError if the datetime is naive, because its meaning would depend on the host.

    `example` is the expression that an error proposes.
    """
    if not isinstance(value, datetime):
        raise refused(
            value,
            subject=subject,
            code="WRONG_TYPE",
            rule=f"must be a datetime with a time zone, not {type(value).__name__}",
            fix=f"pass {example}, for example",
        )
    if value.utcoffset() is None:
        raise refused(
            value,
            subject=subject,
            code="NAIVE_DATETIME",
            rule="a datetime without a time zone means a different time on each host",
            fix=f"pass {example}, or value.astimezone() if it is local time",
        )
    # With a margin of a year at either end, no time zone can move the value out of the range of datetime.
    if not 2 <= value.year <= 9_998:
        rule = "is outside the years 2 to 9998"
        fix = "use a moment nearer to now, or None for no deadline"
        raise refused(value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)
    return value.astimezone(UTC)


def to_until(value: object, /, *, subject: str) -> When:
    """Return a moment in UTC, given as a datetime with a time zone, or a duration. Raises ConfigurationError for other values."""
    if isinstance(value, datetime):
        return to_utc(value, subject=subject)
    try:
        return timedelta(seconds=to_seconds(value, subject=subject))
    except ConfigurationError as error:
        fix = f"{error.problems[0].fix}, or a datetime with a time zone"
        raise ConfigurationError([replace(error.problems[0], fix=fix)]) from None


def to_future(until: When, *, now: datetime, subject: str) -> datetime:
    """Return the moment after `now` that a result of `to_until` means: a duration begins at `now`, which is the database's time.

    Raises ConfigurationError for moments that have passed.
    """
    moment = now + until if isinstance(until, timedelta) else until
    if moment <= now:
        rule, fix = (
            f"must be after now, which is {now.isoformat(timespec='seconds')}",
            'use "2h" for two hours from now, for example',
        )
        shown = until.isoformat() if isinstance(until, datetime) else spelled_duration(until.total_seconds())
        raise refused(shown, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)
    return moment


def to_when(value: object, *, subject: str) -> When:
    """Return a time in UTC, or a non-negative delay from the database's current time. Raises ConfigurationError for other values."""
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
                fix=f"pass timedelta(seconds={_delay_seconds(value)}), or {_LATER}",
            )


def to_past(value: object, *, subject: str) -> When:
    """Return a moment in UTC, or a non-negative duration before the database's current time. Raises ConfigurationError for other values."""
    if isinstance(value, datetime):
        return to_past_moment(value, subject=subject)
    if isinstance(value, timedelta) and timedelta() <= value <= timedelta(seconds=LONGEST_S):
        return value
    rule = f"must be a timedelta or a datetime with a time zone, not {type(value).__name__}"
    if isinstance(value, timedelta):
        rule = "must be a duration before now of 0 seconds to 100 years"
    raise refused(
        value,
        subject=subject,
        code="OUT_OF_RANGE" if isinstance(value, timedelta) else "WRONG_TYPE",
        rule=rule,
        fix=f"pass timedelta(seconds={_delay_seconds(value)}), or {_EARLIER}",
    )


def to_past_moment(value: object, *, subject: str) -> datetime:
    """Return an aware datetime in UTC, as `to_utc` does. The errors propose moments before now."""
    return to_utc(value, subject=subject, example=_EARLIER)


def _delay_seconds(value: object) -> str:
    """Return a delay's seconds as text if it was given as a duration, or "30" for any other value."""
    try:
        return f"{to_seconds(value, subject='delay'):.15g}"
    except ConfigurationError:
        return "30"


def _read(text: str, subject: str) -> float:
    if text.strip().startswith("-") and _WHOLE.fullmatch(text.strip().lstrip("-")):
        raise _refused(text, subject, "is negative: a duration is 0 or more")
    if not _WHOLE.fullmatch(text.strip()):
        fix = _fix_of_text(text)
        raise _refused(text, subject, "is not a duration: numbers need a unit of ms, s, m, h or d", fix=fix)
    parts = _PARTS.findall(text)
    sizes = [_DURATION_UNITS[unit] for _, unit in parts]
    if sizes != sorted(set(sizes), reverse=True):
        raise _refused(text, subject, "units must come once each, from the longest to the shortest")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)


def _fix_of_text(text: str) -> str:
    """Return a fix that proposes the likely duration for a number with a wrong unit, such as "5 minutes", or without a unit."""
    if (found := _WORDED.fullmatch(text.strip())) is None:
        return _DURATION_FORMS
    number, unit = found[1], (found[2] or "").lower()
    if not unit:
        return f'write "{number}s" for seconds, or another unit'
    return f'write "{number}{"ms" if unit[:2] in ("ms", "mi") and "min" not in unit else unit[0]}"'


def _refused(value: object, subject: str, rule: str, *, fix: str = _DURATION_FORMS) -> ConfigurationError:
    shell_fix = _DURATION_SHELL_FORMS if fix is _DURATION_FORMS else None
    return refused(value, subject=subject, code="DURATION_INVALID", rule=rule, fix=fix, shell_fix=shell_fix)


def _wrong_type(value: object, subject: str) -> ConfigurationError:
    rule = f"must be a duration, not {type(value).__name__}"
    return refused(
        value,
        subject=subject,
        code="WRONG_TYPE",
        rule=rule,
        fix=_DURATION_FORMS,
        shell_fix=_DURATION_SHELL_FORMS,
    )


_SIZE_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT])i?B", re.IGNORECASE)
_SIZE_SHELL_FORMS = 'write "512MB" or "1.5GB" (of 1,024 of the next smaller unit)'
_SIZE_FORMS = f"{_SIZE_SHELL_FORMS}, or a number of bytes"


def size(lowest: int, highest: int) -> FieldCheck:
    """Return a check that accepts sizes between two inclusive bounds in bytes. The normal form is bytes."""

    def check(value: object, /, *, subject: str) -> int:
        given = _bytes(value, subject, bounds=f"{spelled_size(lowest)} to {spelled_size(highest)}")
        require_between(value, given, lowest, highest, subject=subject, spell=spelled_size)
        return given

    return check


def spelled_size(count: int) -> str:
    """Return a number of bytes in the largest unit that needs no fraction: 536870912 is "512MB"."""
    for unit, size_ in reversed(_SIZE_UNITS.items()):
        if count and count % size_ == 0:
            return f"{count // size_}{unit}"
    return f"{count} bytes"


def _bytes(value: object, subject: str, *, bounds: str) -> int:
    match value:
        case bool():
            raise _wrong(value, subject, f"must be a size, not {type(value).__name__}")
        case int():
            return value
        case str() if form := _FORM.fullmatch(value.strip()):
            return int(float(form[1]) * _SIZE_UNITS[f"{form[2].upper()}B"])
        case str():
            rule = f"must be a size of {bounds}: a number and its unit, KB, MB, GB or TB"
            raise _wrong(value, subject, rule)
        case _:
            raise _wrong(value, subject, f"must be a size, not {type(value).__name__}")


def _wrong(value: object, subject: str, rule: str) -> ConfigurationError:
    return refused(
        value, subject=subject, code="SIZE_INVALID", rule=rule, fix=_SIZE_FORMS, shell_fix=_SIZE_SHELL_FORMS
    )


DEFAULT_LIMIT: Final = "32MB"
"""The default limit: 20 MB plus the JSON overhead. A worker holds several copies of a payload, so a small process has memory for only a few."""
LEAST_BYTES: Final = 1024 * 1024
"""The smallest allowed limit. Checkpoints, recorded steps, signals and error data are limited to this size, so they always fit."""


def payload_limit(value: str | int) -> int:
    """Return the payload limit in bytes. Raises ConfigurationError if the value is not a valid size."""
    checked: int = make_or_gather(
        lambda: size(LEAST_BYTES, LARGEST_BYTES)(value, subject="App.payload_limit"), otherwise=LARGEST_BYTES
    )
    return checked
