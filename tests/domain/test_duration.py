"""Durations and moments: which values are accepted, which are rejected, and the text of the rejection."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.settings.units import (
    LONGEST_S,
    spelled_duration,
    to_milliseconds,
    to_seconds,
    to_utc,
    to_when,
)
from everbeat.errors import ConfigurationError


def problem_of(read: Any, value: Any) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        read(value, subject="timeout")
    (problem,) = refusal.value.problems
    assert problem.subject == "timeout"
    assert problem.fix
    return problem.code


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("1.5h", 5_400),
        ("250ms", 0.25),
        ("2d", 172_800),
        (" 30 s ", 30),
        (".5s", 0.5),
        ("5.s", 5),
        ("1h30m", 5_400),
        ("1d 2h 3m 4s 5ms", 93_784.005),
        ("0s", 0),
        (0, 0),
        (30, 30),
        (1.5, 1.5),
        (timedelta(minutes=5), 300),
        (timedelta(microseconds=1), 0.000_001),
        ("36500d", LONGEST_S),
    ],
)
def test_durations_are_read_as_written(value: Any, seconds: float) -> None:
    assert to_seconds(value, subject="timeout") == pytest.approx(seconds)


@pytest.mark.parametrize("value", [True, False, None, b"30s", [30], Decimal(30), 3j, object()])
def test_a_duration_of_another_type_is_rejected(value: Any) -> None:
    assert problem_of(to_seconds, value) == "WRONG_TYPE"


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), float("-inf"), -1, -0.001, timedelta(seconds=-1), 10**400, -(10**400)),
        *("", "s", "30", "-30s", "+30s", "1e3s", "30 seconds", "5min", "30S", "1,5h", "nan s", "٣s", "30s;"),
        *("30m1h", "1s1s", "36501d", "9" * 400 + "d", timedelta.max),
    ],
)
def test_ambiguous_and_impossible_durations_are_rejected(value: Any) -> None:
    assert problem_of(to_seconds, value) == "DURATION_INVALID"


def test_a_rejected_duration_names_the_thing_the_value_the_rule_and_the_fix() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        to_seconds("5min", subject="TaskOptions.timeout")
    message = str(refusal.value)
    for text in ("TaskOptions.timeout", "'5min'", "unit of ms, s, m, h or d", '"5m"'):
        assert text in message


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("5 minutes", 'write "5m"'),
        ("250 msec", 'write "250ms"'),
        ("1.5 Hours", 'write "1.5h"'),
        ("2 days", 'write "2d"'),
        ("30", 'write "30s" for seconds, or another unit'),
    ],
)
def test_the_fix_of_a_rejected_duration_suggests_the_likely_value(value: str, fix: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        to_seconds(value, subject="timeout")
    assert refusal.value.problems[0].fix == fix


@pytest.mark.parametrize(("value", "meant"), [("5m", "300"), (90, "90"), (0.25, "0.25"), ("soon", "30")])
def test_the_fix_of_a_delay_suggests_the_likely_timedelta(value: object, meant: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        to_when(value, subject="when")
    assert refusal.value.problems[0].fix.startswith(f"pass timedelta(seconds={meant}), or ")


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        ("250ms", 250),
        (0.1 * 3, 300),
        (1e-6, 1),
        (0, 0),
        (0.0001, 1),
        (1.0005, 1_001),
        ("100ms", 100),
        (8.7, 8_700),
    ],
)
def test_to_milliseconds_rounds_up_without_floating_point_noise(value: Any, milliseconds: int) -> None:
    assert to_milliseconds(value, subject="timeout") == milliseconds


@given(st.integers(min_value=0, max_value=10**9))
def test_to_milliseconds_keeps_whole_milliseconds(milliseconds: int) -> None:
    assert to_milliseconds(milliseconds / 1_000, subject="timeout") == milliseconds
    assert to_milliseconds(f"{milliseconds}ms", subject="timeout") == milliseconds


@given(st.floats(min_value=0, max_value=LONGEST_S).map(lambda seconds: round(seconds, 3)))
def test_a_spelled_duration_parses_to_the_same_value(seconds: float) -> None:
    assert to_seconds(spelled_duration(seconds), subject="timeout") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.25, "250ms"), (1, "1s"), (90, "90s"), (120, "2m"), (3600, "1h"), (86_400, "1d")],
)
def test_durations_are_spelled_in_the_longest_whole_unit(seconds: float, text: str) -> None:
    assert spelled_duration(seconds) == text


@given(st.text())
def test_arbitrary_text_is_either_a_duration_or_a_configuration_error(text: str) -> None:
    found = ""
    try:
        seconds = to_seconds(text, subject="timeout")
    except ConfigurationError as error:
        found, seconds = error.problems[0].code, 0.0
    assert found in ("", "DURATION_INVALID")
    assert seconds >= 0


def test_to_utc_converts_an_aware_datetime() -> None:
    east = timezone(timedelta(hours=2))
    assert to_utc(datetime(2024, 5, 1, 12, tzinfo=east), subject="good_until") == datetime(
        2024, 5, 1, 10, tzinfo=UTC
    )
    assert to_utc(datetime(2024, 5, 1, 12, tzinfo=east), subject="good_until").tzinfo is UTC


NAIVE = datetime(2024, 5, 1, tzinfo=UTC).replace(tzinfo=None)


class Nowhere(tzinfo):
    def utcoffset(self, moment: datetime | None) -> None:
        return None


@pytest.mark.parametrize("moment", [NAIVE, datetime(2024, 5, 1, tzinfo=Nowhere())])
def test_a_naive_datetime_is_rejected_with_reason_and_fix(moment: datetime) -> None:  # C3
    for read in (to_utc, to_when):
        assert problem_of(read, moment) == "NAIVE_DATETIME"
        with pytest.raises(ConfigurationError, match=r"a different time on each host.*timezone\.utc"):
            read(moment, subject="good_until")


@pytest.mark.parametrize("value", [date(2024, 5, 1), "2024-05-01T00:00:00Z", 1.0, None, timedelta(1), "5m"])
def test_a_moment_of_another_type_is_rejected(value: Any) -> None:
    assert problem_of(to_utc, value) == "WRONG_TYPE"


@pytest.mark.parametrize("hours", [-2, 0, 14])
@pytest.mark.parametrize("day", [(9999, 12, 31), (9999, 1, 1), (1, 1, 1), (1, 12, 31)])
def test_a_moment_at_the_end_of_the_calendar_is_rejected(day: tuple[int, int, int], hours: int) -> None:
    value = datetime(*day, tzinfo=timezone(timedelta(hours=hours)))
    assert problem_of(to_utc, value) == "OUT_OF_RANGE"


def test_to_when_keeps_delays_and_moments() -> None:
    assert to_when(timedelta(minutes=5), subject="when") == timedelta(minutes=5)
    assert to_when(datetime(2024, 5, 1, tzinfo=UTC), subject="when") == datetime(2024, 5, 1, tzinfo=UTC)


@pytest.mark.parametrize("value", ["5m", 5, None, date(2024, 5, 1), True])
def test_to_when_rejects_other_types(value: Any) -> None:
    assert problem_of(to_when, value) == "WRONG_TYPE"


def test_a_negative_delay_is_rejected() -> None:
    assert problem_of(to_when, timedelta(seconds=-1)) == "DURATION_INVALID"


@pytest.mark.parametrize("value", [timedelta(seconds=-1), timedelta(days=40_000)])
def test_the_fix_of_a_rejected_delay_shows_accepted_values(value: timedelta) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        to_when(value, subject="when")
    (problem,) = refusal.value.problems
    assert problem.fix == "pass timedelta(seconds=30), for example, or timedelta(0) for at once"
