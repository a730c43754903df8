"""Getting work: one claim for free slots and a few ahead. What finds a free slot begins with the claim, the rest by a start.

Code runs only after its claim or start was acknowledged. A claim is repeated with the same call id, so a lost reply loses nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

from everbeat.domain.definition import TaskDefinition
from everbeat.domain.policy import StoredPolicy
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.clock import Clock
from everbeat.runtime.nursery import Nursery
from everbeat.store import leases
from everbeat.store.session import Session
from everbeat.wake.hint_rate import HintRate
from everbeat.worker.asking import Asking, Batch
from everbeat.worker.attempt import ALONE, Attempt, Stage, attempt_of
from everbeat.worker.attention import LOOK_AGAIN_MS, Attention
from everbeat.worker.claim_rules import ClaimRules
from everbeat.worker.lane import Lane
from everbeat.worker.leases import LeaseTable
from everbeat.worker.lookout import Lookout
from everbeat.worker.marks import Marks
from everbeat.worker.phantoms import give_back, give_back_unknown, release
from everbeat.worker.protocol import Lease

MOST_AHEAD: Final = 8  # claims that follow one another for a lane before the others have their turn
LEAST_AHEAD: Final = 50
CLOSE_PATIENCE_S: Final = 2.0  # for which a claim under way may hold up the end of the worker
SUSPECTS_EVERY_S: Final = (
    1.0  # suspects are rare: hints make this worker look for them no more often than this
)


class Claimer:
    """A service; each tick is one round of claims and starts."""

    name = "claimer"

    def __init__(
        self,
        session: Session,
        *,
        lanes: Sequence[Lane],
        table: LeaseTable,
        definitions: Mapping[str, TaskDefinition],
        policies: Mapping[str, StoredPolicy],
        queues: Sequence[str] | None,
        queue_priorities: Mapping[str, int],
        poll_interval_s: float,
        clock: Clock,
        rules: ClaimRules,
        nursery: Nursery,
    ) -> None:
        self.wake = asyncio.Event()
        self.is_closed = False
        self.is_quiet = False
        self._session = session
        self._lanes = lanes
        self._table = table
        self._definitions = definitions
        self._policies = policies
        self._lookout = Lookout(poll_interval_s=poll_interval_s, is_deaf=rules.is_deaf, clock=clock)
        self._marks = Marks(
            session, definitions=definitions, queues=queues, lookout=self._lookout, clock=clock
        )
        self._asking = Asking(
            session, policies=policies, queues=queues, queue_priorities=queue_priorities, rules=rules, clock=clock,
            marks=self._marks,
        )  # fmt: skip
        self._queues = queues
        self._clock = clock
        self._attention = Attention(session, worker_id=rules.worker_id, is_told=rules.is_told, clock=clock)
        self._rules = rules
        self._nursery = nursery
        self._hint_rate = HintRate()
        self._busy = asyncio.Lock()

    @property
    def interval_s(self) -> float:
        """The poll floor; without hints there is only the poll."""
        return self._lookout.interval_s

    def look(self, queue: str | None = None) -> None:
        """Tasks may be due in this queue, or in any."""
        if queue is None or self._queues is None or queue in self._queues:
            self._look_everywhere()
            self.wake.set()

    def look_for_marked(self) -> None:
        """Tasks may be due that say what the code of a worker must understand."""
        self._marks.ask()
        self.wake.set()

    def _look_everywhere(self) -> None:
        for lane in self._lanes:
            lane.has_more = True

    def slot_freed(self) -> None:
        """Something may be started, or claimed, that had no room before."""
        self.wake.set()

    def quieten(self, on: bool) -> None:
        """Claim and start nothing, and give back what waits, until this is called with False."""
        self.is_quiet = on
        self.look()

    @property
    def claims(self) -> tuple[int, int]:
        """How many were asked for, and of how many it is known what they brought."""
        return self._asking.asked, self._asking.known

    async def tick(self) -> float | None:
        """Start what waits, claim for what is free, start again."""
        async with self._busy:
            if self.is_closed or self.is_quiet:
                await self._give_back_waiting()
                return None
            hinted = [lane for lane in self._lanes if lane.has_more]
            if self._lookout.is_time() or self._attention.is_blind:
                self._look_everywhere()
            if await self._marks.learn():
                self._look_everywhere()
            await self._give_back_broken()
            asked_at = self._clock.monotonic()
            idle, left_out = await self._claim_all(hinted)
            await self._start_waiting()
            if not idle or self._can_go_on():
                await self._attention.busy(self._lanes)
            elif await self._attention.rests():
                self.look()
                self._lookout.expect(LOOK_AGAIN_MS)
            else:
                await self._ask_next_due(idle, left_out, asked_at)
            return 0.0 if self._can_go_on() else self._rest_s()

    async def close(self) -> None:
        """Claim no more; what waits is given back at no cost."""
        self.is_closed = True
        self.wake.set()
        ending = self._nursery.start(self._asking.end(patience_s=CLOSE_PATIENCE_S), name="last claim")
        async with self._busy:
            ending.cancel()
            await self._give_back_waiting()

    async def confirm_phantoms(self, proposed: Sequence[Lease]) -> None:
        """Give back what the database holds in our name and nobody here knows."""
        # A claim in flight may hold them; once it is answered, nobody does but the table.
        async with self._busy:
            phantoms = self._table.unknown(proposed)
        if phantoms:
            await give_back(self._session, phantoms)
            self.look()

    async def _claim_all(self, hinted: Collection[Lane]) -> tuple[list[Lane], list[Lane]]:
        """One claim for each lane with room; answers those that have nothing more to claim for now, and those that were left out: where
        nothing hints at suspects, and a question is about to be asked anyway, it is asked with that."""
        idle: list[Lane] = []
        left_out: list[Lane] = []
        for lane in self._lanes:
            while lane.startable and self._may_start():
                await self._start_waiting()
            limit = self._room(lane)
            now = self._clock.monotonic()
            if not lane.has_more or limit <= 0 or now < lane.paused_until or not self._may_ask():
                continue
            if lane.suspects and idle and lane not in hinted:
                lane.has_more = False
                left_out.append(lane)
                continue
            await self._clock.sleep(self._hint_rate.pause_s(self._clock.monotonic()))
            worker_id = self._rules.worker_id()
            lane.has_more = False  # a hint that comes while the statement runs sets it again
            try:
                taken = await self._claim(lane, limit) if await self._asking.is_worth_it(lane) else 0
            except (DatabaseUnreachable, DatabaseReadOnly):
                # The next one takes less. What this one took, if it did, is nobody's here.
                lane.has_more = True
                await give_back_unknown(self._session, self._table, worker_id)
                continue
            except BaseException:
                lane.has_more = True
                raise
            if lane.suspects and not taken:
                lane.paused_until = self._clock.monotonic() + SUSPECTS_EVERY_S
            if not lane.has_more:
                idle.append(lane)
        return idle, left_out

    def _may_start(self) -> bool:
        return not (self.is_closed or self.is_quiet) and self._rules.may_start()

    def _may_ask(self) -> bool:
        return self._may_start() and self._rules.may_claim()

    async def _claim(self, lane: Lane, limit: int) -> int:
        """While there is more than one claim takes, the server looks for the next batch as this one begins."""
        batch = await self._asking.ask(lane, limit)
        taken = len(batch)
        for _ in range(MOST_AHEAD):
            room = self._room(lane, unbegun=len(batch))
            if len(batch) < limit or room < LEAST_AHEAD or not self._may_ask():
                break
            if lane.startable or not batch.has_begun:
                break  # what another claim starts would overtake what waits
            limit = room
            # In this order: the question is on its way before the code of the batch begins.
            batch = await self._nursery.beside(
                self._asking.ask(lane, limit, unbegun=len(batch)), partial(self._begin, lane, batch), name="claim"
            )  # fmt: skip
            taken += len(batch)
        self._begin(lane, batch)
        lane.has_more |= batch.has_more
        return taken

    def _room(self, lane: Lane, *, unbegun: int = 0) -> int:
        """How many the next claim takes: while many can begin, none ahead of a slot, for which they would have to be started later."""
        spare = lane.spare - unbegun
        return min(spare if spare >= LEAST_AHEAD else lane.wanted - unbegun, self._asking.portion.rows)

    def _begin(self, lane: Lane, batch: Batch) -> None:
        """What the claim has started runs from now on, the rest waits."""
        self._asking.known += 1
        if not batch or batch.worker_id != self._rules.worker_id():
            return  # claimed in a name that was declared dead meanwhile: it is recovered there
        self._hint_rate.paid_off()
        begun: list[Attempt] = []
        for task in batch.claimed:
            attempt = attempt_of(task, lane.name, self._definitions, self._policies, self._rules.on_progress)
            self._table.add(attempt)
            if task.started_at is None:
                lane.add(attempt)
            else:
                attempt.number, attempt.started_at = task.attempt, task.started_at
                begun.append(attempt)
        self._rules.launch(lane.name, begun)
        self._rules.on_claimed()

    async def _start_waiting(self) -> None:
        if not self._may_start():
            return
        if not (batch := [attempt for lane in self._lanes for attempt in lane.take()]):
            return
        for attempt in batch:
            attempt.stage = Stage.STARTING
        try:
            statement = leases.start(
                [attempt.lease for attempt in batch], channel=self._session.target.channel,
                policies={one.id: one.policy.default_json() for one in batch if one.task.policy is None},
                alone={one.claim_id for one in batch if one.lane in ALONE},
            )  # fmt: skip
            answers = await self._session.run(statement)
        except BaseException:
            self._wait_again(batch)
            raise
        for attempt in batch:
            answer = answers.get(attempt.claim_id)
            if attempt.stage is not Stage.STARTING:
                continue  # lost while the statement ran: its code must not begin
            if answer is None or answer.verdict != "started":
                self._rules.not_started(attempt, "lost" if answer is None else answer.verdict)
                continue
            attempt.number, attempt.started_at = answer.attempt or 1, answer.started_at
            self._rules.launch(attempt.lane, (attempt,))

    def _wait_again(self, batch: Sequence[Attempt]) -> None:
        by_name = {lane.name: lane for lane in self._lanes}
        for attempt in batch:
            if attempt.stage is Stage.STARTING:
                attempt.stage = Stage.CLAIMED
                by_name[attempt.lane].add(attempt)

    async def _give_back_broken(self) -> None:
        """A lane whose processes do not come up lets others have its tasks, and tries again later."""
        for lane in self._lanes:
            if lane.is_broken:
                await self._release(lane.rest(self._clock.monotonic()))

    async def _give_back_waiting(self) -> None:
        await self._release([attempt for lane in self._lanes for attempt in lane.waiting])
        for lane in self._lanes:
            lane.waiting.clear()

    async def _release(self, attempts: Sequence[Attempt]) -> None:
        held = [attempt for attempt in attempts if attempt.stage is Stage.CLAIMED]
        if held:
            await release(self._session, [one.lease for one in held])
        for attempt in held:
            self._rules.not_started(attempt, "released")

    def _can_go_on(self) -> bool:
        if not self._may_start():
            return False
        now, may_claim = self._clock.monotonic(), self._rules.may_claim()
        return any(
            lane.startable or lane.is_broken or (may_claim and lane.has_more and lane.wanted and now >= lane.paused_until)
            for lane in self._lanes
        )  # fmt: skip

    async def _ask_next_due(self, idle: Sequence[Lane], left_out: Sequence[Lane], asked_at: float) -> None:
        names = sorted({name for lane in (*idle, *left_out) for name in lane.names})
        # What became due while the claim ran was missed by it, and is in the past by now.
        margin_ms = math.ceil((self._clock.monotonic() - asked_at) * 1_000) + 1
        prospect = await self._asking.prospect(names, margin_ms=margin_ms)
        if prospect.due_in_ms is not None:
            self._lookout.expect(prospect.due_in_ms)
        for lane in left_out:
            lane.has_more |= prospect.suspects
        self._rules.on_happened(prospect.happened)

    def _rest_s(self) -> float:
        now = self._clock.monotonic()
        paused = [lane.paused_until for lane in self._lanes if lane.paused_until > now]
        return max(0.0, min([self._lookout.next_at, *paused]) - now)
