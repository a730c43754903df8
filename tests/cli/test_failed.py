"""Test `everbeat failures`, `everbeat dead` and the methods of the app behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from uuid import UUID

import pytest

from everbeat import App
from everbeat.cli.failures import ExitCode
from everbeat.errors import ConfigurationError
from everbeat.store import expiry
from everbeat.store.failures import failure_groups
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.client.conftest import app
from tests.store.conftest import StoreHarness

__all__ = ["app"]


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    """Return a harness without audit triggers, because the tests date rows back."""
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        made.supervisor("s1", "w1", "w2")
        yield made
        made.database.close()


def fail(db: StoreHarness, code: str, kind: str = "", *, ago_s: int = 0, **options: str) -> UUID:
    """Let a task fail, date its failure back, and return its id."""
    claimed = db.running(**options)
    error = json.dumps({"code": code, "message": f"{code} happened", "type": kind}).encode()
    db.settle(claimed, "FAILED", error=error)
    text = "update {schema}.tasks set failed_at = failed_at - %s * interval '1 second' where id = %s"
    db.connection.execute(db.plain(text), [ago_s, claimed.id])
    return claimed.id


def expire(db: StoreHarness) -> UUID:
    """Let a task expire, and return its id."""
    late = db.send()
    text = "update {schema}.tasks set good_until = now() - interval '1 second' where id = %s"
    db.connection.execute(db.plain(text), [late])
    assert [each.id for each in db.run(expiry.expire(channel=db.target.channel))] == [late]
    return late


def move(db: StoreHarness, task_id: UUID) -> None:
    """Move an ended task to the history."""
    text = """
        insert into {schema}.history (id, name, queue, priority, state, args, fence, attempt, counted_from, retry_count, crash_count,
            loss_count, suspect, alone, checkpoint_number, sent_at, enqueued_at, failed_at, expired_at, error, ended_at)
        select id, name, queue, priority, state, args, fence, attempt, counted_from, retry_count, crash_count, loss_count, suspect, alone,
            checkpoint_number, sent_at, enqueued_at, failed_at, expired_at, error, greatest(failed_at, expired_at)
        from {schema}.tasks where id = %s"""
    day = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
    db.connection.execute(db.plain("select {schema}.add_history_part(%s, 'day')"), [day])
    db.connection.execute(db.plain(text), [task_id])
    db.connection.execute(db.plain("delete from {schema}.tasks where id = %s"), [task_id])


def test_failures_are_grouped_by_task_code_and_class(app: App, db: StoreHarness, everbeat: Command) -> None:
    first, last = fail(db, "BROKEN", "KeyError", ago_s=120), fail(db, "BROKEN", "KeyError", ago_s=60)
    other = fail(db, "BROKEN", "OSError", ago_s=30)
    late = expire(db)
    groups = app.failures()
    assert [(g.name, g.code, g.type, g.count, g.expired, g.example_id) for g in groups] == [
        ("work", "TASK_EXPIRED", "", 1, 1, late),
        ("work", "BROKEN", "OSError", 1, 0, other),
        ("work", "BROKEN", "KeyError", 2, 0, last),
    ]
    assert (groups[2].last_at - groups[2].first_at).total_seconds() == pytest.approx(60, abs=5)
    assert groups[2].message == "BROKEN happened"
    assert groups.continue_before is None
    document = everbeat("failures", "--json").assert_code(0).document
    assert [(g["count"], g["example_id"]) for g in document["failures"]] == [
        (1, str(late)), (1, str(other)), (2, str(last)),
    ]  # fmt: skip
    assert [g.count for g in app.failures(since=timedelta(seconds=90))] == [1, 1, 1]
    shown = everbeat("failures").assert_code(0).out
    assert "OSError" in shown
    assert "BROKEN happened" in shown
    app.retry(first)
    assert [g.count for g in app.failures()] == [1, 1, 1]


def test_failures_are_found_by_label(app: App, db: StoreHarness, everbeat: Command) -> None:
    for tenant in ("1", "1", "2"):
        failed = fail(db, "BROKEN")
        text = "update {schema}.tasks set labels = jsonb_build_object('tenant', %s::text) where id = %s"
        db.connection.execute(db.plain(text), [tenant, failed])
    fail(db, "BROKEN")
    late = expire(db)
    text = 'update {schema}.tasks set labels = \'{{"tenant": "3"}}\' where id = %s'
    db.connection.execute(db.plain(text), [late])
    assert [g.count for g in app.failures(labels={"tenant": "1"})] == [2]
    assert [(g.code, g.count) for g in app.failures(labels={"tenant": "3"})] == [("TASK_EXPIRED", 1)]
    assert sum(g.count for g in app.failures(labels={"tenant": None})) == 4
    document = everbeat("failures", "--label", "tenant=1", "--json").assert_code(0).document
    assert [g["count"] for g in document["failures"]] == [2]
    refused = everbeat("failures", "--label", "a b=1").assert_code(2)
    assert "--label = 'a b'" in refused.err
    with pytest.raises(ConfigurationError, match="labels"):
        app.failures(labels={"tenant": 1})  # type: ignore[dict-item]


def test_the_list_of_dead_letters_says_how_to_run_those_of_workflows_again(
    app: App, db: StoreHarness, everbeat: Command
) -> None:
    fail(db, "BROKEN")
    node = fail(db, "BROKEN")
    db.connection.execute("set session_replication_role = replica")
    db.connection.execute(db.plain("update {schema}.tasks set workflow_id = id where id = %s"), [node])
    db.connection.execute("reset session_replication_role")
    hints = everbeat("dead").assert_code(0).err
    assert "Run 1 task again, each by its id: everbeat dead redrive ID..." in hints
    assert "1 task of workflows: everbeat workflows retry ID" in hints


def test_failures_include_the_history(app: App, db: StoreHarness) -> None:
    moved, late = fail(db, "BROKEN", ago_s=5), expire(db)
    move(db, moved)
    move(db, late)
    fail(db, "BROKEN")
    assert [(g.code, g.count) for g in app.failures()] == [("BROKEN", 2), ("TASK_EXPIRED", 1)]
    assert {task.id for task in app.dead()} >= {moved, late}


def test_failures_say_where_the_search_stopped_and_continue_there(app: App, db: StoreHarness) -> None:
    for ago_s in (10, 20, 30, 40, 50):
        fail(db, "BROKEN", ago_s=ago_s)
    page = db.run(failure_groups(limit=10, most=2))
    assert ([g.count for g in page], page.examined) == ([1], 2)
    counts = []
    while True:
        counts.append(sum(g.count for g in page))
        if page.continue_before is None:
            break
        page = db.run(failure_groups(limit=10, most=2, before=page.continue_before))
    assert counts == [1, 1, 1, 1, 1]


def test_the_failures_of_the_last_24_hours_are_counted_by_the_hour(app: App, db: StoreHarness) -> None:
    hour = 3_600
    for ago_s in (10, 20, 3 * hour + 60, 23 * hour + 3_500, 24 * hour + 60, 90 * hour):
        fail(db, "BROKEN", ago_s=ago_s)
    fail(db, "OTHER", ago_s=30 * hour)
    groups = {group.code: group for group in app.failures()}
    assert groups["BROKEN"].count == 6
    assert {23 - place: count for place, count in enumerate(groups["BROKEN"].by_hour) if count} == {
        0: 2,
        3: 1,
        23: 1,
    }
    assert groups["OTHER"].by_hour == (0,) * 24


def test_failures_of_the_same_moment_are_counted_once_if_the_search_stops_among_them(
    app: App, db: StoreHarness
) -> None:
    for _ in range(6):
        fail(db, "BROKEN")
    for most, text in (
        (3, "date_trunc('minute', now()) - (row_number() over (order by id) / 2) * interval '1 hour'"),
        (6, "date_trunc('minute', now())"),
    ):
        db.connection.execute(
            db.plain(
                f"update {{schema}}.tasks t set failed_at = r.at from (select id, {text} as at from {{schema}}.tasks) r where r.id = t.id"
            )
        )
        page, counts = db.run(failure_groups(limit=10, most=most)), 0
        while True:
            counts += sum(g.count for g in page)
            if page.continue_before is None:
                break
            page = db.run(failure_groups(limit=10, most=most, before=page.continue_before))
        assert counts == 6


def test_a_search_that_finds_nothing_says_where_it_stopped(app: App, db: StoreHarness) -> None:
    for ago_s in (10, 20, 30):
        fail(db, "BROKEN", ago_s=ago_s)
    page = db.run(failure_groups(limit=10, most=2, name="other"))
    assert page == []
    assert page.continue_before is not None


def test_failures_with_errors_that_cannot_be_read_are_counted(app: App, db: StoreHarness) -> None:
    for error in ("7", '{"code": "\\u0000"}', '"text"', "null"):
        failed = fail(db, "BROKEN")
        db.connection.execute(
            db.plain("update {schema}.tasks set error = %s::json where id = %s"), [error, failed]
        )
    db.connection.execute(
        db.plain("update {schema}.tasks set failed_at = 'infinity' where id = %s"), [fail(db, "BROKEN")]
    )
    assert [(g.code, g.count) for g in app.failures()] == [("", 4)]


async def test_failures_and_dead_reject_wrong_filters(app: App, everbeat: Command) -> None:
    with pytest.raises(ConfigurationError, match="before"):
        app.failures(before=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(ConfigurationError, match="limit"):
        await app.afailures(limit=0)
    with pytest.raises(ConfigurationError, match="FAILED or EXPIRED"):
        await app.adead(state="COMPLETED")
    answer = everbeat("dead", "--state", "running", "--state", "overdue").assert_code(ExitCode.USAGE)
    assert "--state = 'RUNNING, overdue': must be FAILED or EXPIRED." in answer.err
    assert "use 'everbeat tasks list'" in answer.err


def test_dead_lists_what_failed_or_expired_until_it_is_retried(
    app: App, db: StoreHarness, everbeat: Command
) -> None:  # K12
    failed, late = fail(db, "BROKEN"), expire(db)
    db.complete(db.running())
    db.send()
    assert [task.id for task in app.dead()] == [late, failed]
    assert [task.id for task in app.dead(state="FAILED")] == [failed]
    assert [task.id for task in app.dead(error="TASK_EXPIRED")] == [late]
    document = everbeat("dead", "--json").assert_code(0).document
    assert [task["id"] for task in document["tasks"]] == [str(late), str(failed)]
    assert str(failed)[:8] in everbeat("dead", "list", "--error", "BROKEN").assert_code(0).out
    again = everbeat("dead", "redrive", str(failed), str(late), "--json").assert_code(0).document
    assert [task["state"] for task in again["tasks"]] == ["PENDING", "PENDING"]
    assert app.dead() == []
    assert everbeat("dead", "redrive", str(failed)).code != 0
    assert "No matching tasks" in everbeat("dead").assert_code(0).out + everbeat("dead").err
