"""Detect dead supervisors by evidence on this host, at startup and later, and take over a dead supervisor's slot."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from datetime import datetime
from enum import Enum, auto
from typing import Final

from msgspec import Struct

from everbeat.errors import DatabaseError
from everbeat.recovering.observer import Calm
from everbeat.recovering.orders import STARTUP, Death
from everbeat.recovering.recoverer import Recoverer
from everbeat.runtime.events import Event
from everbeat.runtime.identity import (
    ProcessIdentity,
    TreeVerdict,
    lock_files,
    remove_if_forgotten,
    remove_if_gone,
    uptime_ms,
    verdict_on,
)
from everbeat.store.workers import Predecessor, ended_trees, is_slot_race, predecessors, take_slot

RETURN_S: Final = 20.0
"""How long a living tree can take to reconnect to a replaced server, in seconds.

The tree waits up to 10 s for a reply and up to 5 s for a connection.
"""
PATIENCE_S: Final = 3.0
"""How long to wait for the last processes of a tree to exit and for PostgreSQL to notice the closed sessions, in seconds.

The holder of a slot also has this time to show that it is alive.
"""
CHECK_EVERY_S: Final = 0.2
SLOT_CHECK_EVERY_S: Final = 0.3
_log = logging.getLogger("everbeat.recovering")


class Doubt(Enum):
    """The reason why a supervisor is not proven dead."""

    LIVES = auto()
    """The supervisor is alive, or this machine cannot determine whether it is dead."""
    SOON = auto()
    """The supervisor's process is gone, but other processes or sessions of its tree remain.

    The tree is about to exit, or is alive on a copy of this machine.
    """
    RETURNING = auto()
    """The supervisor's session was lost when the server restarted or crashed.

    If the supervisor is alive, it reconnects within `RETURN_S` seconds.
    """


class Proven(Struct, frozen=True):
    """The supervisor is proven dead. `cause` describes the proof."""

    cause: str


def finding_on(
    candidate: Predecessor, *, identity: ProcessIdentity, uptime_ms: int | None, watched_s: float
) -> Proven | Doubt:
    """Return the proof of the process `identity` that `candidate` is dead, or the reason why there is none.

    `uptime_ms` is how long ago the process's machine was started. `watched_s` is how long the process has been able to reach the server
    since the server's last start.

    A session of the candidate's tree that PostgreSQL still shows outweighs every proof. A machine that was copied while it was running has
    the same boot id, processes and files as the original, which might be alive.
    """
    is_same_kernel = candidate.boot_id == identity.boot_id
    found = (
        _on_this_kernel(candidate, identity)
        if is_same_kernel
        else _before_this_boot(candidate, identity, uptime_ms, watched_s)
    )
    return Doubt.SOON if isinstance(found, Proven) and candidate.has_sessions else found


def lives_here(candidate: Predecessor, *, identity: ProcessIdentity) -> bool:
    """Return whether the machine of the process `identity` proves that `candidate` is alive or frozen.

    This is proven if the candidate's process is not provably gone and its lock file is held. If the lock file cannot be read, the process
    `identity` must be able to see the candidate's process.
    """
    if candidate.boot_id is None or candidate.boot_id != identity.boot_id:
        return False
    process = _process_of(candidate)
    if process.is_provably_gone():
        return False
    match _tree_of(candidate):
        case TreeVerdict.HELD:
            return True
        case TreeVerdict.GONE:
            return False
        case TreeVerdict.UNKNOWN:
            return _is_comparable(process, identity)


def _on_this_kernel(candidate: Predecessor, identity: ProcessIdentity) -> Proven | Doubt:
    process = _process_of(candidate)
    is_gone = process.is_provably_gone()
    match _tree_of(candidate):
        case TreeVerdict.HELD:
            return Doubt.SOON if is_gone else Doubt.LIVES
        case TreeVerdict.GONE if is_gone or not _is_comparable(process, identity):
            return Proven(
                f"its lock file is free: process {candidate.pid} and all it had started are gone, "
                "seen by a supervisor on the same machine"
            )
        case TreeVerdict.UNKNOWN if is_gone:
            return Proven(f"its process {candidate.pid} is gone, seen by a supervisor on the same machine")
        case _:
            return Doubt.LIVES


def _before_this_boot(
    candidate: Predecessor, identity: ProcessIdentity, uptime_ms: int | None, watched_s: float
) -> Proven | Doubt:
    """Return what can be concluded about a candidate if its machine has been restarted since.

    Machines that were created from the same image can have the same machine id, so there are further conditions. A supervisor is not
    proven dead if it has sent a heartbeat since this boot, or had no session that PostgreSQL could release. After a server
    restart or crash, the session is missing even if the tree is alive on another machine with the same image.
    """
    if candidate.machine_id is None or candidate.machine_id != identity.machine_id:
        return Doubt.LIVES
    if candidate.boot_id is None or uptime_ms is None or candidate.silent_ms < uptime_ms:
        return Doubt.LIVES
    if not candidate.session_held:
        return Doubt.LIVES
    if (not candidate.held_here or candidate.lost_in_crash) and watched_s < RETURN_S:
        return Doubt.RETURNING
    return Proven(f"its machine was restarted: process {candidate.pid} ran before this boot")


def _tree_of(candidate: Predecessor) -> TreeVerdict:
    if candidate.lock_file is None:
        return TreeVerdict.UNKNOWN
    return verdict_on(candidate.lock_file, name=candidate.session_name)


def _is_comparable(process: ProcessIdentity, identity: ProcessIdentity) -> bool:
    """Return whether the process `identity` would be able to see `process` if it existed."""
    return (
        process.start_ticks is not None
        and process.pid_namespace is not None
        and process.pid_namespace == identity.pid_namespace
    )


def _process_of(candidate: Predecessor) -> ProcessIdentity:
    namespace = candidate.pid_namespace
    return ProcessIdentity(
        hostname=candidate.hostname,
        pid=candidate.pid,
        boot_id=candidate.boot_id,
        pid_namespace=int(namespace) if namespace is not None and namespace.isdecimal() else None,
        start_ticks=candidate.process_started,
    )


class PredecessorsBuried(Event, frozen=True, kw_only=True):
    """At startup, this supervisor found other supervisors provably dead, and recovered `tasks` of their tasks."""

    component = "recovering"
    level = logging.WARNING
    supervisor_ids: tuple[str, ...]
    tasks: int


class ReconciliationComplete(Event, frozen=True, kw_only=True):
    """The startup reconciliation of this supervisor is complete. `orphaned_count` tasks were recovered."""

    component = "recovering"
    orphaned_count: int


class Witness:
    """Proves that other supervisors are dead or alive, from the processes and lock files of its own host.

    If `proves_deaths` is false, it only recognizes living supervisors, and never declares one dead.
    """

    def __init__(
        self, recoverer: Recoverer, *, identity: ProcessIdentity, proves_deaths: bool = True
    ) -> None:
        self._environment = recoverer.environment
        self._recoverer = recoverer
        self._identity = identity
        self._proves_deaths = proves_deaths

    async def bury_proven(self, silent_ids: Collection[str], *, noticed_by: str) -> set[str]:
        """Find the supervisors in `silent_ids` that are provably dead, declare them dead, and recover their leases. Return their ids.

        If the database rejects a statement, the error is logged and the supervisor does not count as dead. The caller must then judge it
        without proof.
        """
        if not self._proves_deaths:
            return set()
        try:
            silent = await self._of_this_machine(silent_ids)
        except Exception as problem:  # noqa: BLE001 - the caller can judge without a proof
            _log.error("proof_refused problem=%s", problem)
            return set()
        buried = set[str]()
        for each in silent:
            # The caller has observed the silence itself, either of a session on this server or for a whole threshold.
            found = finding_on(each, identity=self._identity, uptime_ms=uptime_ms(), watched_s=math.inf)
            if (
                isinstance(found, Proven)
                and await _bury(self._recoverer, each, found, noticed_by=noticed_by) is not None
            ):
                buried.add(each.id)
        return buried

    async def bury_all_proven(self, *, noticed_by: str) -> None:
        """Declare all supervisors of this machine dead that are provably dead, and recover their leases.

        The caller has not observed their silence. So after a restart of the server, only the processes on this machine are proof.
        """
        if not self._proves_deaths:
            return
        for each in await self._of_this_machine(None):
            found = finding_on(each, identity=self._identity, uptime_ms=uptime_ms(), watched_s=0.0)
            if isinstance(found, Proven):
                await _bury(self._recoverer, each, found, noticed_by=noticed_by)

    async def living(self, ids: Collection[str]) -> set[str]:
        """Return the subset of `ids` whose supervisors this machine proves to be alive or frozen.

        These supervisors must not be judged by their sessions.
        """
        return {each.id for each in await self._of_this_machine(ids) if self.sees(each)}

    def sees(self, candidate: Predecessor) -> bool:
        """Return whether this machine proves that `candidate` is alive or frozen."""
        return lives_here(candidate, identity=self._identity)

    async def _of_this_machine(self, ids: Collection[str] | None) -> list[Predecessor]:
        me = self._environment.observer.supervisor_id
        query = predecessors(me, boot_id=self._identity.boot_id, machine_id=self._identity.machine_id)
        return [each for each in await self._environment.run_once(query) if ids is None or each.id in ids]


async def _bury(
    recoverer: Recoverer, candidate: Predecessor, proof: Proven, *, noticed_by: str = STARTUP
) -> int | None:
    """Call `Recoverer.bury_supervisor`. On a database error, log it and return None, so that other supervisors are not blocked."""
    try:
        return await recoverer.bury_supervisor(
            candidate.id,
            Death(noticed_by=noticed_by, cause=proof.cause),
            beat_seq=candidate.beat_seq,
            session_at=candidate.session_at,
        )
    except Exception as problem:  # noqa: BLE001 - see above
        _log.error("burial_refused supervisor_id=%s problem=%s", candidate.id, problem)
        return None


class Reconciliation:
    """Recovers the leases of supervisors that this host proves dead. It runs once, when a supervisor starts."""

    def __init__(self, recoverer: Recoverer, *, identity: ProcessIdentity) -> None:
        self._environment = recoverer.environment
        self._recoverer = recoverer
        self._identity = identity
        self._buried: list[str] = []
        self._tasks = 0

    async def run(self) -> list[str]:
        """Find the supervisors of this machine that are provably dead, declare them dead, and recover their leases. Return their ids."""
        clock, emit = self._environment.clock, self._environment.events.emit
        began_at, watched_s = clock.monotonic(), 0.0
        while watched_s < await self._check(watched_s):
            await clock.sleep(CHECK_EVERY_S)
            watched_s = clock.monotonic() - began_at
        if self._buried:
            emit(PredecessorsBuried(supervisor_ids=tuple(self._buried), tasks=self._tasks))
        await self._tidy_up()
        emit(ReconciliationComplete(orphaned_count=self._tasks))
        return self._buried

    async def _check(self, watched_s: float) -> float:
        """Declare all supervisors dead for which there is proof. Return how many seconds after the first check to stop checking."""
        identity, until_s = self._identity, 0.0
        me = self._environment.observer.supervisor_id
        candidates = predecessors(me, boot_id=identity.boot_id, machine_id=identity.machine_id)
        for candidate in await self._environment.statements.run(candidates):
            match finding_on(candidate, identity=identity, uptime_ms=uptime_ms(), watched_s=watched_s):
                case Proven() as proof:
                    tasks = await _bury(self._recoverer, candidate, proof)
                    if tasks is not None:
                        self._buried.append(candidate.id)
                        self._tasks += tasks
                case Doubt.SOON:
                    until_s = max(until_s, PATIENCE_S)
                case Doubt.RETURNING:
                    until_s = max(until_s, RETURN_S + CHECK_EVERY_S)
                case Doubt.LIVES:
                    pass
        return until_s

    async def _tidy_up(self) -> None:
        """Remove the lock files in this user's folder whose trees have no supervisor left.

        Lock files of dead trees that are not in this database are kept for a month, because they might belong to other databases.
        """
        files = lock_files()
        if not files:
            return
        for name in await self._environment.statements.run(ended_trees(sorted(files))):
            remove_if_gone(str(files.pop(name)), name=name)
        for name, path in files.items():
            remove_if_forgotten(str(path), name=name)


class SlotTaken(Event, frozen=True, kw_only=True):
    """Another supervisor has the slot and seems to be alive. This supervisor works without the slot and tries again periodically."""

    component = "recovering"
    level = logging.ERROR
    slot: str
    holder: str
    hostname: str
    pid: int
    fix: str


class SlotHeld(Event, frozen=True, kw_only=True):
    """This supervisor has taken the slot."""

    component = "recovering"
    slot: str
    supervisor_id: str


class SlotKeeper:
    """A service that takes a supervisor's slot, such as the name of a pod in a stateful set. A slot has at most one living holder.

    The previous holder is declared dead if, at two checks in a row, its session lock is released and its tree has no connection. It
    gets no grace period, because the operator asserts that a slot has one holder. An exception is a recent loss of sessions by this
    observer or by the server.

    Behind a transaction pooler, sessions prove nothing, so the age of heartbeats decides. Age also decides for a holder that this
    machine proves to be alive.
    """

    name = "slot"

    def __init__(self, recoverer: Recoverer, *, slot: str, witness: Witness) -> None:
        environment = recoverer.environment
        self.interval_s = environment.config.check_interval_ms / 1_000
        self._environment = environment
        self._recoverer = recoverer
        self._observer = environment.observer
        self._slot = slot
        self._witness = witness
        self._held_as: str | None = None
        self._wanted_since: float | None = None
        self._is_reported = False
        self._gone: dict[str, datetime] = {}
        self._calm = Calm(environment.observer)

    async def tick(self) -> float | None:
        """Try once to take the slot. Return a short wait while the previous holder might be about to exit, else None."""
        me = self._observer.supervisor_id
        if self._held_as == me:
            return None
        now = self._environment.clock.monotonic()
        since = self._wanted_since = now if self._wanted_since is None else self._wanted_since
        holders = await self._holders(me)
        self._calm.record(now)
        if any(self._may_return(holder, at=now) for holder in holders):
            since = self._wanted_since = now
        for holder in await self._vanished(holders, at=now):
            cause = f"its session ended, and slot {self._slot!r} was taken over by {me}"
            await self._recoverer.bury_supervisor(
                holder.id,
                Death(noticed_by=STARTUP, cause=cause),
                beat_seq=holder.beat_seq,
                session_at=holder.session_at,
            )
        if await self._take(me):
            return None
        if now - since < PATIENCE_S:
            return SLOT_CHECK_EVERY_S
        self._report(holders)
        return None

    async def _holders(self, me: str) -> list[Predecessor]:
        query = predecessors(me, boot_id=None, machine_id=None, slot=self._slot)
        return [each for each in await self._environment.statements.run(query) if each.slot == self._slot]

    def _may_return(self, holder: Predecessor, *, at: float) -> bool:
        return not holder.has_sessions and self._calm.covers(lost_in_crash=holder.lost_in_crash, at=at)

    async def _vanished(self, holders: Sequence[Predecessor], *, at: float) -> list[Predecessor]:
        """Return the holders whose sessions are missing now and were missing at the last check, while the server accepts connections."""
        before, self._gone = self._gone, {}
        if self._observer.is_pooled:
            return []
        for holder in holders:
            # A session that was opened before a server restart is missing whether or not the holder is alive.
            is_missing = holder.held_here and not holder.has_sessions
            if is_missing and not self._may_return(holder, at=at) and not self._witness.sees(holder):
                self._gone[holder.id] = holder.session_at
        if self._gone and not await self._observer.can_connect():
            self._gone = {}  # a living holder could not reconnect either
        return [each for each in holders if each.id in self._gone and before.get(each.id) == each.session_at]

    async def _take(self, me: str) -> bool:
        try:
            if not await self._environment.statements.run(take_slot(me, self._slot)):
                return False
        except DatabaseError as problem:
            if is_slot_race(problem):
                return False
            raise
        self._held_as, self._wanted_since, self._is_reported = me, None, False
        self._environment.events.emit(SlotHeld(slot=self._slot, supervisor_id=me))
        return True

    def _report(self, holders: Sequence[Predecessor]) -> None:
        if self._is_reported or not holders:
            return
        self._is_reported = True
        holder = holders[0]
        self._environment.events.emit(
            SlotTaken(
                slot=self._slot,
                holder=holder.id,
                hostname=holder.hostname,
                pid=holder.pid,
                fix="give each supervisor that runs at the same time its own slot",
            )
        )
