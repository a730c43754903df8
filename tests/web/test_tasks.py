"""The list of tasks: its filters, its pages, and the actions on its tasks."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import UUID

import pytest
import typer

from everbeat import App, Schedule
from everbeat.cli import tasks
from everbeat.web.filters import LABELS
from tests.web.browser import BrowserThread
from tests.web.conftest import SAME_ORIGIN, NewVisitor, Workers
from tests.web.installations import Installation

LONG = "n" * 200


def field(text: str, name: str) -> str:
    """Return the value of a hidden field of a form."""
    found = re.search(rf'name="{name}" value="([^"]*)"', text)
    assert found is not None, name
    return found[1]


async def test_an_empty_installation_has_a_page_that_says_so(new_visitor: NewVisitor) -> None:
    page = await new_visitor().get("/tasks")
    assert page.status_code == 200
    assert "<h1>No tasks</h1>" in page.text
    assert "No task is stored yet" in page.text
    assert (await new_visitor().json("/tasks"))["tasks"] == []


async def test_failures_are_grouped_and_the_heading_names_the_largest_group(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    for _ in range(3):
        workers.fail(error={"code": "SMTP_DOWN", "message": "no answer"})
    workers.fail("mail.welcome", error={"code": "TASK_TIMEOUT", "message": "30 s"})
    page = await new_visitor().get("/tasks", state="FAILED")
    assert "<h1>4 tasks failed, 3 of them charge with SMTP_DOWN</h1>" in page.text
    document = await new_visitor().json("/tasks", state="FAILED")
    assert [(each["name"], each["code"], each["count"]) for each in document["groups"]] == [
        ("charge", "SMTP_DOWN", 3),
        ("mail.welcome", "TASK_TIMEOUT", 1),
    ]
    assert {task["state"] for task in document["tasks"]} == {"FAILED"}


async def test_all_filters_of_the_command_line_select_tasks(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    failed = workers.fail(key="k-1", queue="bank", labels='{"tenant": "acme"}')
    workers.send("mail.welcome")
    visitor = new_visitor()

    async def ids(**filters: str) -> list[str]:
        return [task["id"] for task in (await visitor.json("/tasks", **filters))["tasks"]]

    for filters in (
        {"name": "charge"},
        {"queue": "bank"},
        {"key": "k-1"},
        {"state": "FAILED"},
        {"error": "REFUSED"},
        {"worker": "w1"},
        {"label": "tenant=acme"},
        {"label": "tenant"},
        {"since": "1h", "name": "charge"},
    ):
        assert await ids(**filters) == [str(failed)], filters
    assert await ids(until="1h") == []
    assert (await visitor.json("/tasks", state="failing", status=400))["error"]["code"] == "UNKNOWN_CHOICE"
    assert (await visitor.json("/tasks", since="soon", status=400))["error"]["code"]


def test_each_filter_of_the_command_line_is_one_of_the_page() -> None:
    group: Any = typer.main.get_command(tasks.commands)
    options = {
        option.removeprefix("--").replace("-", "_")
        for each in group.commands["list"].params
        for option in each.opts
        if option.startswith("--")
    }
    assert options - {"url", "schema", "app", "json", "limit", "before", "order"} == set(LABELS)


async def test_pages_continue_after_the_last_task_without_gap_or_repetition(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    sent = {str(workers.send()) for _ in range(5)}
    visitor = new_visitor()
    seen: list[str] = []
    before = None
    while True:
        document = await visitor.json("/tasks", limit=2, **({"before": before} if before else {}))
        found = [task["id"] for task in document["tasks"]]
        seen += found
        if len(found) < 2:
            break
        before = found[-1]
    assert len(seen) == len(set(seen)) == 5
    assert set(seen) == sent
    page = await visitor.get("/tasks", limit=2)
    assert re.search(r'href="/tasks\?before=[0-9a-f-]+&amp;order=sent"', page.text)


async def test_text_in_arguments_is_searched_by_a_form_and_refused_in_an_address(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    found = workers.send(arguments={"order": "needle-17"})
    workers.send(arguments={"order": "hay"})
    visitor = new_visitor()
    answer = await visitor.post("/tasks/search", arguments_contain="needle-17")
    assert answer.status_code == 200
    assert str(found) in answer.text
    assert "needle-17" not in "".join(re.findall(r'(?:href|action)="([^"]*)"', answer.text))
    refused = await visitor.get("/tasks", arguments_contain="needle-17")
    assert refused.status_code == 400
    assert (await new_visitor("see").post("/tasks/search", arguments_contain="x")).status_code == 403
    hidden = new_visitor("admin", hide=["charge"])
    assert (await hidden.post("/tasks/search", arguments_contain="needle-17")).status_code == 403


async def test_a_task_with_the_longest_names_fits_on_the_page(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.send(LONG, queue="q" * 200, key="k" * 200)
    page = await new_visitor().get("/tasks")
    assert page.status_code == 200
    assert LONG in page.text


async def test_all_that_match_are_counted_then_confirmed_and_the_audit_log_notes_it(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O4
    for _ in range(3):
        workers.fail()
    workers.fail("mail.welcome")
    visitor = new_visitor("operate")
    counted = await visitor.post("/tasks/all/retry/count", name="charge", state="FAILED", since="1h")
    assert counted.status_code == 200
    assert "<h1>Retry 3 tasks?</h1>" in counted.text
    assert await app.abulk_actions() == []
    fields = {name: field(counted.text, name) for name in ("name", "state", "since", "digest")}
    assert fields["since"] != "1h", "the moment is fixed, so that the same tasks are retried"
    changed = await visitor.post("/tasks/all/retry", **fields | {"name": "mail.welcome"})
    assert changed.status_code == 409
    assert await app.abulk_actions() == []
    followed = await visitor.act("/tasks/all/retry", **fields, reason="the bank is back")
    assert "The action was requested" in followed
    (action,) = await app.abulk_actions()
    assert (action.action, action.requested_by, action.origin) == ("retry", "operate-user", "web")
    (entry,) = await app.aaudit_log()
    assert (entry.actor, entry.origin, entry.note) == ("operate-user", "web", "the bank is back")


async def test_ticked_tasks_change_one_by_one_and_the_refused_ones_are_reported(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O4
    failed, waiting = workers.fail(), workers.send("mail.welcome")
    answer = await new_visitor("operate").client.post(
        "/tasks/ticked/retry",
        json={"id": [str(failed), str(waiting), "nonsense"]},
        headers={**SAME_ORIGIN, "x-test-role": "operate", "accept": "application/json"},
    )
    document = answer.json()
    assert document["done"] == [str(failed)]
    assert set(document["refused"]) == {str(waiting), "nonsense"}
    assert (await app.ainfo(failed)).state == "PENDING"
    (entry,) = await app.aaudit_log()
    assert (entry.action, entry.actor, entry.origin, UUID(entry.target or "")) == (
        "retry",
        "operate-user",
        "web",
        failed,
    )


async def test_ticked_tasks_of_a_schedule_are_moved_and_reprioritised(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O4
    @app.task(name="report")
    async def report() -> None: ...

    await app.aput_schedule(Schedule("hourly", report.call(), every="1h"))
    visitor = new_visitor("admin")
    task = (await app.arun_schedule("hourly")).id
    page = (await visitor.get("/tasks")).text
    for verb in ("move", "reprioritise"):
        assert f'formaction="/tasks/ticked/{verb}"' in page
    assert "Moved 1 task." in await visitor.act("/tasks/ticked/move", id=str(task), to="slow")
    assert "Reprioritised 1 task." in await visitor.act("/tasks/ticked/reprioritise", id=str(task), to="7")
    info = await app.ainfo(task)
    assert (info.queue, info.priority, info.schedule) == ("slow", 7, "hourly")
    assert (
        "is not a whole number"
        in (await visitor.post("/tasks/ticked/reprioritise", id=str(task), to="high")).text
    )
    assert [(each.action, each.note) for each in await app.aaudit_log()] == [
        ("reprioritise", "to_priority=7"),
        ("move", "to_queue=slow"),
    ]
    operator = new_visitor("operate")
    assert "/tasks/ticked/move" not in (await operator.get("/tasks")).text
    assert (await operator.post("/tasks/ticked/move", id=str(task), to="mail")).status_code == 403


async def test_the_page_of_a_waiting_task_moves_it_and_says_why_if_it_cannot(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:  # O4
    waiting, serial = workers.send(), workers.send(serial="queue:line", queue="line")
    running = workers.start("mail.welcome")
    visitor = new_visitor("admin")
    page = (await visitor.get(f"/tasks/{waiting}")).text
    assert 'action="/tasks/ticked/move"' in page
    for other, role in ((running.id, "admin"), (waiting, "operate")):
        assert "/tasks/ticked/move" not in (await new_visitor(role).get(f"/tasks/{other}")).text
    answer = await visitor.client.post(
        "/tasks/ticked/move",
        data={"id": str(serial), "to": "slow"},
        headers={**SAME_ORIGIN, "x-test-role": "admin", "referer": f"http://dashboard.test/tasks/{serial}"},
    )
    assert answer.headers["location"] == f"/tasks/{serial}", "back to the page of the task"
    said = (await visitor.get(f"/tasks/{serial}")).text
    assert "Moved 0 tasks. 1 task could not be changed" in said
    assert "serial queue" in said
    assert (await app.ainfo(serial)).queue == "line"


@pytest.mark.xdist_group("browser")
def test_ticked_rows_are_moved_in_a_browser(browser: BrowserThread, full: Installation) -> None:
    task = full.workers.send("ticked.row", queue="before")

    async def check() -> None:
        async with browser.observed(f"{full.address}/tasks?name=ticked.row") as seen:
            page = seen.page
            await page.check(f"input[name=id][value='{task}']")
            await page.fill("#ticked input[name=to]", "after")
            await page.click("#ticked button:has-text('Move')")
            await page.wait_for_selector("text=Moved 1 task.")
            assert full.workers.db.row(task, "queue") == "after"
            await page.goto(f"{full.address}/tasks/{task}")
            await page.click("summary:has-text('Move')")
            await page.fill("label:has-text('To priority') input", "3")
            await page.click("button:has-text('Reprioritise it')")
            await page.wait_for_selector("text=Reprioritised 1 task.")
            assert full.workers.db.row(task, "priority") == 3
            seen.check()

    browser.run(check())


async def test_a_misspelled_filter_does_not_select_more_tasks(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.fail()
    visitor = new_visitor("operate")
    refused = await visitor.post("/tasks/all/retry/count", state="FAILED", nam="charge")
    assert refused.status_code == 400
    assert "&#39;nam&#39; is not a filter, so nothing was changed." in refused.text
    assert "did you mean &#39;name&#39;?" in refused.text
    counted = await visitor.post("/tasks/all/retry/count", state="FAILED")
    digest = field(counted.text, "digest")
    refused = await visitor.post("/tasks/all/retry", state="FAILED", digest=digest, nam="charge")
    assert refused.status_code == 400


async def test_a_count_names_the_user_and_the_dashboard(workers: Workers, new_visitor: NewVisitor) -> None:
    workers.fail()
    visitor = new_visitor("operate")
    headers = {**visitor.headers, "accept": "application/json"}
    answer = await visitor.client.post(
        "/tasks/all/retry/count", data={"state": "FAILED"}, headers=headers | SAME_ORIGIN
    )
    action = answer.json()["action"]
    assert (action["requested_by"], action["origin"]) == ("operate-user", "web")


@pytest.mark.parametrize(
    ("path", "known"), [("/tasks", "failed"), ("/tasks", "RETRYING"), ("/workflows", "running")]
)
async def test_states_are_read_in_any_case_and_an_unknown_one_is_named(
    workers: Workers, new_visitor: NewVisitor, path: str, known: str
) -> None:
    visitor = new_visitor("read")
    assert (await visitor.get(path, state=known)).status_code == 200
    refused = await visitor.get(path, state="broken")
    assert (refused.status_code, "There is no state &#39;broken&#39;." in refused.text) == (400, True)


async def test_an_address_with_a_text_that_is_not_an_id_names_the_text(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    for what in ("task", "workflow"):
        answer = await new_visitor("read").get(f"/{what}s/01a2")
        assert (answer.status_code, f"&#39;01a2&#39; is not the id of a {what}." in answer.text) == (
            404,
            True,
        )


async def test_a_program_counts_and_confirms_an_action_with_the_moment_that_it_wrote(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.fail()
    visitor = new_visitor("operate")
    headers = {**visitor.headers, "accept": "application/json", "authorization": "x"}
    filters = {"state": "failed", "name": "charge", "since": "2020-01-31T12:00Z"}
    counted = await visitor.client.post("/tasks/all/retry/count", json=filters, headers=headers)
    given = filters | {"digest": counted.json()["digest"], "reason": "the bank is back"}
    requested = await visitor.client.post("/tasks/all/retry", json=given, headers=headers)
    assert requested.status_code == 200, requested.text
    (action,) = await app.abulk_actions()
    assert (action.requested_by, action.origin) == ("operate-user", "web")


async def test_groups_and_the_heading_count_only_tasks_that_the_list_can_show(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    for tenant in ("1", "1", "2"):
        workers.fail(labels=json.dumps({"tenant": tenant}))
    visitor = new_visitor("read")

    async def counted(**filters: str) -> tuple[str, int | None, int]:
        found = await visitor.json("/tasks", state="FAILED", **filters)
        groups = found["groups"]
        total = None if groups is None else sum(each["count"] for each in groups)
        return found["says"].partition(" failed")[0], total, len(found["tasks"])

    assert await counted() == ("3 tasks", 3, 3)
    assert await counted(label="tenant=1") == ("2 tasks", 2, 2)
    assert await counted(label="tenant=3") == ("No", 0, 0)
    assert await counted(until="1h") == ("No", 0, 0)
    assert await counted(error="REFUSED") == ("3", None, 3)
    assert await counted(error="OTHER") == ("No", None, 0)
    expired = await visitor.json("/tasks", state="EXPIRED")
    assert (expired["says"], expired["groups"], expired["tasks"]) == ("No expired tasks match", [], [])
