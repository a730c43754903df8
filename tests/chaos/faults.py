"""The injection and the end of each type of fault, as a context manager that lasts as long as the fault."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import psutil

from everbeat.errors import DatabaseError
from tests.chaos.clock import boot_s
from tests.chaos.cluster import Cluster
from tests.chaos.line import Line, Lines
from tests.chaos.liveness_faults import LIVENESS_WAYS, LivenessFaultImpossible, LivenessTargets
from tests.chaos.nats_faults import NATS_WAYS, NatsFaultImpossible, Tasks
from tests.chaos.nats_side import NatsSide
from tests.chaos.plan import Fault, Kind
from tests.chaos.trees import Tree, send

_FILL_AGAIN_S: Final = 0.1
_LOOK_EVERY_S: Final = 0.02
_MOMENT_WITHIN_S: Final = 3.0
_TAIL_BYTES: Final = 100_000


class FaultImpossible(Exception):
    """Raised when a fault currently has no target, or cannot be injected on this machine. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The targets of faults.

    `over` is set when the run ends before a fault does. A fault that stops the server holds the lock `server`. `nats` is None in a run
    without NATS. `tasks` returns some tasks of the run.
    """

    cluster: Cluster
    lines: Lines
    trees: Sequence[Tree]
    producers_line: Line
    effects: Path
    over: threading.Event
    server: threading.Lock
    nats: NatsSide | None
    tasks: Tasks
    schema: str

    def line(self, fault: Fault) -> Line:
        """Return the line that the fault affects."""
        return self.producers_line if fault.tree is None else self.trees[fault.tree].line

    def tree(self, fault: Fault) -> Tree:
        """Return the tree that the fault affects."""
        assert fault.tree is not None
        return self.trees[fault.tree]

    def victims(
        self, fault: Fault, choose: Callable[[Tree], Sequence[psutil.Process]]
    ) -> Sequence[psutil.Process]:
        """Return processes of the fault's tree, preferably while user code is running in it.

        Raises FaultImpossible if there are no such processes.
        """
        tree = self.tree(fault)
        deadline = boot_s() + _MOMENT_WITHIN_S
        while boot_s() < deadline and not self.over.is_set():
            if choose(tree) and at_work(self.effects, {process.pid for process in tree.processes}):
                break
            self.over.wait(_LOOK_EVERY_S)
        if found := choose(tree):
            return found
        raise FaultImpossible("no such process lived")


class FaultLog:
    """An append-only log file of injected faults. Each line is written before the next action."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.touch()

    def write(self, fault: Fault, what: str, **detail: object) -> None:
        """Write one line about a fault. `what` is "began", "ended" or "skipped"."""
        line = {"number": fault.number, "kind": fault.kind, "tree": fault.tree, "what": what, "at": boot_s()}
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | detail) + "\n")


Held: TypeAlias = Iterator[dict[str, object]]
"""A generator that yields once, with the details to log, and keeps the fault active until it is resumed."""


def injected(fault: Fault, targets: Targets) -> AbstractContextManager[dict[str, object]]:
    """Return a context manager that injects a fault for the duration of its block. Raises FaultImpossible if that is impossible."""
    return contextmanager(_WAYS[fault.kind])(fault, targets)


def _cut(fault: Fault, targets: Targets) -> Held:
    line = targets.line(fault)
    targets.lines.do(line.cut)
    yield {}
    targets.lines.do(line.join)


def _delay(fault: Fault, targets: Targets) -> Held:
    line = targets.line(fault)
    line.delay_s += fault.amount
    yield {"seconds": fault.amount}
    line.delay_s -= fault.amount


def _half_open(fault: Fault, targets: Targets) -> Held:
    line = targets.line(fault)
    targets.lines.do(line.stall)
    yield {"late": bool(fault.amount)}
    if not fault.amount:
        targets.lines.do(line.hang_up)
    targets.lines.do(line.flow)


def _lose_reply(fault: Fault, targets: Targets) -> Held:
    line = targets.line(fault)
    before = line.lost[fault.verb]
    line.to_lose[fault.verb] += int(fault.amount)
    detail: dict[str, object] = {"verb": fault.verb}
    yield detail
    line.to_lose[fault.verb] = 0
    detail["lost"] = line.lost[fault.verb] - before


def _kill_one(processes: Callable[[Tree], Sequence[psutil.Process]]) -> Callable[[Fault, Targets], Held]:
    def kill(fault: Fault, targets: Targets) -> Held:
        found = targets.victims(fault, processes)
        victim = found[fault.victim % len(found)]
        send(signal.SIGKILL, [victim])
        yield {"pids": [victim.pid]}

    return kill


def _kill_supervisor(fault: Fault, targets: Targets) -> Held:
    pids = [process.pid for process in targets.victims(fault, lambda tree: tree.supervisor)]
    targets.tree(fault).kill_supervisor()
    yield {"pids": pids}
    targets.tree(fault).start()


def _kill_tree(fault: Fault, targets: Targets) -> Held:
    pids = [process.pid for process in targets.victims(fault, lambda tree: tree.processes)]
    targets.tree(fault).kill_all()
    yield {"pids": pids}
    targets.tree(fault).start()


def _freeze(processes: Callable[[Tree], Sequence[psutil.Process]]) -> Callable[[Fault, Targets], Held]:
    def freeze(fault: Fault, targets: Targets) -> Held:
        frozen = targets.victims(fault, processes)
        send(signal.SIGSTOP, frozen)
        yield {"pids": [process.pid for process in frozen]}
        send(signal.SIGCONT, frozen)

    return freeze


def _freeze_worker(fault: Fault, targets: Targets) -> Held:
    yield from _freeze(lambda tree: tree.workers[fault.victim % max(1, len(tree.workers)) :][:1])(
        fault, targets
    )


def _terminate_sessions(fault: Fault, targets: Targets) -> Held:
    with targets.server:
        ended = targets.cluster.terminate_sessions()
    if not ended:
        raise FaultImpossible("no session was open")
    yield {"sessions": ended}


def _restart_database(fault: Fault, targets: Targets) -> Held:
    with targets.server:
        targets.cluster.stop_at_once()
        try:
            yield {}
        finally:
            targets.cluster.start()


def _shift_clock(fault: Fault, targets: Targets) -> Held:
    clock = targets.cluster.clock
    if clock.obstacle:
        raise FaultImpossible(clock.obstacle)
    clock.shift(int(fault.amount))
    yield {"seconds": fault.amount}
    clock.shift(0)


def _fill_disk(fault: Fault, targets: Targets) -> Held:
    cluster = targets.cluster
    if cluster.no_small_disk:
        raise FaultImpossible(cluster.no_small_disk)
    with targets.server:
        cluster.fill_disk()
        detail: dict[str, object] = {}
        free = threading.Event()
        # Space that the server frees in the meantime is filled as well.
        filler = threading.Thread(target=lambda: [cluster.fill_disk() for _ in _until(free)], daemon=True)
        filler.start()
        try:
            yield detail
        finally:
            free.set()
            filler.join()
            cluster.free_disk()
            detail["server_died"] = not cluster.runs
            cluster.start()


def _until(event: threading.Event) -> Iterator[None]:
    while not event.wait(_FILL_AGAIN_S):
        yield


def at_work(effects: Path, pids: Collection[int]) -> bool:
    """Return whether user code is running in one of these processes, according to the effects file."""
    if not effects.exists():
        return False
    with effects.open("rb") as file:
        file.seek(max(0, effects.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()[1:]
    recent = [json.loads(line) for line in lines]
    ended = {effect["claim"] for effect in recent if effect["step"] == "end"}
    return any(
        effect["pid"] in pids and effect["claim"] not in ended
        for effect in recent
        if effect["step"] == "start"
    )


def _of_nats(way: Callable[[Fault, NatsSide, Tasks], Held]) -> Callable[[Fault, Targets], Held]:
    def inject(fault: Fault, targets: Targets) -> Held:
        if targets.nats is None:
            raise FaultImpossible("this run has no NATS")
        try:
            yield from way(fault, targets.nats, targets.tasks)
        except NatsFaultImpossible as why:
            raise FaultImpossible(str(why)) from None

    return inject


def _of_liveness(way: Callable[[Fault, LivenessTargets], Held]) -> Callable[[Fault, Targets], Held]:
    def inject(fault: Fault, targets: Targets) -> Held:
        liveness_targets = LivenessTargets(
            cluster=targets.cluster,
            trees=targets.trees,
            folder=targets.effects.parent,
            schema=targets.schema,
            over=targets.over,
            server=targets.server,
        )
        try:
            yield from way(fault, liveness_targets)
        except (LivenessFaultImpossible, DatabaseError) as why:
            raise FaultImpossible(" ".join(str(why).split())) from None

    return inject


_WAYS: Final[Mapping[Kind, Callable[[Fault, Targets], Held]]] = {
    Kind.CUT: _cut,
    Kind.DELAY: _delay,
    Kind.HALF_OPEN: _half_open,
    Kind.LOSE_REPLY: _lose_reply,
    Kind.KILL_TASK_PROCESS: _kill_one(lambda tree: tree.task_processes),
    Kind.KILL_WORKER: _kill_one(lambda tree: tree.workers),
    Kind.KILL_SUPERVISOR: _kill_supervisor,
    Kind.KILL_TREE: _kill_tree,
    Kind.FREEZE_WORKER: _freeze_worker,
    Kind.FREEZE_SUPERVISOR: _freeze(lambda tree: tree.supervisor),
    Kind.FREEZE_TREE: _freeze(lambda tree: tree.processes),
    Kind.TERMINATE_SESSIONS: _terminate_sessions,
    Kind.RESTART_DATABASE: _restart_database,
    Kind.SHIFT_CLOCK: _shift_clock,
    Kind.FILL_DISK: _fill_disk,
    **{kind: _of_nats(way) for kind, way in NATS_WAYS.items()},
    **{kind: _of_liveness(way) for kind, way in LIVENESS_WAYS.items()},
}
