"""The clock of the database server jumps by an hour in either direction: no live tree is declared dead, and deaths are still noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from everbeat.embedded.server import EmbeddedServer
from tests.chaos.clock import ServerClock
from tests.conftest import NewServer
from tests.invariants import breaches
from tests.stories.scenario import BY_AGE, FAST, SLACK, Scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

HOUR_S = 3_600
BEATS = 4
"""Twice the threshold, in beats."""


@pytest.fixture
def clock(tmp_path: Path) -> ServerClock:
    made = ServerClock(tmp_path)
    if made.obstacle:
        pytest.skip(f"LOUD: the clock of a server cannot be shifted here: {made.obstacle}")
    return made


@pytest.fixture
def server(new_server: NewServer, clock: ServerClock) -> EmbeddedServer:
    with clock.ticking():
        return new_server()


@contextmanager
def scenario_on(server: EmbeddedServer, folder: Path) -> Iterator[Scenario]:
    scenario = Scenario(server.url, "story", folder)
    try:
        yield scenario
        # A task sent while the clock was ahead started before it was sent, by that same clock.
        with psycopg.connect(server.url, autocommit=True) as connection:
            assert {breach.number for breach in breaches(connection, "story")} <= {"I17"}
    finally:
        scenario.close(check=False)


def hours_ahead(scenario: Scenario) -> float:
    (row,) = scenario.query("select extract(epoch from clock_timestamp()) - %s as s", time.time())
    return round(float(row["s"]) / HOUR_S, 1)


def everybody_beats(scenario: Scenario, jump: str) -> None:
    def beats() -> dict[str, int]:
        rows = scenario.query("select id, beat_seq from {schema}.supervisors where ended_at is null")
        return {row["id"]: row["beat_seq"] for row in rows}

    before = beats()
    assert len(before) == 2
    scenario.until(
        lambda: all(beats().get(each, 0) >= seq + BEATS for each, seq in before.items()),
        within=BEATS * 5 * SLACK,
        what=f"{BEATS} beats of everybody, {jump}",
    )


@pytest.mark.parametrize(
    "ways", [BY_AGE, pytest.param({}, marks=pytest.mark.long)], ids=["by age", "all ways"]
)
def test_a_clock_jump_of_an_hour_forwards_and_back_declares_no_live_tree_dead(
    server: EmbeddedServer,
    clock: ServerClock,
    tmp_path: Path,
    ways: dict[str, object],
) -> None:  # I13, I14
    with scenario_on(server, tmp_path) as scenario, program_of(scenario) as sample_tasks:
        # Neither tree has room for all of them.
        worker = {"async_concurrency": 8, "prefetch": 0}
        doomed, heir = (scenario.ready_tree(recovery={**FAST, **ways}, worker=worker) for _ in range(2))
        held = [sample_tasks.wait_for_on_crash.send("go") for _ in range(12)]
        scenario.until(lambda: len(scenario.effects("start")) == len(held), within=30, what="all run")
        for shift in (HOUR_S, -HOUR_S):
            clock.shift(shift)
            assert hours_ahead(scenario) == shift / HOUR_S
            everybody_beats(scenario, f"{shift / HOUR_S:+.0f} h")
            assert scenario.recoveries() == []
        clock.shift(-HOUR_S)
        doomed.kill()
        scenario.until(scenario.recoveries, within=10 * SLACK, what="who dies is noticed, an hour back")
        scenario.open_gate("go")
        assert [task.result(timeout=60) for task in held] == ["done"] * len(held)
        orphans = {row["task_id"] for row in scenario.recoveries()}
        assert 0 < len(orphans) < len(held), "both trees had some"
        for task in held:
            assert len(scenario.effects("start", task.id)) == (2 if task.id in orphans else 1)
        assert heir.process.poll() is None
        sample_tasks.app.close()


@pytest.mark.long
def test_a_dead_turn_holder_does_not_block_others_after_the_clock_was_set_back(
    server: EmbeddedServer, clock: ServerClock, tmp_path: Path
) -> None:  # I13, I14
    """The end of a turn is a time of the database's clock: set back by an hour, the turn would last an hour longer."""
    with scenario_on(server, tmp_path) as scenario, program_of(scenario) as sample_tasks:
        trees = [scenario.ready_tree(recovery=FAST, options=("--queues", "none")) for _ in range(2)]
        scenario.until(lambda: turn(scenario, "expirer"), within=20, what="somebody has the turn to expire")
        # A sweeper that takes its turn and dies before it ends the turn.
        scenario.query(
            "insert into {schema}.turns (service, taken_at, taken_until, taken_by) "
            "values ('sweep', now(), now() + interval '10 s', 'a sweeper that died') returning service"
        )
        holder = str(turn(scenario, "expirer")["taken_by"])
        (row,) = scenario.query("select pid from {schema}.supervisors where id = %s", holder)
        clock.shift(-HOUR_S)
        next(tree for tree in trees if tree.pid == row["pid"]).kill()
        assert hours_ahead(scenario) == -1.0

        (row,) = scenario.query("select now() as now")
        late = sample_tasks.quick.with_options(good_until=row["now"] + timedelta(seconds=1)).send(1)
        scenario.until(scenario.state_is(late.id, "EXPIRED"), within=5 * SLACK, what="the other one expires")
        scenario.until(
            lambda: turn(scenario, "reconciler")["taken_until"] < row["now"] + timedelta(minutes=10),
            within=5 * SLACK,
            what="the other one reconciles",
        )
        assert sample_tasks.app.sweep_stale_workers().skipped is False
        sample_tasks.app.close()


def turn(scenario: Scenario, service: str) -> dict[str, Any]:
    """Return the turn of a service; empty if it was never taken."""
    rows = scenario.query("select * from {schema}.turns where service = %s", service)
    return rows[0] if rows else {}
