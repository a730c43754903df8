"""Count recoveries for `rates` and the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from everbeat.domain.series import RateCounter, RecoveredLease
from everbeat.recovering.orders import LostLease
from everbeat.store.leases import Recovered, RecoveryOrder


def count_recovered(
    rates: RateCounter,
    landed: Sequence[Recovered],
    batch: Sequence[LostLease],
    orders: Sequence[RecoveryOrder],
    *,
    noticed_by: str,
) -> None:
    """Count the leases that were recovered. `batch` contains them, and `orders` the decisions about them."""
    leases = {each.lease.id: each.lease for each in batch}
    poison = {order.id for order in orders if order.is_poison}
    for one in landed:
        lease = leases[one.id]
        if (how := one.attempt_result) is not None:
            rates.ended(lease.queue, lease.name, how)
        rates.events.recovered.append(
            RecoveredLease(
                task_id=one.id,
                fence=lease.fence,
                queue=lease.queue,
                name=lease.name,
                was=one.was.value,
                noticed_by=noticed_by,
                action=one.action,
                notice_s=(one.noticed_after_ms or 0) / 1_000,
                is_poison=one.id in poison,
            )
        )
