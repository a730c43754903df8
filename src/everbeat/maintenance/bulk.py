"""Carry out bulk actions in portions, each in one transaction that acts and records how far the action has come."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

from msgspec import Struct, structs

from everbeat.domain.bulk_actions import BulkState, BulkVerb, SkippedTask
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.maintenance.cleanup import SpareStatements
from everbeat.maintenance.reconciler import Transactions
from everbeat.recovering.observer import ONE_TRY, RecoveryEnvironment
from everbeat.runtime.events import Event
from everbeat.store import audit, bulk, steps, tasks
from everbeat.store.bulk import Acted, BulkOrder
from everbeat.store.refusals import is_timeout
from everbeat.store.session import RunStatement

T = TypeVar("T")
LARGEST_PORTION: Final = 500
"""How many tasks one portion changes."""
IDLE_S: Final = 4.0
"""How long it takes until a new action is noticed."""
LEAST_REST_MS: Final = 20
LOCKED_REST_MS: Final = 500
_FAILED_REST_MS: Final = 1_000
MOST_WAITS: Final = 120
"""How many portions in a row can find all of the remaining tasks locked. The action then skips these tasks."""
MOST_LOCKED: Final = 2_000
MOST_FAILURES: Final = 30
"""How many portions in a row can fail. A portion of one task is skipped after a few failures, so more of them are not about one task."""
_SKIP_AFTER: Final = 10
"""After this many failures, a portion consists of one task: 500 is halved nine times."""
_MOST_EXAMPLES: Final = 10
_LONGEST_PROBLEM: Final = 500
_PRUNED_EVERY_S: Final = 3_600.0
_PRUNED_ROWS: Final = 1_000


class BulkActionEnded(Event, frozen=True, kw_only=True):
    """A bulk action has ended. `done` and `skipped` are numbers of tasks."""

    component = "maintenance"
    action_id: UUID
    action: str
    state: str
    requested_by: str
    matched: int
    done: int
    skipped: int


class BulkPortionFailed(Event, frozen=True, kw_only=True):
    """A portion of a bulk action failed and changed nothing. It is repeated with half as many tasks."""

    component = "maintenance"
    level = logging.WARNING
    action_id: UUID
    action: str
    failures: int
    problem: str


class SpareTransactions(SpareStatements, Transactions, Protocol):
    """Runs statements and transactions on a separate connection, so that a long portion does not delay a heartbeat."""


class _Portion(Struct, frozen=True):
    """The result of a portion: the action before it and after it, and its state.

    `families` are the tasks whose children are to be cancelled. `rest_ms` is the rest until the next portion, in milliseconds.
    """

    before: BulkOrder
    after: BulkOrder
    state: BulkState
    families: Sequence[UUID] = ()
    rest_ms: int = LEAST_REST_MS


class BulkActor:
    """A service in every supervisor that carries out bulk actions.

    All supervisors do the work. A portion locks the row of its action, so two supervisors never carry out the same portion, and another one
    continues if a supervisor dies. `pace_s` returns the least time between two checks: in a large cluster, most supervisors check seldom.
    """

    name = "bulk_actions"
    interval_s = IDLE_S

    def __init__(
        self,
        environment: RecoveryEnvironment,
        *,
        open_spare: Callable[[], SpareTransactions],
        pace_s: Callable[[], float] = lambda: 0.0,
        portion: int = LARGEST_PORTION,
    ) -> None:
        self._environment = environment
        self._open_spare = open_spare
        self._pace_s = pace_s
        self._largest = portion
        self._taken: BulkOrder | None = None
        self._pruned_at: float | None = None

    async def tick(self) -> float | None:
        """Carry out the portions that are due, until no action has any."""
        await self._prune()
        if await self._environment.run_once(bulk.is_due()):
            spare = self._open_spare()
            try:
                while (portion := await self._carry_out(spare)) is not None:
                    await self._environment.clock.sleep(portion.rest_ms / 1_000)
            finally:
                await spare.drop()
        return max(IDLE_S, self._pace_s()) * self._environment.random.uniform(0.8, 1.0)

    async def _prune(self) -> None:
        """Delete old rows of the audit log, once per hour."""
        now = self._environment.clock.monotonic()
        if self._pruned_at is not None and now - self._pruned_at < _PRUNED_EVERY_S:
            return
        if await self._environment.run_once(audit.prune(limit=_PRUNED_ROWS)) < _PRUNED_ROWS:
            self._pruned_at = now

    async def _carry_out(self, spare: SpareTransactions) -> _Portion | None:
        """Carry out one portion, and return it. Return None if no portion is due, or another supervisor is carrying it out."""
        self._taken = None
        try:
            portion = await spare.transact(self._portion, patience_s=ONE_TRY)
            if portion is not None:
                for task_id in portion.families:
                    await self._cancel_family(spare, portion.after.id, task_id)
        except Exception as problem:
            if self._taken is None or (
                isinstance(problem, DatabaseUnreachable | DatabaseReadOnly) and not is_timeout(problem)
            ):
                raise
            await self._record_failure(spare, self._taken, problem)
            return _Portion(self._taken, self._taken, BulkState.RUNNING, rest_ms=_FAILED_REST_MS)
        if portion is not None and portion.state.has_ended:
            self._report(portion)
        return portion

    async def _portion(self, run: RunStatement) -> _Portion | None:
        order = await run(bulk.take())
        if order is None:
            return None
        self._taken = order
        if order.families:  # a supervisor died before it had cancelled the children
            return _Portion(order, order, BulkState.RUNNING, order.families)
        if order.is_cancelled:
            return await self._recorded(run, order, order, BulkState.CANCELLED)
        began = self._environment.clock.monotonic()
        if order.is_walked or len(order.locked) >= MOST_LOCKED:
            after, families = await self._try_locked(run, order)
        else:
            after, families = await self._walk(run, order)
        is_over = after.is_walked and not after.locked and not after.families
        took_ms = round((self._environment.clock.monotonic() - began) * 1_000)
        rest_ms = LOCKED_REST_MS if after.waits > order.waits else max(LEAST_REST_MS, took_ms // 2)
        state = BulkState.COMPLETED if is_over else BulkState.RUNNING
        return await self._recorded(run, order, after, state, rest_ms=rest_ms, families=families)

    async def _recorded(
        self,
        run: RunStatement,
        before: BulkOrder,
        after: BulkOrder,
        state: BulkState,
        *,
        rest_ms: int = 0,
        families: Sequence[UUID] = (),
    ) -> _Portion:
        by = self._environment.observer.supervisor_id
        await run(bulk.record_portion(after, state=state, by=by, rest_ms=rest_ms))
        return _Portion(before, after, state, families, rest_ms)

    async def _walk(self, run: RunStatement, order: BulkOrder) -> tuple[BulkOrder, Sequence[UUID]]:
        """Find the next tasks, and act on them."""
        size = min(order.portion, self._largest)
        walked = await run(
            bulk.find(
                order.action,
                filters=bulk.parameters_of(order.filters),
                parameters=order.parameters,
                requested_at=order.requested_at,
                after=order.position,
                acted=size,
            )
        )
        refused = [SkippedTask(task_id, reason) for task_id, reason in walked.refused]
        after = structs.replace(
            order,
            position=walked.position or order.position,
            is_walked=walked.is_over,
            examined=order.examined + walked.examined,
            matched=order.matched + len(walked.ids) + len(refused),
            problem=None,
            waits=0,
        )
        after = _skipping(after, refused)
        if not walked.ids:
            return after, ()
        if order.failures >= _SKIP_AFTER and len(walked.ids) == 1:
            skipped = [SkippedTask(walked.ids[0], "REFUSED", order.problem)]
            return _skipping(after, skipped), ()
        acted = await self._act(run, order, walked.ids)
        left = sorted({*walked.ids} - {each.id for each in acted})
        return self._counted(structs.replace(after, locked=[*order.locked, *left]), acted)

    async def _try_locked(self, run: RunStatement, order: BulkOrder) -> tuple[BulkOrder, Sequence[UUID]]:
        """Act on the tasks that were locked when the walk passed them. Skip them if they stay locked for too long."""
        ids = order.locked[: min(order.portion, self._largest)]
        rest = order.locked[len(ids) :]
        if order.failures >= _SKIP_AFTER and len(ids) == 1:
            skipped = [SkippedTask(ids[0], "REFUSED", order.problem)]
            return _skipping(structs.replace(order, locked=rest, problem=None), skipped), ()
        acted = await self._act(run, order, ids)
        left = sorted({*ids} - {each.id for each in acted})
        waits = order.waits + 1 if not acted else 0
        after = structs.replace(order, locked=[*rest, *left], waits=waits, problem=None)
        if waits < MOST_WAITS:
            return self._counted(after, acted)
        return _skipping(
            structs.replace(after, locked=(), waits=0), [SkippedTask(each, "LOCKED") for each in after.locked]
        ), ()

    async def _act(self, run: RunStatement, order: BulkOrder, ids: Sequence[UUID]) -> list[Acted]:
        if order.action is BulkVerb.RETRY:
            await run(bulk.recall(ids))
        acted: list[Acted] = await run(
            bulk.act(
                order.action,
                ids,
                call=order.id,
                parameters=order.parameters,
                channel=self._environment.channel,
                requested_at=order.requested_at,
                states=bulk.parameters_of(order.filters)["states"],
            )
        )
        missing = sorted({*ids} - {each.id for each in acted})
        if not missing:
            return acted
        there = set(await run(bulk.existing(order.action, missing)))
        return [*acted, *(Acted(each, "CHANGED") for each in missing if each not in there)]

    def _counted(self, order: BulkOrder, acted: Sequence[Acted]) -> tuple[BulkOrder, Sequence[UUID]]:
        families = [each.id for each in acted if each.has_family and each.refusal is None]
        refused = [SkippedTask(each.id, each.refusal) for each in acted if each.refusal is not None]
        done = order.done + len(acted) - len(refused)
        grown = min(self._largest, order.portion * 2)
        return _skipping(
            structs.replace(order, done=done, families=families, portion=grown), refused
        ), families

    async def _cancel_family(self, spare: SpareTransactions, action_id: UUID, task_id: UUID) -> None:
        """Cancel the children of a task, and then the workflows that the task and its children started, as a cancel of one task does."""
        channel = self._environment.channel
        run: Callable[..., Any] = partial(spare.run, patience_s=ONE_TRY)
        while await run(tasks.cancel_children(task_id, channel=channel)):
            pass
        await run(steps.cancel_started(task_id, channel=channel))
        await run(bulk.record_family(action_id, task_id))

    async def _record_failure(self, spare: SpareTransactions, order: BulkOrder, problem: Exception) -> None:
        text = str(problem)[:_LONGEST_PROBLEM].replace("\0", "")
        by = self._environment.observer.supervisor_id
        failure = bulk.record_failure(order, problem=text, by=by, most=MOST_FAILURES)
        await spare.run(failure, patience_s=ONE_TRY)
        self._environment.events.emit(
            BulkPortionFailed(
                action_id=order.id, action=order.action, failures=order.failures + 1, problem=text
            )
        )

    def _report(self, portion: _Portion) -> None:
        after = portion.after
        self._environment.events.emit(
            BulkActionEnded(
                action_id=after.id,
                action=after.action,
                state=portion.state,
                requested_by=after.requested_by,
                matched=after.matched,
                done=after.done,
                skipped=after.skipped,
            )
        )


def _skipping(order: BulkOrder, skipped: Sequence[SkippedTask]) -> BulkOrder:
    """Return the order with more skipped tasks."""
    reasons = Counter(order.reasons) + Counter(each.reason for each in skipped)
    examples = [*order.examples, *skipped][:_MOST_EXAMPLES]
    return structs.replace(
        order, skipped=order.skipped + len(skipped), reasons=dict(reasons), examples=examples
    )
