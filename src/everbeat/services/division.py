"""Recoveries that PostgreSQL refuses for their rows: the guilty one is left, its neighbours are recovered."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from uuid import UUID

from msgspec.structs import replace

from everbeat.store.division import divided
from everbeat.store.leases import Recovered, RecoveryOrder
from everbeat.store.refusals import is_refused_row, is_refused_value

_LONGEST_PROBLEM: Final = 500
_TRIES: Final = 3
_MOST_KNOWN: Final = 10_000
_log = logging.getLogger("everbeat.services")


class Division:
    """Carries out orders and remembers those that PostgreSQL refuses. `left` holds the claim ids of orders to leave as they are."""

    def __init__(self) -> None:
        self.left: set[UUID] = set()
        self._refusals: dict[UUID, int] = {}

    async def recover(
        self,
        orders: Sequence[RecoveryOrder],
        recover: Callable[[Sequence[RecoveryOrder]], Awaitable[list[Recovered]]],
    ) -> list[Recovered]:
        """Return what landed. An order with a value that is refused alone is changed to "fail": an ended row is in fewer indexes.

        One that is refused even so is left. So is one that is refused three times for another reason, such as an internal error of
        the server, which may pass.
        """

        async def write(some: Sequence[RecoveryOrder]) -> list[Recovered]:
            landed = await recover(some)
            for one in some if self._refusals else ():
                self._refusals.pop(one.claim_id, None)
                self.left.discard(one.claim_id)
            return landed

        async def refused(order: RecoveryOrder, problem: Exception) -> list[Recovered]:
            if is_refused_value(problem) and order.action != "fail":
                _log.error(
                    "recovery_refused task_id=%s problem=%s", order.id, str(problem)[:_LONGEST_PROBLEM]
                )
                failed = replace(order, action="fail", retry_in_ms=None, run_at=None, suspect=False)
                return await divided([failed], write, refused, is_refused=is_refused_row)
            self._note(order, problem)
            return []

        return await divided(orders, write, refused, is_refused=is_refused_row)

    def _note(self, order: RecoveryOrder, problem: Exception) -> None:
        if len(self._refusals) >= _MOST_KNOWN:
            self._refusals.clear()
            self.left.clear()
        tries = self._refusals[order.claim_id] = self._refusals.get(order.claim_id, 0) + 1
        if is_refused_value(problem) or tries >= _TRIES:
            if order.claim_id not in self.left:
                _log.error(
                    "recovery_left task_id=%s problem=%r fix=%r",
                    order.id,
                    str(problem)[:_LONGEST_PROBLEM],
                    "mend or delete this row of tasks; everbeat doctor names bad values (BAD_ROWS)",
                )
            self.left.add(order.claim_id)
