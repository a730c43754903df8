"""The schema gets one version ahead under load: programs of the version before work on, start anew, and take over when code is rolled back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.next_edition import CODE, NEXT, next_edition
from tests.stories.stage import SLACK, Stage, Tree

pytestmark = pytest.mark.story

OPEN = ("PENDING", "CLAIMED", "RUNNING")


class Sides:
    """Two versions of everbeat in processes of their own: this one, and the next where `ahead` is said."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._next = next_edition(stage.folder / "next")
        self._senders: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def _prefix(self, ahead: bool) -> tuple[str, ...]:
        programs = Path(__file__).parent / "programs"
        return ("env", f"PYTHONPATH={os.pathsep.join([str(self._next), str(programs)])}") if ahead else ()

    def start(self, *, ahead: bool = False) -> Tree:
        """Starts a tree with two worker processes, and does not wait for it."""
        worker = {"processes": 2, "poll_interval": "500ms"}
        return self.stage.start_tree(program="sides", prefix=self._prefix(ahead), worker=worker)

    def ready(self, *trees: Tree) -> None:
        """Waits until the workers of these trees claim."""
        for tree in trees:
            self.stage.until(
                lambda tree=tree: len(self.stage.workers(tree)) == 2, within=30, what="a tree", tree=tree
            )

    def run(self, *arguments: str, ahead: bool = False) -> str:
        """One command of `everbeat` on the schema; returns what it wrote."""
        command = [
            *self._prefix(ahead),
            sys.executable,
            "-m",
            "everbeat",
            *arguments,
            "--url",
            self.stage.url,
            "--schema",
            self.stage.schema,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ, cwd=self.stage.folder)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def send(self, *names: str, ahead: bool = False) -> None:
        """Starts a program that sends these tasks on and on."""
        log = self.stage.folder / f"sender-{len(self._senders)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._prefix(ahead), sys.executable, "-c", f"import sides; sides.send_on(*{names!r})"],
                env=self.stage.environment(recovery={}, worker={}), cwd=self.stage.folder, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._senders.append((" ".join(names), process, log))

    def end_senders(self) -> None:
        """They end in good order: no send of theirs has failed."""
        for names, process, log in self._senders:
            self.stage.open_gate(f"enough {names}")
            assert process.wait(timeout=30) == 0, log.read_text()[-3_000:]

    def sent(self) -> dict[UUID, str]:
        """What the senders say that they sent."""
        lines = [line.split() for _, _, log in self._senders for line in log.read_text().splitlines()]
        return {UUID(found): name for name, found in lines}

    def kill_senders(self) -> None:
        for _, process, _ in self._senders:
            process.kill()
            process.wait()

    def count(self, name: str, *states: str) -> int:
        text = "select count(*) from {schema}.tasks where name = %s and state = any(%s)"
        return int(self.stage.query(text, name, list(states))[0]["count"])

    def until_more(self, name: str, more: int = 10) -> None:
        """Waits until this many more of them are completed."""
        wanted = self.count(name, "COMPLETED") + more
        self.stage.until(
            lambda: self.count(name, "COMPLETED") >= wanted, within=10 * SLACK, what=f"{more} more {name!r}"
        )


@pytest.fixture
def sides(stage: Stage) -> Iterator[Sides]:
    found = Sides(stage)
    try:
        yield found
    finally:
        found.kill_senders()


def kill_a_worker_process(stage: Stage, tree: Tree) -> None:
    """SIGKILL for one worker process that runs a task; waits for the one that replaces it."""
    before = {row["id"]: row["pid"] for row in stage.workers(tree)}
    busy: list[str] = []

    def is_busy() -> bool:
        text = "select claimed_by_worker_id from {schema}.tasks where state = 'RUNNING' and claimed_by_worker_id = any(%s)"
        busy[:] = [row["claimed_by_worker_id"] for row in stage.query(text, list(before))]
        return bool(busy)

    stage.until(is_busy, within=10 * SLACK, what="a process that runs a task", tree=tree)
    os.kill(before[busy[0]], signal.SIGKILL)

    def is_replaced() -> bool:
        now = {row["id"] for row in stage.workers(tree)}
        return len(now) == len(before) and bool(now - set(before))

    stage.until(is_replaced, within=10 * SLACK, what="a process that replaces it", tree=tree)


def judge(stage: Stage, sides: Sides) -> None:
    """Nothing is lost, nothing ran again that must not, nothing failed because of a deploy."""
    rows = {row["id"]: row for row in stage.query("select id, name, state, error from {schema}.tasks")}
    starts: dict[str, int] = {}
    for line in stage.effects("start"):
        starts[line["task"]] = starts.get(line["task"], 0) + 1
    recovered: dict[Any, int] = {}
    for recovery in stage.recoveries():
        recovered[recovery["task_id"]] = recovered.get(recovery["task_id"], 0) + 1
    sent = sides.sent()
    assert set(sent) <= set(rows), "lost"
    for task_id, row in rows.items():
        began, lost = starts.get(str(task_id), 0), recovered.get(task_id, 0)
        if row["name"] == "once":
            assert began <= 1, f"{row} ran {began} times"
            assert row["state"] == "COMPLETED" or (row["state"], lost) == ("FAILED", 1), row
        else:
            assert row["state"] == "COMPLETED", row
            assert began <= 1 + lost, f"{row} ran {began} times and was recovered {lost} times"
    print(f"{len(rows)} tasks, {sum(recovered.values())} recoveries")


def refused(stage: Stage) -> int:
    """How often older code tried to lease what the next version hides from it."""
    return int(stage.query("select count(*) from {schema}.refusals")[0]["count"])


def test_programs_of_the_version_before_work_on_in_the_next_schema_and_take_over_again(  # J3
    stage: Stage, sides: Sides
) -> None:
    staying, leaving = sides.start(), sides.start()
    sides.send("carry", "once")
    sides.ready(staying, leaving)
    sides.until_more("carry")

    assert f"applied {NEXT}" in sides.run("migrate", ahead=True)
    arriving = sides.start()
    sides.send("newer", "carry", ahead=True)
    kill_a_worker_process(stage, staying)
    sides.ready(arriving)
    assert leaving.stop() == 0
    sides.until_more("carry", 30)
    stage.until(lambda: sides.count("newer", "PENDING") > 20, within=20, what="tasks of the new kind")
    assert f"which supports this everbeat ({CODE})" in sides.run("migrate")
    touched = stage.query("select id from {schema}.tasks where name = 'newer' and fence > 0")
    assert (touched, refused(stage)) == ([], 0), "older code has looked at what is hidden from it"

    ahead = sides.start(ahead=True)
    sides.until_more("newer")
    assert ahead.stop() == 0, "the code is rolled back"
    sides.end_senders()
    stage.until(
        lambda: sides.count("carry", *OPEN) == sides.count("once", *OPEN) == 0,
        within=10 * SLACK,
        what="older code completes everything but the new kind",
    )
    assert sides.count("newer", "PENDING") > 0
    assert refused(stage) == 0

    sides.start(ahead=True)
    stage.until(
        lambda: sides.count("newer", *OPEN) == 0, within=10 * SLACK, what="the next version does the rest"
    )
    judge(stage, sides)


@pytest.mark.long
def test_two_versions_are_deployed_forwards_and_backwards_for_a_minute(
    stage: Stage, sides: Sides
) -> None:  # J3
    tree = sides.start()
    sides.send("carry", "once")
    sides.ready(tree)
    sides.run("migrate", ahead=True)
    sides.send("newer", "carry", ahead=True)
    ends_at, is_ahead = time.monotonic() + 60, False
    while time.monotonic() < ends_at:
        is_ahead = not is_ahead
        leaving, tree = tree, sides.start(ahead=is_ahead)
        sides.ready(tree)
        kill_a_worker_process(stage, tree)
        assert leaving.stop() == 0
        sides.until_more("carry", 100)
    assert refused(stage) == 0
    sides.end_senders()
    sides.start(ahead=True)
    stage.until(
        lambda: sides.count("carry", *OPEN) == sides.count("once", *OPEN) == sides.count("newer", *OPEN) == 0,
        within=30 * SLACK,
        what="everything ends",
    )
    judge(stage, sides)
