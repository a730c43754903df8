"""User code forks, and the forked process outlives the worker. It must not keep the worker's sessions, locks or channels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any
from uuid import UUID

import psutil
import pytest

from tests.stories.scenario import SLACK, Scenario, Tree, program_of

pytestmark = pytest.mark.story

HOWS = ("fork", "multiprocessing", "subprocess")
TASK_NAMES = (
    "fork_on_the_loop",
    "fork_in_a_thread",
    "fork_in_a_process",
    "fork_on_the_loop_of_a_process",
)


@pytest.fixture
def forking(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "forking") as program:
        yield program


@pytest.fixture
def left(scenario: Scenario) -> Iterator[LeftProcesses]:
    found = LeftProcesses(scenario)
    yield found
    for pid in found.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class LeftProcesses:
    """The processes that tasks left behind."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    @property
    def pids(self) -> dict[int, str]:
        return {line["left"]: f"{line['name']} by {line['how']}" for line in self._scenario.effects("left")}

    def sent(self, forking: ModuleType, sample_tasks: Sequence[str] = TASK_NAMES) -> list[UUID]:
        """Send one task of every kind; each leaves a process behind and continues."""
        ids = [getattr(forking, task).send(how).id for task in sample_tasks for how in HOWS]
        self._scenario.until(lambda: len(self.pids) == len(ids), within=30, what="every task has forked")
        return ids

    def kill_all_but(self, tree: Tree) -> float:
        """Kill every process that everbeat started; processes left by tasks survive."""
        doomed = [process for process in tree.processes() if process.pid not in self.pids]
        at = time.monotonic()
        for process in doomed:
            process.kill()
        tree.process.wait(timeout=30)
        dead = [what for pid, what in self.pids.items() if not psutil.pid_exists(pid)]
        assert not dead, "the story needs them alive"
        return at


def sessions(scenario: Scenario, tree_name: str) -> list[dict[str, Any]]:
    return scenario.connection.execute(
        "select application_name, state from pg_stat_activity where starts_with(application_name, %s)",
        [tree_name],
    ).fetchall()  # type: ignore[return-value]


def name_of(scenario: Scenario, tree: Tree) -> str:
    (row,) = scenario.query(
        "select session_name from {schema}.supervisors where pid = %s and ended_at is null", tree.pid
    )
    return str(row["session_name"])


def start_in_process_worker(scenario: Scenario) -> Tree:
    """Start the program itself, which contains an in-process worker."""
    log = scenario.folder / f"guest-{len(scenario.trees)}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "import forking; forking.app.run_worker()"],
            env=scenario.environment(recovery={}, worker={"process_concurrency": 6}),
            cwd=scenario.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    guest = Tree(process, log)
    scenario.trees.append(guest)
    scenario.until(lambda: scenario.workers(guest), within=30, what="the guest works", tree=guest)
    return guest


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tree", pytest.param("guest", marks=pytest.mark.long)])
def test_a_killed_tree_is_noticed_in_three_seconds_although_forks_of_its_tasks_live(
    scenario: Scenario, forking: ModuleType, left: LeftProcesses, kind: str
) -> None:  # J13
    doomed = (
        start_in_process_worker(scenario)
        if kind == "guest"
        else scenario.ready_tree(program="forking", worker={"process_concurrency": 6})
    )
    tree_name = name_of(scenario, doomed)
    # A new process would not find the app in the main module of a program with an in-process worker.
    ids = left.sent(forking, TASK_NAMES if kind == "tree" else TASK_NAMES[:2])
    scenario.ready_tree(program="forking", worker={"process_concurrency": 6})
    time.sleep(10.5)  # an observer trusts sessions only after it and the server have been up for 10 s
    killed_at = left.kill_all_but(doomed)
    scenario.until(lambda: not sessions(scenario, tree_name), within=1, what="no session of the tree is left")
    scenario.until(
        lambda: len(scenario.recoveries()) >= len(ids), within=3 * SLACK, what="everything is recovered"
    )
    print(f"recovered {time.monotonic() - killed_at:.2f} s after the kill")
    assert {row["noticed_by"] for row in scenario.recoveries()} == {"session"}


@pytest.mark.long
def test_a_replacement_recovers_a_killed_tree_although_forks_of_its_tasks_live(
    scenario: Scenario, forking: ModuleType, left: LeftProcesses
) -> None:  # J13
    slot = ("--slot", "web-0")
    doomed = scenario.ready_tree(program="forking", worker={"process_concurrency": 6}, options=slot)
    ids = left.sent(forking)
    left.kill_all_but(doomed)
    replacement = scenario.ready_tree(program="forking", worker={"process_concurrency": 6}, options=slot)
    scenario.until(
        lambda: len(scenario.recoveries()) >= len(ids), within=3 * SLACK, what="everything is recovered"
    )
    assert {row["noticed_by"] for row in scenario.recoveries()} == {"startup"}
    scenario.until(
        lambda: scenario.query(
            "select 1 from {schema}.supervisors where pid = %s and slot = 'web-0' and ended_at is null",
            replacement.pid,
        ),
        within=3 * SLACK,
        what="the replacement holds the slot",
    )


@pytest.mark.parametrize("kind", ["tree", "guest"])
def test_a_forked_child_that_does_not_end_by_itself_never_runs_the_workers_tasks(
    scenario: Scenario, forking: ModuleType, kind: str
) -> None:  # J13
    tree = start_in_process_worker(scenario) if kind == "guest" else scenario.ready_tree(program="forking")
    sample_tasks = [forking.child_on_the_loop, forking.child_in_a_thread]
    if kind == "tree":
        sample_tasks.append(forking.child_in_a_process)
    codes = {"returns": 0, "exits": 3, "raises": 1, "asks": 1}
    sent = [(task.send(how), f"{how}: {code}") for task in sample_tasks for how, code in codes.items()]
    # With another code than 70, it would have run other tasks in the event loop of the worker.
    sent.append((forking.child_on_the_loop.send("awaits"), "awaits: 70"))
    assert [handle.result(timeout=30) for handle, _ in sent] == [expected for _, expected in sent]
    assert not scenario.effects("the child went on")
    assert {row["attempt"] for row in scenario.query("select attempt from {schema}.tasks")} == {1}
    assert forking.terminate_a_child.send().result(timeout=10) == -signal.SIGTERM, "a child obeys signals"
    assert forking.child_in_a_thread.send("returns").result(timeout=10) == "returns: 0", (
        "the worker continues"
    )
    assert len(scenario.workers(tree)) == 1
    assert not scenario.recoveries()
