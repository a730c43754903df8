"""PostgreSQL rejects a commit that notifies while its notification queue is full. No statement of everbeat fails because of that."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.domain.bulk_actions import BulkVerb
from everbeat.domain.workflow.graph import Graph
from everbeat.domain.workflow.states import plan_retry
from everbeat.embedded.server import EmbeddedServer
from everbeat.errors import DatabaseError
from everbeat.store import (
    batches,
    bulk,
    expiry,
    leases,
    limits,
    messages,
    migrating,
    schedules,
    statement,
    tasks,
    workflows,
)
from everbeat.store import workflow_control as control
from everbeat.store.announcer import announcement
from everbeat.store.claims import set_aside
from everbeat.store.database import Database
from everbeat.store.leases import decline
from everbeat.store.refusals import is_refused_data, is_refused_hint, is_repeatable
from everbeat.store.session import RunStatement, Session
from everbeat.store.statement import source
from everbeat.store.steps import cancel_started
from everbeat.store.target import Target
from everbeat.store.unique_tasks import UniqueTask, insert_unique_tasks
from everbeat.store.workers import quiet
from tests.conftest import FAST_SETTINGS
from tests.notify_queue import SETTINGS, fill, full_queue, holding, require_small_queue, usage
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, task
from tests.store.scheduling import decide, decision, make_due, put, sent
from tests.store.test_advance import failing
from tests.store.test_batches import fill as fill_batch
from tests.store.test_batches import open_batch, portion, send_children
from tests.store.test_messages import hold
from tests.store.test_signals import send, suspension, waiting
from tests.store.test_started_by_tasks import start
from tests.store.test_steps import send_child
from tests.store.test_streams import insertion, items

GUARD: Final = re.compile(r"(\(select )?pg_notification_queue_usage\(\)(?(1)\)) < 0\.5")
Act = Callable[[], object]


@pytest.fixture(scope="module")
def server(database_url: str) -> Iterator[EmbeddedServer]:
    require_small_queue(database_url)
    with (
        tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer.open(Path(folder), settings=FAST_SETTINGS | SETTINGS) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def migrated(server: EmbeddedServer) -> Iterator[StoreHarness]:
    target = Target.parse(server.url, schema="full")
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    party = StoreHarness(target, connection)
    party.supervisor("s1", "w1", "w2")
    party.run(messages.use_messages(channel=target.channel))
    yield party
    party.database.close()
    connection.close()


@pytest.fixture
def crowded(migrated: StoreHarness) -> StoreHarness:
    """The harness with an empty schema, on a server whose queue fills quickly."""
    names = "tasks, batches, batch_events, workflows, nodes, outbox, pauses, signals, recoveries, message_outbox, schedules, ticks"
    migrated.connection.execute(
        migrated.plain(
            "truncate " + ", ".join(f"{{schema}}.{name}" for name in names.split(", ")) + " cascade"
        )
    )
    migrated.connection.execute(
        migrated.plain("update {schema}.relay set holder = null, taken_until = '2000-01-01'")
    )
    return migrated


# Each function prepares the rows that its statement needs, and returns a callable that runs it.


def send_one(db: StoreHarness) -> Act:
    def act() -> object:
        task = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")
        return db.run(tasks.insert_task(task, channel=db.target.channel, joined=True))

    return act


def announce(db: StoreHarness) -> Act:
    return lambda: db.run(announcement(["t:default"], channel=db.target.channel))


def send_many(db: StoreHarness) -> Act:
    task = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")
    return lambda: db.run(tasks.insert_tasks([task], channel=db.target.channel, joined=True))


def start_late(db: StoreHarness) -> Act:
    db.send()
    (claimed,) = db.claim()
    db.connection.execute(db.plain("update {schema}.tasks set good_until = now() - interval '1 second'"))
    return lambda: db.start(claimed)


def complete(db: StoreHarness) -> Act:
    held = db.running()
    return lambda: db.complete(held)


def settle(db: StoreHarness) -> Act:
    held = db.running()
    return lambda: db.settle(held, "FAILED", error=b'{"code": "X"}')


def recover(db: StoreHarness) -> Act:
    db.running()
    (lease,) = db.leases()
    return lambda: db.recover(lease, "retry")


def release(db: StoreHarness) -> Act:
    db.send()
    (claimed,) = db.claim()
    return lambda: db.run(leases.release([(claimed.id, claimed.claim_id)], channel=db.target.channel))


def hand_back(db: StoreHarness) -> Act:
    held = db.running()
    return lambda: db.run(decline([(held.id, held.claim_id)], channel=db.target.channel))


def put_aside(db: StoreHarness) -> Act:
    db.connection.execute(
        db.plain(
            "insert into {schema}.tasks (id, name, queue, priority, args)"
            " select gen_random_uuid(), 'other', 'default', 0, '{{}}' from generate_series(1, 1000)"
        )
    )
    return lambda: db.run(set_aside(names=["work"], queues=None, channel=db.target.channel))


def expire(db: StoreHarness) -> Act:
    db.send()
    db.connection.execute(db.plain("update {schema}.tasks set good_until = now() - interval '1 second'"))
    return lambda: db.run(expiry.expire(channel=db.target.channel))


def cancel(db: StoreHarness) -> Act:
    held = db.running()
    return lambda: db.cancel(held.id)


def retry(db: StoreHarness) -> Act:
    held = db.running()
    db.settle(held, "FAILED", error=b'{"code": "X"}')
    return lambda: db.run(tasks.retry(held.id, channel=db.target.channel, call=uuid4()))


def in_bulk(verb: BulkVerb) -> Callable[[StoreHarness], Act]:
    """Return an act that changes one task as a portion of a bulk action does."""

    def begin(db: StoreHarness) -> Act:
        held = db.running()
        if verb is BulkVerb.RETRY:
            db.settle(held, "FAILED", error=b'{"code": "X"}')
        task_id = db.send() if verb is BulkVerb.MOVE else held.id
        parameters = {"to_queue": "big"} if verb is BulkVerb.MOVE else {}
        return lambda: db.run(
            bulk.act(verb, [task_id], call=uuid4(), parameters=parameters, channel=db.target.channel)
        )

    return begin


def cancel_children(db: StoreHarness) -> Act:
    held = db.running()
    send_child(db, held)
    return lambda: db.run(tasks.cancel_children(held.id, channel=db.target.channel))


def child(db: StoreHarness) -> Act:
    held = db.running()
    return lambda: send_child(db, held)


def gathered_children(db: StoreHarness) -> Act:
    held = db.running()
    return lambda: send_children(db, held, portion(held.id))


def cancel_batch(db: StoreHarness) -> Act:
    batch_id = open_batch(db)
    fill_batch(db, batch_id)
    return lambda: db.run(batches.cancel_tasks(batch_id, channel=db.target.channel))


def end_batch(db: StoreHarness) -> Act:
    batch_id = open_batch(db)
    db.run(batches.seal_batch(batch_id))
    return lambda: db.run(batches.advance_batches(channel=db.target.channel))


def resume_queue(db: StoreHarness) -> Act:
    pause = db.run(tasks.pause("queue", "mail", paused_by="me", reason=None, call=uuid4()))
    assert pause is not None
    return lambda: db.run(tasks.resume(pause, channel=db.target.channel))


def signal(db: StoreHarness) -> Act:
    held = db.running()
    db.run(waiting(held))
    db.run(suspension(held, db))
    return lambda: send(db, held.id)


def start_workflow(db: StoreHarness) -> Act:
    graph = Graph(name="flow", nodes=(task("a"),))
    return lambda: db.run(workflows.insert(uuid4(), graph, channel=db.target.channel, joined=True))


def enqueue_node(db: StoreHarness) -> Act:
    return Flow.start(db, [task("a")]).settle_down


def finish_workflow(db: StoreHarness) -> Act:
    flow = Flow.start(db, [task("a")])
    flow.settle_down()
    flow.end(flow.claim(), str)
    return flow.settle_down


def pause_workflow(db: StoreHarness) -> Act:
    flow = Flow.start(db, [task("a")])
    return lambda: db.run(control.pause(flow.id, channel=db.target.channel))


def resume_workflow(db: StoreHarness) -> Act:
    flow = Flow.start(db, [task("a")])
    flow.pause()
    return lambda: db.run(control.resume(flow.id, channel=db.target.channel))


def cancel_workflow(db: StoreHarness) -> Act:
    flow = Flow.start(db, [task("a")])
    return lambda: db.run(control.cancel(flow.id, channel=db.target.channel))


def cancel_started_workflow(db: StoreHarness) -> Act:
    held = db.running()
    start(db, held)
    return lambda: db.run(cancel_started(held.id, channel=db.target.channel))


def withdraw_workflow(db: StoreHarness) -> Act:
    flow = Flow.start(db, [task("a")])
    flow.settle_down()
    db.run(control.cancel(flow.id, channel=db.target.channel))
    return flow.settle_down


def retry_workflow(db: StoreHarness) -> Act:
    flow = Flow.start(db, [task("a")])
    flow.play(failing("a"))
    plan = plan_retry(db.run(control.retry_nodes(flow.id)), ())
    return lambda: db.run(control.retry(flow.id, {flow.id: plan}, call=uuid4(), channel=db.target.channel))


def let_relay_go(db: StoreHarness) -> Act:
    assert hold(db, "w1")
    return lambda: db.run(messages.let_relay_go("w1"))


def tell_queues(db: StoreHarness) -> Act:
    return lambda: db.run(messages.tell_queues(["mail"], channel=db.target.channel))


def tell_workers(db: StoreHarness) -> Act:
    return lambda: db.run(messages.tell_workers(["mail"], channel=db.target.channel))


def make_quiet(db: StoreHarness) -> Act:
    channel = db.target.channel
    return lambda: db.run(quiet(["w1"], host=None, everyone=False, quiet=True, channel=channel))


def decide_tick(db: StoreHarness) -> Act:
    put(db)
    seen = make_due(db)
    return lambda: decide(db, decision(seen, sent(seen)))


def run_by_hand(db: StoreHarness) -> Act:
    put(db)
    return lambda: db.run(schedules.run_schedule("hourly", task_id=uuid4(), channel=db.target.channel))


def backfill(db: StoreHarness) -> Act:
    put(db)
    tick = sent(make_due(db))
    return lambda: db.run(schedules.backfill_ticks("hourly", [tick], channel=db.target.channel))


def resume_everything(db: StoreHarness) -> Act:
    pause = db.run(tasks.pause_all(paused_by="test", reason=None, call=uuid4()))
    assert pause is not None
    return lambda: db.run(tasks.resume_all(pause, channel=db.target.channel))


def send_unique(db: StoreHarness) -> Act:
    def act() -> object:
        task = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}", key="k")
        unique = UniqueTask(task=task, unique_for="kept", on_duplicate="existing")
        db.connection.execute(db.plain("truncate {schema}.unique_keys"))
        return db.run(insert_unique_tasks([unique], channel=db.target.channel, joined=True))

    return act


def send_unless_full(db: StoreHarness) -> Act:
    def act() -> object:
        task = tasks.NewTask(
            id=uuid4(), name="work", queue="default", priority=0, args=b"{}", gates='{"narrow"}'
        )
        return db.run(tasks.insert_unless_full(task, channel=db.target.channel, joined=True))

    return act


def put_limit(db: StoreHarness) -> None:
    db.connection.execute(db.plain("truncate {schema}.limits"))
    db.connection.execute(db.plain("insert into {schema}.limits (name, concurrency) values ('narrow', 1)"))


def change_limit(db: StoreHarness) -> Act:
    put_limit(db)
    return lambda: db.run(
        limits.set_limit(
            "narrow", concurrency=2, rate=None, burst=None, sets_concurrency=True, sets_rate=False, sets_reason=False,
            sets_until=False, set_by="test", reason=None, until=None, channel=db.target.channel,
        )
    )  # fmt: skip


def restore_limit(db: StoreHarness) -> Act:
    change_limit(db)()
    return lambda: db.run(limits.clear_limit("narrow", channel=db.target.channel))


def store_items(db: StoreHarness) -> Act:
    held = db.running()
    return lambda: db.run(insertion(db, (held, items(1))))


ACTS: Final[dict[str, Callable[[StoreHarness], Act]]] = {
    "task/announce_hints": announce,
    "task/insert_task": send_one,
    "task/insert_tasks": send_many,
    "task/insert_unique_tasks": send_unique,
    "task/insert_unless_full": send_unless_full,
    "limit/set_limit": change_limit,
    "limit/clear_limit": restore_limit,
    "pause/resume_all": resume_everything,
    "task/start_tasks": start_late,
    "task/complete_attempts": complete,
    "task/settle_attempts": settle,
    "task/recover_leases": recover,
    "task/release_leases": release,
    "task/decline_tasks": hand_back,
    "task/set_aside": put_aside,
    "task/expire_tasks": expire,
    "task/cancel_task": cancel,
    "task/retry_task": retry,
    "bulk/cancel_tasks": in_bulk(BulkVerb.CANCEL),
    "bulk/retry_tasks": in_bulk(BulkVerb.RETRY),
    "bulk/change_tasks": in_bulk(BulkVerb.MOVE),
    "task/cancel_children": cancel_children,
    "step/send_child": child,
    "stream/insert_items": store_items,
    "step/send_children": gathered_children,
    "batch/cancel_tasks": cancel_batch,
    "schedule/decide_ticks": decide_tick,
    "schedule/run_schedule": run_by_hand,
    "schedule/backfill_ticks": backfill,
    "pause/resume_name": resume_queue,
    "workflow/insert_workflow": start_workflow,
    "workflow/enqueue_nodes": enqueue_node,
    "workflow/finish_workflows": finish_workflow,
    "workflow/pause_workflow": pause_workflow,
    "workflow/resume_workflow": resume_workflow,
    "workflow/cancel_workflow": cancel_workflow,
    "workflow/cancel_started": cancel_started_workflow,
    "workflow/withdraw_tasks": withdraw_workflow,
    "workflow/retry_workflow": retry_workflow,
    "message/release_relay": let_relay_go,
    "message/notify_queues": tell_queues,
    "message/notify_workers": tell_workers,
    "worker/set_quiet": make_quiet,
}


def test_the_table_covers_every_statement_that_notifies() -> None:  # J12
    folder = files("everbeat") / "sql"
    assert isinstance(folder, Path)
    names = (str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.sql"))
    statements = [name for name in names if not name.startswith(("schema/", "bench/", "fragment/"))]
    found = {name for name in statements if "pg_notify(" in source(name)}
    # It notifies only if a worker declares new numbers for a limit at which lines wait. The check of the queue is the same.
    assert GUARD.search(source("limit/apply_declared"))
    assert found - {"limit/apply_declared"} == set(ACTS)


@pytest.mark.parametrize("name", ACTS)
def test_a_statement_that_notifies_succeeds_while_the_queue_is_full_because_it_checks_first(
    name: str, crowded: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:  # J12
    act = ACTS[name](crowded)
    original = statement.source.__wrapped__
    with full_queue(crowded.target.url):
        with monkeypatch.context() as patch:  # without the check, PostgreSQL rejects the statement
            patch.setattr(statement, "source", lambda asked: GUARD.sub("true", original(asked)))
            statement.compose.cache_clear()
            patch.setattr(crowded, "database", Database(crowded.target, patience_s=0.0))
            with pytest.raises(DatabaseError, match="queue of notifications is full"):
                act()
            crowded.database.close()
        statement.compose.cache_clear()
        act()


def test_functions_and_triggers_of_the_schema_check_the_queue_before_they_notify(
    crowded: StoreHarness,
) -> None:  # J12
    found = crowded.connection.execute(
        "select p.proname, pg_get_functiondef(p.oid) from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        " where n.nspname = %s and p.prosrc like '%%pg_notify(%%'",
        [crowded.target.schema],
    ).fetchall()
    assert {name: text.count("pg_notify(") - len(GUARD.findall(text)) for name, text in found} == {
        "write_sent": 0,
        "write_again": 0,
        "free_relay": 0,
        "send_signal": 0,
        "unpark_lines": 0,
        "cancel_waiting": 0,
        "send_failure_handler": 0,
        "advance_batches": 0,
    }


def test_a_batch_ends_while_the_queue_is_full(crowded: StoreHarness) -> None:  # J12
    act = end_batch(crowded)
    with full_queue(crowded.target.url):
        act()
    assert crowded.table("tasks", "name, state") == [("callback", "PENDING")] * 2


def test_a_signal_and_a_relayed_send_succeed_while_the_queue_is_full(crowded: StoreHarness) -> None:  # J12
    act = signal(crowded)
    assert hold(crowded, "w1")
    with full_queue(crowded.target.url):
        act()
        crowded.send()
        crowded.connection.execute(
            crowded.plain("update {schema}.workers set ended_at = now() where id = 'w1'")
        )
    crowded.connection.execute(crowded.plain("update {schema}.workers set ended_at = null where id = 'w1'"))
    assert sorted(crowded.table("tasks", "state")) == [("PENDING",), ("PENDING",)]
    assert len(crowded.table("message_outbox", "id")) == 2


def test_the_first_statement_after_the_queue_is_free_again_notifies(
    crowded: StoreHarness,
) -> None:  # J12
    """PostgreSQL itself removes nothing from the queue before a notification succeeds."""
    with psycopg.connect(crowded.target.url, autocommit=True) as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(crowded.target.channel)))
        with full_queue(crowded.target.url):
            crowded.send()
            assert list(listener.notifies(timeout=0.2)) == []
        crowded.send()
        assert [each.payload for each in listener.notifies(timeout=20, stop_after=1)] == ["t:default"]
    assert usage(crowded.target.url) < 0.1


async def test_a_session_repeats_a_commit_that_failed_because_the_queue_had_just_filled(
    crowded: StoreHarness,
) -> None:  # J12
    session, tries, sent = Session(crowded.target, "everbeat test"), 0, uuid4()

    async def body(run: RunStatement) -> UUID:
        nonlocal tries
        tries += 1
        new = tasks.NewTask(id=sent, name="work", queue="default", priority=0, args=b"{}")
        found = await run(tasks.insert_task(new, channel=crowded.target.channel, joined=True))
        if tries == 1:
            fill(crowded.target.url)
        assert isinstance(found, UUID)
        return found

    with holding(crowded.target.url):
        assert await session.transact(body) == sent
    await session.drop()
    assert tries == 2
    assert crowded.row(sent, "state") == "PENDING"


def test_a_rejected_notification_is_an_outage_and_a_rejected_row_of_the_same_class_is_bad_data(
    crowded: StoreHarness,
) -> None:  # J12
    refused: dict[str, Any] = {}
    with full_queue(crowded.target.url):
        try:
            crowded.connection.execute("select pg_notify('x', '')")
        except psycopg.Error as problem:
            refused["hint"] = problem
    crowded.connection.execute("create temp table narrow (value text primary key)")
    try:
        crowded.connection.execute(
            "insert into narrow select string_agg(md5(n::text), '') from generate_series(1, 1000) n"
        )
    except psycopg.Error as problem:
        refused["row"] = problem
    crowded.connection.execute("drop table narrow")
    assert {which: problem.sqlstate for which, problem in refused.items()} == {
        "hint": "54000",
        "row": "54000",
    }
    for which, is_hint in (("hint", True), ("row", False)):
        told = crowded.target.explain(refused[which])
        told.__cause__ = refused[which]
        assert is_refused_hint(refused[which]) is is_refused_hint(told) is is_hint
        assert is_repeatable(refused[which]) is is_hint
        assert is_refused_data(told) is not is_hint
