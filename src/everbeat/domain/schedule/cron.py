"""The moments of a cron expression in a time zone, forward, backward and counted.

cronsim reads the expression and decides which days match. This module steps through time itself, because cronsim cannot count ticks.
Its step over a half-hour clock change can skip a tick. Its rules for clock changes differ between five and six fields.
All moments in this module are whole seconds since the Unix epoch. A *local* moment is such a number plus the zone's offset from UTC.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from msgspec import Struct

UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
END: Final = (datetime(9_998, 1, 1, tzinfo=UTC) - UNIX_EPOCH) // timedelta(seconds=1)
"""No tick is at or after this moment: further on, the arithmetic of `datetime` overflows."""

_DAY_S: Final = 86_400
_FIRST_ORDINAL: Final = date(1970, 1, 1).toordinal()
_BARREN_S: Final = 50 * 366 * _DAY_S
"""Fifty years. A search without a match in that time ends, because the rarest expressions match once in 40 years."""
_PERIOD_S: Final = 28 * 366 * _DAY_S
"""From 1970 to 2099, dates and weekdays repeat after 28 years."""
_UTC_NAMES: Final = frozenset({"UTC", "Etc/UTC"})
_OF_THE_MACHINE: Final = ("localtime", "posixrules", "posix/", "right/")
"""The names of files that are not zones start like this: the machine's zone, and copies of zones that count leap seconds."""


class CronInvalid(ValueError):
    """The text is not a cron expression, or no day matches it."""


class Expression:
    """A cron expression that was read: the matching days, and the matching times of a day."""

    __slots__ = ("_days", "_hours", "_minutes", "_months", "_seconds", "is_fixed")

    def __init__(self, text: str) -> None:
        try:
            read = CronSim(text, datetime(2000, 1, 1))  # noqa: DTZ001 - cronsim only reads the expression, so the moment is unused
        except (CronSimError, AssertionError, ValueError) as error:
            raise CronInvalid(str(error)) from error
        self._days = read.match_day
        self._months = read.months
        self._hours, self._minutes, self._seconds = (
            sorted(each) for each in (read.hours, read.minutes, read.seconds)
        )
        self.is_fixed = not read.parts[1].startswith("*") and not read.parts[2].startswith("*")
        """Whether the expression names times of day. Otherwise it describes an interval, because its minutes or hours start with `*`."""

    def matches(self, low: int, high: int) -> Iterator[int]:
        """Yield the local moments from `low` to before `high`, in order."""
        for start in self._matching_days(low, high):
            yield from (start + time for time in self._times(low - start, high - start))

    def matches_backward(self, low: int, high: int) -> Iterator[int]:
        """Yield the local moments from before `high` down to `low`, the latest first."""
        day = (high - 1) // _DAY_S
        while (day + 1) * _DAY_S > low:
            that = date.fromordinal(_FIRST_ORDINAL + day)
            if that.month not in self._months:
                day -= that.day
                continue
            if self._days(that):
                start = day * _DAY_S
                yield from (start + time for time in self._times_backward(low - start, high - start))
            day -= 1

    def count(self, low: int, high: int) -> int:
        """Return the number of local moments from `low` to before `high`."""
        if low >= high:
            return 0
        return sum(
            self._times_before(high - start) - self._times_before(low - start)
            for start in self._matching_days(low, high)
        )

    def _matching_days(self, low: int, high: int) -> Iterator[int]:
        """Yield the midnights of the matching days that overlap the range, in order."""
        day = low // _DAY_S
        while day * _DAY_S < high:
            that = date.fromordinal(_FIRST_ORDINAL + day)
            if that.month not in self._months:
                day += ((that.replace(day=1) + timedelta(days=32)).replace(day=1) - that).days
                continue
            if self._days(that):
                yield day * _DAY_S
            day += 1

    def _times(self, low: int, high: int) -> Iterator[int]:
        for hour in self._hours:
            if (hour + 1) * 3_600 <= low:
                continue
            for minute in self._minutes:
                start = hour * 3_600 + minute * 60
                if start + 60 <= low:
                    continue
                for second in self._seconds:
                    if start + second >= high:
                        return
                    if start + second >= low:
                        yield start + second

    def _times_backward(self, low: int, high: int) -> Iterator[int]:
        for hour in reversed(self._hours):
            if hour * 3_600 >= high:
                continue
            for minute in reversed(self._minutes):
                start = hour * 3_600 + minute * 60
                if start >= high:
                    continue
                for second in reversed(self._seconds):
                    if start + second < low:
                        return
                    if start + second < high:
                        yield start + second

    def _times_before(self, time: int) -> int:
        """Return the number of matching times of a day before `time`, in seconds since midnight."""
        if time <= 0:
            return 0
        in_minute, in_hour = len(self._seconds), len(self._minutes) * len(self._seconds)
        if time >= _DAY_S:
            return len(self._hours) * in_hour
        hour, minute, second = time // 3_600, time // 60 % 60, time % 60
        found = bisect_left(self._hours, hour) * in_hour
        if hour in self._hours:
            found += bisect_left(self._minutes, minute) * in_minute
            if minute in self._minutes:
                found += bisect_left(self._seconds, second)
        return found


@lru_cache(maxsize=1_024)
def expression(text: str) -> Expression:
    """Return the expression, read. Raises CronInvalid."""
    return Expression(text)


def check_expression(text: str) -> None:
    """Raise CronInvalid if the text is not a cron expression, or if no moment matches it."""
    if next(expression(text).matches(0, _PERIOD_S), None) is None:
        raise CronInvalid("it never matches")


@lru_cache(maxsize=1_024)
def explained(text: str) -> str:
    """Return a valid expression in plain English, such as "At 02:30 every day"."""
    return CronSim(text, datetime(2000, 1, 1)).explain()  # noqa: DTZ001 - cronsim only reads the expression, so the moment is unused


def zone_of(name: str) -> tzinfo:
    """Return a time zone. Raises KeyError if this machine does not know it."""
    if name in _UTC_NAMES:
        return UTC
    try:
        if name.startswith(_OF_THE_MACHINE):
            raise ValueError(name)
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # OSError: the name of a folder, such as "Europe"
        raise KeyError(name) from error


class _Stretch(Struct, frozen=True):
    """A part of a range in which a zone's offset does not change. It starts at `start` and ends before `end`.

    `changed_at` is the last clock change up to `start`, and `before` the offset until that change.
    """

    start: int
    end: int
    offset: int
    changed_at: int
    before: int

    def local_bounds(self, *, is_fixed: bool) -> tuple[int, int]:
        """Return the local moments that ticks of an expression can have here.

        If the clock was set back, the local hour before `changed_at` occurs again. Fixed times had their tick the first time.
        """
        start = self.start + self.offset
        if is_fixed:
            start = max(start, self.changed_at + self.before)
        return start, self.end + self.offset

    def moved_tick(self, read: Expression) -> int | None:
        """Return the tick for fixed times that a clock change skipped: the moment of the change. Return None if there is none."""
        if not read.is_fixed or self.start != self.changed_at or self.offset <= self.before:
            return None
        # A match at the very end of the gap is the same tick, and is found as an ordinary one.
        skipped = read.matches(self.changed_at + self.before, self.changed_at + self.offset)
        at_the_end = read.matches(self.start + self.offset, min(self.start + 1, self.end) + self.offset)
        is_moved = next(skipped, None) is not None and next(at_the_end, None) is None
        return self.changed_at if is_moved else None


def ticks_forward(text: str, zone: str, low: int, high: int = END) -> Iterator[int]:
    """Yield the ticks of an expression from `low` to before `high`, in order."""
    read, last = expression(text), low
    for stretch in _stretches(zone, low, high):
        if stretch.start - last > _BARREN_S:
            return
        if (moved := stretch.moved_tick(read)) is not None:
            last = moved
            yield moved
        for local in read.matches(*stretch.local_bounds(is_fixed=read.is_fixed)):
            last = local - stretch.offset
            yield last


def ticks_backward(text: str, zone: str, low: int, high: int) -> Iterator[int]:
    """Yield the ticks of an expression from before `high` down to `low`, the latest first."""
    read = expression(text)
    for stretch in reversed([*_stretches(zone, low, high)]):
        for local in read.matches_backward(*stretch.local_bounds(is_fixed=read.is_fixed)):
            yield local - stretch.offset
        if (moved := stretch.moved_tick(read)) is not None:
            yield moved


def count_ticks(text: str, zone: str, low: int, high: int) -> int:
    """Return the number of ticks of an expression from `low` to before `high`."""
    read = expression(text)
    return sum(
        read.count(*stretch.local_bounds(is_fixed=read.is_fixed)) + (stretch.moved_tick(read) is not None)
        for stretch in _stretches(zone, low, high)
    )


def _stretches(zone: str, low: int, high: int) -> Iterator[_Stretch]:
    """Yield the parts of the range from `low` to before `high` that have one offset each, in order. No part is longer than a year."""
    low, high = max(low, 0), min(high, END)
    if low >= high:
        return
    year = _year(low) - 1  # a clock change just before `low` still matters
    changed_at = start = _start_of(year)
    offset = before = _offset(zone_of(zone), changed_at)
    while start < high:
        for moment, after in _changes(zone, year):
            if moment > low:
                yield _Stretch(max(start, low), min(moment, high), offset, changed_at, before)
            changed_at = start = moment
            before, offset = offset, after
            if start >= high:
                return
        year += 1
        if (next_year := _start_of(year)) > low and next_year > start:
            yield _Stretch(max(start, low), min(next_year, high), offset, changed_at, before)
        start = max(start, next_year)


@lru_cache(maxsize=4_096)
def _changes(name: str, year: int) -> tuple[tuple[int, int], ...]:
    """Return the clock changes of a zone in a year of UTC: each moment, and the offset from then on."""
    zone = zone_of(name)
    if zone is UTC:
        return ()
    found = []
    start, end = _start_of(year), _start_of(year + 1)
    offset = _offset(zone, start)
    for day in range(start, end, _DAY_S):
        low, high = day, day + _DAY_S
        if (after := _offset(zone, high)) == offset:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _offset(zone, middle) == after else (middle, high)
        found.append((high, after))
        offset = after
    return tuple(found)


def _offset(zone: tzinfo, moment: int) -> int:
    """Return a zone's offset from UTC in seconds."""
    offset = moment_of(moment).astimezone(zone).utcoffset() or timedelta()
    return offset.days * _DAY_S + offset.seconds


def _year(moment: int) -> int:
    return moment_of(moment).year


def _start_of(year: int) -> int:
    return (date(year, 1, 1).toordinal() - _FIRST_ORDINAL) * _DAY_S


def moment_of(seconds: int) -> datetime:
    """Return the moment of a number of seconds since the Unix epoch, in UTC."""
    return UNIX_EPOCH + timedelta(seconds=seconds)
