"""Sessions outlive their connections: statements are repeated after a lost reply, and answer as if nothing had happened."""

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
from everbeat.store import leases, tasks, workers, workflows
from everbeat.store.database import Database
from everbeat.store.foreign_statement import numbered
from everbeat.store.leases import Settlement
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.store.conftest import Hands
from tests.store.flows import Flow, task
from tests.store.test_plans import nodes


async def test_a_terminated_session_repeats_its_statement(hands: Hands) -> None:
    states: list[bool] = []
    session = Session(hands.target, "everbeat test session", on_state=states.append)
    assert await session.run(workers.beat_worker("w1")) is True
    connection = await session.connection()
    hands.connection.execute("select pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
    assert await session.run(workers.beat_worker("w1"), patience_s=30) is True
    assert states == [True, False, True]
    await session.drop()


async def test_a_session_leaves_a_server_that_accepts_no_write_and_repeats_its_statement(
    hands: Hands,
) -> None:  # J12
    states: list[bool] = []
    session = Session(hands.target, "everbeat test session", on_state=states.append)
    connection = await session.connection()
    await connection.execute("set default_transaction_read_only = on")
    assert await session.run(workers.beat_worker("w1"), patience_s=None) is True
    assert states == [True, False, True]
    await session.drop()


async def test_a_session_killed_at_any_moment_loses_and_doubles_nothing(hands: Hands) -> None:
    """A stranger keeps terminating the session while it claims, starts and settles: each task runs once."""
    sent = {hands.send() for _ in range(60)}
    session = Session(hands.target, "everbeat test session")
    done: set[object] = set()
    stop = threading.Event()
    moments = Random(1)

    def killer() -> None:
        with hands.target.connect("everbeat test killer") as connection:
            # The number of kills is bounded: on a busy machine, connecting can take longer than the time between two.
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
                    leases.claim(
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
    assert sorted(hands.table("attempts", "attempt, outcome")) == [(1, "COMPLETED")] * len(sent)


async def test_a_refused_value_leaves_the_session_usable(hands: Hands) -> None:
    claimed = hands.running()
    session = Session(hands.target, "everbeat test session")
    bad = Settlement(id=claimed.id, claim_id=claimed.claim_id, outcome="COMPLETED", result=b"not json")
    with pytest.raises(psycopg.DataError):
        await session.run(leases.settle([bad], channel="c"), patience_s=0)
    before = await session.connection()
    assert await session.run(workers.beat_worker("w1")) is True
    assert await session.connection() is before
    await session.drop()
    hands.settle(claimed)


async def test_patience_ends_with_a_clear_word(tmp_path: object) -> None:
    nowhere = Target.parse("postgresql://someone:secret@127.0.0.1:1/none")
    session = Session(nowhere, "everbeat test session")
    with pytest.raises(DatabaseUnreachable) as refusal:
        await session.run(workers.watch_beats(), patience_s=0.2)
    assert "127.0.0.1" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_a_missing_schema_is_named(database_url: str, schema: str) -> None:
    with pytest.raises(SchemaMissing, match=schema):
        Database(Target.parse(database_url, schema=schema)).run(workers.watch_beats())


@pytest.mark.parametrize(
    ("url", "schema", "word"),
    [
        ("mysql://host/db", "everbeat", "PostgreSQL only"),
        ("postgresql://host/db", "public", "a schema of its own"),
        ("", "everbeat", "empty"),
        ("postgresql://host:port/db?nonsense=1", "everbeat", "cannot be read"),
        ("postgresql://host/db", "bad-name; drop", "schema name"),
        ("postgresql://host/db", "pg_mine", "a schema of its own"),
    ],
)
def test_a_wrong_url_or_schema_name_is_refused_at_once(url: str, schema: str, word: str) -> None:
    with pytest.raises((WrongDatabaseURL, ConfigurationError), match=word):
        Target.parse(url, schema=schema)


def test_multi_host_urls_look_for_the_primary() -> None:
    assert "target_session_attrs=read-write" in Target.parse("postgresql://a,b/db").conninfo("x")
    assert "target_session_attrs=any" in Target.parse(
        "postgresql://a,b/db?target_session_attrs=any"
    ).conninfo("x")


async def test_one_database_serves_threads_loops_and_forked_children(hands: Hands) -> None:
    database = Database(hands.target)
    hands.send()
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


async def test_a_plan_for_a_small_table_does_not_outlive_its_growth(hands: Hands) -> None:
    """Planned beside ten nodes, a look-up reads them all; a statement that was slow has all of the session planned anew."""
    flow = Flow.start(hands, [task(f"n{number}") for number in range(10)])
    flow.play()
    hands.connection.execute(hands.plain("analyze {schema}.nodes"))
    session = Session(hands.target, "everbeat test session", keyed=True)
    statement = workflows.enqueue([(flow.id, 0)], [None], channel=hands.target.channel)
    for _ in range(6):
        await session.run(statement)
    assert await looked_up(session, statement) == []
    grow = (
        "insert into {schema}.nodes (workflow_id, number, name, kind, state)"
        " select gen_random_uuid(), n, 'n', 'task', 'READY' from generate_series(1, 10000) n"
    )
    hands.connection.execute(hands.plain(grow))
    await session.run(statement)
    assert await looked_up(session, statement) == [], "nothing tells the planner"
    waits = (
        "select 1 from pg_stat_activity where application_name like 'everbeat test session %' and wait_event_type = 'Lock'"
        " and clock_timestamp() - query_start > interval '0.2 s'"
    )
    with hands.target.connect("in its way") as other:
        other.execute("begin")
        other.execute(hands.plain("lock table {schema}.nodes"))
        slow = asyncio.create_task(session.run(statement))
        while not hands.connection.execute(waits.encode()).fetchone():
            await asyncio.sleep(0.01)  # another session's lock is seen from outside only
        other.execute("commit")
        await slow
    await session.run(statement)
    (found,) = await looked_up(session, statement)
    assert "workflow_id = " in found
    assert "number = " in found
    await session.drop()


async def looked_up(session: Session, statement: Statement[Any]) -> list[str]:
    """By what the session's kept plan of this statement finds nodes; nothing: it reads them all."""
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
