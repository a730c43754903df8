"""Trees that were started in odd ways: standard streams closed, signals blocked or ignored by whoever started them."""

from __future__ import annotations

import signal
import sys
from types import ModuleType

import pytest

from tests.stories.stage import SLACK, Stage

pytestmark = pytest.mark.story


def started_by(program: str) -> tuple[str, ...]:
    """A command that runs a few lines of Python and then becomes what follows."""
    return (sys.executable, "-c", f"import os, signal, sys\n{program}\nos.execvp(sys.argv[1], sys.argv[1:])")


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param((0,), marks=pytest.mark.long),
        pytest.param((1, 2), marks=pytest.mark.long),
        pytest.param((0, 1, 2)),
    ],
    ids=str,
)
def test_a_tree_with_standard_streams_closed_works(
    stage: Stage, deeds: ModuleType, closed: tuple[int, ...]
) -> None:
    prefix = started_by(f"for number in {closed}: os.close(number)")
    tree = stage.ready_tree(prefix=prefix, worker={"processes": 2})
    assert deeds.quick.send(7).result(timeout=20) == 7
    stage.open_gate("open")
    assert deeds.wait_in_process_on_crash.send("open").result(timeout=20) == "done"
    assert tree.stop() == 0


@pytest.mark.parametrize(
    ("how", "number"),
    [
        pytest.param("signal.pthread_sigmask(signal.SIG_BLOCK, [15])", signal.SIGTERM, id="blocked SIGTERM"),
        pytest.param(
            "signal.pthread_sigmask(signal.SIG_BLOCK, [2])",
            signal.SIGINT,
            id="blocked SIGINT",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "signal.signal(15, signal.SIG_IGN)", signal.SIGTERM, id="ignored SIGTERM", marks=pytest.mark.long
        ),
        pytest.param(
            "signal.signal(2, signal.SIG_IGN)", signal.SIGINT, id="ignored SIGINT", marks=pytest.mark.long
        ),
    ],
)
def test_a_tree_whose_parent_blocked_or_ignored_a_signal_obeys_it(
    stage: Stage, deeds: ModuleType, how: str, number: signal.Signals
) -> None:
    tree = stage.ready_tree(prefix=started_by(how))
    stage.open_gate("open")
    assert deeds.wait_in_process_on_crash.send("open").result(timeout=20) == "done"
    tree.process.send_signal(number)
    assert tree.process.wait(timeout=20) == 0


@pytest.mark.long
def test_a_task_in_a_process_is_cancelled_where_the_parent_blocked_every_signal(
    stage: Stage, deeds: ModuleType
) -> None:
    stage.ready_tree(prefix=started_by("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))"))
    task = deeds.wait_in_process_on_crash.send("never")
    stage.until(stage.started(task.id), within=20, what="it runs")
    task.cancel()
    stage.until(stage.state_is(task.id, "CANCELLED"), within=3 * SLACK, what="it is cancelled")
    assert stage.task(task.id)["error"]["code"] == "TASK_CANCELLED"


def test_a_dead_worker_is_explained_where_the_parent_ignored_the_deaths_of_children(
    stage: Stage, deeds: ModuleType
) -> None:
    tree = stage.ready_tree(prefix=started_by("signal.signal(signal.SIGCHLD, signal.SIG_IGN)"))
    task = deeds.wait_for_on_crash.send("gate")
    stage.until(stage.started(task.id), within=20, what="it runs")
    for process in tree.processes()[1:]:
        process.kill()
    stage.until(lambda: stage.recoveries(task.id), within=1 * SLACK, what="it is recovered")
    (recovery,) = stage.recoveries(task.id)
    assert "SIGKILL" in recovery["cause"]
    stage.open_gate("gate")
    assert task.result(timeout=20) == "done"
