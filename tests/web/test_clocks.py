"""Pages show the time of the database, from which the clock of the machine that serves the dashboard can differ."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from everbeat.runtime.clock import SystemClock
from everbeat.web.moments import written
from tests.web.conftest import NewVisitor, Workers

WRONG = [timedelta(minutes=20), timedelta(minutes=-20)]
DEPTHS = (
    "insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)"
    " select 60, now() - n * interval '1 minute', 'mail', 5, 0, 0, 0, 0, 1, '{{}}' from generate_series(1, 60) n"
)


@pytest.fixture(params=WRONG, ids=["ahead", "behind"])
def wrong_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> timedelta:
    """Let the clock of this machine differ from the database's."""
    wall, by = SystemClock.wall, request.param
    monkeypatch.setattr(SystemClock, "wall", lambda clock: wall(clock) + by)
    found: timedelta = by
    return found


def now_of(workers: Workers) -> datetime:
    found = workers.db.connection.execute("select statement_timestamp()").fetchone()
    assert found is not None
    moment: datetime = found[0]
    return moment


async def test_the_past_ends_at_the_time_of_the_database(
    wrong_clock: timedelta, workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("see")
    now = now_of(workers)
    assert (await visitor.json("/pulse", at=written(now - timedelta(seconds=1))))["as_of"] is not None
    ahead = await visitor.json("/pulse", status=400, at=written(now + timedelta(minutes=5)))
    assert ahead["error"]["code"] == "OUT_OF_RANGE"


async def test_tasks_are_due_and_charts_end_by_the_time_of_the_database(
    wrong_clock: timedelta, workers: Workers, new_visitor: NewVisitor
) -> None:
    later = workers.send(delay_ms=300_000)
    workers.db.connection.execute(workers.db.plain(DEPTHS))
    visitor = new_visitor("see")
    page = (await visitor.get(f"/tasks/{later}")).text
    assert "</svg>scheduled</span>" in page
    assert "overdue" not in page
    points = (await visitor.json("/pulse"))["charts"]["points"]
    assert sum(point["due"] is not None for point in points) >= 58
    assert sum(point["due"] is not None for point in points[-3:]) >= 2
