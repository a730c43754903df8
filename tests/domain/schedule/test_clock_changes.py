"""Ticks over clock changes: against sequences worked out by hand, and against an enumeration of minutes in all zones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from itertools import islice, takewhile
from random import Random
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everbeat.domain.schedule.cron import END, moment_of, zone_of
from everbeat.domain.schedule.model import Timing
from everbeat.domain.schedule.timing import latest_ticks, ticks_after
from tests.architecture.source_tree import ROOT
from tests.domain.schedule.clock_changes import SEQUENCES

MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
ZONES = sorted(name for name in available_timezones() if name not in ("localtime", "Factory"))
TABLE = [(zone, *row) for zone, rows in SEQUENCES.items() for row in rows]


def local_moment(text: str) -> datetime:
    """Return the UTC moment of "03-29 03:00 +2", which is in 2026."""
    day, time, offset = text.split()
    zone = timezone(timedelta(hours=float(offset)))
    return datetime.strptime(f"2026-{day} {time}", "%Y-%m-%d %H:%M").replace(tzinfo=zone).astimezone(UTC)


@pytest.mark.parametrize(("zone", "text", "after", "expected"), TABLE)
def test_ticks_over_a_clock_change_are_those_worked_out_by_hand(
    zone: str, text: str, after: str, expected: str
) -> None:  # S2
    wanted = [local_moment(each) for each in expected.split(", ")]
    timing, start = Timing(cron=(text,), timezone=zone), local_moment(after)
    assert [*islice(ticks_after(timing, start), len(wanted))] == wanted
    assert latest_ticks(timing, after=start, until=wanted[-1], most=100).ticks == tuple(wanted)
    rest = latest_ticks(timing, after=start, until=wanted[-1], most=0)
    assert (rest.first_older, rest.last_older, rest.older) == (wanted[0], wanted[-1], len(wanted))


@pytest.mark.parametrize("zone", SEQUENCES)
def test_at_least_twenty_sequences_of_each_zone_are_checked(zone: str) -> None:  # S2
    assert len(SEQUENCES[zone]) >= 20
    assert len({(text, after) for text, after, _ in SEQUENCES[zone]}) == len(SEQUENCES[zone])


def documented() -> Iterator[tuple[str, int, str]]:
    """Yield the rows of the table in the documentation for each clock change: the expression, the month, and the ticks."""
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8").split("### Clock changes")[1]
    for row in re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", page.split("\n#")[0], re.MULTILINE):
        yield row[0], 3, row[1]
        yield row[0], 10, row[2]


@pytest.mark.parametrize(("text", "month", "expected"), [*documented()])
def test_the_table_of_the_documentation_says_when_expressions_tick_in_berlin(
    text: str, month: int, expected: str
) -> None:  # S2
    berlin = ZoneInfo("Europe/Berlin")
    day = 29 if month == 3 else 25
    start, end = (
        datetime(2026, month, day, *time, tzinfo=berlin).astimezone(UTC) for time in ((1, 29), (3, 59))
    )
    timing = Timing(cron=(text,), timezone="Europe/Berlin")
    found = [
        tick.astimezone(berlin) for tick in takewhile(lambda tick: tick < end, ticks_after(timing, start))
    ]
    assert [f"{tick:%H:%M}{tick:%z}"[:-2] + ":00" for tick in found] == expected.strip().split(", ")


def test_the_documentation_has_a_table_of_clock_changes() -> None:  # S2
    assert len([*documented()]) >= 12


def enumerated(
    minutes: set[int], hours: set[int], zone: ZoneInfo, start: datetime, end: datetime, *, is_fixed: bool
) -> Iterator[datetime]:
    """Yield the ticks from `start` to before `end`, minute by minute.

    A fixed time ticks at the first moment at which a clock on the wall shows that time or a later one. An interval ticks at each moment at
    which the clock shows a matching time.
    """
    shown = start - 3 * DAY  # of UTC: the highest local time that was shown, as a naive datetime
    highest = shown.astimezone(zone).replace(tzinfo=None)
    while shown < end:
        local = shown.astimezone(zone).replace(tzinfo=None)
        if is_fixed:
            passed = [highest + number * MINUTE for number in range(1, (local - highest) // MINUTE + 1)]
            is_tick = any(each.minute in minutes and each.hour in hours for each in passed)
            highest = max(highest, local)
        else:
            is_tick = local.minute in minutes and local.hour in hours
        if is_tick and shown >= start:
            yield shown
        shown += MINUTE


def changes_of(zone: ZoneInfo, year: int) -> list[datetime]:
    """Return the days of a year at whose end a zone's offset is different."""
    days = [datetime(year, 1, 1, tzinfo=UTC) + number * DAY for number in range(365)]
    return [
        day for day in days if day.astimezone(zone).utcoffset() != (day + DAY).astimezone(zone).utcoffset()
    ]


def field(values: set[int], *, highest: int, star: bool) -> str:
    """Return the field of an expression. With `star`, it begins with a star, and the values must be multiples of a step."""
    if not star:
        return ",".join(map(str, sorted(values)))
    steps = [step for step in range(1, highest + 2) if set(range(0, highest + 1, step)) == values]
    return f"*/{steps[0]}"


def check_expression(zone_name: str, day: datetime, *, minutes: set[int], hours: set[int], star: str) -> None:
    """Compare the ticks of three days with the enumeration."""
    text = " ".join(
        (
            field(minutes, highest=59, star=star == "minute"),
            field(hours, highest=23, star=star == "hour"),
            "* * *",
        )
    )
    start, end = day - DAY, day + 2 * DAY
    timing = Timing(cron=(text,), timezone=zone_name)
    expected = [*enumerated(minutes, hours, ZoneInfo(zone_name), start, end, is_fixed=star == "none")]
    after = start - timedelta(microseconds=1)
    found = [*takewhile(lambda tick: tick < end, ticks_after(timing, after))]
    assert found == expected, f"{text} in {zone_name}"
    until = end - timedelta(microseconds=1)
    rest = latest_ticks(timing, after=after, until=until, most=0)
    assert (rest.first_older, rest.older) == (expected[0] if expected else None, len(expected)), (
        f"{text} in {zone_name}"
    )
    latest = latest_ticks(timing, after=after, until=until, most=5)
    assert latest.ticks == tuple(expected[-5:])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_ticks_equal_an_enumeration_of_minutes_around_any_clock_change(data: st.DataObject) -> None:  # S2
    zone = data.draw(st.sampled_from(ZONES))
    year = data.draw(st.integers(1980, 2037))
    days = changes_of(ZoneInfo(zone), year) or [datetime(year, 6, 1, tzinfo=UTC)]
    day = data.draw(st.sampled_from(days))
    star = data.draw(st.sampled_from(["none", "minute", "hour"]))
    step = data.draw(st.integers(1, 30))
    some_minutes = st.sets(st.integers(0, 59), min_size=1, max_size=6)
    some_hours = st.sets(st.integers(0, 4) | st.integers(22, 23) | st.integers(0, 23), min_size=1, max_size=6)
    minutes = set(range(0, 60, step)) if star == "minute" else data.draw(some_minutes)
    hours = set(range(0, 24, min(step, 12))) if star == "hour" else data.draw(some_hours)
    check_expression(zone, day, minutes=minutes, hours=hours, star=star)


def check_year(year: int, random: Random) -> int:
    """Compare an expression of each kind with the enumeration, at each clock change of a year. Return the number of changes."""
    seen = set()
    for name in ZONES:
        zone = ZoneInfo(name)
        for day in changes_of(zone, year):
            change = (day, day.astimezone(zone).utcoffset(), (day + DAY).astimezone(zone).utcoffset())
            if (
                change in seen
            ):  # in zones that change at the same moment by the same offsets, the ticks are the same
                continue
            seen.add(change)
            some = {random.randrange(60) for _ in range(3)}
            check_expression(name, day, minutes=some, hours={0, 1, 2, 3, 23}, star="none")
            check_expression(name, day, minutes=set(range(0, 60, 15)), hours={0, 1, 2, 3, 23}, star="minute")
            check_expression(name, day, minutes=some, hours=set(range(0, 24, 2)), star="hour")
    return len(seen)


@pytest.mark.long
def test_ticks_equal_the_enumeration_at_the_clock_changes_of_all_zones_in_2026() -> None:  # S2
    assert check_year(2026, Random(2026)) >= 30


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_ticks_equal_the_enumeration_at_all_clock_changes_from_1980_to_2037() -> None:  # S2
    random = Random(1980)
    assert min(check_year(year, random) for year in range(1980, 2038)) >= 20


def test_a_zone_that_skips_a_day_sends_the_day_s_ticks_when_the_next_day_begins() -> None:  # S2
    timing = Timing(cron=("0 8,20 * * *",), timezone="Pacific/Apia")  # 30 December 2011 did not exist there
    zone = ZoneInfo("Pacific/Apia")
    ticks = [
        each.astimezone(zone)
        for each in islice(ticks_after(timing, datetime(2011, 12, 29, 12, tzinfo=UTC)), 5)
    ]
    assert [f"{each:%d %H:%M}" for each in ticks] == [
        "29 08:00",
        "29 20:00",
        "31 00:00",
        "31 08:00",
        "31 20:00",
    ]


def test_the_ticks_of_a_zone_end_before_the_arithmetic_of_datetime_does() -> None:  # S2
    late = moment_of(END) - 2 * DAY
    timing = Timing(cron=("0 12 * * *",), timezone="Pacific/Kiritimati")
    assert all(tick < moment_of(END) for tick in ticks_after(timing, late))
    assert len([*ticks_after(timing, late)]) == 2


@pytest.mark.parametrize(
    "name",
    ["localtime", "posixrules", "right/UTC", "posix/UTC", "Europe", "../UTC", "", "a\x00", "Mars/Base"],
)
def test_a_name_that_is_not_a_zone_is_unknown(name: str) -> None:  # S2
    with pytest.raises(KeyError):
        zone_of(name)
