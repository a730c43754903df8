"""The as-of view: the trees, attempts, recoveries, queues and settings of a past moment, and that a page of the past says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote

import pytest

from everbeat import App
from everbeat.store import past
from everbeat.web.moments import read_moment, steps_around, written
from tests.web.browser import BrowserThread
from tests.web.conftest import NewVisitor, Workers
from tests.web.installations import Installation

PAGES = ("/pulse", "/workers", "/recoveries", "/queues")
LIVED = """
update {schema}.supervisors set started_at = now() - interval '1 hour', beat_ms = 10000;
update {schema}.workers set started_at = now() - interval '1 hour';
insert into {schema}.beats (supervisor_id, seq, sent_at, held)
select 's1', n, now() - interval '20 minutes' + n * interval '10 seconds', 1 from generate_series(1, 60) n
"""
DIED = """
update {schema}.supervisors set ended_at = now() - interval '9 minutes', ended_how = 'session' where id = 's1';
update {schema}.workers set ended_at = now() - interval '9 minutes', ended_how = 'session' where supervisor_id = 's1'
"""
RECOVERED = """
update {schema}.recoveries
set noticed_at = now() - interval '9 minutes', noticed_after_ms = 60000, last_beat_at = now() - interval '10 minutes', certificate = null;
update {schema}.attempts set started_at = now() - interval '15 minutes', ended_at = now() - interval '9 minutes';
update {schema}.beats set sent_at = sent_at where sent_at > now() - interval '10 minutes'
"""


def change(workers: Workers, text: str) -> None:
    for each in text.split(";"):
        workers.db.connection.execute(workers.db.plain(each))


def ago(workers: Workers, **span: float) -> datetime:
    found = workers.db.connection.execute("select statement_timestamp()").fetchone()
    assert found is not None
    moment: datetime = found[0] - timedelta(**span)
    return moment


def next_millisecond(workers: Workers) -> None:
    """Return in a later millisecond of the server's clock, because addresses have only milliseconds."""
    workers.db.connection.execute("select pg_sleep(0.002)")


@pytest.fixture
def story(workers: Workers) -> tuple[Workers, Any]:
    """Return workers whose tree died ten minutes ago, which was noticed a minute later, and the attempt that died with it."""
    held = workers.start()
    (lease,) = workers.db.leases()
    workers.db.recover(lease, "retry", noticed_by="session")
    change(workers, LIVED)
    change(workers, DIED)
    change(workers, RECOVERED)
    return workers, held


def states(document: Any) -> dict[str, str]:
    return {tree["supervisor_id"]: tree["state"] for tree in document["trees"]}


async def test_a_dead_tree_lives_before_its_death_and_is_dead_after_its_notice(
    story: tuple[Workers, Any], new_visitor: NewVisitor
) -> None:
    workers, held = story
    visitor = new_visitor("see")
    before = await visitor.json("/pulse", at=written(ago(workers, minutes=12)))
    assert states(before) == {"s1": "beats"}
    assert [run["task_id"] for run in before["runs"]] == [str(held.id)]
    assert before["runs"][0]["outcome"] in ("CRASHED", "LOST")
    assert before["incidents"] == []
    assert before["dead_but_not_noticed"] == []
    after = await visitor.json("/pulse", at=written(ago(workers, minutes=8)))
    assert states(after) == {"s1": "dead"}
    assert after["runs"] == []
    assert [each["id"] for each in after["incidents"]] == ["s1"]
    tree = before["trees"][0]
    assert datetime.fromisoformat(tree["last_beat_at"]) <= ago(workers, minutes=12)
    assert tree["ended_at"] is None


async def test_between_death_and_notice_the_page_says_that_the_death_was_noticed_later(
    story: tuple[Workers, Any], new_visitor: NewVisitor
) -> None:
    workers, _ = story
    visitor = new_visitor("see")
    at = written(ago(workers, minutes=9, seconds=40))
    found = await visitor.json("/pulse", at=at)
    assert found["dead_but_not_noticed"] == ["s1"]
    assert states(found)["s1"] == "late"
    page = (await visitor.get("/pulse", at=at)).text
    assert re.search(r"host died 20 s before, and it was noticed 40 s later by session", page)


async def test_workers_and_recoveries_of_the_past(
    story: tuple[Workers, Any], new_visitor: NewVisitor
) -> None:
    workers, _ = story
    visitor = new_visitor("see")
    before, after = written(ago(workers, minutes=12)), written(ago(workers, minutes=8))
    (tree,) = (await visitor.json("/workers", at=before))["trees"]
    assert {worker["id"]: worker["running"] for worker in tree["workers"]} == {"w1": 1, "w2": 0}
    gone = await visitor.json("/workers", at=after)
    assert gone["trees"] == []
    assert [each["id"] for each in gone["departed"]] == ["s1"]
    assert (await visitor.json("/workers", at=before))["departed"] == []
    assert (await visitor.json("/recoveries", at=before))["incidents"] == []
    (incident,) = (await visitor.json("/recoveries", at=after))["incidents"]
    assert (incident["id"], incident["waiting"]) == ("s1", 1)


async def test_a_recovery_shows_only_what_was_known_then(workers: Workers, new_visitor: NewVisitor) -> None:
    workers.start()
    (lease,) = workers.db.leases()
    workers.db.recover(lease, "requeue", noticed_by="session")
    (again,) = workers.db.claim("w2", names=("charge",))
    workers.db.start(again)
    workers.db.settle(again, "COMPLETED")
    change(workers, "update {schema}.recoveries set noticed_at = now() - interval '5 minutes'")
    visitor = new_visitor("read")
    (then,) = (await visitor.json("/recoveries", at=written(ago(workers, minutes=4))))["incidents"]
    (now,) = (await visitor.json("/recoveries"))["incidents"]
    assert (then["waiting"], now["waiting"]) == (1, 0)
    assert then["running_again_after_s"] is None
    assert now["running_again_after_s"] is not None


async def test_queues_of_the_past_show_the_sample_before_and_what_operators_had_set(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.send(queue="mail")
    visitor = new_visitor("operate")
    await visitor.post("/queues/pause", name="mail", reason="stop")
    change(workers, "update {schema}.audit_log set at = now() - interval '10 minutes'")
    await visitor.post("/queues/resume", name="mail")
    change(
        workers,
        "insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)"
        " select 60, now() - n * interval '1 minute', 'mail', n, 0, 0, 0, 0, 1, '{{}}' from generate_series(1, 20) n",
    )
    found = await visitor.json("/queues", at=written(ago(workers, minutes=4, seconds=30)))
    assert [(each["queue"], each["due"]) for each in found["depths"]] == [("mail", 5)]
    assert [each["target"] for each in found["settings"]] == ["queue mail"]
    assert (await visitor.json("/queues", at=written(ago(workers, minutes=12))))["settings"] == []
    change(workers, "update {schema}.audit_log set at = now() - interval '2 minutes' where action = 'resume'")
    assert (await visitor.json("/queues", at=written(ago(workers, minutes=1))))["settings"] == []
    page = (await visitor.get("/queues", at=written(ago(workers, minutes=4)))).text
    assert "paused by operate-user: stop" in page


async def test_an_incident_leads_to_its_moments_and_its_report_has_the_numbers_around_it(
    story: tuple[Workers, Any], new_visitor: NewVisitor
) -> None:
    workers, _ = story
    change(
        workers,
        "insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)"
        " select 60, now() - n * interval '1 minute', 'mail', n, 0, 0, 0, 0, 1, '{{}}' from generate_series(1, 40) n",
    )
    reader = new_visitor("read")
    page = (await reader.get("/recoveries")).text
    (before,) = re.findall(r'href="/pulse\?at=([^"]*)">just before<', page)
    then = await reader.json("/pulse", at=unquote(before))
    assert states(then) == {"s1": "beats"}
    export = await reader.get("/recoveries/export", incident="s1")
    assert "## Timeline" in export.text
    document = await reader.json("/recoveries/export", incident="s1", **{"as": "json"})
    points = document["around"]["points"]
    assert 19 <= len(points) <= 21
    assert all(point["due"] for point in points[:-1])
    past_export = await reader.get("/recoveries/export", incident="s1", at=written(ago(workers, minutes=8)))
    assert past_export.text.startswith("# host died")
    unknown = await reader.get("/recoveries/export", incident="s1", at=written(ago(workers, minutes=12)))
    assert unknown.status_code == 404


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_of_the_past_says_so_offers_no_action_and_leads_back(
    story: tuple[Workers, Any], new_visitor: NewVisitor, path: str
) -> None:
    workers, _ = story
    visitor = new_visitor("admin")
    at = written(ago(workers, minutes=12))
    page = (await visitor.get(path, at=at)).text
    assert "This page shows the past" in page
    assert re.findall(r'<form[^>]*method="post"[^>]*action="([^"]*)"', page) == ["/preferences"]
    assert "data-live=" not in page
    assert re.search(rf'href="{path}">Back to now</a>', page)
    assert re.search(r'href="/workers\?at=[^"]*"', page), "the navigation stays in the past"
    assert (await visitor.json(path, at=at))["as_of"].startswith(at[:19])
    assert "This page shows the past" not in (await visitor.get(path)).text


@pytest.mark.parametrize(
    ("text", "code"),
    [("nonsense", "WRONG_FORM"), ("0001-01-01", "WRONG_FORM"), ("2999-01-01", "OUT_OF_RANGE")],
)
async def test_a_moment_that_is_none_or_lies_ahead_is_refused(
    workers: Workers, new_visitor: NewVisitor, text: str, code: str
) -> None:
    assert (await new_visitor("see").json("/pulse", at=text, status=400))["error"]["code"] == code


async def test_what_is_not_kept_that_far_back_is_named(workers: Workers, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("see")
    found = await visitor.json("/pulse", at=written(ago(workers, days=40)))
    assert [each.partition(" (")[0] for each in found["not_kept"]] == [
        "heartbeats", "snapshots of workers and their records", "ended tasks and recoveries", "rates and depths",
    ]  # fmt: skip
    assert (
        "Not kept that far back: heartbeats (kept for 24 h)"
        in (await visitor.get("/pulse", at=written(ago(workers, days=2)))).text
    )


def test_runs_at_a_moment_are_long_ones_short_ones_and_those_that_still_run(workers: Workers) -> None:
    db = workers.db
    ended = {name: workers.start(name) for name in ("long", "short", "over", "later")}
    for claimed in ended.values():
        db.settle(claimed, "COMPLETED")
    running = workers.start("live")
    at = ago(workers, minutes=5)
    spans = {"long": (-60, 60), "short": (-0.2, 0.3), "over": (-1.0, -0.1), "later": (0.1, 2.0)}
    for name, (begun, done) in spans.items():
        db.connection.execute(
            db.plain("update {schema}.attempts set started_at = %s, ended_at = %s where task_id = %s"),
            [at + timedelta(seconds=begun), at + timedelta(seconds=done), ended[name].id],
        )
    db.connection.execute(
        db.plain("update {schema}.tasks set started_at = %s where id = %s"),
        [at - timedelta(seconds=1), running.id],
    )
    found = db.run(past.runs(at, limit=10))
    assert {run.name: run.outcome for run in found} == {
        "long": "COMPLETED",
        "short": "COMPLETED",
        "live": None,
    }
    assert [run.name for run in found] == ["long", "live", "short"]
    assert len(db.run(past.runs(at, limit=2))) == 2


def test_an_attempt_with_values_that_another_program_wrote_does_not_fail_the_write(workers: Workers) -> None:
    db = workers.db
    claimed = workers.start()
    db.settle(claimed, "COMPLETED")
    for begun, done in (
        ("-infinity", "infinity"), ("infinity", "-infinity"), ("4713-01-01 BC", "294276-01-01"), ("2026-01-02", "2026-01-01"),
    ):  # fmt: skip
        db.connection.execute(
            db.plain("update {schema}.attempts set started_at = %s, ended_at = %s"), [begun, done]
        )
        assert db.run(past.runs(ago(workers, minutes=1), limit=5)) == []


def test_moments_are_read_in_utc_and_written_as_an_address() -> None:
    at = datetime(2026, 11, 29, 14, 3, 20, tzinfo=UTC)
    for text in ("2026-11-29T14:03:20Z", "2026-11-29 14:03:20", "2026-11-29T15:03:20+01:00", written(at)):
        assert read_moment(text) == at
    assert read_moment("14:03") is None
    assert [words for words, _ in steps_around(at, now=at + timedelta(seconds=30))] == [
        "−5 m",
        "−1 m",
        "−10 s",
        "+10 s",
    ]


async def test_a_tree_whose_heartbeats_are_not_kept_is_not_said_to_beat(
    story: tuple[Workers, Any], new_visitor: NewVisitor
) -> None:
    workers, _ = story
    change(workers, "delete from {schema}.beats where sent_at < now() - interval '11 minutes'")
    visitor = new_visitor("see")
    at = written(ago(workers, minutes=14))
    found = await visitor.json("/pulse", at=at)
    assert states(found) == {"s1": "unknown"}
    (tree,) = found["trees"]
    assert (tree["silent_s"], tree["last_beat_at"]) == (None, None)
    assert found["says"].startswith("1 tree lived whose heartbeats are not kept; 1 attempt ran")
    for path in ("/pulse", "/workers"):
        page = (await visitor.get(path, at=at)).text
        main = page.partition("<main")[2]
        assert not re.search(
            r"[1-9] trees? beat|beats,|beats every|>beats<|</svg>live<|trees beat|only tree", main
        ), path
        assert "heartbeats are not kept" in main
    kept = await visitor.json("/workers", at=written(ago(workers, minutes=10, seconds=30)))
    assert states(kept) == {"s1": "beats"}


async def test_a_limit_that_an_operator_set_for_a_time_is_not_shown_after_it(
    workers: Workers, app: App, new_visitor: NewVisitor
) -> None:
    workers.db.connection.execute(
        workers.db.plain("insert into {schema}.limits (name, concurrency) values ('api', 5)")
    )
    visitor = new_visitor("admin")
    assert (await visitor.post("/limits/set", name="api", concurrency="2", until="2h")).status_code == 303
    change(
        workers,
        "update {schema}.audit_log set at = now() - interval '10 hours', note = replace(note, substring(note from 'until=([^,]*)'),"
        " to_char((now() - interval '8 hours') at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"+00:00\"'))",
    )
    during = (await visitor.json("/queues", at=written(ago(workers, hours=9))))["settings"]
    after = (await visitor.json("/queues", at=written(ago(workers, hours=7))))["settings"]
    assert ([each["target"] for each in during], after) == (["api"], [])


@contextmanager
def out_of_reach(workers: Workers, table: str) -> Iterator[None]:
    """Rename a table, so that the parts of a page that read it fail as they do if the database cancels their statements."""
    workers.db.connection.execute(workers.db.plain(f"alter table {{schema}}.{table} rename to moved_away"))
    try:
        yield
    finally:
        workers.db.connection.execute(
            workers.db.plain(f"alter table {{schema}}.moved_away rename to {table}")
        )


CALM = r"No worker died|No worker has ended|No death was noticed|No worker tree|No queue|0 attempts ran|nothing is overdue"


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ("recoveries", "/recoveries"),
        ("recoveries", "/pulse"),
        ("attempts", "/pulse"),
        ("supervisors", "/pulse"),
        ("supervisors", "/workers"),
        ("depths", "/queues"),
    ],
)
async def test_a_part_of_the_past_that_cannot_be_read_is_not_said_to_have_been_empty(
    story: tuple[Workers, Any], new_visitor: NewVisitor, table: str, path: str
) -> None:
    workers, _ = story
    visitor = new_visitor("see")
    at = written(ago(workers, minutes=12))
    with out_of_reach(workers, table):
        found = await visitor.json(path, at=at)
        page = (await visitor.get(path, at=at)).text
    assert found["missing"], found
    assert not re.search(CALM, found["says"]), found["says"]
    assert not re.search(CALM, page.partition("<main")[2])
    assert "could not be read" in page


async def test_incidents_of_the_present_that_cannot_be_read_are_not_said_to_be_none(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("see")
    assert "No worker died" in (await visitor.json("/recoveries"))["says"]
    blind = new_visitor("see")
    workers.db.connection.execute(
        workers.db.plain("alter table {schema}.recoveries rename column hook to moved_away")
    )
    for path in ("/pulse", "/recoveries"):
        found = await blind.json(path)
        assert [each["part"] for each in found["missing"]] == ["The incidents"]
        assert not re.search(CALM, found["says"]), found["says"]
        page = (await blind.get(path)).text
        assert not re.search(CALM, page.partition("<main")[2]), path
    workers.db.connection.execute(
        workers.db.plain("alter table {schema}.recoveries rename column moved_away to hook")
    )


async def test_what_is_not_kept_is_not_said_to_have_been_empty(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("see")
    at = written(ago(workers, days=40))
    for path in ("/pulse", "/recoveries"):
        says = (await visitor.json(path, at=at))["says"]
        assert re.search("not known", says), says
        assert not re.search("0 attempts ran|No death|No worker died", says)
    recent = (await visitor.json("/recoveries", at=written(ago(workers, hours=1))))["says"]
    assert recent == "No death was noticed in the 24 hours before"


async def test_an_old_sample_of_the_queues_is_not_that_of_the_moment(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    change(
        workers,
        "insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)"
        " values (60, now() - interval '60 minutes', 'mail', 5, 0, 0, 0, 0, 1, '{{}}')",
    )
    visitor = new_visitor("see")
    then = written(ago(workers, minutes=20))
    says = (await visitor.json("/queues", at=then))["says"]
    assert re.fullmatch(r"5 tasks were due, in 1 queue, 40 m( \d+ s)? before", says)


@pytest.mark.xdist_group("browser")
def test_what_became_of_a_run_is_one_line_on_one_baseline(browser: BrowserThread, full: Installation) -> None:
    run = full.workers.start("ran.then")
    next_millisecond(full.workers)
    at = ago(full.workers, seconds=0)
    next_millisecond(full.workers)
    full.workers.db.settle(run, "FAILED", error=b'{"code": "BROKEN", "message": "no"}')

    async def check() -> None:
        async with browser.observed(f"{full.address}/pulse?at={written(at)}") as seen:
            for width in (1280, 700, 360):
                await seen.page.set_viewport_size({"width": width, "height": 900})
                lines, apart = await seen.page.evaluate(_LINES, f"[data-run='{run.id}'] .fate")
                assert lines == 1, f"{width} px: the words wrap"
                assert apart < 1, f"{width} px: the words are {apart} px from the baseline of the state"

    browser.run(check())


_LINES = """(selector) => {
  const fate = document.querySelector(selector), boxes = [];
  for (const part of [fate.children[0].lastChild, fate.lastChild.firstChild]) {
    const range = document.createRange();
    range.selectNodeContents(part);
    boxes.push(...range.getClientRects());
  }
  return [boxes.length - 1, Math.abs(boxes[0].bottom - boxes[1].bottom)];
}"""
