"""The ticks of a timing: cron expressions in a time zone, intervals, and single moments."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from msgspec import Struct

from everbeat.domain.schedule.model import Timing


class LatestTicks(Struct, frozen=True, kw_only=True):
    """The latest ticks of a range, in order, and the facts about the earlier ones.

    `first_older` and `last_older` are None if there are no earlier ticks. `older` is their number, or None if it was not counted.
    """

    ticks: tuple[datetime, ...]
    first_older: datetime | None = None
    last_older: datetime | None = None
    older: int | None = 0


def parse_timing(
    *, cron: object, every: object, offset: object, at: object, timezone: object, subject: str
) -> Timing:
    """Return the timing that the arguments of a schedule describe. None means that an argument was not given.

    `cron` is an expression or a list of expressions, and `at` a moment or a list. Raises ConfigurationError, which lists all problems.
    """
    raise NotImplementedError


def ticks_after(timing: Timing, moment: datetime) -> Iterator[datetime]:
    """Yield the ticks after `moment`, in UTC and in order."""
    raise NotImplementedError


def latest_ticks(timing: Timing, *, after: datetime, until: datetime, most: int) -> LatestTicks:
    """Return the `most` latest of the ticks after `after`, up to and including `until`, and facts about the earlier ones."""
    raise NotImplementedError


def zone_is_known(name: str) -> bool:
    """Return whether this machine has the data of a time zone."""
    raise NotImplementedError


def describe(timing: Timing) -> str:
    """Return the timing as text for people, such as "every 1h" or "30 2 * * * in Europe/Berlin"."""
    raise NotImplementedError
