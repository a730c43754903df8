"""Moments and stretches of time as they are typed: 2030-01-31T12:00:00Z, or "2h" before now.

What lives here: reading them, and refusing what is ambiguous in the words of the command line. What may not: showing times.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

import typer
from msgspec.structs import replace

from everbeat.domain.duration import When, to_seconds, to_utc
from everbeat.errors import ConfigurationError

_FORMS: Final = 'write "30m", "2h" or "7d" for so long before now, or a moment: 2030-01-31T12:00:00Z'


def to_moment(text: str, *, option: str) -> datetime:
    """A moment in UTC; raises typer.BadParameter for what is none, or has no time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{option} {text!r} is no time: write it as 2030-01-31T12:00:00Z.") from None
    if found.tzinfo is None:
        raise typer.BadParameter(f"{option} {text!r} has no time zone: append Z for UTC, or +02:00.")
    return to_utc(found, subject=option)


def to_past(text: str, *, option: str) -> When:
    """A moment, or a stretch of time that ends now; raises typer.BadParameter or, for a wrong stretch, ConfigurationError."""
    if len(text) >= len("2030-01-31") and "-" in text:
        return to_moment(text, option=option)
    try:
        return timedelta(seconds=to_seconds(text, subject=option))
    except ConfigurationError as error:
        raise ConfigurationError(
            [replace(problem, fix=_FORMS, shell_fix=None) for problem in error.problems]
        ) from None
