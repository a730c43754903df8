"""Running code when its worker is stopped: no second run that the policy forbids."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

from tests.stories.scenario import SLACK, Scenario

pytestmark = pytest.mark.story

KINDS = ("async", "stubborn", "thread", "process")
AGAIN = ("retry", "listed", "stop_retry")
NEVER = ("fail", "stop_fail")


def test_a_stop_causes_no_second_run_that_the_policy_forbids(
    scenario: Scenario, deploys: ModuleType
) -> None:  # J1
    tree = scenario.ready_tree(
        program="deploys",
        worker={"grace": 1, "async_concurrency": 10, "thread_concurrency": 5, "process_concurrency": 5},
    )
    sent = {key: task.send("never") for key, task in deploys.TASKS.items()}
    scenario.until(lambda: len(scenario.effects("start")) == len(sent), within=40, what="all run", tree=tree)
    assert tree.stop() == 0, tree.output()
    for (kind, policy), handle in sent.items():
        row, place = scenario.task(handle.id), f"{kind} {policy}"
        assert (row["retry_count"], row["crash_count"], row["loss_count"]) == (0, 0, 0), place
        assert row["state"] == ("PENDING" if policy in AGAIN else "FAILED"), place
        if policy in NEVER:
            assert row["error"]["code"] == "WORKER_STOPPED", place
        assert [each["outcome"] for each in scenario.attempts(handle.id)] == [
            "RELEASED" if policy in AGAIN else "FAILED"
        ], place
    scenario.open_gate("never")
    scenario.ready_tree(program="deploys")
    for (_, policy), handle in sent.items():
        if policy in AGAIN:
            handle.result(timeout=40)
        assert len(scenario.effects("start", handle.id)) == (2 if policy in AGAIN else 1)


def test_a_second_run_begins_after_the_process_of_the_first_has_ended(
    scenario: Scenario, deploys: ModuleType
) -> None:  # J1
    tree = scenario.ready_tree(program="deploys", worker={"grace": 1})
    handle = deploys.TASKS["thread", "retry"].send("later")
    scenario.until(scenario.started(handle.id), within=20, what="it runs", tree=tree)
    scenario.ready_tree(program="deploys")
    (first,) = scenario.effects("start", handle.id)
    tree.process.terminate()
    scenario.until(scenario.started(handle.id, times=2), within=20, what="the second run", tree=tree)
    assert not Path(f"/proc/{first['pid']}").exists()
    scenario.open_gate("later")
    handle.result(timeout=20)
    assert scenario.effects("end", handle.id)[0]["pid"] != first["pid"]


def test_a_stop_follows_the_policy_even_if_an_exit_proves_no_death(
    scenario: Scenario, deploys: ModuleType
) -> None:  # J1
    tree = scenario.ready_tree(
        program="deploys", worker={"grace": 1, "thread_concurrency": 5}, recovery={"detect_child_exit": False}
    )
    sent = {policy: deploys.TASKS["thread", policy].send("never") for policy in (*AGAIN, *NEVER)}
    scenario.until(lambda: len(scenario.effects("start")) == len(sent), within=40, what="all run", tree=tree)
    assert tree.stop() == 0, tree.output()
    for policy, handle in sent.items():
        assert scenario.task(handle.id)["state"] == ("PENDING" if policy in AGAIN else "FAILED"), policy


@pytest.mark.long
def test_a_stopped_worker_is_buried_after_its_code_was_settled(
    scenario: Scenario, deploys: ModuleType
) -> None:  # J1
    tree = scenario.ready_tree(program="deploys", worker={"grace": 1})
    handle = deploys.TASKS["thread", "stop_fail"].send("never")
    scenario.until(scenario.started(handle.id), within=20, what="it runs", tree=tree)
    # The statement that records it would wait for the lock, and the outcome for this statement.
    scenario.until(lambda: scenario.workers(tree)[0]["listens"], within=20, what="it listens", tree=tree)
    with psycopg.connect(scenario.url) as other:
        other.execute(f'select from "{scenario.schema}".workers for update')
        tree.process.terminate()
        scenario.until(
            scenario.state_is(handle.id, "FAILED"), within=20, what="settled beside the locked row"
        )
    assert tree.process.wait(60) == 0
    assert scenario.task(handle.id)["error"]["code"] == "WORKER_STOPPED"


@pytest.mark.long
def test_a_stop_frees_serial_lines_fails_workflow_nodes_and_keeps_the_turn_of_released_tasks(
    scenario: Scenario, deploys: ModuleType
) -> None:  # J1
    tree = scenario.ready_tree(program="deploys", worker={"grace": 1})
    lines = {
        policy: [deploys.TASKS["thread", policy].with_options(serial=policy).send("later") for _ in range(2)]
        for policy in ("fail", "retry")
    }
    for policy in lines:
        workflow = deploys.app.workflow(policy)
        first = workflow.add(deploys.TASKS["thread", policy], "later").named("first")
        workflow.add(deploys.TASKS["async", policy], "later").after(first).named("second")
        workflow.start()
    scenario.until(lambda: len(scenario.effects("start")) == 4, within=20, what="four run", tree=tree)
    assert tree.stop() == 0, tree.output()
    scenario.open_gate("later")
    scenario.ready_tree(program="deploys")
    for policy, (one, two) in lines.items():
        two.result(timeout=20)
        begun = [
            line["task"] for line in scenario.effects("start") if line["task"] in (str(one.id), str(two.id))
        ]
        assert begun == [str(one.id)] * (1 if policy == "fail" else 2) + [str(two.id)], policy
    ended = {"fail": "FAILED", "retry": "COMPLETED"}
    scenario.until(
        lambda: (
            {
                row["name"]: row["state"]
                for row in scenario.query("select name, state from {schema}.workflows")
            }
            == ended
        ),
        within=20,
        what="both workflows have ended",
    )


def test_a_second_signal_kills_unresponsive_processes_and_a_cancel_overrides_the_stop(
    scenario: Scenario, deploys: ModuleType
) -> None:  # J1 B12
    tree = scenario.ready_tree(program="deploys", worker={"grace": 60})
    deaf = deploys.deaf_process.send("never")
    again, cancelled = (deploys.TASKS["thread", "retry"].send("never") for _ in range(2))
    scenario.until(lambda: len(scenario.effects("start")) == 3, within=20, what="three run", tree=tree)
    (worker,) = scenario.workers(tree)
    os.kill(worker["pid"], signal.SIGTERM)  # only the supervisor decides
    tree.process.terminate()
    scenario.until_logged(tree, "stop_asked times=1", within=10)
    cancelled.cancel()
    began = time.monotonic()
    assert tree.stop() == 0, tree.output()
    assert time.monotonic() - began < 10 * SLACK
    assert scenario.task(deaf.id)["error"]["code"] == "WORKER_STOPPED"
    assert scenario.task(again.id)["state"] == "PENDING"
    assert scenario.task(cancelled.id)["state"] == "CANCELLED"
