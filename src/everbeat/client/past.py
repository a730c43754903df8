"""Reads the state of an installation at a past moment."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from everbeat.domain.explain.reasons import SilenceRules
from everbeat.domain.inspection import RecoveryInfo, SupervisorInfo
from everbeat.domain.past import PastRuns, PastSetting, as_known_at, has_expired, with_runs
from everbeat.domain.pulse.incidents import Incident, incidents_of
from everbeat.domain.pulse.memory import DEAD_SHOWN_S, WINDOW_S, PulseMemory
from everbeat.domain.pulse.wording import names_in_incidents
from everbeat.store import inspection, past
from everbeat.store.plan import Plan, ask

MOST_RUNS: Final = 1_000
MOST_RECOVERIES: Final = 1_000
_DAY: Final = timedelta(hours=24)
_MOST_TREES: Final = 1_000
_BEATS_NEEDED: Final = timedelta(minutes=1)
"""If the history of heartbeats begins later than this before a moment, a tree without one is not silent. The SQL has the same minute."""


def runs_at(at: datetime) -> Plan[PastRuns]:
    """Return a plan that reads the attempts whose code ran at a moment."""
    found = yield from ask(past.runs(at, limit=MOST_RUNS + 1))
    return PastRuns(runs=found[:MOST_RUNS], more=len(found) > MOST_RUNS)


def memory_at(
    at: datetime, *, rules: SilenceRules, runs: PastRuns
) -> Plan[tuple[PulseMemory, datetime | None]]:
    """Return a plan that reads the trees and their heartbeats at a moment. The second value is the time of the oldest heartbeat that is kept."""
    found = yield from ask(past.sample_trees(at, window_ms=DEAD_SHOWN_S * 1_000))
    memory = PulseMemory(rules)
    memory.record(with_runs(found.sample, runs))
    memory.backfill((yield from ask(past.beats(at, window_ms=WINDOW_S * 1_000))))
    if found.beats_since is None or found.beats_since > at - _BEATS_NEEDED:
        memory.doubt()
    return memory, found.beats_since


def incidents_at(at: datetime) -> Plan[list[Incident]]:
    """Return a plan that reads the incidents of the 24 hours before a moment, with what was known then."""
    found = yield from ask(
        past.recoveries(at, window_ms=int(_DAY.total_seconds() * 1_000), limit=MOST_RECOVERIES)
    )
    trees = yield from ask(inspection.supervisors(stale_ms=0, ended_too=True, limit=_MOST_TREES))
    known = [as_known_at(each, at) for each in found]
    return _incidents(known, [each for each in trees if _ended_within(each, at - _DAY, at)], trees)


def unnoticed_at(at: datetime) -> Plan[list[Incident]]:
    """Return a plan that reads the incidents whose dead had given their last sign of life before a moment, and were noticed after it."""
    found = yield from ask(
        past.recoveries(
            at + _LONGEST_NOTICE,
            window_ms=int(_LONGEST_NOTICE.total_seconds() * 1_000),
            limit=MOST_RECOVERIES,
        )
    )
    trees = yield from ask(inspection.supervisors(stale_ms=0, ended_too=True, limit=_MOST_TREES))
    incidents = _incidents(
        found, [each for each in trees if _ended_within(each, at, at + _LONGEST_NOTICE)], trees
    )
    return [each for each in incidents if each.at <= at < each.noticed_at]


_LONGEST_NOTICE: Final = timedelta(minutes=10)
"""Deaths that were noticed later than this are not looked for."""


def settings_at(at: datetime) -> Plan[list[PastSetting]]:
    """Return a plan that reads the pauses and limits that operators had set by a moment, according to the audit log."""
    found = yield from ask(past.settings(at))
    return [each for each in found if each.action in ("pause", "set_limit") and not has_expired(each, at)]


def _ended_within(tree: SupervisorInfo, after: datetime, until: datetime) -> bool:
    return tree.ended_at is not None and after < tree.ended_at <= until


def _incidents(
    found: list[RecoveryInfo], departed: list[SupervisorInfo], trees: list[SupervisorInfo]
) -> list[Incident]:
    return incidents_of(found, departed, names=names_in_incidents(trees))
