"""Observers with short, repeated troubles: these delay a judgement by age and do not prevent it."""

from __future__ import annotations

import time
from types import ModuleType

import pytest

from tests.stories.scenario import FAST, SLACK, Scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(120)]

THRESHOLD_S = 3.0
SETTINGS = {**FAST, "claimed_stale_threshold_ms": 3_000, "running_stale_threshold_ms": 3_000}
EVERY_S = 1.5


@pytest.mark.long
def test_repeated_session_losses_of_observers_do_not_prevent_the_recovery_of_a_silent_tree(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # E4
    frozen = scenario.ready_tree(recovery=SETTINGS)
    tasks = [sample_tasks.wait_for_on_crash.send("frozen") for _ in range(4)]
    scenario.until(lambda: len(scenario.effects("start")) == 4, within=30, what="all run in the first tree")
    names = [row["session_name"] for row in scenario.query("select session_name from {schema}.supervisors")]
    living = [scenario.ready_tree(recovery=SETTINGS) for _ in range(2)]
    frozen.freeze()
    frozen_at = time.monotonic()
    lost = 0
    while not scenario.recoveries():
        assert time.monotonic() - frozen_at < 5 * THRESHOLD_S * SLACK, f"{lost} lost sessions"
        lost += len(
            scenario.query(
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
    assert {row["noticed_by"] for row in scenario.recoveries()} == {"age"}
    ended = scenario.query("select pid from {schema}.supervisors where ended_at is not null")
    assert [row["pid"] for row in ended] in ([], [frozen.pid]), "a live tree was ended"
    frozen.kill()
    scenario.open_gate("frozen")
    for task in tasks:
        assert task.result(timeout=30) == "done"
    assert all(tree.process.poll() is None for tree in living)
