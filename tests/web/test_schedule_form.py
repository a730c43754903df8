"""Schedules that are made and edited on a page: checked as by the app, previewed with their next ticks, and noted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from everbeat import App, Schedule
from everbeat.domain.schedule.inspection import ScheduleInfo
from everbeat.domain.schedule.options import rule_of
from everbeat.domain.schedule.timing import in_words, parse_timing
from everbeat.errors import ConfigurationError
from everbeat.store.target import Target
from everbeat.web.requests import FormFields
from everbeat.web.schedule_fields import ScheduleFields
from tests.store.scheduling import put
from tests.web.browser import BrowserThread, accessibility_problems, dashboard_process
from tests.web.conftest import NewVisitor, Visitor, Workers
from tests.web.test_every_page import sideways

FORM, PUT = "/schedule-form", "/schedules/put"
NIGHTLY = {
    "name": "digest/42", "task": "charge", "arguments": '{"order": "o-1", "card": "4711"}', "queue": "mail", "cron": "30 2 * * *",
    "timezone": "Europe/Berlin", "overlap": "skip", "note": "asked by ann",
}  # fmt: skip


def hidden(page: str) -> dict[str, str]:
    """Return the fields of the form that saves what the page shows."""
    (form,) = re.findall(r'action="/schedules/put">(.*?)</form>', page, re.DOTALL)
    pairs = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form)
    return {name: unescape(value) for name, value in pairs}


async def editing(visitor: Visitor, name: str) -> dict[str, Any]:
    """Return the fields with which the form of a schedule is filled."""
    found = await visitor.json(FORM, name=name)
    return {**found["fields"], "seen": found["seen"]}


async def test_a_schedule_is_previewed_with_its_next_ticks_saved_and_noted(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("admin")
    assert f'href="{FORM}"' in (await visitor.get("/schedules")).text
    assert "<option>charge</option>" in (await visitor.get(FORM)).text
    page = (await visitor.post(FORM, **NIGHTLY)).text
    assert "<h1>Save digest/42?</h1>" in page
    assert "At 02:30 every day, in Europe/Berlin" in page
    shown = re.findall(r"<div>(\w{3} [-\d]{10} 02:30:00 CES?T|\w{3} [-\d]{10} 03:00:00 CEST)</div>", page)
    assert len(shown) == 5
    assert await app.alist_schedules() == [], "a preview stores nothing"
    assert "The schedule digest/42 is made." in await visitor.act(PUT, **hidden(page))
    found = await app.aschedule_info("digest/42")
    assert (found.task, found.arguments, found.queue, found.note) == (
        "charge", {"order": "o-1", "card": "4711"}, "mail", "asked by ann",
    )  # fmt: skip
    assert found.rule == rule_of(
        {"cron": "30 2 * * *", "timezone": "Europe/Berlin", "overlap": "skip"}, "Schedule"
    )
    coming = await app.anext_ticks("digest/42", 5)
    assert [f"{tick.astimezone(UTC):%F}" for tick in coming] == [f"{tick:%F}" for tick in coming]
    assert len({text[4:14] for text in shown} | {f"{tick:%F}" for tick in coming}) <= 6
    (entry,) = await app.aaudit_log()
    assert (entry.action, entry.actor, entry.origin, entry.target) == (
        "put_schedule", "admin-user", "web", "digest/42",
    )  # fmt: skip


async def test_the_previewed_ticks_are_those_of_the_saved_schedule(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("admin")
    headers = {**visitor.headers, "accept": "application/json", "authorization": "Bearer x"}
    given = {"name": "new", "task": "charge", "arguments": {"order": "1"}, "cron": ["0 3 * * *", "0 5 * * 1"]}

    async def send(path: str, body: Mapping[str, Any]) -> Any:
        return (await visitor.client.post(path, headers=headers, json=body)).json()

    preview = await send(FORM, given)
    assert preview["when"] == "At 03:00 every day; at 05:00 on Monday, in UTC"
    assert (preview["begins_anew"], preview["mistakes"]) == (True, [])
    stored = await send(PUT, given)
    assert stored["schedule"]["name"] == "new"
    assert [f"{tick:%FT%TZ}" for tick in await app.anext_ticks("new", 5)] == preview["next_ticks"]
    again = await send(FORM, {**await editing(visitor, "new"), "note": "other"})
    assert again["begins_anew"] is False
    assert again["next_ticks"] == preview["next_ticks"]
    at = {"every": "", "cron": "", "timezone": "", "at": ["2130-01-01T00:00Z", "2131-01-01"]}
    other = await send(FORM, {**await editing(visitor, "new"), **at})
    assert (other["begins_anew"], other["next_ticks"]) == (
        True,
        ["2130-01-01T00:00:00Z", "2131-01-01T00:00:00Z"],
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"cron": "61 * * * *"}, "is not a usable cron expression"),
        ({"cron": "@dayly"}, "write &#39;@daily&#39;"),
        ({"cron": ""}, "a schedule needs exactly one of cron, every and at"),
        ({"every": "1h"}, "a schedule needs exactly one of cron, every and at"),
        ({"timezone": "Europe/Berlyn"}, "Europe/Berlin"),
        ({"arguments": "{"}, "is not JSON"),
        ({"arguments": "[1]"}, "not a mapping"),
        ({"arguments": '{"nothing": 1}'}, "has no parameter &#39;nothing&#39;"),
        ({"queue": "a b"}, "letters, digits, dots"),
        ({"priority": "high"}, "priority"),
        ({"starts": "soon"}, "is not a time"),
        ({"starts": "2130-01-02", "ends": "2130-01-01"}, "must be after starts"),
        ({"most": "5"}, "limits the missed ticks"),
        ({"most_runs": "9" * 5000}, "most_runs"),
        ({"missed": "never"}, "latest"),
        ({"jitter": "25h"}, "must be"),
        ({"name": "a b"}, "printable characters without spaces"),
        ({"task": "unknown"}, "does not declare the task"),
        ({"note": "a\u202eb"}, "has control or format characters"),
        ({"note": "n" * 1001}, "1 to 1,000 printable characters"),
    ],
)
async def test_a_schedule_that_the_app_refuses_is_shown_with_the_mistake_and_not_saved(
    app: App, workers: Workers, new_visitor: NewVisitor, wrong: dict[str, str], told: str
) -> None:
    visitor = new_visitor("admin")
    given = {**NIGHTLY, **wrong}
    answer = await visitor.post(FORM, **given)
    assert (answer.status_code, told in answer.text) == (400, True), answer.text
    assert "Next five ticks" not in answer.text
    saved = await visitor.post(PUT, **given)
    assert (saved.status_code, "Nothing was saved" in saved.text) == (400, True), saved.text
    assert await app.alist_schedules() == []


async def test_all_mistakes_are_listed_and_the_fields_keep_their_texts(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    given = {**NIGHTLY, "cron": "61 * * * *", "timezone": "Nowhere", "jitter": "x", "arguments": '{"a": 1}'}
    answer = await new_visitor("admin").post(FORM, **given)
    assert "<h1>4 mistakes prevent saving</h1>" in answer.text
    for text in (
        ">61 * * * *</textarea>",
        'value="Nowhere"',
        'value="x"',
        "{&#34;a&#34;: 1}</textarea>",
        '<details class="more" open>',
    ):
        assert text in answer.text, text


async def test_an_edit_keeps_what_the_form_does_not_contain_and_says_what_it_replaces(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    @app.task(name="report", serial=True)
    async def report(kind: str = "sales") -> None: ...

    call = report.with_options(labels={"tenant": "acme"}, serial="line-7", key="k", priority=5).call("costs")
    await app.aput_schedule(Schedule("kept", call, every="90m", offset="5m", expires="30m"))
    timed = report.with_options(timeout="5s").call()
    await app.aput_schedule(Schedule("timed", timed, at=datetime(2130, 1, 1, tzinfo=UTC)))
    visitor = new_visitor("admin")
    assert f'href="{FORM}?name=kept"' in (await visitor.get("/schedules/kept")).text
    before = await stored(workers, "kept")
    page = (await visitor.post(FORM, **{**await editing(visitor, "kept"), "note": "later"})).text
    assert "It continues where it was." in page
    assert "Those of the app replace them" not in page
    assert "The schedule kept is changed." in await visitor.act(PUT, **hidden(page))
    after = await stored(workers, "kept")
    assert after == {**before, "note": "later"}
    page = (await visitor.post(FORM, **{**await editing(visitor, "timed"), "note": "later"})).text
    assert "does not contain the retries, timeouts and crash rules of its task" in page
    same = (await visitor.post(FORM, **await editing(visitor, "kept"))).text
    assert "<h1>Nothing about kept would change</h1>" in same
    emptied = {**await editing(visitor, "kept"), "key": "", "note": "", "expires": ""}
    page = (await visitor.post(FORM, **emptied)).text
    await visitor.act(PUT, **hidden(page))
    assert await stored(workers, "kept") == {**before, "key": None, "expires_ms": None}


async def stored(workers: Workers, name: str) -> dict[str, Any]:
    """Return the columns of a schedule that its definition sets."""
    columns = (
        "task", "args::text", "queue", "priority", "key", "policy::text", "flags::text", "serial", "expires_ms", "timing::text",
        "overlap", "missed", "note", "labels", "gates", "costs",
    )  # fmt: skip
    text = f"select {', '.join(columns)} from {{schema}}.schedules where name = %s"
    row = workers.db.connection.execute(workers.db.plain(text), [name]).fetchone()
    assert row is not None
    return dict(zip((each.partition(":")[0] for each in columns), row, strict=True))


async def test_two_operators_do_not_overwrite_each_other(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("admin")
    assert (await visitor.post(PUT, **NIGHTLY)).status_code == 303
    fields = await editing(visitor, "digest/42")
    second = await visitor.post(FORM, **{**NIGHTLY, "cron": "0 * * * *"})
    assert (second.status_code, "There is a schedule" in second.text) == (400, True)
    assert ">0 * * * *</textarea>" in second.text, "what was typed is not lost"
    assert (await visitor.post(PUT, **{**NIGHTLY, "cron": "0 * * * *"})).status_code == 409
    await app.apause_schedule("digest/42")
    for path in (FORM, PUT):
        late = await visitor.post(path, **{**fields, "cron": "0 * * * *"})
        assert (late.status_code, "was changed after this form was opened" in late.text) == (409, True)
    rule = (await app.aschedule_info("digest/42")).rule
    assert rule is not None
    assert rule.timing.cron == ("30 2 * * *",)


async def test_a_schedule_of_the_code_says_that_it_is_changed_in_the_code(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    put(workers.db, "declared", call={"task": "charge"})
    workers.db.connection.execute(workers.db.plain("update {schema}.schedules set owner = 'shop'"))
    visitor = new_visitor("admin")
    page = (await visitor.get("/schedules/declared")).text
    assert "change the code and restart the workers" in page
    assert "/schedule-form" not in page
    for answer in (
        await visitor.get(FORM, name="declared"),
        await visitor.post(FORM, **{**NIGHTLY, "name": "declared", "seen": "x"}),
        await visitor.post(PUT, **{**NIGHTLY, "name": "declared", "seen": "x"}),
    ):
        assert (answer.status_code, "only that code can change it" in answer.text) == (409, True)


async def test_hidden_arguments_and_unknown_tasks_are_not_edited(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    put(workers.db, "foreign", call={"task": "elsewhere"})
    assert (await new_visitor("admin").post(PUT, **NIGHTLY)).status_code == 303
    blind = new_visitor("admin", hide=["*:card"])
    answer = await blind.get(FORM, name="digest/42")
    assert (answer.status_code, "are hidden" in answer.text, "4711" in answer.text) == (409, True, False)
    foreign = await blind.get(FORM, name="foreign")
    assert (foreign.status_code, "everbeat web shop:app" in foreign.text) == (409, True)
    assert (await blind.get(FORM, name="none")).status_code == 404
    for role in ("see", "read", "operate"):
        visitor = new_visitor(role)
        assert (await visitor.get(FORM)).status_code == 403
        assert FORM not in (await visitor.get("/schedules")).text
        assert FORM not in (await visitor.get("/schedules/digest/42")).text
    fixed = new_visitor("admin", read_only=True)
    assert "Save it" not in (await fixed.post(FORM, **{**NIGHTLY, "name": "other"})).text
    assert FORM not in (await fixed.get("/schedules")).text


AT = datetime(2130, 1, 31, 12, 0, 0, 123_000, tzinfo=UTC)
RULES: tuple[dict[str, Any], ...] = (
    {"cron": "30 2 * * *"},
    {"cron": ["0 9 * * 1-5", "*/7 11 * * 6"], "timezone": "America/New_York", "missed": "all", "most": 7},
    {"every": "90s", "offset": 1.5, "jitter": "250ms", "catchup_window": "36h", "overlap": "cancel_other"},
    {"every": "24h", "starts": AT, "ends": AT + timedelta(days=1), "most_runs": 3, "pause_after_failures": 2},
    {"at": [AT, AT + timedelta(seconds=1)], "expires": "90m", "missed": "skip", "overlap": "buffer_one"},
)


@pytest.mark.parametrize("given", RULES)
def test_the_fields_of_a_stored_schedule_describe_the_same_schedule(given: dict[str, Any]) -> None:
    rule = rule_of(given, "Schedule")
    info = ScheduleInfo(
        name="s", state="ACTIVE", task="t", arguments={"a": [1, "é"]}, queue="q", priority=-3, key="k", serial=None, rule=rule,
        note="n", owner=None, created_at=AT, changed_at=AT, decided_to=AT, next_at=None, runs=0, paused_at=None, paused_by=None,
        pause_reason=None, resume_at=None, retired_at=None, retired_because=None, ended_at=None, held_until=None, held_because=None,
        at=AT, last_tick=None,
    )  # fmt: skip
    fields = ScheduleFields.of_info(info)
    again = ScheduleFields.read(FormFields({name: [text] for name, text in fields.values.items()}))
    options: dict[str, Any] = {**again.options()}
    assert options.pop("note") == "n"
    assert rule_of(options, "Schedule") == rule
    assert again.arguments() == info.arguments
    assert again.send_options() == {"queue": "q", "priority": -3, "key": "k"}
    assert again.changes(fields) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cron": "*/15 8-18 * * 1-5", "timezone": "Europe/Berlin"},
         "Every 15th minute from 08:00 through 18:59 on Monday through Friday, in Europe/Berlin"),
        ({"cron": ["0 23 L * *", "0 9 * * 5#2"]}, "At 23:00 on the last day of every month; at 09:00 on the second Friday of the month, in UTC"),
        ({"cron": "*/10 * * * * *"}, "Every 10th second of every minute, in UTC"),
        ({"every": "1h", "offset": "5m"}, "Every 1h plus 5m"),
        ({"at": AT}, "At 2130-01-31 12:00:00+00:00"),
    ],
)  # fmt: skip
def test_a_timing_is_described_in_words(given: dict[str, Any], words: str) -> None:
    every: dict[str, Any] = dict.fromkeys(("cron", "every", "offset", "at", "timezone"))
    assert in_words(parse_timing(**{**every, **given}, subject="s")) == words


def test_an_expression_that_is_accepted_has_words() -> None:
    fields = ("*", "0", "*/7", "1-5", "3,5", "2-20/3", "L", "5#2", "MON", "JAN")
    accepted = 0
    for number in range(3_000):
        parts = [
            fields[(number * 7 + place * number // 3 + place) % len(fields)]
            for place in range(5 + number % 2)
        ]
        try:
            timing = parse_timing(
                cron=" ".join(parts), every=None, offset=None, at=None, timezone=None, subject="s"
            )
        except ConfigurationError:
            continue
        accepted += 1
        assert in_words(timing).endswith(", in UTC")
    assert accepted > 50


@pytest.mark.xdist_group("browser")
def test_the_form_in_a_browser_is_accessible_and_fits(
    browser: BrowserThread, migrated: Target, tmp_path: Path
) -> None:  # O1
    async def check(address: str) -> None:
        async with browser.observed(f"{address}/schedules") as seen:
            page = seen.page
            await page.click("a:has-text('New schedule')")
            await page.fill("input[name=name]", "hours")
            await page.fill("textarea[name=cron]", "61 * * * *")
            await page.keyboard.press("Tab")
            await page.click("button:has-text('Show the next ticks')")
            await page.wait_for_selector("text=1 mistake prevents saving")
            assert await accessibility_problems(page) == []
            assert await sideways(seen, 360) is None
            assert "400" in seen.console.pop()
            await page.fill("textarea[name=cron]", "0 * * * *\n30 2 * * *")
            await page.press("input[name=every]", "Enter")
            await page.wait_for_selector("text=Save hours?")
            await page.emulate_media(color_scheme="dark")
            assert await accessibility_problems(page) == []
            assert await sideways(seen, 360) is None
            assert await page.locator("li:has-text('UTC')").count() >= 5
            await page.click("button:has-text('Save it')")
            await page.wait_for_selector("text=The schedule hours is made.")
            await page.click("a:has-text('Edit')")
            assert await page.input_value("textarea[name=cron]") == "0 * * * *\n30 2 * * *"
            seen.check()

    with dashboard_process(migrated, log=tmp_path / "web.log", locator="tests.web.shop:app") as served:
        browser.run(check(served.address))
