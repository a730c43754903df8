"""Reads the filters of a list from the parameters of an address or the fields of a form, and writes them again."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.filters import TaskFilters
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import When, to_seconds
from everbeat.domain.task.states import TaskState, VirtualState
from everbeat.errors.wording import nearest
from everbeat.web.refusals import RequestRefused
from everbeat.web.requests import FormFields

_PLAIN: Final = ("name", "queue", "key", "workflow", "parent", "batch", "worker", "error")
_TIMES: Final = ("since", "until")
STATES: Final = (*(str(each) for each in TaskState), *(str(each) for each in VirtualState))
_STATE_OF: Final = {each.lower(): each for each in STATES}
LABELS: Final[Mapping[str, str]] = {
    "state": "state",
    "name": "name",
    "queue": "queue",
    "key": "key",
    "workflow": "workflow",
    "parent": "parent",
    "batch": "batch",
    "worker": "worker",
    "error": "error",
    "label": "label",
    "since": "changed since",
    "until": "changed before",
    "arguments_contain": "text in arguments",
}
"""The name of each filter for the reader."""
MOST_EXAMINED: Final = 5_000
"""How many tasks, workflows or failures a page examines. Most filters have no index, and a page must come soon. It offers to continue."""
_MOST_ON_PAGE: Final = 500
_PER_PAGE: Final = 50
_LONGEST_SHOWN: Final = 100
_LONGEST_NUMBER: Final = 10
"""Python refuses to read a number of thousands of digits."""


class ListFilters(Struct, frozen=True):
    """The filters of a list of tasks as they were typed: each has one or several values."""

    values: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, form: FormFields) -> ListFilters:
        """Return the filters that the form contains."""
        found = {name: tuple(form.all(name)) for name in LABELS if form.all(name)}
        if "state" in found:
            found["state"] = tuple(_STATE_OF.get(each.lower(), each) for each in found["state"])
        return cls(found)

    @property
    def states(self) -> tuple[str, ...]:
        """Return the states and virtual states."""
        return self.values.get("state", ())

    def first(self, name: str) -> str | None:
        """Return the value of a filter that has only one."""
        values = self.values.get(name, ())
        return values[-1] if values else None

    def task_filters(self) -> TaskFilters:
        """Return the filters in the form in which an app takes them. Raises ConfigurationError if a time or a label is invalid."""
        found: Any = {name: self.first(name) for name in (*_PLAIN, "arguments_contain") if self.first(name)}
        if self.states:
            found["state"] = [*self.states]
        for name in _TIMES:
            if (text := self.first(name)) is not None:
                found[name] = to_moment_or_age(text, subject=name)
        if labels := self.values.get("label"):
            found["labels"] = dict(_label(each) for each in labels)
        filters: TaskFilters = found
        return filters

    def parameters(self) -> dict[str, tuple[str, ...]]:
        """Return the filters as parameters of a link. The text in arguments is left out: addresses are logged, and it is a payload."""
        return {name: values for name, values in self.values.items() if name != "arguments_contain"}

    def fields(self) -> list[tuple[str, str]]:
        """Return the filters as the fields of a form."""
        return [(name, value) for name, values in self.values.items() for value in values]

    def without(self, name: str) -> dict[str, tuple[str, ...]]:
        """Return the parameters of the link that removes a filter."""
        return {each: values for each, values in self.parameters().items() if each != name}

    def with_values(self, **changes: str | None) -> dict[str, tuple[str, ...]]:
        """Return the parameters of a link with other values of some filters."""
        changed = {name: (value,) for name, value in changes.items() if value}
        return {
            **{name: values for name, values in self.parameters().items() if name not in changes},
            **changed,
        }

    def fixed(self, now: datetime) -> ListFilters:
        """Return the filters with moments in place of durations before now, so that they select the same tasks later."""
        moments: dict[str, tuple[str, ...]] = {}
        for name in _TIMES:
            if (text := self.first(name)) is not None:
                when = to_moment_or_age(text, subject=name)
                moment = when if isinstance(when, datetime) else now - when
                moments[name] = (moment.isoformat(timespec="microseconds"),)
        return ListFilters({**self.values, **moments})

    def digest(self, action: str, parameters: Mapping[str, Any]) -> str:
        """Return a hash of the filters and of what to do with all tasks that match them."""
        parts = [
            action,
            dict(parameters),
            sorted((name, list(values)) for name, values in self.values.items()),
        ]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def command(self) -> str:
        """Return the options of the command line that select the same tasks."""
        options = []
        for name, values in self.parameters().items():
            shown = "lower" if name == "state" else None
            options += [f"--{name} {_quoted(value.lower() if shown else value)}" for value in values]
        return " ".join(options)


def _quoted(text: str) -> str:
    plain = (
        text.replace("-", "").replace("_", "").replace(".", "").replace(":", "").replace("=", "").isalnum()
    )
    return text if plain else "'" + text.replace("'", "'\\''") + "'"


def to_moment_or_age(text: str, *, subject: str) -> When:
    """Return a moment, which is UTC if it has no time zone, or a duration before now. Raises ConfigurationError."""
    if len(text) >= len("2030-01-31") and "-" in text:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            rule, fix = "is neither a time nor a duration", "write 2030-01-31T12:00Z, 10m, 8h or 2d"
            raise refused(text, subject=subject, code="WRONG_FORM", rule=rule, fix=fix) from None
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return timedelta(seconds=to_seconds(text, subject=subject))


def _label(text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    return key, value if equals else None


def page_size(form: FormFields) -> int:
    """Return how many rows a page shows."""
    text = form.get("limit")
    if text is None:
        return _PER_PAGE
    if not text.isdecimal() or len(text) > _LONGEST_NUMBER or not 1 <= int(text) <= _MOST_ON_PAGE:
        raise RequestRefused(
            400,
            "OUT_OF_RANGE",
            f"The limit {text[:20]!r} is not 1 to {_MOST_ON_PAGE}.",
            fix="use 50, for example.",
        )
    return int(text)


def to_state(text: str, states: Iterable[str]) -> str:
    """Return the state that a text names in any case. Raises RequestRefused if it is not one of these states."""
    by_lowered = {each.lower(): each for each in states}
    if text.lower() not in by_lowered:
        message = f"There is no state {text[:_LONGEST_SHOWN]!r}."
        raise RequestRefused(
            400, "UNKNOWN_CHOICE", message, fix=f"use one of {', '.join(by_lowered.values())}."
        )
    return by_lowered[text.lower()]


def require_filters(form: FormFields, *, others: Collection[str]) -> None:
    """Raise RequestRefused if a field is neither a filter nor one of `others`. Without it, the action would change more tasks."""
    for name in form.names():
        if name not in LABELS and name not in others:
            guess = nearest(name, [*LABELS, *others])
            fix = f"did you mean {guess!r}?" if guess else f"use {', '.join(LABELS)}."
            message = f"{name[:_LONGEST_SHOWN]!r} is not a filter, so nothing was changed."
            raise RequestRefused(400, "UNKNOWN_FIELD", message, fix=fix)


def to_uuid(text: str, *, what: str) -> UUID:
    """Return an id. Raises RequestRefused if the text is none, as for a page that does not exist."""
    try:
        return UUID(text)
    except ValueError:
        raise RequestRefused(
            404,
            "NOT_FOUND",
            f"{text[:_LONGEST_SHOWN]!r} is not the id of a {what}.",
            fix="write the whole id; the search finds it by its beginning.",
        ) from None
