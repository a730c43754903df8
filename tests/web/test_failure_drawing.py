"""The bars of a group of failures: one for each hour, and a sentence that says the same."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from everbeat.web.failure_drawing import hours_svg, hours_told
from tests.web.conftest import NewVisitor, Workers

NOW = datetime(2030, 1, 31, 14, 30, tzinfo=UTC)
HOURS = (*(0,) * 20, 2, 0, 8, 1)
"""The failures of the last 24 hours."""


@pytest.mark.parametrize(
    ("by_hour", "ago", "told"),
    [
        (HOURS, None, "11 failures in the last 24 h, at most 8 in one hour, 1 to 2 h ago"),
        ((*(0,) * 23, 1), None, "1 failure in the last 24 h, at most 1 in one hour, in the last hour"),
        ((0,) * 24, None, "No failure in the last 24 h"),
        (HOURS, timedelta(hours=3, minutes=50), "9 failures in the last 3 h, at most 8 in one hour, 1 to 2 h ago; earlier hours were not counted"),
        (HOURS, timedelta(minutes=70), "1 failure in the last hour; earlier hours were not counted"),
        (HOURS, timedelta(minutes=20), "At least 1 failure in the last hour; earlier hours were not counted"),
        (HOURS, timedelta(days=7), "11 failures in the last 24 h, at most 8 in one hour, 1 to 2 h ago"),
    ],
)  # fmt: skip
def test_the_bars_have_a_sentence(by_hour: tuple[int, ...], ago: timedelta | None, told: str) -> None:
    assert hours_told(by_hour, now=NOW, counted_since=None if ago is None else NOW - ago) == told


def bars(drawn: str) -> list[tuple[str, float, float]]:
    """Return the class, the place and the height of each bar."""
    found = re.findall(r'<rect class="([\w-]+)" x="(\d+)"[^>]* height="([\d.]+)"', drawn)
    return [(tone, float(x), float(height)) for tone, x, height in found]


def test_an_hour_without_failures_has_a_base_and_one_that_was_not_counted_has_nothing() -> None:
    drawn = bars(str(hours_svg(HOURS, now=NOW, counted_since=None)))
    assert len(drawn) == 24
    assert drawn[-4:] == [("f-dead", 80, 4.8), ("f-line", 84, 0.6), ("f-dead", 88, 19.0), ("f-dead", 92, 2.4)]
    assert [
        x for _, x, _ in bars(str(hours_svg(HOURS, now=NOW, counted_since=NOW - timedelta(hours=3))))
    ] == [84, 88, 92]


async def test_each_group_of_failures_has_its_bars(workers: Workers, new_visitor: NewVisitor) -> None:
    for _ in range(3):
        workers.fail()
    workers.db.connection.execute(
        workers.db.plain(
            "update {schema}.tasks set failed_at = failed_at - interval '5 hours' where id = %s"
        ),
        [workers.fail()],
    )
    workers.fail("mail.welcome", error={"code": "TASK_TIMEOUT"})
    visitor = new_visitor()
    page = (await visitor.get("/tasks", state="FAILED")).text
    assert "4 failures in the last 24 h, at most 3 in one hour, in the last hour" in page
    assert page.count('<svg class="spark"') == 2
    (first, second) = (await visitor.json("/tasks", state="FAILED"))["groups"]
    assert {place: count for place, count in enumerate(first["by_hour"]) if count} == {18: 1, 23: 3}
    assert sum(second["by_hour"]) == 1
    recent = (await visitor.get("/tasks", state="FAILED", since="2h")).text
    assert (
        "3 failures in the last 2 h, at most 3 in one hour, in the last hour; earlier hours were not counted"
        in recent
    )
