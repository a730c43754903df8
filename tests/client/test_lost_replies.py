"""The reply to a committed statement reaches nobody: the statement is sent again, and answers as if nothing had happened."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from everbeat import App
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


async def test_a_cancel_answers_what_became_of_the_task(hands: Hands, far: App, proxy: Proxy) -> None:
    task_id = hands.send()
    proxy.lose_reply(b"-- Cancels")
    result = await far.acancel(task_id)
    assert proxy.lost == 1
    assert hands.row(task_id, "state") == "CANCELLED"
    assert result == await far.acancel(task_id), "the answer is the one that a second cancel gets"


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


def _named(n: int):  # type: ignore[no-untyped-def]
    async def work() -> int:
        return n

    work.__name__ = f"work_{n}"
    return work
