"""Anybody who can connect may notify the channel: a hint makes a worker look at rows, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import Connection, sql

from tests.nats_server import NatsServer
from tests.stories.nats_stage import POLLS_NEVER, Told
from tests.stories.stage import SLACK, Stage, Tree

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

INVENTED = 3_000
HONEST = 1_001
FLOOD_S = 2.0
MOST_SCANS = 1_500
"""Scans a second of one worker: each service follows hints 50 times a second after a burst, by up to three statements."""


@pytest.fixture
def told(stage: Stage) -> Iterator[Told]:
    """Before `deeds`, whose app gets the URL of this server."""
    with NatsServer() as server:
        yield Told(stage, server)


@contextmanager
def stranger(stage: Stage) -> Iterator[Connection[Any]]:
    """A connection of a role that may log in and has no other right."""
    role = sql.Identifier(f"stranger_{uuid4().hex[:12]}")
    with psycopg.connect(stage.url, autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        try:
            with psycopg.connect(stage.url, user=role.as_string().strip('"'), autocommit=True) as connection:
                yield connection
        finally:
            owner.execute(sql.SQL("DROP ROLE {}").format(role))


def flood(connection: Connection[Any], channel: str, payload: str, count: int = INVENTED) -> None:
    """Notifies `count` times, each time with another number as %1$s and another id as %2$s in the payload."""
    connection.execute(
        "select pg_notify(%s, format(%s, n, gen_random_uuid())) from generate_series(1, %s) n",
        [channel, payload, count],
    )


def consumers(told: Told) -> int:
    return told.counters().config["consumer_count"]


def said(trees: list[Tree], word: str) -> int:
    return sum(tree.output().count(word) for tree in trees)


def test_a_flood_of_invented_queues_and_tasks_reaches_no_stream(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:
    trees = [stage.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
    told.ready()
    assert deeds.quick.send(1).result(timeout=20) == 1
    with stranger(stage) as connection:
        for payload in (
            "o:::invented %1$s",
            "o:%1$s:%2$s:invented %1$s",
            "t:invented %1$s",
            "c:%2$s",
            "l:%2$s,%2$s",
            "o:" + 7_900 * "9",
            "l:" + 200 * "%2$s,",
        ):
            flood(connection, stage.target.channel, payload)
    handles = [deeds.quick.send(n) for n in range(20)]
    assert [handle.result(timeout=20) for handle in handles] == list(range(20))
    stage.until(told.drained, within=20, what="the stream is drained")
    assert set(told.counters().consumers) == {"default"}
    assert told.travelled() <= 21
    assert said(trees, "nats_away") == 0, [t.output()[-3000:] for t in trees]
    assert stage.query("select 1 from {schema}.workers where listens and ended_at is null") == []


def test_a_thousand_and_one_honest_queues_are_all_told_by_messages(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:
    trees = [stage.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
    told.ready()
    handles = deeds.app.send_many(
        deeds.quick.with_options(queue=f"honest-{n}").call(n) for n in range(HONEST)
    )
    assert [handle.result(timeout=60) for handle in handles] == list(range(HONEST))
    one_more = [deeds.quick.with_options(queue=f"honest-{n}").send(n) for n in range(0, HONEST, 10)]
    assert [handle.result(timeout=20) for handle in one_more] == list(range(0, HONEST, 10))
    assert said(trees, "nats_away") == 0, [t.output()[-3000:] for t in trees]


LIMITED = """
accounts { A { jetstream { max_mem: 16MB, max_file: 64MB, max_streams: 5, max_consumers: 4 }, users: [ { user: a, password: b } ] } }
no_auth_user: a
"""


def test_queues_for_which_nats_allows_no_consumer_are_told_by_the_database(
    stage: Stage, deeds: ModuleType
) -> None:
    with NatsServer(extra=LIMITED) as server:
        told = Told(stage, server)
        trees = [stage.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
        told.ready()
        for _ in range(2):
            handles = [deeds.quick.with_options(queue=f"honest-{n}").send(n) for n in range(10)]
            began = time.monotonic()
            assert [handle.result(timeout=60) for handle in handles] == list(range(10))
            assert time.monotonic() - began < 5 * SLACK
        assert len(told.counters().consumers) == 4
        assert said(trees, "nats_away") == 0
        assert said(trees, "nats_consumers_limited") >= 1
        stage.until(told.drained, within=20, what="the stream is drained")


def scans(stage: Stage) -> int:
    """How often a table of the stage was read so far. Notifying and listening read none."""
    stage.connection.execute("select pg_stat_clear_snapshot()")
    (row,) = stage.query(
        "select sum(seq_scan + coalesce(idx_scan, 0)) as scans from pg_stat_all_tables where schemaname = %s",
        stage.schema,
    )
    return int(row["scans"])


def test_a_flood_of_useless_hints_makes_a_worker_query_at_a_bounded_rate(
    stage: Stage, told: Told, deeds: ModuleType
) -> None:
    stage.ready_tree(worker=POLLS_NEVER)
    told.ready()
    rates: dict[str, float] = {}
    with stranger(stage) as connection:
        for payload in ("*", "t:default", "t:invented %1$s", "o:", "r", "w"):
            before, began = scans(stage), time.monotonic()
            while time.monotonic() - began < FLOOD_S:
                flood(connection, stage.target.channel, payload, 20)
            rates[payload] = (scans(stage) - before) / FLOOD_S
    print({payload: round(rate) for payload, rate in rates.items()})
    assert deeds.quick.send(1).result(timeout=20) == 1
    assert max(rates.values()) < MOST_SCANS
