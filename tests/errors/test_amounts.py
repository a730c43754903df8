"""Test the text of numbers with their nouns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import everbeat
from everbeat.domain.explain.reasons import counted
from everbeat.errors.wording import amount

SOURCE = Path(everbeat.__file__).parent
_PLURALS = (
    "tasks|times|retries|crashes|losses|nodes|workers|supervisors|gaps|rows|queues|attempts|steps"
    "|messages|sessions|frames|members|items|holders|leases|trees"
)
_SPELLED = re.compile(rf"\{{([^{{}}]*)\}} (?:more |other |dead |live )?(?:{_PLURALS})\b")
ALWAYS_SEVERAL = {
    "PARTS",
    "state",
    "task.state",
    "kind",
    "start.workers",
    "wanted",
    "total - 1",
    "counts.pop(node.name)",
}
"""What a number or word stands for that is never one: constants, limits, and words that are no numbers."""


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 retries"), (1, "1 retry"), (2, "2 retries"), (1_000, "1,000 retries")]
)
def test_amount_uses_the_singular_or_plural_noun(number: int, expected: str) -> None:
    assert amount(number, "retry", plural="retries") == expected


def test_counted_reports_numbers_above_1000_as_more_than_1000() -> None:
    assert [counted(number, "task") for number in (0, 1, 2, 1_000, 1_001, 5_000)] == [
        "no tasks", "1 task", "2 tasks", "1,000 tasks", "more than 1,000 tasks", "more than 1,000 tasks"
    ]  # fmt: skip


def test_messages_do_not_write_a_plural_after_a_number_that_can_be_one() -> None:  # J10
    found = [
        f"{path.relative_to(SOURCE)}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        if not {"demo", "bench"} & set(path.parts)
        for match in _SPELLED.finditer(path.read_text())
        if match[1].partition(":")[0] not in ALWAYS_SEVERAL
    ]
    assert found == []
