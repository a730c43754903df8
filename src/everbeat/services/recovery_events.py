"""The events of recoveries that landed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everbeat.runtime.events import Event, TaskRecovered
from everbeat.runtime.failure_log import task_failure
from everbeat.store.leases import Recovered, RecoveryOrder


def recovery_events(
    landed: Sequence[Recovered], orders: Sequence[RecoveryOrder], *, noticed_by: str
) -> Iterator[Event]:
    """Return one event for each recovery, and one more for each task that it ended FAILED."""
    errors = {order.id: order.error for order in orders}
    for one in landed:
        if one.action == "fail":
            yield task_failure(one.id, one.name, attempt=one.attempt, error=errors[one.id] or b"{}")
        yield TaskRecovered(
            task_id=one.id,
            name=one.name,
            from_state=one.was.value,
            action=one.action,
            cause=one.cause,
            noticed_by=noticed_by,
            noticed_after_s=(one.noticed_after_ms or 0) / 1_000,
        )
