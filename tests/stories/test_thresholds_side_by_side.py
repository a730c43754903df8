"""Trees whose versions have different recovery settings judge each other, as in a rolling deploy."""

from __future__ import annotations

import time
from contextlib import closing
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from everbeat import App, RecoveryConfig
from tests.stories.scenario import BY_AGE, FAST, SLACK, Scenario

pytestmark = pytest.mark.story

SLOW: dict[str, Any] = {
    "claimer_heartbeat_interval_ms": 5_000,
    "runner_heartbeat_interval_ms": 5_000,
    "claimed_stale_threshold_ms": 10_000,
    "running_stale_threshold_ms": 10_000,
    "check_interval_ms": 1_000,
    **BY_AGE,
}


def check_reports(scenario: Scenario, task_id: UUID) -> None:
    """Check the reports of a program of the new version about a live tree of the old version."""
    oldest = "select max(statement_timestamp() - last_beat_at) > interval '3 s' as is_late from {schema}.supervisors"
    scenario.until(
        lambda: scenario.query(oldest)[0]["is_late"], within=20, what="the old tree is silent for 3 s"
    )
    with closing(App(scenario.url, schema=scenario.schema, recovery=RecoveryConfig(**FAST))) as app:
        assert {worker.is_stale for worker in app.list_active_workers()} == {False}
        assert {supervisor.is_stale for supervisor in app.list_supervisors(ended=False)} == {False}
        assert [reason.code for reason in app.explain(task_id).reasons] == ["RUNNING"]
        assert app.sweep_stale_workers(dry_run=True).tasks == ()
        assert len(app.sweep_stale_workers(dry_run=True, sweep_threshold="2s").tasks) == 2


@pytest.mark.long
def test_a_tree_with_rare_beats_is_judged_by_its_own_thresholds_beside_trees_with_short_ones(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # D1 J1
    scenario.hold_processes()
    old = scenario.ready_tree(recovery=SLOW, worker={"queues": ["old"]})
    tasks = (sample_tasks.wait_for_on_crash, sample_tasks.wait_in_process_on_crash)
    runs, waits = (task.with_options(queue="old").send("later") for task in tasks)
    scenario.until(scenario.started(runs.id), within=20, what="it runs", tree=old)
    scenario.until(scenario.state_is(waits.id, "CLAIMED"), within=20, what="another waits", tree=old)
    scenario.ready_tree(recovery=FAST | BY_AGE, worker={"queues": ["new"]})
    time.sleep(9)  # almost two intervals of the old tree, and four thresholds of the new one
    assert scenario.recoveries() == []
    check_reports(scenario, runs.id)
    killed = old.kill()
    scenario.release_processes()
    scenario.ready_tree(worker={"queues": ["old"]}, recovery=FAST | BY_AGE)
    scenario.until(lambda: len(scenario.recoveries()) == 2, within=16 * SLACK, what="both are recovered")
    assert (
        time.monotonic() - killed > 10 - 5
    )  # its threshold from its last beat, which is at most one interval old
    scenario.open_gate("later")
    assert [each.result(timeout=20) for each in (runs, waits)] == ["done", "done"]
