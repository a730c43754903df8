"""Decides when to claim for free slots, how many tasks to prefetch, and whether this worker needs hints."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.hints.delivery import HintRate
from everbeat.protocol import LeaseKey
from everbeat.runtime.clock import Backoff
from everbeat.store.tasks import MOST_DUE, NextDue
from everbeat.store.workers import listen
from everbeat.worker.attempt import Attempt, RequestHandler, attempt_of
from everbeat.worker.claim.query import ClaimBatch, ClaimQuery, Marks
from everbeat.worker.claim.slots import MANY_FREE, SlotPool, Slots
from everbeat.worker.environment import Messenger, WorkerEnvironment
from everbeat.worker.leases import POLL_WITHOUT_HINTS_S, LeaseTable, LeaseWatch, give_back, give_back_unknown
from everbeat.worker.workflow_advancer import Advancer

LATE_COMMITS_S: Final = (0.05, 0.25, 1.25)
"""When to poll again, in seconds after the worker has stored that it needs hints. A sender that read the old row sends no hint.

Each value is five times the previous one. A task that a sender commits between two polls is found after at most four times the
age of that sender's transaction.
"""
_SLACK_S: Final = 0.001
EVER_MS: Final = 100 * 365 * 86_400_000
"""A margin that includes all tasks that are due, in milliseconds."""
_MOST_DUE: Final = 4 * MOST_DUE
"""For how many queues the timer keeps a due time. The due times of further queues count for all queues."""


class PollTimer:
    """Decides when a worker polls: when the next task becomes due, but at least once per poll interval."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._poll_interval_s = environment.plan.config.poll_interval_s
        self._clock = environment.clock
        self.hints_arrive = False
        """Whether hints are arriving. If not, the poll interval is at most `POLL_WITHOUT_HINTS_S`."""
        self.is_poll = False
        """Whether the poll interval had elapsed at the last call of `take_due`."""
        self._due_at: dict[str | None, float] = {}
        self._poll_at = 0.0
        self._again_at: list[float] = []

    @property
    def interval_s(self) -> float:
        """Return the number of seconds between two polls if no hint arrives."""
        limit_s = math.inf if self.hints_arrive else POLL_WITHOUT_HINTS_S
        return min(self._poll_interval_s, limit_s)

    def take_due(self) -> Collection[str] | None:
        """Return the queues in which tasks have become due, or None if it is time to search all. Each due time counts only once."""
        now = self._clock.monotonic()
        due = {queue for queue, at in self._due_at.items() if now >= at}
        self._due_at = {queue: at for queue, at in self._due_at.items() if queue not in due}
        self.is_poll = is_poll = now >= self._poll_at
        is_for_all = is_poll or None in due or any(now >= at for at in self._again_at)
        self._again_at = [at for at in self._again_at if at > now]
        if is_poll or self._poll_at - now > self.interval_s:
            self._poll_at = now + self.interval_s
        return None if is_for_all else {queue for queue in due if queue is not None}

    def expect(self, due_in_ms: float, queue: str | None = None) -> None:
        """Schedule a poll in `due_in_ms` milliseconds, when a task of this queue, or of any queue, becomes due. A negative value means at once."""
        if queue not in self._due_at and len(self._due_at) >= _MOST_DUE:
            queue = None
        due_at = self._clock.monotonic() + max(0.0, due_in_ms) / 1_000 + _SLACK_S
        self._due_at[queue] = min(self._due_at.get(queue, math.inf), due_at)

    def poll_again_soon(self) -> None:
        """Schedule a few extra polls, because senders that sent no hint might still be about to commit."""
        now = self._clock.monotonic()
        self._again_at = [now + seconds for seconds in LATE_COMMITS_S]

    @property
    def next_at(self) -> float:
        """Return when to poll next, on the monotonic clock."""
        return min([self._poll_at, *self._due_at.values(), *self._again_at])


BUSY_AFTER_S: Final = 0.25
"""How long a worker must be busy before it stores that it needs no hints, in seconds. Storing it costs a statement."""


class HintDemand:
    """Tracks whether this worker needs hints from the database. `listens` is the value in the worker's row, initially True."""

    def __init__(self, environment: WorkerEnvironment, *, messenger: Messenger) -> None:
        self.listens = True
        self._messenger = messenger
        self._session = environment.claim_session
        self._identity = environment.identity
        self._clock = environment.clock
        self._stored_by = self._identity.worker_id
        self._busy_since: float | None = None

    @property
    def must_poll(self) -> bool:
        """Return whether this worker has to poll because neither hints nor messages announce new tasks."""
        return not (self.listens or self._messenger.delivers)

    async def busy(self, pools: Iterable[SlotPool]) -> None:
        """Store that this worker needs no hints, because another claim follows at once.

        Nothing is stored while an executor has free capacity for which no task was found.
        """
        self._forget_former_worker()
        if self._messenger.delivers:
            await self._rely_on_messages()
            return
        if any(pool.wanted and not pool.has_more for pool in pools if not pool.suspects):
            self._busy_since = None
            return
        now = self._clock.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        elif self.listens and now - self._busy_since >= BUSY_AFTER_S:
            await self._store(False)

    async def idle(self) -> bool:
        """Store that this worker needs hints. Return whether to claim once more, because a sender might have read the old value."""
        self._forget_former_worker()
        self._busy_since = None
        if self._messenger.delivers:
            await self._rely_on_messages()
            return False
        if self.listens:
            return False
        await self._store(True)
        return True

    async def _rely_on_messages(self) -> None:
        if self.listens:
            await self._store(False)

    async def _store(self, listens: bool) -> None:
        await self._session.run(listen(self._stored_by, listens=listens))
        self.listens = listens

    def _forget_former_worker(self) -> None:
        # A worker that was declared dead continues with a new row, which says that the worker listens.
        if self._stored_by != self._identity.worker_id:
            self.listens, self._stored_by = True, self._identity.worker_id


CLAIMS_IN_A_ROW: Final = 8
"""The maximum number of consecutive claims for one executor before the worker claims for the next executor."""
CLOSE_PATIENCE_S: Final = 2.0
"""How long a running claim can delay the worker's shutdown, in seconds."""
SUSPECTS_EVERY_S: Final = 1.0
"""How long to wait after a search that found no suspect before searching again, in seconds. Suspects are rare."""
_IN_PROCESSES: Final = ("process", "solo")
_PROCESS_CHECK_S: Final = 0.1
_LINE_PAUSES: Final = Backoff(first_s=0.002, longest_s=0.05)


class _Round(Struct):
    """A round of claims.

    `idle`: the pools with nothing more to claim for now. `left_out`: the pools that were skipped. `queues`: the queues that were searched,
    or None for all.
    """

    idle: list[SlotPool] = []
    left_out: list[SlotPool] = []
    queues: set[str] | None = set()

    def searches(self, queues: Sequence[str] | None) -> None:
        """Add the queues of a claim."""
        self.queues = None if self.queues is None or queues is None else self.queues.union(queues)


class Claimer:
    """A service that decides when to claim. Each tick is one round of claims and starts."""

    name = "claimer"

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        table: LeaseTable,
        slots: Slots,
        leases: LeaseWatch,
        advancer: Advancer,
        messenger: Messenger,
        requests: RequestHandler,
    ) -> None:
        plan = environment.plan
        self.wake = asyncio.Event()
        self._session = environment.claim_session
        self._identity = environment.identity
        self._clock = environment.clock
        self._scope = environment.scope
        self._table = table
        self._slots = slots
        self._leases = leases
        self._advancer = advancer
        self._messenger = messenger
        self._requests = requests
        self._definitions = plan.definitions
        self._policies = plan.policies()
        self._queues = plan.queues
        self._timer = PollTimer(environment)
        self._marks = Marks(environment)
        self._query = ClaimQuery(environment, table=table, policies=self._policies, marks=self._marks)
        self._demand = HintDemand(environment, messenger=messenger)
        self._hint_rate = HintRate()
        self._fruitless = 0
        self._busy = asyncio.Lock()

    @property
    def interval_s(self) -> float:
        """Return the poll interval to use if no hint arrives, in seconds."""
        return self._timer.interval_s

    def claim_soon(self, queue: str | None = None) -> None:
        """Schedule a claim, because tasks might be due in this queue, or in any queue if `queue` is None."""
        if queue is None or self._queues is None or queue in self._queues:
            self._slots.expect_work(queue)
            self.wake.set()

    def ask_for_marked(self) -> None:
        """Schedule a read of the groups of marked tasks, followed by a claim."""
        self._marks.is_asked = True
        self.wake.set()

    def slot_freed(self) -> None:
        """Start or claim tasks that can use the slot that became free."""
        self._slots.slot_freed()
        self.wake.set()

    def hints_changed(self, *, arrive: bool) -> None:
        """Record whether hints are arriving. While they are not, the worker polls more often."""
        self._timer.hints_arrive = arrive
        self.wake.set()

    def quieten(self, on: bool) -> None:
        """Turn quiet mode on or off. While it is on, the worker releases its waiting attempts and claims and starts nothing."""
        self._slots.is_quiet = on
        self.claim_soon()

    async def tick(self) -> float | None:
        """Start the waiting attempts, claim tasks for the free slots, and start the new tasks for which there is a slot.

        Return how many seconds to wait before the next tick, or None for the usual interval.
        """
        async with self._busy:
            if self._slots.is_closed or self._slots.is_quiet:
                await self._slots.give_back_all()
                return None
            hinted = [pool for pool in self._slots if pool.has_more]
            await self._poll()
            if await self._marks.learn():
                self._slots.expect_work()
            if (again_in_s := self._marks.again_in_s) is not None:
                self._timer.expect(again_in_s * 1_000)
            await self._slots.give_back_broken()
            asked_at = self._clock.monotonic()
            done = await self._claim_all(hinted)
            await self._start_waiting()
            if (again_in_s := await self._query.set_aside()) is not None:
                self._timer.expect(again_in_s * 1_000)
            if await self._slots.give_back_late():
                self._query.reset_cursors()
            if not done.idle or self._has_more_to_do():
                await self._demand.busy(self._slots)
            elif await self._demand.idle():
                self.claim_soon()
                self._timer.poll_again_soon()
            else:
                await self._ask_next_due(done, asked_at)
            return 0.0 if self._has_more_to_do() else self._rest_s()

    async def close(self) -> None:
        """Stop claiming, and release the waiting attempts."""
        self._slots.is_closed = True
        self.wake.set()
        ending = self._scope.start(self._query.end(patience_s=CLOSE_PATIENCE_S), name="last claim")
        async with self._busy:
            ending.cancel()
            await self._slots.give_back_all()

    async def confirm_phantoms(self, proposed: Sequence[LeaseKey]) -> None:
        """Release leases that the database stores under this worker's id but that the worker does not hold."""
        # A running claim might return these leases. Once its reply has arrived, the table contains them.
        async with self._busy:
            phantoms = self._table.unknown(proposed)
        if phantoms:
            await give_back(self._session, phantoms)
            self.claim_soon()

    async def _poll(self) -> None:
        """Record that tasks might be due, if it is time to poll.

        An idle worker first checks whether a claim can find anything: this check is a single cheap statement, and usually finds nothing.
        """
        due = self._timer.take_due()
        if due is not None and not self._demand.must_poll:
            for queue in due:
                self._slots.expect_work(queue)
            return
        pools = list(self._slots)
        is_idle = not any(pool.has_more for pool in pools) and any(pool.wanted > 0 for pool in pools)
        if not (is_idle and self._timer.is_poll) or self._demand.must_poll:
            self._marks.is_asked |= self._timer.is_poll
            self._slots.expect_work()
            return
        names = sorted({name for pool in pools for name in pool.names})
        try:
            found = await self._query.next_due(names, margin_ms=EVER_MS, queues=None)
        except BaseException:
            self._slots.expect_work()
            raise
        self._advancer.asked(found.happened)
        if found.has_marked:
            self._marks.is_asked = True
        if found.suspects or found.lines_changed or found.lines_ready:
            self._slots.expect_work()
        self._expect(found)

    def _expect(self, found: NextDue) -> None:
        for queue, due_in_ms in found.by_queue.items():
            self._timer.expect(due_in_ms, queue)
        if found.others_in_ms is not None:
            self._timer.expect(found.others_in_ms)

    async def _claim_all(self, hinted: Collection[SlotPool]) -> _Round:
        """Claim tasks for each executor that has free capacity.

        The pool for suspects is skipped if no hint concerned it, because `_ask_next_due` also checks whether suspects are due.
        """
        done = _Round()
        for pool in self._slots:
            while pool.startable and self._slots.may_start:
                await self._start_waiting()
            limit = min(pool.wanted, self._query.size.rows)
            now = self._clock.monotonic()
            if not pool.has_more or limit <= 0 or now < pool.paused_until or not self._slots.may_claim:
                continue
            if pool.suspects and done.idle and pool not in hinted:
                done.searches(pool.take_unsearched())
                done.left_out.append(pool)
                continue
            await self._clock.sleep(self._hint_rate.pause_s(self._clock.monotonic()))
            worker_id = self._identity.worker_id
            queues = (
                pool.take_unsearched()
            )  # a hint that arrives while the statement is running adds its queue again
            done.searches(queues)
            try:
                taken = await self._claim(pool, limit, queues) if await self._query.is_worth_it(pool) else 0
                lacks_process = not taken and pool.name in _IN_PROCESSES and not pool.executor.free
                if lacks_process and await self._query.limits_wait(pool):
                    # Other tasks are claimed before their process starts, but a waiting task must not hold a permit.
                    pool.executor.prepare(1)
                    pool.expect()
                    pool.paused_until = self._clock.monotonic() + _PROCESS_CHECK_S
            except (DatabaseUnreachable, DatabaseReadOnly):
                # The next claim takes fewer tasks. If the failed claim took any tasks, they are not in the table.
                pool.expect()
                await give_back_unknown(self._session, self._table, worker_id)
                continue
            except BaseException:
                pool.expect()
                raise
            if pool.suspects and not taken:
                pool.paused_until = self._clock.monotonic() + SUSPECTS_EVERY_S
            if not pool.has_more:
                done.idle.append(pool)
        return done

    async def _claim(self, pool: SlotPool, limit: int, queues: Sequence[str] | None) -> int:
        """Claim batch after batch while more tasks are due than one claim takes. Return how many tasks were claimed.

        The first claim searches these queues, or all if `queues` is None. It is for an idle worker, which has searched the others before.

        The server searches for the next batch while the code of the current batch is starting. A claim for free slots takes tasks of
        any function. If it returned only tasks of fast functions, the next claim prefetches more tasks of these functions.
        """
        is_prefetch = pool.serves_all and pool.free < MANY_FREE
        batch = await self._ask(pool, limit, is_prefetch=is_prefetch, queues=queues)
        taken = len(batch)
        for _ in range(CLAIMS_IN_A_ROW):
            is_prefetch = pool.free - len(batch) < MANY_FREE and not (is_prefetch and pool.is_check_due)
            room = (
                pool.prefetch_room(not_added=len(batch)) if is_prefetch else pool.room(not_added=len(batch))
            )
            if (
                len(batch) < limit
                or room < (pool.least_prefetched if is_prefetch else MANY_FREE)
                or not self._slots.may_claim
            ):
                break
            if pool.startable or not (batch.is_started or is_prefetch):
                break  # tasks that the next claim starts would overtake the waiting attempts
            limit = min(room, self._query.size.rows)
            # The order matters: the next claim is sent before the code of this batch starts.
            batch = await self._scope.beside(
                self._ask(pool, limit, before=batch, is_prefetch=is_prefetch), partial(self._take_in, pool, batch), name="claim"
            )  # fmt: skip
            taken += len(batch)
        self._take_in(pool, batch)
        if batch.has_more:
            pool.expect()
        return taken

    async def _ask(
        self,
        pool: SlotPool,
        limit: int,
        *,
        before: ClaimBatch | None = None,
        is_prefetch: bool = False,
        queues: Sequence[str] | None = None,
    ) -> ClaimBatch:
        """Claim once and return the batch. `before` is an earlier batch that has not been added to the pool yet."""
        starts = (
            0
            if before and not before.is_started
            else pool.starts(not_added=len(before or ()), is_prefetch=is_prefetch)
        )
        if is_prefetch and not pool.serves_all:
            return await self._query.ask(pool, limit, names=sorted(pool.served), starts=starts)
        pool.asked_at = self._clock.monotonic()
        batch = await self._query.ask(pool, limit, names=pool.names, starts=starts, queues=queues)
        if batch:
            pool.served = frozenset(task.name for task in batch.claimed)
        return batch

    def _take_in(self, pool: SlotPool, batch: ClaimBatch) -> None:
        """Add the claimed tasks to the pool, and launch the tasks that the claim has already started."""
        self._table.claims_known += 1
        if not batch or batch.worker_id != self._identity.worker_id:
            return  # claimed under an id that has since been declared dead: recovery settles these tasks
        self._hint_rate.paid_off()
        now = self._clock.monotonic()
        started: list[Attempt] = []
        for task in batch.claimed:
            attempt = attempt_of(task, pool.name, self._definitions, self._policies, self._requests)
            attempt.claimed_at = now
            self._table.add(attempt)
            if task.started_at is None:
                pool.add(attempt)
            else:
                attempt.number, attempt.started_at = task.attempt, task.started_at
                started.append(attempt)
        self._slots.launch(pool, started)
        self._leases.claimed()
        self._messenger.room_changed()

    async def _start_waiting(self) -> None:
        if self._slots.may_start:
            await self._slots.start_waiting()

    def _has_more_to_do(self) -> bool:
        if not self._slots.may_start:
            return False
        now, may_claim = self._clock.monotonic(), self._slots.may_claim
        return any(
            pool.startable or pool.is_broken or (may_claim and pool.has_more and pool.wanted and now >= pool.paused_until)
            for pool in self._slots
        )  # fmt: skip

    async def _ask_next_due(self, done: _Round, asked_at: float) -> None:
        names = sorted({name for pool in (*done.idle, *done.left_out) for name in pool.names})
        # The claim missed tasks that became due while it was running. Their due times are in the past by now.
        margin_ms = math.ceil((self._clock.monotonic() - asked_at) * 1_000) + 1
        queues = None if done.queues is None else sorted(done.queues)
        next_due = await self._query.next_due(names, margin_ms=margin_ms, queues=queues)
        self._expect(next_due)
        for pool in done.left_out:
            if next_due.suspects:
                pool.expect()
        self._look_at_lines_again(done.idle, next_due.lines_changed)
        self._advancer.asked(next_due.happened)

    def _look_at_lines_again(self, idle: Sequence[SlotPool], lines_changed: bool) -> None:
        """Claim again if lines have changed. The pause grows while another worker holds the locks that the change needs."""
        self._fruitless = self._fruitless + 1 if lines_changed else 0
        if lines_changed:
            pause_s = _LINE_PAUSES.delay(self._fruitless) if self._fruitless > 1 else 0.0
            until = self._clock.monotonic() + pause_s
            for pool in idle:
                pool.expect()
                pool.paused_until = max(pool.paused_until, until)

    def _rest_s(self) -> float:
        now = self._clock.monotonic()
        paused = [pool.paused_until for pool in self._slots if pool.paused_until > now]
        late = [at for pool in self._slots if (at := pool.late_at) is not None]
        return max(0.0, min([self._timer.next_at, *paused, *late]) - now)
