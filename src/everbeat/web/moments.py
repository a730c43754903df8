"""The past moment that an address names, and the moments around it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct

from everbeat.domain.past import STEPS_S
from everbeat.errors.wording import brief_duration
from everbeat.web.refusals import RequestRefused


def moment_of(text: str | None, *, now: datetime) -> datetime | None:
    """Return the past moment that the parameter `at` names, or None without it. Raises RequestRefused if it is not a moment of the past."""
    if text is None:
        return None
    fix = "write a time in UTC, such as 2026-11-29T14:03:20Z."
    found = read_moment(text)
    if found is None or found.year < _EARLIEST_YEAR:
        said = f"`at` is {text[:_LONGEST_SHOWN]!r}, which is not a time since the year {_EARLIEST_YEAR}."
        raise RequestRefused(400, "WRONG_FORM", said, fix=fix)
    if found > now:
        said = f"`at` is {written(found)}, which lies ahead: it is {written(now.replace(microsecond=0))} now."
        raise RequestRefused(400, "OUT_OF_RANGE", said, fix="write a time of the past, in UTC.")
    return found


_EARLIEST_YEAR = 2000
_LONGEST_SHOWN = 60


def steps_around(at: datetime, *, now: datetime) -> list[tuple[str, datetime]]:
    """Return the moments before and after, with their words. Moments that lie ahead are left out."""
    found = []
    for step in STEPS_S:
        moment = at + timedelta(seconds=step)
        if moment < now:
            found.append((f"{'−' if step < 0 else '+'}{brief_duration(abs(step))}", moment))
    return found


class Replay(Struct, frozen=True):
    """The minutes around a past moment that a page can replay, from `since` to `until`. `around` is their middle, if it is not cut off."""

    around: datetime
    since: datetime
    until: datetime

    @property
    def length_s(self) -> int:
        """Return the length of the replay in seconds."""
        return int((self.until - self.since).total_seconds())


def replay_of(at: datetime, around: str | None, *, now: datetime) -> Replay:
    """Return the replay that contains the shown moment: that around the moment of the parameter `around`, or around the shown one."""
    middle = None if around is None else read_moment(around)
    if middle is None or abs(middle - at) > REPLAYED:
        middle = at
    # The records of the last second are not complete yet.
    steps = min(2 * REPLAYED, max(now - _SETTLED - (middle - REPLAYED), STEP)) // STEP
    return Replay(middle, middle - REPLAYED, middle - REPLAYED + steps * STEP)


REPLAYED: Final = timedelta(minutes=5)
"""How much is replayed before a moment, and after it."""
STEP: Final = timedelta(seconds=10)
"""How far apart the replayed moments are. The script loads one a second, so a replay runs at ten times the speed."""
_SETTLED: Final = timedelta(seconds=1)


def written(at: datetime) -> str:
    """Return a moment as the parameter of an address."""
    text = at.astimezone(UTC).isoformat(timespec="milliseconds" if at.microsecond else "seconds")
    return text.replace("+00:00", "Z")


def read_moment(text: str) -> datetime | None:
    """Return the moment that a text names, or None if it names none. Without a time zone, it is UTC."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    try:
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except OverflowError:
        return None
