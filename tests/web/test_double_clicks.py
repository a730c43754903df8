"""A form that is submitted twice, as by a double click, acts once, and both answers are that of the action."""

from __future__ import annotations

import asyncio

import pytest

from everbeat import App
from everbeat.web import double_clicks
from tests.web.browser import BrowserThread
from tests.web.conftest import NewVisitor, Workers
from tests.web.installations import Installation

pytestmark = pytest.mark.xdist_group("browser")


async def count(app: App) -> int:
    return len(await app.alist_tasks(limit=50))


async def test_a_task_that_is_sent_again_by_a_double_click_is_sent_once(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    failed = workers.fail()
    visitor = new_visitor("operate")
    path, fields = f"/tasks/{failed}/send", {"arguments": '{"order": "o-2"}'}
    first, second = await asyncio.gather(visitor.post(path, **fields), visitor.post(path, **fields))
    assert (first.status_code, second.status_code) == (303, 303)
    assert first.headers["location"] == second.headers["location"]
    assert (await visitor.post(path, **fields)).headers["location"] == first.headers["location"]
    assert await count(app) == 2
    other = await visitor.post(path, arguments='{"order": "o-3"}')
    assert other.headers["location"] != first.headers["location"]
    assert await count(app) == 3


async def test_after_a_second_or_by_a_program_or_by_another_user_it_is_another_action(
    app: App, workers: Workers, new_visitor: NewVisitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = workers.fail()
    visitor = new_visitor("operate")
    path, body = f"/tasks/{failed}/send", {"arguments": '{"order": "o-2"}'}
    headers = {**visitor.headers, "authorization": "Bearer x", "accept": "application/json"}
    for _ in range(2):
        assert (await visitor.client.post(path, headers=headers, json=body)).status_code == 200
    assert await count(app) == 3
    for headers in (visitor.headers, {"x-test-role": "admin"}):
        sent = await visitor.client.post(
            path, headers={**headers, "sec-fetch-site": "same-origin"}, data=body
        )
        assert sent.status_code == 303
    assert await count(app) == 5
    monkeypatch.setattr(double_clicks, "WITHIN_S", 0.0)
    for _ in range(2):
        assert (await visitor.post(path, arguments='{"order": "o-3"}')).status_code == 303
    assert await count(app) == 7


async def test_two_actions_can_alternate_and_an_error_is_the_answer_to_both_clicks(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("operate")
    workers.send(queue="mail")
    for action in ("pause", "resume", "pause"):
        assert (await visitor.post(f"/queues/{action}", name="mail")).status_code == 303
    assert [pause.name for pause in await app.alist_pauses()] == ["mail"]
    sent = workers.send()
    answers = await asyncio.gather(*(visitor.post(f"/tasks/{sent}/retry") for _ in range(2)))
    assert [answer.status_code for answer in answers] == [409, 409]


def test_a_double_click_in_a_browser_shows_what_the_action_did(
    browser: BrowserThread, full: Installation
) -> None:
    async def story() -> str:
        async with browser.observed(f"{full.address}/tasks/{full.failed[-1]}") as seen:
            await seen.page.get_by_role("button", name="Retry").dblclick(no_wait_after=True)
            said = seen.page.locator("main .say").first
            await seen.page.get_by_text("The task will run again.").wait_for()
            return await said.inner_text()

    assert browser.run(story(), within=30) == "The task will run again."


async def test_two_clicks_that_reach_different_processes_act_once_on_a_task(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    """Each `Web` has its own memory, as each process behind a balancer has. The rows of the tasks decide."""
    failed, waiting, asking = workers.fail(), workers.send(), workers.ask("Refund?", kind="bool")
    both = [new_visitor("operate"), new_visitor("operate")]
    for path, fields, statuses in (
        (f"/tasks/{failed}/retry", {}, [303, 409]),
        (f"/tasks/{waiting}/cancel", {}, [303, 303]),
        (f"/inbox/{asking}", {"value": "true"}, [303, 409]),
        ("/queues/pause", {"name": "default"}, [303, 303]),
    ):
        answers = await asyncio.gather(*(visitor.post(path, **fields) for visitor in both))
        assert sorted(answer.status_code for answer in answers) == statuses, path
    assert sorted(workers.db.table("audit_log", "action")) == [
        ("answer",),
        ("cancel",),
        ("pause",),
        ("retry",),
    ]
    assert (await app.ainfo(failed)).state == "PENDING"
    assert (await app.ainfo(waiting)).state == "CANCELLED"
    assert await count(app) == 3
    assert len(await app.alist_pauses()) == 1
