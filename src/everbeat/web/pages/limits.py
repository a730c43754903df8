"""Replaces the numbers of a limit for a time, and restores those of the code. The limits are shown by the page of the queues."""

from __future__ import annotations

from typing import Final

from everbeat.domain.limit.inspection import LimitChanges
from everbeat.web.filters import to_moment_or_age
from everbeat.web.page import ActionDone, PageResult, Visit
from everbeat.web.refusals import RequestRefused

NO_NUMBER: Final = "none"
"""The word that removes a number, as on the command line."""


async def set_numbers(visit: Visit) -> PageResult:
    """Replace numbers of a limit, until a time if one is given. Raises UnknownName or ConfigurationError."""
    name = visit.form.require("name")
    found = await visit.app.aset_limit(name, **_changes(visit))
    data = {"limit": found}
    return ActionDone(goto=visit.link("/queues"), says=f"The limit {name} has its new numbers.", data=data)


async def clear(visit: Visit) -> PageResult:
    """Restore the numbers that the code declares. Raises UnknownName."""
    name = visit.form.require("name")
    found = await visit.app.aclear_limit(name)
    says = f"The limit {name} has the numbers of the code."
    return ActionDone(goto=visit.link("/queues"), says=says, data={"limit": found})


def _changes(visit: Visit) -> LimitChanges:
    """Return the changes of the fields that are filled in."""
    form, found = visit.form, LimitChanges()
    if (text := form.get("concurrency")) is not None:
        found["concurrency"] = None if text == NO_NUMBER else _whole(text, "concurrency")
    if (text := form.get("rate")) is not None:
        found["rate"] = None if text == NO_NUMBER else text
    if (text := form.get("burst")) is not None:
        found["burst"] = _whole(text, "burst")
    if (text := form.get("until")) is not None:
        found["until"] = None if text == NO_NUMBER else to_moment_or_age(text, subject="until")
    if (text := form.get("reason")) is not None:
        found["reason"] = text
    return found


def _whole(text: str, name: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise RequestRefused(
            400, "WRONG_FORM", f"The field {name!r} is not a whole number.", fix="write 50, for example."
        )
    return int(text)
