"""Recoveries that PostgreSQL refuses for their data: the guilty one ends FAILED, its neighbours are recovered."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec.structs import replace

from everbeat.store.division import divided
from everbeat.store.leases import Recovered, RecoveryOrder
from everbeat.store.refusals import is_refused_value

_LONGEST_PROBLEM: Final = 500
_log = logging.getLogger("everbeat.services")


async def recovered_divided(
    orders: Sequence[RecoveryOrder],
    recover: Callable[[Sequence[RecoveryOrder]], Awaitable[list[Recovered]]],
) -> list[Recovered]:
    """Return what landed. An order that is refused alone is changed to "fail", because an ended row is in fewer indexes."""

    async def refused(order: RecoveryOrder, problem: Exception) -> list[Recovered]:
        if not is_refused_value(problem):
            raise problem  # an internal error may pass: the next pass tries the same order
        _log.error("recovery_refused task_id=%s problem=%s", order.id, str(problem)[:_LONGEST_PROBLEM])
        if order.action == "fail":
            return []
        failed = replace(order, action="fail", retry_in_ms=None, run_at=None, suspect=False)
        return await recovered_divided([failed], recover)

    return await divided(orders, recover, refused)
