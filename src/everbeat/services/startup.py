"""Start-up reconciliation: recovers at once what is provably dead on this very machine.

What lives here: the proof and what follows. What may not: guesses; a host's name proves nothing.
"""

from __future__ import annotations

from everbeat.runtime.identity import ProcessIdentity
from everbeat.services.death import STARTUP, Death
from everbeat.services.observer import Observer, Statements
from everbeat.services.recovery import Recoverer
from everbeat.store import workers
from everbeat.store.workers import SupervisorOfBoot


async def reconcile(
    statements: Statements, *, recoverer: Recoverer, observer: Observer, identity: ProcessIdentity
) -> list[str]:
    """Ends the supervisors of this kernel and pid namespace whose process is gone; answers their ids."""
    if identity.boot_id is None or identity.pid_namespace is None:
        return []
    candidates = await statements.run(
        workers.supervisors_of_boot(
            observer.supervisor_id, boot_id=identity.boot_id, pid_namespace=str(identity.pid_namespace)
        )
    )
    ended = []
    for candidate in candidates:
        if not _process_of(candidate, identity).is_provably_gone():
            continue
        end = workers.end_supervisor(candidate.id, how=STARTUP, beat_seq=candidate.beat_seq)
        if not await statements.run(end):
            continue
        cause = f"its process {candidate.pid} is gone, seen by a supervisor that started on the same machine"
        bury = workers.bury_workers(supervisor_id=candidate.id, how=STARTUP, cause=cause)
        await statements.run(bury)
        await recoverer.recover_supervisor(candidate.id, Death(noticed_by=STARTUP, cause=cause))
        ended.append(candidate.id)
    return ended


def _process_of(candidate: SupervisorOfBoot, identity: ProcessIdentity) -> ProcessIdentity:
    return ProcessIdentity(
        hostname=candidate.hostname,
        pid=candidate.pid,
        boot_id=identity.boot_id,
        pid_namespace=identity.pid_namespace,
        start_ticks=candidate.process_started,
    )
