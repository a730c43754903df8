"""Finished work stays finished: steps are not repeated, and rows are committed with the completion. Real kills, real outages."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from psycopg.rows import dict_row

from tests.conftest import NewServer
from tests.stories.scenario import FAST, SLACK, Scenario, Tree, new_scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 2, "thread_concurrency": 2}


@pytest.fixture
def steps(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "steps") as program:
        yield program


def orders(scenario: Scenario) -> list[int]:
    return [row["attempt"] for row in scenario.query("select attempt from {schema}.orders order by attempt")]


def make_orders(scenario: Scenario) -> None:
    scenario.connection.execute(f'create table "{scenario.schema}".orders (attempt integer)')  # type: ignore[call-overload]


def process_of(scenario: Scenario, tree: Tree, step: str) -> psutil.Process:
    """Return the process that recorded this effect, which belongs to the tree."""
    (line,) = scenario.effects(step)
    process = psutil.Process(line["pid"])
    assert process.pid in {one.pid for one in tree.processes()}
    return process


ORDERS = [
    "order_in_process",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("order_in_thread", "order_on_the_loop")),
]


@pytest.mark.parametrize(
    "name",
    [
        "steps_in_process",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("steps_in_thread", "steps_on_the_loop")),
    ],
)
def test_a_task_killed_in_its_seventh_step_continues_at_the_seventh(
    scenario: Scenario, steps: ModuleType, name: str
) -> None:  # G3
    tree = scenario.ready_tree(program="steps", worker=ALONE)
    task = getattr(steps, name).send("never")
    scenario.until(lambda: scenario.effects("step 7", task.id), within=20, what="it is in step 7")
    process_of(scenario, tree, "step 7").kill()
    assert task.result(timeout=30) == "done"
    done = [line["step"] for line in scenario.effects(task_id=task.id) if line["step"].startswith("step")]
    assert done == [f"step {n}" for n in (*range(1, 8), *range(7, 11))]
    assert [line["attempt"] for line in scenario.effects("step 7")] == [1, 2]
    assert [one["outcome"] for one in scenario.attempts(task.id)] == ["CRASHED", "COMPLETED"]
    assert scenario.task(task.id)["checkpoint"] is None


@pytest.mark.long
def test_a_task_continues_at_its_seventh_step_after_its_whole_tree_was_killed(
    scenario: Scenario, steps: ModuleType
) -> None:  # G3
    doomed = scenario.ready_tree(program="steps", worker=ALONE)
    task = steps.steps_in_process.send("never")
    scenario.until(lambda: scenario.effects("step 7", task.id), within=20, what="it is in step 7")
    doomed.kill()
    scenario.ready_tree(program="steps", worker=ALONE)
    assert task.result(timeout=30) == "done"
    done = [line["step"] for line in scenario.effects(task_id=task.id) if line["step"].startswith("step")]
    assert done == [f"step {n}" for n in (*range(1, 8), *range(7, 11))]


def test_an_operator_retry_continues_at_the_last_checkpoint(
    scenario: Scenario, steps: ModuleType
) -> None:  # G3
    scenario.ready_tree(program="steps", worker=ALONE)
    task = steps.steps_on_the_loop.send("go")
    scenario.until(lambda: scenario.effects("step 7", task.id), within=20, what="it is in step 7")
    assert task.cancel().verdict == "REQUESTED"
    scenario.until(scenario.state_is(task.id, "CANCELLED"), within=20, what="it is cancelled")
    assert scenario.task(task.id)["checkpoint"] == {"value": None, "done": {"step": 6}}
    steps.app.retry(task.id)
    assert task.result(timeout=30) == "done"
    done = [line["step"] for line in scenario.effects(task_id=task.id) if line["step"].startswith("step")]
    assert done == [f"step {n}" for n in (*range(1, 8), *range(7, 11))]


@pytest.mark.parametrize("name", ORDERS)
def test_a_kill_before_the_commit_leaves_no_rows(
    scenario: Scenario, steps: ModuleType, name: str
) -> None:  # G4
    make_orders(scenario)
    tree = scenario.ready_tree(program="steps", worker=ALONE)
    task = getattr(steps, name).send("go")
    scenario.until(lambda: scenario.effects("written", task.id), within=20, what="the row is written")
    assert orders(scenario) == []
    process_of(scenario, tree, "written").kill()
    scenario.until(
        lambda: len(scenario.effects("written", task.id)) == 2, within=20, what="it is written again"
    )
    assert orders(scenario) == []
    scenario.open_gate("go")
    assert task.result(timeout=30) == "order of attempt 2"
    assert orders(scenario) == [2]
    assert [one["outcome"] for one in scenario.attempts(task.id)] == ["CRASHED", "COMPLETED"]
    scenario.until(lambda: scenario.effects("committed"), within=10, what="the code goes on after its commit")
    assert [line["attempt"] for line in scenario.effects("committed")] == [2]


@pytest.mark.parametrize("name", ORDERS)
def test_a_lease_lost_before_the_commit_rolls_back_rows_and_completion(
    scenario: Scenario, steps: ModuleType, name: str
) -> None:  # G4
    make_orders(scenario)
    frozen = scenario.ready_tree(program="steps", recovery=FAST, worker=ALONE)
    task = getattr(steps, name).send("go")
    scenario.until(lambda: scenario.effects("written", task.id), within=20, what="the row is written")
    scenario.ready_tree(program="steps", recovery=FAST, worker=ALONE)
    time.sleep(1.5)  # the observer has checked at least once
    frozen.freeze()
    scenario.until(
        lambda: len(scenario.effects("written", task.id)) == 2, within=6 * SLACK, what="it runs elsewhere"
    )
    scenario.open_gate("go")
    assert task.result(timeout=20) == "order of attempt 2"
    finished = scenario.task(task.id)
    frozen.thaw()
    scenario.until_logged(frozen, "leases_lost", within=10)
    scenario.until(
        lambda: (
            scenario.query(
                "select 1 from pg_stat_activity where state like 'idle in transaction%%' and query like '%%orders%%'"
            )
            == []
        ),
        within=10,
        what="the old transaction is over",
    )
    assert scenario.task(task.id) == finished
    assert orders(scenario) == [2]
    scenario.until(lambda: scenario.effects("committed"), within=10, what="the code goes on after its commit")
    assert [line["attempt"] for line in scenario.effects("committed")] == [2]


@pytest.mark.long
@pytest.mark.parametrize("name", ORDERS)
def test_a_server_restart_during_the_commit_fails_the_task_without_rows(
    new_server: NewServer, tmp_path: Path, name: str
) -> None:  # G4, L: commit unknown
    server = new_server(settings={"fsync": "on", "synchronous_commit": "on"})
    with new_scenario(server.url, "story", tmp_path) as scenario, program_of(scenario, "steps") as program:
        make_orders(scenario)
        # A deferred trigger delays the commit: at that moment the outcome is written already.
        scenario.connection.execute(
            """create function story.linger() returns trigger language plpgsql as $$
               begin if new.attempt = 1 then perform pg_sleep(60); end if; return null; end $$"""
        )
        scenario.connection.execute(
            """create constraint trigger linger after insert on story.orders deferrable initially deferred
               for each row execute function story.linger()"""
        )
        scenario.ready_tree(program="steps", worker=ALONE)
        scenario.open_gate("go")
        task = getattr(program, name).send("go")
        in_commit = "select 1 from pg_stat_activity where query = 'COMMIT' and state = 'active'"
        scenario.until(lambda: scenario.query(in_commit), within=20, what="it commits")
        server.restart("immediate")
        scenario.connection.close()
        scenario.connection = scenario.target.connect("everbeat story")
        scenario.connection.row_factory = dict_row  # type: ignore[assignment]
        scenario.until(
            scenario.state_is(task.id, "FAILED", "COMPLETED"),
            within=30,
            what="the outcome is known and settled",
        )
        row = scenario.task(task.id)
        # Nothing was committed, so the code got the library's error, and no second attempt was requested.
        assert (row["state"], row["error"]["code"], row["attempt"]) == ("FAILED", "UNHANDLED_EXCEPTION", 1)
        assert "terminat" in row["error"]["message"] or "connection" in row["error"]["message"]
        assert orders(scenario) == []
        assert scenario.recoveries() == []
        program.app.close()
        for module in ("sample_tasks", "steps"):
            sys.modules.pop(module, None)
