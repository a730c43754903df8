"""The reconciler: workflows in which something should have happened and has not, though everybody who could do it is told in three ways.

What lives here: one pass over all live workflows, by whichever supervisor has the turn. What may not: what is done about them, which is
the same step as ever (`store.advance`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar
from uuid import UUID

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.events import Event, EventBus
from everbeat.services.observer import Observer, Statements
from everbeat.store import workers
from everbeat.store.plan import aperform
from everbeat.store.reconcile import GRACE_MS, PAGE, move_on, problem_of
from everbeat.store.session import Run
from everbeat.store.workflow_control import StuckNode, StuckPage, forget, stuck

T = TypeVar("T")
_ONE_TRY: Final = 0.0
_LONGEST_INTERVAL_S: Final = 30.0
_BATCH: Final = 1_000
_AT_ONCE: Final = 20
"""Beats share this connection."""
_FIRST: Final = UUID(int=0)
_NAMED: Final = 5
_log = logging.getLogger("everbeat.services")


class WorkflowUnstuck(Event, frozen=True, kw_only=True):
    """Something should have happened in workflows and had not; one pass has done it now.

    `found`: in how many places; `workflow_ids` and `first` name the first few of them.
    """

    room = "services"
    level = logging.WARNING
    found: int
    workflow_ids: tuple[UUID, ...]
    first: tuple[str, ...]


class Transactions(Statements, Protocol):
    """Runs statements, also several in one transaction."""

    async def transact(
        self, body: Callable[[Run], Awaitable[T]], *, patience_s: float | None = None
    ) -> T: ...


class Reconciler:
    """A service of every supervisor, of which one at a time has the turn. What moved within `grace_ms` is left alone."""

    name = "reconciler"

    def __init__(
        self,
        statements: Transactions,
        config: RecoveryConfig,
        *,
        channel: str,
        observer: Observer,
        events: EventBus,
        grace_ms: int = GRACE_MS,
    ) -> None:
        self.interval_s = min(config.check_interval_ms / 1_000, _LONGEST_INTERVAL_S)
        self._statements = statements
        self._channel = channel
        self._observer = observer
        self._events = events
        self._grace_ms = grace_ms
        self._broken_before: set[UUID] = set()

    async def tick(self) -> float | None:
        """One pass."""
        turn = workers.take_turn(
            self.name, interval_ms=round(self.interval_s * 1_000), taken_by=self._observer.supervisor_id
        )
        if not await self._statements.run(turn, patience_s=_ONE_TRY):
            return None
        await self._statements.run(forget(limit=_BATCH), patience_s=_ONE_TRY)
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
            self._tell(unstuck)
        self._broken_before = broken_now
        return None

    async def _page(self, after: UUID) -> StuckPage:
        return await self._statements.run(
            stuck(after=after, limit=PAGE, grace_ms=self._grace_ms), patience_s=_ONE_TRY
        )

    async def _still(self, page: StuckPage, after: UUID, broken: set[UUID]) -> set[StuckNode]:
        """Return what a step of its workflow did not change. Each such workflow is logged once for as long as that is so."""
        still = {*page.found}.intersection((await self._page(after)).found)
        first = {each.workflow_id: each for each in page.found if each in still}
        for one in first.keys() - self._broken_before - broken:
            each = first[one]
            problem = f"{each.what}{'' if each.node is None else f' of node {each.node}'}: {problem_of(each)}"
            _log.error("workflow_cannot_go_on workflow=%s error=%r", one, problem)
        return still

    def _tell(self, unstuck: Sequence[StuckNode]) -> None:
        """Once for a whole pass: after a time without workers it finds something in every workflow."""
        if not unstuck:
            return
        first = unstuck[:_NAMED]
        named = tuple(
            f"{each.workflow}{'' if each.node is None else f'/{each.node}'}: {each.what}" for each in first
        )
        ids = tuple(dict.fromkeys(each.workflow_id for each in first))
        self._events.emit(WorkflowUnstuck(found=len(unstuck), workflow_ids=ids, first=named))

    async def _move_on(self, found: Sequence[StuckNode]) -> set[UUID]:
        """Return the workflows that cannot go on."""
        ids = sorted({each.workflow_id for each in found})
        broken: set[UUID] = set()
        for first in range(0, len(ids), _AT_ONCE):
            some = ids[first : first + _AT_ONCE]
            try:
                await self._statements.transact(partial(self._moved_on, some), patience_s=_ONE_TRY)
            except (DatabaseUnreachable, DatabaseReadOnly):
                raise
            except Exception:  # noqa: BLE001 - one that cannot take its step must not keep all others from theirs
                broken |= await self._one_by_one(some)
        return broken

    async def _one_by_one(self, ids: Sequence[UUID]) -> set[UUID]:
        """Return those that cannot go on. Each is logged once for as long as it cannot."""
        broken: set[UUID] = set()
        for one in ids:
            try:
                await self._statements.transact(partial(self._moved_on, [one]), patience_s=_ONE_TRY)
            except (DatabaseUnreachable, DatabaseReadOnly):
                raise
            except Exception as problem:  # noqa: BLE001 - as above
                broken.add(one)
                if one not in self._broken_before:
                    _log.error("workflow_cannot_go_on workflow=%s error=%r", one, str(problem)[:500])
        return broken

    async def _moved_on(self, ids: Sequence[UUID], run: Run) -> None:
        await aperform(move_on(ids, channel=self._channel), run)
