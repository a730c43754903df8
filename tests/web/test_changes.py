"""A second viewer gets a notice when an action of an operator changes what a page shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias
from uuid import uuid4

import httpx
import pytest

from everbeat.client.auditing import NOTES
from everbeat.domain.bulk_actions import BulkVerb
from everbeat.domain.pulse.actions import ActionMemory
from everbeat.domain.pulse.sample import SampledAction
from everbeat.store.pulse import latest_actions
from everbeat.web.pages.changes import CONCERNS, concerns
from tests.web.browser import BrowserThread, Observed
from tests.web.conftest import SAME_ORIGIN, NewVisitor, Workers
from tests.web.installations import Installation
from tests.web.test_tasks import field

Act: TypeAlias = Callable[[httpx.Client], httpx.Response]
Change: TypeAlias = tuple[tuple[str, str], Act, str]
"""The pages that two viewers look at, what another one does, and the words that the viewers read."""
NOTICE = "#live-changed .lead"
WITHIN_MS = 15_000


def an_action(number: int, action: str = "retry", target: str | None = None) -> SampledAction:
    return SampledAction(number, "ann", action, target)


def test_an_entry_that_commits_after_a_later_one_is_seen_and_none_is_seen_twice() -> None:
    memory = ActionMemory()
    memory.record([an_action(1), an_action(3)])
    page = memory.number
    memory.record([an_action(3), an_action(2)])
    assert [each.id for each in memory.since(page)] == [2]
    memory.record([an_action(1), an_action(2), an_action(3)])
    assert [each.id for each in memory.since(page)] == [2]
    assert memory.last_id == 3
    assert [each.id for each in memory.since(memory.number_of(1))] == [2, 3]


def test_every_action_of_an_operator_concerns_a_page() -> None:
    known = {note.action({"action": "retry", "name": "x", "quiet": True}) for note in NOTES.values()}
    known |= {verb.value for verb in BulkVerb} | {f"{verb.value}_all" for verb in BulkVerb}
    places = set(CONCERNS) - {"audit"}
    unseen = {name for name in known if not any(concerns(an_action(1, name), place, ()) for place in places)}
    assert unseen <= {"seal_batch"}, "no page shows batches"


def test_a_page_about_one_task_has_notices_only_of_what_concerns_it() -> None:
    here = ["7a", "queue mail", "everything"]
    assert concerns(an_action(1, "retry", "7a"), "tasks", here)
    assert concerns(an_action(1, "recover", "6f, 7a"), "tasks", here)
    assert concerns(an_action(1, "pause", "queue mail"), "tasks", here)
    assert concerns(an_action(1, "cancel_all", str(uuid4())), "tasks", here)
    assert not concerns(an_action(1, "retry", "6f"), "tasks", here)
    assert not concerns(an_action(1, "pause", "queue films"), "tasks", here)
    assert not concerns(an_action(1, "pause", "queue films"), "tasks", ())


def test_the_latest_actions_are_read_after_the_last_one_that_was_seen(workers: Workers) -> None:
    db = workers.db
    assert db.run(latest_actions(None)) == []
    for number in range(30):
        db.connection.execute(
            db.plain(
                "insert into {schema}.audit_log (actor, origin, action, outcome) values ('a', 'b', %s, 'c')"
            ),
            [str(number)],
        )
    first = db.run(latest_actions(None))
    assert [each.action for each in first] == [str(number) for number in range(29, 9, -1)]
    again = db.run(latest_actions(first[4].id))
    assert again[0] == first[0]
    assert len(again) == 20 + 4


async def test_the_mark_of_another_process_counts_by_its_id_and_a_wrong_one_is_refused(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("operate")
    await visitor.act(f"/tasks/{workers.fail()}/retry")
    for after, is_told in (("other.900.0", True), ("other.0.900", False)):
        answer = await visitor.get("/changes/stream", of="tasks", after=after, once="1")
        assert answer.status_code == 200
        assert ("live-changed" in answer.text) is is_told, after
    for wrong in ({"of": "tasks"}, {"of": "tasks", "after": "x"}, {"of": "nothing", "after": "a.1.1"}):
        assert (await visitor.get("/changes/stream", **wrong)).status_code == 400


@asynccontextmanager
async def a_viewer(browser: BrowserThread, made: Installation, path: str) -> AsyncIterator[Observed]:
    """Open a page, and check that it has no notice until something changes."""
    async with browser.observed(f"{made.address}{path}") as seen:
        await seen.page.wait_for_selector("html[data-live-at]", timeout=WITHIN_MS, state="attached")
        assert await seen.page.query_selector(NOTICE) is None
        yield seen


async def is_told(
    browser: BrowserThread,
    made: Installation,
    paths: tuple[str, str],
    act: Act,
) -> str:
    """Act while other viewers have these pages open. Return the notice that they get, which is gone after they load the page again."""
    async with (
        a_viewer(browser, made, paths[0]) as seen,
        a_viewer(browser, made, paths[1]) as other,
    ):
        with httpx.Client(base_url=made.address, headers=SAME_ORIGIN) as client:
            answer = await asyncio.to_thread(act, client)
        assert answer.status_code == 303, answer.text
        for each in (seen, other):
            await each.page.wait_for_selector(NOTICE, timeout=WITHIN_MS)
        told = await seen.page.inner_text("#live-changed")
        await seen.page.click("#live-again")
        await seen.page.wait_for_selector("html[data-live-at]", timeout=WITHIN_MS, state="attached")
        assert await seen.page.query_selector(NOTICE) is None
        seen.check()
        other.check()
    return told


def retried(made: Installation) -> Change:
    task = made.workers.fail()
    return ("/tasks?state=FAILED", f"/tasks/{task}"), lambda web: web.post(f"/tasks/{task}/retry"), "retry"


def cancelled(made: Installation) -> Change:
    task = made.workers.send()
    return ("/queues", f"/tasks/{task}"), lambda web: web.post(f"/tasks/{task}/cancel"), "cancel"


def paused(made: Installation) -> Change:
    task = made.workers.send(queue="films")
    pause = {"name": "films", "reason": "<i>"}
    return (
        ("/queues", f"/tasks/{task}"),
        lambda web: web.post("/queues/pause", data=pause),
        "pause queue films",
    )


def signalled(made: Installation) -> Change:
    task = made.workers.send()
    value = {"name": "approved", "value": "1"}
    return ("/tasks", f"/tasks/{task}"), lambda web: web.post(f"/tasks/{task}/signal", data=value), "signal"


def answered(made: Installation) -> Change:
    task = made.workers.ask("Refund?", kind="bool")
    return ("/inbox", "/tasks"), lambda web: web.post(f"/inbox/{task}", data={"value": "true"}), "answer"


def all_that_match(made: Installation) -> Change:
    task = made.workers.fail("refund")
    filters = {"name": "refund", "state": "FAILED"}

    def act(web: httpx.Client) -> httpx.Response:
        counted = web.post("/tasks/all/retry/count", data=filters)
        return web.post("/tasks/all/retry", data=filters | {"digest": field(counted.text, "digest")})

    return ("/tasks", f"/tasks/{task}"), act, "retry all that match"


QUICK = [retried, all_that_match]
LONG = [pytest.param(each, marks=pytest.mark.long) for each in (cancelled, paused, signalled, answered)]


@pytest.mark.parametrize("change", [*QUICK, *LONG])
def test_other_viewers_get_a_notice_of_an_action_and_load_the_page_again(  # O4
    browser: BrowserThread,
    full: Installation,
    change: Callable[[Installation], Change],
) -> None:
    paths, act, words = change(full)
    told = browser.run(is_told(browser, full, paths, act))
    assert f"local: {words}" in told
