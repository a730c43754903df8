"""Work that was finished stays finished: steps are not done twice, rows and completion are one. Real kills, real outages."""

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
from tests.stories.stage import FAST, SLACK, Stage, Tree, program_of, staged

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 2, "thread_concurrency": 2}


@pytest.fixture
def steps(stage: Stage) -> Iterator[ModuleType]:
    with program_of(stage, "steps") as program:
        yield program


def orders(stage: Stage) -> list[int]:
    return [row["attempt"] for row in stage.query("select attempt from {schema}.orders order by attempt")]


def make_orders(stage: Stage) -> None:
    stage.connection.execute(f'create table "{stage.schema}".orders (attempt integer)')  # type: ignore[call-overload]


def process_of(stage: Stage, tree: Tree, step: str) -> psutil.Process:
    """The process that wrote this effect, which is one of the tree's."""
    (line,) = stage.effects(step)
    process = psutil.Process(line["pid"])
    assert process.pid in {one.pid for one in tree.processes()}
    return process


ORDERS = [
    "order_in_process",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("order_in_thread", "order_on_the_loop")),
]


@pytest.mark.parametrize(
    "name", ["steps_in_process", "steps_in_thread", pytest.param("steps_on_the_loop", marks=pytest.mark.long)]
)
def test_ten_steps_killed_in_the_seventh_go_on_at_the_seventh(
    stage: Stage, steps: ModuleType, name: str
) -> None:  # G3
    tree = stage.ready_tree(program="steps", worker=ALONE)
    task = getattr(steps, name).send("never")
    stage.until(lambda: stage.effects("step 7", task.id), within=20, what="it is in step 7")
    process_of(stage, tree, "step 7").kill()
    assert task.result(timeout=30) == "done"
    done = [line["step"] for line in stage.effects(task_id=task.id) if line["step"].startswith("step")]
    assert done == [f"step {n}" for n in (*range(1, 8), *range(7, 11))]
    assert [line["attempt"] for line in stage.effects("step 7")] == [1, 2]
    assert [one["outcome"] for one in stage.attempts(task.id)] == ["CRASHED", "COMPLETED"]
    assert stage.task(task.id)["checkpoint"] is None


def test_a_whole_tree_killed_in_the_seventh_step(stage: Stage, steps: ModuleType) -> None:  # G3
    doomed = stage.ready_tree(program="steps", worker=ALONE)
    task = steps.steps_in_process.send("never")
    stage.until(lambda: stage.effects("step 7", task.id), within=20, what="it is in step 7")
    doomed.kill()
    stage.ready_tree(program="steps", worker=ALONE)
    assert task.result(timeout=30) == "done"
    done = [line["step"] for line in stage.effects(task_id=task.id) if line["step"].startswith("step")]
    assert done == [f"step {n}" for n in (*range(1, 8), *range(7, 11))]


def test_an_operators_retry_goes_on_where_the_task_failed(stage: Stage, steps: ModuleType) -> None:  # G3
    stage.ready_tree(program="steps", worker=ALONE)
    task = steps.steps_on_the_loop.send("go")
    stage.until(lambda: stage.effects("step 7", task.id), within=20, what="it is in step 7")
    assert task.cancel().verdict == "REQUESTED"
    stage.until(stage.state_is(task.id, "CANCELLED"), within=20, what="it is cancelled")
    assert stage.task(task.id)["checkpoint"] == {"value": None, "done": {"step": 6}}
    steps.app.retry(task.id)
    assert task.result(timeout=30) == "done"
    done = [line["step"] for line in stage.effects(task_id=task.id) if line["step"].startswith("step")]
    assert done == [f"step {n}" for n in (*range(1, 8), *range(7, 11))]


@pytest.mark.parametrize("name", ORDERS)
def test_a_kill_between_the_rows_and_the_commit_leaves_no_rows(
    stage: Stage, steps: ModuleType, name: str
) -> None:  # G4
    make_orders(stage)
    tree = stage.ready_tree(program="steps", worker=ALONE)
    task = getattr(steps, name).send("go")
    stage.until(lambda: stage.effects("written", task.id), within=20, what="the row is written")
    assert orders(stage) == []
    process_of(stage, tree, "written").kill()
    stage.until(lambda: len(stage.effects("written", task.id)) == 2, within=20, what="it is written again")
    assert orders(stage) == []
    stage.open_gate("go")
    assert task.result(timeout=30) == "order of attempt 2"
    assert orders(stage) == [2]
    assert [one["outcome"] for one in stage.attempts(task.id)] == ["CRASHED", "COMPLETED"]
    stage.until(lambda: stage.effects("committed"), within=10, what="the code goes on after its commit")
    assert [line["attempt"] for line in stage.effects("committed")] == [2]


@pytest.mark.parametrize("name", ORDERS)
def test_a_lease_lost_meanwhile_rolls_rows_and_completion_back(
    stage: Stage, steps: ModuleType, name: str
) -> None:  # G4
    make_orders(stage)
    frozen = stage.ready_tree(program="steps", recovery=FAST, worker=ALONE)
    task = getattr(steps, name).send("go")
    stage.until(lambda: stage.effects("written", task.id), within=20, what="the row is written")
    stage.ready_tree(program="steps", recovery=FAST, worker=ALONE)
    time.sleep(1.5)  # the observer has looked at least once
    frozen.freeze()
    stage.until(
        lambda: len(stage.effects("written", task.id)) == 2, within=6 * SLACK, what="it runs elsewhere"
    )
    stage.open_gate("go")
    assert task.result(timeout=20) == "order of attempt 2"
    finished = stage.task(task.id)
    frozen.thaw()
    stage.until(lambda: "lease" in frozen.output(), within=10, what="the old attempt hears of it")
    stage.until(
        lambda: (
            stage.query(
                "select 1 from pg_stat_activity where state like 'idle in transaction%%' and query like '%%orders%%'"
            )
            == []
        ),
        within=10,
        what="the old transaction is over",
    )
    assert stage.task(task.id) == finished
    assert orders(stage) == [2]
    stage.until(lambda: stage.effects("committed"), within=10, what="the code goes on after its commit")
    assert [line["attempt"] for line in stage.effects("committed")] == [2]


@pytest.mark.parametrize("name", ORDERS)
def test_a_server_that_restarts_in_the_midst_of_the_commit(
    new_server: NewServer, tmp_path: Path, name: str
) -> None:  # G4, L: commit unknown
    server = new_server(settings={"fsync": "on", "synchronous_commit": "on"})
    with staged(server.url, "story", tmp_path) as stage, program_of(stage, "steps") as program:
        make_orders(stage)
        # A check at the end of the transaction waits: whoever commits is in the midst of it, its outcome written already.
        stage.connection.execute(
            """create function story.linger() returns trigger language plpgsql as $$
               begin if new.attempt = 1 then perform pg_sleep(60); end if; return null; end $$"""
        )
        stage.connection.execute(
            """create constraint trigger linger after insert on story.orders deferrable initially deferred
               for each row execute function story.linger()"""
        )
        stage.ready_tree(program="steps", worker=ALONE)
        stage.open_gate("go")
        task = getattr(program, name).send("go")
        in_commit = "select 1 from pg_stat_activity where query = 'COMMIT' and state = 'active'"
        stage.until(lambda: stage.query(in_commit), within=20, what="it commits")
        server.restart("immediate")
        stage.connection.close()
        stage.connection = stage.target.connect("everbeat story")
        stage.connection.row_factory = dict_row  # type: ignore[assignment]
        stage.until(
            stage.state_is(task.id, "FAILED", "COMPLETED"), within=30, what="the outcome is known and settled"
        )
        row = stage.task(task.id)
        # Nothing was committed, so the code was told the library's own error, and no second attempt was asked for.
        assert (row["state"], row["error"]["code"], row["attempt"]) == ("FAILED", "UNHANDLED_EXCEPTION", 1)
        assert "terminat" in row["error"]["message"] or "connection" in row["error"]["message"]
        assert orders(stage) == []
        assert stage.recoveries() == []
        program.app.close()
        for module in ("deeds", "steps"):
            sys.modules.pop(module, None)
