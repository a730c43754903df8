"""The ticks of a timing: cron expressions in a time zone, intervals, and single moments."""

from __future__ import annotations

import heapq
import zoneinfo
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime, timedelta
from itertools import groupby, islice
from typing import Any, Final, TypeVar

from msgspec import Struct

from everbeat.domain.schedule.cron import (
    END,
    UNIX_EPOCH,
    CronInvalid,
    check_expression,
    count_ticks,
    explained,
    moment_of,
    ticks_backward,
    ticks_forward,
    zone_of,
)
from everbeat.domain.schedule.model import Timing
from everbeat.domain.settings.checks import several
from everbeat.domain.settings.settings import FieldCheck, refused, shown
from everbeat.domain.settings.units import LONGEST_S, milliseconds, span, spelled_duration, to_utc
from everbeat.errors import ConfigurationError, Problem
from everbeat.errors.wording import amount, nearest

MOST_CRON_CHARACTERS: Final = 200
MOST_CRON_EXPRESSIONS: Final = 50
MOST_MOMENTS: Final = 1_000
SHORTEST_INTERVAL_S: Final = 1.0
ALIASES: Final[Mapping[str, str]] = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}

_MILLISECOND: Final = timedelta(milliseconds=1)
_SECOND: Final = timedelta(seconds=1)
_CRON_FIX: Final = "write five fields, such as '30 2 * * *', or six that begin with seconds"
T = TypeVar("T")


class LatestTicks(Struct, frozen=True, kw_only=True):
    """The latest ticks of a range, in order, and the facts about the earlier ones.

    `first_older` and `last_older` are None if there are no earlier ticks. `older` is their number, or None if it was not counted.
    """

    ticks: tuple[datetime, ...]
    first_older: datetime | None = None
    last_older: datetime | None = None
    older: int | None = 0


class ProblemList(list[Problem]):
    """The problems of several arguments, gathered so that one error lists all of them."""

    def add(self, *, code: str, subject: str, value: str, rule: str, fix: str) -> None:
        """Add one problem."""
        self.append(Problem(code=code, subject=subject, value=value, rule=rule, fix=fix))

    def settle(self, check: Callable[[], T], otherwise: T) -> T:
        """Return the result of `check`. If it raises ConfigurationError, gather its problems and return `otherwise`."""
        try:
            return check()
        except ConfigurationError as error:
            self.extend(error.problems)
            return otherwise

    def raise_if_any(self) -> None:
        """Raise ConfigurationError if there are problems."""
        if self:
            raise ConfigurationError(self)


def parse_timing(
    *, cron: object, every: object, offset: object, at: object, timezone: object, subject: str
) -> Timing:
    """Return the timing that the arguments of a schedule describe. None means that an argument was not given.

    `cron` is an expression or a list of expressions, and `at` a moment or a list. Raises ConfigurationError, which lists all problems.
    """
    problems = ProblemList()
    given = [name for name, value in (("cron", cron), ("every", every), ("at", at)) if value is not None]
    if len(given) != 1:
        problems.add(
            code="CONTRADICTION" if given else "MISSING",
            subject=subject,
            value=" and ".join(given) or "nothing",
            rule="a schedule needs exactly one of cron, every and at",
            fix=f"pass only {given[0]}" if given else "pass every='1h', for example",
        )
    expressions: tuple[str, ...] = ()
    moments: tuple[datetime, ...] = ()
    if cron is not None:
        expressions = problems.settle(lambda: _expressions(cron, f"{subject}.cron"), ())
    if at is not None:
        moments = problems.settle(lambda: _moments(at, f"{subject}.at"), ())
    every_ms = None
    if every is not None:
        check = span(SHORTEST_INTERVAL_S, LONGEST_S)
        every_ms = problems.settle(lambda: milliseconds(check(every, subject=f"{subject}.every")), None)
    offset_ms = 0
    if offset is not None:
        offset_ms = _offset_ms(offset, every, every_ms, f"{subject}.offset", problems)
    zone = "UTC"
    if timezone is not None:
        zone = problems.settle(lambda: _zone_name(timezone, subject=f"{subject}.timezone"), "UTC")
        if zone != "UTC" and cron is None:
            problems.add(
                code="CONTRADICTION",
                subject=f"{subject}.timezone",
                value=shown(zone),
                rule="applies only to cron: every counts in UTC, and the moments of at have their own zones",
                fix="omit timezone, or use cron",
            )
    problems.raise_if_any()
    return Timing(cron=expressions, every_ms=every_ms, offset_ms=offset_ms, at=moments, timezone=zone)


def ticks_after(timing: Timing, moment: datetime) -> Iterator[datetime]:
    """Yield the ticks after `moment`, in UTC and in order."""
    if timing.every_ms is not None:
        yield from _intervals_after(timing.every_ms, timing.offset_ms, moment)
    elif timing.at:
        yield from timing.at[bisect_right(timing.at, moment) :]
    else:
        yield from map(moment_of, _forward(timing, _seconds(moment) + 1, END))


def latest_ticks(timing: Timing, *, after: datetime, until: datetime, most: int) -> LatestTicks:
    """Return the `most` latest of the ticks after `after`, up to and including `until`, and facts about the earlier ones."""
    if until <= after:
        return LatestTicks(ticks=())
    if timing.every_ms is not None:
        return _latest_intervals(timing.every_ms, timing.offset_ms, after, until, most)
    if timing.at:
        found = timing.at[bisect_right(timing.at, after) : bisect_right(timing.at, until)]
        older = found[: max(len(found) - most, 0)]
        return _latest(found[len(older) :], older[:1], older[-1:], len(older))
    low, high = _seconds(after) + 1, _seconds(until) + 1
    backward = _backward(timing, low, high)
    ticks = [moment_of(each) for each in islice(backward, most)]
    last_older = next(backward, None)
    if last_older is None:
        return LatestTicks(ticks=tuple(reversed(ticks)))
    count = None
    if len(timing.cron) == 1:
        count = count_ticks(timing.cron[0], timing.timezone, low, last_older + 1)
    first_older = next(_forward(timing, low, high))
    return _latest(tuple(reversed(ticks)), (moment_of(first_older),), (moment_of(last_older),), count)


def zone_is_known(name: str) -> bool:
    """Return whether this machine has the data of a time zone."""
    try:
        zone_of(name)
    except KeyError:
        return False
    return True


def describe(timing: Timing) -> str:
    """Return the timing as text for people, such as "every 1h" or "30 2 * * * in Europe/Berlin"."""
    if timing.every_ms is not None:
        offset = f" plus {spelled_duration(timing.offset_ms / 1_000)}" if timing.offset_ms else ""
        return f"every {spelled_duration(timing.every_ms / 1_000)}{offset}"
    if timing.at:
        first = timing.at[0].isoformat(sep=" ", timespec="seconds")
        others = len(timing.at) - 1
        return f"at {first}" + (f" and {amount(others, 'other moment')}" if others else "")
    return f"{'; '.join(timing.cron)} in {timing.timezone}"


def in_words(timing: Timing) -> str:
    """Return the timing in plain English, such as "At 02:30 every day, in Europe/Berlin"."""
    if not timing.cron:
        text = describe(timing)
        return f"{text[0].upper()}{text[1:]}"
    first, *others = (explained(text) for text in timing.cron)
    return f"{'; '.join([first, *(each[0].lower() + each[1:] for each in others)])}, in {timing.timezone}"


def _latest(
    ticks: tuple[datetime, ...], first: Iterable[datetime], last: Iterable[datetime], older: int | None
) -> LatestTicks:
    return LatestTicks(
        ticks=ticks, first_older=next(iter(first), None), last_older=next(iter(last), None), older=older
    )


def _seconds(moment: datetime) -> int:
    """Return the whole seconds from the Unix epoch to the moment, rounded down."""
    return (moment - UNIX_EPOCH) // _SECOND


def _forward(timing: Timing, low: int, high: int) -> Iterator[int]:
    found = (ticks_forward(text, timing.timezone, low, high) for text in timing.cron)
    return (tick for tick, _ in groupby(heapq.merge(*found)))


def _backward(timing: Timing, low: int, high: int) -> Iterator[int]:
    found = (ticks_backward(text, timing.timezone, low, high) for text in timing.cron)
    return (tick for tick, _ in groupby(heapq.merge(*found, reverse=True)))


def _intervals_after(every_ms: int, offset_ms: int, moment: datetime) -> Iterator[datetime]:
    number = _number_after(every_ms, offset_ms, moment)
    while (tick_ms := number * every_ms + offset_ms) < END * 1_000:
        yield _moment_at(tick_ms)
        number += 1


def _latest_intervals(
    every_ms: int, offset_ms: int, after: datetime, until: datetime, most: int
) -> LatestTicks:
    first = _number_after(every_ms, offset_ms, after)
    end = _number_after(every_ms, offset_ms, until)
    start = max(first, end - most)
    ticks = tuple(_moment_at(number * every_ms + offset_ms) for number in range(start, end))
    if start <= first:
        return LatestTicks(ticks=ticks)
    first_older, last_older = (_moment_at(each * every_ms + offset_ms) for each in (first, start - 1))
    return LatestTicks(ticks=ticks, first_older=first_older, last_older=last_older, older=start - first)


def _number_after(every_ms: int, offset_ms: int, moment: datetime) -> int:
    """Return the number of the first interval that ends after the moment, counted from the Unix epoch."""
    return max(((moment - UNIX_EPOCH) // _MILLISECOND - offset_ms) // every_ms + 1, 0)


def _moment_at(unix_ms: int) -> datetime:
    return UNIX_EPOCH + timedelta(milliseconds=unix_ms)


def _expressions(given: object, subject: str) -> tuple[str, ...]:
    if not _is_collection(given):
        return (_expression(given, subject=subject),)
    found = _each(given, _expression, subject=subject, most=MOST_CRON_EXPRESSIONS)
    return tuple(dict.fromkeys(found))


def _expression(given: object, /, *, subject: str) -> str:
    """Return a checked cron expression in its stored form: with single spaces, and without aliases."""
    if not isinstance(given, str):
        rule = f"must be a cron expression, not {type(given).__name__}"
        raise refused(given, subject=subject, code="WRONG_TYPE", rule=rule, fix=_CRON_FIX)
    if len(given) > MOST_CRON_CHARACTERS:
        rule = f"has {len(given):,} characters, at most {MOST_CRON_CHARACTERS} are allowed"
        fix = "pass a list of shorter expressions"
        raise refused(given, subject=subject, code="CRON_INVALID", rule=rule, fix=fix)
    text = " ".join(given.split())
    if text.startswith("@"):
        if (expanded := ALIASES.get(text.lower())) is None:
            guess = nearest(text, ALIASES)
            fix = f"write {guess!r}" if guess else f"use one of {', '.join(ALIASES)}"
            rule = "is not an alias that everbeat knows"
            raise refused(given, subject=subject, code="CRON_INVALID", rule=rule, fix=fix)
        return expanded
    try:
        check_expression(text)
    except CronInvalid as error:
        rule = f"is not a usable cron expression ({error})"
        raise refused(given, subject=subject, code="CRON_INVALID", rule=rule, fix=_CRON_FIX) from None
    return text


def _moments(given: object, subject: str) -> tuple[datetime, ...]:
    if not _is_collection(given):
        return (_moment(given, subject=subject),)
    return tuple(sorted(set(_each(given, _moment, subject=subject, most=MOST_MOMENTS))))


def _moment(given: object, /, *, subject: str) -> datetime:
    """Return a checked moment in UTC. Fractions of a millisecond are dropped, because task ids contain only whole milliseconds."""
    moment = to_utc(given, subject=subject)
    if not UNIX_EPOCH <= moment < moment_of(END):
        rule, fix = "is outside the years 1970 to 9997", "pass a moment that is still to come"
        raise refused(given, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)
    return moment.replace(microsecond=moment.microsecond // 1_000 * 1_000)


def _is_collection(given: object) -> bool:
    return isinstance(given, Sequence | Set) and not isinstance(given, str | bytes)


def _each(given: object, check: FieldCheck, *, subject: str, most: int) -> list[Any]:
    items = several(given, subject=subject)
    if not 1 <= len(items) <= most:
        rule = f"must have 1 to {most:,} entries, not {len(items):,}"
        fix = "remove entries" if items else "add entries"
        raise refused(given, subject=subject, code="WRONG_COUNT", rule=rule, fix=fix)
    problems = ProblemList()
    found = [
        problems.settle(lambda at=at, item=item: check(item, subject=f"{subject}[{at}]"), None)  # type: ignore[misc]
        for at, item in enumerate(items)
    ]
    problems.raise_if_any()
    return found


def _offset_ms(
    given: object, every: object, every_ms: int | None, subject: str, problems: ProblemList
) -> int:
    if every is None:
        rule, fix = "applies only to every", "omit offset, or pass every instead of cron and at"
        problems.add(code="CONTRADICTION", subject=subject, value=shown(given), rule=rule, fix=fix)
        return 0
    check = span(0, LONGEST_S)
    offset_ms = problems.settle(lambda: milliseconds(check(given, subject=subject)), 0)
    if every_ms is not None and offset_ms >= every_ms:
        rule = f"must be shorter than every, which is {spelled_duration(every_ms / 1_000)}"
        problems.add(
            code="OUT_OF_RANGE", subject=subject, value=shown(given), rule=rule, fix="use a shorter offset"
        )
    return offset_ms


def _zone_name(given: object, /, *, subject: str) -> str:
    if not isinstance(given, str):
        name = getattr(given, "key", None)  # of a ZoneInfo
        rule = f"must be the name of a time zone, not {type(given).__name__}"
        fix = f"write {name!r}" if isinstance(name, str) else "write 'Europe/Berlin', for example"
        raise refused(given, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)
    if zone_is_known(given):
        return given
    known = zoneinfo.available_timezones()
    guess = nearest(given, known)
    if not known:
        fix = "install the Python package tzdata, because this machine has no time zone data"
    else:
        fix = f"write {guess!r}" if guess else "write 'Europe/Berlin', for example"
    rule = "is not a time zone that this machine knows"
    raise refused(given, subject=subject, code="TIMEZONE_UNKNOWN", rule=rule, fix=fix)
