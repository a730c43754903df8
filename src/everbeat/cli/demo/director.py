"""The director: starts trees, sends work, strikes, waits for the rescue, and gathers the evidence.

What lives here: the order of things. What may not: drawing and judging.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar
from uuid import UUID

from everbeat import App, Call, Task
from everbeat.cli.demo.blows import ran_again, settled, strike
from everbeat.cli.demo.count import Counts
from everbeat.cli.demo.evidence import CountedFile, Evidence, IndependentCount, Strike, counted_files
from everbeat.cli.demo.messages import Post
from everbeat.cli.demo.plan import (
    ACTS,
    AWAY_S,
    CALM_PACE_S,
    LONGEST_S,
    PACE_S,
    SAME_PRIORITY,
    TREES,
    Act,
    Blow,
    fitting,
    shares,
)
from everbeat.cli.demo.scene import Audience, scene
from everbeat.cli.demo.source_files import SourceFiles
from everbeat.cli.demo.trees import LOCATOR, Tree
from everbeat.cli.demo.watch import DatabaseClock, Sight, look
from everbeat.errors import WorkerError
from everbeat.runtime.clock import Clock

T = TypeVar("T")

_LOOK_EVERY_S = 0.08


class Program(Protocol):
    """The user's program: an app, and the tasks to which files are dealt one after the other."""

    @property
    def app(self) -> App: ...

    @property
    def DEAL(self) -> Sequence[Task[[str, float], Counts]]: ...  # noqa: N802 - a constant of a module


class OutOfTime(Exception):
    """The demo waited for something until its time was over."""


class Director:
    """One performance, timed from `began` on the clock. `close` ends whatever it started, however it went."""

    def __init__(
        self,
        program: Program,
        files: SourceFiles,
        *,
        audience: Audience,
        environment: Mapping[str, str],
        folder: Path,
        clock: Clock,
        began: float,
        post: Post | None = None,
    ) -> None:
        self._program = program
        self._app = program.app
        self._files = files
        self._audience = audience
        self._environment = environment
        self._folder = folder
        self._clock = clock
        self._database_clock = DatabaseClock(clock)
        self._began = began
        self._post = post
        self._trees: list[Tree] = []
        self._strikes: list[Strike] = []
        self._sent: list[tuple[UUID, str]] = []
        self._independent: IndependentCount | None = None
        self._first_sent_s = 0.0
        self._total = len(files.chosen)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock.monotonic() - self._began

    def perform(self) -> Evidence:
        """Everything, in order, on a schema that is there. Raises a DatabaseError, or WorkerError if a tree ends."""
        problems: list[str] = []
        self._tell("the database is ready")
        self._start_trees()
        self._independent = IndependentCount(self._files.chosen, folder=self._folder)
        blows = len(ACTS) + (self._post is not None)
        *parts, last = shares(self._files.chosen, acts=blows)
        if self._post is not None:
            self._post.begin()
        self._first_sent_s = self.elapsed_s
        try:
            for act, part in zip(ACTS, parts, strict=False):
                if act.noticed_by == "session" and self._post is not None:
                    self._lose_nats(self._post, parts[-1])
                self._send(part, pace_s=PACE_S)
                self._play(act)
            self._send_rest(self._rest(last))
            self._until(lambda sight: sight.unfinished == 0, "the last task to end")
            if self._post is not None:
                post = self._post
                self._until(lambda _: post.is_empty(), "the last message to be acknowledged")
            self._tell("the work is done; the trees are asked to leave")
            self._stop_trees()
        except OutOfTime as late:
            problems.append(str(late))
        return self._evidence(problems)

    def close(self) -> None:
        """Ends all processes it started."""
        for tree in self._trees:
            tree.kill()
        if self._independent is not None:
            self._independent.end()

    def _start_trees(self) -> None:
        for number in range(1, TREES + 1):
            self._trees.append(Tree(number, environment=self._environment, folder=self._folder))
        wanted = self._app.worker.processes
        try:
            self._until(
                lambda sight: all(len(sight.live_workers(tree.pid)) >= wanted for tree in self._trees),
                "all workers to register",
            )
        except OutOfTime as late:
            raise _no_worker(f"{late}; the first tree says:\n{self._trees[0].tail()}") from None
        self._tell(f"{TREES} trees of {wanted} worker processes each are alive")

    def _send(self, paths: Sequence[str], *, pace_s: float) -> None:
        """Sends one task a file in one statement."""
        if not paths:
            return
        places = range(len(self._sent), len(self._sent) + len(paths))
        calls = [self._call(place, path, pace_s) for place, path in zip(places, paths, strict=True)]
        before = self._clock.wall()
        handles = self._app.send_many(calls)
        after = self._clock.wall()
        self._sent += [(handle.id, path) for handle, path in zip(handles, paths, strict=True)]
        self._database_clock.learn(handles[0].info().sent_at, before=before, after=after)
        self._tell(f"{len(paths)} tasks sent")

    def _send_rest(self, paths: Sequence[str]) -> None:
        """Sends the last files: with NATS two at a time until it delivers again, as the killed tree may have relayed."""
        self._total = len(self._sent) + len(paths)
        post = self._post
        while post is not None and paths and not post.told().delivered_after:
            self._send(paths[:2], pace_s=CALM_PACE_S)
            paths = paths[2:]
            self._until(
                lambda sight: sight.unfinished == 0 or post.told().delivered_after > 0,
                "tasks to be delivered",
            )
        self._send(paths, pace_s=CALM_PACE_S)

    def _rest(self, paths: Sequence[str]) -> Sequence[str]:
        """As many of the last files as there is time for."""
        unfinished = self._look().unfinished
        return fitting(
            paths,
            ended=len(self._sent) - unfinished,
            in_s=self.elapsed_s - self._first_sent_s,
            elapsed_s=self.elapsed_s,
        )

    def _call(self, place: int, path: str, pace_s: float) -> Call[Counts]:
        deal = self._program.DEAL
        return deal[place % len(deal)].with_options(priority=place // SAME_PRIORITY).call(path, pace_s)

    def _play(self, act: Act) -> None:
        """Strikes, and waits until nothing is left in the victim's name; what was frozen is thawed when all runs again."""
        struck = self._until(lambda sight: self._strike(act, sight), f"the moment for {act.blow}")
        self._strikes.append(struck)
        whom = "worker process" if act.blow is Blow.KILL_WORKER else "the whole tree of"
        verb = "frozen (SIGSTOP)" if act.blow is Blow.FREEZE_TREE else "killed (SIGKILL)"
        self._tell(f"tree {struck.tree}: {whom} {struck.pid} {verb} while it held {len(struck.held)} tasks")
        self._tell(self._until(lambda sight: settled(struck, sight), f"the rescue after {act.blow}"))
        if act.blow is Blow.FREEZE_TREE:
            self._until(lambda sight: ran_again(struck, sight), f"the second runs after {act.blow}")
            self._thaw(struck)

    def _lose_nats(self, post: Post, paths: Sequence[str]) -> None:
        """Kills the NATS server, sends tasks, waits until they have ended all the same, and starts it again."""
        before = self._look().unfinished
        self._tell(f"nats-server {post.kill()} killed (SIGKILL): tasks are sent all the same")
        self._send(paths, pace_s=CALM_PACE_S)
        self._until(
            lambda sight: sight.unfinished == 0 and post.away_s >= AWAY_S, "tasks to end without NATS"
        )
        post.restart(ended_meanwhile=before + len(paths))
        self._tell(f"nats-server is back; {before + len(paths)} tasks ended without it")
        self._until(lambda _: post.is_wanted(), "a worker to ask NATS for messages again")

    def _strike(self, act: Act, sight: Sight) -> Strike | None:
        return strike(
            act,
            sight,
            trees=[tree for tree in self._trees if tree.exit_code is None],
            spared={before.tree for before in self._strikes},
            look=self._look,
            now=lambda: (self._database_clock.now(), self.elapsed_s),
        )

    def _thaw(self, strike: Strike) -> None:
        tree = self._trees[strike.tree - 1]
        tree.strike_all(signal.SIGCONT)
        strike.thawed_after_s = self.elapsed_s - strike.at_s
        self._tell(f"tree {tree.number} thawed (SIGCONT): its late work must be refused")
        wanted = self._app.worker.processes
        self._until(
            lambda sight: tree.refused() and len(sight.live_workers(tree.pid)) >= wanted,
            "the thawed tree to learn of its loss and to come back",
        )
        strike.refused = tree.refused()
        self._tell(
            f"tree {tree.number}: {strike.refused} late attempts refused; it works again under a new name"
        )

    def _until(self, truth: Callable[[Sight], T | None], what: str) -> T:
        """Looks until it is true, and shows every look; raises OutOfTime."""
        while True:
            self._expect_trees()
            sight = self._look()
            self._audience.show(
                scene(
                    sight,
                    self._strikes,
                    trees={tree.pid: tree.number for tree in self._trees},
                    elapsed_s=self.elapsed_s,
                    sent=len(self._sent),
                    total=self._total,
                )
            )
            if found := truth(sight):
                return found
            if self.elapsed_s > LONGEST_S:
                raise OutOfTime(f"waited for {what} until {LONGEST_S:g} s were over")
            time.sleep(_LOOK_EVERY_S)  # the demo looks from outside, as an operator would

    def _look(self) -> Sight:
        return look(self._app, self._database_clock)

    def _expect_trees(self) -> None:
        killed = {strike.tree for strike in self._strikes if strike.act.blow is Blow.KILL_TREE}
        for tree in self._trees:
            if tree.exit_code is not None and tree.number not in killed:
                raise _no_worker(f"Tree {tree.number} ended with {tree.exit_code}; it says:\n{tree.tail()}")

    def _stop_trees(self) -> None:
        living = [tree for tree in self._trees if tree.exit_code is None]
        for tree in living:
            tree.stop()
        for tree in living:
            tree.wait()

    def _evidence(self, problems: Sequence[str]) -> Evidence:
        files: list[CountedFile] = counted_files(self._app, self._sent)
        recoveries = self._app.recoveries(limit=100_000)
        paths = tuple(path for _, path in self._sent)
        independent = (
            None if self._independent is None else self._independent.result(paths, after_s=self.elapsed_s)
        )
        return Evidence(
            folder=self._files.folder,
            found=self._files.found,
            paths=paths,
            files=files,
            strikes=tuple(self._strikes),
            recoveries=recoveries,
            independent=independent,
            took_s=self.elapsed_s,
            problems=tuple(problems),
            messages=None if self._post is None else self._post.told(),
        )

    def _tell(self, text: str) -> None:
        self._audience.tell(self.elapsed_s, text)


def _no_worker(message: str) -> WorkerError:
    return WorkerError(message, fix=f"see whether 'everbeat worker {LOCATOR}' works on this database.")
