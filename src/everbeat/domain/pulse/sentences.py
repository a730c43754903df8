"""The sentences with which the pages Pulse, Workers and Recoveries open, and the words for an incident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from everbeat.domain.pulse.incidents import Incident, IncidentKind, Totals
from everbeat.domain.pulse.judging import TreeState
from everbeat.domain.pulse.memory import TreeTrace
from everbeat.errors.wording import amount, brief_duration, spoken_way

RECENT: Final = timedelta(minutes=15)
"""For how long the Pulse page opens with a death."""
_FEW: Final = 3


class Said(Struct, frozen=True):
    """A sentence that answers the question of a page, its tone, and the rest. `about` is the id of the tree or incident in question."""

    tone: str
    lead: str
    rest: str = ""
    about: str | None = None


def pulse_says(
    traces: Sequence[TreeTrace],
    incidents: Sequence[Incident],
    *,
    names: dict[str, str],
    overdue: int,
    overdue_ms: int | None,
    at: datetime,
    has_incidents: bool = True,
    is_standby: bool = False,
) -> Said:
    """Return whether anything is dead or late, and whether all work is safe. `has_incidents`: the incidents could be read."""
    live = [trace for trace in traces if trace.tree.ended_at is None]
    rest = _today(incidents, at=at) if has_incidents else ""
    if overdue:
        by = brief_duration((overdue_ms or 0) / 1_000)
        lead = f"{amount(overdue, 'lease')} of dead or silent workers should have been recovered {by} ago."
        return Said("dead", lead, "Run 'everbeat doctor'. " + rest)
    for state in (TreeState.SUSPECT, TreeState.LATE):
        found = [trace for trace in live if trace.judgement.state is state]
        if found:
            return _of_silent(found, names=names, rest=_others_beat(live, found, incidents, at=at))
    if unknown := sum(trace.judgement.state is TreeState.UNKNOWN for trace in live):
        return _of_unknown(unknown, is_standby=is_standby)
    recent = [each for each in incidents if at - each.noticed_at < RECENT]
    if recent:
        return _of_recent(recent, live, at=at)
    if not live:
        return Said(
            "late", "No worker tree is running, so no task runs.", "Start one: everbeat worker MODULE:APP."
        )
    trees = "The only tree beats" if len(live) == 1 else f"All {amount(len(live), 'tree')} beat"
    return Said("live", f"{trees}, and no work is stuck with the dead.", rest)


def _of_unknown(unknown: int, *, is_standby: bool) -> Said:
    """Return that nothing is known about some trees. A standby gets the heartbeats late, and of the past they might not be kept."""
    if not is_standby:
        return Said("late", f"{amount(unknown, 'tree')} lived whose heartbeats are not kept")
    lead = f"Whether {amount(unknown, 'tree beats', plural='trees beat')} is not known"
    return Said("late", lead, "This server is a standby, and its last heartbeats are old. Ask the primary.")


def workers_say(traces: Sequence[TreeTrace], *, names: dict[str, str], is_standby: bool = False) -> Said:
    """Return which tree is in trouble."""
    live = [trace for trace in traces if trace.tree.ended_at is None]
    if not live:
        return Said("late", "No worker tree is running", "Start one: everbeat worker MODULE:APP.")
    suspect = [trace for trace in live if trace.judgement.state is TreeState.SUSPECT]
    late = [trace for trace in live if trace.judgement.state is TreeState.LATE]
    stuck = [trace for trace in live if trace.tree.start_problem is not None]
    unknown = sum(trace.judgement.state is TreeState.UNKNOWN for trace in live)
    if suspect:
        return Said("dead", f"{_named(suspect, names)} might be dead", about=suspect[0].tree.id)
    if late:
        whole = (
            f"{_spelled(len(late))} of {amount(len(live), 'tree')} {'is' if len(late) == 1 else 'are'} late"
        )
        decides = late[0].judgement.decides_in_s
        when = "" if decides is None else f"; age decides in {brief_duration(decides)}"
        return Said("late", whole + when, about=late[0].tree.id)
    if stuck:
        return Said("late", f"{_named(stuck, names)} cannot start a worker process", about=stuck[0].tree.id)
    if unknown:
        return _of_unknown(unknown, is_standby=is_standby)
    busy = sum(worker.running for trace in live for worker in trace.crew)
    slots = [trace.slots for trace in live if trace.slots is not None]
    free = f"; {amount(sum(slots) - busy, 'slot')} free" if slots and sum(slots) >= busy else ""
    beats = "The only tree beats" if len(live) == 1 else f"All {amount(len(live), 'tree')} beat"
    return Said("live", f"{beats}{free}")


def recoveries_say(totals: Totals, *, overdue: int | None, has_incidents: bool = True) -> Said:
    """Return whether every task of the dead runs again. `overdue` is None for a past moment, of which it is not known."""
    if overdue:
        return Said("dead", f"{amount(overdue, 'lease')} of the dead should have been recovered already")
    if not has_incidents:
        return Said("late", "Whether a worker died in these 24 hours is not known")
    if overdue is None:
        return _recoveries_then(totals)
    if totals.incidents == 0:
        return Said("live", "No worker died in the last 24 hours, and nothing is overdue")
    if totals.waiting:
        verb = "waits" if totals.waiting == 1 else "wait"
        least = "At least " if totals.is_cut else ""
        return Said(
            "late",
            f"{least}{amount(totals.waiting, 'task')} of the dead {verb} to run again; nothing is overdue",
        )
    if totals.is_cut:
        lead = f"Each of the latest {amount(totals.recovered, 'task')} of the dead runs again or has ended; nothing is overdue"
        return Said("live", lead)
    return Said("live", "Every task of the dead runs again or has ended; nothing is overdue")


def _recoveries_then(totals: Totals) -> Said:
    least = "At least " if totals.is_cut else ""
    if totals.incidents == 0:
        return Said("live", "No death was noticed in the 24 hours before")
    if totals.waiting:
        verb = "waited" if totals.waiting > 1 else "was waiting"
        return Said("late", f"{least}{amount(totals.waiting, 'task')} of the dead {verb} to run again")
    return Said(
        "live", f"{least}{amount(totals.recovered, 'task')} of the dead ran again or had ended by then"
    )


def title_of(incident: Incident) -> str:
    """Return an incident as the beginning of a sentence: "fra-2 died"."""
    name = ", ".join(incident.names[:_FEW])
    match incident.kind:
        case IncidentKind.MASS:
            return (
                f"{amount(len(incident.hosts), 'host')} fell silent together"
                if len(incident.hosts) > 1
                else f"Trees of {incident.hosts[0]} died together"
            )
        case IncidentKind.PROCESS:
            return f"A process of {name} died"
        case IncidentKind.STALL:
            return f"Code stalled on {name}"
        case IncidentKind.RELEASE:
            return f"A worker of {name} was released"
        case IncidentKind.TREE if incident.noticed_by == "age":
            return f"{name} fell silent"
        case _:
            return f"{name} died"


def notice_of(incident: Incident) -> str:
    """Return how and how soon an incident was noticed: "by session after 2.1 s"."""
    after = (
        ""
        if incident.noticed_after_ms is None
        else f" after {brief_duration(incident.noticed_after_ms / 1_000)}"
    )
    return f"by {spoken_way(incident.noticed_by)}{after}"


def outcome_of(incident: Incident) -> str:
    """Return what became of the tasks of an incident."""
    if not incident.tasks:
        return "it held no task"
    parts = []
    if incident.poison:
        parts.append(f"{incident.poison} poison")
    if incident.waiting:
        parts.append(f"{incident.waiting} waiting")
    if not parts:
        again = len(incident.again_after_s)
        parts.append("all its tasks run again or have ended" if again else "all its tasks have ended")
    return ", ".join(parts)


def rescue_of(incident: Incident, names: Mapping[str, str]) -> str:
    """Return which trees took over the tasks: "fra-1 took 4, fra-3 took 3". `names` are the trees of workers."""
    return ", ".join(f"{name} took {count}" for name, count in incident.rescuers(names).items())


def _of_silent(found: Sequence[TreeTrace], *, names: dict[str, str], rest: str) -> Said:
    worst = max(found, key=lambda trace: trace.judgement.silent_s)
    judgement, name = worst.judgement, names.get(worst.tree.id, worst.tree.hostname)
    more = f" (and {amount(len(found) - 1, 'other')})" if len(found) > 1 else ""
    tasks = f"its {amount(worst.held, 'task')}" if worst.held else "it holds no task"
    if judgement.state is TreeState.SUSPECT:
        why = (
            "its session is lost"
            if judgement.session_lost
            else f"it has been silent for {brief_duration(judgement.silent_s)}"
        )
        follow = (
            f"; {tasks} will be recovered as soon as that is certain." if worst.held else f", and {tasks}."
        )
        return Said("dead", f"{name}{more} might be dead: {why}{follow}", rest, worst.tree.id)
    lead = f"{name}{more} has been silent for {brief_duration(judgement.silent_s)}."
    if judgement.decides_in_s is not None and worst.held:
        verb = "is" if worst.held == 1 else "are"
        lead += f" Unless it beats, {tasks} {verb} recovered in {brief_duration(judgement.decides_in_s)}."
    return Said("late", lead, rest, worst.tree.id)


def _of_recent(recent: Sequence[Incident], live: Sequence[TreeTrace], *, at: datetime) -> Said:
    last = recent[0]
    since = brief_duration((at - last.happened_at).total_seconds())
    lead = f"{title_of(last)} {since} ago"
    if last.waiting:
        lead += f"; {last.waiting} of its {amount(last.tasks, 'task')} still {'waits' if last.waiting == 1 else 'wait'} to run again."
        tone = "late"
    elif last.tasks:
        lead += f"; {_whole(last)}."
        tone = "run"
    else:
        lead += "; it held no task."
        tone = "run"
    more = f"{amount(len(recent) - 1, 'other incident')} in the last 15 minutes. " if len(recent) > 1 else ""
    beat = "No tree is left." if not live else _all_beat(len(live))
    return Said(tone, lead, more + beat, last.id)


def _whole(incident: Incident) -> str:
    slowest = max(incident.again_after_s, default=None)
    whole = "its task" if incident.tasks == 1 else f"all {incident.tasks} of its tasks"
    if slowest is None:
        return f"{whole} {'has' if incident.tasks == 1 else 'have'} ended"
    if len(incident.again_after_s) < incident.tasks:
        return f"{whole} {'runs' if incident.tasks == 1 else 'run'} again or {'has' if incident.tasks == 1 else 'have'} ended"
    return f"{whole} ran again within {brief_duration(slowest)}"


def _today(incidents: Sequence[Incident], *, at: datetime) -> str:
    today = len([each for each in incidents if at - each.noticed_at < timedelta(hours=24)])
    return (
        "No worker died in the last 24 hours."
        if not today
        else f"{amount(today, 'incident')} in the last 24 hours."
    )


def _others_beat(
    live: Sequence[TreeTrace], found: Sequence[TreeTrace], incidents: Sequence[Incident], *, at: datetime
) -> str:
    recent = [each for each in incidents if at - each.noticed_at < RECENT]
    told = ""
    if recent:
        since = brief_duration((at - recent[0].happened_at).total_seconds())
        told = f"{title_of(recent[0])} {since} ago; {outcome_of(recent[0])}. "
    states = Counter(trace.judgement.state for trace in live)
    if states[TreeState.BEATS] == len(live) - len(found):
        return told + ("Everything else beats." if len(live) > len(found) else "No other tree is running.")
    return f"{told}{states[TreeState.BEATS]} of {amount(len(live), 'tree')} beat."


def _all_beat(count: int) -> str:
    return "The other tree beats." if count == 1 else f"All {amount(count, 'other tree')} beat."


def _named(traces: Sequence[TreeTrace], names: dict[str, str]) -> str:
    shown = [names.get(trace.tree.id, trace.tree.hostname) for trace in traces[:_FEW]]
    more = len(traces) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _spelled(count: int) -> str:
    return {1: "One", 2: "Two", 3: "Three"}.get(count, str(count))
