"""The reason why a supervisor cannot start a worker process, as it is stored and judged."""

from __future__ import annotations

import pytest

from everbeat.domain.doctor.findings import CheckVerdict
from everbeat.domain.doctor.work import judge_starts, start_problem_text, why_not_started
from everbeat.domain.explain.reasons import FailingStart


def failing(number: int) -> FailingStart:
    return FailingStart(f"s{number}", number, "host", "no module 'shop'", None, 2, 1)


@pytest.mark.parametrize(
    ("message", "stored"),
    [
        (
            "Importing 'shop' failed with E: a\n  b\n\nTraceback:\n  x = 1",
            "Importing 'shop' failed with E: a b",
        ),
        ("no answer from redis://shop:p@ss/word@cache:6379/0", "no answer from redis://***@cache:6379/0"),
        ("host=db password=hunter2 user=shop", "host=db password=*** user=shop"),
        ("API_TOKEN: 'abc' and my_secret = abc", "API_TOKEN: *** and my_secret = ***"),
        ("a \x00 and half \ud800", "a \\x00 and half \\ud800"),
    ],
)
def test_the_stored_reason_of_a_failed_start_is_one_line_without_secrets(
    message: str, stored: str
) -> None:  # J8
    assert start_problem_text(message) == stored


def test_the_stored_reason_of_a_failed_start_is_bounded() -> None:  # J8
    assert len(start_problem_text("x" * 100_000)) < 600


def test_the_doctor_names_the_supervisor_its_host_and_the_reason_of_a_failed_start() -> None:  # J8
    check = judge_starts([failing(1)])
    assert check.verdict is CheckVerdict.FAIL
    assert "supervisor s1 (pid 1 on host, with 1 of 2 workers): no module 'shop'" in check.text
    assert judge_starts([]).verdict is CheckVerdict.OK


def test_explain_names_three_supervisors_that_cannot_start_workers_and_counts_the_others() -> None:  # J8
    reasons = list(why_not_started([failing(number) for number in range(5)]))
    assert [each.blocked_by for each in reasons] == ["s0", "s1", "s2"]
    assert reasons[0].text == "supervisor s0 (pid 0) on host cannot start a worker process: no module 'shop'"
    assert reasons[2].text.endswith("; and 2 more supervisors cannot")
    assert list(why_not_started([])) == []
