"""Test lost replies: the client repeats a committed statement and gets the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat import App, Schedule
from everbeat.domain.inspection import CancelVerdict
from everbeat.errors import NotPaused
from everbeat.store import tasks
from everbeat.store.target import Target
from tests.invariants import check_invariants
from tests.store.conftest import StoreHarness
from tests.worker.proxy import Proxy, statement_marker


@pytest.fixture
async def proxy(database_url: str, schema: str) -> AsyncIterator[Proxy]:
    async with Proxy.before(Target.parse(database_url, schema=schema)) as made:
        yield made


@pytest.fixture
async def app_behind_proxy(proxy: Proxy, schema: str) -> AsyncIterator[App]:
    """Return an app with one task that connects through the proxy."""
    app = App(proxy.target.url, schema=schema)

    @app.task
    async def work(n: int = 0) -> int:
        return n

    yield app
    await app.aclose()


async def test_a_send_whose_reply_is_lost_is_stored_once(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    proxy.lose_reply(statement_marker("task/insert_task"))
    handle = await app_behind_proxy.asend_by_name("work", {"n": 1})
    assert proxy.lost == 1
    assert db.table("tasks", "id, state") == [(handle.id, "PENDING")]


async def test_send_many_whose_reply_is_lost_stores_each_task_once(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    proxy.lose_reply(statement_marker("task/insert_tasks"))
    calls = [app_behind_proxy.task(_named(n)).call() for n in range(3)]
    handles = await app_behind_proxy.asend_many(calls)
    assert proxy.lost == 1
    assert {row[0] for row in db.table("tasks", "id")} == {handle.id for handle in handles}
    assert len(handles) == 3


async def test_a_cancel_whose_reply_is_lost_is_requested_once(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    running = db.running()
    proxy.lose_reply(statement_marker("task/cancel_task"))
    await app_behind_proxy.acancel(running.id)
    asked_at = db.row(running.id, "cancel_requested_at")
    await app_behind_proxy.acancel(running.id)
    assert (proxy.lost, db.row(running.id, "cancel_requested_at")) == (1, asked_at)
    assert db.settle(running, outcome="FAILED", error=b'{"code": "X", "message": "late"}') == "CANCELLED"


async def test_a_retry_whose_reply_is_lost_runs_the_task_once(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy, schema: str
) -> None:
    running = db.running()
    db.settle(running, outcome="FAILED", error=b'{"code": "X", "message": "failed"}')
    proxy.lose_reply(statement_marker("task/retry_task"))
    await app_behind_proxy.aretry(running.id)
    assert proxy.lost == 1
    assert [one.id for one in db.claim("w1")] == [running.id]
    assert db.claim("w2") == []
    check_invariants(db.target.url, schema, deadlocks_before=None)


async def test_a_retry_whose_reply_is_lost_does_not_repeat_a_task_that_failed_again(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    running = db.running()
    db.settle(running, outcome="FAILED", error=b'{"code": "X", "message": "failed"}')
    proxy.hold_reply(statement_marker("task/retry_task"))
    retry = asyncio.create_task(app_behind_proxy.aretry(running.id))
    await _until(lambda: db.row(running.id, "state") == "PENDING")
    (again,) = db.claim("w1")
    db.start(again)
    db.settle(again, outcome="FAILED", error=b'{"code": "X", "message": "failed again"}')
    proxy.cut()
    proxy.mend()
    await retry
    assert db.row(running.id, "state") == "FAILED", "the repeated call found its own retry"


async def test_a_repeated_cancel_before_the_start_reports_that_it_cancelled(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    task_id = db.send()
    proxy.lose_reply(statement_marker("task/cancel_task"))
    result = await app_behind_proxy.acancel(task_id)
    assert (proxy.lost, result.verdict) == (1, CancelVerdict.CANCELLED)
    assert (await app_behind_proxy.acancel(task_id)).verdict is CancelVerdict.ALREADY_ENDED


async def test_a_repeated_pause_is_reported_as_the_callers_own(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    db.send()
    proxy.lose_reply(statement_marker("pause/pause_name"))
    pause = await app_behind_proxy.apause_task("work", reason="because")
    assert (proxy.lost, pause.already_paused, pause.reason) == (1, False, "because")
    assert (await app_behind_proxy.apause_task("work")).already_paused


@pytest.mark.parametrize("kind", ["task", "queue"])
async def test_a_repeated_resume_returns_the_pause_that_it_ended(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy, kind: str
) -> None:
    db.send()
    pause, resume, name = (
        (app_behind_proxy.apause_task, app_behind_proxy.aresume_task, "work")
        if kind == "task"
        else (app_behind_proxy.apause_queue, app_behind_proxy.aresume_queue, "default")
    )
    paused = await pause(name)
    proxy.lose_reply(statement_marker("pause/resume_name"))
    assert await resume(name) == paused
    assert (proxy.lost, await app_behind_proxy.alist_pauses()) == (1, [])
    with pytest.raises(NotPaused):
        await resume(name)


async def test_a_repeated_resume_leaves_a_later_pause_alone(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    db.send()
    first = await app_behind_proxy.apause_task("work", reason="first")
    proxy.hold_reply(statement_marker("pause/resume_name"))
    resume = asyncio.create_task(app_behind_proxy.aresume_task("work"))
    direct_app = App(db.target.url, schema=db.target.schema)
    await _until(lambda: db.run(tasks.pauses()) == [])
    second = await direct_app.apause_task("work", reason="second")
    proxy.cut()
    proxy.mend()
    assert await resume == first
    assert await direct_app.alist_pauses() == [second]
    await direct_app.aclose()


async def test_a_repeated_release_names_the_workers_that_it_ended(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    running = db.running("w1")
    proxy.lose_reply(statement_marker("worker/bury_workers"))
    result = await app_behind_proxy.arelease_workers(["w1"])
    assert (proxy.lost, result.worker_ids, result.recovered_count) == (1, ("w1",), 1)
    assert db.row(running.id, "state") == "FAILED"
    assert (await app_behind_proxy.arelease_workers(["w1"])).worker_ids == ()


async def test_a_repeated_release_counts_the_tasks_that_it_recovered(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy
) -> None:
    db.send()
    db.claim("w1", limit=1)
    running = db.running("w1")
    proxy.lose_reply(statement_marker("task/recover_leases"))
    result = await app_behind_proxy.arelease_workers(["w1"])
    assert (proxy.lost, result.recovered_count, result.missed) == (1, 2, 0)
    assert {(task.was, task.action) for task in result.tasks} == {("CLAIMED", "requeue"), ("RUNNING", "fail")}
    assert db.row(running.id, "state, loss_count") == ("FAILED", 1)
    assert len(db.table("recoveries")) == 2


async def _until(truth: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not truth():
            await asyncio.sleep(0.01)  # asked from outside, of the database


def _named(n: int):  # type: ignore[no-untyped-def]
    async def work() -> int:
        return n

    work.__name__ = f"work_{n}"
    return work


SCHEDULE_CALLS: dict[str, Callable[[App], Awaitable[Any]]] = {
    "put_schedule": lambda app: app.aput_schedule(_hourly(app, overlap="skip")),
    "pause_schedule": lambda app: app.apause_schedule("hourly", reason="once"),
    "resume_schedule": lambda app: app.aresume_schedule("hourly"),
    "run_schedule": lambda app: app.arun_schedule("hourly"),
    "backfill_ticks": lambda app: app.abackfill(
        "hourly", since=LONG_AGO, until=LONG_AGO + timedelta(hours=3)
    ),
    "delete_schedule": lambda app: app.adelete_schedule("hourly"),
}
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def _hourly(app: App, **options: Any) -> Schedule:
    work = app._registry.task("work")
    assert work is not None
    return Schedule("hourly", work.call(1), **({"every": "1h"} | options))


@pytest.mark.parametrize("statement", SCHEDULE_CALLS)
async def test_a_change_of_a_schedule_whose_reply_is_lost_is_made_once(
    db: StoreHarness, app_behind_proxy: App, proxy: Proxy, statement: str
) -> None:
    await app_behind_proxy.aput_schedule(_hourly(app_behind_proxy))
    if statement == "resume_schedule":
        await app_behind_proxy.apause_schedule("hourly")
    proxy.lose_reply(statement_marker(f"schedule/{statement}"))
    reply = await SCHEDULE_CALLS[statement](app_behind_proxy)
    assert proxy.lost == 1
    sent = {"run_schedule": 1, "backfill_ticks": 3}.get(statement, 0)
    assert len(db.table("tasks", "id")) == sent
    if statement == "backfill_ticks":
        assert len(reply) == len(db.table("ticks", "at")) == 3
    states = [found.state for found in await app_behind_proxy.alist_schedules()]
    assert states == {"pause_schedule": ["PAUSED"], "delete_schedule": []}.get(statement, ["ACTIVE"])
