"""Rules that name the payloads to leave out of a dashboard's pages and of reported errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from everbeat.domain.settings.settings import refused

HIDDEN: Final = "hidden"
"""The text that replaces a hidden payload."""


class HideRule(Struct, frozen=True):
    """A rule: a pattern of task names, and a pattern of parameters, or None for all payloads of the task."""

    task: str
    parameter: str | None


def hide_rules(rules: Sequence[str]) -> tuple[HideRule, ...]:
    """Return the rules that are written as "TASK" or "TASK:PARAMETER". Both parts can contain * and ?.

    The name of a task can contain a colon, too. So a rule with a colon also hides all payloads of the task with exactly this name.

    Raises ConfigurationError if a rule is empty.
    """
    found: list[HideRule] = []
    for text in rules:
        task, colon, parameter = text.rpartition(":")
        if not colon:
            task, parameter = text, ""
        if not task or (colon and not parameter):
            rule, fix = "must be TASK or TASK:PARAMETER", "write 'charge', 'charge:card' or '*:password'"
            raise refused(text, subject="hide", code="WRONG_FORM", rule=rule, fix=fix)
        found.append(HideRule(_pattern(task), _pattern(parameter) or None))
        if colon:
            found.append(HideRule(_pattern(text), None))
    return tuple(found)


def _pattern(text: str) -> str:
    """Return a pattern in which only * and ? have a meaning."""
    return text.replace("[", "[[]")
