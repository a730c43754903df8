"""The check of schedules: whether supervisors decide their ticks in time, know their time zones and can read their rules."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.domain.doctor.findings import Check, CheckCode, CheckVerdict
from everbeat.errors.wording import amount, brief_duration, some

OVERDUE_MS: Final = 30_000
"""If a tick is still undecided this long after it was due, its schedule is overdue. Supervisors poll at least every 2 s."""


class OverdueSchedule(Struct, frozen=True):
    """A schedule that no scheduler has decided in time. `problem` is why its rule is unreadable (None: it is readable)."""

    name: str
    timezone: str
    next_at: datetime
    overdue_ms: int
    problem: str | None


class FailingSchedule(Struct, frozen=True):
    """A schedule that a scheduler paused because its latest runs failed."""

    name: str
    paused_at: datetime
    reason: str | None


class ScheduleProblems(Struct, frozen=True):
    """The findings about schedules for the doctor. `zones` are the time zones of all schedules that have further ticks."""

    overdue: tuple[OverdueSchedule, ...]
    failing: tuple[FailingSchedule, ...]
    zones: tuple[str, ...]


def judge_schedules(found: ScheduleProblems, *, unknown_zones: Collection[str]) -> Check:
    """Judge whether the ticks of all schedules are decided in time. `unknown_zones` are the time zones that this machine does not know."""
    broken = [each for each in found.overdue if each.problem is not None]
    overdue = [each for each in found.overdue if each.problem is None]
    findings: list[tuple[str, str]] = []
    if overdue:
        first = overdue[0]
        late = brief_duration(first.overdue_ms / 1_000)
        text = f"no supervisor decides the due ticks of {_named([each.name for each in overdue])}, {first.name} for {late}"
        findings.append((text, f"see the reason: everbeat explain {shlex.quote(f'schedule:{first.name}')}."))
    if broken:
        text = f"the stored rules of these schedules are unreadable: {_named([f'{each.name} ({each.problem})' for each in broken])}"
        findings.append((text, "store the schedules again, or delete them: everbeat schedules delete NAME."))
    if unknown_zones:
        text = (
            f"this machine does not know the time zones of some schedules: {_named(sorted(unknown_zones))}. A supervisor on it leaves"
            " these schedules to others"
        )
        findings.append((text, "install the Python package tzdata on this machine."))
    if found.failing:
        names = [each.name for each in found.failing]
        text = f"{amount(len(names), 'schedule is', plural='schedules are')} paused because the latest runs failed: {_named(names)}"
        resume = f"everbeat schedules resume {shlex.quote(names[0])}"
        findings.append((text, f"remove the cause of the failures, then resume them: {resume}."))
    if not findings:
        return CheckCode.SCHEDULES.ok("the ticks of all schedules are decided in time")
    verdict = CheckVerdict.FAIL if overdue else CheckVerdict.WARN
    return Check(
        CheckCode.SCHEDULES,
        verdict,
        "; ".join(text for text, _ in findings),
        " ".join(fix if at == 0 else f"{fix[0].upper()}{fix[1:]}" for at, (_, fix) in enumerate(findings)),
    )


def _named(names: Collection[str]) -> str:
    return some(list(names), limit=5)
