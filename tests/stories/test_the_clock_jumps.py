"""The wall clock of the database server jumps by an hour, either way: nobody is declared dead for it, and who dies is still noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from everbeat.store.embedded import EmbeddedServer
from tests.chaos.clock import ServerClock
from tests.conftest import NewServer
from tests.invariants import breaches
from tests.stories.stage import BY_AGE, FAST, SLACK, Stage, program_of

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
def staged_on(server: EmbeddedServer, folder: Path) -> Iterator[Stage]:
    stage = Stage(server.url, "story", folder)
    try:
        yield stage
        # What was sent while the clock was ahead was started before it was sent, by that same clock.
        with psycopg.connect(server.url, autocommit=True) as connection:
            assert {breach.number for breach in breaches(connection, "story")} <= {"I17"}
    finally:
        stage.close(check=False)


def hours_ahead(stage: Stage) -> float:
    (row,) = stage.query("select extract(epoch from clock_timestamp()) - %s as s", time.time())
    return round(float(row["s"]) / HOUR_S, 1)


def everybody_beats(stage: Stage, jump: str) -> None:
    def beats() -> dict[str, int]:
        rows = stage.query("select id, beat_seq from {schema}.supervisors where ended_at is null")
        return {row["id"]: row["beat_seq"] for row in rows}

    before = beats()
    assert len(before) == 2
    stage.until(
        lambda: all(beats().get(each, 0) >= seq + BEATS for each, seq in before.items()),
        within=BEATS * 5 * SLACK,
        what=f"{BEATS} beats of everybody, {jump}",
    )


@pytest.mark.parametrize(
    "ways", [BY_AGE, pytest.param({}, marks=pytest.mark.long)], ids=["by age", "all ways"]
)
def test_an_hour_forth_and_back(
    server: EmbeddedServer,
    clock: ServerClock,
    tmp_path: Path,
    ways: dict[str, object],
) -> None:  # I13, I14
    with staged_on(server, tmp_path) as stage, program_of(stage) as deeds:
        # Neither has room for all of them.
        worker = {"async_concurrency": 8, "prefetch": 0}
        doomed, heir = (stage.ready_tree(recovery={**FAST, **ways}, worker=worker) for _ in range(2))
        held = [deeds.wait_for_on_crash.send("go") for _ in range(12)]
        stage.until(lambda: len(stage.effects("start")) == len(held), within=30, what="all run")
        for shift in (HOUR_S, -HOUR_S):
            clock.shift(shift)
            assert hours_ahead(stage) == shift / HOUR_S
            everybody_beats(stage, f"{shift / HOUR_S:+.0f} h")
            assert stage.recoveries() == []
        clock.shift(-HOUR_S)
        doomed.kill()
        stage.until(stage.recoveries, within=10 * SLACK, what="who dies is noticed, an hour back")
        stage.open_gate("go")
        assert [task.result(timeout=60) for task in held] == ["done"] * len(held)
        orphans = {row["task_id"] for row in stage.recoveries()}
        assert 0 < len(orphans) < len(held), "both trees had some"
        for task in held:
            assert len(stage.effects("start", task.id)) == (2 if task.id in orphans else 1)
        assert heir.process.poll() is None
        deeds.app.close()


def test_a_dead_turn_holder_blocks_nobody_an_hour_back(
    server: EmbeddedServer, clock: ServerClock, tmp_path: Path
) -> None:  # I13, I14
    """The end of a turn is a moment of the database's clock: set back by an hour, it would be an hour away."""
    with staged_on(server, tmp_path) as stage, program_of(stage) as deeds:
        trees = [stage.ready_tree(recovery=FAST, options=("--queues", "none")) for _ in range(2)]
        stage.until(lambda: turn(stage, "expirer"), within=20, what="somebody has the turn to expire")
        # A sweeper that takes its turn and dies before it ends it.
        stage.query(
            "insert into {schema}.turns (service, taken_at, taken_until, taken_by) "
            "values ('sweep', now(), now() + interval '10 s', 'a sweeper that died') returning service"
        )
        holder = str(turn(stage, "expirer")["taken_by"])
        (row,) = stage.query("select pid from {schema}.supervisors where id = %s", holder)
        clock.shift(-HOUR_S)
        next(tree for tree in trees if tree.pid == row["pid"]).kill()
        assert hours_ahead(stage) == -1.0

        (row,) = stage.query("select now() as now")
        late = deeds.quick.with_options(good_until=row["now"] + timedelta(seconds=1)).send(1)
        stage.until(stage.state_is(late.id, "EXPIRED"), within=5 * SLACK, what="the other one expires")
        stage.until(
            lambda: turn(stage, "reconciler")["taken_until"] < row["now"] + timedelta(minutes=10),
            within=5 * SLACK,
            what="the other one reconciles",
        )
        assert deeds.app.sweep_stale_workers().skipped is False
        deeds.app.close()


def turn(stage: Stage, service: str) -> dict[str, Any]:
    """The turn of a service, if anybody ever had it."""
    rows = stage.query("select * from {schema}.turns where service = %s", service)
    return rows[0] if rows else {}
