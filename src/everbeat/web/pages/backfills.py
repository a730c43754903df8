"""Sends runs for past ticks of a schedule: first counted, then confirmed. Only the ticks that were shown are sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from shlex import quote
from typing import Any, Final

import msgspec
from msgspec import Struct

from everbeat.domain.settings.units import to_past_moment
from everbeat.errors.wording import amount
from everbeat.web.filters import to_moment_or_age
from everbeat.web.moments import written
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.pages.schedules import in_zone, zone_name
from everbeat.web.refusals import RequestRefused

_SHOWN: Final = 5


class TickRange(Struct, frozen=True, kw_only=True):
    """Which ticks of which schedule to send: those from `since` until before `until`, and whether their runs start one at a time."""

    name: str
    since: datetime
    until: datetime
    overlap: str

    def digest(self, ticks: Sequence[datetime]) -> str:
        """Return a hash of the range and of the ticks in it that have no run."""
        return hashlib.sha256(msgspec.json.encode([self, ticks])).hexdigest()


async def count(visit: Visit) -> PageResult:
    """Count the ticks in a range that have no run, and ask whether to send them. Raises UnknownName or ConfigurationError."""
    chosen = _range(visit)
    zone = zone_name(await visit.app.aschedule_info(chosen.name))
    ticks = await _missing(visit, chosen)
    number = amount(len(ticks), "tick")
    says = (
        f"Send {number} of {chosen.name}?" if ticks else f"Each tick of {chosen.name} in this range has a run"
    )
    since, until = (written(each) for each in (chosen.since, chosen.until))
    return Page(
        template="backfill.html",
        title="Backfill",
        says=says,
        data={"range": chosen, "ticks": ticks, "digest": chosen.digest(ticks)},
        more={
            "info": chosen,
            "first": [in_zone(tick, zone) for tick in ticks[:_SHOWN]],
            "last": [in_zone(tick, zone) for tick in ticks[max(_SHOWN, len(ticks) - _SHOWN) :]],
            "left_out": max(len(ticks) - 2 * _SHOWN, 0),
            "button": f"Send {number}",
            "zone": zone,
        },
        command=f"everbeat schedules backfill {quote(chosen.name)} --since {since} --until {until} --overlap {quote(chosen.overlap)} --dry-run",
    )


async def send(visit: Visit) -> PageResult:
    """Send the ticks that were counted. Raises UnknownName or ConfigurationError.

    Raises RequestRefused if other ticks have no run now, because the schedule was changed or another operator sent some of them.
    """
    chosen = _range(visit)
    if visit.form.require("digest") != chosen.digest(await _missing(visit, chosen)):
        message = "The ticks are not those that were counted, so nothing was sent."
        raise RequestRefused(409, "TICKS_CHANGED", message, fix="count them again.")
    sent = await _backfill(visit, chosen, dry_run=False)
    return ActionDone(
        goto=visit.link(f"/schedules/{chosen.name}"),
        says=f"Sent {amount(len(sent), 'tick')}.",
        data={"schedule": chosen.name, "ticks": sent},
    )


async def _missing(visit: Visit, chosen: TickRange) -> list[datetime]:
    return await _backfill(visit, chosen, dry_run=True)


async def _backfill(visit: Visit, chosen: TickRange, *, dry_run: bool) -> list[datetime]:
    overlap: Any = chosen.overlap
    return await visit.app.abackfill(
        chosen.name, since=chosen.since, until=chosen.until, overlap=overlap, dry_run=dry_run
    )


def _range(visit: Visit) -> TickRange:
    """Return the range of the form, with moments in place of durations, so that the second form means the same ticks."""
    form = visit.form
    return TickRange(
        name=form.require("name"),
        since=_moment(form.require("since"), subject="since", now=visit.now),
        until=_moment(form.get("until") or "0s", subject="until", now=visit.now),
        overlap=form.get("overlap") or "buffer_all",
    )


def _moment(text: str, *, subject: str, now: datetime) -> datetime:
    """Return a moment in UTC, in whole milliseconds, as the second form contains it."""
    found = to_moment_or_age(text, subject=subject)
    moment = now - found if isinstance(found, timedelta) else to_past_moment(found, subject=subject)
    return moment.replace(microsecond=moment.microsecond // 1_000 * 1_000)
