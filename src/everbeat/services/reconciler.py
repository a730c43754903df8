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
from everbeat.store.reconcile import GRACE_MS, PAGE, move_on
from everbeat.store.session import Run
from everbeat.store.workflow_control import StuckNode, forget, stuck

T = TypeVar("T")
_ONE_TRY: Final = 0.0
_LONGEST_INTERVAL_S: Final = 30.0
_BATCH: Final = 1_000
_AT_ONCE: Final = 20
"""Beats share this connection."""
_FIRST: Final = UUID(int=0)
_log = logging.getLogger("everbeat.services")


class WorkflowUnstuck(Event, frozen=True, kw_only=True):
    """Something should have happened in a workflow and had not; it has been done now."""

    room = "services"
    level = logging.WARNING
    workflow_id: UUID
    workflow: str
    node: str | None
    what: str


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
        self._found_before: set[StuckNode] = set()
        self._broken_before: set[UUID] = set()

    async def tick(self) -> float | None:
        """One pass."""
        turn = workers.take_turn(
            self.name, interval_ms=round(self.interval_s * 1_000), taken_by=self._observer.supervisor_id
        )
        if not await self._statements.run(turn, patience_s=_ONE_TRY):
            return None
        await self._statements.run(forget(limit=_BATCH), patience_s=_ONE_TRY)
        found_now: set[StuckNode] = set()
        broken_now: set[UUID] = set()
        after: UUID | None = _FIRST
        while after is not None:
            page = await self._statements.run(
                stuck(after=after, limit=PAGE, grace_ms=self._grace_ms), patience_s=_ONE_TRY
            )
            if page.found:
                broken_now |= await self._move_on(page.found)
                found_now.update(page.found)
            after = page.next_after
        self._found_before, self._broken_before = found_now, broken_now
        return None

    async def _move_on(self, found: Sequence[StuckNode]) -> set[UUID]:
        """Return the workflows that cannot go on. What the last pass found as well was not put right by it and is not told again."""
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
        for each in found:
            if each.workflow_id in broken or each in self._found_before:
                continue
            self._events.emit(
                WorkflowUnstuck(
                    workflow_id=each.workflow_id, workflow=each.workflow, node=each.node, what=each.what
                )
            )
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
