"""Durations and moments: what is read, what is refused and why."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.duration import LONGEST_S, spelled, to_milliseconds, to_seconds, to_utc, to_when
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
def test_a_duration_is_read_as_written(value: Any, seconds: float) -> None:
    assert to_seconds(value, subject="timeout") == pytest.approx(seconds)


@pytest.mark.parametrize("value", [True, False, None, b"30s", [30], Decimal(30), 3j, object()])
def test_what_is_no_length_of_time_is_refused(value: Any) -> None:
    assert problem_of(to_seconds, value) == "WRONG_TYPE"


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), float("-inf"), -1, -0.001, timedelta(seconds=-1), 10**400, -(10**400)),
        *("", "s", "30", "-30s", "+30s", "1e3s", "30 seconds", "5min", "30S", "1,5h", "nan s", "٣s", "30s;"),
        *("30m1h", "1s1s", "36501d", "9" * 400 + "d", timedelta.max),
    ],
)
def test_ambiguous_and_impossible_durations_are_refused(value: Any) -> None:
    assert problem_of(to_seconds, value) == "DURATION_INVALID"


def test_the_message_names_the_thing_the_value_the_rule_and_the_fix() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        to_seconds("5min", subject="TaskOptions.timeout")
    message = str(refusal.value)
    for text in ("TaskOptions.timeout", "'5min'", "unit of ms, s, m, h or d", '"5m"'):
        assert text in message


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
def test_milliseconds_round_up_without_noise(value: Any, milliseconds: int) -> None:
    assert to_milliseconds(value, subject="timeout") == milliseconds


@given(st.integers(min_value=0, max_value=10**9))
def test_whole_milliseconds_survive_as_they_are(milliseconds: int) -> None:
    assert to_milliseconds(milliseconds / 1_000, subject="timeout") == milliseconds
    assert to_milliseconds(f"{milliseconds}ms", subject="timeout") == milliseconds


@given(st.floats(min_value=0, max_value=LONGEST_S).map(lambda seconds: round(seconds, 3)))
def test_a_spelled_duration_reads_back(seconds: float) -> None:
    assert to_seconds(spelled(seconds), subject="timeout") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.25, "250ms"), (1, "1s"), (90, "90s"), (120, "2m"), (3600, "1h"), (86_400, "1d")],
)
def test_durations_are_spelled_in_the_longest_whole_unit(seconds: float, text: str) -> None:
    assert spelled(seconds) == text


@given(st.text())
def test_any_text_is_read_or_refused_kindly(text: str) -> None:
    found = ""
    try:
        seconds = to_seconds(text, subject="timeout")
    except ConfigurationError as error:
        found, seconds = error.problems[0].code, 0.0
    assert found in ("", "DURATION_INVALID")
    assert seconds >= 0


def test_an_aware_moment_becomes_utc() -> None:
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
def test_a_naive_moment_is_refused_with_the_reason_and_the_cure(moment: datetime) -> None:  # C3
    for read in (to_utc, to_when):
        assert problem_of(read, moment) == "NAIVE_DATETIME"
        with pytest.raises(ConfigurationError, match=r"another moment on each host.*timezone\.utc"):
            read(moment, subject="good_until")


@pytest.mark.parametrize("value", [date(2024, 5, 1), "2024-05-01T00:00:00Z", 1.0, None, timedelta(1), "5m"])
def test_what_is_no_moment_is_refused(value: Any) -> None:
    assert problem_of(to_utc, value) == "WRONG_TYPE"


@pytest.mark.parametrize("hours", [-2, 0, 14])
@pytest.mark.parametrize("day", [(9999, 12, 31), (9999, 1, 1), (1, 1, 1), (1, 12, 31)])
def test_a_moment_at_the_end_of_the_calendar_is_refused(day: tuple[int, int, int], hours: int) -> None:
    value = datetime(*day, tzinfo=timezone(timedelta(hours=hours)))
    assert problem_of(to_utc, value) == "OUT_OF_RANGE"


def test_a_delay_stays_a_delay_and_a_moment_a_moment() -> None:
    assert to_when(timedelta(minutes=5), subject="when") == timedelta(minutes=5)
    assert to_when(datetime(2024, 5, 1, tzinfo=UTC), subject="when") == datetime(2024, 5, 1, tzinfo=UTC)


@pytest.mark.parametrize("value", ["5m", 5, None, date(2024, 5, 1), True])
def test_what_is_neither_delay_nor_moment_is_refused(value: Any) -> None:
    assert problem_of(to_when, value) == "WRONG_TYPE"


def test_a_delay_into_the_past_is_refused() -> None:
    assert problem_of(to_when, timedelta(seconds=-1)) == "DURATION_INVALID"


@pytest.mark.parametrize("value", [timedelta(seconds=-1), timedelta(days=40_000)])
def test_the_fix_of_a_refused_delay_names_what_is_accepted(value: timedelta) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        to_when(value, subject="when")
    (problem,) = refusal.value.problems
    assert problem.fix == "pass timedelta(seconds=30), for example, or timedelta(0) for at once"
