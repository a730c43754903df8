"""Counts over time: events of tasks, and tasks that wait. The classes of durations, and the records that reads return."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from msgspec import Struct, field
from msgspec.structs import asdict

CLASS_BOUNDS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1_800.0, 3_600.0, 14_400.0,
    43_200.0, 86_400.0,
)  # fmt: skip
"""The largest duration of each class, in seconds. The 24th class holds longer durations. Stored counts refer to these bounds: never change them."""
CLASSES: Final = len(CLASS_BOUNDS_S) + 1
OTHER_NAME: Final = "other"
"""The name under which a tree counts all task functions after the first 200, and all queues after the first 1,000."""
MOST_NAMES: Final = 200
MOST_QUEUES: Final = 1_000
SUMS_KEPT_S: Final = {43_200: 31 * 86_400, 3_600: 84 * 3_600, 300: 48 * 3_600, 60: 2 * 3_600}
"""For how many seconds sums of rates and peaks of depths are kept, by the length of their spans in seconds. Longer spans come first: charts read
shorter ones only after the end of the longer ones."""
SUMS_SETTLE_S: Final = {43_200: 49 * 3_600}
"""How many seconds after its end a span is summed, if that is not `LEAST_SETTLE_S`. The minutes of half a day are added up to hours first."""
LEAST_SETTLE_S: Final = 600
"""Supervisors write a minute for at most five minutes. A sample is stored within seconds."""
_MOST_UNCOUNTED: Final = 1_000
AttemptResult: TypeAlias = Literal[
    "completed", "failed", "retried", "cancelled", "suspended", "released", "crashed", "lost"
]
"""How an attempt ended, as a column of `rates`."""


def class_of(seconds: float) -> int:
    """Return the index of the class that a duration belongs to."""
    return bisect_left(CLASS_BOUNDS_S, seconds)


def _no_counts() -> list[int]:
    return [0] * CLASSES


class RateCounts(Struct, array_like=True):
    """Counts of one queue and task function: a part of a row of `rates`."""

    queue: str
    name: str
    started: int = 0
    completed: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    suspended: int = 0
    released: int = 0
    crashed: int = 0
    lost: int = 0
    expired: int = 0
    wait_s: float = 0.0
    run_s: float = 0.0
    waits: list[int] = field(default_factory=_no_counts)
    runs: list[int] = field(default_factory=_no_counts)

    def add(self, other: RateCounts) -> None:
        """Add the counts of `other`."""
        self.started += other.started
        self.completed += other.completed
        self.failed += other.failed
        self.retried += other.retried
        self.cancelled += other.cancelled
        self.suspended += other.suspended
        self.released += other.released
        self.crashed += other.crashed
        self.lost += other.lost
        self.expired += other.expired
        self.wait_s += other.wait_s
        self.run_s += other.run_s
        self.waits = [a + b for a, b in zip(self.waits, other.waits, strict=True)]
        self.runs = [a + b for a, b in zip(self.runs, other.runs, strict=True)]


RefusedVerb: TypeAlias = Literal["start", "store", "settle"]
"""The write that an attempt without a lease tried: its start, something that its code stored, or its outcome."""


class RecoveredLease(Struct, frozen=True, array_like=True):
    """A recovery as metrics count it. `fence` is that of the dead lease.

    `notice_s` is the time from the last sign of life until the death was noticed.
    """

    task_id: UUID
    fence: int
    queue: str
    name: str
    was: str
    noticed_by: str
    action: str
    notice_s: float
    is_poison: bool


class EventCounts(Struct, array_like=True):
    """The counts of a process since they were last taken. `sent` has a queue, a task function and a number in each entry."""

    recovered: list[RecoveredLease] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    sent: list[tuple[str, str, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.recovered or self.refused or self.sent)

    def refuse(self, verb: RefusedVerb) -> None:
        """Count a write that was refused because its attempt had lost its lease."""
        self.refused[verb] = self.refused.get(verb, 0) + 1

    def add(self, other: EventCounts) -> None:
        """Add the counts of another process."""
        self.recovered += other.recovered
        self.sent += other.sent
        for verb, count in other.refused.items():
            self.refused[verb] = self.refused.get(verb, 0) + count


class RateCounter:
    """Counts the events of attempts in one process, and in `events` other events, until they are taken. Not thread-safe.

    For each attempt, its durations are only put into lists, so that a drain of short tasks is not slowed down. The numbers of attempts,
    and the classes of durations, are found for many attempts at once.
    """

    def __init__(self) -> None:
        self.events = EventCounts()
        self._counts: dict[tuple[str, str], RateCounts] = {}
        self._waits: dict[tuple[str, str], list[float]] = {}
        self._runs: dict[tuple[str, str], list[float]] = {}

    def waits(self, queue: str, name: str) -> list[float]:
        """Return the list that takes a number for each attempt whose code begins: for how many seconds its task was due.

        Append to it at once. After the next call of another method, the list might have been counted already.
        """
        if (waits := self._waits.get((queue, name))) is None:
            waits = self._waits[queue, name] = []
        elif len(waits) >= _MOST_UNCOUNTED:
            self._count_waits(queue, name, waits)
        return waits

    def runs(self, queue: str, name: str) -> list[float]:
        """Return the list that takes a number for each attempt that completes its task: for how many seconds its code ran.

        Append to it at once. After the next call of another method, the list might have been counted already.
        """
        if (runs := self._runs.get((queue, name))) is None:
            runs = self._runs[queue, name] = []
        elif len(runs) >= _MOST_UNCOUNTED:
            self._count_runs(queue, name, runs)
        return runs

    def ended(
        self,
        queue: str,
        name: str,
        result: AttemptResult,
        run_s: float | None = None,
        error: bytes | None = None,
    ) -> None:
        """Count an attempt that ended `run_s` seconds after its code began. None means that this time is unknown.

        `error` is for subclasses that record more.
        """
        del error
        counts = self._counts_of(queue, name)
        setattr(counts, result, getattr(counts, result) + 1)
        if run_s is not None:
            counts.run_s += max(0.0, run_s)
            counts.runs[class_of(run_s)] += 1

    def expired(self, queue: str, name: str) -> None:
        """Count a task that expired before an attempt started."""
        self._counts_of(queue, name).expired += 1

    def add(self, counts: Iterable[RateCounts]) -> None:
        """Add the counts of another process."""
        for each in counts:
            self._counts_of(each.queue, each.name).add(each)

    def take(self) -> list[RateCounts]:
        """Return the counts since the last call."""
        taken = self.waiting()
        # The lists are dropped, too: a process that serves many queues in turn does not keep one for each of them.
        self._counts, self._waits, self._runs = {}, {}, {}
        return taken

    def take_events(self) -> EventCounts:
        """Return the counts of other events since the last call."""
        taken, self.events = self.events, EventCounts()
        return taken

    def waiting(self) -> list[RateCounts]:
        """Return the counts that the next call of `take` will return."""
        for (queue, name), waits in self._waits.items():
            self._count_waits(queue, name, waits)
        for (queue, name), runs in self._runs.items():
            self._count_runs(queue, name, runs)
        return list(self._counts.values())

    def _count_waits(self, queue: str, name: str, waits: list[float]) -> None:
        if waits:
            counts = self._counts_of(queue, name)
            counts.started += len(waits)
            counts.wait_s += _classify(waits, counts.waits)
            waits.clear()

    def _count_runs(self, queue: str, name: str, runs: list[float]) -> None:
        if runs:
            counts = self._counts_of(queue, name)
            counts.completed += len(runs)
            counts.run_s += _classify(runs, counts.runs)
            runs.clear()

    def _counts_of(self, queue: str, name: str) -> RateCounts:
        if (counts := self._counts.get((queue, name))) is None:
            counts = self._counts[queue, name] = RateCounts(queue, name)
        return counts


def _classify(durations: list[float], classes: list[int]) -> float:
    """Add the numbers of durations to the classes, and return the sum of the durations in seconds. A negative one counts as 0."""
    durations.sort()
    begin = 0
    while begin < len(durations):
        index = class_of(durations[begin])
        end = (
            bisect_right(durations, CLASS_BOUNDS_S[index], begin)
            if index < len(CLASS_BOUNDS_S)
            else len(durations)
        )
        classes[index] += end - begin
        begin = end
    return sum(durations[bisect_left(durations, 0.0) :])


class RateBook:
    """The counts of a tree by minute, as absolute values, and which of them are to be written.

    Each row has a minute, a queue and a name. The numbers of names and queues are limited, because each of them is a row in each minute.
    """

    def __init__(self, *, most_names: int = MOST_NAMES, most_queues: int = MOST_QUEUES) -> None:
        self._minutes: dict[datetime, dict[tuple[str, str], RateCounts]] = {}
        self._changed: dict[tuple[datetime, str, str], None] = {}
        self._totals: dict[tuple[str, str], RateCounts] = {}
        self._most = {"name": most_names, "queue": most_queues}
        self._known: dict[str, set[str]] = {"name": set(), "queue": set()}

    def add(self, minute: datetime, counts: Collection[RateCounts]) -> None:
        """Add counts to a minute."""
        rows = self._minutes.setdefault(minute, {})
        for each in counts:
            queue, name = self._limited("queue", each.queue), self._limited("name", each.name)
            if (row := rows.get((queue, name))) is None:
                row = rows[queue, name] = RateCounts(queue, name)
            row.add(each)
            self._changed[minute, queue, name] = None
        self._join(self._totals, counts)

    def take_changed(self, most: int) -> list[Mapping[str, Any]]:
        """Return up to `most` rows that have changed and mark them as written. Each is a mapping with the columns of `rates`."""
        keys = [*self._changed][:most]
        for key in keys:
            del self._changed[key]
        return [{"at": minute, **asdict(self._minutes[minute][queue, name])} for minute, queue, name in keys]

    def put_back(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Mark rows as changed again, because they might not have been written."""
        for row in rows:
            if row["at"] in self._minutes:
                self._changed[row["at"], row["queue"], row["name"]] = None

    def forget(self, *, before: datetime, after: datetime) -> None:
        """Drop the minutes that the database does not accept."""
        self._minutes = {minute: rows for minute, rows in self._minutes.items() if before <= minute <= after}
        self._changed = {key: None for key in self._changed if key[0] in self._minutes}

    def begin_again(self) -> None:
        """Drop all minutes, because their rows are continued under another id."""
        self._minutes, self._changed = {}, {}

    def totals(self, *more: Iterable[RateCounts]) -> list[RateCounts]:
        """Return the counts of all minutes, also of those that were dropped, together with `more` counts."""
        joined: dict[tuple[str, str], RateCounts] = {}
        for counts in (self._totals.values(), *more):
            self._join(joined, counts)
        return list(joined.values())

    def _join(self, into: dict[tuple[str, str], RateCounts], counts: Iterable[RateCounts]) -> None:
        for each in counts:
            key = self._limited("queue", each.queue), self._limited("name", each.name)
            into.setdefault(key, RateCounts(*key)).add(each)

    def _limited(self, kind: str, value: str) -> str:
        known = self._known[kind]
        if value not in known:
            if len(known) >= self._most[kind]:
                return OTHER_NAME
            known.add(value)
        return value


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """Return the duration in seconds below which `share` (0 to 1) of the counted durations lie, or None if none was counted.

    Within its class, the position is interpolated. The result for the 24th class is its lower bound, a day.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for index, count in enumerate(counts[: CLASSES - 1]):
        if count and below + count >= rank:
            lower = CLASS_BOUNDS_S[index - 1] if index else 0.0
            return lower + (CLASS_BOUNDS_S[index] - lower) * max(0.0, rank - below) / count
        below += count
    return CLASS_BOUNDS_S[-1]


class RateBucket(Struct, frozen=True):
    """The events of tasks in one span of time. `queue` and `name` are None if the counts are those of all queues or all task functions.

    `started` counts attempts whose code began, also after a sleep. `waits` counts starts by the seconds since the task was due. `runs` counts
    ends by the seconds since the start. `CLASS_BOUNDS_S` has the bounds of the classes. `wait_s` and `run_s` are the sums of these seconds.
    """

    at: datetime
    queue: str | None
    name: str | None
    started: int
    completed: int
    failed: int
    retried: int
    cancelled: int
    suspended: int
    released: int
    crashed: int
    lost: int
    expired: int
    wait_s: float
    run_s: float
    waits: Sequence[int]
    runs: Sequence[int]


class DepthBucket(Struct, frozen=True):
    """The largest counts of live tasks of a queue in one span of time. `scheduled` are tasks that are not due, without the suspended ones.

    Counting stops at 10,000 of each. `at_least` names the counts that can be too low. `oldest_due_s` is the age of the task that has been due
    for longest, in seconds.
    """

    at: datetime
    queue: str
    due: int
    scheduled: int
    suspended: int
    claimed: int
    running: int
    oldest_due_s: float | None
    at_least: Sequence[str] = ()


class LatestDepths(Struct, frozen=True):
    """The last sample of all queues: when it was taken, and how many seconds ago. Both are None if there is none.

    A queue without live tasks is missing.
    """

    sampled_at: datetime | None = None
    age_s: float | None = None
    queues: Sequence[DepthBucket] = ()


class SizeBucket(Struct, frozen=True):
    """The largest sizes in one span of time.

    `table_bytes` are those of all tables with their indexes. `oldest_transaction_s` is the age of the oldest transaction, in seconds.
    """

    at: datetime
    table_bytes: int
    dead_rows: int
    oldest_transaction_s: float | None
