"""Two trees that are deployed forwards and backwards under load while processes are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any, Final

import psutil

from tests.stories.scenario import Scenario, Tree

GRACE_S: Final = 1
WORKER: Final[Mapping[str, Any]] = {
    "grace": GRACE_S, "async_concurrency": 20, "thread_concurrency": 8, "process_concurrency": 4,
}  # fmt: skip
WAYS: Final = ("start, then stop", "stop, then start", "side by side")


class Fleet:
    """Two trees of some version each, while senders of both versions send continuously."""

    def __init__(self, scenario: Scenario, *, seed: int) -> None:
        self._scenario = scenario
        self._random = Random(seed)
        self._seed = seed
        self._senders: list[subprocess.Popen[bytes]] = []
        self.places = [(version, self._start(version)) for version in (1, 2)]
        self.leaving: list[Tree] = []
        self.killed: set[int] = set()
        self.done: Counter[str] = Counter()

    def _start(self, version: int) -> Tree:
        return self._scenario.start_tree(program=f"shop_{version}", worker=WORKER)

    def send(self, *, per_second: float) -> None:
        """Start a sender of each version."""
        environment = self._scenario.environment(recovery={}, worker=WORKER)
        for version in (1, 2):
            with (self._scenario.folder / f"sender-{version}.log").open("wb") as output:
                command = [
                    sys.executable, "-m", "shop", str(version), str(per_second), str(self._seed * 10 + version),
                ]  # fmt: skip
                self._senders.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                    )
                )

    def deploy(self, seconds: float, *, every_s: float, kill_every_s: float = 3.0) -> None:
        """Roll one place after the other to the other version, and kill processes and trees at random times."""
        began = time.monotonic()
        roll_at, kill_at, place = began + every_s, began + kill_every_s, 0
        while (now := time.monotonic()) < began + seconds:
            if now >= roll_at:
                self._roll(place)
                roll_at, place = roll_at + every_s, 1 - place
            if now >= kill_at:
                self._kill()
                kill_at = now + self._random.uniform(0.5, 1.5) * kill_every_s
            time.sleep(0.05)  # the times of the plan
        assert all(sender.poll() is None for sender in self._senders), "a sender ended early"

    def _roll(self, place: int) -> None:
        version, old = self.places[place]
        way = self._random.choice(WAYS)
        self.done[way] += 1
        if way == "stop, then start":
            old.process.terminate()
        new = self._start(3 - version)
        if way == "start, then stop":
            self._scenario.until(
                lambda: self._scenario.workers(new), within=30, what="the new tree", tree=new
            )
        if way != "stop, then start":
            old.process.terminate()
        self.leaving.append(old)
        self.places[place] = (3 - version, new)

    def _kill(self) -> None:
        """Kill a worker process, a task process or a whole tree with SIGKILL; restart a killed tree, as systemd would."""
        place = self._random.randrange(2)
        version, tree = self.places[place]
        if self._random.random() < 0.4:
            tree.kill()
            self.killed.add(tree.pid)
            self.places[place] = (version, self._start(version))
            self.done["tree killed"] += 1
            return
        candidates = [tree, *(each for each in self.leaving if each.process.poll() is None)]
        below = self._random.choice(candidates).processes()[1:]
        if below:
            self.done["process killed"] += 1
            try:
                self._random.choice(below).kill()
            except psutil.NoSuchProcess:
                self.done["process killed"] -= 1

    def finish(self, *, within: float) -> None:
        """Stop the senders, run both versions until all work is done, and check that each tree stops with exit code 0."""
        self._scenario.open_gate("closed")
        assert [sender.wait(30) for sender in self._senders] == [0, 0], "a sender failed"
        if {version for version, _ in self.places} != {1, 2}:
            self._roll(0)
        self._scenario.until(lambda: not self._unfinished(), within=within, what="all work is done")
        self.leaving += [tree for _, tree in self.places]
        for _, tree in self.places:
            tree.process.terminate()
        for tree in self.leaving:
            code = tree.process.wait(60)
            # A process that is stopped before its first log line had no signal handler yet.
            had_begun = code != -signal.SIGTERM or tree.output()
            assert code == 0 or tree.pid in self.killed or not had_begun, (
                f"exit code {code}:\n{tree.output()[-3000:]}"
            )

    def _unfinished(self) -> int:
        (row,) = self._scenario.query(
            """select (select count(*) from {schema}.tasks where state in ('PENDING', 'CLAIMED', 'RUNNING'))
                + (select count(*) from {schema}.workflows where state not in ('COMPLETED', 'FAILED', 'CANCELLED')) as unfinished"""
        )
        return int(row["unfinished"])

    def sent(self) -> dict[str, set[str]]:
        """Return the ids of the acknowledged tasks and workflows."""
        found: dict[str, set[str]] = {"task": set(), "workflow": set()}
        for journal in self._scenario.folder.glob("sent-*.jsonl"):
            for line in journal.read_text().splitlines():
                for kind, name in json.loads(line).items():
                    found[kind].add(name)
        return found
