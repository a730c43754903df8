"""The reply to a committed statement reaches nobody: the statement is sent again, and answers as if nothing had happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from everbeat import App, NotPaused
from everbeat.client.control import CancelVerdict
from everbeat.store import pauses
from everbeat.store.target import Target
from tests.invariants import check_invariants
from tests.store.conftest import Hands
from tests.worker.proxy import Proxy


@pytest.fixture
async def proxy(database_url: str, schema: str) -> AsyncIterator[Proxy]:
    async with Proxy.before(Target.parse(database_url, schema=schema)) as made:
        yield made


@pytest.fixture
async def far(proxy: Proxy, schema: str) -> AsyncIterator[App]:
    """An app behind the proxy, with one task."""
    app = App(proxy.target.url, schema=schema)

    @app.task
    async def work(n: int = 0) -> int:
        return n

    yield app
    await app.aclose()


async def test_a_send_is_stored_once(hands: Hands, far: App, proxy: Proxy) -> None:
    proxy.lose_reply(b"-- Sends one task")
    handle = await far.asend_by_name("work", {"n": 1})
    assert proxy.lost == 1
    assert hands.table("tasks", "id, state") == [(handle.id, "PENDING")]


async def test_many_sends_are_stored_once_each(hands: Hands, far: App, proxy: Proxy) -> None:
    proxy.lose_reply(b"-- Sends many tasks")
    calls = [far.task(_named(n)).call() for n in range(3)]
    handles = await far.asend_many(calls)
    assert proxy.lost == 1
    assert {row[0] for row in hands.table("tasks", "id")} == {handle.id for handle in handles}
    assert len(handles) == 3


async def test_a_cancel_of_a_running_task_is_asked_once(hands: Hands, far: App, proxy: Proxy) -> None:
    running = hands.running()
    proxy.lose_reply(b"-- Cancels")
    await far.acancel(running.id)
    asked_at = hands.row(running.id, "cancel_requested_at")
    await far.acancel(running.id)
    assert (proxy.lost, hands.row(running.id, "cancel_requested_at")) == (1, asked_at)
    assert hands.settle(running, outcome="FAILED", error=b'{"code": "X", "message": "late"}') == "CANCELLED"


async def test_an_operators_retry_runs_it_once(hands: Hands, far: App, proxy: Proxy, schema: str) -> None:
    running = hands.running()
    hands.settle(running, outcome="FAILED", error=b'{"code": "X", "message": "failed"}')
    proxy.lose_reply(b"-- An operator's retry")
    await far.aretry(running.id)
    assert proxy.lost == 1
    assert [one.id for one in hands.claim("w1")] == [running.id]
    assert hands.claim("w2") == []
    check_invariants(hands.target.url, schema, deadlocks_before=None)


async def test_an_operators_retry_of_a_task_that_fails_again_at_once_runs_it_once(
    hands: Hands, far: App, proxy: Proxy
) -> None:
    running = hands.running()
    hands.settle(running, outcome="FAILED", error=b'{"code": "X", "message": "failed"}')
    proxy.hold_reply(b"-- An operator's retry")
    retry = asyncio.create_task(far.aretry(running.id))
    await _until(lambda: hands.row(running.id, "state") == "PENDING")
    (again,) = hands.claim("w1")
    hands.start(again)
    hands.settle(again, outcome="FAILED", error=b'{"code": "X", "message": "failed again"}')
    proxy.cut()
    proxy.mend()
    await retry
    assert hands.row(running.id, "state") == "FAILED", "the repeated call found its own retry"


async def test_a_cancel_before_the_start_says_that_it_cancelled(hands: Hands, far: App, proxy: Proxy) -> None:
    task_id = hands.send()
    proxy.lose_reply(b"-- Cancels")
    result = await far.acancel(task_id)
    assert (proxy.lost, result.verdict) == (1, CancelVerdict.CANCELLED)
    assert (await far.acancel(task_id)).verdict is CancelVerdict.ALREADY_ENDED


async def test_a_pause_is_the_callers_own(hands: Hands, far: App, proxy: Proxy) -> None:
    hands.send()
    proxy.lose_reply(b"-- Pauses")
    pause = await far.apause_task("work", reason="because")
    assert (proxy.lost, pause.already_paused, pause.reason) == (1, False, "because")
    assert (await far.apause_task("work")).already_paused


@pytest.mark.parametrize("kind", ["task", "queue"])
async def test_a_resume_answers_the_pause_that_it_ended(
    hands: Hands, far: App, proxy: Proxy, kind: str
) -> None:
    hands.send()
    pause, resume, name = (
        (far.apause_task, far.aresume_task, "work")
        if kind == "task"
        else (far.apause_queue, far.aresume_queue, "default")
    )
    paused = await pause(name)
    proxy.lose_reply(b"-- Ends one pause")
    assert await resume(name) == paused
    assert (proxy.lost, await far.alist_pauses()) == (1, [])
    with pytest.raises(NotPaused):
        await resume(name)


async def test_a_repeated_resume_leaves_a_later_pause_alone(hands: Hands, far: App, proxy: Proxy) -> None:
    hands.send()
    first = await far.apause_task("work", reason="first")
    proxy.hold_reply(b"-- Ends one pause")
    resume = asyncio.create_task(far.aresume_task("work"))
    near = App(hands.target.url, schema=hands.target.schema)
    await _until(lambda: hands.run(pauses.pauses()) == [])
    second = await near.apause_task("work", reason="second")
    proxy.cut()
    proxy.mend()
    assert await resume == first
    assert await near.alist_pauses() == [second]
    await near.aclose()


async def test_a_release_names_the_workers_that_it_ended(hands: Hands, far: App, proxy: Proxy) -> None:
    running = hands.running("w1")
    proxy.lose_reply(b"-- Ends workers")
    result = await far.arelease_workers(["w1"])
    assert (proxy.lost, result.worker_ids, result.recovered_count) == (1, ("w1",), 1)
    assert hands.row(running.id, "state") == "FAILED"
    assert (await far.arelease_workers(["w1"])).worker_ids == ()


async def test_a_release_counts_what_it_has_recovered(hands: Hands, far: App, proxy: Proxy) -> None:
    hands.send()
    hands.claim("w1", limit=1)
    running = hands.running("w1")
    proxy.lose_reply(b"-- Recovers leases")
    result = await far.arelease_workers(["w1"])
    assert (proxy.lost, result.recovered_count, result.missed) == (1, 2, 0)
    assert {(task.was, task.action) for task in result.tasks} == {("CLAIMED", "requeue"), ("RUNNING", "fail")}
    assert hands.row(running.id, "state, loss_count") == ("FAILED", 1)
    assert len(hands.table("recoveries")) == 2


async def _until(truth: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not truth():
            await asyncio.sleep(0.01)  # asked from outside, of the database


def _named(n: int):  # type: ignore[no-untyped-def]
    async def work() -> int:
        return n

    work.__name__ = f"work_{n}"
    return work
