"""Hundreds of supervisors cost the server little, and a quarter of them can die at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from everbeat.bench.fleet import CONNECTIONS, simulated
from tests.conftest import NewServer
from tests.stories.scenario import SLACK, Scenario, new_scenario, program_of

REAL = 4
CONNECTIONS_OF_TREE = 20
WATCHED_S = 5.0
NAME = "wait_for_on_crash"


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=[pytest.mark.long, pytest.mark.alone])])
def test_a_quarter_of_a_fleet_dies_at_once_and_all_tasks_are_settled(
    new_server: NewServer, tmp_path: Path, count: int
) -> None:  # R3
    """The supervisors that watch the others are among the dead, and so is one of four real trees."""
    most = CONNECTIONS * count + CONNECTIONS_OF_TREE * REAL
    server = new_server(settings={"max_connections": str(most)})
    doomed = count // 4
    with new_scenario(server.url, "story", tmp_path) as scenario, program_of(scenario) as sample_tasks:
        held = [sample_tasks.wait_for_on_crash.send("go") for _ in range(doomed)]
        with simulated(scenario.target) as dying, simulated(scenario.target) as living:
            dying.start(doomed, claims_of=NAME)
            scenario.until(lambda: dying.watching == 3, within=30, what="three watch")
            living.start(count - doomed)
            trees = [scenario.ready_tree() for _ in range(REAL)]
            held += [sample_tasks.wait_for_on_crash.send("go") for _ in range(2 * REAL)]
            scenario.until(lambda: len(scenario.effects("start")) == 2 * REAL, within=30, what="tasks run")
            # An idle session reports the statements of its start up to ten seconds later, and all supervisors start at once.
            allowed = 60 + count  # one by each supervisor, and those of the watchers and of the real trees
            scenario.until(lambda: statements_per_s(scenario.connection) <= allowed, within=60, what="calm")
            dying.kill(doomed)
            trees[0].kill()
            killed_at = time.monotonic()
            scenario.open_gate("go")
            for task in held:
                assert task.result(timeout=60) == "done"
            took_s = time.monotonic() - killed_at
            print(f"all settled after {took_s:.2f} s")
            assert took_s <= 10 * SLACK
            assert living.declared_dead == []
            ended = scenario.query("select count(*) from {schema}.supervisors where ended_at is not null")
            assert ended == [{"count": doomed + 1}], "the dead ones, and no live one"
            scenario.until(lambda: watched_by_the_living(scenario), within=30, what="others watch")


def watched_by_the_living(scenario: Scenario) -> bool:
    """Return whether every turn to watch for silent supervisors belongs to a live one. Each can be a real or a simulated one."""
    holders = """
        select count(*) filter (where s.ended_at is null) as live, count(*) from {schema}.turns t
        left join {schema}.supervisors s on s.id = t.taken_by
        where starts_with(t.service, 'watch:') and t.taken_until > clock_timestamp()"""
    (found,) = scenario.query(holders)
    return found["live"] == found["count"] > 0


def statements_per_s(connection: object) -> float:
    """Return the transactions per second of the whole server, as idle sessions have reported them."""

    def count() -> int:
        query = (
            "select xact_commit + xact_rollback as n from pg_stat_database where datname = current_database()"
        )
        return int(connection.execute(query).fetchone()["n"])  # type: ignore[attr-defined]

    before = count()
    time.sleep(WATCHED_S)  # the window of the measurement
    per_s = (count() - before) / WATCHED_S
    print(f"{per_s:.0f} statements/s")
    return per_s
