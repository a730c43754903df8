"""How pages write numbers, durations, times, ids and states."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

import msgspec
from markupsafe import Markup, escape
from msgspec import Struct

from everbeat.domain.documents import plain_value
from everbeat.errors.wording import brief_duration, visible


def span(seconds: float | None) -> str:
    """Return a duration as `brief_duration` does, or a dash for None."""
    return "–" if seconds is None else brief_duration(seconds)


def ago(moment: datetime | None, now: datetime) -> str:
    """Return how long ago a moment was, or in how long it will be."""
    if moment is None:
        return "never"
    seconds = (now - moment).total_seconds()
    if abs(seconds) < 0.5:
        return "now"
    return f"{span(seconds)} ago" if seconds > 0 else f"in {span(-seconds)}"


def clock(moment: datetime | None, *, precise: bool = False) -> Markup:
    """Return a time as an element. It shows UTC, and the script of the page shows local time instead if the user chose so."""
    return Markup("–") if moment is None else _clock(moment, precise=precise)


@lru_cache(maxsize=4_096)
def _clock(moment: datetime, *, precise: bool) -> Markup:
    """Return the element of a time. The charts of a page contain each time several times."""
    moment = moment.astimezone(UTC)
    form = "precise" if precise else "brief"
    shown = moment.strftime("%Y-%m-%d %H:%M:%S")
    if precise:
        shown += f".{moment.microsecond // 1_000:03d}"
    iso = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return Markup(f'<time datetime="{iso}" data-form="{form}" title="{shown} UTC">{shown}</time>')


def form_moment(moment: datetime) -> str:
    """Return a time as the value of a field of a form, in UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def number(value: float | None) -> str:
    """Return a number with separators. Return a dash for None."""
    return "–" if value is None else f"{value:,}"


def count(value: float) -> str:
    """Return a number for an axis or a short text: 940, 1.2k, 15k, 3M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return (
                f"{value / size:.1f}".removesuffix(".0") + unit
                if value < 10 * size
                else f"{value / size:.0f}{unit}"
            )
    return f"{value:.0f}" if value >= 1 or not value else f"{value:g}"


def short_id(value: UUID | str) -> str:
    """Return the beginning of an id, which is enough to recognise it in a list."""
    text = str(value)
    return text if len(text) <= 13 else f"{text[:13]}…"


def json_text(value: Any) -> str:
    """Return a value as indented JSON, with control characters made visible."""
    encoded = msgspec.json.encode(value, enc_hook=plain_value)
    return visible(msgspec.json.format(encoded, indent=2).decode())


def json_line(value: Any) -> str:
    """Return a value as JSON on one line."""
    return visible(msgspec.json.encode(value, enc_hook=plain_value).decode())


def progress_text(progress: Any) -> str:
    """Return the progress in a death certificate on one line, such as "pages 33% page 12". Another value becomes JSON."""
    if not isinstance(progress, Mapping) or not isinstance(progress.get("stage"), str):
        return json_line(progress)
    fraction, message = progress.get("fraction"), progress.get("message")
    done = f" {fraction:.0%}" if isinstance(fraction, int | float) else ""
    more = f" {message}" if isinstance(message, str) and message else ""
    return f"{progress['stage']}{done}{more}"


def shown_text(text: str) -> Markup:
    """Return a text for a drawing: escaped, with control characters made visible, as templates do."""
    return escape(visible(text))


class Mark(Struct, frozen=True):
    """How a state is drawn: the class of its colour, its icon, and its word."""

    tone: str
    icon: str
    word: str


MARKS: Final[Mapping[str, Mark]] = {
    "PENDING": Mark("wait", "s-due", "due"),
    "pending": Mark("wait", "s-due", "pending"),
    "CLAIMED": Mark("wait", "s-claimed", "claimed"),
    "RUNNING": Mark("run", "s-running", "running"),
    "COMPLETED": Mark("live", "s-done", "completed"),
    "FAILED": Mark("dead", "s-failed", "failed"),
    "CANCELLED": Mark("wait", "s-cancelled", "cancelled"),
    "EXPIRED": Mark("late", "s-expired", "expired"),
    "scheduled": Mark("wait", "s-scheduled", "scheduled"),
    "retrying": Mark("late", "s-retry", "retrying"),
    "suspended": Mark("sleep", "s-asleep", "sleeps"),
    "waits": Mark("sleep", "s-event", "waits"),
    "suspect": Mark("late", "s-suspect", "suspect"),
    "overdue": Mark("late", "s-late", "overdue"),
    "CRASHED": Mark("dead", "s-dead", "crashed"),
    "LOST": Mark("dead", "s-flat", "lost"),
    "RELEASED": Mark("wait", "s-left", "released"),
    "SUSPENDED": Mark("sleep", "s-asleep", "suspended"),
    "PAUSED": Mark("wait", "i-pause", "paused"),
    "CANCELLING": Mark("wait", "s-cancelled", "cancelling"),
    "READY": Mark("wait", "s-due", "ready"),
    "ENQUEUED": Mark("wait", "s-claimed", "enqueued"),
    "SKIPPED": Mark("wait", "s-skipped", "skipped"),
    "ACTIVE": Mark("live", "s-live", "active"),
    "RETIRED": Mark("wait", "s-left", "retired"),
    "ENDED": Mark("wait", "s-left", "ended"),
}
_UNKNOWN: Final = Mark("wait", "s-suspect", "")


def mark(state: object) -> Mark:
    """Return the mark of a state. An unknown state has a question mark and its own name."""
    name = str(state)
    found = MARKS.get(name, _UNKNOWN)
    return found if found.word else Mark(found.tone, found.icon, name.lower())
