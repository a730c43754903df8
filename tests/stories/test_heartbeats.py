"""What a beat proves and what it costs: the living are left alone, however long, slow or rude their code is."""

from __future__ import annotations

import time
from types import ModuleType

import pytest

from tests.stories.stage import BY_AGE, FAST, SLACK, Stage

pytestmark = pytest.mark.story
STRICT = {**FAST, **BY_AGE}


@pytest.mark.long
def test_long_tasks_and_long_waits_are_left_alone(stage: Stage, deeds: ModuleType) -> None:  # D1
    stage.ready_tree(recovery=STRICT, worker={"async_concurrency": 1, "prefetch": 1})
    stage.ready_tree(recovery=STRICT, options=("--queues", "none"))
    long = deeds.nap.send(10)
    stage.until(stage.started(long.id), within=20, what="the long one runs")
    waiting = deeds.quick.send(1)
    stage.until(stage.state_is(waiting.id, "CLAIMED"), within=5, what="the next waits CLAIMED")
    deadline = time.monotonic() + 9
    while time.monotonic() < deadline:
        assert stage.task(long.id)["state"] in ("RUNNING", "COMPLETED")
        running = stage.query("select t.id from {schema}.tasks t where t.state = 'RUNNING'")
        evidence = stage.query("select distinct task_id from {schema}.heartbeats where role = 'runner'")
        assert {row["id"] for row in running} <= {row["task_id"] for row in evidence} | {waiting.id}  # D2
        time.sleep(0.1)  # looks like an operator would
    assert waiting.result(timeout=20) == 1
    long.result(timeout=20)
    assert stage.recoveries() == []
    assert len(stage.effects("start")) == 2


def test_an_operator_reads_the_latest_beat_of_every_task_in_flight(
    stage: Stage, deeds: ModuleType
) -> None:  # D2
    tree = stage.ready_tree(recovery=FAST, worker={"async_concurrency": 1, "prefetch": 1})
    running = deeds.wait_for.send("a")
    stage.until(stage.started(running.id), within=20, what="it runs")
    claimed = deeds.quick.send(1)
    stage.until(stage.state_is(claimed.id, "CLAIMED"), within=5, what="the next waits CLAIMED")
    stage.until(
        lambda: (
            len(
                stage.query(
                    "select * from {schema}.heartbeats where task_id = %s and role = 'runner'", running.id
                )
            )
            >= 3
        ),
        within=10,
        what="the start and two beats",
    )
    (worker,) = stage.workers(tree)
    for task_id, role in ((running.id, "runner"), (claimed.id, "claimer")):
        latest = stage.query(
            "select * from {schema}.heartbeats where task_id = %s order by sent_at desc limit 1", task_id
        )[0]
        assert (latest["sender_id"], latest["role"], latest["hostname"], latest["pid"]) == (
            worker["id"],
            role,
            worker["hostname"],
            worker["pid"],
        )
    beat = deeds.app.info(running.id).heartbeat
    assert (beat.sender_id, beat.role, beat.pid) == (worker["id"], "runner", worker["pid"])
    stage.open_gate("a")
    claimed.result(timeout=20)


def test_two_hundred_sleeping_tasks_cost_one_statement_a_beat(stage: Stage, deeds: ModuleType) -> None:  # D3
    stage.ready_tree(recovery=FAST)
    deeds.app.send_many([deeds.wait_for.call("a") for _ in range(200)])
    stage.until(lambda: stage.states().get("RUNNING") == 200, within=20, what="all run")
    before = stage.query("select count(*) as n from {schema}.beats")[0]["n"]
    versions = (
        "select md5(string_agg(id::text || xmin::text, '' order by id)) as versions from {schema}.tasks"
    )
    written = stage.query(versions)
    began = time.monotonic()
    time.sleep(30)  # the half minute in which beats are counted
    window = time.monotonic() - began
    beats = stage.query("select count(*) as n from {schema}.beats")[0]["n"] - before
    print(f"{beats} beats in {window:.1f} s")
    assert 15 <= beats <= window + 2
    assert stage.query(versions) == written, "a beat writes no task row"
    stage.open_gate("a")
    stage.until(lambda: stage.states().get("COMPLETED") == 200, within=20, what="all complete")


@pytest.mark.parametrize("deed", ["block_the_loop", "hold_the_gil"])
def test_rude_code_is_not_declared_dead(stage: Stage, deeds: ModuleType, deed: str) -> None:  # D4
    tree = stage.ready_tree(recovery=STRICT)
    stage.ready_tree(recovery=STRICT, options=("--queues", "none"))
    rude = getattr(deeds, deed).send(10.0)  # five thresholds
    rude.result(timeout=60)
    assert stage.recoveries() == []
    assert len(stage.effects("start", rude.id)) == 1
    named = [line for line in tree.output().splitlines() if "loop_blocked" in line and deed in line]
    assert named, f"the log names the task:\n{tree.output()[-3000:]}"


def test_snapshots_of_workers_are_kept_and_readable(stage: Stage, deeds: ModuleType) -> None:  # D6
    tree = stage.ready_tree(recovery={"worker_state_snapshot_interval_ms": 1_000})
    deeds.wait_for.send("a")
    stage.until(
        lambda: any(row["tasks_running"] == 1 for row in stage.query("select * from {schema}.worker_states")),
        within=20,
        what="a snapshot",
    )
    (worker,) = stage.workers(tree)
    newest = deeds.app.worker_states(worker["id"])[0]
    assert newest.running == 1
    assert newest.slots > 0
    assert newest.rss_bytes > 10_000_000
    assert newest.cpu_percent >= 0
    assert newest.loop_lag_ms >= 0
    stage.open_gate("a")


def test_a_worker_that_leaves_beats_until_its_last_task_ended(stage: Stage, deeds: ModuleType) -> None:  # B12
    tree = stage.ready_tree(recovery=STRICT)
    stage.ready_tree(recovery=STRICT, options=("--queues", "none"))
    task = deeds.nap.send(6)
    stage.until(stage.started(task.id), within=20, what="it runs")
    began = time.monotonic()
    assert tree.stop() == 0
    assert time.monotonic() - began < 6 * SLACK
    assert stage.task(task.id)["state"] == "COMPLETED"
    assert stage.recoveries() == []
    assert stage.workers(tree) == []
