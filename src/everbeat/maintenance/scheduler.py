"""Decide the ticks of schedules that are due, and apply the schedules that the code of live workers declares."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.domain.schedule.model import DueSchedule, TickDecision
from everbeat.domain.schedule.ticks import decide
from everbeat.domain.schedule.timing import zone_is_known
from everbeat.errors import DatabaseError
from everbeat.recovering.observer import RecoveryEnvironment
from everbeat.runtime.events import Event
from everbeat.store import limits, schedules, steps
from everbeat.store.refusals import divided, is_refused_data
from everbeat.store.schedules import DeclaredChange

IDLE_S: Final = 2.0
"""The longest time between two checks, and so the longest time until a new schedule is noticed."""
PAGE: Final = 200
_MOST_TICKS: Final = 2_000
"""How many ticks one statement writes, so that it does not delay the supervisor's other statements."""
_BEHIND_S: Final = (0.1, 0.4)
"""A supervisor that did not decide the latest ticks waits this much longer, because another supervisor usually decides them."""
_LEAST_PAUSE_S: Final = 0.01
_BROKEN_S: Final = 30.0
_LONGEST_PROBLEM: Final = 500
_NAMED: Final = 5
_EXPECTED: Final = frozenset({"PAUSED", "RETIRED"})
_LONGEST_INTERVAL_S: Final = 30.0


class TicksDecided(Event, frozen=True, kw_only=True):
    """A pass has decided the ticks of some schedules. The fields are the number of schedules, and of ticks by their outcome.

    `late_s` is how many seconds after each tick its task was sent.
    """

    component = "maintenance"
    level = logging.DEBUG
    schedules: int
    sent: int
    skipped: int
    missed: int
    late_s: tuple[float, ...] = ()

    @property
    def unshown(self) -> frozenset[str]:
        """Return the name of the field for metrics."""
        return frozenset({"late_s"})


class TicksMissed(Event, frozen=True, kw_only=True):
    """Some ticks were decided too late, and their schedules do not send such ticks. `first` names the first few schedules.

    Ticks during a pause do not count.
    """

    component = "maintenance"
    level = logging.WARNING
    ticks: int
    schedules: int
    first: tuple[str, ...]
    since: datetime


class SchedulePaused(Event, frozen=True, kw_only=True):
    """A schedule was paused because too many runs failed."""

    component = "maintenance"
    level = logging.WARNING
    schedule: str
    reason: str


class ScheduleBroken(Event, frozen=True, kw_only=True):
    """A schedule cannot be read or decided, so it sends no tasks. Other schedules are not affected."""

    component = "maintenance"
    level = logging.ERROR
    schedule: str
    problem: str


class ZoneUnknown(Event, frozen=True, kw_only=True):
    """This machine does not know a time zone, so it leaves the schedules of that zone to other supervisors."""

    component = "maintenance"
    level = logging.WARNING
    zone: str
    schedule: str
    fix: str


class _Broken(Struct, frozen=True):
    problem: str
    again_at: float


class Scheduler:
    """A service in every supervisor that sends the tasks of due schedules. It needs no user code.

    All supervisors do the work, and the statement that stores a decision lets only one of them succeed. To avoid useless work, a supervisor
    whose decisions were not the first waits a little longer than the others. `pace_s` returns the least time between two passes: in a
    large cluster, most supervisors check only in case that the others fail.
    """

    name = "scheduler"
    interval_s = IDLE_S

    def __init__(
        self,
        environment: RecoveryEnvironment,
        *,
        page: int = PAGE,
        pace_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._environment = environment
        self._pace_s = pace_s
        self._clock = environment.clock
        self._emit = environment.events.emit
        self._page = page
        self._installation: str | None = None
        self._is_first = False
        self._unknown_zones: set[str] = set()
        self._broken: dict[str, _Broken] = {}

    async def tick(self) -> float | None:
        """Decide one page of due schedules. Return the seconds until the next schedule is due, at most `IDLE_S`."""
        self._unknown_zones = {zone for zone in self._unknown_zones if not zone_is_known(zone)}
        asked_at = self._clock.monotonic()
        found = await self._environment.run_once(
            schedules.list_due(
                limit=self._page,
                unknown_zones=sorted(self._unknown_zones),
                skipped=sorted(name for name, each in self._broken.items() if each.again_at > asked_at),
            )
        )
        listed_at = self._clock.monotonic()
        for each in found.broken:
            self._report_broken(each.name, each.problem)
        decisions = await self._decide([each for each in found.due if self._knows_zone(each)])
        written = await self._write(decisions)
        now = {each.name: each.now for each in found.due}
        self._report(written, now)
        if decisions:
            self._is_first = len(written) == len(decisions)
        if found.is_full:
            return 0.0 if written else self._pause_s(0.0)
        waits = [IDLE_S] if found.wait_s is None else [found.wait_s]
        waits += [
            (decision.next_at - now[decision.name]).total_seconds()
            for decision in decisions
            if decision.next_at is not None
        ]
        return self._pause_s(min(waits) - (self._clock.monotonic() - listed_at))

    def _pause_s(self, wait_s: float) -> float:
        pace_s = self._pace_s()
        if wait_s >= IDLE_S:
            return max(IDLE_S, pace_s)
        behind_s = 0.0 if self._is_first else self._environment.random.uniform(*_BEHIND_S)
        return max(max(wait_s, _LEAST_PAUSE_S) + behind_s, pace_s)

    def _knows_zone(self, due: DueSchedule) -> bool:
        """Return whether this machine knows the schedule's time zone. Report an unknown zone once."""
        zone = due.rule.timing.timezone
        if zone_is_known(zone):
            return True
        if zone not in self._unknown_zones:
            self._unknown_zones.add(zone)
            fix = "install the system's time zone data or the Python package tzdata on this machine"
            self._emit(ZoneUnknown(zone=zone, schedule=due.name, fix=fix))
        return False

    async def _decide(self, due: Iterable[DueSchedule]) -> list[TickDecision]:
        if self._installation is None:
            found = await self._environment.run_once(steps.installation())
            self._installation = str(found)
        decisions = []
        for each in due:
            try:
                decisions.append(decide(each, installation=self._installation))
            except Exception as problem:  # noqa: BLE001 - a schedule whose row is broken must not block the others
                self._report_broken(each.name, f"{type(problem).__name__}: {problem}")
            await self._clock.sleep(0)  # after an outage, this loop must not delay the heartbeats
        return decisions

    async def _write(self, decisions: Sequence[TickDecision]) -> list[TickDecision]:
        """Store the decisions. Return those that were the first about their ticks."""
        written: list[TickDecision] = []
        for batch in _batches(sorted(decisions, key=lambda each: each.name)):
            written += await divided(batch, self._written, self._refused, is_refused=_is_refused)
        return written

    async def _written(self, batch: Sequence[TickDecision]) -> list[TickDecision]:
        statement = schedules.decide_ticks(
            batch, channel=self._environment.channel, decided_by=self._environment.observer.supervisor_id
        )
        changed = frozenset((await self._environment.run_once(statement)).changed)
        for each in batch:
            self._broken.pop(each.name, None)
        return [each for each in batch if each.name in changed]

    async def _refused(self, decision: TickDecision, problem: Exception) -> list[TickDecision]:
        self._report_broken(decision.name, str(problem))
        return []

    def _report_broken(self, name: str, problem: str) -> None:
        """Skip a broken schedule for a while, because it stays due and would fill the page. Log each problem only once."""
        text = problem[:_LONGEST_PROBLEM]
        known = self._broken.get(name)
        self._broken[name] = _Broken(text, self._clock.monotonic() + _BROKEN_S)
        if known is None or known.problem != text:
            self._emit(ScheduleBroken(schedule=name, problem=text))

    def _report(self, written: Sequence[TickDecision], now: Mapping[str, datetime]) -> None:
        if not written:
            return
        ticks = [(each.name, tick) for each in written for tick in each.ticks]
        missed = [(name, tick) for name, tick in ticks if tick.outcome == "MISSED"]
        sent = [(name, tick) for name, tick in ticks if tick.outcome == "SENT"]
        self._emit(
            TicksDecided(
                schedules=len(written),
                sent=len(sent),
                skipped=sum(tick.outcome == "SKIPPED" for _, tick in ticks),
                missed=sum(tick.missed or 1 for _, tick in missed),
                late_s=tuple((now[name] - (tick.due_at or tick.at)).total_seconds() for name, tick in sent),
            )
        )
        if late := [(name, tick) for name, tick in missed if tick.reason not in _EXPECTED]:
            names = sorted({name for name, _ in late})
            self._emit(
                TicksMissed(
                    ticks=sum(tick.missed or 1 for _, tick in late),
                    schedules=len(names),
                    first=tuple(names[:_NAMED]),
                    since=min(tick.at for _, tick in late),
                )
            )
        for each in written:
            if each.pauses is not None:
                self._emit(SchedulePaused(schedule=each.name, reason=each.pauses))


def _batches(decisions: Sequence[TickDecision]) -> Iterator[list[TickDecision]]:
    """Divide the decisions into batches of about `_MOST_TICKS` ticks."""
    batch: list[TickDecision] = []
    ticks = 0
    for each in decisions:
        if batch and ticks + len(each.ticks) > _MOST_TICKS:
            yield batch
            batch, ticks = [], 0
        batch.append(each)
        ticks += len(each.ticks)
    if batch:
        yield batch


def _is_refused(problem: BaseException) -> bool:
    """Return whether a decision was refused because of its schedule's row, for example by a constraint."""
    state = getattr(problem.__cause__, "sqlstate", None) if isinstance(problem, DatabaseError) else None
    return is_refused_data(problem) or (isinstance(state, str) and state.startswith("23"))


class DeclarationsApplied(Event, frozen=True, kw_only=True):
    """The stored schedules of an app were changed to those that the code of its live workers declares.

    The fields name the added, changed, returned and retired schedules.
    """

    component = "maintenance"
    owner: str
    added: tuple[str, ...]
    changed: tuple[str, ...]
    returned: tuple[str, ...]
    retired: tuple[str, ...]


class ScheduleNameTaken(Event, frozen=True, kw_only=True):
    """The code of an app declares a schedule whose name belongs to another app or to a schedule made at run time. It was not stored."""

    component = "maintenance"
    level = logging.WARNING
    schedule: str
    owner: str
    fix: str


class LimitNameTaken(Event, frozen=True, kw_only=True):
    """Two apps declare a limit of the same name, so they share it. The declaration of `owner` does not count, because the other is newer."""

    component = "maintenance"
    level = logging.WARNING
    limit: str
    owner: str
    fix: str


class LimitsApplied(Event, frozen=True, kw_only=True):
    """Stored limits were changed to those that the code of live workers declares, or deleted because no live worker declares them."""

    component = "maintenance"
    stored: tuple[str, ...]
    deleted: tuple[str, ...]


class Declarations:
    """A service in every supervisor that stores the schedules and limits that live workers declare. Only one supervisor at a time does the work.

    `apply_now` makes the next pass independent of turns, because a worker with a declaration has just been registered. `on_change` is called
    after a pass that changed schedules.
    """

    name = "declarations"

    def __init__(self, environment: RecoveryEnvironment, *, on_change: Callable[[], None]) -> None:
        config = environment.config
        self.interval_s = min(config.check_interval_ms / 1_000, _LONGEST_INTERVAL_S)
        self._environment = environment
        self._on_change = on_change
        self._must_apply = False
        self._after_ms = max(config.claimed_stale_threshold_ms, config.running_stale_threshold_ms)
        self._taken: set[tuple[str, str]] = set()
        self._shared: set[tuple[str, str]] = set()

    def apply_now(self) -> None:
        """Make the next pass apply the declarations even if another supervisor has the turn."""
        self._must_apply = True

    async def tick(self) -> float | None:
        """Apply the declarations, unless it is another supervisor's turn."""
        must_apply, self._must_apply = self._must_apply, False
        try:
            if must_apply or await self._environment.take_turn(self.name, interval_s=self.interval_s):
                await self._apply()
        except BaseException:
            self._must_apply = self._must_apply or must_apply
            raise
        return None

    async def _apply(self) -> None:
        await self._apply_limits()
        changes = await self._environment.run_once(schedules.apply_declared(after_ms=self._after_ms))
        self._report_taken(changes)
        by_owner = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
        for each in changes:
            if each.verdict != "TAKEN":
                by_owner[each.owner][each.verdict].append(each.name)
        for owner, names in sorted(by_owner.items()):
            self._environment.events.emit(
                DeclarationsApplied(
                    owner=owner,
                    added=tuple(names["ADDED"]),
                    changed=tuple(names["CHANGED"]),
                    returned=tuple(names["RETURNED"]),
                    retired=tuple(names["RETIRED"]),
                )
            )
        if by_owner:
            self._on_change()

    async def _apply_limits(self) -> None:
        changes = await self._environment.run_once(limits.apply_declared(channel=self._environment.channel))
        stored = tuple(each.name for each in changes if each.verdict == "STORED")
        deleted = tuple(each.name for each in changes if each.verdict == "DELETED")
        shared = {(each.owner, each.name) for each in changes if each.owner is not None}
        for owner, name in sorted(shared - self._shared):
            fix = "rename one of the two limits, or declare the same numbers in both apps"
            self._environment.events.emit(LimitNameTaken(limit=name, owner=owner, fix=fix))
        self._shared = shared
        if stored or deleted:
            self._environment.events.emit(LimitsApplied(stored=stored, deleted=deleted))

    def _report_taken(self, changes: Iterable[DeclaredChange]) -> None:
        taken = {(each.owner, each.name) for each in changes if each.verdict == "TAKEN"}
        for owner, name in sorted(taken - self._taken):
            fix = "rename one of the two schedules, or delete the one that was made at run time"
            self._environment.events.emit(ScheduleNameTaken(schedule=name, owner=owner, fix=fix))
        self._taken = taken
