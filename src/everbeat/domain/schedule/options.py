"""The checks of a schedule's options."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice, pairwise, takewhile
from typing import Any, Final

from everbeat.domain.schedule.model import Rule, Timing
from everbeat.domain.schedule.timing import ProblemList, parse_timing, ticks_after
from everbeat.domain.settings.checks import one_of, whole
from everbeat.domain.settings.settings import FieldCheck, shown, unknown_names
from everbeat.domain.settings.units import LONGEST_S, milliseconds, span, spelled_duration, to_utc

MOST_CAUGHT_UP: Final = 10_000
LONGEST_CATCHUP_S: Final = 31 * 86_400.0
LONGEST_JITTER_S: Final = 86_399.0
MOST_RUNS: Final = 2_147_483_647
"""The largest `integer` of PostgreSQL."""

_TIMING: Final = ("cron", "every", "offset", "at", "timezone")
_REFERENCE: Final = datetime(2024, 1, 1, tzinfo=UTC)
"""The moment from which the gaps between the ticks of a cron expression are measured."""
_MEASURED: Final = timedelta(days=400)
_MOST_MEASURED: Final = 1_000


def _moment(value: object, /, *, subject: str) -> datetime:
    return to_utc(value, subject=subject)


def _milliseconds(lowest_s: float, highest_s: float) -> FieldCheck:
    limits = span(lowest_s, highest_s)

    def check(value: object, /, *, subject: str) -> int:
        return milliseconds(limits(value, subject=subject))

    return check


_CHECKS: Final[Mapping[str, tuple[str, FieldCheck]]] = {
    "missed": ("missed", one_of("latest", "all", "skip")),
    "most": ("most", whole(1, MOST_CAUGHT_UP)),
    "catchup_window": ("catchup_ms", _milliseconds(1, LONGEST_CATCHUP_S)),
    "overlap": ("overlap", one_of("allow", "skip", "buffer_one", "buffer_all", "cancel_other")),
    "jitter": ("jitter_ms", _milliseconds(0, LONGEST_JITTER_S)),
    "starts": ("starts_at", _moment),
    "ends": ("ends_at", _moment),
    "most_runs": ("most_runs", whole(1, MOST_RUNS)),
    "pause_after_failures": ("pause_after_failures", whole(1, 1_000)),
    "expires": ("expires_ms", _milliseconds(1, LONGEST_S)),
}
"""Maps each option to the field of `Rule` that stores it, and to its check."""


def rule_of(given: Mapping[str, object], subject: str) -> Rule:
    """Return the rule that the options of a schedule describe. None means that an option was not given.

    The options are `cron`, `every`, `offset`, `at`, `timezone`, `missed`, `most`, `catchup_window`, `overlap`, `jitter`, `starts`, `ends`,
    `most_runs`, `pause_after_failures` and `expires`. Raises ConfigurationError, which lists all problems.
    """
    problems = ProblemList(unknown_names(subject, "option", (*_TIMING, *_CHECKS), given))
    chosen = {name: given.get(name) for name in _TIMING}
    timing = problems.settle(lambda: parse_timing(**chosen, subject=subject), None)
    fields: dict[str, Any] = {}
    for name, (field, check) in _CHECKS.items():
        value = given.get(name)
        if value is not None:
            found = problems.settle(partial(check, value, subject=f"{subject}.{name}"), None)
            fields |= {} if found is None else {field: found}
    rule = Rule(timing=Timing() if timing is None else timing, **fields)
    if rule.starts_at is not None and rule.ends_at is not None and rule.ends_at <= rule.starts_at:
        problems.add(
            code="CONTRADICTION",
            subject=f"{subject}.ends",
            value=shown(given["ends"]),
            rule=f"must be after starts, which is {shown(given['starts'])}",
            fix="use a later end, or an earlier start",
        )
    knows_missed = given.get("missed") is None or "missed" in fields
    if rule.most != Rule(timing=rule.timing).most and knows_missed and rule.missed != "all":
        problems.add(
            code="CONTRADICTION",
            subject=f"{subject}.most",
            value=shown(given["most"]),
            rule=f"limits the missed ticks that are sent, but missed={rule.missed!r} sends at most one",
            fix='pass missed="all", or omit most',
        )
    gap = None if timing is None or not rule.jitter_ms else _shortest_gap(timing)
    if gap is not None and timedelta(milliseconds=rule.jitter_ms) >= gap:
        problems.add(
            code="OUT_OF_RANGE",
            subject=f"{subject}.jitter",
            value=shown(given["jitter"]),
            rule=f"must be shorter than the time between two ticks, which is {spelled_duration(gap.total_seconds())}",
            fix="use a shorter jitter",
        )
    problems.raise_if_any()
    return rule


def _shortest_gap(timing: Timing) -> timedelta | None:
    """Return the shortest time between two ticks, or None if there are no two ticks. For cron, this is an estimate from 1,000 ticks."""
    if timing.every_ms is not None:
        return timedelta(milliseconds=timing.every_ms)
    if timing.at:
        return min((later - earlier for earlier, later in pairwise(timing.at)), default=None)
    measured = takewhile(lambda tick: tick < _REFERENCE + _MEASURED, ticks_after(timing, _REFERENCE))
    gaps = (later - earlier for earlier, later in pairwise(islice(measured, _MOST_MEASURED)))
    return min(gaps, default=None)
