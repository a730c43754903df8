"""Small troubles of the observers that recur faster than the threshold: they delay a judgement by age and do not prevent it."""

from __future__ import annotations

import time
from types import ModuleType

import pytest

from tests.stories.stage import FAST, SLACK, Stage

pytestmark = [pytest.mark.story, pytest.mark.timeout(120)]

THRESHOLD_S = 3.0
SETTINGS = {**FAST, "claimed_stale_threshold_ms": 3_000, "running_stale_threshold_ms": 3_000}
EVERY_S = 1.5


def test_lost_sessions_of_the_living_keep_no_silent_tree_unrecovered(
    stage: Stage, deeds: ModuleType
) -> None:  # E4
    frozen = stage.ready_tree(recovery=SETTINGS)
    tasks = [deeds.wait_for_on_crash.send("frozen") for _ in range(4)]
    stage.until(lambda: len(stage.effects("start")) == 4, within=30, what="all run in the first tree")
    names = [row["session_name"] for row in stage.query("select session_name from {schema}.supervisors")]
    living = [stage.ready_tree(recovery=SETTINGS) for _ in range(2)]
    frozen.freeze()
    frozen_at = time.monotonic()
    lost = 0
    while not stage.recoveries():
        assert time.monotonic() - frozen_at < 5 * THRESHOLD_S * SLACK, f"{lost} lost sessions"
        lost += len(
            stage.query(
                """select pg_terminate_backend(pid) from (
                       select distinct on (application_name) pid from pg_stat_activity
                       where application_name like '%% supervisor%%' and split_part(application_name, ' ', 1) <> all(%s)
                       order by application_name, random()
                   ) each""",
                names,
            )
        )
        time.sleep(EVERY_S)  # the next trouble, long before a threshold has passed
    print(f"recovered {time.monotonic() - frozen_at:.1f} s after the freeze, through {lost} lost sessions")
    assert lost >= 2, "both observers were in trouble"
    assert {row["noticed_by"] for row in stage.recoveries()} == {"age"}
    ended = stage.query("select pid from {schema}.supervisors where ended_at is not null")
    assert [row["pid"] for row in ended] in ([], [frozen.pid]), "no living tree"
    frozen.kill()
    stage.open_gate("frozen")
    for task in tasks:
        assert task.result(timeout=30) == "done"
    assert all(tree.process.poll() is None for tree in living)
