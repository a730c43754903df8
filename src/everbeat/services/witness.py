"""The witness: among those that fell silent, it ends the ones that this very machine proves dead, and names those that it proves alive.

What lives here: asking for the proof and what follows from it. What may not: the proofs (`proof`), and judging silence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Final

from everbeat.runtime.identity import ProcessIdentity, uptime_ms
from everbeat.services.observer import Observer, Statements
from everbeat.services.proof import Proven, finding_on, lives_here
from everbeat.services.recovery import Recoverer
from everbeat.services.startup import bury
from everbeat.store.predecessors import Predecessor, predecessors

_ONE_TRY: Final = 0.0
_log = logging.getLogger("everbeat.services")


class Witness:
    """What one supervisor can say of others that are silent; of those on other machines it knows nothing.

    `proves_deaths`: whether it buries. It names the living in any case.
    """

    def __init__(
        self,
        statements: Statements,
        *,
        recoverer: Recoverer,
        observer: Observer,
        identity: ProcessIdentity,
        proves_deaths: bool = True,
    ) -> None:
        self._statements = statements
        self._recoverer = recoverer
        self._observer = observer
        self._identity = identity
        self._proves_deaths = proves_deaths

    async def bury_proven(self, silent_ids: Collection[str], *, noticed_by: str) -> set[str]:
        """End those of these supervisors that are provably dead, recover what they held, and return their ids.

        A proof or a burial that the database refuses proves nothing: it is logged, and the caller judges without it.
        """
        if not self._proves_deaths:
            return set()
        try:
            silent = await self._of_this_machine(silent_ids)
        except Exception as problem:  # noqa: BLE001 - a proof is a help; the judgement does without it
            _log.error("proof_refused problem=%s", problem)
            return set()
        return {each.id for each in silent if await self._is_buried(each, noticed_by=noticed_by)}

    async def _is_buried(self, candidate: Predecessor, *, noticed_by: str) -> bool:
        # The caller has watched the silence itself: of a session that was held here, or for a whole threshold.
        found = finding_on(candidate, identity=self._identity, uptime_ms=uptime_ms(), watched_s=math.inf)
        if not isinstance(found, Proven):
            return False
        try:
            tasks = await bury(
                self._statements,
                candidate,
                recoverer=self._recoverer,
                cause=found.cause,
                noticed_by=noticed_by,
            )
        except Exception as problem:  # noqa: BLE001 - one that is refused keeps no other from being buried
            _log.error("burial_refused supervisor_id=%s problem=%s", candidate.id, problem)
            return False
        return tasks is not None

    async def living(self, ids: Collection[str]) -> set[str]:
        """Return those of these supervisors that are not judged by their sessions: this machine proves that they live or are frozen."""
        return {each.id for each in await self._of_this_machine(ids) if self.sees(each)}

    def sees(self, candidate: Predecessor) -> bool:
        """Return whether this machine proves that `candidate` lives or is frozen."""
        return lives_here(candidate, identity=self._identity)

    async def _of_this_machine(self, ids: Collection[str]) -> list[Predecessor]:
        me = self._identity
        ask = predecessors(self._observer.supervisor_id, boot_id=me.boot_id, machine_id=me.machine_id)
        return [each for each in await self._statements.run(ask, patience_s=_ONE_TRY) if each.id in ids]
