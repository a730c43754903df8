"""How each kind of fault is done, and how it is healed: a context that lasts as long as the fault.

What lives here: one function a kind, and the log of what was really done. What may not: when, and what follows.
"""

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
from tests.chaos.liveness_faults import LIVENESS_WAYS, NothingToStrike, Struck
from tests.chaos.nats_faults import NATS_WAYS, NobodyThere, Tasks
from tests.chaos.nats_side import NatsSide
from tests.chaos.plan import Fault, Kind
from tests.chaos.trees import Tree, send

_FILL_AGAIN_S: Final = 0.1
_LOOK_EVERY_S: Final = 0.02
_MOMENT_WITHIN_S: Final = 3.0
_TAIL_BYTES: Final = 100_000


class NoVictim(Exception):
    """Nobody was there to be struck, or the fault cannot be done here; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What can be struck. `over` is set when the run ends before a fault does; `server` is held by who stops the server.

    `nats`: None in a run without. `tasks` answers some of the run.
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
        """The line that the fault hits."""
        return self.producers_line if fault.tree is None else self.trees[fault.tree].line

    def tree(self, fault: Fault) -> Tree:
        """The tree that the fault hits."""
        assert fault.tree is not None
        return self.trees[fault.tree]

    def victims(
        self, fault: Fault, choose: Callable[[Tree], Sequence[psutil.Process]]
    ) -> Sequence[psutil.Process]:
        """Processes of its tree, at a moment in which user code runs in the tree if one comes soon; raises NoVictim."""
        tree = self.tree(fault)
        give_up = boot_s() + _MOMENT_WITHIN_S
        while boot_s() < give_up and not self.over.is_set():
            if choose(tree) and at_work(self.effects, {process.pid for process in tree.processes}):
                break
            self.over.wait(_LOOK_EVERY_S)
        if found := choose(tree):
            return found
        raise NoVictim("no such process lived")


class FaultLog:
    """An append-only file of what was done; every line is written before the next thing is done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.touch()

    def write(self, fault: Fault, what: str, **detail: object) -> None:
        """One line: a fault "began", "ended" or was "skipped"."""
        line = {"number": fault.number, "kind": fault.kind, "tree": fault.tree, "what": what, "at": boot_s()}
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | detail) + "\n")


Held: TypeAlias = Iterator[dict[str, object]]
"""Yields once, what there is to say of it, while the fault lasts."""


def injected(fault: Fault, scene: Scene) -> AbstractContextManager[dict[str, object]]:
    """Does a fault for as long as the block lasts; raises NoVictim."""
    return contextmanager(_WAYS[fault.kind])(fault, scene)


def _cut(fault: Fault, scene: Scene) -> Held:
    line = scene.line(fault)
    scene.lines.do(line.cut)
    yield {}
    scene.lines.do(line.join)


def _delay(fault: Fault, scene: Scene) -> Held:
    line = scene.line(fault)
    line.delay_s += fault.amount
    yield {"seconds": fault.amount}
    line.delay_s -= fault.amount


def _half_open(fault: Fault, scene: Scene) -> Held:
    line = scene.line(fault)
    scene.lines.do(line.stall)
    yield {"late": bool(fault.amount)}
    if not fault.amount:
        scene.lines.do(line.hang_up)
    scene.lines.do(line.flow)


def _lose_reply(fault: Fault, scene: Scene) -> Held:
    line = scene.line(fault)
    before = line.lost[fault.verb]
    line.to_lose[fault.verb] += int(fault.amount)
    told: dict[str, object] = {"verb": fault.verb}
    yield told
    line.to_lose[fault.verb] = 0
    told["lost"] = line.lost[fault.verb] - before


def _kill_one(processes: Callable[[Tree], Sequence[psutil.Process]]) -> Callable[[Fault, Scene], Held]:
    def kill(fault: Fault, scene: Scene) -> Held:
        found = scene.victims(fault, processes)
        victim = found[fault.victim % len(found)]
        send(signal.SIGKILL, [victim])
        yield {"pids": [victim.pid]}

    return kill


def _kill_supervisor(fault: Fault, scene: Scene) -> Held:
    pids = [process.pid for process in scene.victims(fault, lambda tree: tree.supervisor)]
    scene.tree(fault).kill_supervisor()
    yield {"pids": pids}
    scene.tree(fault).start()


def _kill_tree(fault: Fault, scene: Scene) -> Held:
    pids = [process.pid for process in scene.victims(fault, lambda tree: tree.processes)]
    scene.tree(fault).kill_all()
    yield {"pids": pids}
    scene.tree(fault).start()


def _freeze(processes: Callable[[Tree], Sequence[psutil.Process]]) -> Callable[[Fault, Scene], Held]:
    def freeze(fault: Fault, scene: Scene) -> Held:
        frozen = scene.victims(fault, processes)
        send(signal.SIGSTOP, frozen)
        yield {"pids": [process.pid for process in frozen]}
        send(signal.SIGCONT, frozen)

    return freeze


def _freeze_worker(fault: Fault, scene: Scene) -> Held:
    yield from _freeze(lambda tree: tree.workers[fault.victim % max(1, len(tree.workers)) :][:1])(
        fault, scene
    )


def _terminate_sessions(fault: Fault, scene: Scene) -> Held:
    with scene.server:
        ended = scene.cluster.terminate_sessions()
    if not ended:
        raise NoVictim("no session was open")
    yield {"sessions": ended}


def _restart_database(fault: Fault, scene: Scene) -> Held:
    with scene.server:
        scene.cluster.stop_at_once()
        try:
            yield {}
        finally:
            scene.cluster.start()


def _shift_clock(fault: Fault, scene: Scene) -> Held:
    clock = scene.cluster.clock
    if clock.obstacle:
        raise NoVictim(clock.obstacle)
    clock.shift(int(fault.amount))
    yield {"seconds": fault.amount}
    clock.shift(0)


def _fill_disk(fault: Fault, scene: Scene) -> Held:
    cluster = scene.cluster
    if cluster.no_small_disk:
        raise NoVictim(cluster.no_small_disk)
    with scene.server:
        cluster.fill_disk()
        told: dict[str, object] = {}
        free = threading.Event()
        # What the server gives back meanwhile is taken as well.
        filler = threading.Thread(target=lambda: [cluster.fill_disk() for _ in _until(free)], daemon=True)
        filler.start()
        try:
            yield told
        finally:
            free.set()
            filler.join()
            cluster.free_disk()
            told["server_died"] = not cluster.runs
            cluster.start()


def _until(event: threading.Event) -> Iterator[None]:
    while not event.wait(_FILL_AGAIN_S):
        yield


def at_work(effects: Path, pids: Collection[int]) -> bool:
    """Whether user code has begun in one of these processes and has not ended, by the end of the effects file."""
    if not effects.exists():
        return False
    with effects.open("rb") as file:
        file.seek(max(0, effects.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()[1:]
    deeds = [json.loads(line) for line in lines]
    ended = {deed["claim"] for deed in deeds if deed["step"] == "end"}
    return any(
        deed["pid"] in pids and deed["claim"] not in ended for deed in deeds if deed["step"] == "start"
    )


def _of_nats(way: Callable[[Fault, NatsSide, Tasks], Held]) -> Callable[[Fault, Scene], Held]:
    def strike(fault: Fault, scene: Scene) -> Held:
        if scene.nats is None:
            raise NoVictim("this run has no NATS")
        try:
            yield from way(fault, scene.nats, scene.tasks)
        except NobodyThere as why:
            raise NoVictim(str(why)) from None

    return strike


def _of_liveness(way: Callable[[Fault, Struck], Held]) -> Callable[[Fault, Scene], Held]:
    def strike(fault: Fault, scene: Scene) -> Held:
        struck = Struck(
            cluster=scene.cluster,
            trees=scene.trees,
            folder=scene.effects.parent,
            schema=scene.schema,
            over=scene.over,
            server=scene.server,
        )
        try:
            yield from way(fault, struck)
        except (NothingToStrike, DatabaseError) as why:
            raise NoVictim(" ".join(str(why).split())) from None

    return strike


_WAYS: Final[Mapping[Kind, Callable[[Fault, Scene], Held]]] = {
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
