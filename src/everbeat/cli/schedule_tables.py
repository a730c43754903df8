"""The tables and pages that show schedules, their ticks and their runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any, Final

from rich.text import Text

from everbeat.cli.output import (
    Column,
    brief_moment,
    compact_json,
    duration,
    moment,
    optional_moment,
    show_rows,
    state,
)
from everbeat.cli.selection import ShortIds
from everbeat.domain.schedule.cron import zone_of
from everbeat.domain.schedule.inspection import RunInfo, ScheduleInfo, TickInfo
from everbeat.domain.schedule.model import Rule, Timing
from everbeat.domain.schedule.timing import describe
from everbeat.domain.settings.units import spelled_duration
from everbeat.errors.wording import amount

_STYLES: Final = {"ACTIVE": "green", "PAUSED": "cyan", "RETIRED": "magenta", "ENDED": "bright_black"}
_OUTCOMES: Final = {"SENT": "green", "SKIPPED": "yellow", "MISSED": "red"}


def state_of(found: ScheduleInfo) -> Text:
    """Return the state of a schedule as colored text."""
    return Text(found.state, style=_STYLES[found.state])


def timing_of(rule: Rule | None) -> str:
    """Return when a schedule ticks, as text."""
    return "unreadable" if rule is None else describe(rule.timing)


def outcome_of(tick: TickInfo) -> Text:
    """Return the outcome of a tick as colored text."""
    return Text(tick.outcome, style=_OUTCOMES[tick.outcome])


def run_of(tick: TickInfo | None) -> Text:
    """Return the state of the task that was sent for a tick, or nothing if there is none."""
    return Text() if tick is None or tick.state is None else state(tick.state)


def spelled(ms: int) -> str:
    """Return milliseconds as a short text, such as 5m."""
    return spelled_duration(ms / 1_000)


def facts(found: ScheduleInfo) -> Iterator[tuple[str, str | Text | None]]:
    """Yield the names and values that describe a schedule."""
    rule = found.rule
    yield "name", found.name
    yield "state", state_of(found)
    yield "ticks", timing_of(rule)
    yield "task", found.task
    yield "arguments", compact_json(found.arguments)
    yield "queue", found.queue
    yield "priority", str(found.priority)
    yield "key", found.key
    yield "serial", found.serial
    yield "note", found.note
    yield "declared by", found.owner
    if rule is not None:
        yield from _rule(rule)
    yield "runs", f"{found.runs:,}"
    yield "next at", optional_moment(found.next_at)
    if found.paused_at is not None:
        because = "" if found.pause_reason is None else f": {found.pause_reason}"
        yield "paused", f"since {moment(found.paused_at)}, by {found.paused_by}{because}"
    yield "resumes at", optional_moment(found.resume_at)
    if found.retired_at is not None:
        why = {
            "UNDECLARED": "the live workers of its app do not declare it",
            "NO_WORKER": "no live worker of its app declares it",
        }.get(found.retired_because or "", "")
        yield "retired", f"since {moment(found.retired_at)}: {why}".removesuffix(": ")
    yield "ended at", optional_moment(found.ended_at)
    yield "created at", moment(found.created_at)
    yield "changed at", moment(found.changed_at)
    yield "decided to", moment(found.decided_to)


def _rule(rule: Rule) -> Iterator[tuple[str, str | None]]:
    yield "missed", f"all, at most {rule.most:,}" if rule.missed == "all" else rule.missed
    yield "catchup window", spelled(rule.catchup_ms)
    yield "overlap", rule.overlap
    yield "jitter", spelled(rule.jitter_ms) if rule.jitter_ms else None
    yield "starts", optional_moment(rule.starts_at)
    yield "ends", optional_moment(rule.ends_at)
    yield "most runs", None if rule.most_runs is None else f"{rule.most_runs:,}"
    failures = rule.pause_after_failures
    yield "pause after", None if failures is None else amount(failures, "failure")
    yield "expires", None if rule.expires_ms is None else f"{spelled(rule.expires_ms)} after the tick"


def run_row(run: RunInfo, *, ids: ShortIds) -> tuple[Column, ...]:
    """Return a live run as a row of a table."""
    return (
        Column("TASK", ids.uuid(run.task_id)),
        Column("STATE", state(run.state)),
        Column("TICK", brief_moment(run.tick) if run.tick is not None else "by hand"),
        Column("SENT", brief_moment(run.sent_at), drop=2),
        Column("TRY", str(run.attempt), drop=3, is_number=True),
        Column("WORKER", run.worker_id or "", drop=1),
    )


def tick_row(tick: TickInfo, *, ids: ShortIds) -> tuple[Column, ...]:
    """Return a decided tick as a row of a table."""
    why: str = tick.reason or ""
    if tick.last_at is not None:
        number = "an unknown number of ticks" if tick.missed is None else amount(tick.missed, "tick")
        why = f"{why}: {number} until {moment(tick.last_at)}"
    if tick.detail is not None:
        why = f"{why}: {tick.detail}"
    return (
        Column("TICK", moment(tick.at).replace(".000", "")),
        Column("OUTCOME", outcome_of(tick)),
        Column("TASK", ids.uuid(tick.task_id)),
        Column("STATE", "" if tick.state is None else state(tick.state), drop=1),
        Column("DECIDED", brief_moment(tick.decided_at), drop=2),
        Column("BY", tick.decided_by or "", drop=3),
        Column("WHY", why, is_text=True),
    )


def upcoming_document(timing: Timing, found: Sequence[datetime]) -> dict[str, Any]:
    """Return ticks to come as a JSON document."""
    zone = zone_of(timing.timezone)
    return {
        "timing": describe(timing),
        "timezone": timing.timezone,
        "ticks": [{"at": tick, "local": tick.astimezone(zone).isoformat()} for tick in found],
    }


def show_upcoming(found: Sequence[datetime], *, zone: str, now: datetime) -> None:
    """Write ticks to come as a table, in a schedule's time zone and in UTC."""
    local = zone_of(zone)
    rows: list[tuple[Column, ...]] = []
    for tick in found:
        columns = [Column("TICK", f"{tick.astimezone(local):%a} {in_zone(tick, local)}")]
        if zone != "UTC":
            columns.append(Column("UTC", in_zone(tick, UTC), drop=1))
        if found[-1] > now:
            columns.append(
                Column("IN", duration((tick - now).total_seconds()) if tick > now else "", is_number=True)
            )
        rows.append(tuple(columns))
    show_rows(rows, empty="No further ticks.")


def in_zone(tick: datetime, zone: tzinfo) -> str:
    """Return a tick as text in a time zone."""
    shown = tick.astimezone(zone).isoformat(sep=" ", timespec="milliseconds").replace(".000", "")
    return shown.replace("+00:00", "Z") if zone is UTC else shown
