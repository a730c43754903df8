"""Code that lives but reports no progress, in a real tree: recovered in time, its late results rejected, ignored without a limit."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.stories.scenario import FAST, SLACK, Scenario, program_of

IN_TIME_S = 2.0 + 1.0
"""The stall_timeout and one check interval."""


@pytest.fixture
def silences(scenario: Scenario) -> Iterator[ModuleType]:
    """Import the program of the stories as a sender does."""
    with program_of(scenario, "silences") as program:
        yield program


@pytest.mark.parametrize(
    "name",
    [
        "silent_and_blocking",
        pytest.param("silent_in_a_process", marks=pytest.mark.long),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("silent_on_the_loop", "silent_in_a_thread")
        ),
    ],
)
def test_stalled_code_is_recovered_in_time_and_changes_nothing_afterwards(
    scenario: Scenario, silences: ModuleType, name: str
) -> None:  # G1, G2
    tree = scenario.ready_tree(recovery=FAST, program="silences", worker={"process_concurrency": 1})
    handle = getattr(silences, name).send()
    scenario.until(scenario.state_is(handle.id, "FAILED"), within=60, what=f"{name} is recovered", tree=tree)
    row = scenario.task(handle.id)
    took = (row["failed_at"] - row["progress_at"]).total_seconds()
    print(f"{name}: recovered {took:.2f} s after its last word")
    assert 2.0 <= took < IN_TIME_S * SLACK
    (recovery,) = scenario.recoveries(handle.id)
    assert (recovery["noticed_by"], recovery["was"]) == ("progress", "RUNNING")
    assert recovery["cause"].startswith("no progress for 2s")
    data: dict[str, Any] = row["error"]["data"]
    assert row["error"]["code"] == "TASK_STALLED"
    assert (data["stage"], data["fraction"], data["message"]) == ("open", 0.25, "three of twelve")
    if name == "silent_in_a_process":
        pid = int((scenario.gates / f"{name}-began").read_text())
        scenario.until(lambda: not psutil.pid_exists(pid), within=10, what="its process is gone", tree=tree)
        assert f"in {name}" in tree.output(), "its stack is on the log"
    else:
        ended = scenario.gates / f"{name}-ended"
        scenario.until(ended.exists, within=30, what="the code has ended", tree=tree)
    assert tree.stop() == 0
    assert scenario.task(handle.id) == row
    assert len(scenario.attempts(handle.id)) == 1
    assert len(scenario.recoveries()) == 1
    info = handle.info()
    assert (info.progress.stage, info.progress.fraction) == ("open", 0.25)
    assert info.progress_at == row["progress_at"]


def test_a_deadlock_ends_at_the_stall_timeout_of_the_app_unless_the_task_switches_it_off(
    scenario: Scenario, silences: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:  # G2
    monkeypatch.setenv("STORY_STALL_TIMEOUT", "2s")
    tree = scenario.ready_tree(recovery=FAST, program="silences", worker={"process_concurrency": 1})
    # The sender's app has no limit, and both tasks have no options there: the worker stores its policy at the start.
    stuck, unwatched = silences.deadlocked.send(), silences.app.send_by_name("long_and_silent")
    scenario.until(scenario.state_is(stuck.id, "RUNNING"), within=30, what="the deadlock began", tree=tree)
    (stands,) = (each for each in silences.app.explain(stuck.id).reasons if each.code == "PROGRESS_STANDS")
    assert "no progress for 2s, its stall_timeout" in stands.text
    scenario.until(
        scenario.state_is(stuck.id, "FAILED"), within=30, what="the deadlock is given up", tree=tree
    )
    row = scenario.task(stuck.id)
    assert (row["error"]["code"], row["error"]["data"]["stall_timeout_s"]) == ("TASK_STALLED", 2.0)
    assert 2.0 <= (row["failed_at"] - row["started_at"]).total_seconds() < IN_TIME_S * SLACK
    scenario.until(
        scenario.state_is(unwatched.id, "COMPLETED"), within=30, what="it ends by itself", tree=tree
    )
    assert len(scenario.recoveries()) == 1


@pytest.mark.long
def test_code_without_a_stall_timeout_is_not_recovered(
    scenario: Scenario, silences: ModuleType
) -> None:  # G2
    tree = scenario.ready_tree(recovery=FAST, program="silences", worker={"process_concurrency": 1})
    handle = silences.silent_without_a_limit.send()
    scenario.until(scenario.state_is(handle.id, "COMPLETED"), within=60, what="it ends by itself", tree=tree)
    assert scenario.recoveries() == []
