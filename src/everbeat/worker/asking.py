"""The statement that claims: what it is asked with, and what is known from the answers.

What lives here: one question at a time. What may not: when to ask, for how many, and what becomes of the answer (`claimer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import uuid4

import msgspec
from msgspec import Struct

from everbeat.domain.policy import StoredPolicy
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.clock import Clock
from everbeat.store import leases
from everbeat.store.leases import Claimed, Prospect
from everbeat.store.session import Session
from everbeat.store.suspects import suspects_wait
from everbeat.worker.attempt import ALONE, LaneName
from everbeat.worker.claim_rules import ClaimRules
from everbeat.worker.floors import Floors
from everbeat.worker.lane import Lane
from everbeat.worker.marks import Marks
from everbeat.worker.portion import Portion

TOO_LONG_S: Final = 10.0
"""A claim is repeated for as long as its tries fail sooner: what takes longer would take as long again."""


class Batch(Struct, frozen=True):
    """What a claim brought, in order, and in whose name. `has_more`: another claim may bring something at once."""

    claimed: Sequence[Claimed]
    worker_id: str
    has_more: bool

    def __len__(self) -> int:
        return len(self.claimed)

    @property
    def has_begun(self) -> bool:
        """Whether all of it begins with the claim."""
        return not self.claimed or self.claimed[-1].started_at is not None


class Asking:
    """`asked` counts the questions, `known` those whose tasks are in the table of leases, or will never be: while it is less, the
    database may hold in our name what nobody here knows yet. `portion`: how much the next one takes.
    """

    def __init__(
        self,
        session: Session,
        *,
        policies: Mapping[str, StoredPolicy],
        queues: Sequence[str] | None,
        queue_priorities: Mapping[str, int],
        rules: ClaimRules,
        clock: Clock,
        marks: Marks,
    ) -> None:
        self.asked = 0
        self.known = 0
        self.portion = Portion()
        self._is_over = False
        self._is_asking = False
        self._session = session
        stored = {name: policy.default_json() for name, policy in policies.items()}
        documents = {name: msgspec.Raw(json) for name, json in stored.items() if json is not None}
        self._policies = msgspec.json.encode(documents) if documents else None
        self._queues = queues
        self._queue_priorities = dict(queue_priorities)
        self._rules = rules
        self._clock = clock
        self._marks = marks
        self._floors: dict[LaneName, Floors] = {}

    async def ask(self, lane: Lane, limit: int, *, unbegun: int = 0) -> Batch:
        """One claim, repeated over reconnects. `unbegun`: so many of an earlier one have their slots still before them.

        Raises DatabaseUnreachable or DatabaseReadOnly when it took too long, or is not wanted any more: what it took, if
        anything, is to be given back.
        """
        worker_id, asked_at, tries = self._rules.worker_id(), self._clock.monotonic(), self._session.tries
        floors = self._floors.setdefault(lane.name, Floors(self._clock))
        places = floors.now()
        statement = leases.claim(
            worker_id=worker_id,
            claim_call=uuid4(),
            names=lane.names,
            limit=limit,
            queues=self._queues,
            queue_priorities=self._queue_priorities,
            suspects=lane.suspects,
            starts=max(0, lane.spare - unbegun),
            policies=self._policies,
            alone=lane.name in ALONE,
            floors=places,
            most_bytes=self.portion.most_bytes,
            marked=self._marks.known(lane.names),
        )
        self.asked += 1
        self._is_asking = True
        try:
            claimed = await self._session.run(statement, goes_on=self._goes_on)
        except BaseException as problem:
            self.known += 1
            if isinstance(problem, DatabaseUnreachable | DatabaseReadOnly):
                self.portion.unanswered()
            raise
        finally:
            self._is_asking = False
        self.portion.answered(claimed, took_s=self._clock.monotonic() - asked_at)
        is_cut, looked_s = (claimed[-1].is_cut, claimed[-1].looked_s) if claimed else (None, None)
        is_full, used = is_cut is True or len(claimed) >= limit, bool(places)
        floors.learn(claimed, is_full=is_full, used=used, looked_s=looked_s or 0.0)
        # A repeated claim does not say whether it left anything.
        has_more = is_full or used or self._session.tries > tries + 1
        return Batch(claimed, worker_id, has_more=has_more)

    async def is_worth_it(self, lane: Lane) -> bool:
        """Whether a claim can bring anything: to find that no suspect waits, a claim would go through all tasks that wait."""
        if not lane.suspects:
            return True
        marked = self._marks.known(lane.names)
        return await self._session.run(suspects_wait(names=lane.names, queues=self._queues, marked=marked))

    async def prospect(self, names: Sequence[str], *, margin_ms: int) -> Prospect:
        """What there is to wait for; what became due within the margin counts."""
        marked = self._marks.known(names)
        return await self._session.run(
            leases.next_due(names=names, queues=self._queues, margin_ms=margin_ms, marked=marked)
        )

    async def end(self, *, patience_s: float) -> None:
        """Nothing is repeated from now on, and what is under way after so many seconds ends without an answer."""
        self._is_over = True
        await self._clock.sleep(patience_s)
        if self._is_asking:
            await self._session.interrupt()

    def _goes_on(self, took_s: float) -> bool:
        return not self._is_over and took_s < TOO_LONG_S
