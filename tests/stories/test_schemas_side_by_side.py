"""The schema is one version ahead under load: older programs continue, restart, and take over when the code is rolled back."""

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
from tests.stories.scenario import SLACK, Scenario, Tree

pytestmark = pytest.mark.story

OPEN = ("PENDING", "CLAIMED", "RUNNING")


class Sides:
    """Two versions of everbeat in separate processes: this one, and the next one with `ahead`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._next = next_edition(scenario.folder / "next")
        self._senders: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def _prefix(self, ahead: bool) -> tuple[str, ...]:
        programs = Path(__file__).parent / "programs"
        return ("env", f"PYTHONPATH={os.pathsep.join([str(self._next), str(programs)])}") if ahead else ()

    def start(self, *, ahead: bool = False) -> Tree:
        """Start a tree with two worker processes without waiting for it."""
        worker = {"processes": 2, "poll_interval": "500ms"}
        return self.scenario.start_tree(program="sides", prefix=self._prefix(ahead), worker=worker)

    def ready(self, *trees: Tree) -> None:
        """Wait until the workers of these trees claim."""
        for tree in trees:
            self.scenario.until(
                lambda tree=tree: len(self.scenario.workers(tree)) == 2, within=30, what="a tree", tree=tree
            )

    def run(self, *arguments: str, ahead: bool = False) -> str:
        """Run one command of `everbeat` on the schema; return its output."""
        command = [
            *self._prefix(ahead),
            sys.executable,
            "-m",
            "everbeat",
            *arguments,
            "--url",
            self.scenario.url,
            "--schema",
            self.scenario.schema,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ, cwd=self.scenario.folder)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def send(self, *names: str, ahead: bool = False) -> None:
        """Start a program that sends these tasks continuously."""
        log = self.scenario.folder / f"sender-{len(self._senders)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._prefix(ahead), sys.executable, "-c", f"import sides; sides.send_on(*{names!r})"],
                env=self.scenario.environment(recovery={}, worker={}), cwd=self.scenario.folder, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._senders.append((" ".join(names), process, log))

    def end_senders(self) -> None:
        """Stop the senders and check that no send failed."""
        for names, process, log in self._senders:
            self.scenario.open_gate(f"enough {names}")
            assert process.wait(timeout=30) == 0, log.read_text()[-3_000:]

    def sent(self) -> dict[UUID, str]:
        """Return the tasks that the senders report as sent."""
        lines = [line.split() for _, _, log in self._senders for line in log.read_text().splitlines()]
        return {UUID(found): name for name, found in lines}

    def kill_senders(self) -> None:
        for _, process, _ in self._senders:
            process.kill()
            process.wait()

    def count(self, name: str, *states: str) -> int:
        text = "select count(*) from {schema}.tasks where name = %s and state = any(%s)"
        return int(self.scenario.query(text, name, list(states))[0]["count"])

    def until_more(self, name: str, more: int = 10) -> None:
        """Wait until this many more tasks are completed."""
        wanted = self.count(name, "COMPLETED") + more
        self.scenario.until(
            lambda: self.count(name, "COMPLETED") >= wanted, within=10 * SLACK, what=f"{more} more {name!r}"
        )


@pytest.fixture
def sides(scenario: Scenario) -> Iterator[Sides]:
    found = Sides(scenario)
    try:
        yield found
    finally:
        found.kill_senders()


def kill_a_worker_process(scenario: Scenario, tree: Tree) -> None:
    """Kill one worker process that runs a task; wait for its replacement."""
    before = {row["id"]: row["pid"] for row in scenario.workers(tree)}
    busy: list[str] = []

    def is_busy() -> bool:
        text = "select claimed_by_worker_id from {schema}.tasks where state = 'RUNNING' and claimed_by_worker_id = any(%s)"
        busy[:] = [row["claimed_by_worker_id"] for row in scenario.query(text, list(before))]
        return bool(busy)

    scenario.until(is_busy, within=10 * SLACK, what="a process that runs a task", tree=tree)
    os.kill(before[busy[0]], signal.SIGKILL)

    def is_replaced() -> bool:
        now = {row["id"] for row in scenario.workers(tree)}
        return len(now) == len(before) and bool(now - set(before))

    scenario.until(is_replaced, within=10 * SLACK, what="a process that replaces it", tree=tree)


def judge(scenario: Scenario, sides: Sides) -> None:
    """Check that no task is lost, ran again against its policy, or failed because of a deploy."""
    rows = {row["id"]: row for row in scenario.query("select id, name, state, error from {schema}.tasks")}
    starts: dict[str, int] = {}
    for line in scenario.effects("start"):
        starts[line["task"]] = starts.get(line["task"], 0) + 1
    recovered: dict[Any, int] = {}
    for recovery in scenario.recoveries():
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


def refused(scenario: Scenario) -> int:
    """Return how often older code tried to lease tasks that the next version hides from it."""
    return int(scenario.query("select count(*) from {schema}.refusals")[0]["count"])


@pytest.mark.long
def test_programs_of_the_previous_version_work_in_the_next_schema_and_after_a_rollback(  # J3
    scenario: Scenario, sides: Sides
) -> None:
    staying, leaving = sides.start(), sides.start()
    sides.send("carry", "once")
    sides.ready(staying, leaving)
    sides.until_more("carry")

    assert f"applied {NEXT}" in sides.run("migrate", ahead=True)
    arriving = sides.start()
    sides.send("newer", "carry", ahead=True)
    kill_a_worker_process(scenario, staying)
    sides.ready(arriving)
    assert leaving.stop() == 0
    sides.until_more("carry", 30)
    scenario.until(lambda: sides.count("newer", "PENDING") > 20, within=20, what="tasks of the new kind")
    assert f"which supports this everbeat ({CODE})" in sides.run("migrate")
    touched = scenario.query("select id from {schema}.tasks where name = 'newer' and fence > 0")
    assert (touched, refused(scenario)) == ([], 0), "older code has read tasks that are hidden from it"

    ahead = sides.start(ahead=True)
    sides.until_more("newer")
    assert ahead.stop() == 0, "the code is rolled back"
    sides.end_senders()
    scenario.until(
        lambda: sides.count("carry", *OPEN) == sides.count("once", *OPEN) == 0,
        within=10 * SLACK,
        what="older code completes everything but the new kind",
    )
    assert sides.count("newer", "PENDING") > 0
    assert refused(scenario) == 0

    sides.start(ahead=True)
    scenario.until(
        lambda: sides.count("newer", *OPEN) == 0, within=10 * SLACK, what="the next version does the rest"
    )
    judge(scenario, sides)


@pytest.mark.long
def test_two_versions_are_deployed_forwards_and_backwards_for_a_minute(
    scenario: Scenario, sides: Sides
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
        kill_a_worker_process(scenario, tree)
        assert leaving.stop() == 0
        sides.until_more("carry", 100)
    assert refused(scenario) == 0
    sides.end_senders()
    sides.start(ahead=True)
    scenario.until(
        lambda: sides.count("carry", *OPEN) == sides.count("once", *OPEN) == sides.count("newer", *OPEN) == 0,
        within=30 * SLACK,
        what="everything ends",
    )
    judge(scenario, sides)
