"""Code that lives and says nothing, in a real tree: recovered in time, late words refused, and left alone without a limit."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.stories.stage import FAST, SLACK, Stage, program_of

IN_TIME_S = 2.0 + 1.0
"""The stall_timeout and one check interval."""


@pytest.fixture
def silences(stage: Stage) -> Iterator[ModuleType]:
    """The stories' program as a sender imports it."""
    with program_of(stage, "silences") as program:
        yield program


@pytest.mark.parametrize(
    "name", ["silent_on_the_loop", "silent_and_blocking", "silent_in_a_thread", "silent_in_a_process"]
)
def test_silent_code_is_recovered_in_time_and_changes_nothing_afterwards(
    stage: Stage, silences: ModuleType, name: str
) -> None:  # G1, G2
    tree = stage.ready_tree(recovery=FAST, program="silences", worker={"process_concurrency": 1})
    handle = getattr(silences, name).send()
    stage.until(stage.state_is(handle.id, "FAILED"), within=60, what=f"{name} is recovered", tree=tree)
    row = stage.task(handle.id)
    took = (row["failed_at"] - row["progress_at"]).total_seconds()
    print(f"{name}: recovered {took:.2f} s after its last word")
    assert 2.0 <= took < IN_TIME_S * SLACK
    (recovery,) = stage.recoveries(handle.id)
    assert (recovery["noticed_by"], recovery["was"]) == ("progress", "RUNNING")
    assert recovery["cause"].startswith("no progress for 2s")
    data: dict[str, Any] = row["error"]["data"]
    assert row["error"]["code"] == "TASK_STALLED"
    assert (data["stage"], data["fraction"], data["message"]) == ("open", 0.25, "three of twelve")
    if name == "silent_in_a_process":
        pid = int((stage.gates / f"{name}-began").read_text())
        stage.until(lambda: not psutil.pid_exists(pid), within=10, what="its process is gone", tree=tree)
        assert f"in {name}" in tree.output(), "its stack is on the log"
    else:
        ended = stage.gates / f"{name}-ended"
        stage.until(ended.exists, within=30, what="the code has ended", tree=tree)
    assert tree.stop() == 0
    assert stage.task(handle.id) == row
    assert len(stage.attempts(handle.id)) == 1
    assert len(stage.recoveries()) == 1
    info = handle.info()
    assert (info.progress.stage, info.progress.fraction) == ("open", 0.25)
    assert info.progress_at == row["progress_at"]


@pytest.mark.long
def test_without_a_limit_silence_is_nobodys_business(stage: Stage, silences: ModuleType) -> None:  # G2
    tree = stage.ready_tree(recovery=FAST, program="silences", worker={"process_concurrency": 1})
    handle = silences.silent_without_a_limit.send()
    stage.until(stage.state_is(handle.id, "COMPLETED"), within=60, what="it ends by itself", tree=tree)
    assert stage.recoveries() == []
