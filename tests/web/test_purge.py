"""The purge of a queue from its row: the waiting tasks are counted, and then cancelled by a bulk action."""

from __future__ import annotations

import re
from html import unescape

from everbeat import App
from tests.web.conftest import NewVisitor, Workers


def form_of(page: str, queue: str) -> dict[str, str]:
    """Return the hidden fields of the purge button of a queue."""
    (found,) = [
        form
        for form in re.findall(
            r'<form method="post" action="/tasks/all/cancel/count">.*?</form>', page, re.DOTALL
        )
        if f'value="{queue}"' in form
    ]
    return {name: unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', found)}


async def test_a_purge_counts_the_waiting_tasks_of_a_queue_and_cancels_only_these(
    app: App, workers: Workers, new_visitor: NewVisitor
) -> None:
    running, other = workers.start(queue="mail").id, workers.send(queue="other")
    doomed = [workers.send(queue="mail"), workers.send(queue="mail", delay_ms=3_600_000)]
    visitor = new_visitor("operate")
    page = (await visitor.get("/queues")).text
    fields = form_of(page, "mail")
    assert fields == {"queue": "mail", "state": "PENDING"}
    counted = await visitor.post("/tasks/all/cancel/count", **fields)
    assert "<h1>Cancel 2 tasks?</h1>" in counted.text
    assert [(await app.ainfo(each)).state for each in doomed] == ["PENDING", "PENDING"]
    digest = re.search(r'name="digest" value="(\w+)"', counted.text)
    assert digest
    assert "The action was requested" in await visitor.act(
        "/tasks/all/cancel", **fields, digest=digest[1], reason="wrong import"
    )
    (action,) = await app.abulk_actions()
    assert (action.action, action.requested_by) == ("cancel", "operate-user")
    assert {name: value for name, value in action.filters.items() if value} == {
        "queue": "mail",
        "states": ["PENDING"],
    }
    (entry,) = await app.aaudit_log()
    assert (entry.action, entry.actor, entry.note) == ("cancel_all", "operate-user", "wrong import")
    assert {(await app.ainfo(running)).state, (await app.ainfo(other)).state} == {"RUNNING", "PENDING"}


async def test_only_queues_with_waiting_tasks_are_purged_and_only_by_operators(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.start(queue="busy")
    workers.send(queue="mail")
    page = (await new_visitor("operate").get("/queues")).text
    assert "Purge mail" in page
    assert "Purge busy" not in page
    for role, options in (("read", {}), ("admin", {"read_only": True})):
        assert "Purge" not in (await new_visitor(role, **options).get("/queues")).text
