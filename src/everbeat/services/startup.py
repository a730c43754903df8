"""Start-up reconciliation: recovers at once what is provably dead on this very machine.

What lives here: what follows from a proof. What may not: the proofs (`proof`).
"""

from __future__ import annotations

import logging
from typing import Final

from everbeat.runtime import tree_lock
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.identity import ProcessIdentity, uptime_ms
from everbeat.services.death import STARTUP, Death
from everbeat.services.observer import Observer, Statements
from everbeat.services.proof import RETURN_S, Doubt, Proven, finding_on
from everbeat.services.recovery import Recoverer
from everbeat.store import workers
from everbeat.store.predecessors import Predecessor, ended_trees, predecessors

PATIENCE_S: Final = 3.0
"""How long a tree that is about to end is waited for: its last processes to go, PostgreSQL to notice that its sessions went."""
LOOK_EVERY_S: Final = 0.2
_log = logging.getLogger("everbeat.services")


class PredecessorsBuried(Event, frozen=True, kw_only=True):
    """Supervisors that this one found provably dead when it started, and how many of their tasks were recovered."""

    room = "services"
    level = logging.WARNING
    supervisor_ids: tuple[str, ...]
    tasks: int


class ReconciliationComplete(Event, frozen=True, kw_only=True):
    """What was provably dead when this supervisor started is settled; so many tasks were recovered."""

    room = "services"
    orphaned_count: int


class Reconciliation:
    """What one supervisor does once, when it starts."""

    def __init__(
        self,
        statements: Statements,
        *,
        recoverer: Recoverer,
        observer: Observer,
        identity: ProcessIdentity,
        events: EventBus,
        clock: Clock,
    ) -> None:
        self._statements = statements
        self._recoverer = recoverer
        self._observer = observer
        self._identity = identity
        self._events = events
        self._clock = clock
        self._buried: list[str] = []
        self._tasks = 0

    async def run(self) -> list[str]:
        """Ends the supervisors of this machine that are provably dead, and recovers what they held; answers their ids."""
        began_at, watched_s = self._clock.monotonic(), 0.0
        while watched_s < await self._look(watched_s):
            await self._clock.sleep(LOOK_EVERY_S)
            watched_s = self._clock.monotonic() - began_at
        if self._buried:
            self._events.emit(PredecessorsBuried(supervisor_ids=tuple(self._buried), tasks=self._tasks))
        await self._tidy_up()
        self._events.emit(ReconciliationComplete(orphaned_count=self._tasks))
        return self._buried

    async def _look(self, watched_s: float) -> float:
        """Bury the supervisors that are proven dead; answer until when to look again, in seconds after the first look."""
        identity, until_s = self._identity, 0.0
        candidates = predecessors(
            self._observer.supervisor_id, boot_id=identity.boot_id, machine_id=identity.machine_id
        )
        for candidate in await self._statements.run(candidates):
            match finding_on(candidate, identity=identity, uptime_ms=uptime_ms(), watched_s=watched_s):
                case Proven(cause):
                    await self._bury(candidate, cause)
                case Doubt.SOON:
                    until_s = max(until_s, PATIENCE_S)
                case Doubt.RETURNING:
                    until_s = max(until_s, RETURN_S + LOOK_EVERY_S)
                case Doubt.LIVES:
                    pass
        return until_s

    async def _bury(self, candidate: Predecessor, cause: str) -> None:
        try:
            tasks = await bury(self._statements, candidate, recoverer=self._recoverer, cause=cause)
        except Exception as problem:  # noqa: BLE001 - one that is refused keeps no other from being buried
            _log.error("burial_refused supervisor_id=%s problem=%s", candidate.id, problem)
            return
        if tasks is not None:
            self._buried.append(candidate.id)
            self._tasks += tasks

    async def _tidy_up(self) -> None:
        """Remove the lock files, in this user's folder, of trees whose supervisors have all ended, in any way.

        Files of dead trees that this database does not know are kept for a month, for supervisors of other databases.
        """
        files = tree_lock.lock_files()
        if not files:
            return
        for name in await self._statements.run(ended_trees(sorted(files))):
            tree_lock.remove_if_gone(str(files.pop(name)), name=name)
        for name, path in files.items():
            tree_lock.remove_if_forgotten(str(path), name=name)


async def bury(
    statements: Statements,
    candidate: Predecessor,
    *,
    recoverer: Recoverer,
    cause: str,
    noticed_by: str = STARTUP,
) -> int | None:
    """Ends a supervisor that is known to be dead, and its workers, and recovers what they held, until it lands.

    Answers how many tasks that were; None when somebody else ended it first, or when it gave a sign of life meanwhile.
    """
    end = workers.end_supervisor(
        candidate.id, how=noticed_by, beat_seq=candidate.beat_seq, session_at=candidate.session_at
    )
    if not await statements.run(end):
        return None
    await statements.run(workers.bury_workers(supervisor_id=candidate.id, how=noticed_by, cause=cause))
    return await recoverer.recover_supervisor(candidate.id, Death(noticed_by=noticed_by, cause=cause))
