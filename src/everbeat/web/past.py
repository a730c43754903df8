"""The as-of view: the moment that the address names, the picture of that moment, and the records that are no longer kept."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from everbeat.client.database_access import database_of
from everbeat.client.explaining import silence_rules
from everbeat.client.past import incidents_at, memory_at, runs_at, settings_at, unnoticed_at
from everbeat.domain.past import PastRuns, PastSetting, not_kept
from everbeat.domain.pulse.incidents import Incident
from everbeat.domain.pulse.judging import TreeCounts, TreeState
from everbeat.domain.pulse.memory import PulseMemory
from everbeat.domain.pulse.sentences import notice_of, title_of
from everbeat.errors.wording import amount, brief_duration
from everbeat.store.audit import RETENTION_HOURS
from everbeat.web.live import PulsePicture

if TYPE_CHECKING:
    from everbeat.web.page import Visit

_DEAD_FOR: Final = timedelta(hours=1)
_SERIES_HOURS: Final = 30 * 24


class PastView(Struct, frozen=True, kw_only=True):
    """A past moment: the picture of the pulse, the attempts that ran, the deaths that were noticed later, and the settings of operators.

    `lacking` are phrases for the records that are no longer kept. `knows_runs` and `knows_trees` are False if the attempts or the trees could
    not be read, or are no longer kept.
    """

    at: datetime
    picture: PulsePicture
    runs: PastRuns
    unnoticed: Sequence[Incident]
    settings: Sequence[PastSetting]
    lacking: Sequence[str]
    knows_runs: bool = True
    knows_trees: bool = True

    def document(self) -> dict[str, Any]:
        """Return what all pages of the past add to their records."""
        return {
            "as_of": self.at,
            "not_kept": self.lacking,
            "dead_but_not_noticed": [each.id for each in self.unnoticed],
        }

    @property
    def says(self) -> str:
        """Return how many trees lived then, and how many attempts ran."""
        states = [
            trace.judgement.state for trace in self.picture.memory.traces if trace.tree.ended_at is None
        ]
        beat, unknown = states.count(TreeState.BEATS), states.count(TreeState.UNKNOWN)
        late = len(states) - beat - unknown
        told = [
            *([f"{amount(beat, 'tree')} beat, {late} late"] if unknown < len(states) else []),
            *([f"{amount(unknown, 'tree')} lived whose heartbeats are not kept"] if unknown else []),
        ]
        lead = ", ".join(told) if states else "No worker tree is known to have been running"
        if not self.knows_trees:
            lead = "Which worker trees were running is not known"
        if not self.knows_runs:
            return f"{lead}; which attempts ran is not known"
        more = "more than " if self.runs.more else ""
        return f"{lead}; {more}{amount(len(self.runs.runs), 'attempt')} ran"

    def unnoticed_words(self) -> list[str]:
        """Return a sentence for each death that was noticed only after the moment."""
        return [
            f"{title_of(each)} {brief_duration((self.at - each.at).total_seconds())} before, and it was noticed "
            f"{brief_duration((each.noticed_at - self.at).total_seconds())} later {notice_of(each)}."
            for each in self.unnoticed
        ]


async def read_past(visit: Visit, at: datetime) -> PastView:
    """Read the moment. A part that cannot be read is missing, and the page names it."""
    app = visit.app
    access, rules = database_of(app), silence_rules(app.recovery)
    found = await visit.parts(
        runs=("The attempts", access.arun(runs_at(at)), None),
        incidents=("The incidents", access.arun(incidents_at(at)), None),
        unnoticed=("The deaths that were noticed later", access.arun(unnoticed_at(at)), []),
        settings=("The pauses and limits", access.arun(settings_at(at)), []),
    )
    runs = found["runs"] or PastRuns(more=True)
    reading = access.arun(memory_at(at, rules=rules, runs=runs))
    trees = await visit.part("The worker trees", reading, None)
    memory, beats_since = trees or (PulseMemory(rules), None)
    kept_h = app.recovery.terminal_record_retention_hours
    is_kept = kept_h is None or at >= visit.now - timedelta(hours=kept_h)
    return PastView(
        at=at,
        picture=PulsePicture(
            memory,
            found["incidents"] or [],
            at,
            _crew(memory, at),
            is_past=True,
            has_incidents=found["incidents"] is not None and is_kept,
        ),
        knows_runs=found["runs"] is not None and is_kept,
        knows_trees=trees is not None,
        runs=runs,
        unnoticed=found["unnoticed"],
        settings=found["settings"],
        lacking=_lacking(visit, at, beats_since),
    )


def _crew(memory: PulseMemory, at: datetime) -> TreeCounts:
    dead = sum(
        trace.tree.is_dead and trace.tree.ended_at is not None and trace.tree.ended_at > at - _DEAD_FOR
        for trace in memory.traces
    )
    return TreeCounts.of((trace.judgement.state for trace in memory.traces), dead=dead)


def _lacking(visit: Visit, at: datetime, beats_since: datetime | None) -> list[str]:
    kept = visit.app.recovery
    hours = (
        ("heartbeats", kept.heartbeat_retention_hours),
        ("snapshots of workers and their records", kept.worker_state_retention_hours),
        ("ended tasks and recoveries", kept.terminal_record_retention_hours),
        ("rates and depths", _SERIES_HOURS),
        ("the audit log of pauses and limits", RETENTION_HOURS),
    )
    return not_kept(at, now=visit.now, beats_since=beats_since, hours=hours)
