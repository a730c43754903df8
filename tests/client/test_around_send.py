"""Test functions around sends: what they see, what they can change, and which sends pass through them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from everbeat import App, Context, QueueConfig, RetryPolicy
from everbeat.client.task import SyncTask
from everbeat.errors import ConfigurationError, PayloadError, RegistrationError
from everbeat.middleware import SendCall
from everbeat.store import batches
from tests.store.conftest import StoreHarness

pytestmark = pytest.mark.usefixtures("migrated")


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema, queues=[QueueConfig("eu"), QueueConfig("bulk")])
    yield opened
    opened.close()


@pytest.fixture
def pack(app: App) -> SyncTask[[str, int], None]:
    @app.task(priority=5)
    def pack(region: str, parcels: int = 1) -> None: ...

    return pack


def to_eu(call: SendCall) -> SendCall | None:
    return call.with_options(queue="eu") if call.arguments["region"] == "eu" else None


async def test_every_kind_of_send_passes_through(app: App, pack: SyncTask[[str, int], None]) -> None:
    app.around_send(to_eu)
    sent = [
        await pack.asend("eu", 1),
        await pack.aschedule(timedelta(hours=1), "eu", 1),
        *await app.asend_many([pack.call("eu", 1), pack.call("us", 1)]),
        *await pack.asend_many([pack.call("eu", 2)]),
        await app.asend_by_name("pack", {"region": "eu"}),
        await app.asend_by_name("unknown", {"region": "eu"}),
    ]
    queues = [(await handle.ainfo()).queue for handle in sent]
    assert queues == ["eu", "eu", "eu", "default", "eu", "eu", "eu"]


def test_the_sync_sends_pass_through(app: App, pack: SyncTask[[str, int], None]) -> None:
    app.around_send(to_eu)
    sent = [pack.send("eu", 1), *app.send_many([pack.call("eu", 1)]), pack.schedule(timedelta(1), "eu", 1)]
    assert {handle.info().queue for handle in sent} == {"eu"}


def test_the_tasks_and_callbacks_of_batches_pass_through(
    app: App, db: StoreHarness, pack: SyncTask[[str, int], None]
) -> None:
    app.around_send(to_eu)
    with app.batch("parcels", on_end=pack.call("eu", 1)) as batch:
        sent = [batch.send(pack.call("eu", 1)), *batch.send_many([pack.call("eu", 1), pack.call("us", 1)])]
    batch.cancel()
    db.run(batches.advance_batches(channel=db.target.channel))
    on_end_id = batch.status().on_end_id
    assert on_end_id is not None
    queues = [handle.info().queue for handle in [*sent, app.handle(on_end_id)]]
    assert queues == ["eu", "eu", "default", "eu"]
    app.around_send(lambda call: call.with_options(key="one"))
    with pytest.raises(PayloadError, match="cannot be the on_success of a batch: it has a key"):
        app.batch("parcels", on_success=pack.call("eu", 1))


def test_functions_are_called_in_order_and_see_the_changes_of_the_earlier_ones(
    app: App, pack: SyncTask[[str, int], None]
) -> None:
    seen: list[tuple[Any, ...]] = []

    @app.around_send
    def first(call: SendCall) -> SendCall:
        seen.append((call.name, call.queue, call.priority, call.key, dict(call.arguments)))
        return call.with_options(queue="bulk", priority=7, retry=RetryPolicy(auto_retry_for=[OSError]))

    @app.around_send
    def second(call: SendCall) -> SendCall:
        seen.append((call.queue, call.priority))
        return call.with_options(key=f"pack-{call.arguments['parcels']}")

    handle = pack.send("us", 3)
    assert seen == [("pack", "default", 5, None, {"region": "us", "parcels": 3}), ("bulk", 7)]
    info = handle.info()
    assert (info.queue, info.priority, info.key) == ("bulk", 7, "pack-3")
    assert pack.send("us", 3).id == handle.id, "the key is as good as one of the sender"


def test_an_exception_refuses_the_send_and_nothing_is_stored(
    app: App, pack: SyncTask[[str, int], None]
) -> None:
    @app.around_send
    def closed(call: SendCall) -> None:
        if call.arguments["parcels"] > 1:
            raise PermissionError("the shop is closed")

    with pytest.raises(PermissionError, match="the shop is closed"):
        app.send_many([pack.call("us", 1), pack.call("us", 2)])
    assert app.list_tasks() == []
    pack.send("us", 1)


async def test_a_child_passes_through_when_its_parent_sends_it(
    app: App, pack: SyncTask[[str, int], None]
) -> None:
    app.around_send(to_eu)

    @app.task
    def order(ctx: Context, region: str) -> str:
        return str(ctx.send(pack.call("eu", 1)).id)

    worker = asyncio.create_task(app.arun_worker(queues=["default"], process_concurrency=0))
    child = await (await order.asend("us")).aresult(timeout=30)
    app.stop_worker()
    await worker
    assert (await app.handle(child).ainfo()).queue == "eu"


@pytest.mark.parametrize("name", ["connection", "patience"])
def test_the_way_of_a_send_to_the_database_cannot_be_changed(
    app: App, pack: SyncTask[[str, int], None], name: str
) -> None:
    @app.around_send
    def other(call: SendCall) -> SendCall:
        return call.with_options(**{name: 1})  # type: ignore[arg-type]

    with pytest.raises(ConfigurationError, match="cannot be changed around a send"):
        pack.send("us", 1)


def test_a_wrong_option_and_a_wrong_result_are_rejected(app: App, pack: SyncTask[[str, int], None]) -> None:
    results: Iterator[Callable[[SendCall], Any]] = iter(
        [lambda call: call.with_options(queue="asia"), lambda call: call.name]
    )

    @app.around_send
    def wrong(call: SendCall) -> Any:
        return next(results)(call)

    with pytest.raises(ConfigurationError, match="'asia'"):
        pack.send("us", 1)
    with pytest.raises(ConfigurationError, match="must be a SendCall or None, not of type str"):
        pack.send("us", 1)


async def waits(call: SendCall) -> None: ...


def yields(call: SendCall) -> Iterator[None]:
    yield


def two(call: SendCall, more: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (waits, "it is async"),
        (yields, "it is a generator"),
        (two, "with one argument"),
        (3, "not a function"),
    ],
)
def test_an_unsuitable_function_is_rejected(app: App, function: Any, why: str) -> None:
    with pytest.raises(RegistrationError, match=why):
        app.around_send(function)
