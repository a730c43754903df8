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

from everbeat import App, Task, TaskState
from everbeat.cli.demo.count import Counts
from everbeat.cli.demo.evidence import CountedFile, Evidence, IndependentCount, Strike, counted_files
from everbeat.cli.demo.plan import ACTS, LONGEST_S, PACE_S, SESSION_CALM_S, TREES, Act, Blow, shares
from everbeat.cli.demo.scene import Scene, scene
from everbeat.cli.demo.source_files import SourceFiles
from everbeat.cli.demo.trees import Tree
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


class Audience(Protocol):
    """Whoever watches."""

    def show(self, moment: Scene, /) -> None:
        """A new moment."""
        ...

    def tell(self, elapsed_s: float, text: str, /) -> None:
        """Something happened."""
        ...


class OutOfTime(Exception):
    """The demo waited for something until its time was over."""


class Director:
    """One performance. `close` ends whatever it started, however it went."""

    def __init__(
        self,
        program: Program,
        files: SourceFiles,
        *,
        audience: Audience,
        environment: Mapping[str, str],
        folder: Path,
        clock: Clock,
    ) -> None:
        self._program = program
        self._app = program.app
        self._files = files
        self._audience = audience
        self._environment = environment
        self._folder = folder
        self._clock = clock
        self._database_clock = DatabaseClock(clock)
        self._began = clock.monotonic()
        self._trees: list[Tree] = []
        self._strikes: list[Strike] = []
        self._sent: list[tuple[UUID, str]] = []
        self._independent: IndependentCount | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock.monotonic() - self._began

    def perform(self) -> Evidence:
        """Everything, in order. Raises a DatabaseError or WorkerError where nothing could even begin."""
        problems: list[str] = []
        self._app.migrate()
        opened_at_s = self.elapsed_s
        self._tell("the database is ready")
        self._start_trees()
        self._independent = IndependentCount(self._files.chosen, folder=self._folder)
        parts = shares(self._files.chosen, acts=len(ACTS))
        try:
            for act, part in zip(ACTS, parts, strict=False):
                if act.noticed_by == "session":
                    self._until(
                        lambda _: self.elapsed_s - opened_at_s >= SESSION_CALM_S, "the server to be 11 s old"
                    )
                self._send(part)
                self._play(act)
            self._send(parts[-1])
            self._until(lambda sight: sight.unfinished == 0, "the last task to end")
        except OutOfTime as late:
            problems.append(str(late))
        self._tell("the work is done; the trees are asked to leave")
        self._stop_trees()
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
            raise WorkerError(f"{late}; the first tree says:\n{self._trees[0].tail()}") from None
        self._tell(f"{TREES} trees of {wanted} worker processes each are alive")

    def _send(self, paths: Sequence[str]) -> None:
        """Sends one task a file in one statement."""
        if not paths:
            return
        deal = self._program.DEAL
        first = len(self._sent)
        calls = [deal[(first + place) % len(deal)].call(path, PACE_S) for place, path in enumerate(paths)]
        before = self._clock.wall()
        handles = self._app.send_many(calls)
        after = self._clock.wall()
        self._sent += [(handle.id, path) for handle, path in zip(handles, paths, strict=True)]
        self._database_clock.learn(handles[0].info().sent_at, before=before, after=after)
        self._tell(f"{len(paths)} tasks sent")

    def _play(self, act: Act) -> None:
        strike = self._until(lambda sight: self._struck(act, sight), f"the moment for {act.blow}")
        self._strikes.append(strike)
        verb = "frozen (SIGSTOP)" if act.blow is Blow.FREEZE_TREE else "killed (SIGKILL)"
        whom = "worker process" if act.blow is Blow.KILL_WORKER else "the whole tree of"
        self._tell(f"tree {strike.tree}: {whom} {strike.pid} {verb} while it held {len(strike.held)} tasks")
        self._until(lambda sight: not sight.held_by(strike.worker_ids), f"the rescue after {act.blow}")
        rescued = self._until(lambda sight: self._ran_again(strike, sight), f"the second runs after {act.blow}")
        self._tell(rescued)
        if act.blow is Blow.FREEZE_TREE:
            self._thaw(strike)

    def _struck(self, act: Act, sight: Sight) -> Strike | None:
        """Strikes who holds most running work, if anybody does: stopped first, so that nothing is finished unseen."""
        unharmed = {strike.tree for strike in self._strikes}
        living = [tree for tree in self._trees if tree.exit_code is None]
        candidates = [
            (tree.number not in unharmed, running, tree, pid, ids)
            for tree in living
            for pid, ids in self._victims(act, tree, sight)
            if (running := sum(lease.state is TaskState.RUNNING for lease in sight.held_by(ids)))
        ]
        if not candidates:
            return None
        _, _, tree, pid, ids = max(candidates, key=lambda candidate: candidate[:2])
        whole = act.blow is not Blow.KILL_WORKER
        _signal(tree, pid, signal.SIGSTOP, whole=whole)
        held = look(self._app, self._database_clock).held_by(ids)
        if not any(lease.state is TaskState.RUNNING for lease in held):
            _signal(tree, pid, signal.SIGCONT, whole=whole)  # it was done in that very moment
            return None
        at, at_s = self._database_clock.now(), self.elapsed_s
        match act.blow:
            case Blow.KILL_WORKER:
                tree.strike(pid, signal.SIGKILL)
            case Blow.KILL_TREE:
                tree.kill()
            case Blow.FREEZE_TREE:
                pass
        return Strike(
            act=act,
            tree=tree.number,
            pid=pid,
            worker_ids=ids,
            at=at,
            at_s=at_s,
            held=frozenset(lease.id for lease in held),
        )

    def _victims(self, act: Act, tree: Tree, sight: Sight) -> list[tuple[int, frozenset[str]]]:
        """Who may be struck in a tree: the process to signal, and the workers that fall with it."""
        workers = sight.live_workers(tree.pid)
        if act.blow is Blow.KILL_WORKER:
            return [
                (worker.pid, frozenset({worker.worker_id})) for worker in workers if tree.holds(worker.pid)
            ]
        return [(tree.pid, frozenset(worker.worker_id for worker in workers))]

    def _ran_again(self, strike: Strike, sight: Sight) -> str | None:
        """In words, once every task that was recovered runs again."""
        recoveries = sight.rescued_from(strike.worker_ids)
        again = [recovery.ran_again_at for recovery in recoveries]
        if not again or any(moment is None for moment in again):
            return None
        settled_s = (max(recovery.noticed_at for recovery in recoveries) - strike.at).total_seconds()
        last_s = max((moment - strike.at).total_seconds() for moment in again if moment is not None)
        return (
            f"{len(again)} tasks rescued: noticed by {recoveries[0].noticed_by}, in other hands after {settled_s:.2f} s,"
            f" all running again after {last_s:.2f} s"
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
        self._tell(f"tree {tree.number}: {strike.refused} late attempts refused; it works again under a new name")

    def _until(self, truth: Callable[[Sight], T | None], what: str) -> T:
        """Looks until it is true, and shows every look; raises OutOfTime."""
        while True:
            self._expect_trees()
            sight = look(self._app, self._database_clock)
            self._audience.show(
                scene(
                    sight,
                    self._strikes,
                    trees={tree.pid: tree.number for tree in self._trees},
                    elapsed_s=self.elapsed_s,
                    sent=len(self._sent),
                    total=len(self._files.chosen),
                )
            )
            if found := truth(sight):
                return found
            if self.elapsed_s > LONGEST_S:
                raise OutOfTime(f"waited for {what} until {LONGEST_S:g} s were over")
            time.sleep(_LOOK_EVERY_S)  # the demo looks from outside, as an operator would

    def _expect_trees(self) -> None:
        killed = {strike.tree for strike in self._strikes if strike.act.blow is Blow.KILL_TREE}
        for tree in self._trees:
            if tree.exit_code is not None and tree.number not in killed:
                raise WorkerError(f"Tree {tree.number} ended with {tree.exit_code}; it says:\n{tree.tail()}")

    def _stop_trees(self) -> None:
        living = [tree for tree in self._trees if tree.exit_code is None]
        for tree in living:
            tree.stop()
        for tree in living:
            tree.wait()

    def _evidence(self, problems: Sequence[str]) -> Evidence:
        files: list[CountedFile] = counted_files(self._app, self._sent)
        recoveries = self._app.recoveries(limit=100_000)
        independent = None if self._independent is None else self._independent.result()
        return Evidence(
            folder=self._files.folder,
            found=self._files.found,
            paths=self._files.chosen,
            files=files,
            strikes=tuple(self._strikes),
            recoveries=recoveries,
            independent=independent,
            took_s=self.elapsed_s,
            problems=tuple(problems),
        )

    def _tell(self, text: str) -> None:
        self._audience.tell(self.elapsed_s, text)


def _signal(tree: Tree, pid: int, number: signal.Signals, *, whole: bool) -> None:
    if whole:
        tree.strike_all(number)
    else:
        tree.strike(pid, number)
