"""The course of an incident as a list of moments, and the numbers of the installation around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from everbeat.domain.charts import ChartMark, ChartPoint
from everbeat.domain.past import PastSetting
from everbeat.domain.pulse.incidents import Incident
from everbeat.domain.pulse.sentences import notice_of, title_of
from everbeat.domain.pulse.wording import host_of
from everbeat.errors.wording import amount

AROUND: Final = timedelta(minutes=10)
"""How long before and after the last sign of life the numbers of an incident reach."""
RENEWAL: Final = ("the last heartbeat, claim or start", "from which the age of a lease counts")
"""The events that renew a lease, and their meaning."""


class TimelineEntry(Struct, frozen=True):
    """A moment of an incident, and what happened then."""

    at: datetime
    words: str


class IncidentContext(Struct, frozen=True, kw_only=True):
    """The surroundings of an incident: the series of the whole installation, other events, and what operators had paused or limited."""

    points: Sequence[ChartPoint] = ()
    marks: Sequence[ChartMark] = ()
    settings: Sequence[PastSetting] = ()


def timeline_of(incident: Incident, names: Mapping[str, str]) -> list[TimelineEntry]:
    """Return the course of an incident, the earliest moment first. `names` are the trees of workers."""
    found = [
        TimelineEntry(incident.at, "last sign of life"),
        TimelineEntry(incident.noticed_at, f"{title_of(incident)}: noticed {notice_of(incident)}"),
    ]
    if incident.beat_at is not None and incident.beat_at < incident.at:
        found.append(TimelineEntry(incident.beat_at, ", ".join(RENEWAL)))
    if incident.reruns:
        decided = [each.decided_at for each in incident.reruns]
        first, last = min(decided), max(decided)
        actions = Counter(each.recovery.action for each in incident.reruns)
        told = ", ".join(f"{count} {action}" for action, count in actions.most_common())
        found.append(TimelineEntry(first, f"recovery committed: {amount(incident.tasks, 'task')} ({told})"))
        if last > first:
            found.append(TimelineEntry(last, "last recovery committed"))
    found += _reruns(incident, names)
    ended = [each.ended_at for each in incident.reruns if each.ended_at is not None]
    if ended:
        words = f"the last of {amount(len(ended), 'recovered task')} that ended"
        found.append(TimelineEntry(max(ended), words))
    return sorted(found, key=lambda each: each.at)


def _reruns(incident: Incident, names: Mapping[str, str]) -> list[TimelineEntry]:
    """Return when each tree first ran a task of the dead again, and when the last task ran again."""
    first: dict[str, datetime] = {}
    count: Counter[str] = Counter()
    for rerun in incident.reruns:
        worker = rerun.recovery.ran_again_on
        if worker is not None and rerun.again_at is not None:
            tree = names.get(worker, host_of(worker))
            first[tree] = min(first.get(tree, rerun.again_at), rerun.again_at)
            count[tree] += 1
    found = [
        TimelineEntry(at, f"{tree} begins to run {amount(count[tree], 'task')} again")
        for tree, at in first.items()
    ]
    again = [each.again_at for each in incident.reruns if each.again_at is not None]
    if len(again) > 1:
        found.append(TimelineEntry(max(again), f"{len(again)} of {amount(incident.tasks, 'task')} run again"))
    return found
