"""The evidence and the cost of beats: live workers are left alone, however long, slow or badly behaved their code is."""

from __future__ import annotations

import re
import time
from types import ModuleType

import pytest

from tests.stories.scenario import BY_AGE, FAST, SLACK, Scenario

pytestmark = pytest.mark.story
STRICT = {**FAST, **BY_AGE}


@pytest.mark.long
def test_long_tasks_and_long_waits_are_not_recovered(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # D1
    scenario.hold_processes()
    scenario.ready_tree(recovery=STRICT)
    scenario.ready_tree(recovery=STRICT, options=("--queues", "none"))
    long = sample_tasks.nap.send(10)
    scenario.until(scenario.started(long.id), within=20, what="the long one runs")
    waiting = sample_tasks.quick_in_process.send(1)
    scenario.until(
        scenario.state_is(waiting.id, "CLAIMED"), within=5, what="another waits CLAIMED for its process"
    )
    deadline = time.monotonic() + 9
    while time.monotonic() < deadline:
        assert scenario.task(long.id)["state"] in ("RUNNING", "COMPLETED")
        running = scenario.query("select t.id from {schema}.tasks t where t.state = 'RUNNING'")
        evidence = scenario.query("select distinct task_id from {schema}.heartbeats where role = 'runner'")
        assert {row["id"] for row in running} <= {row["task_id"] for row in evidence} | {waiting.id}  # D2
        time.sleep(0.1)  # polls like an operator
    scenario.release_processes()
    assert waiting.result(timeout=20) == 1
    long.result(timeout=20)
    assert scenario.recoveries() == []
    assert len(scenario.effects("start")) == 2


def test_the_latest_beat_of_every_task_in_flight_can_be_read(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # D2
    scenario.hold_processes()
    tree = scenario.ready_tree(recovery=FAST)
    running = sample_tasks.wait_for.send("a")
    scenario.until(scenario.started(running.id), within=20, what="it runs")
    claimed = sample_tasks.quick_in_process.send(1)
    scenario.until(
        scenario.state_is(claimed.id, "CLAIMED"), within=5, what="another waits CLAIMED for its process"
    )
    scenario.until(
        lambda: (
            len(
                scenario.query(
                    "select * from {schema}.heartbeats where task_id = %s and role = 'runner'", running.id
                )
            )
            >= 3
        ),
        within=10,
        what="the start and two beats",
    )
    (worker,) = scenario.workers(tree)
    for task_id, role in ((running.id, "runner"), (claimed.id, "claimer")):
        latest = scenario.query(
            "select * from {schema}.heartbeats where task_id = %s order by sent_at desc limit 1", task_id
        )[0]
        assert (latest["sender_id"], latest["role"], latest["hostname"], latest["pid"]) == (
            worker["id"],
            role,
            worker["hostname"],
            worker["pid"],
        )
    beat = sample_tasks.app.info(running.id).heartbeat
    assert (beat.sender_id, beat.role, beat.pid) == (worker["id"], "runner", worker["pid"])
    scenario.open_gate("a")
    scenario.release_processes()
    claimed.result(timeout=20)


@pytest.mark.long
def test_two_hundred_sleeping_tasks_cost_one_statement_per_beat(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # D3
    scenario.ready_tree(recovery=FAST, worker={"async_concurrency": 200})
    sample_tasks.app.send_many([sample_tasks.wait_for.call("a") for _ in range(200)])
    scenario.until(lambda: scenario.states().get("RUNNING") == 200, within=20, what="all run")
    before = scenario.query("select count(*) as n from {schema}.beats")[0]["n"]
    versions = (
        "select md5(string_agg(id::text || xmin::text, '' order by id)) as versions from {schema}.tasks"
    )
    written = scenario.query(versions)
    began = time.monotonic()
    time.sleep(30)  # the half minute in which beats are counted
    window = time.monotonic() - began
    beats = scenario.query("select count(*) as n from {schema}.beats")[0]["n"] - before
    print(f"{beats} beats in {window:.1f} s")
    assert 15 <= beats <= window + 2
    assert scenario.query(versions) == written, "a beat writes no task row"
    scenario.open_gate("a")
    scenario.until(lambda: scenario.states().get("COMPLETED") == 200, within=20, what="all complete")


@pytest.mark.long
@pytest.mark.parametrize(
    "task_name", [pytest.param("block_the_loop", marks=pytest.mark.long), "hold_the_gil"]
)
def test_a_worker_whose_code_blocks_the_loop_or_the_gil_is_not_declared_dead(
    scenario: Scenario, sample_tasks: ModuleType, task_name: str
) -> None:  # D4
    tree = scenario.ready_tree(recovery=STRICT)
    scenario.ready_tree(recovery=STRICT, options=("--queues", "none"))
    blocking = getattr(sample_tasks, task_name).send(10.0)  # five thresholds
    blocking.result(timeout=60)
    assert scenario.recoveries() == []
    assert len(scenario.effects("start", blocking.id)) == 1
    scenario.until(
        lambda: re.search(f"loop_blocked .*{task_name}", tree.output()),
        within=20,
        what="the log names the task",
    )


def test_snapshots_of_workers_are_stored_and_readable(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # D6
    tree = scenario.ready_tree(recovery={"worker_state_snapshot_interval_ms": 1_000})
    sample_tasks.wait_for.send("a")
    scenario.until(
        lambda: any(
            row["tasks_running"] == 1 for row in scenario.query("select * from {schema}.worker_states")
        ),
        within=20,
        what="a snapshot",
    )
    (worker,) = scenario.workers(tree)
    newest = sample_tasks.app.worker_states(worker["id"])[0]
    assert newest.running == 1
    assert newest.slots > 0
    assert newest.rss_bytes > 10_000_000
    assert newest.cpu_percent >= 0
    assert newest.loop_lag_ms >= 0
    scenario.open_gate("a")


@pytest.mark.long
def test_a_stopping_worker_beats_until_its_last_task_has_ended(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # B12
    tree = scenario.ready_tree(recovery=STRICT)
    scenario.ready_tree(recovery=STRICT, options=("--queues", "none"))
    task = sample_tasks.nap.send(6)
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    began = time.monotonic()
    assert tree.stop() == 0
    assert time.monotonic() - began < 6 * SLACK
    assert scenario.task(task.id)["state"] == "COMPLETED"
    assert scenario.recoveries() == []
    assert scenario.workers(tree) == []
