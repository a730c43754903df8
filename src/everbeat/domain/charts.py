"""Series for charts: the ranges that a chart can show, the points of its lines, and the marks of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct, structs

from everbeat.domain.series import DepthBucket, RateBucket, quantile_s

_ORIGIN: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""PostgreSQL's `date_bin` counts spans from here in the statements of the series."""
SHARES: Final = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


class ChartRange(Struct, frozen=True):
    """A length of time that charts can show, in spans of `bucket_s` seconds. `depth_seconds` are the kinds of samples that it reads."""

    name: str
    words: str
    seconds: int
    bucket_s: int
    depth_seconds: tuple[int, ...] = (60, 3_600)

    @property
    def unit(self) -> str:
        """Return the length of one span in words, after "each"."""
        return {60: "minute", 300: "5 minutes", 3_600: "hour", 43_200: "12 hours"}[self.bucket_s]


RANGES: Final = (
    ChartRange("1h", "1 h", 3_600, 60),
    ChartRange("6h", "6 h", 6 * 3_600, 300),
    ChartRange("48h", "48 h", 48 * 3_600, 3_600, (3_600,)),
    ChartRange("30d", "30 d", 30 * 86_400, 43_200, (3_600,)),
)
"""The ranges, the shortest first. Minutes are kept for 48 hours and hours for 30 days, so no range reads more than exists."""


def range_named(name: str | None) -> ChartRange:
    """Return the range with this name, or the shortest one."""
    return next((each for each in RANGES if each.name == name), RANGES[0])


class ChartPoint(Struct, frozen=True, kw_only=True):
    """One span of a chart: the ends of attempts by outcome, the waits and runs, and the largest numbers of live tasks.

    `retried` are attempts that failed and whose task runs again. `failed` contains attempts that ended with FAILED or by the death of their
    worker. `cancelled` contains expired tasks. `wait_*` are the seconds from due until the start, `run_*` those of the code. They are None
    if nothing was measured. The numbers of live tasks are None if no sample was taken. `at_least`: they can be too low, because counting
    stopped.
    """

    at: datetime
    started: int = 0
    completed: int = 0
    retried: int = 0
    failed: int = 0
    cancelled: int = 0
    wait_p50: float | None = None
    wait_p95: float | None = None
    wait_p99: float | None = None
    run_p50: float | None = None
    run_p95: float | None = None
    run_p99: float | None = None
    due: int | None = None
    scheduled: int | None = None
    suspended: int | None = None
    claimed: int | None = None
    running: int | None = None
    oldest_due_s: float | None = None
    at_least: bool = False

    @property
    def later(self) -> int | None:
        """Return the number of tasks that are not due, with the suspended ones."""
        return None if self.scheduled is None else self.scheduled + (self.suspended or 0)

    @property
    def ended(self) -> int:
        """Return the number of ends that the bars of a chart show."""
        return self.completed + self.retried + self.failed + self.cancelled


class ChartMark(Struct, frozen=True, kw_only=True):
    """An event that a chart marks: `kind` is deploy, pause, resume, limit, death or silence."""

    at: datetime
    kind: str
    words: str


class BusyQueue(Struct, frozen=True, kw_only=True):
    """The events of one queue in a range. `ended` counts attempts. `line` are the ends of each span, oldest first."""

    queue: str
    started: int
    ended: int
    wait_p95: float | None
    run_p95: float | None
    line: tuple[int, ...] = ()


class Charts(Struct, frozen=True, kw_only=True):
    """The series of the whole installation, or of one queue, from `since` to before `until`. There is a point for each span."""

    range: str
    bucket_s: int
    since: datetime
    until: datetime
    queue: str | None
    points: Sequence[ChartPoint]
    marks: Sequence[ChartMark] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was counted in the whole range."""
        return not any(
            point.started or point.ended or point.due or point.scheduled or point.claimed or point.running
            for point in self.points
        )


def spans_of(chosen: ChartRange, *, now: datetime) -> list[datetime]:
    """Return the beginnings of the spans of a range, oldest first. The last span contains `now`."""
    size = timedelta(seconds=chosen.bucket_s)
    last = _ORIGIN + (now - _ORIGIN) // size * size
    count = chosen.seconds // chosen.bucket_s
    return [last - size * place for place in reversed(range(count))]


def points_of(
    spans: Sequence[datetime], rates: Sequence[RateBucket], depths: Sequence[DepthBucket]
) -> list[ChartPoint]:
    """Return a point for each span. Without a row of rates, nothing ended in a span. Without one of depths, it was not sampled."""
    points: dict[datetime, ChartPoint] = {at: ChartPoint(at=at) for at in spans}
    for rate in rates:
        if rate.at in points:
            points[rate.at] = _with_rates(points[rate.at], rate)
    for depth in depths:
        if depth.at in points:
            points[depth.at] = structs.replace(
                points[depth.at],
                due=depth.due,
                scheduled=depth.scheduled,
                suspended=depth.suspended,
                claimed=depth.claimed,
                running=depth.running,
                oldest_due_s=depth.oldest_due_s,
                at_least=bool(depth.at_least),
            )
    return [points[at] for at in spans]


def _with_rates(point: ChartPoint, rate: RateBucket) -> ChartPoint:
    wait = {f"wait_{name}": quantile_s(rate.waits, share) for name, share in SHARES}
    run = {f"run_{name}": quantile_s(rate.runs, share) for name, share in SHARES}
    measured: Mapping[str, float | None] = {**wait, **run}
    return structs.replace(
        point,
        started=rate.started,
        completed=rate.completed,
        retried=rate.retried,
        failed=rate.failed + rate.crashed + rate.lost,
        cancelled=rate.cancelled + rate.expired,
        **measured,
    )


def ended_of(rate: RateBucket) -> int:
    """Return how many attempts and tasks ended, as the bars of a chart count them."""
    return (
        rate.completed + rate.retried + rate.failed + rate.crashed + rate.lost + rate.cancelled + rate.expired
    )


def nice_top(highest: float) -> float:
    """Return the end of an axis: 1, 2, 4 or 5 times a power of ten, and not below the highest value."""
    if highest <= 0:
        return 1.0
    size = 1.0
    while size * 10 <= highest:
        size *= 10
    while size > highest:
        size /= 10
    return next(size * step for step in (1, 2, 4, 5, 10) if size * step >= highest)
