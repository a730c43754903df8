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

from tests.stories.stage import SLACK, Stage, Tree, program_of

pytestmark = pytest.mark.story

HOWS = ("fork", "multiprocessing", "subprocess")
DEEDS = (
    "fork_on_the_loop",
    "fork_in_a_thread",
    "fork_in_a_process",
    "fork_on_the_loop_of_a_process",
)


@pytest.fixture
def forking(stage: Stage) -> Iterator[ModuleType]:
    with program_of(stage, "forking") as program:
        yield program


@pytest.fixture
def left(stage: Stage) -> Iterator[Left]:
    found = Left(stage)
    yield found
    for pid in found.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Left:
    """The processes that tasks left behind."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    def pids(self) -> dict[int, str]:
        return {line["left"]: f"{line['name']} by {line['how']}" for line in self._stage.effects("left")}

    def sent(self, forking: ModuleType, deeds: Sequence[str] = DEEDS) -> list[UUID]:
        """Sends one task of every kind; each leaves a process behind and goes on."""
        ids = [getattr(forking, deed).send(how).id for deed in deeds for how in HOWS]
        self._stage.until(lambda: len(self.pids) == len(ids), within=30, what="every task has forked")
        return ids

    def kill_all_but(self, tree: Tree) -> float:
        """Kills every process that everbeat started; what tasks left behind lives on."""
        doomed = [process for process in tree.processes() if process.pid not in self.pids]
        at = time.monotonic()
        for process in doomed:
            process.kill()
        tree.process.wait(timeout=30)
        dead = [what for pid, what in self.pids.items() if not psutil.pid_exists(pid)]
        assert not dead, "the story needs them alive"
        return at


def sessions(stage: Stage, tree_name: str) -> list[dict[str, Any]]:
    return stage.connection.execute(
        "select application_name, state from pg_stat_activity where starts_with(application_name, %s)",
        [tree_name],
    ).fetchall()  # type: ignore[return-value]


def name_of(stage: Stage, tree: Tree) -> str:
    (row,) = stage.query(
        "select session_name from {schema}.supervisors where pid = %s and ended_at is null", tree.pid
    )
    return str(row["session_name"])


def start_guest(stage: Stage) -> Tree:
    """The program itself, in which a worker is a guest."""
    log = stage.folder / f"guest-{len(stage.trees)}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "forking"], env=stage.environment(recovery={}, worker={"process_concurrency": 6}),
            cwd=stage.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    guest = Tree(process, log)
    stage.trees.append(guest)
    stage.until(lambda: stage.workers(guest), within=30, what="the guest works", tree=guest)
    return guest


@pytest.mark.parametrize("kind", ["tree", pytest.param("guest", marks=pytest.mark.long)])
def test_a_killed_tree_is_noticed_in_three_seconds_although_forks_of_its_tasks_live_on(
    stage: Stage, forking: ModuleType, left: Left, kind: str
) -> None:  # J13
    doomed = (
        start_guest(stage)
        if kind == "guest"
        else stage.ready_tree(program="forking", worker={"process_concurrency": 6})
    )
    tree_name = name_of(stage, doomed)
    # A new process would not find the app of a guest's main module.
    ids = left.sent(forking, DEEDS if kind == "tree" else DEEDS[:2])
    stage.ready_tree(program="forking", worker={"process_concurrency": 6})
    time.sleep(10.5)  # an observer trusts sessions only when itself and the server have been up for 10 s
    killed_at = left.kill_all_but(doomed)
    stage.until(lambda: not sessions(stage, tree_name), within=1, what="no session of the tree is left")
    stage.until(lambda: len(stage.recoveries()) >= len(ids), within=3 * SLACK, what="everything is recovered")
    print(f"recovered {time.monotonic() - killed_at:.2f} s after the kill")
    assert {row["noticed_by"] for row in stage.recoveries()} == {"session"}


def test_a_replacement_recovers_a_killed_tree_when_it_starts_although_forks_of_its_tasks_live_on(
    stage: Stage, forking: ModuleType, left: Left
) -> None:  # J13
    slot = ("--slot", "web-0")
    doomed = stage.ready_tree(program="forking", worker={"process_concurrency": 6}, options=slot)
    ids = left.sent(forking)
    left.kill_all_but(doomed)
    replacement = stage.ready_tree(program="forking", worker={"process_concurrency": 6}, options=slot)
    stage.until(lambda: len(stage.recoveries()) >= len(ids), within=3 * SLACK, what="everything is recovered")
    assert {row["noticed_by"] for row in stage.recoveries()} == {"startup"}
    stage.until(
        lambda: stage.query(
            "select 1 from {schema}.supervisors where pid = %s and slot = 'web-0' and ended_at is null",
            replacement.pid,
        ),
        within=3 * SLACK,
        what="the replacement holds the slot",
    )


@pytest.mark.parametrize("kind", ["tree", "guest"])
def test_a_forked_child_that_does_not_end_by_itself_does_none_of_the_workers_work(
    stage: Stage, forking: ModuleType, kind: str
) -> None:  # J13
    tree = start_guest(stage) if kind == "guest" else stage.ready_tree(program="forking")
    deeds = [forking.child_on_the_loop, forking.child_in_a_thread]
    if kind == "tree":
        deeds.append(forking.child_in_a_process)
    codes = {"returns": 0, "exits": 3, "raises": 1, "asks": 1}
    sent = [(deed.send(how), f"{how}: {code}") for deed in deeds for how, code in codes.items()]
    # Code 70: it would have run the other tasks on the loop of the worker.
    sent.append((forking.child_on_the_loop.send("awaits"), "awaits: 70"))
    assert [handle.result(timeout=30) for handle, _ in sent] == [expected for _, expected in sent]
    assert not stage.effects("the child went on")
    assert {row["attempt"] for row in stage.query("select attempt from {schema}.tasks")} == {1}
    assert forking.terminate_a_child.send().result(timeout=10) == -signal.SIGTERM, "a child obeys signals"
    assert forking.child_in_a_thread.send("returns").result(timeout=10) == "returns: 0", "the worker works on"
    assert len(stage.workers(tree)) == 1
    assert not stage.recoveries()
