"""Any role that can connect can notify the channel: a hint makes a worker read rows and has no other effect."""

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
from tests.stories.nats_scenario import POLLS_NEVER, NatsScenario
from tests.stories.scenario import SLACK, Scenario, Tree

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

INVENTED = 3_000
HONEST = 1_001
FLOOD_S = 2.0
MOST_SCANS = 1_500
"""Scans per second of one worker: after a burst, each service follows hints 50 times per second with up to three statements."""


@pytest.fixture
def nats(scenario: Scenario) -> Iterator[NatsScenario]:
    """Must run before `sample_tasks`, whose app gets the URL of this server."""
    with NatsServer() as server:
        yield NatsScenario(scenario, server)


@contextmanager
def unprivileged_connection(scenario: Scenario) -> Iterator[Connection[Any]]:
    """Connect as a role that can log in and has no other right."""
    role = sql.Identifier(f"stranger_{uuid4().hex[:12]}")
    with psycopg.connect(scenario.url, autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        try:
            with psycopg.connect(
                scenario.url, user=role.as_string().strip('"'), autocommit=True
            ) as connection:
                yield connection
        finally:
            owner.execute(sql.SQL("DROP ROLE {}").format(role))


def flood(connection: Connection[Any], channel: str, payload: str, count: int = INVENTED) -> None:
    """Notify `count` times, with a different number (%1$s) and id (%2$s) in each payload."""
    connection.execute(
        "select pg_notify(%s, format(%s, n, gen_random_uuid())) from generate_series(1, %s) n",
        [channel, payload, count],
    )


def consumers(nats: NatsScenario) -> int:
    return nats.counters().config["consumer_count"]


def said(trees: list[Tree], word: str) -> int:
    return sum(tree.output().count(word) for tree in trees)


@pytest.mark.long
def test_a_flood_of_invented_queues_and_tasks_reaches_no_stream(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:
    trees = [scenario.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
    nats.ready()
    assert sample_tasks.quick.send(1).result(timeout=20) == 1
    with unprivileged_connection(scenario) as connection:
        for payload in (
            "o:::invented %1$s",
            "o:%1$s:%2$s:invented %1$s",
            "t:invented %1$s",
            "c:%2$s",
            "l:%2$s,%2$s",
            "o:" + 7_900 * "9",
            "l:" + 200 * "%2$s,",
        ):
            flood(connection, scenario.target.channel, payload)
    handles = [sample_tasks.quick.send(n) for n in range(20)]
    assert [handle.result(timeout=20) for handle in handles] == list(range(20))
    scenario.until(nats.drained, within=20, what="the stream is drained")
    assert set(nats.counters().consumers) == {"default"}
    assert nats.travelled() <= 21
    assert said(trees, "nats_away") == 0, [t.output()[-3000:] for t in trees]
    assert scenario.query("select 1 from {schema}.workers where listens and ended_at is null") == []


@pytest.mark.long
def test_tasks_of_a_thousand_queues_are_announced_by_messages(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:
    trees = [scenario.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
    nats.ready()
    handles = sample_tasks.app.send_many(
        sample_tasks.quick.with_options(queue=f"honest-{n}").call(n) for n in range(HONEST)
    )
    assert [handle.result(timeout=60) for handle in handles] == list(range(HONEST))
    one_more = [sample_tasks.quick.with_options(queue=f"honest-{n}").send(n) for n in range(0, HONEST, 10)]
    assert [handle.result(timeout=20) for handle in one_more] == list(range(0, HONEST, 10))
    assert said(trees, "nats_away") == 0, [t.output()[-3000:] for t in trees]


LIMITED = """
accounts { A { jetstream { max_mem: 16MB, max_file: 64MB, max_streams: 5, max_consumers: 4 }, users: [ { user: a, password: b } ] } }
no_auth_user: a
"""


@pytest.mark.long
def test_queues_without_a_nats_consumer_are_announced_by_postgresql(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    with NatsServer(extra=LIMITED) as server:
        nats = NatsScenario(scenario, server)
        trees = [scenario.ready_tree(worker=POLLS_NEVER) for _ in range(2)]
        nats.ready()
        for _ in range(2):
            handles = [sample_tasks.quick.with_options(queue=f"honest-{n}").send(n) for n in range(10)]
            began = time.monotonic()
            assert [handle.result(timeout=60) for handle in handles] == list(range(10))
            assert time.monotonic() - began < 5 * SLACK
        assert len(nats.counters().consumers) == 4
        assert said(trees, "nats_away") == 0
        scenario.until(lambda: said(trees, "nats_consumers_limited"), within=20, what="the limit is reported")
        scenario.until(nats.drained, within=20, what="the stream is drained")


def scans(scenario: Scenario) -> int:
    """Return how often a table of the scenario was read so far. Notifying and listening read none."""
    scenario.connection.execute("select pg_stat_clear_snapshot()")
    (row,) = scenario.query(
        "select sum(seq_scan + coalesce(idx_scan, 0)) as scans from pg_stat_all_tables where schemaname = %s",
        scenario.schema,
    )
    return int(row["scans"])


def test_a_flood_of_useless_hints_makes_a_worker_query_at_a_bounded_rate(
    scenario: Scenario, nats: NatsScenario, sample_tasks: ModuleType
) -> None:
    scenario.ready_tree(worker=POLLS_NEVER)
    nats.ready()
    rates: dict[str, float] = {}
    with unprivileged_connection(scenario) as connection:
        for payload in ("*", "t:default", "t:invented %1$s", "o:", "r", "w"):
            before, began = scans(scenario), time.monotonic()
            while time.monotonic() - began < FLOOD_S:
                flood(connection, scenario.target.channel, payload, 20)
            rates[payload] = (scans(scenario) - before) / FLOOD_S
    print({payload: round(rate) for payload, rate in rates.items()})
    assert sample_tasks.quick.send(1).result(timeout=20) == 1
    assert max(rates.values()) < MOST_SCANS
