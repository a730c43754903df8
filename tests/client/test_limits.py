"""Test the limits of an app through its own methods: what a send stores, what workers declare, and what operators set."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everbeat import App, Limit, QueueConfig
from everbeat.errors import ConfigurationError, PayloadError, UnknownName
from tests.client.working import working
from tests.store.conftest import StoreHarness


def limited(app: App, *limits: Limit, **settings: Any) -> App:
    """Return an app with these limits on the same database as the app."""
    return App(app._database.address.portable, schema=app.schema, limits=limits, **settings)


def gates_of(db: StoreHarness, name: str) -> Any:
    query = "select gates, costs from {schema}.tasks where name = %s"
    return db.connection.execute(db.plain(query), [name]).fetchall()


def test_a_send_stores_the_limits_with_the_key_of_the_argument(app: App, db: StoreHarness) -> None:
    shop = limited(app, Limit("stripe", concurrency=20), Limit("tenant", concurrency=3, key="tenant_id"))

    @shop.task(limits=["stripe", "tenant"], costs={"stripe": 2})
    def charge(tenant_id: str, cents: int) -> None: ...

    charge.send("a/b", 5)
    assert gates_of(db, "charge") == [(["stripe", "tenant/a/b"], [2, 1])]
    assert [limit.name for limit in shop.limits()] == ["stripe", "tenant"]
    shop.close()


async def test_tasks_of_a_limit_run_at_most_so_many_at_a_time(app: App) -> None:
    shop = limited(app, Limit("gpu", concurrency=2))
    now, most = 0, 0

    @shop.task(limits=["gpu"])
    async def train() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)  # long enough for other tasks to start
        now -= 1

    handles = await shop.asend_many([train.call() for _ in range(12)])
    async with working(shop):
        await shop.aoutcomes(handles, timeout="20s")
    assert most == 2
    await shop.aclose()


def test_x(app: App, db: StoreHarness) -> None:
    shop = limited(app, Limit("a", concurrency=1), queues=[QueueConfig("q", concurrency=2)])

    @shop.task(limits=["a"], queue="q", concurrency=4)
    def work() -> None: ...

    work.send()
    assert gates_of(db, "work") == [(["a", "task:work", "queue:q"], None)]
    info = shop.set_limit("a", concurrency=0, reason="why")
    assert info.numbers.concurrency == 0 and info.set_by == "operator"
    assert shop.clear_limit("a").numbers.concurrency == 1
    assert shop.limit_info("a")
    with pytest.raises(UnknownName):
        shop.set_limit("b", concurrency=0, reason="why")
    shop.close()
