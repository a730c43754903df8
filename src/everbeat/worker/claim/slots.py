"""The slots of each executor: how many more tasks to claim, and attempts that are waiting for a free slot."""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.runtime.clock import Backoff, Clock
from everbeat.store import leases
from everbeat.worker.attempt import ALONE, Attempt, AttemptEnd, Declined, ExecutorName, Stage
from everbeat.worker.claim.durations import PREFETCH_WITHIN_S, RunDurations
from everbeat.worker.environment import MODES, WorkerEnvironment, WorkerPlan
from everbeat.worker.executors.executor import Executor
from everbeat.worker.leases import release
from everbeat.worker.lifecycle import AttemptLifecycle
from everbeat.worker.liveness import Liveness
from everbeat.worker.shutdown import Recycling

_log = logging.getLogger("everbeat.worker")
START_WITHIN_S: Final = 0.05
"""The claim itself starts tasks that will get a slot within this many seconds. A separate start would cost as much as the run."""
STARTED_PER_SLOT: Final = 10
"""How many tasks the claim itself can start for each slot, ahead of those that run."""
LOWEST_QUEUE_PRIORITY = 100
MANY_FREE: Final = 50
"""A worker with at least this many free slots does not prefetch. A claim for that many tasks is efficient and starts all of them."""
GIVE_BACK_AFTER_S: Final = PREFETCH_WITHIN_S + 0.1
"""How long a claimed task can wait for a slot before it is released, in seconds. The extra 0.1 s allows for a busy machine."""
CHECK_EVERY_S: Final = 0.05
"""The delay of the next claim while more than half of the prefetched tasks wait, in seconds. More would hold up urgent tasks."""
MOST_SEARCHED: Final = 64
"""The maximum number of queues that a claim searches if it need not search all of them."""
_RESTS: Final = Backoff(first_s=0.5, longest_s=30.0)


class SlotPool(Struct, kw_only=True):
    """The attempts that are waiting for a slot of one executor, and the number of further tasks to claim for it.

    `names`: the functions that the executor runs. `prefetch`: the maximum number of waiting attempts.

    `waiting`: attempts that are claimed but not started. `started`: attempts that the database has started and that will get a slot
    almost at once.

    `unsearched`: the queues in which tasks might be due that no claim has searched for yet, or None for any queue. `served`: the functions
    of the last claim. Their run durations determine how many more tasks can wait.

    `unsettled`: the number of outcomes per executor that have not been written yet. `suspects`: True to claim only suspects, False to
    leave them to the solo executor, None to claim all tasks.
    """

    name: ExecutorName
    names: tuple[str, ...]
    executor: Executor
    prefetch: int
    queue_priorities: Mapping[str, int]
    unsettled: Counter[ExecutorName]
    pace: RunDurations
    suspects: bool | None = None
    waiting: list[Attempt] = []
    started: list[Attempt] = []
    served: frozenset[str] = frozenset()
    asked_at: float = 0.0
    unsearched: set[str] | None = None
    is_broken: bool = False
    paused_until: float = 0.0
    failures: int = 0

    @property
    def has_more(self) -> bool:
        """Return whether tasks might be due that no claim has searched for yet."""
        return self.unsearched is None or bool(self.unsearched)

    def expect(self, queue: str | None = None) -> None:
        """Record that tasks might be due in this queue, or in any queue if it is None."""
        if queue is None or self.unsearched is None or len(self.unsearched) >= MOST_SEARCHED:
            self.unsearched = None
        else:
            self.unsearched.add(queue)

    def take_unsearched(self) -> Sequence[str] | None:
        """Return the queues that the next claim has to search, or None for all. From now on, they count as searched."""
        queues, self.unsearched = self.unsearched, set()
        return None if queues is None else sorted(queues)

    @property
    def wanted(self) -> int:
        """Return how many more tasks to claim now."""
        return self.room()

    def room(self, *, not_added: int = 0) -> int:
        """Return how many more tasks of any function to claim: one for each slot that is free or soon will be.

        `not_added` is the number of tasks from an earlier claim that are not in the pool yet.
        """
        free = self.free - not_added
        if free >= MANY_FREE or not self._prefetches:
            return max(0, free)
        most, ahead = self._most_prefetched, self.prefetch_room(not_added=not_added)
        if free <= 0 and 2 * ahead < most and not self.is_check_due:
            return 0
        if self.serves_all:
            return ahead
        is_fast = self.pace.is_fast
        slow = sum(not is_fast(attempt.task.name) for attempt in self.waiting)
        return max(0, free, min(ahead, self._soon - slow))

    def prefetch_room(self, *, not_added: int = 0) -> int:
        """Return how many more tasks of the functions in `served` to prefetch, so that all of them start within 0.25 s."""
        return max(0, self._most_prefetched + self.free - not_added) if self._prefetches else 0

    def starts(self, *, not_added: int = 0, is_prefetch: bool = False) -> int:
        """Return how many tasks the next claim starts at once.

        It starts none while attempts are waiting, because its tasks would overtake them.
        """
        if self.waiting:
            return 0
        if self._most_started and not is_prefetch:
            return self._soon
        return max(0, self._ready + (self._most_started if is_prefetch else 0) - not_added)

    @property
    def is_check_due(self) -> bool:
        """Return whether a claim for all functions is due, because more urgent tasks might have arrived since the last one."""
        return self.pace.now() - self.asked_at >= CHECK_EVERY_S

    @property
    def serves_all(self) -> bool:
        """Return whether the last claim returned tasks of every function, so that a claim that prefetches can be for all of them."""
        return bool(self.served) and len(self.served) == len(self.names)

    @property
    def startable(self) -> int:
        """Return how many waiting attempts can be started now: one per free slot, and fast ones for slots that will be free soon."""
        if not self.waiting:
            return 0
        count = max(0, min(self._ready, len(self.waiting)))
        if (most := self._most_started) and 2 * len(self.started) <= most:
            limit = min(len(self.waiting), self._ready + most)
            while count < limit and self.waiting[count].task.name in self.served:
                count += 1
        return count

    @property
    def late_at(self) -> float | None:
        """Return when the first attempt without a free slot will have waited too long, or None if every attempt has a slot."""
        return min((attempt.claimed_at + GIVE_BACK_AFTER_S for attempt in self._beyond), default=None)

    def pause(self, now: float) -> list[Attempt]:
        """Pause claiming, because the executor's processes do not start, and return the waiting attempts.

        Each further failure makes the pause longer.
        """
        self.is_broken = False
        self.expect()
        self.failures += 1
        self.paused_until = now + _RESTS.delay(self.failures)
        return self.clear()

    def clear(self) -> list[Attempt]:
        """Empty the pool, and return the waiting attempts."""
        held = [*self.started, *self.waiting]
        self.started, self.waiting = [], []
        return held

    def add(self, attempt: Attempt) -> None:
        """Queue a claimed attempt in priority order, because a later claim can return a more urgent task."""
        if self.waiting and self._rank(attempt) < self._rank(self.waiting[-1]):
            insort(self.waiting, attempt, key=self._rank)
        else:  # the usual case, because a claim returns tasks in this order
            self.waiting.append(attempt)

    def add_started(self, attempts: Sequence[Attempt]) -> None:
        """Queue started attempts in priority order."""
        self.started = sorted([*self.started, *attempts], key=self._rank) if self.started else list(attempts)

    def ended(self, attempt: Attempt, end: AttemptEnd) -> None:
        """Record how long the code held the slot, unless the function declined the arguments and no code ran."""
        if not isinstance(end, Declined):
            self.pace.ran(attempt.task.name, self.pace.now() - attempt.launched_at)

    def take(self) -> list[Attempt]:
        """Remove and return the attempts to start now. Drop attempts that lost their lease while they were waiting."""
        self.waiting = [attempt for attempt in self.waiting if attempt.stage is Stage.CLAIMED]
        self.executor.prepare(len(self.waiting) + len(self.started))
        count = self.startable
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def take_started(self) -> list[Attempt]:
        """Remove and return the started attempts that get a slot now. Drop attempts that lost their lease while they were waiting."""
        self.started = [attempt for attempt in self.started if attempt.stage is Stage.STARTING]
        count = self.executor.free
        taken, self.started = self.started[:count], self.started[count:]
        return taken

    def take_late(self) -> list[Attempt]:
        """Remove and return the first attempt that has waited too long for a slot, and all attempts behind it.

        Their functions are not prefetched for a while.
        """
        now, beyond = self.pace.now(), self._beyond
        first = next(
            (place for place, one in enumerate(beyond) if now >= one.claimed_at + GIVE_BACK_AFTER_S),
            len(beyond),
        )
        late = beyond[first:]
        if late:
            self.pace.stop_prefetch({attempt.task.name for attempt in late})
            gone = set(late)
            self.started = [attempt for attempt in self.started if attempt not in gone]
            self.waiting = [attempt for attempt in self.waiting if attempt not in gone]
            self.expect()
        return late

    @property
    def free(self) -> int:
        """Return the number of empty slots minus the number of waiting attempts.

        The number is negative if more attempts are waiting than slots are free.
        """
        held = self.executor.occupied + len(self.waiting) + len(self.started) + self._lag
        return self.executor.slots - held

    @property
    def _ready(self) -> int:
        """Return the number of slots in which code can start now, minus the number of started attempts.

        The number is negative if there are more started attempts than such slots.
        """
        return self.executor.free - len(self.started) - self._lag

    @property
    def _soon(self) -> int:
        """Return how many slots are free or will be free within 0.25 s.

        A busy slot counts if it has been running a fast function for less than that time.
        """
        is_fast, long_ago = self.pace.is_fast, self.pace.now() - PREFETCH_WITHIN_S
        ending = sum(
            attempt.launched_at > long_ago and is_fast(attempt.task.name) for attempt in self.executor.running
        )
        return max(0, self.executor.free + ending)

    @property
    def _beyond(self) -> list[Attempt]:
        return [*self.started, *self.waiting][max(0, self.executor.slots - self.executor.occupied) :]

    @property
    def _prefetches(self) -> bool:
        # While outcomes are late, other workers should get the tasks.
        return bool(self.prefetch and not self._lag and self.pace.runs_within(self.served, PREFETCH_WITHIN_S))

    @property
    def _most_prefetched(self) -> int:
        """Return how many attempts can wait for busy slots if the last of them must start within 0.25 s."""
        return min(self.prefetch, self._soon * self.pace.runs_within(self.served, PREFETCH_WITHIN_S))

    @property
    def least_prefetched(self) -> int:
        """Return how many tasks a claim must prefetch if another claim has just prefetched some: a small claim costs almost as much."""
        return max(1, self._most_prefetched // 2)

    @property
    def _most_started(self) -> int:
        """Return how many of the prefetched attempts the claim itself can start. If the process dies, all of these count as running."""
        each = self.prefetch and self.pace.runs_within(self.served, START_WITHIN_S)
        return each and min(self.prefetch, self._soon * each, STARTED_PER_SLOT * self.executor.slots)

    @property
    def _lag(self) -> int:
        # Limits memory use while outcomes cannot be written: two attempts per slot, plus `prefetch` very fast ones.
        over = self.unsettled[self.name] - self.executor.slots
        if over > 0 and self.prefetch and self.pace.runs_within(self.served, START_WITHIN_S):
            over -= self.prefetch
        return max(0, over)

    def _rank(self, attempt: Attempt) -> tuple[int, int, datetime, int]:
        task = attempt.task
        queue_priority = self.queue_priorities.get(task.queue, LOWEST_QUEUE_PRIORITY)
        return queue_priority, task.priority, task.enqueued_at, task.id.int


def make_pools(
    plan: WorkerPlan,
    executors: Mapping[ExecutorName, Executor],
    *,
    unsettled: Counter[ExecutorName],
    clock: Clock,
) -> dict[ExecutorName, SlotPool]:
    """Return a pool for each executor. The solo executor, if any, claims the suspects of executors whose tasks share a process."""
    names = {mode: plan.names(mode) if mode in executors else () for mode in MODES}
    has_solo = "solo" in executors
    if not plan.task_process_argv:
        _log.info(
            "no_solo_executor reason=%r",
            "a new process could not import the app, so suspects share a process with other tasks",
        )

    def pool(name: ExecutorName, executor: Executor) -> SlotPool:
        is_solo = name == "solo"
        return SlotPool(
            name=name,
            names=(*names["async"], *names["thread"]) if name == "solo" else names[name],
            executor=executor,
            prefetch=0 if is_solo else plan.config.prefetch,
            queue_priorities=plan.queue_priorities,
            unsettled=unsettled,
            pace=RunDurations(clock),
            suspects=None if name == "process" or not has_solo else is_solo,
        )

    return {name: pool(name, executor) for name, executor in executors.items()}


class Slots:
    """The slots of all executors. Code runs only in a slot, and only after the database has acknowledged its claim or start."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        executors: Mapping[ExecutorName, Executor],
        lifecycle: AttemptLifecycle,
        liveness: Liveness,
        recycling: Recycling,
    ) -> None:
        self.is_closed = False
        """Whether the worker is shutting down and no longer claims or starts anything."""
        self.is_quiet = False
        """Whether the worker is in quiet mode, in which it claims and starts nothing until an operator resumes it."""
        self._session = environment.claim_session
        self._clock = environment.clock
        self._lifecycle = lifecycle
        self._liveness = liveness
        self._recycling = recycling
        self._default_policies: dict[str, bytes | None] = {}
        self.pools = make_pools(
            environment.plan, executors, unsettled=lifecycle.unsettled, clock=environment.clock
        )

    def __iter__(self) -> Iterator[SlotPool]:
        return iter(self.pools.values())

    @property
    def may_start(self) -> bool:
        """Return whether code may start."""
        return not (self.is_closed or self.is_quiet) and self._liveness.may_start

    @property
    def may_claim(self) -> bool:
        """Return whether tasks may be claimed."""
        return self.may_start and self._liveness.may_claim

    @property
    def room(self) -> int:
        """Return how many more tasks to claim now, not counting suspects."""
        return 0 if self.is_quiet else sum(pool.wanted for pool in self if not pool.suspects)

    def expect_work(self, queue: str | None = None) -> None:
        """Record that tasks might be due for any executor, in this queue, or in any queue if it is None."""
        for pool in self:
            pool.expect(queue)

    def freed(self, name: ExecutorName) -> None:
        """Reset the failure count of this executor if it has a free slot, because it is working again."""
        pool = self.pools[name]
        if pool.executor.free:
            pool.failures = 0

    def broken(self, name: ExecutorName) -> bool:
        """Record that an executor cannot run code, which pauses claims for it.

        Return whether the executor had already failed, with no success since then.
        """
        pool = self.pools[name]
        pool.is_broken = True
        return pool.failures > 0

    def launch(self, pool: SlotPool, attempts: Sequence[Attempt]) -> None:
        """Run the code of attempts that the database has started, or keep the attempts until slots are free."""
        if not pool.started and len(attempts) <= pool.executor.free:
            self._launch_now(pool, attempts)
            return
        for attempt in attempts:
            attempt.move("START")
        pool.add_started(attempts)
        self._fill(pool)

    def slot_freed(self) -> None:
        """Run the code of started attempts that get a slot now."""
        for pool in self:
            self._fill(pool)

    def _default_policy(self, attempt: Attempt) -> bytes | None:
        """Return the stored form of the policy of the attempt's function."""
        name = attempt.task.name
        if name not in self._default_policies:
            self._default_policies[name] = attempt.policy.default_json()
        return self._default_policies[name]

    async def start_waiting(self) -> None:
        """Start the waiting attempts for which there is a slot, in one statement."""
        if not (batch := [attempt for pool in self for attempt in pool.take()]):
            return
        for attempt in batch:
            attempt.move("START")
        try:
            statement = leases.start(
                [attempt.lease for attempt in batch], channel=self._session.target.channel,
                policies={one.id: self._default_policy(one) for one in batch if one.task.policy is None},
                alone={one.claim_id for one in batch if one.executor_name in ALONE},
            )  # fmt: skip
            answers = await self._session.run(statement)
        except BaseException:
            self._wait_again(batch)
            raise
        started: list[Attempt] = []
        for attempt in batch:
            answer = answers.get(attempt.claim_id)
            if attempt.stage is not Stage.STARTING:
                continue  # lost while the statement was running
            if answer is None or answer.verdict != "started":
                self._lifecycle.not_started(attempt, "lost" if answer is None else answer.verdict)
                continue
            attempt.number, attempt.started_at = answer.attempt or 1, answer.started_at
            started.append(attempt)
        for pool in self:
            if of_pool := [attempt for attempt in started if attempt.executor_name == pool.name]:
                self.launch(pool, of_pool)

    async def give_back_late(self) -> bool:
        """Release the attempts that have waited too long for a slot, in one statement. Return whether any were released."""
        late = [attempt for pool in self for attempt in pool.take_late()]
        self.slot_freed()  # the attempts ahead of the late ones get the free slots first
        await self._give_back(late)
        return bool(late)

    async def give_back_broken(self) -> None:
        """Release the waiting attempts of executors whose processes do not start. Claims for these executors resume after a pause."""
        for pool in self:
            if pool.is_broken:
                await self._give_back(pool.pause(self._clock.monotonic()))

    async def give_back_all(self) -> None:
        """Release all attempts whose code has not started."""
        await self._give_back([attempt for pool in self for attempt in pool.clear()])

    def _launch_now(self, pool: SlotPool, attempts: Sequence[Attempt]) -> None:
        may_begin = self._liveness.may_start and not self.is_closed
        launched = [attempt for attempt in attempts if self._lifecycle.launch(attempt, may_begin=may_begin)]
        self._lifecycle.count_starts(launched)
        if launched and pool.name not in ALONE:  # executors in ALONE recycle their own processes
            pool.failures = 0
            self._recycling.count_launched(len(launched))

    def _fill(self, pool: SlotPool) -> None:
        if pool.started and pool.executor.free > 0:
            self._launch_now(pool, pool.take_started())

    async def _give_back(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if attempt.stage is Stage.STARTING:
                # If no slot is free, this launch releases the attempt.
                self._launch_now(self.pools[attempt.executor_name], (attempt,))
        held = [attempt for attempt in attempts if attempt.stage is Stage.CLAIMED]
        if not held:
            return
        try:
            await release(self._session, [one.lease for one in held])
        except BaseException:
            self._wait_again(held)
            raise
        for attempt in held:
            self._lifecycle.not_started(attempt, "released")

    def _wait_again(self, batch: Sequence[Attempt]) -> None:
        for attempt in batch:
            if attempt.move("START_FAILED") != "IGNORE":
                self.pools[attempt.executor_name].add(attempt)
