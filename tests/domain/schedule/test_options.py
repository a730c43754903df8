"""The options of a schedule: their defaults, their stored form, and their problems."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat.domain.schedule.model import Rule, Timing
from everbeat.domain.schedule.options import rule_of
from everbeat.errors import ConfigurationError, Problem

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def problems_of(**given: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigurationError) as refusal:
        rule_of(given, "Schedule")
    assert all(problem.fix and problem.rule for problem in refusal.value.problems)
    return refusal.value.problems


def test_options_that_are_not_given_or_none_have_the_defaults() -> None:
    names = ("missed", "most", "catchup_window", "overlap", "jitter", "starts", "ends", "most_runs")
    others = ("pause_after_failures", "expires", "cron", "offset", "at", "timezone")
    expected = Rule(timing=Timing(every_ms=3_600_000))
    assert rule_of({"every": "1h"}, "Schedule") == expected
    assert rule_of({"every": "1h", **dict.fromkeys((*names, *others))}, "Schedule") == expected
    assert (expected.missed, expected.most, expected.catchup_ms, expected.overlap) == (
        "latest",
        100,
        86_400_000,
        "allow",
    )


def test_most_without_missed_all_is_refused() -> None:
    for missed in ({}, {"missed": "latest"}, {"missed": "skip"}):
        with pytest.raises(
            ConfigurationError, match=r"Schedule\.most = 3: .*pass missed=\"all\", or omit most"
        ):
            rule_of({"every": "1h", "most": 3, **missed}, "Schedule")


def test_all_options_are_stored_in_their_normal_form() -> None:
    given = {
        "cron": "30 2 * * *",
        "timezone": "Europe/Berlin",
        "missed": "all",
        "most": 7,
        "catchup_window": "31d",
        "overlap": "buffer_one",
        "jitter": timedelta(minutes=5),
        "starts": datetime.fromisoformat("2026-05-01T14:00+02:00"),
        "ends": NOON + DAY,
        "most_runs": 3,
        "pause_after_failures": 2,
        "expires": 90,
    }
    assert rule_of(given, "Schedule") == Rule(
        timing=Timing(cron=("30 2 * * *",), timezone="Europe/Berlin"),
        missed="all",
        most=7,
        catchup_ms=31 * 86_400_000,
        overlap="buffer_one",
        jitter_ms=300_000,
        starts_at=NOON,
        ends_at=NOON + DAY,
        most_runs=3,
        pause_after_failures=2,
        expires_ms=90_000,
    )


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("missed", "none", "UNKNOWN_CHOICE"),
        ("most", 0, "OUT_OF_RANGE"),
        ("most", 10_001, "OUT_OF_RANGE"),
        ("catchup_window", "32d", "OUT_OF_RANGE"),
        ("catchup_window", 0, "OUT_OF_RANGE"),
        ("overlap", "queue", "UNKNOWN_CHOICE"),
        ("jitter", "1d", "OUT_OF_RANGE"),
        ("jitter", "soon", "DURATION_INVALID"),
        ("starts", datetime(2026, 5, 1), "NAIVE_DATETIME"),  # noqa: DTZ001
        ("ends", "2026-05-01", "WRONG_TYPE"),
        ("most_runs", 0, "OUT_OF_RANGE"),
        ("most_runs", 2**31, "OUT_OF_RANGE"),
        ("pause_after_failures", True, "WRONG_TYPE"),
        ("expires", "0s", "OUT_OF_RANGE"),
        ("evry", "1h", "UNKNOWN_NAME"),
    ],
)
def test_an_invalid_option_is_rejected(name: str, value: object, code: str) -> None:
    (problem,) = problems_of(every="30d", **{name: value})
    assert (problem.subject, problem.code) == (f"Schedule.{name}", code)


def test_an_unknown_option_is_rejected_with_the_closest_known_one() -> None:
    (problem,) = problems_of(every="1h", time_zone="UTC")
    assert problem.fix == "use timezone"


def test_all_problems_of_a_schedule_are_reported_at_once() -> None:
    found = problems_of(
        cron="0 0 31 2 *",
        every="1ms",
        timezone="Berlin",
        missed="x",
        most=0,
        jitter="2d",
        starts=1,
        expires=-1,
    )
    assert [problem.subject.removeprefix("Schedule.") for problem in found] == [
        "Schedule", "cron", "every", "timezone", "missed", "most", "jitter", "starts", "expires",
    ]  # fmt: skip


def test_the_end_must_be_after_the_start() -> None:
    (problem,) = problems_of(every="1h", starts=NOON, ends=NOON)
    assert (problem.subject, problem.code) == ("Schedule.ends", "CONTRADICTION")


@pytest.mark.parametrize(
    ("timing", "longest"),
    [
        ({"every": "1m"}, 60),
        ({"cron": "0 9,10 * * *"}, 3_600),
        ({"cron": "0 0 1 1 *"}, 86_400),
        ({"cron": ["0 0 * * *", "0 23 * * *"]}, 3_600),
        ({"at": [NOON, NOON + DAY, NOON + timedelta(seconds=10)]}, 10),
        ({"at": NOON}, 86_400),
    ],
)
def test_the_jitter_must_be_shorter_than_the_time_between_two_ticks(
    timing: dict[str, Any], longest: int
) -> None:
    (problem,) = problems_of(**timing, jitter=longest)
    assert problem.subject == "Schedule.jitter"
    assert rule_of({**timing, "jitter": longest - 1}, "Schedule").jitter_ms == (longest - 1) * 1_000
