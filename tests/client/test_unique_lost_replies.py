"""Test lost replies to sends with scopes of uniqueness: the repeated statement gives the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from everbeat import App, Handle
from everbeat.errors import DuplicateTask
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.variants import every_nth_quick
from tests.worker.proxy import Proxy, statement_marker

SEND = statement_marker("task/insert_unique_tasks")


@pytest.fixture
async def proxy(database_url: str, schema: str) -> AsyncIterator[Proxy]:
    async with Proxy.before(Target.parse(database_url, schema=schema)) as made:
        yield made


@pytest.fixture
async def task(proxy: Proxy, schema: str) -> AsyncIterator[Any]:
    """Return a task of an app that connects through the proxy."""
    app = App(proxy.target.url, schema=schema)

    @app.task
    async def work(n: int = 0) -> int:
        return n

    yield work
    await app.aclose()


@pytest.fixture
def direct(app: App, db: StoreHarness) -> Any:
    """Return the same task of an app that does not use the proxy."""

    @app.task
    async def work(n: int = 0) -> int:
        return n

    return work


async def while_the_reply_is_held(
    proxy: Proxy,
    send: Callable[[], Awaitable[Handle[Any]]],
    committed: Callable[[], bool],
    act: Callable[[], object],
) -> Handle[Any]:
    """Send, act after the commit, and then lose the reply, so that the statement is repeated."""
    proxy.hold_reply(SEND)
    sending = asyncio.ensure_future(send())
    for _ in range(1_000):
        if committed():
            break
        await asyncio.sleep(0.01)  # the other session commits without a signal to the test
    assert committed()
    act()
    proxy.cut()
    proxy.mend()
    return await sending


def has_answered(db: StoreHarness) -> bool:
    """Return whether the server has executed a statement of a send and waits for the next one on that connection."""
    query = "select count(*) from pg_stat_activity where state = 'idle' and query like %s"
    row = db.connection.execute(query, [SEND.decode() + "%"]).fetchone()
    return row is not None and row[0] > 0  # the direct app has announced its send since


def run_everything(db: StoreHarness) -> None:
    for claimed in db.claim():
        db.start(claimed)
        db.complete(claimed)


@pytest.mark.parametrize(
    ("scope", "answer"),
    every_nth_quick(
        3, [(scope, answer) for scope in ("live", "waiting", "1h", "kept") for answer in ("existing", "replace", "debounce", "reject")]
    ),
)  # fmt: skip
async def test_a_send_whose_reply_is_lost_is_stored_once_and_its_task_did_not_exist(
    db: StoreHarness, task: Any, proxy: Proxy, scope: str, answer: str
) -> None:  # K8
    if (scope, answer) == ("live", "existing"):
        proxy.lose_reply(statement_marker("task/insert_task"))
    else:
        proxy.lose_reply(SEND)
    handle = await task.with_options(key="k", unique_for=scope, on_duplicate=answer).asend(1)
    assert (proxy.lost, handle.existed) == (1, False)
    assert db.table("tasks", "id, state") == [(handle.id, "PENDING")]


@pytest.mark.parametrize("scope", ["waiting", "1h", "kept"])
async def test_a_repeated_send_finds_its_task_that_has_ended_in_the_meantime(
    db: StoreHarness, task: Any, proxy: Proxy, direct: Any, scope: str
) -> None:  # K8
    chosen = task.with_options(key="k", unique_for=scope)
    handle = await while_the_reply_is_held(
        proxy, lambda: chosen.asend(1), lambda: bool(db.table("tasks")), lambda: run_everything(db)
    )
    assert not handle.existed
    assert db.table("tasks", "id, state") == [(handle.id, "COMPLETED")]
    again = await direct.with_options(key="k", unique_for=scope).asend(2)
    assert again.existed == (scope != "waiting"), "the repeated send did not take the key again"


@pytest.mark.parametrize("scope", ["live", "waiting", "1h"])
@pytest.mark.parametrize("answer", ["replace", "debounce"])
async def test_a_repeated_send_finds_the_task_that_its_first_try_changed(
    db: StoreHarness, task: Any, proxy: Proxy, direct: Any, scope: str, answer: str
) -> None:  # K8
    """The task ends before the repeat. Without its mark, the arguments would run twice."""
    options = {"key": "k", "unique_for": scope, "on_duplicate": answer}
    first = await direct.with_options(**options).asend(1)
    handle = await while_the_reply_is_held(
        proxy,
        lambda: task.with_options(**options).asend(2),
        lambda: db.row(first.id, "last_send is not null"),
        lambda: run_everything(db),
    )
    assert (handle.id, handle.existed) == (first.id, True)
    assert db.table("tasks", "id, state") == [(first.id, "COMPLETED")]


async def test_a_repeated_send_stores_its_task_if_the_task_that_it_found_has_ended(
    db: StoreHarness, task: Any, proxy: Proxy, direct: Any
) -> None:  # K8
    """No caller saw the first answer, so the send counts as made at its last try."""
    first = await direct.with_options(key="k", unique_for="waiting").asend(1)
    handle = await while_the_reply_is_held(
        proxy,
        lambda: task.with_options(key="k", unique_for="waiting").asend(2),
        lambda: has_answered(db),
        lambda: run_everything(db),
    )
    assert not handle.existed
    assert handle.id != first.id


async def test_a_rejected_send_whose_reply_is_lost_is_rejected_again(
    db: StoreHarness, task: Any, proxy: Proxy, direct: Any
) -> None:  # K8
    first = await direct.with_options(key="k", unique_for="kept").asend(1)
    proxy.lose_reply(SEND)
    with pytest.raises(DuplicateTask, match=f"task {first.id} has this key"):
        await task.with_options(key="k", unique_for="kept", on_duplicate="reject").asend(2)
    assert (proxy.lost, len(db.table("tasks"))) == (1, 1)


async def test_a_send_many_whose_reply_is_lost_stores_each_task_once(
    db: StoreHarness, task: Any, proxy: Proxy, direct: Any
) -> None:  # K8
    first = await direct.with_options(key="old", unique_for="kept", on_duplicate="replace").asend(1)
    calls = [
        task.with_options(key=key, unique_for="kept", on_duplicate="replace").call(n)
        for n, key in enumerate(("old", "new"))
    ]
    proxy.lose_reply(SEND)
    handles = await task.asend_many([*calls, task.call(5)])
    assert (proxy.lost, [each.existed for each in handles]) == (1, [True, False, False])
    assert handles[0].id == first.id
    assert len(db.table("tasks")) == 3
