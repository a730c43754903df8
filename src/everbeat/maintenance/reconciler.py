"""Advance workflows in which an expected change did not happen, even though each event is announced in three ways."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar
from uuid import UUID

from everbeat.domain.plan import aperform
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.recovering.observer import ONE_TRY, RecoveryEnvironment, Statements
from everbeat.runtime.events import Event
from everbeat.store.batches import repair_batches
from everbeat.store.session import RunStatement
from everbeat.store.workflow_control import (
    GRACE_MS,
    PAGE,
    StuckNode,
    StuckPage,
    forget,
    move_on,
    problem_of,
    stuck,
)

T = TypeVar("T")
_LONGEST_INTERVAL_S: Final = 30.0
_BATCH: Final = 1_000
_AT_ONCE: Final = 20
"""A larger batch would block the supervisor's other statements on this connection."""
_FIRST: Final = UUID(int=0)
_NAMED: Final = 5
_log = logging.getLogger("everbeat.maintenance")


class WorkflowUnstuck(Event, frozen=True, kw_only=True):
    """A pass has made changes that were overdue in some workflows.

    `found` is the number of changes. `workflow_ids` and `first` name the first few of them.
    """

    component = "maintenance"
    level = logging.WARNING
    found: int
    workflow_ids: tuple[UUID, ...]
    first: tuple[str, ...]


class Transactions(Statements, Protocol):
    """Runs single statements, and several statements in one transaction."""

    async def transact(
        self, body: Callable[[RunStatement], Awaitable[T]], *, patience_s: float | None = None
    ) -> T: ...


class Reconciler:
    """A service in every supervisor that advances stuck workflows. Only one supervisor at a time does the work.

    A workflow that made progress in the last `grace_ms` milliseconds is left alone.
    """

    name = "reconciler"

    def __init__(
        self, environment: RecoveryEnvironment, *, transactions: Transactions, grace_ms: int = GRACE_MS
    ) -> None:
        self.interval_s = min(environment.config.check_interval_ms / 1_000, _LONGEST_INTERVAL_S)
        self._environment = environment
        self._transactions = transactions
        self._grace_ms = grace_ms
        self._broken_before: set[UUID] = set()

    async def tick(self) -> float | None:
        """Run one pass, unless it is another supervisor's turn."""
        if not await self._environment.take_turn(self.name, interval_s=self.interval_s):
            return None
        await self._environment.run_once(forget(limit=_BATCH))
        await self._environment.run_once(repair_batches(limit=_BATCH))
        broken_now: set[UUID] = set()
        after: UUID | None = _FIRST
        unstuck: list[StuckNode] = []
        try:
            while after is not None:
                page = await self._page(after)
                if page.found:
                    broken = await self._move_on(page.found)
                    still = await self._still(page, after, broken)
                    broken_now |= broken | {each.workflow_id for each in still}
                    unstuck += [
                        each for each in page.found if each.workflow_id not in broken and each not in still
                    ]
                after = page.next_after
        finally:
            self._report(unstuck)
        self._broken_before = broken_now
        return None

    async def _page(self, after: UUID) -> StuckPage:
        return await self._environment.run_once(stuck(after=after, limit=PAGE, grace_ms=self._grace_ms))

    async def _still(self, page: StuckPage, after: UUID, broken: set[UUID]) -> set[StuckNode]:
        """Return the nodes that are still stuck after a step of their workflow. A workflow that stays stuck is logged only once."""
        still = {*page.found}.intersection((await self._page(after)).found)
        first = {each.workflow_id: each for each in page.found if each in still}
        for one in first.keys() - self._broken_before - broken:
            each = first[one]
            problem = f"{each.what}{'' if each.node is None else f' of node {each.node}'}: {problem_of(each)}"
            _log.error("workflow_cannot_go_on workflow=%s error=%r", one, problem)
        return still

    def _report(self, unstuck: Sequence[StuckNode]) -> None:
        """Emit one event for the whole pass. After a period without workers, a pass finds overdue changes in every workflow."""
        if not unstuck:
            return
        first = unstuck[:_NAMED]
        named = tuple(
            f"{each.workflow}{'' if each.node is None else f'/{each.node}'}: {each.what}" for each in first
        )
        ids = tuple(dict.fromkeys(each.workflow_id for each in first))
        self._environment.events.emit(WorkflowUnstuck(found=len(unstuck), workflow_ids=ids, first=named))

    async def _move_on(self, found: Sequence[StuckNode]) -> set[UUID]:
        """Advance the workflows in batches. Return the ids of the workflows that cannot continue."""
        ids = sorted({each.workflow_id for each in found})
        broken: set[UUID] = set()
        for first in range(0, len(ids), _AT_ONCE):
            some = ids[first : first + _AT_ONCE]
            try:
                await self._transactions.transact(partial(self._moved_on, some), patience_s=ONE_TRY)
            except (DatabaseUnreachable, DatabaseReadOnly):
                raise
            except Exception:  # noqa: BLE001 - a workflow whose step fails must not block the others
                broken |= await self._one_by_one(some)
        return broken

    async def _one_by_one(self, ids: Sequence[UUID]) -> set[UUID]:
        """Advance each workflow separately. Return the ids of the workflows that cannot continue.

        A workflow that stays stuck is logged only once.
        """
        broken: set[UUID] = set()
        for one in ids:
            try:
                await self._transactions.transact(partial(self._moved_on, [one]), patience_s=ONE_TRY)
            except (DatabaseUnreachable, DatabaseReadOnly):
                raise
            except Exception as problem:  # noqa: BLE001 - as above
                broken.add(one)
                if one not in self._broken_before:
                    _log.error("workflow_cannot_go_on workflow=%s error=%r", one, str(problem)[:500])
        return broken

    async def _moved_on(self, ids: Sequence[UUID], run: RunStatement) -> None:
        await aperform(move_on(ids, channel=self._environment.channel), run)
