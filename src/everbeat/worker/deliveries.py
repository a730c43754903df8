"""The messages in this worker's hands: each is judged by the rows, and acknowledged, kept or given back accordingly.

What lives here: when they are judged, and what follows from a verdict. What may not: the verdicts (`domain.delivery`), and claiming:
a message only makes the claimer look, which takes the next best task of the queue by the rules of the database.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.definition import TaskDefinition
from everbeat.domain.delivery import ACKNOWLEDGED, Facts, Verdict, judge
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.store.messages import look_at
from everbeat.store.session import Session
from everbeat.wake.carrier import Delivered, Message
from everbeat.worker.leases import LeaseTable

JUDGE_AFTER_S: Final = 0.05
"""After the claim that a message causes, and together with others that come with it."""
JUDGE_AGAIN_S: Final = 0.25
LOOKS: Final = 2
"""So often a claimable task may be found unclaimed before its message is given back."""
AT_ONCE: Final = 500
SOON_S: Final = 0.05
LATER_S: Final = 1.0
SELDOM_S: Final = 15.0
"""The first and the longest delay of what is given back because nobody has taken it: whoever could looks by itself more often than that."""
LONGEST_AWAY_S: Final = 30.0
NAMED: Final = 20


class TaskSkippedActiveElsewhere(Event, frozen=True, kw_only=True):
    """Messages of so many tasks came that another worker is at work on: they were acknowledged, and no code was called."""

    room = "worker"
    count: int
    task_ids: tuple[UUID, ...]


class _Held(Struct):
    """A delivery that is not ended yet. `looks`: how often it was found claimable."""

    delivered: Delivered
    message: Message
    judge_at: float
    kept_at: float
    looks: int = 0


class Deliveries:
    """A service. `room()`: how many more tasks this worker would claim. `look(queue)`: tasks may be due there. `on_ended()`: fewer are held."""

    name = "deliveries"

    def __init__(
        self,
        session: Session,
        *,
        table: LeaseTable,
        room: Callable[[], int],
        look: Callable[[str], None],
        on_ended: Callable[[], None],
        worker_id: Callable[[], str],
        definitions: Mapping[str, TaskDefinition],
        ack_wait_s: float,
        stale_ms: int,
        events: EventBus,
        clock: Clock,
        random: Random,
    ) -> None:
        self.wake = asyncio.Event()
        self.interval_s = 1.0
        self.verdicts: Counter[str] = Counter()
        self._session = session
        self._table = table
        self._room = room
        self._look = look
        self._on_ended = on_ended
        self._worker_id = worker_id
        self._definitions = definitions
        self._ack_wait_s = ack_wait_s
        self._stale_ms = stale_ms
        self._events = events
        self._clock = clock
        self._random = random
        self._held: list[_Held] = []
        self._next_at = math.inf

    def __len__(self) -> int:
        return len(self._held)

    @property
    def unclaimed(self) -> int:
        """How many are held of tasks that this worker does not hold: each may still take room."""
        return sum(self._table.by_task(each.message.task_id) is None for each in self._held)

    def arrived(self, delivered: Delivered) -> None:
        """A message came."""
        message = delivered.message
        if message is None:
            self.verdicts["unreadable"] += 1
            delivered.reject()
            self._on_ended()
            return
        now = self._clock.monotonic()
        self._held.append(_Held(delivered, message, judge_at=now + JUDGE_AFTER_S, kept_at=now))
        self._look(message.queue)
        if self._next_at > now + JUDGE_AFTER_S:
            self._next_at = now + JUDGE_AFTER_S
            self.wake.set()

    def beaten(self) -> None:
        """The database has just acknowledged a beat of this worker: what it holds and runs is in progress.

        Only here, so that a message is never kept for longer than the lease of its task.
        """
        now = self._clock.monotonic()
        for each in self._held:
            ours = self._table.by_task(each.message.task_id) is not None
            if ours and now - each.kept_at >= self._ack_wait_s / 3:
                each.delivered.keep()
                each.kept_at = now

    async def tick(self) -> float | None:
        """Judge those whose time has come; answers when the next one's has."""
        now = self._clock.monotonic()
        asked: list[_Held] = []
        for each in self._held:
            if each.judge_at > now:
                continue
            if self._table.by_task(each.message.task_id) is not None:
                each.judge_at = now + JUDGE_AGAIN_S
            elif len(asked) < AT_ONCE:
                asked.append(each)
        if asked:
            await self._judge(asked)
        self._next_at = min((each.judge_at for each in self._held), default=math.inf)
        return max(0.0, self._next_at - self._clock.monotonic()) if self._held else None

    def give_back_unclaimed(self) -> None:
        """This worker claims no more: what it does not hold is for others at once."""
        self._hand_over([each for each in self._held if self._table.by_task(each.message.task_id) is None])

    def give_all_back(self) -> None:
        """This worker ends: whoever gets these messages asks the rows what became of their tasks."""
        self._hand_over(self._held)

    def _hand_over(self, given: Sequence[_Held]) -> None:
        for each in given:
            each.delivered.give_back(delay_s=0.0)
        self._forget(given)

    async def _judge(self, asked: Sequence[_Held]) -> None:
        ids = list({each.message.task_id for each in asked})
        try:
            facts = await self._session.run(look_at(ids, stale_ms=self._stale_ms), patience_s=0)
        except DatabaseError:
            # Nothing is known, so nothing is acknowledged: somebody may reach the database, or does later.
            for each in asked:
                delay_s = min(LONGEST_AWAY_S, 2.0 ** min(each.delivered.times - 1, 5))
                each.delivered.give_back(delay_s=delay_s * self._random.uniform(0.5, 1.0))
                self.verdicts["unreachable"] += 1
            self._forget(asked)
            return
        over: list[_Held] = []
        elsewhere: list[UUID] = []
        for each in asked:
            message = each.message
            known = facts.get(message.task_id)
            verdict = judge(
                known,
                fence=message.fence,
                worker_id=self._worker_id(),
                names=self._definitions,
                is_understood=known is None or self._understands(known),
            )
            if self._carried_out(each, verdict):
                over.append(each)
                self.verdicts[verdict] += 1
                if verdict is Verdict.ELSEWHERE:
                    elsewhere.append(message.task_id)
        self._forget(over)
        if elsewhere:
            self._events.emit(
                TaskSkippedActiveElsewhere(count=len(elsewhere), task_ids=tuple(elsewhere[:NAMED]))
            )

    def _understands(self, facts: Facts) -> bool:
        definition = self._definitions.get(facts.name)
        return facts.needs is None or definition is None or definition.codec.accepts.fits_needs(facts.needs)

    def _carried_out(self, each: _Held, verdict: Verdict) -> bool:
        """Whether the delivery is ended with this."""
        match verdict:
            case Verdict.OURS:
                each.judge_at = self._clock.monotonic() + JUDGE_AGAIN_S
                return False
            case Verdict.UNKNOWN:
                each.delivered.reject()
            case Verdict.STALE:
                each.delivered.give_back(delay_s=LATER_S)
            case Verdict.CLAIMABLE if each.looks + 1 < LOOKS and self._room() > 0:
                each.looks += 1
                self._look(each.message.queue)
                each.judge_at = self._clock.monotonic() + JUDGE_AFTER_S * 2
                return False
            case Verdict.CLAIMABLE | Verdict.FOREIGN | Verdict.KEPT_BACK:
                each.delivered.give_back(
                    delay_s=min(SELDOM_S, SOON_S * 2.0 ** min(each.delivered.times - 1, 12))
                )
            case _:
                assert verdict in ACKNOWLEDGED
                each.delivered.ack()
        return True

    def _forget(self, ended: Sequence[_Held]) -> None:
        gone = {id(each) for each in ended}
        self._held = [each for each in self._held if id(each) not in gone]
        self._on_ended()
