"""The claim statement, with its cursors, its batch size and the marked tasks that this worker can run."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from uuid import UUID, uuid4

import msgspec
from msgspec import Struct, structs

from everbeat.domain.task.policy import StoredPolicy
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable, EverbeatError
from everbeat.runtime.clock import Clock
from everbeat.store import claims, lines
from everbeat.store.claims import CLAIM_BYTES, NO_FLOORS, Claimed, ClaimPlace, set_aside, suspects_wait
from everbeat.store.tasks import BEGINNING, MarkedGroup, NextDue, marked, next_due
from everbeat.worker.attempt import ALONE, ExecutorName
from everbeat.worker.claim.slots import MOST_SEARCHED, SlotPool
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.leases import LeaseTable

TRUSTED_S: Final = 1.0
_SHARE: Final = 0.05
"""The share of time to spend on claims from the start of a lane. Such claims are slow if there are many dead index entries."""
LONGEST_S: Final = 4.0
"""The longest time that a task inserted before a cursor waits for a claim from the start, in seconds. It overrides `_SHARE`."""
_MOST: Final = 1_000
_LINE_FLOORS_S: Final = 1.0
"""How long claims continue from the first ready line that a claim from the start has found, in seconds."""
LEAST_SEARCHED: Final = 8
"""How many queues a claim searches if the claims before it were full. A claim that is not full doubles the number, up to `MOST_SEARCHED`."""
WITHOUT_LINES_S: Final = 0.1
"""How long a busy worker claims no tasks of lines, in seconds, if it has seen no line for `BUSY_LINES_FOR_S`."""


class ClaimCursor:
    """Remembers where an executor's next claim continues: after the last task taken from each lane (queue, priority)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: Mapping[tuple[str, int], ClaimPlace] = NO_FLOORS
        self._until = 0.0
        self._looked_s = 0.0
        self._due_queues: list[str] = []
        self._turn = LEAST_SEARCHED
        self._line_floors: str | None = None
        self._lines_until = 0.0
        self._lines_asked_at = -math.inf

    def now(self) -> Mapping[tuple[str, int], ClaimPlace]:
        """Return the position of the last task taken from each (queue, priority), or no positions if a claim from the start is due."""
        if self._clock.monotonic() >= self._until:
            self._places, self._due_queues = NO_FLOORS, []
        return self._places

    @property
    def queues(self) -> Sequence[str] | None:
        """Return the queues that the next claim searches, or None for all.

        A search of all queues takes long if thousands of lanes have tasks. Until the next search from the start, claims take turns with
        the queues that had the most urgent tasks. A claim of few queues takes as long as a claim of one queue.
        """
        return self._due_queues[: self._turn] or None

    def includes_lines(self) -> bool:
        """Return whether the next claim includes tasks of lines: each claim from the start does, and one every `WITHOUT_LINES_S`."""
        now = self._clock.monotonic()
        is_due = not self._places or now >= self._lines_asked_at + WITHOUT_LINES_S
        if is_due:
            self._lines_asked_at = now
        return is_due

    def line_floors(self) -> str | None:
        """Return where the ready lines begin, or None if a claim from the start is due."""
        now = self._clock.monotonic()
        if now >= self._lines_until:
            self._line_floors, self._lines_until = None, now + _LINE_FLOORS_S
        return self._line_floors

    def learn_lines(self, claimed: Sequence[Claimed]) -> None:
        """Remember where the ready lines begin."""
        self._line_floors = next(
            (task.line_floors for task in claimed if task.line_floors), self._line_floors
        )

    def learn(self, claimed: Sequence[Claimed], *, is_full: bool, used: bool, looked_s: float) -> None:
        """Update the positions from the tasks of a claim, which must be in claim order.

        `is_full`: whether the claim took as many tasks as it could. `used`: whether the claim continued from a position.
        `looked_s`: how many seconds the server searched.
        """
        if self._due_queues and used:
            served, self._due_queues = self._due_queues[: self._turn], self._due_queues[self._turn :]
            if is_full:
                self._due_queues += served
                self._turn = max(LEAST_SEARCHED, self._turn // 2)
            else:
                self._turn = min(MOST_SEARCHED, self._turn * 2)
                if self._due_queues:
                    return
        if not is_full:
            self._places, self._due_queues = NO_FLOORS, []
            return
        if not used:
            # The first turn follows the last queue served. Otherwise the first queues would get the most turns.
            last = claimed[-1].queue
            due = next((task.due_queues for task in claimed if task.due_queues), [])
            self._due_queues = sorted(due, key=lambda queue: (queue <= last, queue))
            # A claim might have waited for a lock, so use the smaller of this search time and the previous one.
            costs_s, self._looked_s = min(looked_s, self._looked_s), looked_s
            self._until = self._clock.monotonic() + min(LONGEST_S, max(TRUSTED_S, costs_s / _SHARE))
        # A serial line has its own order, and marked tasks wait in separate lanes.
        reached = {
            (task.queue, task.priority): (task.enqueued_at, task.id)
            for task in claimed
            if not (task.in_line or task.is_marked)
        }
        places = {**self._places, **reached}
        self._places = places if len(places) <= _MOST else NO_FLOORS


PAGE: Final = 200
"""How many groups one statement reads."""
APART_S: Final = 0.2
"""The minimum time between two reads of the groups, in seconds."""
PAGES_APART_S: Final = 1.0
"""How long the worker waits before it reads the next page, in seconds."""
FORGET_S: Final = 60.0
"""How long a group is kept after it was last seen, in seconds. Its tasks can become due again after a retry or a release."""
MOST_KEPT: Final = 500
"""The maximum number of groups that the worker remembers, because a claim searches each of them. New groups replace the oldest ones."""

_log = logging.getLogger("everbeat.worker")


class _Seen(Struct):
    group: MarkedGroup
    at: float


class Marks:
    """The groups of marked tasks that this worker's code can run. Usually there are none.

    The worker reads the groups at startup, at each poll that finds marked tasks, and after a hint. Groups are matched by the same rule that declines
    arguments (`domain.task.needs`), so a worker never claims a task again that it has declined.
    """

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._session = environment.claim_session
        self._clock = environment.clock
        self._definitions = environment.plan.definitions
        self._queues = environment.plan.queues
        self._known: dict[tuple[UUID, str | None, int | None], _Seen] = {}
        self._after = BEGINNING
        self._asked_at = -math.inf
        self.is_asked = True
        """Whether to read the groups at the next tick, because marked tasks might be waiting."""
        self.again_in_s: float | None = None
        """How many seconds to wait before calling `learn` again, or None if the next poll or hint is soon enough."""

    def known(self, names: Collection[str]) -> Sequence[MarkedGroup]:
        """Return the groups of tasks with these names that a claim can take."""
        if not self._known:
            return ()
        return [seen.group for seen in self._known.values() if seen.group.name in names]

    async def learn(self) -> bool:
        """Read the groups, if `is_asked` is set. Return whether a claim can take any of them."""
        self.again_in_s = None
        goes_on = self._after != BEGINNING
        if not (self.is_asked or goes_on):
            return False
        now = self._clock.monotonic()
        early_s = self._asked_at + (PAGES_APART_S if goes_on else APART_S) - now
        if early_s > 0:
            self.again_in_s = early_s
            return False
        self._asked_at = now
        try:
            page = await self._session.run(marked(self._after, most=PAGE))
        except EverbeatError as problem:
            # Claims of unmarked tasks can continue without the groups.
            self._after, self.is_asked = BEGINNING, False
            _log.error("marked_tasks_not_read problem=%s", problem)
            return False
        if not goes_on:
            self.is_asked = False
        if page.after is not None:
            self.again_in_s = PAGES_APART_S
        self._after = page.after or BEGINNING
        fitting = [group for group in page.groups if self._understands(group)]
        self._keep(fitting)
        return bool(fitting)

    def _understands(self, group: MarkedGroup) -> bool:
        if group.queue is not None and self._queues is not None and group.queue not in self._queues:
            return False
        definition = self._definitions.get(group.name)
        return definition is not None and definition.codec.accepts.fits_needs(group.needs)

    def _keep(self, fitting: Sequence[MarkedGroup]) -> None:
        now = self._clock.monotonic()
        for group in fitting:
            place = group.needs_id, group.queue, group.priority
            self._known.pop(place, None)  # the group seen most recently comes last
            self._known[place] = _Seen(group, now)
        for place, seen in list(self._known.items()):
            if seen.at + FORGET_S > now and len(self._known) <= MOST_KEPT:
                break
            del self._known[place]


FIRST_CLAIM: Final = 100
MOST_CLAIMED: Final = 500
SOON_S: Final = 1.0
LATE_S: Final = 5.0
"""A reply that takes longer than this many seconds makes the next claim smaller. A reply within `SOON_S` makes it larger again."""
_SMALLEST: Final = 1 / 512


class ClaimSize:
    """Limits the size of the next claim to `rows` tasks and `most_bytes` bytes. At least one task is taken, however large it is."""

    def __init__(self) -> None:
        self.rows = FIRST_CLAIM
        self.most_bytes = CLAIM_BYTES
        self._share = 1.0
        self._mean = 0

    def answered(self, claimed: Sequence[Claimed], *, took_s: float) -> None:
        """Adjust the size of the next claim to the size of these tasks and to the time that the reply took."""
        if took_s > LATE_S:
            self._share = max(_SMALLEST, self._share / 2)
        elif took_s < SOON_S:
            self._share = min(1.0, self._share * 2)
        if claimed:
            self._mean = sum(len(task.args) + len(task.checkpoint or "") for task in claimed) // len(claimed)
        self._fit(MOST_CLAIMED if claimed else self.rows)

    def unanswered(self) -> None:
        """Make the next claim smaller, because this claim or its reply took too long."""
        self._share = max(_SMALLEST, self._share / 4)
        self._fit(self.rows // 4)

    def _fit(self, most: int) -> None:
        self.most_bytes = int(CLAIM_BYTES * self._share)
        self.rows = max(1, min(most, int(MOST_CLAIMED * self._share), self.most_bytes // (self._mean + 1)))


SLOW_S: Final = 0.01
"""A search from the start that takes longer than this may have passed over many tasks of functions that this worker does not have."""
ASIDE_APART_S: Final = 10.0
"""How long the worker waits after it has looked for such tasks and found none, in seconds."""
TOO_LONG_S: Final = 10.0
"""A failed claim is repeated only if it failed within this many seconds. A slower claim would take just as long again."""


class ClaimBatch(Struct, frozen=True):
    """The tasks of a claim, in order, and the worker id that claimed them. `has_more`: whether more tasks might be due now."""

    claimed: Sequence[Claimed]
    worker_id: str
    has_more: bool

    def __len__(self) -> int:
        return len(self.claimed)

    @property
    def is_started(self) -> bool:
        """Return whether the claim has started all of its tasks."""
        return not self.claimed or self.claimed[-1].started_at is not None


LINES_FOR_S: Final = 60.0
"""How long a worker applies the changes of lines before its claims after it has last seen a change, in seconds."""
BUSY_LINES_FOR_S: Final = 0.2
"""For how long a busy worker does so before each claim. After that, only a claim that `includes_lines` does."""


class ClaimQuery:
    """Runs the claim statement and keeps its cursors and its batch size."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        table: LeaseTable,
        policies: Mapping[str, StoredPolicy],
        marks: Marks,
    ) -> None:
        self.size = ClaimSize()
        self._is_over = False
        self._is_running = False
        self._session = environment.claim_session
        self._identity = environment.identity
        self._clock = environment.clock
        self._table = table
        stored = {name: policy.default_json() for name, policy in policies.items()}
        documents = {name: msgspec.Raw(json) for name, json in stored.items() if json is not None}
        self._policies = msgspec.json.encode(documents) if documents else None
        self._queues = environment.plan.queues
        self._is_traced = environment.plan.middleware.tracing is not None
        self._queue_priorities = dict(environment.plan.queue_priorities)
        self._marks = marks
        self._names = sorted(environment.plan.definitions)
        self._is_slow = False
        self._aside_at = -math.inf
        self._lines_seen_at = -math.inf
        self._lines_absent = False
        """Whether the last idle check has found no lines, so that claims leave them out. A full claim ends this: no check follows it."""
        self._lines_left_out = False
        self._after_queue: str | None = None
        self._cursors: dict[ExecutorName, ClaimCursor] = {}
        self._prefetch_cursors: dict[ExecutorName, tuple[Sequence[str], ClaimCursor]] = {}

    async def ask(
        self,
        pool: SlotPool,
        limit: int,
        *,
        names: Sequence[str],
        starts: int,
        queues: Sequence[str] | None = None,
    ) -> ClaimBatch:
        """Claim up to `limit` tasks of these functions, start the first `starts` of them, and return the batch.

        The claim searches `queues`, or all queues of the worker if it is None.

        The claim is repeated after a reconnect. Raises DatabaseUnreachable or DatabaseReadOnly if the connection failed and the
        claim took too long or the worker is shutting down. The failed claim might have taken tasks, which the caller must release.
        """
        worker_id, asked_at = self._identity.worker_id, self._clock.monotonic()
        cursor = self._cursor_of(pool, names)
        places = cursor.now()
        marked = self._marks.known(names)
        is_busy = False
        with_lines = cursor.includes_lines()
        if self._lines_absent and asked_at - self._lines_seen_at >= LINES_FOR_S:
            with_lines, self._lines_left_out = False, True
        has_lines = asked_at - self._lines_seen_at < (LINES_FOR_S if with_lines else BUSY_LINES_FOR_S)
        if has_lines:
            # The changes can concern any queue.
            is_busy, queues = await self._apply_line_changes(names, marked), None
        if queues is None:
            queues = cursor.queues or self._queues
        statement = claims.claim(
            worker_id=worker_id,
            claim_call=uuid4(),
            names=names,
            limit=limit,
            queues=queues,
            queue_priorities=self._queue_priorities,
            channel=self._session.target.channel,
            after_queue=self._after_queue,
            suspects=pool.suspects,
            starts=starts,
            policies=self._policies,
            alone=pool.name in ALONE,
            floors=places if queues is None else {lane: places[lane] for lane in places if lane[0] in queues},
            line_floors=cursor.line_floors(),
            most_bytes=self.size.most_bytes,
            marked=marked,
            with_lines=with_lines or has_lines,
            with_context=self._is_traced,
        )
        self._table.claims_sent += 1
        self._is_running, tries = True, self._session.tries
        try:
            claimed = await self._session.run(statement, goes_on=self._goes_on)
        except BaseException as problem:
            self._table.claims_known += 1
            if isinstance(problem, DatabaseUnreachable | DatabaseReadOnly):
                self.size.unanswered()
            raise
        finally:
            self._is_running = False
        took_s = self._clock.monotonic() - asked_at
        self.size.answered(claimed, took_s=took_s)
        self._is_slow |= took_s > SLOW_S and not places
        # A repeated claim does not report whether more tasks are due.
        is_busy |= self._session.tries > tries + 1
        has_more = self._learn(cursor, claimed, limit, used=bool(places))
        return ClaimBatch(claimed, worker_id, has_more=has_more or is_busy)

    def _learn(self, cursor: ClaimCursor, claimed: Sequence[Claimed], limit: int, *, used: bool) -> bool:
        """Remember where the next claim continues. Return whether it might find more tasks. `used`: this claim continued from a place."""
        is_cut, looked_s = (claimed[-1].is_cut, claimed[-1].looked_s) if claimed else (None, None)
        is_full = is_cut is True or len(claimed) >= limit
        self._lines_absent &= not is_full
        cursor.learn_lines(claimed)
        cursor.learn(claimed, is_full=is_full, used=used, looked_s=looked_s or 0.0)
        if not claimed:
            return is_full or used
        self._after_queue, lines_changed = claimed[-1].queue, claimed[-1].lines_changed is True
        if lines_changed or any(task.in_line for task in claimed):
            self._lines_seen_at = self._clock.monotonic()
        return is_full or used or lines_changed

    def reset_cursors(self) -> None:
        """Discard the cursors, because released tasks are waiting again before the positions that claims have reached."""
        self._cursors.clear()
        self._prefetch_cursors.clear()

    async def is_worth_it(self, pool: SlotPool) -> bool:
        """Return whether a claim for this pool can find tasks.

        A claim for suspects reads all waiting tasks if none is a suspect, so this cheaper check comes first.
        """
        if not pool.suspects:
            return True
        marked = self._marks.known(pool.names)
        return await self._session.run(suspects_wait(names=pool.names, queues=self._queues, marked=marked))

    async def limits_wait(self, pool: SlotPool) -> bool:
        """Return whether tasks with limits are ready. A claim takes them only if their code can start at once."""
        readers = [*pool.names, *{str(group.needs_id) for group in self._marks.known(pool.names)}]
        ready = lines.ready_limits(readers=readers, queues=self._queues, suspects=pool.suspects)
        return await self._session.run(ready)

    async def next_due(
        self, names: Sequence[str], *, margin_ms: int, queues: Sequence[str] | None
    ) -> NextDue:
        """Return when the next task is due, and what else is waiting.

        Read these queues, or all queues of the worker if `queues` is None. Include tasks that became due in the last `margin_ms` ms. Lines
        that are ready count as changed if the last claim has left lines out.
        """
        marked = self._marks.known(names)
        found = await self._session.run(
            next_due(
                names=names,
                queues=self._queues if queues is None else queues,
                margin_ms=margin_ms,
                marked=marked,
            )
        )
        if found.lines_changed or (found.lines_ready and self._lines_left_out):
            found = structs.replace(found, lines_changed=True)
            self._lines_seen_at = self._clock.monotonic()
        self._lines_absent, self._lines_left_out = not (found.lines_changed or found.lines_ready), False
        return found

    async def set_aside(self) -> float | None:
        """Mark tasks of unknown functions in front of a lane, if claims are slow. Return when to call again, in seconds, or None.

        Claims would pass over these tasks again and again. Half of the time is left for claims.
        """
        began_at = self._clock.monotonic()
        if not self._is_slow or began_at < self._aside_at:
            return None
        self._is_slow = False
        channel = self._session.target.channel
        try:
            aside = set_aside(names=self._names, queues=self._queues, channel=channel)
            count = await self._session.run(aside)
        except EverbeatError as problem:
            # Claims find the same tasks without the marks, but later.
            count = 0
            _log.error("foreign_tasks_not_marked problem=%s", problem)
        now = self._clock.monotonic()
        pause_s = now - began_at if count else ASIDE_APART_S
        self._aside_at = now + pause_s
        return pause_s if count else None

    async def _apply_line_changes(self, names: Sequence[str], marked: Sequence[MarkedGroup]) -> bool:
        """Bring the lines up to date, so that the next claim finds the tasks that are ready. Return whether changes are left.

        This is a separate transaction, because the locks of a claim are held until its reply has been delivered.
        """
        readers = [*names, *{str(group.needs_id) for group in marked}]
        channel = self._session.target.channel
        applied = await self._session.run(
            lines.apply_changes(readers=readers, queues=self._queues, channel=channel)
        )
        if applied.applied:
            self._lines_seen_at = self._clock.monotonic()
        return applied.is_busy or applied.applied >= lines.MOST_CHANGES

    async def end(self, *, patience_s: float) -> None:
        """Stop repeating claims, and interrupt a claim that is still running after `patience_s` seconds."""
        self._is_over = True
        await self._clock.sleep(patience_s)
        if self._is_running:
            await self._session.interrupt()

    def _cursor_of(self, pool: SlotPool, names: Sequence[str]) -> ClaimCursor:
        """Return the cursor for these functions. A claim for only some functions skips other tasks, so it has its own cursor."""
        if len(names) == len(pool.names):
            return self._cursors.setdefault(pool.name, ClaimCursor(self._clock))
        asked_for, cursor = self._prefetch_cursors.get(pool.name, ((), None))
        if cursor is None or asked_for != names:
            cursor = ClaimCursor(self._clock)
            self._prefetch_cursors[pool.name] = names, cursor
        return cursor

    def _goes_on(self, took_s: float) -> bool:
        return not self._is_over and took_s < TOO_LONG_S
