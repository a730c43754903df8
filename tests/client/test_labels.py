"""Test labels: where they come from, their bounds, and how far they follow a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from everbeat import App, Context, Limit, Node, RetryPolicy, Schedule, TaskFailed, Workflow
from everbeat.errors import ConfigurationError, PayloadError
from everbeat.store import schedules
from tests.client.conftest import NewApp
from tests.client.working import working
from tests.store.conftest import StoreHarness

pytestmark = pytest.mark.usefixtures("migrated")
AGAIN = RetryPolicy(max_retries=1, intervals=["1s"], jitter=0, auto_retry_for=["UNHANDLED_EXCEPTION"])
MANY = {f"key{n}": str(n) for n in range(16)}


@pytest.fixture
def running(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema)
    yield opened
    opened.close()


def indexed(db: StoreHarness) -> set[tuple[str, str]]:
    return {(key, value) for key, value, _ in db.table("labels", "key, value, id")}


def test_a_send_adds_its_labels_to_those_of_the_task_function(app: App, db: StoreHarness) -> None:
    @app.task(labels={"team": "billing", "region": "eu"})
    def charge() -> None: ...

    @app.task
    def plain() -> None: ...

    own = charge.with_options(labels={"tenant": "42"}).with_options(labels={"region": "us"})
    assert charge.send().info().labels == {"team": "billing", "region": "eu"}
    assert own.send().info().labels == {"team": "billing", "tenant": "42", "region": "us"}
    assert plain.send().info().labels == {}
    assert {each.labels.get("tenant") for each in app.list_tasks()} == {"42", None}
    db.connection.execute(db.plain("delete from {schema}.tasks where labels is null"))
    assert indexed(db) == {("team", "billing"), ("tenant", "42"), ("region", "us"), ("region", "eu")}


@pytest.mark.parametrize("count", [1, 3])
def test_every_way_of_sending_stores_and_indexes_the_labels(
    app: App, db: StoreHarness, limited: NewApp, count: int
) -> None:
    @app.task(labels={"team": "billing"})
    def charge(n: int) -> None: ...

    app.send_many(charge.with_options(labels={"n": str(n)}).call(n) for n in range(count))
    app.send_many(charge.with_options(key=str(n), unique_for="kept").call(n) for n in range(count))
    app.send_by_name("charge", {"n": 1}, labels={"by": "name"})
    app.send_by_name("elsewhere", {}, labels={"by": "name"})
    found = app.list_tasks(labels={"team": "billing"})
    assert len(found) == 2 * count + 1
    assert sorted(each.labels["n"] for each in found if "n" in each.labels) == [str(n) for n in range(count)]
    assert len(app.list_tasks(labels={"by": "name"})) == 2


def test_a_limit_that_drops_tasks_stores_the_labels_of_those_it_admits(limited: NewApp) -> None:
    from_limits = limited(Limit("one", concurrency=1, when_full="drop"))

    @from_limits.task(limits=["one"], labels={"team": "billing"})
    def charge() -> None: ...

    first = charge.send()
    assert charge.with_options(labels={"tenant": "42"}).send().id == first.id
    assert first.info().labels == {"team": "billing"}


def test_a_second_send_with_the_key_does_not_change_the_labels(app: App, db: StoreHarness) -> None:
    @app.task
    def charge(n: int) -> None: ...

    first = charge.with_options(key="k", on_duplicate="replace", labels={"tenant": "1"}).send(1)
    again = charge.with_options(key="k", on_duplicate="replace", labels={"tenant": "2"}).send(2)
    assert again.id == first.id
    assert (first.info().arguments, first.info().labels) == ({"n": 2}, {"tenant": "1"})


async def test_children_nodes_and_started_workflows_inherit_labels(running: App) -> None:
    app = running
    seen: list[dict[str, str]] = []

    @app.task(labels={"team": "billing"})
    async def child(ctx: Context, name: str) -> dict[str, str]:
        return dict(ctx.labels)

    @app.define_workflow("inner", labels={"level": "inner"})
    def inner(wf: Workflow) -> Node[dict[str, str]]:
        return wf.add(child, "node of inner")

    @app.define_workflow("outer", labels={"level": "outer", "kind": "order"})
    def outer(wf: Workflow) -> Node[dict[str, str]]:
        wf.add(child.with_options(labels={"kind": "own"}), "own label")
        mapped = wf.map(child, ["mapped"])
        assert mapped is not None
        return wf.add(inner)

    @app.task
    async def parent(ctx: Context) -> list[Any]:
        seen.append(dict(ctx.labels))
        sent = await ctx.asend(child.with_options(labels={"step": "1"}).call("sent"))
        started = await ctx.astart(outer.with_options(labels={"run": "7"}).call())
        return [await sent.aresult(timeout="30s"), await started.aresult(timeout="30s"), str(started.id)]

    async with working(app):
        handle = await parent.with_options(labels={"tenant": "42", "team": "sales"}).asend()
        of_child, of_inner, started = await handle.aresult(timeout="60s")
        nodes = await app.alist_tasks(workflow=started)
        (outer_info,) = await app.alist_workflows(parent=handle.id)
        workflows = await app.alist_workflows(labels={"tenant": "42"}, children=True)
        everything = await app.alist_tasks(labels={"tenant": "42"})
    assert seen == [{"tenant": "42", "team": "sales"}]
    assert of_child == {"tenant": "42", "team": "billing", "step": "1"}
    inherited = {"tenant": "42", "run": "7", "kind": "order"}
    assert of_inner == inherited | {"level": "inner", "team": "billing"}
    own = inherited | {"level": "outer", "team": "sales"}
    assert dict(outer_info.labels) == own
    assert sorted((each.labels["kind"], each.labels["team"]) for each in nodes) == [
        ("order", "billing"), ("own", "billing"),
    ]  # fmt: skip
    assert {each.name: each.labels["level"] for each in workflows} == {"outer": "outer", "inner": "inner"}
    assert len(everything) == 5


async def test_a_task_process_and_a_retry_see_the_labels(running: App) -> None:
    app = running

    @app.task(retry=AGAIN, labels={"team": "billing"})
    def twice(ctx: Context) -> dict[str, str]:
        if ctx.attempt == 1:
            raise RuntimeError("once")
        return dict(ctx.labels)

    async with working(app):
        handle = await twice.with_options(labels={"tenant": "42"}).asend()
        assert await handle.aresult(timeout="60s") == {"team": "billing", "tenant": "42"}


async def test_gathered_children_inherit_labels_and_callbacks_of_a_batch_have_their_own(running: App) -> None:
    app = running

    @app.task(labels={"team": "billing"})
    async def child(ctx: Context) -> dict[str, str]:
        return dict(ctx.labels)

    @app.task
    async def parent(ctx: Context) -> list[dict[str, str]]:
        async with app.batch("one", on_end=child.with_options(labels={"end": "1"}).call()) as batch:
            await batch.asend(child.with_options(labels={"n": "3"}).call())
        ended = await batch.await_end(timeout="30s")
        assert ended.on_end_id is not None
        callback = app.handle(ended.on_end_id, child)
        calls = child.with_options(labels={"n": "1"}).call(), child.call()
        return [*await ctx.agather(*calls), await callback.aresult(timeout="30s")]

    async with working(app):
        handle = await parent.with_options(labels={"tenant": "42"}).asend()
        first, second, callback = await handle.aresult(timeout="60s")
        children = await app.alist_tasks(parent=handle.id)
    assert (first, second) == (
        {"tenant": "42", "team": "billing", "n": "1"},
        {"tenant": "42", "team": "billing"},
    )
    assert callback == {"team": "billing", "end": "1"}, "a program sends the batch, so nothing is inherited"
    assert sorted(sorted(each.labels) for each in children) == [["n", "team", "tenant"], ["team", "tenant"]]


def test_an_explanation_shows_the_labels(app: App) -> None:
    @app.task(labels={"team": "billing"})
    async def charge() -> None: ...

    wf = app.workflow("order", labels={"tenant": "42"})
    wf.add(charge)
    assert app.explain(charge.send().id).labels == {"team": "billing"}
    assert wf.start().explain().labels == {"tenant": "42"}


async def test_a_child_with_too_many_labels_is_refused_before_it_is_sent(running: App) -> None:
    app = running

    @app.task
    async def child() -> None: ...

    @app.task
    async def parent(ctx: Context, how: str) -> str:
        try:
            if how == "gather":
                await ctx.agather(child.with_options(labels={"more": "1"}).call())
            elif how == "workflow":
                wf = app.workflow("one", labels={"more": "1"})
                wf.add(child)
                await ctx.astart(wf)
            else:
                await ctx.asend(child.with_options(labels={"more": "1"}).call())
        except PayloadError as refusal:
            return refusal.message
        return "sent"

    async with working(app):
        for how in ("send", "workflow", "gather"):
            handle = await parent.with_options(labels=MANY).asend(how)
            assert "17 labels" in await handle.aresult(timeout="60s")
    assert await app.alist_tasks(name="child") == []


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["tenant"], r"must map the keys of labels to values, not be of type list. Fix: write labels="),
        ({"ten ant": "1"}, r"labels\['ten ant'\] = 'ten ant': must have 1 to 64 of the characters"),
        ({"k" * 65: "1"}, "must have 1 to 64 of the characters"),
        ({"": "1"}, "must have 1 to 64 of the characters"),
        ({"_tenant": "1"}, r"'_tenant'.*reserved. Fix: use 'tenant'"),
        ({"everbeat.tenant": "1"}, r"'everbeat.tenant'.*reserved. Fix: use 'tenant'"),
        ({1: "1"}, "must be a text, not int"),
        ({"tenant": 42}, r"labels\['tenant'\] = 42: must be a text, not int. Fix: write '42'"),
        ({"tenant": None}, "must be a text, not NoneType"),
        ({"tenant": "x" * 201}, "has 201 characters, and the value of a label can have at most 200"),
        ({"tenant": "a\x00b"}, "must not contain NUL characters"),
        (MANY | {"more": "1"}, "has 17 labels, and a task or workflow can have at most 16. Fix: leave some"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["function", "send", "workflow", "definition", "start"])
def test_invalid_labels_are_refused_with_the_key_the_rule_and_a_fix(
    app: App, labels: Any, said: str, where: str
) -> None:
    @app.task
    def charge() -> None: ...

    @app.define_workflow("known")
    def known(wf: Workflow) -> None:
        wf.add(charge)

    ways: dict[str, Callable[[], object]] = {
        "function": lambda: app.task(labels=labels),
        "send": lambda: charge.with_options(labels=labels),
        "workflow": lambda: app.workflow("order", labels=labels),
        "definition": lambda: app.define_workflow("order", labels=labels)(lambda wf: None),
        "start": lambda: known.with_options(labels=labels),
    }
    with pytest.raises(ConfigurationError, match=said):
        ways[where]()


def test_the_largest_labels_are_accepted_and_found(app: App, db: StoreHarness) -> None:
    @app.task(labels=MANY)
    def charge() -> None: ...

    largest = {"Az09_.-/" + "k" * 56: "\U0001f600" * 200}
    handle = app.send_by_name("charge", {}, labels={})
    assert handle.info().labels == MANY
    with pytest.raises(ConfigurationError, match="has 17 labels"):
        charge.with_options(labels=largest)
    other = app.send_by_name("other", {}, labels=largest | {"empty": ""})
    assert [each.id for each in app.list_tasks(labels=largest)] == [other.id]
    assert [each.id for each in app.list_tasks(labels={"empty": ""})] == [other.id]


def test_a_workflow_whose_node_would_have_too_many_labels_is_refused(app: App) -> None:
    @app.task(labels={"more": "1"})
    def charge() -> None: ...

    wf = app.workflow("order", labels=MANY)
    wf.add(charge)
    with pytest.raises(ConfigurationError, match="node 'charge' would have 17 labels"):
        wf.start()

    @app.define_workflow("known", labels={"own": "1"})
    def known(wf: Workflow) -> None:
        wf.add(charge)

    with pytest.raises(ConfigurationError, match="would have 17 labels"):
        known.with_options(labels=dict(list(MANY.items())[:15])).start()
    outer = app.workflow("outer", labels=dict(list(MANY.items())[:15]))
    outer.add(known)
    with pytest.raises(ConfigurationError, match="would have 17 labels"):
        outer.start()


def test_ticks_have_the_labels_of_their_task_function(app: App, db: StoreHarness) -> None:
    @app.task(labels={"team": "billing"})
    def report() -> None: ...

    app.put_schedule(Schedule("s", report.call(), every=timedelta(hours=1)))
    handle = app.run_schedule("s")
    assert handle.info().labels == {"team": "billing"}
    stored = db.run(schedules.read_schedule("s"))
    assert stored is not None
    app.backfill("s", since=stored.created_at - timedelta(hours=3), until=stored.created_at)
    assert len(app.list_tasks(labels={"team": "billing"})) > 1


def test_a_failed_task_keeps_its_labels_in_its_error(app: App, db: StoreHarness) -> None:
    @app.task(labels={"team": "billing"})
    def work() -> None: ...

    handle = work.send()
    (claimed,) = db.claim()
    assert claimed.labels == '{"team": "billing"}'
    assert db.start(claimed) == ["started"]
    db.settle(claimed, "FAILED", error=b'{"code": "BROKEN", "message": "no"}')
    with pytest.raises(TaskFailed):
        handle.result(timeout=1)
    assert [each.id for each in app.list_tasks(labels={"team": "billing"}, error="BROKEN")] == [handle.id]
    handle.retry()
    (again,) = db.claim()
    assert again.labels == claimed.labels
