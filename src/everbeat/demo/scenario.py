"""Run the demo: start trees, send work, inject faults, wait for each recovery, and collect the evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Final, TypeVar
from uuid import UUID

from everbeat import App, Call, Task, TaskState
from everbeat.demo.processes import LOCATOR, DemoNatsServer, IndependentCount, Tree
from everbeat.demo.source_files import Counts, SourceFiles
from everbeat.demo.verification import (
    FAULT_PLAN,
    CountedFile,
    Evidence,
    FaultKind,
    InjectedFault,
    PlannedFault,
)
from everbeat.demo.view import DatabaseClock, DemoState, View, ViewState, read_state
from everbeat.errors import WorkerError
from everbeat.inspection import TaskSummary
from everbeat.runtime.clock import Clock

T = TypeVar("T")

TREES: Final = 3
PACE_S: Final = 1.0
"""How many seconds a task waits before it starts counting, so that it is still running when its worker dies."""

CALM_PACE_S: Final = 0.2
"""How many seconds a task waits after the last fault."""

LONGEST_S: Final = 50.0
"""The number of seconds after which the demo gives up. Including the verification, the demo takes at most a minute."""

NATS_DOWN_S: Final = 3.0
"""The minimum time, in seconds, for which the NATS server stays down."""

SAME_PRIORITY: Final = 10
"""How many files share a priority. Earlier files run first, so recovered tasks run before tasks that have not started."""

MOST_A_SHARE: Final = 60
"""The maximum number of files sent per fault: twice as many as the trees can run at once, so that every worker is busy."""

FINISH_BY_S: Final = 42.0
"""The demo sends only as many of the last files as it can count by this second at its speed so far."""

_READ_EVERY_S: Final = 0.08


def shares(paths: Sequence[str], *, faults: int) -> list[Sequence[str]]:
    """Return the files to send for each fault, followed by the files to send after the last fault."""
    size = min(MOST_A_SHARE, max(1, len(paths) // (faults + 1)))
    return [*(paths[place * size : (place + 1) * size] for place in range(faults)), paths[faults * size :]]


def fitting(paths: Sequence[str], *, ended: int, in_s: float, elapsed_s: float) -> Sequence[str]:
    """Return as many of these files as can be counted in time, given that `ended` files took `in_s` seconds."""
    left_s = max(0.0, FINISH_BY_S - elapsed_s)
    return paths[: round(left_s * ended / in_s)] if in_s > 0 else paths


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTarget:
    """The target of a fault: a process, alone or with its whole tree, and the workers that stop with it."""

    tree: Tree
    pid: int
    worker_ids: frozenset[str]
    is_tree: bool

    def signal(self, number: Signals) -> None:
        """Send a signal to the process, or to its whole tree."""
        if self.is_tree:
            self.tree.signal_all(number)
        else:
            self.tree.signal(self.pid, number)


def settled(fault: InjectedFault, state: DemoState) -> str | None:
    """Return a report if the target no longer holds any task, else None."""
    recoveries = state.recovered_from(fault.worker_ids)
    if state.held_by(fault.worker_ids) or not recoveries:
        return None
    after_s = (max(recovery.noticed_at for recovery in recoveries) - fault.at).total_seconds()
    return f"noticed by {recoveries[0].noticed_by}: {len(recoveries)} tasks recovered after {after_s:.2f} s"


def ran_again(fault: InjectedFault, state: DemoState) -> bool:
    """Return whether every recovered task has started again."""
    return all(recovery.ran_again_at is not None for recovery in state.recovered_from(fault.worker_ids))


def _targets(planned: PlannedFault, state: DemoState, trees: Collection[Tree]) -> Iterator[FaultTarget]:
    for tree in trees:
        workers = state.live_workers(tree.pid)
        if planned.kind is not FaultKind.KILL_WORKER:
            ids = frozenset(worker.worker_id for worker in workers)
            yield FaultTarget(tree=tree, pid=tree.pid, worker_ids=ids, is_tree=True)
            continue
        for worker in workers:
            ids = frozenset({worker.worker_id})
            if tree.holds(worker.pid):
                yield FaultTarget(tree=tree, pid=worker.pid, worker_ids=ids, is_tree=False)


def _choice(
    targets: Iterator[FaultTarget], state: DemoState, *, spared: Collection[int]
) -> FaultTarget | None:
    def preference(target: FaultTarget) -> tuple[bool, int]:
        return target.tree.number not in spared, _running(state.held_by(target.worker_ids))

    busy = [target for target in targets if _running(state.held_by(target.worker_ids))]
    return max(busy, key=preference, default=None)


def _running(leases: Sequence[TaskSummary]) -> int:
    return sum(lease.state is TaskState.RUNNING for lease in leases)


class OutOfTime(Exception):
    """The demo ran out of time while it was waiting."""


class DemoRun:
    """One run of the demo, timed from `started_at` by the monotonic clock. `close` kills all processes that the run started."""

    def __init__(
        self,
        app: App,
        tasks_in_turn: Sequence[Task[[str, float], Counts]],
        files: SourceFiles,
        *,
        view: View,
        environment: Mapping[str, str],
        folder: Path,
        clock: Clock,
        started_at: float,
        nats_server: DemoNatsServer | None = None,
    ) -> None:
        self._app = app
        self._tasks = tasks_in_turn
        self._files = files
        self._view = view
        self._environment = environment
        self._folder = folder
        self._clock = clock
        self._database_clock = DatabaseClock(clock)
        self._started_at = started_at
        self._nats_server = nats_server
        self._trees: list[Tree] = []
        self._faults: list[InjectedFault] = []
        self._sent: list[tuple[UUID, str]] = []
        self._independent: IndependentCount | None = None
        self._first_sent_s = 0.0
        self._total = len(files.chosen)

    @property
    def elapsed_s(self) -> float:
        """Return the number of seconds since the start of the run."""
        return self._clock.monotonic() - self._started_at

    def run(self) -> Evidence:
        """Run the whole scenario on an existing schema. Raises a DatabaseError, or WorkerError if a tree exits."""
        problems: list[str] = []
        self._report("the database is ready")
        self._start_trees()
        self._independent = IndependentCount(self._files.chosen, folder=self._folder)
        *parts, last = shares(self._files.chosen, faults=len(FAULT_PLAN) + (self._nats_server is not None))
        if self._nats_server is not None:
            self._nats_server.start_counting()
        self._first_sent_s = self.elapsed_s
        try:
            for planned, part in zip(FAULT_PLAN, parts, strict=False):
                if planned.noticed_by == "session" and self._nats_server is not None:
                    self._kill_nats(self._nats_server, parts[-1])
                self._send(part, pace_s=PACE_S)
                self._inject_and_await(planned)
            self._send_rest(self._rest(last))
            self._until(lambda state: state.unfinished == 0, "the last task to end")
            if (server := self._nats_server) is not None:
                self._until(lambda _: server.is_empty(), "the last message to be acknowledged")
            self._report("all tasks have ended; the trees shut down")
            self._stop_trees()
        except OutOfTime as late:
            problems.append(str(late))
        return self._evidence(problems)

    def close(self) -> None:
        """Kill all processes that this run started."""
        for tree in self._trees:
            tree.kill()
        if self._independent is not None:
            self._independent.kill()

    def _start_trees(self) -> None:
        for number in range(1, TREES + 1):
            self._trees.append(Tree(number, environment=self._environment, folder=self._folder))
        wanted = self._app.worker.processes
        try:
            self._until(
                lambda state: all(len(state.live_workers(tree.pid)) >= wanted for tree in self._trees),
                "all workers to register",
            )
        except OutOfTime as late:
            raise _no_worker(
                f"{late}; the log of the first tree ends with:\n{self._trees[0].tail()}"
            ) from None
        self._report(f"{TREES} trees of {wanted} worker processes each are alive")

    def _send(self, paths: Sequence[str], *, pace_s: float) -> None:
        """Send one task per file, all in one statement."""
        if not paths:
            return
        places = range(len(self._sent), len(self._sent) + len(paths))
        calls = [self._call(place, path, pace_s) for place, path in zip(places, paths, strict=True)]
        before = self._clock.wall()
        handles = self._app.send_many(calls)
        after = self._clock.wall()
        self._sent += [(handle.id, path) for handle, path in zip(handles, paths, strict=True)]
        self._database_clock.learn(handles[0].info().sent_at, before=before, after=after)
        self._report(f"{len(paths)} tasks sent")

    def _send_rest(self, paths: Sequence[str]) -> None:
        """Send the last files. With NATS, send two at a time until it delivers again, because the killed tree might have been the relay."""
        self._total = len(self._sent) + len(paths)
        server = self._nats_server
        while server is not None and paths and not server.counts().delivered_after:
            self._send(paths[:2], pace_s=CALM_PACE_S)
            paths = paths[2:]
            self._until(
                lambda state: state.unfinished == 0 or server.counts().delivered_after > 0,
                "tasks to be delivered",
            )
        self._send(paths, pace_s=CALM_PACE_S)

    def _rest(self, paths: Sequence[str]) -> Sequence[str]:
        """Return as many of the last files as can be counted in time."""
        unfinished = self._read().unfinished
        return fitting(
            paths,
            ended=len(self._sent) - unfinished,
            in_s=self.elapsed_s - self._first_sent_s,
            elapsed_s=self.elapsed_s,
        )

    def _call(self, place: int, path: str, pace_s: float) -> Call[Counts]:
        return (
            self._tasks[place % len(self._tasks)]
            .with_options(priority=place // SAME_PRIORITY)
            .call(path, pace_s)
        )

    def _inject_and_await(self, planned: PlannedFault) -> None:
        """Inject a fault and wait for the recovery. Thaw a frozen tree once its tasks are running again."""
        kind = planned.kind
        fault = self._until(lambda state: self._inject(planned, state), f"a target for {kind}")
        self._faults.append(fault)
        whom = "worker process" if kind is FaultKind.KILL_WORKER else "the whole tree of"
        verb = "frozen (SIGSTOP)" if kind is FaultKind.FREEZE_TREE else "killed (SIGKILL)"
        self._report(f"tree {fault.tree}: {whom} {fault.pid} {verb} while it held {len(fault.held)} tasks")
        self._report(self._until(lambda state: settled(fault, state), f"the recovery after {kind}"))
        if kind is FaultKind.FREEZE_TREE:
            self._until(lambda state: ran_again(fault, state), f"the second runs after {kind}")
            self._thaw(fault)

    def _kill_nats(self, server: DemoNatsServer, paths: Sequence[str]) -> None:
        """Kill the NATS server, send tasks, wait until they have finished without it, and restart it."""
        before = self._read().unfinished
        self._report(f"nats-server {server.kill()} killed (SIGKILL): tasks are sent without it")
        self._send(paths, pace_s=CALM_PACE_S)
        self._until(
            lambda state: state.unfinished == 0 and server.away_s >= NATS_DOWN_S, "tasks to end without NATS"
        )
        server.restart(ended_meanwhile=before + len(paths))
        self._report(f"nats-server is back; {before + len(paths)} tasks ended without it")
        self._until(lambda _: server.is_wanted(), "a worker to ask NATS for messages again")

    def _inject(self, planned: PlannedFault, state: DemoState) -> InjectedFault | None:
        """Inject the fault if a target is running a task, else return None. Trees that have already had a fault are chosen last."""
        living = [tree for tree in self._trees if tree.exit_code is None]
        spared = {before.tree for before in self._faults}
        target = _choice(_targets(planned, state, living), state, spared=spared)
        if target is None:
            return None
        target.signal(Signals.SIGSTOP)
        held = self._read().held_by(target.worker_ids)
        if not _running(held):
            target.signal(Signals.SIGCONT)  # its tasks had just finished
            return None
        at, at_s = self._database_clock.now(), self.elapsed_s
        if planned.kind is not FaultKind.FREEZE_TREE:
            target.signal(Signals.SIGKILL)
        return InjectedFault(
            planned=planned,
            tree=target.tree.number,
            pid=target.pid,
            worker_ids=target.worker_ids,
            at=at,
            at_s=at_s,
            held=frozenset(lease.id for lease in held),
        )

    def _thaw(self, fault: InjectedFault) -> None:
        tree = self._trees[fault.tree - 1]
        tree.signal_all(Signals.SIGCONT)
        fault.thawed_after_s = self.elapsed_s - fault.at_s
        self._report(f"tree {tree.number} thawed (SIGCONT): its late work must be refused")
        wanted = self._app.worker.processes
        self._until(
            lambda state: tree.late_attempts() and len(state.live_workers(tree.pid)) >= wanted,
            "the thawed tree to notice its lost leases and to restart its workers",
        )
        fault.refused = tree.late_attempts()
        self._report(
            f"tree {tree.number}: {fault.refused} late attempts refused; it works again with a new id"
        )

    def _until(self, truth: Callable[[DemoState], T | None], what: str) -> T:
        """Read and show the state repeatedly until `truth` returns a true result for it. Return that result.

        Raises OutOfTime if the demo runs out of time.
        """
        while True:
            self._expect_trees()
            state = self._read()
            trees = {tree.pid: tree.number for tree in self._trees}
            self._view.show(
                ViewState(self.elapsed_s, state, self._faults, trees, len(self._sent), self._total)
            )
            if found := truth(state):
                return found
            if self.elapsed_s > LONGEST_S:
                raise OutOfTime(f"waited for {what} until {LONGEST_S:g} s were over")
            time.sleep(_READ_EVERY_S)  # the demo polls as an operator would

    def _read(self) -> DemoState:
        return read_state(self._app, self._database_clock)

    def _expect_trees(self) -> None:
        killed = {fault.tree for fault in self._faults if fault.planned.kind is FaultKind.KILL_TREE}
        for tree in self._trees:
            if tree.exit_code is not None and tree.number not in killed:
                raise _no_worker(
                    f"Tree {tree.number} ended with {tree.exit_code}; its log ends with:\n{tree.tail()}"
                )

    def _stop_trees(self) -> None:
        living = [tree for tree in self._trees if tree.exit_code is None]
        for tree in living:
            tree.stop()
        for tree in living:
            tree.wait()

    def _evidence(self, problems: Sequence[str]) -> Evidence:
        files = _counted_files(self._app, self._sent)
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
            faults=tuple(self._faults),
            recoveries=recoveries,
            independent=independent,
            took_s=self.elapsed_s,
            problems=tuple(problems),
            messages=None if self._nats_server is None else self._nats_server.counts(),
        )

    def _report(self, text: str) -> None:
        self._view.report(self.elapsed_s, text)


def _no_worker(message: str) -> WorkerError:
    return WorkerError(message, fix=f"see whether 'everbeat worker {LOCATOR}' works on this database.")


def _counted_files(app: App, sent: Iterable[tuple[UUID, str]]) -> list[CountedFile]:
    """Return the stored facts about these tasks."""
    found = []
    for task_id, path in sent:
        info = app.info(task_id)
        found.append(
            CountedFile(
                task_id=task_id,
                path=path,
                task=info.name,
                state=info.state,
                counts=Counts(**info.result) if info.state is TaskState.COMPLETED else None,
                attempts=tuple((attempt.fence, attempt.outcome) for attempt in info.attempts),
            )
        )
    return found
