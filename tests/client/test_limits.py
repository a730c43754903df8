"""Test the limits of an app through its own methods: what a send stores, what workers declare, and what operators set."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest

from everbeat import App, Handle, Limit, QueueConfig, Schedule
from everbeat.errors import ConfigurationError, PayloadError, UnknownName
from everbeat.store import lines
from everbeat.store.tasks import SentTask, insert_unless_full
from tests.client.conftest import NewApp
from tests.client.working import working
from tests.store.conftest import StoreHarness


class Order(msgspec.Struct):
    tenant_id: str
    lines: list[str] = []


def gates_of(db: StoreHarness, handle: Handle[Any] | None = None, *, name: str | None = None) -> Any:
    query = db.plain("select gates, costs from {schema}.tasks where id = %s or name = %s")
    row = db.connection.execute(query, [None if handle is None else handle.id, name]).fetchone()
    assert row is not None
    return row


def codes(app: App, handle: Handle[Any]) -> list[str]:
    return [str(reason.code) for reason in app.explain(handle.id).reasons]


def test_a_send_stores_the_gates_and_costs_of_its_limits(limited: NewApp, db: StoreHarness) -> None:
    app = limited(
        Limit("stripe", concurrency=20),
        Limit("tenant", concurrency=3, key="tenant_id"),
        queues=[QueueConfig("ledger", concurrency=5)],
    )

    @app.task(limits=["stripe", "tenant"], costs={"stripe": 2})
    def charge(tenant_id: str, cents: int = 5) -> None: ...

    @app.task(concurrency=4, queue="ledger")
    def book() -> None: ...

    @app.task
    def plain() -> None: ...

    assert gates_of(db, charge.send("a/b")) == (["stripe", "tenant/a/b"], [2, 1])
    assert gates_of(db, charge.with_options(limits={"tenant": 42}, costs={"stripe": 1}).send("x")) == (
        ["stripe", "tenant/42"],
        None,
    )
    assert gates_of(db, charge.with_options(queue="ledger").send('"\\{x}')) == (
        ["stripe", 'tenant/"\\{x}', "queue:ledger"],
        [2, 1, 1],
    )
    assert gates_of(db, book.send()) == (["task:book", "queue:ledger"], None)
    assert gates_of(db, plain.send()) == (None, None)
    many = app.send_many([charge.call("a"), plain.call(), charge.call("b")])
    assert [gates_of(db, each)[0] for each in many] == [["stripe", "tenant/a"], None, ["stripe", "tenant/b"]]


def test_a_key_is_the_text_of_an_argument_or_of_a_part_of_one(limited: NewApp, db: StoreHarness) -> None:
    app = limited(
        Limit("order", concurrency=1, key="order.tenant_id"),
        Limit("number", concurrency=1, key="number"),
        Limit("any", concurrency=1, key="value.id"),
    )

    @app.task(limits=["order"])
    def pack(order: Order) -> None: ...

    @app.task(limits=["number"])
    def count(number: int | None = 7) -> None: ...

    @app.task(limits=["any"])
    def look(value: dict[str, Any]) -> None: ...

    assert gates_of(db, pack.send(Order("acme"))) == (["order/acme"], None)
    assert gates_of(db, count.send(3)) == (["number/3"], None)
    assert gates_of(db, count.send()) == (["number/7"], None)
    assert gates_of(db, count.send(None)) == (["number/null"], None)
    assert gates_of(db, look.send({"id": True})) == (["any/true"], None)
    (long,) = gates_of(db, pack.send(Order("x" * 201)))[0]
    assert long.startswith("order/sha256:")
    for wrong in ({}, {"id": [1]}, {"id": {"a": 1}}):
        with pytest.raises(PayloadError, match=r"key .value\.id. of limit .any."):
            look.send(wrong)
    with pytest.raises(PayloadError, match="NUL"):
        look.send({"id": "a\x00b"})


def test_children_nodes_and_schedules_store_the_same_gates_as_a_send(
    limited: NewApp, db: StoreHarness
) -> None:
    app = limited(Limit("tenant", concurrency=3, key="tenant_id"), Limit("gpu", concurrency=4))

    @app.task(limits=["tenant", "gpu"], costs={"gpu": 2})
    def train(tenant_id: str) -> None: ...

    child = app._sender.new_child(train.call("acme"))
    assert (child.gates, child.costs) == ('{"tenant/acme","gpu"}', "{1,2}")
    app.put_schedule(Schedule("hourly", train.call("acme"), every="1h"))
    assert gates_of(db, app.run_schedule("hourly")) == (["tenant/acme", "gpu"], [1, 2])
    assert [limit.name for limit in app.limits()] == ["gpu", "tenant"]


async def test_the_key_of_a_node_is_computed_from_the_result_that_it_gets(
    limited: NewApp, db: StoreHarness
) -> None:
    app = limited(Limit("tenant", concurrency=3, key="tenant_id"), Limit("gpu", concurrency=4))

    @app.task
    def find() -> str:
        return "x" * 250

    @app.task(limits=["tenant", "gpu"], costs={"gpu": 2})
    def train(tenant_id: str = "all") -> str:
        return tenant_id

    @app.task(limits=["tenant"])
    def sent_directly(tenant_id: str) -> None: ...

    @app.task(limits=["tenant"])
    def by_default(tenant_id: str = "all") -> None: ...

    wf = app.workflow("order")
    trained = wf.add(train, wf.add(find).result)
    wf.add(by_default)
    handle = await wf.astart(output=trained)
    async with working(app):
        assert await handle.aresult(timeout="20s") == "x" * 250
    sent = await sent_directly.asend("x" * 250)
    assert gates_of(db, name="train") == ([gates_of(db, sent)[0][0], "gpu"], [1, 2])
    assert gates_of(db, name="by_default") == (["tenant/all"], None)


def test_all_mistakes_of_a_task_s_limits_are_in_one_error(limited: NewApp) -> None:
    app = limited(
        Limit("stripe", concurrency=2, rate="100/10s", burst=3),
        Limit("tenant", concurrency=3, key="tenant_id"),
    )
    with pytest.raises(ConfigurationError) as error:

        @app.task(limits=["strpe", "stripe", "tenant"], costs={"stripe": 3, "tenent": 1}, concurrency=2)
        def charge(tenantid: str) -> None: ...

    found = {(each.code, each.value): each.fix for each in error.value.problems}
    assert found[("UNKNOWN_LIMIT", "'strpe'")] == "use 'stripe'"
    assert found[("UNKNOWN_LIMIT", "'tenent'")] == "use 'tenant'"
    assert found[("UNKNOWN_PARAMETER", "'tenant_id'")] == "use key='tenantid'"
    assert found[("OUT_OF_RANGE", "3")] == "use 2 or less, or raise concurrency to 3 or more"
    assert ("WRONG_COUNT", "4") in found


def test_a_key_that_is_not_a_part_of_a_parameter_is_rejected_at_registration(limited: NewApp) -> None:
    app = limited(Limit("tenant", concurrency=3, key="order.tenant"))
    with pytest.raises(ConfigurationError, match=r"Order has no.*tenant_id"):

        @app.task(limits=["tenant"])
        def pack(order: Order) -> None: ...


def test_a_send_with_a_limit_that_the_task_does_not_have_is_rejected(limited: NewApp) -> None:
    app = limited(Limit("tenant", concurrency=3, key="tenant_id"), Limit("other", concurrency=1))

    @app.task(limits=["tenant"])
    def charge(tenant_id: str) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'other'.*is not a limit of this task, which has: tenant"):
        charge.with_options(limits={"other": "x"}).send("a")
    with pytest.raises(ConfigurationError, match="cost of task 'charge' = 4"):
        charge.with_options(costs={"tenant": 4}).send("a")
    with pytest.raises(ConfigurationError, match=r"use 'tenant'"):
        app.send_by_name("elsewhere", limits={"tenent": "x"})


def test_a_send_by_name_has_the_limits_that_the_sender_names(limited: NewApp, db: StoreHarness) -> None:
    app = limited()
    sent = app.send_by_name("elsewhere", limits={"tenant": "acme", "gpu": None}, costs={"gpu": 2})
    assert gates_of(db, sent) == (["tenant/acme", "gpu"], [1, 2])


def test_a_send_stores_missing_limits_outside_of_the_users_transaction(
    limited: NewApp, db: StoreHarness, database_url: str
) -> None:
    app = limited(Limit("gpu", concurrency=4))

    @app.task(limits=["gpu"])
    def train() -> None: ...

    @app.task
    def plain() -> None: ...

    plain.send()
    assert app.limits() == []
    with psycopg.connect(database_url) as connection:
        train.with_options(connection=connection).send()
        assert [limit.name for limit in app.limits()] == ["gpu"]
        connection.rollback()
    assert [limit.numbers.concurrency for limit in app.limits()] == [4]
    assert limited(Limit("gpu", concurrency=9)).limits()[0].numbers.concurrency == 4


def test_explain_counts_the_other_holders_and_not_their_permits(limited: NewApp, db: StoreHarness) -> None:
    app = limited(Limit("gpu", concurrency=10))

    @app.task(limits=["gpu"], costs={"gpu": 2})
    def train() -> None: ...

    waiting = app.send_many([train.call() for _ in range(6)])[-1]
    assert len(db.claim(names=("train",), starts=10)) == 5
    (reason,) = app.explain(waiting.id).reasons
    assert "limit 'gpu' has 10 permits, and 10 are in use, and the task needs 2; held by task" in reason.text
    assert reason.text.count(" on worker w1 ") == 3
    assert reason.text.endswith(" and 2 other tasks")


async def declared(app: App, name: str, concurrency: int | None) -> None:
    """Wait until the supervisor has applied this declaration (None: the limit is deleted)."""
    async with asyncio.timeout(10):
        while True:
            found = {each.name: each.declared for each in await app.alimits()}
            numbers = found.get(name)
            if (None if numbers is None else numbers.concurrency) == concurrency and (name in found) == bool(
                concurrency
            ):
                return
            await asyncio.sleep(0.05)  # the supervisor applies the declaration after the registration


def shop_of(limited: NewApp, concurrency: int, *more: Limit) -> App:
    app = limited(Limit("gpu", concurrency=concurrency), *more, name="shop")

    @app.task(limits=["gpu"])
    def train() -> None: ...

    return app


async def test_the_newest_declaration_of_a_worker_counts_and_a_rollback_restores_the_older_one(
    limited: NewApp,
) -> None:  # K6
    first, second = shop_of(limited, 1), shop_of(limited, 2, Limit("old", concurrency=1))
    async with working(first):
        await declared(first, "gpu", 1)
    async with working(second):
        await declared(second, "gpu", 2)
        await declared(second, "old", 1)
    rollback = shop_of(limited, 1)
    async with working(rollback):
        await declared(rollback, "gpu", 1)
        await declared(rollback, "old", None)
    (info,) = await first.alimits()
    assert (info.numbers.concurrency, info.declared_by) == (1, "shop")


async def test_a_limit_that_a_worker_no_longer_declares_stays_while_tasks_wait_for_it(
    limited: NewApp,
) -> None:
    old, new = shop_of(limited, 1, Limit("old", concurrency=1)), shop_of(limited, 2)

    @old.task(limits=["old"])
    def only_in_old_code() -> None: ...

    await only_in_old_code.aschedule(timedelta(hours=1))
    async with working(old):
        await declared(old, "old", 1)
    async with working(new):
        await declared(new, "gpu", 2)
        await asyncio.sleep(0.5)  # another pass would have deleted the limit
    assert "old" in [each.name for each in await new.alimits()]


async def test_numbers_that_an_operator_sets_survive_a_declaration(limited: NewApp) -> None:  # K6
    old, new = shop_of(limited, 1), shop_of(limited, 2)
    async with working(old):
        await declared(old, "gpu", 1)
        info = await old.aset_limit("gpu", concurrency=5, rate="10/1s", burst=3, reason="an incident")
    assert (info.set_by, info.reason, info.until) == ("operator", "an incident", None)
    async with working(new):
        await declared(new, "gpu", 2)
    numbers = (await new.alimit_info("gpu")).numbers
    assert (numbers.concurrency, numbers.rate, numbers.burst) == (5, "10/1s", 3)
    info = await new.aclear_limit("gpu")
    assert (info.numbers.concurrency, info.numbers.rate, info.numbers.burst, info.set_by) == (
        2,
        None,
        1,
        None,
    )


async def test_a_changed_number_takes_effect_within_a_second_while_tasks_wait(limited: NewApp) -> None:  # K7
    app = limited(Limit("gpu", concurrency=1))
    now, most = 0, 0

    @app.task(limits=["gpu"])
    async def train() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.3)  # long enough for other tasks to start
        now -= 1

    handles = await app.asend_many([train.call() for _ in range(60)])
    async with working(app):
        while not most:
            await asyncio.sleep(0.02)  # until the first task has started
        await app.aset_limit("gpu", concurrency=20)
        async with asyncio.timeout(1.0):
            while most < 20:
                await asyncio.sleep(0.02)  # until the new number is used
        await app.aset_limit("gpu", concurrency=0)
        await asyncio.sleep(1.0)  # every started task ends, and no other may start
        most = 0
        await asyncio.sleep(0.5)  # no task may start
        assert (now, most) == (0, 0)
        await app.aclear_limit("gpu")
        await app.aset_limit("gpu", concurrency=None, until=datetime.now(UTC) + timedelta(hours=1))
        await app.aoutcomes(handles, timeout="20s")
    assert most > 20


def test_wrong_numbers_of_a_limit_are_in_one_error(limited: NewApp) -> None:
    app = limited(Limit("gpu", concurrency=1), Limit("api", rate="10/1s", window="sliding"))

    @app.task(limits=["gpu", "api"])
    def train() -> None: ...

    train.send()
    with pytest.raises(ConfigurationError) as error:
        app.set_limit("gpu", concurrency=-1, rate="x", reason=" ", burts=3)  # type: ignore[call-arg]
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigurationError, match="changes no number"):
        app.set_limit("gpu", reason="none")
    with pytest.raises(ConfigurationError, match="at most 1,000 starts"):
        app.set_limit("api", rate="1001/1s")
    with pytest.raises(ConfigurationError, match="has no effect"):
        app.set_limit("gpu", burst=3)
    with pytest.raises(UnknownName, match="did you mean 'gpu'"):
        app.set_limit("gpu1", concurrency=1)
    with pytest.raises(UnknownName):
        app.clear_limit("none")


def test_a_limit_shows_its_keys_and_the_holders_of_its_permits(limited: NewApp, db: StoreHarness) -> None:
    app = limited(Limit("tenant", concurrency=1, key="tenant_id"))

    @app.task(limits=["tenant"])
    def charge(tenant_id: str) -> None: ...

    sent = [charge.send(each) for each in ("a", "a", "b", "c")]
    (first, second) = db.claim(names=("charge",), starts=2, limit=2)
    keys = {each.id: key for each, key in zip(sent, ("a", "a", "b", "c"), strict=True)}
    info = app.limit_info("tenant")
    assert (info.held, info.waiting, info.keys, info.key) == (2, 2, 3, "tenant_id")
    held = {keys[first.id], keys[second.id]}
    assert {each.key: each.held for each in info.in_use} == {key: int(key in held) for key in "abc"}
    assert sum(each.waiting for each in info.in_use) == 2
    holder = next(each for each in info.holders if each.task_id == first.id)
    assert (holder.name, holder.worker_id, holder.hostname, holder.pid) == ("charge", "w1", "host", 2)
    assert holder.last_beat_at is not None
    assert {each.task_id for each in info.holders} <= {each.id for each in sent}


def test_explain_names_the_limit_that_keeps_a_task_from_starting(
    limited: NewApp, db: StoreHarness
) -> None:  # K8
    app = limited(
        Limit("gpu", concurrency=1),
        Limit("api", rate="1/1m"),
        Limit("tenant", concurrency=1, key="tenant_id", fairness="round_robin"),
    )

    @app.task(limits=["gpu"])
    def train() -> None: ...

    @app.task(limits=["api"])
    def call() -> None: ...

    @app.task(limits=["tenant", "gpu"])
    def charge(tenant_id: str) -> None: ...

    names = ("train", "call", "charge")
    running, waiting = train.send(), train.send()
    call.send()
    later = call.send()
    db.claim(names=names, starts=10)
    assert codes(app, running) == ["RUNNING"]
    assert codes(app, waiting) == ["LIMIT_REACHED"]
    (reason,) = app.explain(waiting.id).reasons
    assert f"task {running.id} on worker w1 (beat " in reason.text
    assert "if silent, keeps it until" in reason.text
    (reason,) = app.explain(later.id).reasons
    assert (reason.code, reason.until is not None) == ("RATE_REACHED", True)
    assert reason.text.startswith("limit 'api' permits 1 start in 1m: the next start is at ")
    sent = [charge.send(each) for each in ("a", "b", "c")]
    db.claim(names=names, starts=10)
    turns = {
        str(reason.text): codes(app, each) for each in sent for reason in app.explain(each.id).reasons[1:]
    }
    assert [each.partition(": ")[2] for each in sorted(turns)] == [
        "1 key before this one when it has room",
        "2 keys before this one when it has room",
    ]
    assert [*turns.values()] == [["LIMIT_REACHED", "FAIRNESS_TURN"]] * 2
    costly = db.send("train", gates='{"gpu"}', costs="{2}")
    (reason,) = app.explain(costly).reasons
    assert (reason.code, reason.text) == (
        "LIMIT_REACHED",
        "the task needs 2 permits of limit 'gpu', which never has more than 1, so it never starts",
    )
    app.set_limit("gpu", concurrency=0, reason="maintenance")
    (reason,) = app.explain(waiting.id).reasons
    assert (reason.code, reason.text) == (
        "LIMIT_PAUSED",
        "the concurrency of limit 'gpu' was set to 0 by operator: maintenance",
    )


def test_a_send_that_finds_its_limit_full_returns_the_task_that_holds_the_permit(
    limited: NewApp, db: StoreHarness
) -> None:
    app = limited(Limit("report", concurrency=1, when_full="drop", key="user"))

    @app.task(limits=["report"])
    def report(user: str) -> None: ...

    first = report.send("ann")
    assert report.send("ann").id == first.id
    assert report.send("ben").id != first.id
    claimed = db.claim(names=("report",), starts=10)
    assert {each.id for each in claimed} >= {first.id}
    assert report.send("ann").id == first.id
    db.start(*claimed)
    db.complete(*claimed)
    assert report.send("ann").id != first.id


def test_a_dropped_send_can_be_repeated_after_a_lost_reply(limited: NewApp, db: StoreHarness) -> None:
    app = limited(Limit("report", concurrency=1, when_full="drop"))

    @app.task(limits=["report"])
    def report() -> None: ...

    app.set_limit("report", concurrency=1)
    new = app._sender._new_task(report.call())
    statement = insert_unless_full(new, channel=db.target.channel)
    sent = SentTask(new.id, "report")
    assert [db.run(statement), db.run(statement)] == [sent, sent]
    other = app._sender._new_task(report.call())
    again = insert_unless_full(other, channel=db.target.channel)
    assert [db.run(again), db.run(again)] == [sent, sent]


def test_only_a_plain_send_can_be_dropped(limited: NewApp) -> None:
    app = limited(Limit("report", concurrency=1, when_full="drop"))

    @app.task(limits=["report"])
    def report() -> None: ...

    with pytest.raises(ConfigurationError, match="a send of many tasks cannot leave out a task"):
        app.send_many([report.call()])
    with pytest.raises(ConfigurationError, match="a schedule cannot"):
        app.put_schedule(Schedule("hourly", report.call(), every="1h"))
    with pytest.raises(ConfigurationError, match="a child task cannot"):
        app._sender.new_child(report.call())
    wf = app.workflow("w")
    wf.add(report)
    with pytest.raises(ConfigurationError, match="a workflow node cannot"):
        wf.start()


def test_the_surplus_of_concurrent_sends_is_cancelled_except_tasks_that_have_run(
    limited: NewApp, db: StoreHarness
) -> None:
    app = limited(Limit("report", concurrency=2, when_full="drop"))

    @app.task(limits=["report"])
    def report() -> None: ...

    app.set_limit("report", concurrency=2)
    sent = [db.send(name="report", gates='{"report"}') for _ in range(4)]
    (claimed, ran) = db.claim(names=("report",), starts=2, limit=2)
    db.settle(ran, "RELEASED")
    db.run(lines.apply_changes(readers=["report"], queues=None, channel=None))
    query = db.plain("select {schema}.cancel_surplus(array(select line from {schema}.lines), null)")
    db.connection.execute(query)
    states: dict[UUID, str] = {row[0]: row[1] for row in db.table("tasks", "id, state")}
    assert [claimed.id, ran.id] == sent[:2]
    assert [states[each] for each in sent] == ["RUNNING", "PENDING", "CANCELLED", "CANCELLED"]


def test_only_the_newest_waiting_task_of_a_key_stays(limited: NewApp, db: StoreHarness) -> None:
    app = limited(Limit("preview", concurrency=1, when_full="newest", key="page"))

    @app.task(limits=["preview"])
    def preview(page: str) -> None: ...

    first = preview.send("a")
    claimed = db.claim(names=("preview",), starts=1, limit=1)
    older, newest, other = preview.send("a"), preview.send("a"), preview.send("b")
    db.claim(names=("preview",), starts=0)
    states = {row[0]: row[1] for row in db.table("tasks", "id, state")}
    assert [each.id for each in claimed] == [first.id]
    assert [states[each.id] for each in (older, newest, other)] == ["CANCELLED", "PENDING", "PENDING"]


def test_a_program_that_waits_for_a_task_is_notified_when_a_newer_task_cancels_it(
    limited: NewApp, db: StoreHarness
) -> None:
    app = limited(Limit("preview", concurrency=1, when_full="newest"))

    @app.task(limits=["preview"])
    def preview(page: str) -> None: ...

    preview.send("first")
    db.claim(names=("preview",), starts=1, limit=1)
    older, _ = preview.send("a"), preview.send("b")
    with db.target.connect("everbeat listener") as listener:
        listener.execute(f'listen "{db.target.channel}"'.encode())
        db.claim(names=("preview",), starts=0)
        assert any(note.payload == f"d:{older.id}" for note in listener.notifies(timeout=10))
    assert older.info().state == "CANCELLED"
