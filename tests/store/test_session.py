"""Sessions outlive their connections: they repeat statements after a lost reply, with the same result."""

from __future__ import annotations

import asyncio
import os
import threading
from random import Random
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.errors import ConfigurationError, DatabaseUnreachable, SchemaMissing, WrongDatabaseURL
from everbeat.store import claims, leases, tasks, workers, workflows
from everbeat.store.database import Database
from everbeat.store.leases import Settlement
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from everbeat.store.user_connection.drivers import numbered
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, task
from tests.store.plans import nodes


async def test_a_session_reconnects_and_repeats_its_statement_after_its_backend_was_terminated(
    db: StoreHarness,
) -> None:
    states: list[bool] = []
    session = Session(db.target, "everbeat test session", on_state=states.append)
    assert await session.run(workers.beat_worker("w1")) is True
    connection = await session.connection()
    db.connection.execute("select pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
    assert await session.run(workers.beat_worker("w1"), patience_s=30) is True
    assert states == [True, False, True]
    await session.drop()


async def test_a_session_leaves_a_read_only_server_and_repeats_its_statement(
    db: StoreHarness,
) -> None:  # J12
    states: list[bool] = []
    session = Session(db.target, "everbeat test session", on_state=states.append)
    connection = await session.connection()
    await connection.execute("set default_transaction_read_only = on")
    assert await session.run(workers.beat_worker("w1"), patience_s=None) is True
    assert states == [True, False, True]
    await session.drop()


async def test_a_session_that_is_killed_at_random_moments_runs_each_task_once(db: StoreHarness) -> None:
    """Another connection repeatedly terminates the session while it claims, starts and settles: each task runs once."""
    sent = {db.send() for _ in range(60)}
    session = Session(db.target, "everbeat test session")
    done: set[object] = set()
    stop = threading.Event()
    moments = Random(1)

    def killer() -> None:
        with db.target.connect("everbeat test killer") as connection:
            # The number of kills is bounded: on a busy machine, connecting can take longer than the pause between two kills.
            for _ in range(400):
                if stop.wait(moments.uniform(0.01, 0.15)):
                    break
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'everbeat test session %'"
                )

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        async with asyncio.timeout(90):
            while done != sent:
                claimed = await session.run(
                    claims.claim(
                        worker_id="w1",
                        claim_call=uuid4(),
                        names=["work"],
                        limit=7,
                        queues=None,
                        queue_priorities={},
                    )
                )
                pairs = [(one.id, one.claim_id) for one in claimed]
                started = await session.run(leases.start(pairs, channel="c"))
                assert {one.verdict for one in started.values()} <= {"started"}
                ended = [
                    Settlement(id=one[0], claim_id=one[1], outcome="COMPLETED", result=b"1") for one in pairs
                ]
                verdicts = await session.run(leases.settle(ended, channel="c"))
                assert set(verdicts.values()) <= {"COMPLETED", "already"}
                done |= {one.id for one in claimed}
    finally:
        stop.set()
        thread.join()
        await session.drop()
    assert sorted(db.table("attempts", "attempt, outcome")) == [(1, "COMPLETED")] * len(sent)


async def test_a_session_stays_usable_after_the_server_rejected_a_value(db: StoreHarness) -> None:
    claimed = db.running()
    session = Session(db.target, "everbeat test session")
    bad = Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="COMPLETED", result=b"not json")
    with pytest.raises(psycopg.DataError):
        await session.run(leases.settle([bad], channel="c"), patience_s=0)
    before = await session.connection()
    assert await session.run(workers.beat_worker("w1")) is True
    assert await session.connection() is before
    await session.drop()
    db.settle(claimed)


async def test_an_unreachable_database_raises_an_error_without_the_password_after_the_patience(
    tmp_path: object,
) -> None:
    nowhere = Target.parse("postgresql://someone:secret@127.0.0.1:1/none")
    session = Session(nowhere, "everbeat test session")
    with pytest.raises(DatabaseUnreachable) as refusal:
        await session.run(workers.watch_beats(), patience_s=0.2)
    assert "127.0.0.1" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_a_missing_schema_raises_an_error_with_its_name(database_url: str, schema: str) -> None:
    with pytest.raises(SchemaMissing, match=schema):
        Database(Target.parse(database_url, schema=schema)).run(workers.watch_beats())


@pytest.mark.parametrize(
    ("url", "schema", "word"),
    [
        ("mysql://host/db", "everbeat", "only PostgreSQL"),
        ("postgresql://host/db", "public", "its own schema"),
        ("", "everbeat", "empty"),
        ("postgresql://host:port/db?nonsense=1", "everbeat", "cannot be read"),
        ("postgresql://host/db", "bad-name; drop", "schema name"),
        ("postgresql://host/db", "pg_mine", "its own schema"),
    ],
)
def test_an_invalid_url_or_schema_name_is_rejected_at_once(url: str, schema: str, word: str) -> None:
    with pytest.raises((WrongDatabaseURL, ConfigurationError), match=word):
        Target.parse(url, schema=schema)


def test_urls_with_several_hosts_select_the_primary() -> None:
    assert "target_session_attrs=read-write" in Target.parse("postgresql://a,b/db").conninfo("x")
    assert "target_session_attrs=any" in Target.parse(
        "postgresql://a,b/db?target_session_attrs=any"
    ).conninfo("x")


async def test_one_database_object_serves_threads_event_loops_and_forked_children(db: StoreHarness) -> None:
    database = Database(db.target)
    db.send()
    seen: list[object] = []

    def in_a_loop() -> None:
        async def ask() -> None:
            seen.append(await database.arun(tasks.outcomes([uuid4()])))
            await database.aclose()

        asyncio.run(ask())

    threads = [threading.Thread(target=in_a_loop) for _ in range(3)]
    threads += [
        threading.Thread(target=lambda: seen.append(database.run(tasks.outcomes([uuid4()]))))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert seen == [{}] * 23
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if database.run(tasks.outcomes([uuid4()])) == {} else 1)
        except BaseException:  # noqa: BLE001 - the child must not return into the test runner
            os._exit(2)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert database.run(tasks.outcomes([uuid4()])) == {}, "the parent's connections still work"
    await database.aclose()


async def test_a_slow_statement_makes_its_session_replan_for_a_table_that_has_grown(db: StoreHarness) -> None:
    """Planned for ten nodes, a lookup reads them all; after a slow statement the session plans all its statements again."""
    flow = Flow.start(db, [task(f"n{number}") for number in range(10)])
    flow.play()
    db.connection.execute(db.plain("analyze {schema}.nodes"))
    session = Session(db.target, "everbeat test session", keyed=True)
    statement = workflows.enqueue([(flow.id, 0)], [None], channel=db.target.channel)
    for _ in range(6):
        await session.run(statement)
    assert await looked_up(session, statement) == []
    grow = (
        "insert into {schema}.nodes (workflow_id, number, name, kind, state)"
        " select gen_random_uuid(), n, 'n', 'task', 'READY' from generate_series(1, 10000) n"
    )
    db.connection.execute(db.plain(grow))
    await session.run(statement)
    assert await looked_up(session, statement) == [], "the planner has no reason to replan yet"
    waits = (
        "select 1 from pg_stat_activity where application_name like 'everbeat test session %' and wait_event_type = 'Lock'"
        " and clock_timestamp() - query_start > interval '0.2 s'"
    )
    with db.target.connect("in its way") as other:
        other.execute("begin")
        other.execute(db.plain("lock table {schema}.nodes"))
        slow = asyncio.create_task(session.run(statement))
        while not db.connection.execute(waits.encode()).fetchone():
            await asyncio.sleep(0.01)  # another session's lock is visible from outside only
        other.execute("commit")
        await slow
    await session.run(statement)
    (found,) = await looked_up(session, statement)
    assert "workflow_id = " in found
    assert "number = " in found
    await session.drop()


async def looked_up(session: Session, statement: Statement[Any]) -> list[str]:
    """Return the conditions by which the kept plan of this statement finds nodes; empty if it reads them all."""
    connection = await session.connection()
    text, names = numbered(statement.name, session.target.schema)
    kept = "select name from pg_prepared_statements where statement = %s"
    (name,) = await (await connection.execute(kept, [text])).fetchone() or ("",)
    given = sql.SQL(", ").join(sql.Literal(statement.parameters[each]) for each in names)
    explain = sql.SQL("explain (format json) execute {} ({})").format(sql.Identifier(name), given)
    (found,) = await (await connection.execute(explain)).fetchone() or ([{}],)
    return [
        node["Index Cond"]
        for node in nodes(found[0]["Plan"])
        if node.get("Relation Name") == "nodes" and "Index Cond" in node
    ]
