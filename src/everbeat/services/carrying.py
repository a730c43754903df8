"""Carrying out: dead leases, a batch at a time, through hooks and the domain to the one statement that recovers them.

What lives here: asking, deciding, the statement, and telling. What may not: noticing, and which leases are dead.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Final, TypeVar
from uuid import UUID

from msgspec import Struct, field

from everbeat.config import RecoveryConfig
from everbeat.domain.hooks import (
    CALLS_AT_ONCE,
    DEFAULT,
    HookReply,
    HookRunner,
    HooksUnreachable,
    RecoveryContext,
    Skip,
    SweepSummary,
)
from everbeat.domain.recovery import Charge, RecoveryRules
from everbeat.domain.states import TaskState
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.services.death import AGE, PROGRESS, STARTUP, SWEEP, Death, DeathOf
from everbeat.services.division import Division
from everbeat.services.observer import Statements
from everbeat.services.orders import context_of, order_for
from everbeat.services.process_ends import earlier_ends
from everbeat.services.recovery_events import recovery_events
from everbeat.services.type_brake import TypeBrake
from everbeat.store import leases
from everbeat.store.leases import Lease, Recovered, RecoveryOrder

V = TypeVar("V")

NAMED: Final = 20
_BY_SILENCE: Final = frozenset({AGE, SWEEP, PROGRESS})


class RecoveryLeft(Event, frozen=True, kw_only=True):
    """A recovery hook said Skip: the lease stays as it is, and is offered again."""

    room = "services"
    task_id: UUID
    name: str
    worker_id: str


class OrphanedTasksDetected(Event, frozen=True, kw_only=True):
    """So many tasks of workers that were provably dead at the start of this supervisor are about to be recovered; the first are named."""

    room = "services"
    level = logging.WARNING
    count: int
    task_ids: tuple[UUID, ...]


class StaleTasksDetected(Event, frozen=True, kw_only=True):
    """So many tasks are about to be recovered because their holder, or their code, was silent for too long; the first are named."""

    room = "services"
    level = logging.WARNING
    count: int
    task_ids: tuple[UUID, ...]


class Carried(Struct):
    """What became of one pass: what landed, the claim_ids of what was ordered and did not, and of what was left.

    A lease is left by a hook, or because PostgreSQL refuses every recovery of its row. Sweeps offer it again.
    """

    landed: list[Recovered] = []
    missed: set[UUID] = field(default_factory=set)
    left: dict[UUID, Lease] = field(default_factory=dict)
    contexts: list[RecoveryContext] = []

    def add(self, other: Carried) -> None:
        """The two as one."""
        self.landed += other.landed
        self.missed |= other.missed
        self.left |= other.left
        self.contexts += other.contexts


class Carrier:
    """Carries out for one observer; `observer_id` says in whose name."""

    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        channel: str,
        observer_id: Callable[[], str],
        events: EventBus,
        clock: Clock,
        random: Random,
        hooks: HookRunner,
    ) -> None:
        self._statements = statements
        self._batch_size = config.sweep_batch_size
        self._hook_timeout_s = config.hook_timeout_ms / 1_000
        self._offer_again_s = config.check_interval_ms / 1_000
        self._channel = channel
        self._observer_id = observer_id
        self._events = events
        self._clock = clock
        self._random = random
        self._hooks = hooks
        self._type_brake = TypeBrake(statements, config, events=events)
        self._division = Division()
        self._left_at: dict[UUID, float] = {}
        self._in_hand: set[UUID] = set()

    @property
    def hook_time_s(self) -> float:
        """How long the hooks of one batch may take."""
        scopes = self._hooks.scopes
        rounds = -(-self._batch_size // CALLS_AT_ONCE) if scopes.every_task or scopes.tasks else 0
        return rounds * self._hook_timeout_s

    async def carry_out(
        self,
        found: Sequence[Lease],
        death_of: DeathOf,
        *,
        charge: Callable[[Lease], Charge],
        rules: RecoveryRules,
        watched: tuple[str, int] | None = None,
        patience_s: float | None,
    ) -> Carried:
        """Decides on these leases and does it. `watched`: the supervisor and the beat that the decision rests on; a beat since then
        undoes it."""
        carried = Carried()
        for first in range(0, len(found), self._batch_size):
            batch = self._offered(found[first : first + self._batch_size], carried)
            in_hand = {lease.claim_id for lease in batch}
            self._in_hand |= in_hand
            try:
                await self._carry(
                    batch,
                    death_of,
                    carried,
                    charge=charge,
                    rules=rules,
                    watched=watched,
                    patience_s=patience_s,
                )
            finally:
                self._in_hand -= in_hand
        return carried

    async def _carry(
        self,
        batch: Sequence[Lease],
        death_of: DeathOf,
        carried: Carried,
        *,
        charge: Callable[[Lease], Charge],
        rules: RecoveryRules,
        watched: tuple[str, int] | None,
        patience_s: float | None,
    ) -> None:
        deaths = {lease.id: death_of(lease) for lease in batch}
        answers = await self._answers(batch, deaths, rules)
        if answers is None:  # put off: whoever waits for it asks again
            undecided = {lease.claim_id for lease in batch if self._hooks.scopes.decides(lease.name)}
            carried.missed |= undecided
            batch = [lease for lease in batch if lease.claim_id not in undecided]
            answers = {}
        ends = await earlier_ends(self._statements, batch, deaths, patience_s=patience_s)
        decided = defaultdict[str, list[RecoveryOrder]](list)
        for lease in batch:
            death, answer = deaths[lease.id], answers.get(lease.id, DEFAULT)
            if isinstance(answer, Skip):
                carried.left[lease.claim_id] = lease
            order = order_for(
                lease, death, rules=rules, charge=charge(lease), random=self._random,
                by_swap=watched is not None, answer=answer, process_deaths=ends.get(lease.id, 0),
            )  # fmt: skip
            if order is not None:
                decided[death.noticed_by].append(order)
        await self._leave(batch, answers, patience_s=patience_s)
        for noticed_by, orders in decided.items():
            landed = await self._ordered(
                orders, noticed_by=noticed_by, watched=watched, patience_s=patience_s
            )
            ids = {one.id for one in landed}
            carried.landed += landed
            refused = {lease.claim_id: lease for lease in batch if lease.claim_id in self._division.left}
            self._left_at |= dict.fromkeys(refused, self._clock.monotonic())
            carried.left |= refused
            carried.missed.update(order.claim_id for order in orders if order.id not in ids)
            carried.missed -= refused.keys()
            carried.contexts += [self._context(lease, deaths) for lease in batch if lease.id in ids]

    async def announce(self, carried: Carried) -> None:
        """Tells the hooks of a pass that is over."""
        if not carried.landed:
            return
        if self._hooks.scopes.interrupted:
            await self._hooks.interrupted(carried.contexts)
        if self._hooks.scopes.recovered:
            await self._hooks.recovered(
                SweepSummary(
                    worker_ids=tuple(sorted({one.worker_id for one in carried.landed})),
                    recovered_count=len(carried.landed),
                    task_ids=tuple(one.id for one in carried.landed),
                    sweeping_worker_id=self._observer_id(),
                )
            )

    def _offered(self, batch: Sequence[Lease], carried: Carried) -> list[Lease]:
        """All but those that were left a moment ago, or that another pass of this very process has in hand."""
        since = self._clock.monotonic() - self._offer_again_s
        self._left_at = {claim_id: at for claim_id, at in self._left_at.items() if at > since}
        carried.left |= {lease.claim_id: lease for lease in batch if lease.claim_id in self._left_at}
        return [
            lease
            for lease in batch
            if lease.claim_id not in self._left_at and lease.claim_id not in self._in_hand
        ]

    async def _answers(
        self, batch: Sequence[Lease], deaths: Mapping[UUID, Death], rules: RecoveryRules
    ) -> Mapping[UUID, HookReply] | None:
        try:
            return await self._asked(batch, deaths, rules)
        except HooksUnreachable:
            return None

    async def _asked(
        self, batch: Sequence[Lease], deaths: Mapping[UUID, Death], rules: RecoveryRules
    ) -> Mapping[UUID, HookReply]:
        scopes = self._hooks.scopes
        asked = [
            lease
            for lease in batch
            if scopes.decides(lease.name)
            and not lease.cancel_requested
            and (rules.settle_running if lease.state is TaskState.RUNNING else rules.requeue_claimed)
        ]
        if not asked:
            return {}
        return await self._hooks.decide([self._context(lease, deaths) for lease in asked])

    def _context(self, lease: Lease, deaths: Mapping[UUID, Death]) -> RecoveryContext:
        return context_of(lease, deaths[lease.id], sweeping_worker_id=self._observer_id())

    async def _leave(
        self, batch: Sequence[Lease], answers: Mapping[UUID, HookReply], *, patience_s: float | None
    ) -> None:
        left = {lease.id: lease for lease in batch if isinstance(answers.get(lease.id), Skip)}
        if not left:
            return
        self._left_at |= {lease.claim_id: self._clock.monotonic() for lease in left.values()}
        leave = leases.leave([(lease.id, lease.claim_id) for lease in left.values()])
        for task_id in await self._statements.run(leave, patience_s=patience_s):
            lease = left[task_id]
            self._events.emit(RecoveryLeft(task_id=task_id, name=lease.name, worker_id=lease.worker_id))

    async def _ordered(
        self,
        orders: Sequence[RecoveryOrder],
        *,
        noticed_by: str,
        watched: tuple[str, int] | None,
        patience_s: float | None,
    ) -> list[Recovered]:
        self._tell(orders, noticed_by=noticed_by)

        def recover(some: Sequence[RecoveryOrder]) -> Awaitable[list[Recovered]]:
            statement = leases.recover(
                some,
                noticed_by=noticed_by,
                recovered_by=self._observer_id(),
                channel=self._channel,
                holder=watched,
            )
            return self._statements.run(statement, patience_s=patience_s)

        landed = await self._division.recover(orders, recover)
        for event in recovery_events(landed, orders, noticed_by=noticed_by):
            self._events.emit(event)
        await self._type_brake.look(
            {one.name for one in landed if one.outcome == "CRASHED"}, patience_s=patience_s
        )
        return landed

    def _tell(self, orders: Sequence[RecoveryOrder], *, noticed_by: str) -> None:
        named = tuple(order.id for order in orders[:NAMED])
        if noticed_by == STARTUP:
            self._events.emit(OrphanedTasksDetected(count=len(orders), task_ids=named))
        elif noticed_by in _BY_SILENCE:
            self._events.emit(StaleTasksDetected(count=len(orders), task_ids=named))


def always(value: V) -> Callable[[Lease], V]:
    """The same answer for every lease."""
    return lambda _: value
