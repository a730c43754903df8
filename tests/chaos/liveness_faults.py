"""How the later kinds of faults are done, and how they are healed: phases of the database in which the living must stay alive, promotions,
code that forks, and a clock that is set back under whoever holds a turn.

What lives here: one function a kind. What may not: when, and what follows.
"""

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
"""Tasks that fork, for each such fault."""
UNKNOWN: Final = "known_to_nobody"
EXPIRES_WITHIN_S: Final = 15.0
"""A task must be expired so long after its time while the clock is back, whoever died: 3 x the turn and a check."""

_FORK_SECONDS: Final = 6.0
_FIRST_NUMBER: Final = 2_000_000_000
_NUMBERS_EACH: Final = 100
_VICTIM_WITHIN_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.05
_HOLDERS: Final = """
    select s.pid from {schema}.turns t join {schema}.supervisors s on s.id = t.taken_by
    where s.ended_at is null order by t.service = 'expirer' desc, t.taken_at desc
"""


class NothingToStrike(Exception):
    """Nobody was there to be struck, or the fault cannot be done here; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What these faults strike. `folder` is the run's, `schema` everbeat's; `server` is held by a fault of the whole server."""

    cluster: Cluster
    trees: Sequence[Tree]
    folder: Path
    schema: str
    over: threading.Event
    server: threading.Lock


def _read_only(fault: Fault, struck: Struck) -> Held:
    with struck.server:
        struck.cluster.set_read_only(True)
        told: dict[str, object] = {}
        if fault.amount:
            told["sessions"] = struck.cluster.terminate_sessions()
        try:
            yield told
        finally:
            struck.cluster.set_read_only(False)


def _exhaust(fault: Fault, struck: Struck) -> Held:
    with struck.server, _strangers(struck.cluster) as taken:
        told: dict[str, object] = {}
        yield told
        told["connections"] = len(taken)


@contextmanager
def _strangers(cluster: Cluster) -> Iterator[list[Connection[Any]]]:
    """They take every connection, those of whoever had one before included, and keep them."""
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


def _freeze_database(fault: Fault, struck: Struck) -> Held:
    with struck.server, struck.cluster.frozen():
        yield {}


def _promote(fault: Fault, struck: Struck) -> Held:
    cluster = struck.cluster
    with struck.server:
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


def _fork(fault: Fault, struck: Struck) -> Held:
    """A tree is killed whose task has forked; the forked child lives on."""
    first = _FIRST_NUMBER + fault.number * _NUMBERS_EACH
    known = set(orphans(struck.folder))
    with closing(App(struck.cluster.url, schema=struck.schema)) as app:
        arguments = [
            {"number": first + one, "seconds": _FORK_SECONDS, "secret": CANARY} for one in range(FORKS)
        ]
        with _logged(struck.folder, fault, "forks", [first + one for one in range(FORKS)]) as ids:
            ids += [str(app.send_by_name("forks", one).id) for one in arguments]
    give_up = boot_s() + _VICTIM_WITHIN_S
    while boot_s() < give_up and not struck.over.is_set():
        for tree in struck.trees:
            workers = {process.pid for process in tree.workers}
            if any(worker in workers for _, _, worker in set(orphans(struck.folder)) - known):
                spared = {pid for pid, _, _ in orphans(struck.folder)}
                pids = [process.pid for process in tree.processes if process.pid not in spared]
                tree.kill_all(sparing=spared)
                yield {"tree": tree.number, "pids": pids, "orphans": sorted(spared)}
                tree.start()
                return
        time.sleep(_LOOK_EVERY_S)  # the run looks from outside
    raise NothingToStrike("no task forked in time")


def _kill_turn_holder(fault: Fault, struck: Struck) -> Held:
    """The tree that holds turns dies, and the clock is set back an hour; what is due then must be done all the same."""
    clock = struck.cluster.clock
    if clock.obstacle:
        raise NothingToStrike(clock.obstacle)
    with struck.server:
        tree = _holder(struck)
        pids = [process.pid for process in tree.processes]
        tree.kill_all()
        clock.shift(-HOUR_S)
        try:
            due_at, app = boot_s() + 0.5, App(struck.cluster.url, schema=struck.schema)
            with closing(app):
                number = _FIRST_NUMBER + fault.number * _NUMBERS_EACH
                with struck.cluster.connection() as connection:
                    row = connection.execute("select clock_timestamp()").fetchone()
                assert row is not None
                arguments = {"number": number, "seconds": 0.0, "secret": CANARY}
                with _logged(struck.folder, fault, UNKNOWN, [number]) as ids:
                    handle = app.send_by_name(UNKNOWN, arguments, good_until=row[0] + timedelta(seconds=0.5))
                    ids.append(str(handle.id))
                told: dict[str, object] = {"tree": tree.number, "pids": pids}
                yield told
                told["expired_after_s"] = None
                while boot_s() < due_at + EXPIRES_WITHIN_S and not struck.over.is_set():
                    if handle.info().state == "EXPIRED":
                        told["expired_after_s"] = round(boot_s() - due_at, 2)
                        break
                    time.sleep(_LOOK_EVERY_S)  # the run looks from outside
        finally:
            clock.shift(0)
            tree.start()


def _holder(struck: Struck) -> Tree:
    give_up = boot_s() + _VICTIM_WITHIN_S
    query = sql.SQL(_HOLDERS).format(schema=sql.Identifier(struck.schema))
    while boot_s() < give_up and not struck.over.is_set():
        with suppress(psycopg.Error), struck.cluster.connection() as connection:
            for (pid,) in connection.execute(query).fetchall():
                for tree in struck.trees:
                    if tree.is_alive() and tree.lives[-1].pid == pid:
                        return tree
        time.sleep(_LOOK_EVERY_S)  # the run looks from outside
    raise NothingToStrike("no living tree holds a turn")


@contextmanager
def _logged(folder: Path, fault: Fault, name: str, numbers: Sequence[int]) -> Iterator[list[str]]:
    """The block adds the ids of what it sent; the log is like that of a producer."""
    ids: list[str] = []
    with (folder / f"producer-fault-{fault.number}.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"intends": numbers, "names": [name] * len(numbers), "at": boot_s()}) + "\n")
        log.flush()
        try:
            yield ids
        finally:
            log.write(json.dumps({"sent": numbers[: len(ids)], "ids": ids, "at": boot_s()}) + "\n")


def orphans(folder: Path) -> list[tuple[int, float, int]]:
    """The processes that task code has forked so far: pid, when it began, and the pid of the worker."""
    path = folder / "forked.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["pid"], line["created"], line["worker"]) for line in lines]


def end_orphans(folder: Path) -> int:
    """Kills those that still live, each by its pid and only if it is the very process; answers how many."""
    ended = []
    for pid, created, _ in orphans(folder):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=_VICTIM_WITHIN_S)
    return len(ended)


LIVENESS_WAYS: Final[Mapping[Kind, Callable[[Fault, Struck], Held]]] = {
    Kind.READ_ONLY: _read_only,
    Kind.EXHAUST_CONNECTIONS: _exhaust,
    Kind.FREEZE_DATABASE: _freeze_database,
    Kind.PROMOTE: _promote,
    Kind.FORK: _fork,
    Kind.KILL_TURN_HOLDER: _kill_turn_holder,
}
