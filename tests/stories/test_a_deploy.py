"""What becomes of running code when its worker is told to stop: never a second run that the policy forbids."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

from tests.stories.stage import SLACK, Stage

pytestmark = pytest.mark.story

KINDS = ("async", "stubborn", "thread", "process")
AGAIN = ("retry", "listed", "stop_retry")
NEVER = ("fail", "stop_fail")


def test_a_stop_gives_no_code_a_second_run_that_its_policy_forbids(
    stage: Stage, deploys: ModuleType
) -> None:  # J1
    tree = stage.ready_tree(
        program="deploys",
        worker={"grace": 1, "async_concurrency": 10, "thread_concurrency": 5, "process_concurrency": 5},
    )
    sent = {key: task.send("never") for key, task in deploys.TASKS.items()}
    stage.until(lambda: len(stage.effects("start")) == len(sent), within=40, what="all run", tree=tree)
    assert tree.stop() == 0, tree.output()
    for (kind, policy), handle in sent.items():
        row, place = stage.task(handle.id), f"{kind} {policy}"
        assert (row["retry_count"], row["crash_count"], row["loss_count"]) == (0, 0, 0), place
        assert row["state"] == ("PENDING" if policy in AGAIN else "FAILED"), place
        if policy in NEVER:
            assert row["error"]["code"] == "WORKER_STOPPED", place
        assert [each["outcome"] for each in stage.attempts(handle.id)] == [
            "RELEASED" if policy in AGAIN else "FAILED"
        ], place
    stage.open_gate("never")
    stage.ready_tree(program="deploys")
    for (_, policy), handle in sent.items():
        if policy in AGAIN:
            handle.result(timeout=40)
        assert len(stage.effects("start", handle.id)) == (2 if policy in AGAIN else 1)


def test_a_second_run_begins_after_the_process_of_the_first_has_ended(
    stage: Stage, deploys: ModuleType
) -> None:  # J1
    tree = stage.ready_tree(program="deploys", worker={"grace": 1})
    handle = deploys.TASKS["thread", "retry"].send("later")
    stage.until(stage.started(handle.id), within=20, what="it runs", tree=tree)
    stage.ready_tree(program="deploys")
    (first,) = stage.effects("start", handle.id)
    tree.process.terminate()
    stage.until(stage.started(handle.id, times=2), within=20, what="the second run", tree=tree)
    assert not Path(f"/proc/{first['pid']}").exists()
    stage.open_gate("later")
    handle.result(timeout=20)
    assert stage.effects("end", handle.id)[0]["pid"] != first["pid"]


def test_where_an_exit_proves_no_death_a_stop_still_follows_its_policy(
    stage: Stage, deploys: ModuleType
) -> None:  # J1
    tree = stage.ready_tree(
        program="deploys", worker={"grace": 1, "thread_concurrency": 5}, recovery={"detect_child_exit": False}
    )
    sent = {policy: deploys.TASKS["thread", policy].send("never") for policy in (*AGAIN, *NEVER)}
    stage.until(lambda: len(stage.effects("start")) == len(sent), within=40, what="all run", tree=tree)
    assert tree.stop() == 0, tree.output()
    for policy, handle in sent.items():
        assert stage.task(handle.id)["state"] == ("PENDING" if policy in AGAIN else "FAILED"), policy


def test_the_row_of_a_stopped_worker_ends_after_its_code_was_settled_so_that_no_sweep_can_take_it_for_a_death(
    stage: Stage, deploys: ModuleType
) -> None:  # J1
    tree = stage.ready_tree(program="deploys", worker={"grace": 1})
    handle = deploys.TASKS["thread", "stop_fail"].send("never")
    stage.until(stage.started(handle.id), within=20, what="it runs", tree=tree)
    with psycopg.connect(stage.url) as other:
        other.execute(f'select from "{stage.schema}".workers for update')
        tree.process.terminate()
        stage.until(stage.state_is(handle.id, "FAILED"), within=20, what="settled beside the locked row")
    assert tree.process.wait(60) == 0
    assert stage.task(handle.id)["error"]["code"] == "WORKER_STOPPED"


def test_a_stop_frees_serial_lines_and_fails_workflow_nodes_and_what_is_handed_back_keeps_its_turn(
    stage: Stage, deploys: ModuleType
) -> None:  # J1
    tree = stage.ready_tree(program="deploys", worker={"grace": 1})
    lines = {
        policy: [deploys.TASKS["thread", policy].with_options(serial=policy).send("later") for _ in range(2)]
        for policy in ("fail", "retry")
    }
    for policy in lines:
        workflow = deploys.app.workflow(policy)
        first = workflow.add(deploys.TASKS["thread", policy], "later").named("first")
        workflow.add(deploys.TASKS["async", policy], "later").after(first).named("second")
        workflow.start()
    stage.until(lambda: len(stage.effects("start")) == 4, within=20, what="four run", tree=tree)
    assert tree.stop() == 0, tree.output()
    stage.open_gate("later")
    stage.ready_tree(program="deploys")
    for policy, (one, two) in lines.items():
        two.result(timeout=20)
        begun = [
            line["task"] for line in stage.effects("start") if line["task"] in (str(one.id), str(two.id))
        ]
        assert begun == [str(one.id)] * (1 if policy == "fail" else 2) + [str(two.id)], policy
    ended = {"fail": "FAILED", "retry": "COMPLETED"}
    stage.until(
        lambda: (
            {row["name"]: row["state"] for row in stage.query("select name, state from {schema}.workflows")}
            == ended
        ),
        within=20,
        what="both workflows have ended",
    )


def test_a_second_signal_ends_rude_processes_at_once_and_a_cancel_outranks_the_stop(
    stage: Stage, deploys: ModuleType
) -> None:  # J1 B12
    tree = stage.ready_tree(program="deploys", worker={"grace": 60})
    deaf = deploys.deaf_process.send("never")
    again, cancelled = (deploys.TASKS["thread", "retry"].send("never") for _ in range(2))
    stage.until(lambda: len(stage.effects("start")) == 3, within=20, what="three run", tree=tree)
    (worker,) = stage.workers(tree)
    os.kill(worker["pid"], signal.SIGTERM)  # only the supervisor decides
    tree.process.terminate()
    stage.until(lambda: "stop_asked times=1" in tree.output(), within=10, what="it drains", tree=tree)
    cancelled.cancel()
    began = time.monotonic()
    assert tree.stop() == 0, tree.output()
    assert time.monotonic() - began < 10 * SLACK
    assert stage.task(deaf.id)["error"]["code"] == "WORKER_STOPPED"
    assert stage.task(again.id)["state"] == "PENDING"
    assert stage.task(cancelled.id)["state"] == "CANCELLED"
