"""How long a key stays taken (`unique_for`), and what a send does if it is taken (`on_duplicate`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from everbeat.domain.settings.checks import one_of
from everbeat.domain.settings.settings import refused, shown
from everbeat.domain.settings.units import Duration, milliseconds, respelled, span
from everbeat.errors import ConfigurationError, Problem
from everbeat.errors.wording import nearest

UniqueFor: TypeAlias = Literal["live", "waiting", "kept"] | Duration
OnDuplicate: TypeAlias = Literal["existing", "replace", "debounce", "reject"]

LIVE: Final = "live"
EXISTING: Final = "existing"
_SCOPES: Final = (LIVE, "waiting", "kept")
_LONGEST_S: Final = 3_650 * 86_400.0
_period: Final = span(1, _LONGEST_S)

on_duplicate: Final = one_of(EXISTING, "replace", "debounce", "reject")
"""Checks the answer to a duplicate."""
at_latest: Final = span(0.001, _LONGEST_S)
"""Checks how long after its first send a debounced task is due at the latest. The normal form is seconds."""


def unique_for(value: object, /, *, subject: str) -> str | float:
    """Return "live", "waiting", "kept", or a period in seconds. Raises ConfigurationError for other values."""
    if isinstance(value, str) and value in _SCOPES:
        return value
    try:
        seconds: float = _period(value, subject=subject)
    except ConfigurationError as error:
        guess = nearest(value, _SCOPES) if isinstance(value, str) else None
        if guess is None and error.problems[0].code == "OUT_OF_RANGE":
            raise
        rule = f"must be one of {', '.join(map(repr, _SCOPES))}, or a period after the end of the task such as 1h"
        fix = f"use {guess!r}" if guess else 'use "1h", for example'
        raise refused(value, subject=subject, code="UNKNOWN_CHOICE", rule=rule, fix=fix) from None
    return seconds


def stored_scope(chosen: UniqueFor) -> str | None:
    """Return the scope as it is stored with a task: None for "live", and the text of a PostgreSQL interval for a period in seconds."""
    if isinstance(chosen, str):
        return None if chosen == LIVE else chosen
    return f"{milliseconds(float(chosen))} milliseconds"  # type: ignore[arg-type]


def contradictions(owner: str, *, on_duplicate: object, at_latest: object) -> Iterator[Problem]:
    """Yield the problem of an `at_latest` without a debounce. `owner` is the name of the settings class."""
    if at_latest is not None and on_duplicate != "debounce":
        yield Problem(
            code="CONTRADICTION",
            subject=f"{owner}.at_latest",
            value=shown(respelled(at_latest)),
            rule=f"limits how far a debounce moves a task, but on_duplicate is {shown(on_duplicate)}",
            fix='write on_duplicate="debounce", or omit at_latest',
            shell_fix="write --on-duplicate debounce, or omit --at-latest",
        )
