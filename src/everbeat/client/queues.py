"""The queues of an installation: those with live tasks, and those that code, workers or operators know although they are empty."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from everbeat.domain.inspection import QueueInfo
from everbeat.store import diagnosis
from everbeat.store.plan import Plan, ask
from everbeat.store.statement import Statement


def listed_queues(
    counted: Statement[list[QueueInfo]], *, declared: Mapping[str, int], stale_ms: int
) -> Plan[list[QueueInfo]]:
    """Return the queues that were `counted`, and the empty ones that are declared, served by a live worker, paused or limited.

    `declared` has the priorities of the app's queues. A worker without a heartbeat for `stale_ms` is not considered live.
    """
    found = yield from ask(counted)
    known = yield from ask(diagnosis.known_queues(stale_ms=stale_ms))
    by_name = {name: QueueInfo(name=name) for name in (*declared, *known)}
    by_name |= {queue.name: queue for queue in found}
    listed = [structs.replace(queue, priority=declared.get(queue.name)) for queue in by_name.values()]
    return sorted(listed, key=lambda queue: (100 if queue.priority is None else queue.priority, queue.name))
