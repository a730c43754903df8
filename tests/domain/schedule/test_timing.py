"""Timings: which arguments are accepted, which ticks they mean, and how the latest ticks of a range are found."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import Any

import pytest
from cronsim import CronSim, CronSimError
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everbeat.domain.schedule.model import Timing
from everbeat.domain.schedule.timing import (
    ALIASES,
    MOST_CRON_CHARACTERS,
    MOST_CRON_EXPRESSIONS,
    MOST_MOMENTS,
    describe,
    latest_ticks,
    parse_timing,
    ticks_after,
    zone_is_known,
)
from everbeat.errors import ConfigurationError

NOTHING: Mapping[str, Any] = dict.fromkeys(("cron", "every", "offset", "at", "timezone"))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


def timing_of(**given: Any) -> Timing:
    return parse_timing(**{**NOTHING, **given}, subject="Schedule")


def problems_of(**given: Any) -> list[tuple[str, str]]:
    """Return the subjects and codes of all problems."""
    with pytest.raises(ConfigurationError) as refusal:
        timing_of(**given)
    assert all(problem.fix and problem.rule for problem in refusal.value.problems)
    return [(problem.subject, problem.code) for problem in refusal.value.problems]


def fix_of(**given: Any) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        timing_of(**given)
    (problem,) = refusal.value.problems
    return problem.fix


def first(timing: Timing, after: datetime, number: int) -> list[datetime]:
    return [*islice(ticks_after(timing, after), number)]


def test_a_cron_expression_is_stored_with_single_spaces() -> None:
    assert timing_of(cron=" 30  2 * *\t1-5 ") == Timing(cron=("30 2 * * 1-5",))
    assert timing_of(cron=["0 1 * * *", "0 2 * * *", "0 1 * * *"]).cron == ("0 1 * * *", "0 2 * * *")
    assert timing_of(cron="0 12 * * *", timezone="Europe/Berlin").timezone == "Europe/Berlin"


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_stored_as_the_expression_it_stands_for(alias: str) -> None:
    assert timing_of(cron=alias).cron == timing_of(cron=alias.upper()).cron == (ALIASES[alias],)


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("@hourly", "2026-05-01 13:00"),
        ("@daily", "2026-05-02 00:00"),
        ("@weekly", "2026-05-03 00:00"),
        ("@monthly", "2026-06-01 00:00"),
        ("@yearly", "2027-01-01 00:00"),
    ],
)
def test_aliases_tick_at_the_start_of_their_period(alias: str, expected: str) -> None:
    (tick,) = first(timing_of(cron=alias), NOON, 1)
    assert f"{tick:%Y-%m-%d %H:%M}" == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 0 L * *", "05-31 00:00:00, 06-30 00:00:00"),
        ("0 0 LW * *", "05-29 00:00:00, 06-30 00:00:00"),
        ("0 0 * * MON#2", "05-11 00:00:00, 06-08 00:00:00"),
        ("0 0 * * 5L", "05-29 00:00:00, 06-26 00:00:00"),
        ("0 0 13 * FRI", "05-08 00:00:00, 05-13 00:00:00"),
        ("*/20 59 23 * * *", "05-01 23:59:00, 05-01 23:59:20"),
        ("0 9-17/4 * JAN-JUN *", "05-01 13:00:00, 05-01 17:00:00"),
    ],
)
def test_the_forms_of_cron_expressions_mean_these_ticks(text: str, expected: str) -> None:
    assert [f"{tick:%m-%d %H:%M:%S}" for tick in first(timing_of(cron=text), NOON, 2)] == expected.split(", ")


@pytest.mark.parametrize(
    "bad",
    [
        "", " ", "*", "* * * *", "* * * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8",
        "0 0 1--1000000 * *", "0 0 1-1000000 * *", "*/0 * * * *", "5-1 * * * *", "0 0 31 2 *", "0 0 31 4,6,9,11 *",
        "0 0 LW 2 */7", "0 0 * * MON#6", "0 0 * * ²L", "@", "@dayly", "@reboot", "a b c d e", "1,,2 * * * *", "H * * * *",
        "0" * 150 + "-" + "9" * 40 + " * * * *", "0 0 * * " + "1," * 90,
    ],
)  # fmt: skip
def test_a_bad_cron_expression_is_rejected(bad: str) -> None:
    assert problems_of(cron=bad) == [("Schedule.cron", "CRON_INVALID")]


def test_bad_cron_expressions_are_rejected_in_bounded_time_and_memory() -> None:
    hostile = [
        "0 0 1--1000000 * *",
        "*/1" * 60 + " * * * *",
        "1-59/1," * 25 + "61 * * * *",
        "0 0 LW 2 */7",
        "x" * 10_000_000,
    ]
    tracemalloc.start()
    start = time.process_time()
    try:
        for bad in hostile:
            with pytest.raises(ConfigurationError):
                timing_of(cron=[bad] * 50 if len(bad) < 200 else bad)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 10
    assert peak < 20_000_000


@given(text=st.text(max_size=40) | st.text(alphabet="0123456789*/-,#LW MON@", max_size=60))
def test_any_text_is_a_cron_expression_with_ticks_or_is_rejected(text: str) -> None:
    try:
        timing = timing_of(cron=text)
    except ConfigurationError:
        return
    assert first(timing, NOON, 1)[0] > NOON


def test_all_problems_are_reported_at_once() -> None:
    assert problems_of(cron=["0 0 31 2 *", "* * * * *", 7], every="0.5s", timezone="Europe/Berln") == [
        ("Schedule", "CONTRADICTION"),
        ("Schedule.cron[0]", "CRON_INVALID"),
        ("Schedule.cron[2]", "WRONG_TYPE"),
        ("Schedule.every", "OUT_OF_RANGE"),
        ("Schedule.timezone", "TIMEZONE_UNKNOWN"),
    ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, ("Schedule", "MISSING")),
        ({"cron": "@daily", "at": NOON}, ("Schedule", "CONTRADICTION")),
        ({"cron": 5}, ("Schedule.cron", "WRONG_TYPE")),
        ({"cron": "x" * (MOST_CRON_CHARACTERS + 1)}, ("Schedule.cron", "CRON_INVALID")),
        ({"cron": []}, ("Schedule.cron", "WRONG_COUNT")),
        ({"cron": ["@daily"] * (MOST_CRON_EXPRESSIONS + 1)}, ("Schedule.cron", "WRONG_COUNT")),
        ({"cron": "@daily", "offset": "5m"}, ("Schedule.offset", "CONTRADICTION")),
        ({"cron": "@daily", "timezone": "localtime"}, ("Schedule.timezone", "TIMEZONE_UNKNOWN")),
        ({"cron": "@daily", "timezone": UTC}, ("Schedule.timezone", "WRONG_TYPE")),
        ({"every": "soon"}, ("Schedule.every", "DURATION_INVALID")),
        ({"every": True}, ("Schedule.every", "WRONG_TYPE")),
        ({"every": "999ms"}, ("Schedule.every", "OUT_OF_RANGE")),
        ({"every": "1h", "offset": "1h"}, ("Schedule.offset", "OUT_OF_RANGE")),
        ({"every": "1h", "offset": "-1m"}, ("Schedule.offset", "DURATION_INVALID")),
        ({"every": "1d", "timezone": "Europe/Berlin"}, ("Schedule.timezone", "CONTRADICTION")),
        ({"at": NOON.replace(tzinfo=None)}, ("Schedule.at", "NAIVE_DATETIME")),
        ({"at": "tomorrow"}, ("Schedule.at", "WRONG_TYPE")),
        ({"at": [NOON, None]}, ("Schedule.at[1]", "WRONG_TYPE")),
        ({"at": []}, ("Schedule.at", "WRONG_COUNT")),
        ({"at": [NOON] * (MOST_MOMENTS + 1)}, ("Schedule.at", "WRONG_COUNT")),
        ({"at": datetime(1969, 1, 1, tzinfo=UTC)}, ("Schedule.at", "OUT_OF_RANGE")),
    ],
)
def test_an_argument_that_means_no_timing_is_rejected(
    given: dict[str, Any], problem: tuple[str, str]
) -> None:
    assert problems_of(**given) == [problem]


def test_the_fix_names_what_was_probably_meant() -> None:
    assert fix_of(cron="@dayly") == "write '@daily'"
    assert fix_of(cron="@daily", timezone="europe/berln") == "write 'Europe/Berlin'"


def test_an_interval_counts_from_the_epoch_in_utc() -> None:
    timing = timing_of(every="7h", offset="30m")
    ticks = first(timing, NOON, 4)
    assert all((tick - EPOCH - HOUR / 2) % (7 * HOUR) == timedelta() for tick in ticks)
    assert NOON < ticks[0] <= NOON + 7 * HOUR
    assert [later - earlier for earlier, later in pairwise(ticks)] == [7 * HOUR] * 3


def test_a_tick_at_the_given_moment_is_not_after_it() -> None:
    for timing in (timing_of(every="1h"), timing_of(cron="@hourly"), timing_of(at=[NOON, NOON + HOUR])):
        assert first(timing, NOON, 1) == [NOON + HOUR]
        assert first(timing, NOON - timedelta(microseconds=1), 1) == [NOON]


def test_single_moments_are_sorted_without_duplicates_in_whole_milliseconds() -> None:
    later, earlier = NOON + HOUR, NOON + timedelta(microseconds=1_999)
    timing = timing_of(at=[later, earlier, earlier + timedelta(microseconds=-500), later])
    assert timing.at == (NOON + timedelta(milliseconds=1), later)
    assert [*ticks_after(timing, NOON - HOUR)] == [*timing.at]
    assert timing_of(at=NOON).at == (NOON,)


def test_several_expressions_are_merged_without_duplicates() -> None:
    timing = timing_of(cron=["0 * * * *", "*/30 * * * *", "15 12 * * *"], timezone="Europe/Berlin")
    ticks = first(timing, NOON - 3 * HOUR, 8)
    assert [f"{tick:%H:%M}" for tick in ticks] == [
        "09:30",
        "10:00",
        "10:15",
        "10:30",
        "11:00",
        "11:30",
        "12:00",
        "12:30",
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"every": "1h"}, "every 1h"),
        ({"every": 90, "offset": "5s"}, "every 90s plus 5s"),
        ({"cron": "30 2 * * *", "timezone": "Europe/Berlin"}, "30 2 * * * in Europe/Berlin"),
        ({"cron": ["@daily", "@hourly"]}, "0 0 * * *; 0 * * * * in UTC"),
        ({"at": NOON}, "at 2026-05-01 12:00:00+00:00"),
        ({"at": [NOON, NOON + HOUR, NOON + 2 * HOUR]}, "at 2026-05-01 12:00:00+00:00 and 2 other moments"),
    ],
)
def test_a_timing_is_described_for_people(given: dict[str, Any], text: str) -> None:
    assert describe(timing_of(**given)) == text


def test_zones_are_known_if_this_machine_has_their_data() -> None:
    assert zone_is_known("UTC")
    assert zone_is_known("Australia/Lord_Howe")
    assert not zone_is_known("Mars/Olympus_Mons")


PART = st.sampled_from(["*", "*/7", "*/13", "0", "5", "1-9", "3-20/4", "2,7,11", "0-6"])
DAYS = st.sampled_from(["*", "*", "1", "L", "LW", "15-20", "*/9", "31", "29"])
MONTHS = st.sampled_from(["*", "*", "2", "1-6", "FEB,DEC", "*/5"])
WEEKDAYS = st.sampled_from(["*", "*", "MON", "1-5", "FRI#2", "5L", "SUN,7", "*/3"])
FIVE = st.tuples(PART, PART, DAYS, MONTHS, WEEKDAYS).map(" ".join)
EXPRESSIONS = FIVE | st.tuples(PART, FIVE).map(" ".join)
MOMENTS = st.integers(0, 10**9).map(
    lambda number: datetime(1990, 1, 1, tzinfo=UTC) + number * timedelta(seconds=2.000_003)
)
SOME_ZONES = st.sampled_from(
    ["UTC", "Europe/Berlin", "Australia/Lord_Howe", "America/New_York", "Asia/Kathmandu"]
)


@given(text=EXPRESSIONS, moment=MOMENTS)
@settings(max_examples=300, deadline=None)
def test_ticks_in_utc_are_those_of_cronsim(text: str, moment: datetime) -> None:
    try:
        expected = [*islice(CronSim(text, moment), 12)]
    except CronSimError:
        with pytest.raises(ConfigurationError):
            timing_of(cron=text)
        return
    assume(expected)
    assert first(timing_of(cron=text), moment, 12) == expected


TIMINGS = (
    st.builds(
        lambda cron, zone: Timing(cron=tuple(cron), timezone=zone),
        st.lists(st.sampled_from(["30 2 * * *", "*/15 1,2 * * *", "0 */2 * * *", "0 30 1-3 * * *", "0 0 1 * *"]), min_size=1, max_size=3),
        SOME_ZONES,
    )
    | st.builds(lambda every, offset: Timing(every_ms=every, offset_ms=offset % every), st.integers(600_000, 10**8), st.integers(0, 10**8))
    | st.lists(MOMENTS, min_size=1, max_size=30, unique=True).map(lambda at: Timing(at=tuple(sorted(at))))
)  # fmt: skip


@given(timing=TIMINGS, after=MOMENTS, length_h=st.integers(-5, 24 * 40), most=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_the_latest_ticks_of_a_range_are_those_found_by_going_through_it(
    timing: Timing, after: datetime, length_h: int, most: int
) -> None:
    until = after + length_h * HOUR
    ticks = tuple(takewhile(lambda tick: tick <= until, ticks_after(timing, after)))
    found = latest_ticks(timing, after=after, until=until, most=most)
    cut = max(len(ticks) - most, 0)
    assert found.ticks == ticks[cut:]
    assert found.first_older == (ticks[0] if cut else None)
    assert found.last_older == (ticks[cut - 1] if cut else None)
    assert found.older in ((cut,) if len(timing.cron) < 2 else (cut, None))


@given(timing=TIMINGS, after=MOMENTS)
@settings(deadline=None)
def test_ticks_increase_and_come_after_the_given_moment(timing: Timing, after: datetime) -> None:
    ticks = first(timing, after, 20)
    assert ticks == sorted(set(ticks))
    assert all(tick > after for tick in ticks)


def test_a_cron_of_one_second_is_searched_from_the_end_after_an_outage_of_ten_years() -> None:
    timing = timing_of(cron=["* * * * * *", "30 2 * * *"], timezone="Europe/Berlin")
    start = time.process_time()
    found = latest_ticks(timing, after=NOON - timedelta(days=3_652), until=NOON, most=1_000)
    assert time.process_time() - start < 5
    assert found.ticks == tuple(NOON - number * SECOND for number in reversed(range(1_000)))
    assert (found.first_older, found.last_older) == (
        NOON - timedelta(days=3_652) + SECOND,
        NOON - 1_000 * SECOND,
    )


def test_the_ticks_of_a_range_are_counted_without_going_through_them() -> None:
    timing = timing_of(cron="* * * * * *", timezone="Australia/Lord_Howe")
    start = time.process_time()
    found = latest_ticks(timing, after=NOON - timedelta(days=3_652), until=NOON, most=0)
    assert time.process_time() - start < 5
    assert found.older == 3_652 * 86_400


def test_a_stored_expression_that_never_matches_has_no_ticks() -> None:
    timing = Timing(cron=("0 0 LW 2 */7",), timezone="Europe/Berlin")
    start = time.process_time()
    assert first(timing, NOON, 1) == []
    assert time.process_time() - start < 2


def test_the_rarest_expression_ticks_again_after_the_gap_of_the_year_2100() -> None:
    ticks = first(timing_of(cron="0 0 29 2 */7"), NOON, 4)
    assert [tick.year for tick in ticks] == [2032, 2060, 2088, 2128]
