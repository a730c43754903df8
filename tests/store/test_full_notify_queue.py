"""PostgreSQL refuses a commit that notifies while its queue of notifications is full. No statement of everbeat may fail by that."""

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

from everbeat.domain.reopening import reopened
from everbeat.errors import DatabaseError
from everbeat.store import leases, messages, migrating, pauses, statement, tasks
from everbeat.store import workflow_control as control
from everbeat.store.database import Database
from everbeat.store.declining import decline
from everbeat.store.embedded import EmbeddedServer
from everbeat.store.quiet import quiet
from everbeat.store.refusals import is_refused_data, is_refused_hint, is_repeatable
from everbeat.store.session import Run, Session
from everbeat.store.target import Target
from tests.conftest import FAST_SETTINGS
from tests.notify_queue import SETTINGS, fill, full_queue, holding, require_small_queue, usage
from tests.store.conftest import Hands
from tests.store.flows import Flow, task
from tests.store.test_advance import failing
from tests.store.test_messages import hold
from tests.store.test_signals import send, suspension, waiting
from tests.store.test_steps import send_child

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
def migrated(server: EmbeddedServer) -> Iterator[Hands]:
    target = Target.parse(server.url, schema="full")
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    party = Hands(target, connection)
    party.supervisor("s1", "w1", "w2")
    party.run(messages.use_messages(channel=target.channel))
    yield party
    party.database.close()
    connection.close()


@pytest.fixture
def crowded(migrated: Hands) -> Hands:
    """Hands in an empty schema, on a server whose queue is soon full."""
    names = "tasks, workflows, nodes, outbox, pauses, signals, recoveries, message_outbox"
    migrated.connection.execute(
        migrated.plain(
            "truncate " + ", ".join(f"{{schema}}.{name}" for name in names.split(", ")) + " cascade"
        )
    )
    migrated.connection.execute(
        migrated.plain("update {schema}.relay set holder = null, taken_until = '2000-01-01'")
    )
    return migrated


# Each prepares what its statement needs, and answers what runs it.


def send_one(hands: Hands) -> Act:
    return hands.send


def send_many(hands: Hands) -> Act:
    task = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")
    return lambda: hands.run(tasks.insert_tasks([task], channel=hands.target.channel))


def start_late(hands: Hands) -> Act:
    hands.send()
    (claimed,) = hands.claim()
    hands.connection.execute(
        hands.plain("update {schema}.tasks set good_until = now() - interval '1 second'")
    )
    return lambda: hands.start(claimed)


def complete(hands: Hands) -> Act:
    held = hands.running()
    return lambda: hands.complete(held)


def settle(hands: Hands) -> Act:
    held = hands.running()
    return lambda: hands.settle(held, "FAILED", error=b'{"code": "X"}')


def recover(hands: Hands) -> Act:
    hands.running()
    (lease,) = hands.leases()
    return lambda: hands.recover(lease, "retry")


def release(hands: Hands) -> Act:
    hands.send()
    (claimed,) = hands.claim()
    return lambda: hands.run(leases.release([(claimed.id, claimed.claim_id)], channel=hands.target.channel))


def hand_back(hands: Hands) -> Act:
    held = hands.running()
    return lambda: hands.run(decline([(held.id, held.claim_id)], channel=hands.target.channel))


def expire(hands: Hands) -> Act:
    hands.send()
    hands.connection.execute(
        hands.plain("update {schema}.tasks set good_until = now() - interval '1 second'")
    )
    return lambda: hands.run(tasks.expire(channel=hands.target.channel))


def cancel(hands: Hands) -> Act:
    held = hands.running()
    return lambda: hands.cancel(held.id)


def retry(hands: Hands) -> Act:
    held = hands.running()
    hands.settle(held, "FAILED", error=b'{"code": "X"}')
    return lambda: hands.run(tasks.retry(held.id, channel=hands.target.channel, call=uuid4()))


def cancel_children(hands: Hands) -> Act:
    held = hands.running()
    send_child(hands, held)
    return lambda: hands.run(tasks.cancel_children(held.id, channel=hands.target.channel))


def child(hands: Hands) -> Act:
    held = hands.running()
    return lambda: send_child(hands, held)


def resume_queue(hands: Hands) -> Act:
    pause = hands.run(pauses.pause("queue", "mail", paused_by="me", reason=None, call=uuid4()))
    assert pause is not None
    return lambda: hands.run(pauses.resume(pause, channel=hands.target.channel))


def signal(hands: Hands) -> Act:
    held = hands.running()
    hands.run(waiting(held))
    hands.run(suspension(held, hands))
    return lambda: send(hands, held.id)


def start_workflow(hands: Hands) -> Act:
    return lambda: Flow.start(hands, [task("a")])


def enqueue_node(hands: Hands) -> Act:
    return Flow.start(hands, [task("a")]).settle_down


def finish_workflow(hands: Hands) -> Act:
    flow = Flow.start(hands, [task("a")])
    flow.settle_down()
    flow.end(flow.claim(), str)
    return flow.settle_down


def pause_workflow(hands: Hands) -> Act:
    flow = Flow.start(hands, [task("a")])
    return lambda: hands.run(control.pause(flow.id, channel=hands.target.channel))


def resume_workflow(hands: Hands) -> Act:
    flow = Flow.start(hands, [task("a")])
    flow.pause()
    return lambda: hands.run(control.resume(flow.id, channel=hands.target.channel))


def cancel_workflow(hands: Hands) -> Act:
    flow = Flow.start(hands, [task("a")])
    return lambda: hands.run(control.cancel(flow.id, channel=hands.target.channel))


def withdraw_workflow(hands: Hands) -> Act:
    flow = Flow.start(hands, [task("a")])
    flow.settle_down()
    hands.run(control.cancel(flow.id, channel=hands.target.channel))
    return flow.settle_down


def retry_workflow(hands: Hands) -> Act:
    flow = Flow.start(hands, [task("a")])
    flow.play(failing("a"))
    plan = reopened(hands.run(control.retry_nodes(flow.id)), ())
    return lambda: hands.run(
        control.retry(flow.id, {flow.id: plan}, call=uuid4(), channel=hands.target.channel)
    )


def let_relay_go(hands: Hands) -> Act:
    assert hold(hands, "w1")
    return lambda: hands.run(messages.let_relay_go("w1"))


def tell_queues(hands: Hands) -> Act:
    return lambda: hands.run(messages.tell_queues(["mail"], channel=hands.target.channel))


def tell_workers(hands: Hands) -> Act:
    return lambda: hands.run(messages.tell_workers(["mail"], channel=hands.target.channel))


def make_quiet(hands: Hands) -> Act:
    channel = hands.target.channel
    return lambda: hands.run(quiet(["w1"], host=None, everyone=False, quiet=True, channel=channel))


ACTS: Final[dict[str, Callable[[Hands], Act]]] = {
    "task/insert_task": send_one,
    "task/insert_tasks": send_many,
    "task/start": start_late,
    "task/complete": complete,
    "task/settle": settle,
    "task/recover": recover,
    "task/release": release,
    "task/decline": hand_back,
    "task/expire": expire,
    "task/cancel": cancel,
    "task/retry": retry,
    "task/cancel_children": cancel_children,
    "step/send_child": child,
    "pause/resume": resume_queue,
    "workflow/insert": start_workflow,
    "workflow/enqueue": enqueue_node,
    "workflow/finish": finish_workflow,
    "workflow/pause": pause_workflow,
    "workflow/resume": resume_workflow,
    "workflow/cancel": cancel_workflow,
    "workflow/withdraw": withdraw_workflow,
    "workflow/retry": retry_workflow,
    "message/let_go": let_relay_go,
    "message/tell_queues": tell_queues,
    "message/tell_workers": tell_workers,
    "worker/quiet": make_quiet,
}


def test_each_statement_that_notifies_is_tried_here() -> None:  # J12
    folder = files("everbeat") / "sql"
    assert isinstance(folder, Path)
    found = {
        str(file.relative_to(folder).with_suffix(""))
        for file in folder.rglob("*.sql")
        if "pg_notify(" in file.read_text()
        and not str(file.relative_to(folder)).startswith(("schema/", "bench/"))
    }
    assert found == set(ACTS)


@pytest.mark.parametrize("name", ACTS)
def test_a_statement_lands_while_the_queue_is_full_because_it_asks_first(
    name: str, crowded: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:  # J12
    act = ACTS[name](crowded)
    original = statement.source.__wrapped__
    with full_queue(crowded.target.url):
        with monkeypatch.context() as patch:  # without its question, the statement is refused
            patch.setattr(statement, "source", lambda asked: GUARD.sub("true", original(asked)))
            statement.compose.cache_clear()
            patch.setattr(crowded, "database", Database(crowded.target, patience_s=0.0))
            with pytest.raises(DatabaseError, match="queue of notifications is full"):
                act()
            crowded.database.close()
        statement.compose.cache_clear()
        act()


def test_a_function_and_a_trigger_of_the_schema_ask_first_too(crowded: Hands) -> None:  # J12
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
    }


def test_a_signal_and_a_relayed_send_land_while_the_queue_is_full(crowded: Hands) -> None:  # J12
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


def test_the_first_statement_after_the_holder_has_gone_empties_the_queue_and_notifies(
    crowded: Hands,
) -> None:  # J12
    """PostgreSQL itself removes nothing before a notification succeeds."""
    with psycopg.connect(crowded.target.url, autocommit=True) as ear:
        ear.execute(sql.SQL("listen {}").format(sql.Identifier(crowded.target.channel)))
        with full_queue(crowded.target.url):
            crowded.send()
            assert list(ear.notifies(timeout=0.2)) == []
        crowded.send()
        assert [each.payload for each in ear.notifies(timeout=20, stop_after=1)] == ["t:default"]
    assert usage(crowded.target.url) < 0.1


async def test_a_commit_that_a_queue_refuses_which_has_just_become_full_is_repeated(
    crowded: Hands,
) -> None:  # J12
    session, tries, sent = Session(crowded.target, "everbeat test"), 0, uuid4()

    async def body(run: Run) -> UUID:
        nonlocal tries
        tries += 1
        new = tasks.NewTask(id=sent, name="work", queue="default", priority=0, args=b"{}")
        found = await run(tasks.insert_task(new, channel=crowded.target.channel))
        if tries == 1:
            fill(crowded.target.url)
        assert isinstance(found, UUID)
        return found

    with holding(crowded.target.url):
        assert await session.transact(body) == sent
    await session.drop()
    assert tries == 2
    assert crowded.row(sent, "state") == "PENDING"


def test_a_refused_hint_is_an_outage_and_a_refused_row_of_the_same_class_is_data(
    crowded: Hands,
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
