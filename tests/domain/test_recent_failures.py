"""The doctor's text about tasks that failed recently."""

from __future__ import annotations

import pytest

from everbeat.domain.doctor.work import RecentFailures, judge_failures


@pytest.mark.parametrize(
    ("count", "since_s", "shown"),
    [(999, 4.0, "(250 a second"), (5, 2.0, "(2.5 a second"), (12_000, 1.0, ": 12,000 a second"), (1, 3_600.0, "(0.00028 a second")],
)  # fmt: skip
def test_the_doctor_shows_the_rate_of_failures_as_a_plain_number(
    count: int, since_s: float, shown: str
) -> None:  # J4
    found = RecentFailures(name="work", code="BROKEN", type="", count=count, since_s=since_s)
    assert shown in judge_failures([found]).text
