"""The numbers in the tabs of the list of tasks: they are those of the lists, and each says if it is not exact."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from everbeat import App
from everbeat.domain.task.states import VirtualState
from everbeat.store import state_counts
from everbeat.store.state_counts import Estimates, LiveCounts
from everbeat.web import state_counts as tabs
from everbeat.web.state_counts import of_many
from tests.web.conftest import NewVisitor, Workers

STATES = (
    "PENDING",
    "RUNNING",
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "EXPIRED",
    *(each.value for each in VirtualState),
)
AN_HOUR = 3_600_000
LIVE = LiveCounts(
    pending=20_002, running=7, failed=10_001, retrying=3, scheduled=0, suspended=12, overdue=10_001, suspect=0,
    at_least=["PENDING", "FAILED", "retrying", "scheduled", "overdue"],
)  # fmt: skip


def fill(workers: Workers) -> None:
    """Store a different number of tasks of each kind. Some are in serial lines, or marked with needs."""
    db = workers.db
    for _ in range(3):
        workers.fail()
    workers.start("other")
    db.complete(workers.start("other"))
    for _ in range(2):
        db.cancel(workers.send())
    workers.ask("Refund?", kind="bool")
    retried = workers.start()
    assert db.settle(retried, "FAILED", retry_in_ms=AN_HOUR) == "PENDING"
    for number in range(4):
        workers.send(delay_ms=AN_HOUR, queue=f"queue-{number}")
    for line in ("queue:line", "queue:other"):
        workers.send(serial=line, queue="line")
        workers.send(serial=line, queue="line", delay_ms=AN_HOUR)
    for _ in range(2):
        db.connection.execute(
            db.plain("update {schema}.tasks set enqueued_at = now() - interval '1 h' where id = %s"),
            [workers.send()],
        )
    db.connection.execute(
        db.plain("update {schema}.tasks set suspect = true where id = %s"), [workers.send()]
    )


async def listed(app: App) -> dict[str, int]:
    """Return how many tasks the list of each tab has."""
    return {state: len(await app.alist_tasks(state=state, limit=100)) for state in STATES}


async def test_each_tab_has_the_number_of_tasks_in_its_list(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    fill(workers)
    expected = await listed(app)
    assert 0 not in {expected[state] for state in STATES if state != "EXPIRED"}
    document = await new_visitor().json("/tasks")
    total = len(await app.alist_tasks(limit=100))
    assert document["counts"] == {
        name: {"count": count, "precision": "exact"} for name, count in {"all": total, **expected}.items()
    }
    page = (await new_visitor().get("/tasks")).text
    assert re.search(rf'Failed <span class="n">{expected["FAILED"]}</span>', page)
    assert re.search(rf'All <span class="n">{total}</span>', page)


async def test_live_tasks_and_failures_are_counted_as_listed(app: App, workers: Workers) -> None:
    """The statement for large installations has the same numbers, because nothing is cut here."""
    fill(workers)
    expected = await listed(app)
    found = workers.db.run(state_counts.live())
    assert found.at_least == []
    live = ("PENDING", "RUNNING", "FAILED", *(each.value for each in VirtualState))
    assert {state: getattr(found, state.lower()) for state in live} == {
        state: expected[state] for state in live
    }


async def test_a_list_with_filters_has_no_numbers_because_they_are_those_of_all_tasks(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.fail()
    visitor = new_visitor()
    assert (await visitor.json("/tasks", state="FAILED"))["counts"]["FAILED"]["count"] == 1
    assert (await visitor.json("/tasks", state="FAILED", queue="mail"))["counts"] is None
    assert '<span class="n"' not in (await visitor.get("/tasks", name="charge")).text


def test_counting_stops_and_says_which_numbers_can_be_too_low(workers: Workers) -> None:
    fill(workers)
    newest, live = workers.db.run(state_counts.newest(most=4)), workers.db.run(state_counts.live(most=2))
    assert newest.examined == 5
    assert {*live.at_least} == {"PENDING", "FAILED", "retrying", "scheduled", "suspended", "overdue"}
    assert (live.failed, live.running, live.suspect) == (3, 1, 1)


def test_a_number_above_the_limit_is_an_estimate_or_a_lower_bound() -> None:
    guessed = Estimates(
        9_800_000, {"COMPLETED": 9_700_000, "CANCELLED": 96, "PENDING": 48_000, "FAILED": 900}
    )
    shown = {name: each.words for name, each in of_many(LIVE, guessed, None).items()}
    assert shown == {
        "all": "≈ 9.8M", "PENDING": "≈ 48k", "RUNNING": "7", "FAILED": "10,000+", "COMPLETED": "≈ 9.7M", "CANCELLED": "≈ 96",
        "retrying": "3+", "suspended": "12", "overdue": "10,000+", "suspect": "0",
    }  # fmt: skip


async def test_the_tabs_of_many_tasks_show_estimates_and_the_last_sample(
    app: App, workers: Workers, new_visitor: NewVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(workers)
    for module in (tabs, state_counts):
        monkeypatch.setattr(module, "MOST_COUNTED", 2)
    monkeypatch.setattr(state_counts.newest, "__kwdefaults__", {"most": 2})
    monkeypatch.setattr(state_counts.live, "__kwdefaults__", {"most": 2})
    visitor = new_visitor()
    before = (await visitor.json("/tasks"))["counts"]
    assert before["PENDING"] == {"count": 2, "precision": "at_least"}
    assert before["all"]["precision"] == "at_least", "nothing was analyzed"
    workers.db.connection.execute(workers.db.plain("analyze {schema}.tasks"))
    at = datetime.now(UTC) - timedelta(seconds=5)
    workers.db.connection.execute(
        workers.db.plain(
            "insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, at_least)"
            " values (10, %s, 'default', 0, 77, 0, 0, 0, '{{}}')"
        ),
        [at],
    )
    expected = await listed(app)
    counts = (await new_visitor().json("/tasks"))["counts"]
    assert counts["all"] == {"count": sum(expected[state] for state in STATES[:6]), "precision": "about"}
    assert counts["PENDING"] == {"count": expected["PENDING"], "precision": "about"}
    assert counts["FAILED"] == {"count": expected["FAILED"], "precision": "about"}
    assert counts["scheduled"] == {"count": 77, "precision": "about"}
    assert counts["RUNNING"] == {"count": 1, "precision": "exact"}
