"""The decision of one pass about the ticks of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from itertools import takewhile
from typing import Final
from uuid import UUID

from msgspec.structs import replace

from everbeat.domain.identifiers import RANDOM_BYTES, uuid7
from everbeat.domain.schedule.cron import UNIX_EPOCH
from everbeat.domain.schedule.model import (
    MOST_MISSED_ROWS,
    ON_TIME_MS,
    DecidedTick,
    DueSchedule,
    Missed,
    Rule,
    TickDecision,
    TickReason,
)
from everbeat.domain.schedule.timing import latest_ticks, ticks_after
from everbeat.errors.wording import amount, brief_duration

_MICROSECOND: Final = timedelta(microseconds=1)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NOT_SENT: Final[dict[Missed, TickReason]] = {"latest": "NOT_LATEST", "all": "TOO_MANY", "skip": "LATE"}
"""Why an earlier one of several due ticks is not sent."""


def decide(due: DueSchedule, *, installation: str) -> TickDecision:
    """Return the outcome of each due tick of a schedule, and when a scheduler must read the schedule again."""
    same = TickDecision(
        name=due.name, seen_decided_to=due.decided_to, decided_to=due.decided_to, next_at=due.resume_at,
        seen_changed_at=due.changed_at,
    )  # fmt: skip
    if due.is_paused:
        is_over = due.resume_at is not None and due.resume_at <= due.now
        return replace(same, resumes=True, next_at=due.now) if is_over else same
    if due.rule.most_runs is not None and due.runs >= due.rule.most_runs:
        return replace(same, next_at=None, has_ended=True)
    last = _last_due(due)
    if last is None:
        return _waiting(due, same)
    limit = due.rule.pause_after_failures
    if limit is not None and due.failures >= limit and not _is_held(due, last):
        runs = "run" if due.failures == 1 else f"{due.failures:,} runs"
        return replace(same, next_at=None, pauses=f"the last {runs} failed")
    ticks, has_ended = _Pass(due, installation).decided(last)
    if has_ended:
        return replace(same, decided_to=ticks[-1].at, next_at=None, ticks=ticks, has_ended=True)
    return _waiting(due, replace(same, decided_to=last, ticks=ticks))


def tick_task_id(installation: str, name: str, tick: datetime) -> UUID:
    """Return the id of the task that stands for a tick. All processes compute the same id."""
    unix_ms = _unix_ms(tick)
    digest = sha256(f"{installation}|{name}|{unix_ms}".encode()).digest()
    return uuid7(unix_ms=unix_ms, random=digest[:RANDOM_BYTES])


def jitter_ms_of(name: str, tick: datetime, jitter_ms: int) -> int:
    """Return the delay of a tick in milliseconds, less than `jitter_ms`. All processes compute the same delay."""
    if jitter_ms <= 0:
        return 0
    digest = sha256(f"{name}|{_unix_ms(tick)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % jitter_ms


def due_at(rule: Rule, name: str, tick: datetime) -> datetime:
    """Return the moment when a tick is due: the tick plus its jitter."""
    return tick + jitter_ms_of(name, tick, rule.jitter_ms) * _MILLISECOND


def rule_ticks(rule: Rule, *, after: datetime) -> Iterator[datetime]:
    """Yield the ticks after `after` in order, from the rule's start to its end."""
    ticks = ticks_after(rule.timing, _start(rule, after))
    end = rule.ends_at
    return ticks if end is None else takewhile(lambda tick: tick < end, ticks)


def next_due(rule: Rule, name: str, after: datetime) -> tuple[datetime, datetime] | None:
    """Return the first tick after `after` and the moment when it is due, or None if there are no more ticks."""
    tick = next(rule_ticks(rule, after=after), None)
    return None if tick is None else (tick, due_at(rule, name, tick))


def _unix_ms(moment: datetime) -> int:
    return (moment - UNIX_EPOCH) // _MILLISECOND


def _start(rule: Rule, after: datetime) -> datetime:
    """Return the moment after which the undecided ticks of a rule begin."""
    return after if rule.starts_at is None else max(after, rule.starts_at - _MICROSECOND)


def _last_due(due: DueSchedule) -> datetime | None:
    """Return the latest due tick. A tick is not due before all earlier ticks are due."""
    rule, now = due.rule, due.now
    start = _start(rule, due.decided_to)
    end = now if rule.ends_at is None else min(now, rule.ends_at - _MICROSECOND)
    surely_due = now - rule.jitter_ms * _MILLISECOND
    ticks = latest_ticks(rule.timing, after=start, until=min(end, surely_due), most=1).ticks
    last = ticks[-1] if ticks else None
    if rule.jitter_ms:
        for tick in ticks_after(rule.timing, max(start, surely_due)):
            if tick > end or due_at(rule, due.name, tick) > now:
                break
            last = tick
    return last


def _is_held(due: DueSchedule, tick: datetime) -> bool:
    return due.held_until is not None and tick <= due.held_until


def _waiting(due: DueSchedule, decision: TickDecision) -> TickDecision:
    """Return the decision with the moment when its first undecided tick is due."""
    following = next_due(due.rule, due.name, decision.decided_to)
    if following is None:
        return replace(decision, next_at=None, has_ended=True)
    return replace(decision, next_at=following[1])


class _Pass:
    """One decision about the due ticks of a schedule.

    `_live` and `_waiting` count the runs as if the ticks that this pass sends were stored already.
    """

    def __init__(self, due: DueSchedule, installation: str) -> None:
        self._due = due
        self._rule = due.rule
        self._installation = installation
        self._live = due.live
        self._waiting = due.waiting

    def decided(self, last: datetime) -> tuple[tuple[DecidedTick, ...], bool]:
        """Return the decided ticks up to `last`, in order, and whether the schedule has reached its `most_runs`."""
        rule, start = self._rule, _start(self._rule, self._due.decided_to)
        most = rule.most if rule.missed == "all" else 1
        latest = latest_ticks(rule.timing, after=start, until=last, most=most + MOST_MISSED_ROWS)
        ticks = latest.ticks
        sendable = [tick for tick in ticks if self._too_late(tick) is None][-most:]
        missed = list(takewhile(lambda tick: not sendable or tick < sendable[0], ticks))
        series_to, cut = latest.last_older, len(missed) - MOST_MISSED_ROWS
        if cut > 0:
            series_to = missed[cut - 1]
        found = [] if series_to is None else [*self._series(start, series_to)]
        left = None if rule.most_runs is None else rule.most_runs - self._due.runs
        sent = 0
        for tick in ticks[max(cut, 0) :]:
            found.append(self._decided(tick, sendable))
            sent += found[-1].outcome == "SENT"
            if sent == left:
                return tuple(found), True
        return tuple(found), False

    def _too_late(self, tick: datetime) -> TickReason | None:
        """Return the reason if a tick is not sent because of its age, independently of the other ticks."""
        if _is_held(self._due, tick):
            return self._due.held_because or "PAUSED"
        late_ms = (self._due.now - due_at(self._rule, self._due.name, tick)) / _MILLISECOND
        if late_ms > self._rule.catchup_ms:
            return "CATCHUP_WINDOW"
        if self._rule.missed == "skip" and late_ms > ON_TIME_MS:
            return "LATE"
        return None

    def _decided(self, tick: datetime, sendable: Sequence[datetime]) -> DecidedTick:
        due = due_at(self._rule, self._due.name, tick)
        if (reason := self._too_late(tick)) is not None or tick < sendable[0]:
            late = brief_duration((self._due.now - due).total_seconds())
            detail = f"decided {late} after it was due" if reason == "LATE" else None
            reason = reason or _NOT_SENT[self._rule.missed]
            return DecidedTick(at=tick, outcome="MISSED", reason=reason, detail=detail, due_at=due)
        if (overlap := self._overlap(tick, sendable[-1])) is not None:
            return DecidedTick(at=tick, outcome="SKIPPED", reason="OVERLAP", detail=overlap, due_at=due)
        self._live += 1
        self._waiting += 1
        expires_ms = self._rule.expires_ms
        return DecidedTick(
            at=tick,
            outcome="SENT",
            task_id=tick_task_id(self._installation, self._due.name, tick),
            due_at=due,
            good_until=None if expires_ms is None else tick + expires_ms * _MILLISECOND,
            is_serial=self._rule.overlap in ("buffer_one", "buffer_all"),
            cancels=self._rule.overlap == "cancel_other",
        )

    def _overlap(self, tick: datetime, last: datetime) -> str | None:
        """Return how a tick overlaps with other runs if its schedule does not allow that, or None."""
        match self._rule.overlap:
            case "skip" if self._live:
                return f"{amount(self._live, 'run')} had not ended"
            case "buffer_one" if self._waiting:
                return f"{amount(self._waiting, 'run')} had not started"
            case "cancel_other" if tick < last:
                return "a later tick was due at the same time"
            case _:
                return None

    def _series(self, start: datetime, end: datetime) -> Iterator[DecidedTick]:
        """Yield one row for each reason among the missed ticks after `start`, up to and including `end`."""
        due, rule = self._due, self._rule
        held = start if due.held_until is None else due.held_until
        window = due.now - rule.catchup_ms * _MILLISECOND - _MICROSECOND
        bounds: tuple[tuple[datetime, TickReason], ...] = (
            (held, due.held_because or "PAUSED"),
            (window, "CATCHUP_WINDOW"),
            (end, _NOT_SENT[rule.missed]),
        )
        for bound, reason in bounds:
            until = min(bound, end)
            found = latest_ticks(rule.timing, after=start, until=until, most=0)
            start = max(start, until)
            if found.first_older is None:
                continue
            is_one = found.first_older == found.last_older
            yield DecidedTick(
                at=found.first_older,
                outcome="MISSED",
                reason=reason,
                last_at=None if is_one else found.last_older,
                missed=None if is_one else found.older,
            )
