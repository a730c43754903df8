"""Sending a task from a form of the dashboard."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from uuid import UUID

import pytest

from everbeat import App
from everbeat.errors import ConfigurationError, PayloadError
from tests.web.browser import BrowserThread, accessibility_problems
from tests.web.conftest import NewVisitor
from tests.web.installations import LONG, Installation


def id_of(location: str) -> UUID:
    """Return the id of the task to whose page an address leads."""
    found = re.fullmatch(r"/tasks/([0-9a-f-]{36})", location)
    assert found, location
    return UUID(found[1])


async def test_the_form_has_a_field_for_each_parameter_and_sends_what_it_says(
    app: App, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("operate")
    assert 'href="/tasks/new"' in (await visitor.get("/tasks")).text
    listed = await visitor.get("/tasks/new")
    assert "The app has 2 functions whose tasks can be sent" in listed.text
    assert 'href="/tasks/new?name=mail.welcome"' in listed.text
    page = (await visitor.get("/tasks/new", name="mail.welcome")).text
    assert re.findall(r'name="argument\.(\w+)"[^>]*?( required)?>', page) == [
        ("user_id", " required"),
        ("secret", ""),
    ]
    assert '<code class="anywhere">int</code> required' in page
    answer = await visitor.post(
        "/tasks/new",
        **{
            "name": "mail.welcome",
            "argument.user_id": "7",
            "argument.secret": ' "x y" ',
            "queue": "big",
            "priority": "-3",
            "delay": "10m",
        },
    )
    assert answer.status_code == 303
    task = await app.ainfo(id_of(answer.headers["location"]))
    assert (task.name, task.arguments, task.queue, task.priority) == (
        "mail.welcome",
        {"user_id": 7, "secret": "x y"},
        "big",
        -3,
    )
    assert timedelta(minutes=9) < task.enqueued_at - task.sent_at <= timedelta(minutes=10)
    (entry,) = await app.aaudit_log()
    assert (entry.action, entry.actor, entry.origin, entry.target, entry.affected) == (
        "send",
        "operate-user",
        "web",
        str(task.id),
        1,
    )
    assert "The task is sent." in (await visitor.get(answer.headers["location"])).text


async def test_empty_fields_keep_the_defaults_of_the_function(app: App, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("operate")
    fields = {
        "name": "mail.welcome",
        "argument.user_id": "7",
        "argument.secret": "",
        "queue": "",
        "priority": "",
        "delay": "0s",
    }
    task = await app.ainfo(id_of((await visitor.post("/tasks/new", **fields)).headers["location"]))
    assert (task.arguments, task.queue, task.priority) == ({"user_id": 7}, "mail", 0)
    assert task.enqueued_at == task.sent_at


@pytest.mark.parametrize(
    "given",
    [{"user_id": "seven"}, {"user_id": 7, "secret": 1}, {}, {"user_id": 7, "unknown": 1}, {"user_id": [1]}],
)
async def test_wrong_arguments_are_refused_with_the_words_of_a_normal_send(
    given: dict[str, object], app: App, new_visitor: NewVisitor
) -> None:
    with pytest.raises(PayloadError) as refused:
        await app.asend_by_name("mail.welcome", given)
    visitor = new_visitor("operate")
    answer = await visitor.client.post(
        "/tasks/new",
        json={"name": "mail.welcome", "arguments": given},
        headers={**visitor.headers, "authorization": "Bearer x", "accept": "application/json"},
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["message"], error["fix"]) == (
        refused.value.code,
        refused.value.message,
        refused.value.fix,
    )
    assert await app.alist_tasks() == []
    assert await app.aaudit_log() == []


async def test_a_refused_form_is_shown_again_with_the_reason_and_what_was_typed(
    app: App, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("operate")
    for field, value, reason in (
        ("argument.secret", "o-1", "The argument &#39;secret&#39; is not JSON"),
        ("argument.secret", "[1]", "Argument &#39;secret&#39; = [1]"),
        ("priority", "high", "The priority is not a whole number"),
        ("priority", "999999", "priority"),
        ("delay", "soon", "delay"),
        ("queue", "q" * 300, "queue"),
    ):
        answer = await visitor.post(
            "/tasks/new", **{"name": "mail.welcome", "argument.user_id": "7", field: value}
        )
        assert answer.status_code == 400, field
        assert "<h1>Nothing was sent</h1>" in answer.text
        assert 'role="alert"' in answer.text
        assert reason in answer.text, field
        assert ">7</textarea>" in answer.text
        assert f">{value}</textarea>" in answer.text or f'value="{value}"' in answer.text
    assert await app.alist_tasks() == []
    with pytest.raises(ConfigurationError):
        await app.asend_by_name("mail.welcome", {"user_id": 7}, priority=999_999)


async def test_a_form_that_is_sent_twice_at_once_sends_one_task(app: App, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("operate")
    fields = {"name": "charge", "argument.order": '"o-1"'}
    first, second = await asyncio.gather(
        visitor.post("/tasks/new", **fields), visitor.post("/tasks/new", **fields)
    )
    assert first.headers["location"] == second.headers["location"]
    assert len(await app.alist_tasks()) == 1
    assert len(await app.aaudit_log()) == 1


async def test_only_an_app_that_declares_the_function_can_send_it(app: App, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("operate")
    assert (await visitor.get("/tasks/new", name="unknown")).status_code == 404
    assert (await visitor.post("/tasks/new", name="unknown")).status_code == 404
    for role, read_only in (("read", False), ("admin", True)):
        other = new_visitor(role, read_only=read_only)
        assert "/tasks/new" not in (await other.get("/tasks")).text
        assert (await other.post("/tasks/new", name="charge", **{"argument.order": '"o"'})).status_code == 403
        assert '<form class="stack"' not in (await other.get("/tasks/new", name="charge")).text
    assert (
        await visitor.client.post("/tasks/new", data={"name": "charge"}, headers=visitor.headers)
    ).status_code == 403
    assert await app.alist_tasks() == []


async def test_a_program_reads_the_parameters_and_sends_an_object(app: App, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("operate")
    document = await visitor.json("/tasks/new", name="charge")
    assert document["tasks"] == ["charge", "mail.welcome"]
    assert document["task"] == {
        "name": "charge",
        "queue": "default",
        "parameters": [
            {"name": "order", "type": "str", "is_required": True, "default": None},
            {"name": "card", "type": "str", "is_required": False, "default": '""'},
        ],
    }
    answer = await visitor.client.post(
        "/tasks/new",
        json={"name": "charge", "arguments": {"order": "o-1"}, "priority": 4},
        headers={**visitor.headers, "authorization": "Bearer x", "accept": "application/json"},
    )
    task = await app.ainfo(UUID(answer.json()["task_id"]))
    assert (task.arguments, task.priority) == ({"order": "o-1"}, 4)


@pytest.mark.xdist_group("browser")
def test_a_task_is_chosen_and_sent_with_the_keyboard_in_a_browser(
    browser: BrowserThread, full: Installation
) -> None:
    async def story() -> None:
        async with browser.observed(f"{full.address}/tasks") as seen:
            page = seen.page
            await page.get_by_role("link", name="Send a task").focus()
            await page.keyboard.press("Enter")
            await page.get_by_role("link", name=LONG).focus()
            await page.keyboard.press("Enter")
            await page.locator("textarea[name='argument.order']").focus()
            await page.keyboard.type("o-1")
            await page.get_by_role("button", name="Send it").focus()
            await page.keyboard.press("Enter")
            await page.get_by_role("alert").get_by_text("is not JSON").wait_for()
            assert await accessibility_problems(page) == []
            seen.console.clear()  # Chromium reports the status 400
            await page.locator("textarea[name='argument.order']").fill('"o-1"')
            await page.get_by_role("button", name="Send it").click()
            await page.get_by_text("The task is sent. This is its page.").wait_for()
            assert LONG in await page.inner_text("main")
            seen.check()

    browser.run(story())
