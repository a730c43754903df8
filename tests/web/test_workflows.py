"""The pages of workflows and schedules: lists, graph, reasons, marks of ticks, and actions."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from everbeat import App, Schedule, TaskError
from everbeat.domain.schedule.inspection import TickInfo
from everbeat.web.pages.schedules import marks_of
from tests.client.working import working
from tests.web.conftest import NewVisitor

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


async def test_a_schedule_is_paused_resumed_run_and_deleted(app: App, new_visitor: NewVisitor) -> None:
    @app.task(name="report")
    async def report(kind: str, card: str = "") -> None: ...

    call = report.call("sales", SECRET)
    await app.aput_schedule(Schedule("nightly/eu", call, every="1h"))
    visitor = new_visitor("operate")
    assert "1 schedule, none of which missed a tick" in (await visitor.get("/schedules")).text
    page = (await visitor.get("/schedules/nightly/eu")).text
    assert "every 1h" in page
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


def test_each_outcome_of_a_tick_has_its_own_mark_the_newest_at_the_right() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)

    def tick(outcome: Any, late_s: int = 0) -> TickInfo:
        return TickInfo(
            schedule="s", at=at, outcome=outcome, task_id=None, reason=None, detail=None, last_at=None, missed=None,
            decided_at=at + timedelta(seconds=late_s), decided_by=None, state=None,
        )  # fmt: skip

    marks = marks_of([tick("SENT"), tick("SENT", 61), tick("SKIPPED"), tick("MISSED")])
    assert [(mark.kind, mark.left) for mark in marks] == [
        ("missed", 0),
        ("skipped", 10),
        ("late", 20),
        ("sent", 30),
    ]
    assert marks_of([]) == []
