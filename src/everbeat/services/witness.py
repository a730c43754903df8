"""The witness: among those that fell silent, it ends the ones that this very machine proves dead.

What lives here: asking for the proof and what follows from it. What may not: the proofs (`proof`), and judging silence.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from everbeat.runtime.identity import ProcessIdentity, uptime_ms
from everbeat.services.observer import Observer, Statements
from everbeat.services.proof import Proven, finding_on
from everbeat.services.recovery import Recoverer
from everbeat.services.startup import bury
from everbeat.store.predecessors import predecessors

_ONE_TRY: Final = 0.0


class Witness:
    """What one supervisor can say of others that are silent; of those on other machines it knows nothing."""

    def __init__(
        self, statements: Statements, *, recoverer: Recoverer, observer: Observer, identity: ProcessIdentity
    ) -> None:
        self._statements = statements
        self._recoverer = recoverer
        self._observer = observer
        self._identity = identity

    async def bury_proven(self, silent_ids: Collection[str], *, noticed_by: str) -> set[str]:
        """Ends those of these supervisors that are provably dead, and recovers what they held; answers their ids."""
        me = self._identity
        ask = predecessors(self._observer.supervisor_id, boot_id=me.boot_id, machine_id=me.machine_id)
        buried: set[str] = set()
        for candidate in await self._statements.run(ask, patience_s=_ONE_TRY):
            if candidate.id not in silent_ids:
                continue
            # The caller has watched the silence itself: of a session that was held here, or for a whole threshold.
            found = finding_on(candidate, identity=me, uptime_ms=uptime_ms(), watched_s=math.inf)
            if not isinstance(found, Proven):
                continue
            tasks = await bury(
                self._statements,
                candidate,
                recoverer=self._recoverer,
                cause=found.cause,
                noticed_by=noticed_by,
            )
            if tasks is not None:
                buried.add(candidate.id)
        return buried
