"""The fields of the form of a schedule: a stored schedule as text, and the text as the options that an app takes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from everbeat.client.options import SendOptions
from everbeat.client.schedules import ScheduleOptions
from everbeat.domain.documents import plain_value
from everbeat.domain.schedule.inspection import ScheduleInfo
from everbeat.domain.schedule.model import Definition, Rule, Timing
from everbeat.domain.schedule.timing import ProblemList
from everbeat.domain.settings.settings import refused, shown
from everbeat.domain.settings.units import spelled_duration
from everbeat.errors.wording import visible
from everbeat.store import rows
from everbeat.web.moments import read_moment, written
from everbeat.web.requests import FormFields

LABELS: Final[Mapping[str, str]] = {
    "name": "Name",
    "task": "Task",
    "arguments": "Arguments",
    "queue": "Queue",
    "priority": "Priority",
    "key": "Key",
    "cron": "Cron",
    "timezone": "Time zone of cron",
    "every": "Every",
    "offset": "Offset",
    "at": "Moments",
    "overlap": "While a run is live",
    "missed": "After an outage",
    "most": "At most",
    "catchup_window": "Not older than",
    "jitter": "Jitter",
    "starts": "Starts",
    "ends": "Ends",
    "most_runs": "Runs in all",
    "pause_after_failures": "Pause after failures",
    "expires": "A run expires after",
    "note": "Note",
}
"""The fields in the order of the form, with their names for the reader."""
MISSED: Final[Mapping[str, str]] = {
    "latest": "send the latest missed tick",
    "all": "send all missed ticks, in order",
    "skip": "send none of them",
}
OVERLAP: Final[Mapping[str, str]] = {
    "allow": "the tick is sent",
    "skip": "the tick is skipped",
    "buffer_one": "the tick is sent, unless a run waits already",
    "buffer_all": "the tick is sent; runs start one at a time",
    "cancel_other": "the tick is sent, and the live runs are asked to stop",
}
_DURATIONS: Final = ("every", "offset", "catchup_window", "jitter", "expires")
_CHOICES: Final = ("missed", "overlap")
_NUMBERS: Final = ("most", "most_runs", "pause_after_failures")
_MOMENTS: Final = ("starts", "ends")
_LONGEST_NUMBER: Final = 10
"""Python refuses to read a number of thousands of digits."""


class ScheduleFields(Struct, frozen=True):
    """The fields of the form as texts, by name. An empty field is missing. `cron` and `at` have one value on each line."""

    values: Mapping[str, str]

    @classmethod
    def read(cls, form: FormFields) -> ScheduleFields:
        """Return the fields of a submitted form, or of a program's JSON object, whose lists become lines."""
        # A browser ends the lines of a field with CR LF.
        texts = {name: "\n".join("\n".join(form.all(name)).splitlines()).strip() for name in LABELS}
        return cls({name: text for name, text in texts.items() if text})

    @classmethod
    def of_info(cls, found: ScheduleInfo) -> ScheduleFields:
        """Return the fields of a stored schedule. If its rule is unreadable, those of the rule are empty."""
        rule = Rule(timing=Timing()) if found.rule is None else found.rule
        call = (found.task, found.arguments, found.queue, found.priority, found.key)
        return cls(_texts(found.name, call, rule, found.note))

    @classmethod
    def of_definition(cls, definition: Definition) -> ScheduleFields:
        """Return the fields of a schedule that would be stored."""
        call = definition.call
        named = (call.task, rows.mapping(call.args), call.queue, call.priority, call.key)
        return cls(_texts(definition.name, named, definition.rule, definition.note))

    def get(self, name: str) -> str | None:
        """Return the text of a field, or None if it is empty."""
        return self.values.get(name)

    def lines(self, name: str) -> list[str]:
        """Return the lines of a field that are not empty."""
        return [line.strip() for line in self.values.get(name, "").splitlines() if line.strip()]

    def changes(self, later: ScheduleFields) -> list[tuple[str, str, str]]:
        """Return the fields that differ from later ones: their labels, the texts of these fields, and the later texts."""
        return [
            (label, self.values.get(name, ""), later.values.get(name, ""))
            for name, label in LABELS.items()
            if self.values.get(name, "") != later.values.get(name, "")
        ]

    def require_visible(self) -> None:
        """Raise ConfigurationError if a text has invisible characters: a page shows them escaped, so its form would send other texts."""
        problems = ProblemList()
        for name, text in self.values.items():
            if visible(text) != text:
                rule, fix = "has control or format characters", "remove them, or write them as JSON escapes"
                problems.add(code="WRONG_FORM", subject=name, value=shown(text), rule=rule, fix=fix)
        problems.raise_if_any()

    def arguments(self) -> Any:
        """Return the arguments. Raises ConfigurationError if they are not JSON. `named_call` checks that they are an object."""
        text = self.values.get("arguments", "{}")
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            rule, fix = "is not JSON", 'write an object, such as {"order": 7}'
            raise refused(text[:100], subject="arguments", code="WRONG_FORM", rule=rule, fix=fix) from None

    def send_options(self) -> SendOptions:
        """Return the options of the call that the fields contain. Raises ConfigurationError."""
        found: SendOptions = {}
        if (queue := self.get("queue")) is not None:
            found["queue"] = queue
        if (priority := self.get("priority")) is not None:
            found["priority"] = _whole(priority)
        if (key := self.get("key")) is not None:
            found["key"] = key
        return found

    def options(self) -> ScheduleOptions:
        """Return the options of the schedule. Raises ConfigurationError, which lists all moments that cannot be read."""
        problems = ProblemList()
        found: dict[str, Any] = {
            name: self.values[name]
            for name in ("timezone", "note", *_DURATIONS, *_CHOICES)
            if name in self.values
        }
        if cron := self.lines("cron"):
            found["cron"] = cron[0] if len(cron) == 1 else cron
        if at := self.lines("at"):
            found["at"] = [problems.settle(lambda text=text: _moment(text, "at"), None) for text in at]  # type: ignore[misc]
        for name in _MOMENTS:
            if (text := self.get(name)) is not None:
                found[name] = problems.settle(lambda text=text, name=name: _moment(text, name), None)  # type: ignore[misc]
        found |= {name: _whole(self.values[name]) for name in _NUMBERS if name in self.values}
        problems.raise_if_any()
        options: Any = found
        checked: ScheduleOptions = options
        return checked


def _whole(text: str) -> Any:
    """Return a number, or the text, which the check of the option then refuses by its rule."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= _LONGEST_NUMBER else text


def _moment(text: str, name: str) -> datetime:
    if (found := read_moment(text)) is None:
        rule, fix = "is not a time", "write 2030-01-31T12:00Z, for example"
        raise refused(text[:100], subject=f"Schedule.{name}", code="WRONG_FORM", rule=rule, fix=fix)
    return found


def _texts(
    name: str,
    call: tuple[str, Mapping[str, Any], str, int, str | None],
    rule: Rule,
    note: str | None,
) -> dict[str, str]:
    task, arguments, queue, priority, key = call
    timing, plain = rule.timing, Rule(timing=rule.timing)
    texts = {
        "name": name,
        "task": task,
        "arguments": msgspec.json.format(
            msgspec.json.encode(arguments, enc_hook=plain_value), indent=2
        ).decode(),
        "queue": queue,
        "priority": str(priority),
        "key": key,
        "cron": "\n".join(timing.cron),
        "timezone": timing.timezone if timing.cron else None,
        "every": _spelled(timing.every_ms),
        "offset": _spelled(timing.offset_ms or None),
        "at": "\n".join(written(moment) for moment in timing.at),
        "overlap": rule.overlap,
        "missed": rule.missed,
        "most": str(rule.most) if rule.missed == "all" else None,
        "catchup_window": _spelled(rule.catchup_ms) if rule.catchup_ms != plain.catchup_ms else None,
        "jitter": _spelled(rule.jitter_ms or None),
        "starts": None if rule.starts_at is None else rule.starts_at.isoformat(),
        "ends": None if rule.ends_at is None else rule.ends_at.isoformat(),
        "most_runs": None if rule.most_runs is None else str(rule.most_runs),
        "pause_after_failures": None if rule.pause_after_failures is None else str(rule.pause_after_failures),
        "expires": _spelled(rule.expires_ms),
        "note": note,
    }
    return {field: text for field, text in texts.items() if text}


def _spelled(span_ms: int | None) -> str | None:
    return None if span_ms is None else spelled_duration(span_ms / 1_000)
