"""Trees whose versions have different recovery settings judge each other, as they do in a rolling deploy."""

from __future__ import annotations

import time
from contextlib import closing
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from everbeat import App, RecoveryConfig
from tests.stories.stage import BY_AGE, FAST, SLACK, Stage

pytestmark = pytest.mark.story

SLOW: dict[str, Any] = {
    "claimer_heartbeat_interval_ms": 5_000,
    "runner_heartbeat_interval_ms": 5_000,
    "claimed_stale_threshold_ms": 10_000,
    "running_stale_threshold_ms": 10_000,
    "check_interval_ms": 1_000,
    **BY_AGE,
}


def look_at(stage: Stage, task_id: UUID) -> None:
    """What a program of the new version reports of a tree of the old one, while that lives."""
    oldest = "select max(statement_timestamp() - last_beat_at) > interval '3 s' as is_late from {schema}.supervisors"
    stage.until(lambda: stage.query(oldest)[0]["is_late"], within=20, what="the old tree is silent for 3 s")
    with closing(App(stage.url, schema=stage.schema, recovery=RecoveryConfig(**FAST))) as app:
        assert {worker.is_stale for worker in app.list_active_workers()} == {False}
        assert {supervisor.is_stale for supervisor in app.list_supervisors(ended=False)} == {False}
        assert [reason.code for reason in app.explain(task_id).reasons] == ["RUNNING"]
        assert app.sweep_stale_workers(dry_run=True).tasks == ()
        assert len(app.sweep_stale_workers(dry_run=True, sweep_threshold="2s").tasks) == 2


def test_a_tree_that_beats_rarely_lives_beside_trees_with_short_thresholds_and_is_recovered_by_its_own(
    stage: Stage, deeds: ModuleType
) -> None:  # D1 J1
    old = stage.ready_tree(recovery=SLOW, worker={"async_concurrency": 1, "queues": ["old"]})
    runs, waits = (deeds.wait_for_on_crash.with_options(queue="old").send("later") for _ in range(2))
    stage.until(stage.started(runs.id), within=20, what="it runs", tree=old)
    stage.until(stage.state_is(waits.id, "CLAIMED"), within=20, what="the next one waits", tree=old)
    stage.ready_tree(recovery=FAST | BY_AGE, worker={"queues": ["new"]})
    time.sleep(9)  # almost two intervals of the old tree, and four thresholds of the new one
    assert stage.recoveries() == []
    look_at(stage, runs.id)
    killed = old.kill()
    stage.ready_tree(worker={"queues": ["old"]}, recovery=FAST | BY_AGE)
    stage.until(lambda: len(stage.recoveries()) == 2, within=16 * SLACK, what="both are recovered")
    assert (
        time.monotonic() - killed > 10 - 5
    )  # its threshold from its last beat, which is at most an interval old
    stage.open_gate("later")
    assert [each.result(timeout=20) for each in (runs, waits)] == ["done", "done"]
