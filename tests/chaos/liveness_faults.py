"""The newer types of faults: an unavailable database, promotions, code that forks, and a clock set back while a turn is held."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import psutil
import psycopg
from psycopg import Connection, sql

from everbeat import App
from tests.chaos.clock import boot_s
from tests.chaos.cluster import APPLICATION, Cluster
from tests.chaos.plan import HOUR_S, Fault, Kind
from tests.chaos.tree_oracles import CANARY
from tests.chaos.trees import Tree

Held: TypeAlias = Iterator[dict[str, object]]

FORKS: Final = 3
"""The number of tasks that fork, for each fault of this type."""
UNKNOWN: Final = "known_to_nobody"
EXPIRES_WITHIN_S: Final = 15.0
"""How long after its `good_until` a task can take to expire while the clock is set back, in seconds: three turns and a check."""

_FORK_SECONDS: Final = 6.0
_FIRST_NUMBER: Final = 2_000_000_000
_NUMBERS_EACH: Final = 100
_VICTIM_WITHIN_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.05
_HOLDERS: Final = """
    select s.pid from {schema}.turns t join {schema}.supervisors s on s.id = t.taken_by
    where s.ended_at is null order by t.service = 'expirer' desc, t.taken_at desc
"""


class LivenessFaultImpossible(Exception):
    """Raised when a fault currently has no target, or cannot be injected on this machine. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTargets:
    """The targets of these faults. `folder` is the run's folder, and `schema` is everbeat's schema.

    A fault that affects the whole server holds the lock `server`.
    """

    cluster: Cluster
    trees: Sequence[Tree]
    folder: Path
    schema: str
    over: threading.Event
    server: threading.Lock


def _read_only(fault: Fault, targets: LivenessTargets) -> Held:
    with targets.server:
        targets.cluster.set_read_only(True)
        detail: dict[str, object] = {}
        if fault.amount:
            detail["sessions"] = targets.cluster.terminate_sessions()
        try:
            yield detail
        finally:
            targets.cluster.set_read_only(False)


def _exhaust(fault: Fault, targets: LivenessTargets) -> Held:
    with targets.server, _other_programs(targets.cluster) as taken:
        detail: dict[str, object] = {}
        yield detail
        detail["connections"] = len(taken)


@contextmanager
def _other_programs(cluster: Cluster) -> Iterator[list[Connection[Any]]]:
    """Take every connection that the server has, including those of existing clients, as if other programs held them."""
    taken: list[Connection[Any]] = []
    free = threading.Event()

    def take_all() -> None:
        while not free.is_set():
            try:
                taken.append(psycopg.connect(cluster.url, autocommit=True, application_name=APPLICATION))
            except psycopg.OperationalError:
                with suppress(psycopg.Error, IndexError):
                    cluster.terminate_sessions_over(taken[0])
                free.wait(_LOOK_EVERY_S)

    thread = threading.Thread(target=take_all, daemon=True, name="strangers")
    thread.start()
    try:
        yield taken
    finally:
        free.set()
        thread.join()
        for connection in taken:
            connection.close()


def _freeze_database(fault: Fault, targets: LivenessTargets) -> Held:
    with targets.server, targets.cluster.frozen():
        yield {}


def _promote(fault: Fault, targets: LivenessTargets) -> Held:
    cluster = targets.cluster
    with targets.server:
        cluster.await_standby()
        if fault.amount:
            with cluster.frozen():
                cluster.promote()
                yield {"frozen": True}
                cluster.kill_old_primary()
        else:
            cluster.kill_primary()
            cluster.promote()
            yield {"frozen": False}
        cluster.renew_standby()


def _fork(fault: Fault, targets: LivenessTargets) -> Held:
    """Kill a tree whose task code has forked. The forked child survives."""
    first = _FIRST_NUMBER + fault.number * _NUMBERS_EACH
    known = set(orphans(targets.folder))
    with closing(App(targets.cluster.url, schema=targets.schema)) as app:
        arguments = [
            {"number": first + one, "seconds": _FORK_SECONDS, "secret": CANARY} for one in range(FORKS)
        ]
        with _logged(targets.folder, fault, "forks", [first + one for one in range(FORKS)]) as ids:
            ids += [str(app.send_by_name("forks", one).id) for one in arguments]
    deadline = boot_s() + _VICTIM_WITHIN_S
    while boot_s() < deadline and not targets.over.is_set():
        for tree in targets.trees:
            workers = {process.pid for process in tree.workers}
            if any(worker in workers for _, _, worker in set(orphans(targets.folder)) - known):
                spared = {pid for pid, _, _ in orphans(targets.folder)}
                pids = [process.pid for process in tree.processes if process.pid not in spared]
                tree.kill_all(sparing=spared)
                yield {"tree": tree.number, "pids": pids, "orphans": sorted(spared)}
                tree.start()
                return
        time.sleep(_LOOK_EVERY_S)  # the run polls from outside
    raise LivenessFaultImpossible("no task forked in time")


def _kill_turn_holder(fault: Fault, targets: LivenessTargets) -> Held:
    """Kill the tree that holds turns, and set the clock back by an hour. Tasks must still expire in time."""
    clock = targets.cluster.clock
    if clock.obstacle:
        raise LivenessFaultImpossible(clock.obstacle)
    with targets.server:
        tree = _holder(targets)
        pids = [process.pid for process in tree.processes]
        tree.kill_all()
        clock.shift(-HOUR_S)
        try:
            due_at, app = boot_s() + 0.5, App(targets.cluster.url, schema=targets.schema)
            with closing(app):
                number = _FIRST_NUMBER + fault.number * _NUMBERS_EACH
                with targets.cluster.connection() as connection:
                    row = connection.execute("select clock_timestamp()").fetchone()
                assert row is not None
                arguments = {"number": number, "seconds": 0.0, "secret": CANARY}
                with _logged(targets.folder, fault, UNKNOWN, [number]) as ids:
                    handle = app.send_by_name(UNKNOWN, arguments, good_until=row[0] + timedelta(seconds=0.5))
                    ids.append(str(handle.id))
                detail: dict[str, object] = {"tree": tree.number, "pids": pids}
                yield detail
                detail["expired_after_s"] = None
                while boot_s() < due_at + EXPIRES_WITHIN_S and not targets.over.is_set():
                    if handle.info().state == "EXPIRED":
                        detail["expired_after_s"] = round(boot_s() - due_at, 2)
                        break
                    time.sleep(_LOOK_EVERY_S)  # the run polls from outside
        finally:
            clock.shift(0)
            tree.start()


def _holder(targets: LivenessTargets) -> Tree:
    deadline = boot_s() + _VICTIM_WITHIN_S
    query = sql.SQL(_HOLDERS).format(schema=sql.Identifier(targets.schema))
    while boot_s() < deadline and not targets.over.is_set():
        with suppress(psycopg.Error), targets.cluster.connection() as connection:
            for (pid,) in connection.execute(query).fetchall():
                for tree in targets.trees:
                    if tree.is_alive() and tree.lives[-1].pid == pid:
                        return tree
        time.sleep(_LOOK_EVERY_S)  # the run polls from outside
    raise LivenessFaultImpossible("no living tree holds a turn")


@contextmanager
def _logged(folder: Path, fault: Fault, name: str, numbers: Sequence[int]) -> Iterator[list[str]]:
    """Log sends in the format of a producer's log. Yield a list to which the block adds the ids of the tasks that it sends."""
    ids: list[str] = []
    with (folder / f"producer-fault-{fault.number}.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"intends": numbers, "names": [name] * len(numbers), "at": boot_s()}) + "\n")
        log.flush()
        try:
            yield ids
        finally:
            log.write(json.dumps({"sent": numbers[: len(ids)], "ids": ids, "at": boot_s()}) + "\n")


def orphans(folder: Path) -> list[tuple[int, float, int]]:
    """Return the pid, the start time and the worker's pid of each process that task code has forked so far."""
    path = folder / "forked.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["pid"], line["created"], line["worker"]) for line in lines]


def end_orphans(folder: Path) -> int:
    """Kill the remaining forked processes, each only if its start time matches. Return the number of killed processes."""
    ended = []
    for pid, created, _ in orphans(folder):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=_VICTIM_WITHIN_S)
    return len(ended)


LIVENESS_WAYS: Final[Mapping[Kind, Callable[[Fault, LivenessTargets], Held]]] = {
    Kind.READ_ONLY: _read_only,
    Kind.EXHAUST_CONNECTIONS: _exhaust,
    Kind.FREEZE_DATABASE: _freeze_database,
    Kind.PROMOTE: _promote,
    Kind.FORK: _fork,
    Kind.KILL_TURN_HOLDER: _kill_turn_holder,
}
