"""Trees started under unusual conditions: closed standard streams, and signals that the parent blocked or ignored."""

from __future__ import annotations

import signal
import sys
from types import ModuleType

import pytest

from tests.stories.scenario import SLACK, Scenario

pytestmark = pytest.mark.story


def started_by(program: str) -> tuple[str, ...]:
    """Return a command that runs a few lines of Python and then executes its arguments."""
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
def test_a_tree_with_closed_standard_streams_works(
    scenario: Scenario, sample_tasks: ModuleType, closed: tuple[int, ...]
) -> None:
    prefix = started_by(f"for number in {closed}: os.close(number)")
    tree = scenario.ready_tree(prefix=prefix, worker={"processes": 2})
    assert sample_tasks.quick.send(7).result(timeout=20) == 7
    scenario.open_gate("open")
    assert sample_tasks.wait_in_process_on_crash.send("open").result(timeout=20) == "done"
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
    scenario: Scenario, sample_tasks: ModuleType, how: str, number: signal.Signals
) -> None:
    tree = scenario.ready_tree(prefix=started_by(how))
    scenario.open_gate("open")
    assert sample_tasks.wait_in_process_on_crash.send("open").result(timeout=20) == "done"
    tree.process.send_signal(number)
    assert tree.process.wait(timeout=20) == 0


@pytest.mark.long
def test_a_process_task_can_be_cancelled_although_the_parent_blocked_every_signal(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    scenario.ready_tree(prefix=started_by("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))"))
    task = sample_tasks.wait_in_process_on_crash.send("never")
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    task.cancel()
    scenario.until(scenario.state_is(task.id, "CANCELLED"), within=3 * SLACK, what="it is cancelled")
    assert scenario.task(task.id)["error"]["code"] == "TASK_CANCELLED"


def test_the_cause_of_a_worker_death_is_known_although_the_parent_ignored_sigchld(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = scenario.ready_tree(prefix=started_by("signal.signal(signal.SIGCHLD, signal.SIG_IGN)"))
    task = sample_tasks.wait_for_on_crash.send("gate")
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    for process in tree.processes()[1:]:
        process.kill()
    scenario.until(lambda: scenario.recoveries(task.id), within=1 * SLACK, what="it is recovered")
    (recovery,) = scenario.recoveries(task.id)
    assert "SIGKILL" in recovery["cause"]
    scenario.open_gate("gate")
    assert task.result(timeout=20) == "done"
