"""An operator retries 50,000 tasks while workers run. The operator's process and the supervisors die, and each task is retried exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from everbeat.domain.bulk_actions import BulkState
from tests.stories.scenario import FAST, Scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(400)]


def store_expired(scenario: Scenario, count: int) -> None:
    """Store tasks that expired two hours ago. They were sent and ended by statements, because real sends would take longer than the story."""
    scenario.query(
        f"""
        with made as (
            insert into {{schema}}.tasks (id, name, queue, args, sent_at, enqueued_at)
            select gen_random_uuid(), 'swift', 'default', '{{{{"n": 1}}}}', now() - interval '3 hours', now() - interval '3 hours'
            from generate_series(1, {count}) returning 1
        )
        select count(*) from made
        """
    )
    scenario.query(
        """
        with ended as (
            update {schema}.tasks set state = 'EXPIRED', expired_at = now() - interval '2 hours', error = '{{"code": "TASK_EXPIRED"}}'
            where name = 'swift' and sent_at < now() - interval '1 hour' returning 1
        )
        select count(*) from ended
        """
    )


def kill_caller_after_request(scenario: Scenario) -> None:
    """Request the retry in a process that is killed at once, as an operator's terminal that is closed."""
    program = (
        "import os, signal, sample_tasks; action = sample_tasks.app.retry_all(name='swift', state='EXPIRED', by='ann');"
        " print(action.id, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = scenario.environment(recovery={}, worker={})
    killed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()


def carrier_pid(scenario: Scenario, action: dict[str, Any]) -> int | None:
    found = scenario.query(
        "select pid from {schema}.supervisors where id = %s and ended_at is null", action["carried_out_by"]
    )
    return found[0]["pid"] if found else None


def the_action(scenario: Scenario) -> dict[str, Any]:
    (action,) = scenario.query("select * from {schema}.bulk_actions")
    return action


def has_retried(scenario: Scenario, tasks: int) -> bool:
    return bool(the_action(scenario)["done"] >= tasks)


@pytest.mark.parametrize("many", [20_000, pytest.param(50_000, marks=pytest.mark.long)])
def test_a_retry_of_many_tasks_survives_its_caller_and_its_supervisor(
    scenario: Scenario, sample_tasks: ModuleType, many: int
) -> None:  # K10
    store_expired(scenario, many)
    expected = sample_tasks.app.retry_all(name="swift", state="EXPIRED", dry_run=True).info
    assert (expected.done, expected.skipped, expected.is_exact) == (many, 0, True)
    options = {"recovery": {**FAST, "retention_interval_ms": 3_600_000}, "worker": {"async_concurrency": 100}}
    trees = [scenario.ready_tree(**options), scenario.ready_tree(**options)]
    began = time.monotonic()
    kill_caller_after_request(scenario)

    killed = 0
    for low in (many // 10, many * 2 // 5):
        scenario.until(partial(has_retried, scenario, low), within=120, what=f"{low} retried tasks")
        action = the_action(scenario)
        assert action["ended_at"] is None
        pid = carrier_pid(scenario, action)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        trees.append(scenario.ready_tree(**options))
    assert killed >= 1, "a supervisor that carried out the action was killed"
    scenario.until(
        lambda: the_action(scenario)["ended_at"] is not None, within=120, what="the end of the action"
    )
    took_s = time.monotonic() - began
    scenario.until(lambda: scenario.states() == {"COMPLETED": many}, within=200, what="completed tasks")
    print(f"{many} retries in {took_s:.1f} s, {killed} supervisors killed")

    action = the_action(scenario)
    assert action["state"] == BulkState.COMPLETED
    assert (action["matched"], action["done"], action["skipped"]) == (many, expected.done, 0)
    # Each task was retried once: the table of transitions has one step from EXPIRED to PENDING for each.
    retried = scenario.query(
        "select count(*) as transitions, count(distinct task_id) as tasks from {schema}.audit where old = 'EXPIRED' and new = 'PENDING'"
    )
    assert retried == [{"transitions": many, "tasks": many}]
    noted = scenario.query("select actor, action, affected, outcome from {schema}.audit_log order by id")
    assert noted == [
        {"actor": "ann", "action": "retry_all", "affected": None, "outcome": "requested"},
        {"actor": "ann", "action": "retry_all", "affected": many, "outcome": "completed"},
    ]


def test_an_action_waits_for_the_first_tree_and_starts_within_seconds(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    store_expired(scenario, 100)
    action = sample_tasks.app.retry_all(name="swift")
    assert action.info.state is BulkState.PENDING
    scenario.ready_tree(recovery=FAST)
    info = action.outcome(timeout=20)
    assert info.done == 100
    again = sample_tasks.app.cancel_all(name="swift", state="PENDING").outcome(timeout=20)
    assert again.started_at is not None
    assert (
        again.started_at - again.requested_at
    ).total_seconds() < 10.0  # supervisors look every four seconds
