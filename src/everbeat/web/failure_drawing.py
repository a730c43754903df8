"""Draws how many failures of a group there were in each of the last 24 hours, as small bars with a sentence for screen readers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from markupsafe import Markup

from everbeat.errors.wording import amount
from everbeat.web.wording import shown_text

_HOUR_S: Final = 3_600
_STEP: Final = 4
_BAR: Final = 3
_HEIGHT: Final = 20
_LOWEST: Final = 0.6
"""An hour without failures has a line of this height, so that the bars have a base."""


def hours_svg(by_hour: Sequence[int], *, now: datetime, counted_since: datetime | None) -> Markup:
    """Return a bar for each hour, the latest one last. Failures before `counted_since` were not counted, so their hours have no bar."""
    if not by_hour:
        return Markup("")
    known = _known(len(by_hour), now=now, counted_since=counted_since)
    highest = max(by_hour[len(by_hour) - known :]) or 1
    bars = []
    for place in range(len(by_hour) - known, len(by_hour)):
        count = by_hour[place]
        height = max(1.0, 19 * count / highest) if count else _LOWEST
        tone = "dead" if count else "line"
        bars.append(
            f'<rect class="f-{tone}" x="{place * _STEP}" width="{_BAR}" y="{_HEIGHT - height:.1f}" height="{height:.1f}"/>'
        )
    words = hours_told(by_hour, now=now, counted_since=counted_since)
    return Markup(
        f'<svg class="spark" viewBox="0 0 {_STEP * len(by_hour)} {_HEIGHT}" preserveAspectRatio="none" role="img">'
        f"<title>{shown_text(words)}</title>{''.join(bars)}</svg>"
    )


def hours_told(by_hour: Sequence[int], *, now: datetime, counted_since: datetime | None) -> str:
    """Return the bars in words."""
    known = _known(len(by_hour), now=now, counted_since=counted_since)
    counted = by_hour[len(by_hour) - known :]
    span = "hour" if known == 1 else f"{known} h"
    total, highest = sum(counted), max(counted)
    if not total:
        return f"No failure in the last {span}"
    least = (
        "at least " if counted_since is not None and (now - counted_since).total_seconds() < _HOUR_S else ""
    )
    told = f"{least}{amount(total, 'failure')} in the last {span}"
    if known > 1:
        ago = next(ago for ago, count in enumerate(reversed(counted)) if count == highest)
        when = "in the last hour" if not ago else f"{ago} to {ago + 1} h ago"
        told += f", at most {highest:,} in one hour, {when}"
    cut = "" if known == len(by_hour) else "; earlier hours were not counted"
    return f"{told[:1].upper()}{told[1:]}{cut}"


def _known(hours: int, *, now: datetime, counted_since: datetime | None) -> int:
    """Return how many of the latest hours were counted completely. The last hour has a bar in any case."""
    if counted_since is None:
        return hours
    return max(1, min(hours, int((now - counted_since).total_seconds() // _HOUR_S)))
