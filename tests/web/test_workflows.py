"""The pages of workflows and schedules: lists, graph, reasons, marks of ticks, and actions."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import parse_qsl
from uuid import uuid4

import pytest

from everbeat import App, Schedule, TaskError, Workflow
from everbeat.domain.schedule.inspection import TickInfo
from everbeat.domain.workflow.graph import Edge
from everbeat.web.pages.schedules import marks_of
from everbeat.web.tick_drawing import tick_row
from tests.client.working import working
from tests.store.flows import task as node
from tests.web.browser import BrowserThread, accessibility_problems
from tests.web.conftest import NewVisitor, Workers
from tests.web.installations import Installation
from tests.web.test_every_page import sideways
from tests.workflows.sent import sent

SECRET = "4242-secret-4242"


async def test_the_list_and_the_page_of_a_workflow(app: App, new_visitor: NewVisitor) -> None:
    @app.task(name="pack")
    async def pack(order: str) -> str:
        return order

    @app.task(name="tell")
    async def tell(text: str) -> None: ...

    wf = app.workflow("order<b>", labels={"tenant": "acme"})
    packed = wf.add(pack, "o-1").named("packed")
    wf.add(tell, packed.result).named("told")
    handle = await wf.astart(output=packed)
    async with working(app):
        await handle.aoutcome(timeout="30s")
    visitor = new_visitor("operate")
    page = (await visitor.get("/workflows")).text
    assert "order&lt;b&gt;" in page
    assert "<b>order" not in page
    assert [each["id"] for each in (await visitor.json("/workflows", label="tenant=acme"))["workflows"]] == [
        str(handle.id)
    ]
    assert (await visitor.json("/workflows", state="FAILED"))["workflows"] == []
    assert (await visitor.get("/workflows", state="nonsense")).status_code == 400
    page = (await visitor.get(f"/workflows/{handle.id}")).text
    assert page.count("<rect") >= 3, "two boxes and a lane"
    assert "<style" not in page
    nodes = {node.name: node for node in await handle.anodes()}
    assert f'<a href="/tasks/{nodes["packed"].task_id}">' in page
    document = await visitor.json(f"/workflows/{handle.id}")
    assert [node["name"] for node in document["nodes"]] == ["packed", "told"]
    assert document["explanation"]["reasons"]
    assert (await visitor.get(f"/workflows/{uuid4()}")).status_code == 404
    again = app.workflow("order")
    again.add(tell, "x")
    handle = await again.astart()
    assert "No more nodes start" in await visitor.act(f"/workflows/{handle.id}/pause")
    assert await handle.astatus() == "PAUSED"
    assert "The workflow continues" in await visitor.act(f"/workflows/{handle.id}/resume")
    await visitor.act(f"/workflows/{handle.id}/cancel")
    assert [(each.action, each.actor, each.origin) for each in await app.aaudit_log()] == [
        (f"{verb}_workflow", "operate-user", "web") for verb in ("cancel", "resume", "pause")
    ]
    assert (await visitor.get("/find", q=str(handle.id))).headers["location"] == f"/workflows/{handle.id}"


async def test_the_older_pages_of_the_list_keep_the_filters_and_end(
    app: App, new_visitor: NewVisitor
) -> None:
    @app.task(name="pack")
    async def pack() -> None: ...

    started = []
    for number in range(5):
        wf = app.workflow("order", labels={"tenant": "acme", "odd": str(number % 2)})
        wf.add(pack)
        started.append(str((await wf.astart()).id))
    visitor = new_visitor("see")
    query, seen = {"limit": "2", "label": "tenant=acme", "until": "0s"}, []
    while True:
        page = (await visitor.get("/workflows", **query)).text
        seen.append(re.findall(r'<a href="/workflows/([0-9a-f-]{36})">', page))
        older = re.findall(r'href="(/workflows\?[^"]*before=[^"]*)"', page)
        assert ("Newest</a>" in page) is (len(seen) > 1), "the way back to the first page"
        if not older:
            break
        query = dict(parse_qsl(unescape(older[0]).partition("?")[2]))
        assert query | {"limit": "2", "label": "tenant=acme", "until": "0s"} == query, (
            "the link keeps the filters"
        )
    assert seen == [started[4:2:-1], started[2:0:-1], started[:1]]
    document = await visitor.json("/workflows", before=started[1], label="odd=0")
    assert [each["id"] for each in document["workflows"]] == started[:1]
    assert (document["examined"], document["continue_before"]) == (None, None)
    assert (await visitor.json("/workflows", before=started[0]))["says"] == "No older workflows"
    assert (await visitor.get("/workflows", before="zz")).status_code == 400


async def test_a_search_that_stops_early_says_so_and_continues(
    app: App, new_visitor: NewVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="pack")
    async def pack() -> None: ...

    started = []
    for name in ("rare", "order", "order", "order"):
        wf = app.workflow(name)
        wf.add(pack)
        started.append(str((await wf.astart()).id))
    monkeypatch.setattr("everbeat.web.pages.workflows.MOST_EXAMINED", 2)
    visitor = new_visitor("see")
    document = await visitor.json("/workflows", name="rare")
    assert (document["workflows"], document["examined"]) == ([], 2)
    assert document["says"] == "No workflows match among the 2 newest"
    assert document["continue_before"] == started[2]
    page = (await visitor.get("/workflows", name="rare")).text
    assert f'href="/workflows?before={started[2]}&amp;name=rare"' in page
    assert "Continue with older ones" in page
    rest = await visitor.json("/workflows", name="rare", before=started[2])
    assert [each["id"] for each in rest["workflows"]] == [started[0]]
    assert rest["continue_before"] is None


async def test_the_errors_and_the_result_of_a_workflow_are_hidden_with_those_of_its_tasks(
    app: App, new_visitor: NewVisitor
) -> None:  # O3
    @app.task(name="pack")
    async def pack(order: str) -> str:
        raise TaskError("DECLINED", SECRET, {"order": order})

    wf = app.workflow("order")
    wf.add(pack, SECRET).named("packed")
    handle = await wf.astart()
    async with working(app):
        await handle.aoutcome(timeout="30s")
    (node,) = await handle.anodes()
    paths = ("/workflows", f"/workflows/{handle.id}", f"/tasks/{node.task_id}")
    clear = new_visitor("read")
    assert SECRET in (await clear.get(paths[1])).text
    for visitor in (
        new_visitor("see"),
        new_visitor("admin", hide=["pack"]),
        new_visitor("admin", hide=["p*:order"]),
    ):
        for path in paths:
            page = await visitor.get(path)
            assert page.status_code == 200
            assert SECRET not in page.text, path
            assert SECRET not in json.dumps(await visitor.json(path)), path


async def test_the_error_of_a_workflow_inside_another_one_is_hidden_with_those_of_its_tasks(
    app: App, new_visitor: NewVisitor
) -> None:  # O3
    @app.task(name="pack")
    async def pack(order: str) -> str:
        raise TaskError("DECLINED", SECRET, {"order": order})

    @app.define_workflow("packing")
    def packing(wf: Workflow) -> None:
        wf.add(pack, "o-1")

    wf = app.workflow("order")
    wf.add(packing)
    handle = await wf.astart()
    async with working(app):
        await handle.aoutcome(timeout="30s")
    path = f"/workflows/{handle.id}"
    assert SECRET in (await new_visitor("admin").get(path)).text
    for visitor in (new_visitor("see"), new_visitor("admin", hide=["pack"])):
        assert SECRET not in (await visitor.get(path)).text
        assert SECRET not in json.dumps(await visitor.json(path))


async def test_a_schedule_is_paused_resumed_run_and_deleted(app: App, new_visitor: NewVisitor) -> None:
    @app.task(name="report")
    async def report(kind: str, card: str = "") -> None: ...

    call = report.call("sales", SECRET)
    await app.aput_schedule(Schedule("nightly/eu", call, every="1h"))
    visitor = new_visitor("operate")
    listed = (await visitor.get("/schedules")).text
    assert "1 schedule, none of which missed a tick" in listed
    assert "0 missed; 5 to come" in listed
    coming = (await visitor.json("/schedules"))["next_ticks"]["nightly/eu"]
    assert [datetime.fromisoformat(each) for each in coming] == await app.anext_ticks("nightly/eu", 5)
    assert re.search(r'data-h="Next">in [^<]+<span class="two"><time datetime="' + coming[0][:19], listed)
    assert f"<title>{datetime.fromisoformat(coming[0]):%Y-%m-%d %H:%M:%S} UTC</title>" in listed
    page = (await visitor.get("/schedules/nightly/eu")).text
    assert "Every 1h" in page
    assert SECRET in page
    assert page.count('<use href="#s-scheduled"/></svg><div>') == 5
    document = await visitor.json("/schedules/nightly/eu")
    assert len(document["next_ticks"]) == 5
    assert "is paused" in await visitor.act(
        "/schedules/pause", name="nightly/eu", reason="on leave", until="2h"
    )
    assert (await app.aschedule_info("nightly/eu")).pause_reason == "on leave"
    assert "is resumed" in await visitor.act("/schedules/resume", name="nightly/eu")
    assert "The schedule sent its task" in await visitor.act("/schedules/run", name="nightly/eu")
    assert (await visitor.post("/schedules/delete", name="nightly/eu")).status_code == 403
    for blind in (new_visitor("see"), new_visitor("admin", hide=["report:card"])):
        for path in ("/schedules", "/schedules/nightly/eu"):
            assert SECRET not in (await blind.get(path)).text
            assert SECRET not in json.dumps(await blind.json(path))
    await new_visitor("admin").act("/schedules/delete", name="nightly/eu")
    assert await app.alist_schedules() == []
    assert (await visitor.get("/schedules/nightly/eu")).status_code == 404
    actions = [each.action for each in await app.aaudit_log()]
    assert actions == ["delete_schedule", "run_schedule", "resume_schedule", "pause_schedule"]


async def test_a_backfill_is_counted_confirmed_and_noted(app: App, new_visitor: NewVisitor) -> None:
    @app.task(name="report")
    async def report() -> None: ...

    await app.aput_schedule(Schedule("nightly/eu", report.call(), every="1h", timezone="UTC"))
    visitor = new_visitor("operate")
    path, given = "/schedules/backfill/count", {"name": "nightly/eu", "since": "12h", "overlap": "allow"}
    page = (await visitor.post(path, **given)).text
    assert "<h1>Send 12 ticks of nightly/eu?</h1>" in page
    assert "can all start at once" in page
    assert "2 more ticks" in page
    assert await app.alist_tasks() == [], "a count sends nothing"
    form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))
    assert form["overlap"] == "allow"
    changed = await visitor.post("/schedules/backfill", **{**form, "since": "2d"})
    assert changed.status_code == 409, "the range is not the one that was counted"
    assert await app.alist_tasks() == []
    assert "Sent 12 ticks." in await visitor.act("/schedules/backfill", **form)
    assert len(await app.alist_tasks()) == 12
    again = await new_visitor("operate").post("/schedules/backfill", **form)
    assert (again.status_code, "count them again" in again.text) == (409, True), "another operator sent them"
    assert len(await app.alist_tasks()) == 12
    page = (await visitor.post(path, **given)).text
    assert "Each tick of nightly/eu in this range has a run" in page
    assert "Send nothing" not in page, "there is nothing to confirm"
    (entry,) = await app.aaudit_log()
    assert (entry.action, entry.actor, entry.origin, entry.target, entry.affected) == (
        "backfill_schedule",
        "operate-user",
        "web",
        "nightly/eu",
        12,
    )
    assert (await new_visitor("read").post(path, **given)).status_code == 403
    assert "Backfill" not in (await new_visitor("read").get("/schedules/nightly/eu")).text


@pytest.mark.parametrize(
    ("wrong", "status", "told"),
    [
        ({"since": ""}, 400, "The field &#39;since&#39; is missing"),
        ({"since": "yesterday"}, 400, "yesterday"),
        ({"since": "1h", "until": "2h"}, 400, "must be before until"),
        ({"since": "0001-01-01T00:00+05:00"}, 400, "outside the years"),
        ({"since": "3650d"}, 400, "10,000"),
        ({"since": "1h", "overlap": "skip"}, 400, "buffer_one"),
        ({"since": "1h", "name": "unknown"}, 404, "unknown"),
    ],
)
async def test_a_range_that_cannot_be_backfilled_is_refused_with_the_reason(
    app: App, new_visitor: NewVisitor, wrong: dict[str, str], status: int, told: str
) -> None:
    @app.task(name="report")
    async def report() -> None: ...

    await app.aput_schedule(Schedule("hourly", report.call(), every="1h"))
    answer = await new_visitor("operate").post("/schedules/backfill/count", **{"name": "hourly", **wrong})
    assert (answer.status_code, told in answer.text) == (status, True), answer.text


async def test_a_schedule_is_paused_until_a_moment_or_for_a_time(app: App, new_visitor: NewVisitor) -> None:
    @app.task(name="report")
    async def report() -> None: ...

    await app.aput_schedule(Schedule("hourly", report.call(), every="1h"))
    visitor = new_visitor("operate")
    await visitor.act("/schedules/pause", name="hourly", until="2130-01-31T12:00Z")
    assert (await app.aschedule_info("hourly")).resume_at == datetime(2130, 1, 31, 12, tzinfo=UTC)
    await visitor.act("/schedules/resume", name="hourly")
    await visitor.act("/schedules/pause", name="hourly", until="2h")
    resumes = (await app.aschedule_info("hourly")).resume_at
    assert resumes is not None
    assert timedelta(minutes=119) < resumes - datetime.now(UTC) < timedelta(minutes=121)
    assert (await visitor.post("/schedules/pause", name="hourly", until="soon")).status_code == 400


def test_each_outcome_of_a_tick_has_its_own_mark_the_newest_at_the_right() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)

    def tick(outcome: Any, late_s: int = 0) -> TickInfo:
        return TickInfo(
            schedule="s", at=at, outcome=outcome, task_id=None, reason=None, detail=None, last_at=None, missed=None,
            decided_at=at + timedelta(seconds=late_s), decided_by=None, state=None,
        )  # fmt: skip

    marks = marks_of([tick("SENT"), tick("SENT", 61), tick("SKIPPED"), tick("MISSED")])
    assert [mark.kind for mark in marks] == ["missed", "skipped", "late", "sent"]
    drawn = tick_row(marks, [at])
    assert "last 4 ticks: 1 sent, 1 late, 1 skipped, 1 missed; 1 to come" in drawn
    lefts = [drawn.index(shape) for shape in ('"M2 8', 'cx="15"', '"M25 7', 'x="33"', 'x="251"')]
    assert lefts == sorted(lefts)
    assert marks_of([]) == []


async def test_overdue_steps_are_shown_first_and_carried_out_on_request(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("operate")
    handle, flow = await asyncio.to_thread(sent, app, workers.db, [node("a"), node("b")], [Edge(0, 1)])
    assert (await visitor.json("/workflows/reconcile"))["says"] == "No step of a workflow is overdue"
    (claimed,) = flow.claim()
    flow.end([claimed], lambda _: 1)
    workers.db.connection.execute(workers.db.plain("delete from {schema}.outbox"))
    assert "/workflows/reconcile" in (await visitor.get("/workflows")).text
    page = (await visitor.get("/workflows/reconcile")).text
    assert "<h1>1 step of 1 workflow is overdue</h1>" in page
    assert "its task has ended or was deleted" in page
    assert f'href="/workflows/{handle.id}"' in page
    assert [each.state for each in await handle.anodes()] == ["ENQUEUED", "PENDING"], (
        "a dry run changes nothing"
    )
    assert "Carried out 1 step." in await visitor.act("/workflows/reconcile")
    assert [each.state for each in await handle.anodes()] == ["COMPLETED", "ENQUEUED"]
    assert "Carried out 0 steps." in await new_visitor("operate").act("/workflows/reconcile")
    (entry,) = await app.aaudit_log()
    assert (entry.action, entry.actor, entry.origin, entry.target, entry.affected) == (
        "reconcile_workflows", "operate-user", "web", str(handle.id), 1,
    )  # fmt: skip
    assert (await new_visitor("read").get("/workflows/reconcile")).status_code == 403


@pytest.mark.xdist_group("browser")
def test_a_backfill_in_a_browser_is_accessible_and_sends_what_it_counted(
    browser: BrowserThread, full: Installation
) -> None:  # O1
    @full.app.task(name="report.of.hours")
    def report() -> None: ...

    full.app.put_schedule(Schedule("hours", report.call(), every="1h"))

    async def check() -> None:
        async with browser.observed(f"{full.address}/schedules/hours") as seen:
            page = seen.page
            await page.click("summary:has-text('Backfill')")
            await page.fill("input[name=since]", "3h")
            assert await sideways(seen, 360) is None
            await page.click("button:has-text('Count the ticks')")
            await page.wait_for_selector("text=Send 3 ticks of hours?")
            assert await accessibility_problems(page) == []
            assert await sideways(seen, 360) is None
            await page.click("button:has-text('Send 3 ticks')")
            await page.wait_for_selector("text=Sent 3 ticks.")
            seen.check()

    browser.run(check())
    assert len(full.app.list_tasks(name="report.of.hours")) == 3
