"""The marks of a tree's strip, in seconds before now, and the same in words. The drawing is in `web`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from everbeat.domain.pulse.incidents import Incident, IncidentKind
from everbeat.domain.pulse.judging import TreeState
from everbeat.domain.pulse.memory import WINDOW_S, TreeTrace
from everbeat.domain.recovery.liveness import LATE_BEATS
from everbeat.errors.wording import amount, brief_duration, spoken_way

AHEAD_S: Final = 20
"""How many seconds to come a strip shows, for the moment at which age decides."""
_MOST_MISSED: Final = 8


class Spike(Struct, frozen=True):
    """A heartbeat. `load` is the share of the tree's slots that were in use, from 0 to 1."""

    ago_s: float
    load: float


class TakeOver(Struct, frozen=True):
    """The moment at which a tree took over work of a dead one. `count` tasks of `dead` ran again."""

    ago_s: float
    count: int
    dead: str


class Notice(Struct, frozen=True):
    """When and how a death was noticed. `after_s` counts from the last sign of life. It is None if that moment is not stored."""

    ago_s: float
    by: str
    after_s: float | None


def noticed_words(notice: Notice) -> str:
    """Return how and, if that is known, how soon a death was noticed: "noticed by session after 2.1 s"."""
    after = "" if notice.after_s is None else f" after {brief_duration(notice.after_s)}"
    return f"noticed by {spoken_way(notice.by)}{after}"


class ProcessLine(Struct, frozen=True):
    """One worker process of the tree: from when until when it lived. `death` is the cause if it did not exit in an orderly way."""

    worker_id: str
    from_s: float
    until_s: float
    death: str | None = None


class Strip(Struct, frozen=True, kw_only=True):
    """The strip of one tree. All times are in seconds before now; a negative one lies ahead.

    `bumps` are the seconds in which its session was seen. `late_from_s` is when the second missing heartbeat was due. `flat_from_s` is the
    last sign of life of a dead tree, `decides_s` when age decides, `left_s` the orderly exit. `is_pooled`: it has no session that can be
    watched. `says` is the strip in words.
    """

    state: TreeState
    spikes: tuple[Spike, ...]
    bumps: tuple[float, ...]
    missed: tuple[float, ...]
    born_s: float | None
    late_from_s: float | None
    flat_from_s: float | None
    decides_s: float | None
    left_s: float | None
    notice: Notice | None
    takeovers: tuple[TakeOver, ...]
    processes: tuple[ProcessLine, ...]
    is_pooled: bool
    says: str


def strip_of(
    trace: TreeTrace,
    *,
    name: str,
    at: datetime,
    takeovers: Sequence[TakeOver] = (),
    incident: Incident | None = None,
) -> Strip:
    """Return the strip of a tree at the database's time `at`. `incident` is that of its death, which knows the last sign of life best."""
    tree, judgement = trace.tree, trace.judgement
    state = judgement.state
    slots = trace.slots
    spikes = tuple(
        Spike(_ago(beat, at), min(1.0, held / slots) if slots else 0.0)
        for beat, held in trace.beats
        if _ago(beat, at) <= WINDOW_S
    )
    silent_from_s = judgement.silent_s
    flat_from_s = _flat_from_s(trace, incident, at=at) if state is TreeState.DEAD else None
    is_waiting = state in (TreeState.LATE, TreeState.SUSPECT) and silent_from_s >= judgement.beat_s
    late_from_s = silent_from_s - LATE_BEATS * judgement.beat_s if is_waiting else None
    decides_s = None if judgement.decides_in_s is None or not is_waiting else -judgement.decides_in_s
    born_s = _ago(tree.started_at, at)
    strip = Strip(
        state=state,
        spikes=spikes,
        bumps=tuple(_ago(seen, at) for seen in trace.seen),
        missed=_missed(silent_from_s, judgement.beat_s) if is_waiting else (),
        born_s=born_s if born_s < WINDOW_S else None,
        late_from_s=None if late_from_s is None else max(0.0, late_from_s),
        flat_from_s=flat_from_s,
        decides_s=decides_s if decides_s is not None and -AHEAD_S <= decides_s <= WINDOW_S else None,
        left_s=_ago(tree.ended_at, at) if state is TreeState.LEFT and tree.ended_at is not None else None,
        notice=_notice(trace, incident, flat_from_s, at=at),
        takeovers=tuple(takeovers),
        processes=tuple(_line(worker.id, trace, at=at) for worker in trace.workers),
        is_pooled=not tree.session_held and tree.ended_at is None and tree.beat_seq > 0,
        says="",
    )
    return _worded(strip, trace, name=name)


def takeovers_of(
    incidents: Iterable[Incident], traces: Iterable[TreeTrace], *, at: datetime
) -> dict[str, list[TakeOver]]:
    """Return, by the id of a living tree, where it took over tasks of dead trees in the window."""
    tree_of = {worker.id: trace.tree.id for trace in traces for worker in trace.workers}
    found: dict[str, list[TakeOver]] = {}
    for incident in incidents:
        if incident.kind not in (IncidentKind.TREE, IncidentKind.MASS):
            continue
        first: dict[str, float] = {}
        count: Counter[str] = Counter()
        for rerun in incident.reruns:
            tree = tree_of.get(rerun.recovery.ran_again_on or "")
            if tree is not None and rerun.again_at is not None:
                first[tree] = max(first.get(tree, 0.0), _ago(rerun.again_at, at))
                count[tree] += 1
        for tree, ago_s in first.items():
            found.setdefault(tree, []).append(TakeOver(ago_s, count[tree], ", ".join(incident.names)))
    return found


def _ago(moment: datetime, at: datetime) -> float:
    return (at - moment).total_seconds()


def _flat_from_s(trace: TreeTrace, incident: Incident | None, *, at: datetime) -> float:
    """Return when a dead tree gave its last sign of life: a heartbeat, a sample that found its session held, or what the incident says."""
    last = max([trace.tree.last_beat_at, *trace.seen, *([] if incident is None else [incident.at])])
    return _ago(last, at)


def _missed(silent_s: float, beat_s: float) -> tuple[float, ...]:
    """Return when heartbeats were due that did not come, the last ones first if there are many."""
    due = int(silent_s // beat_s)
    first = max(1, due - _MOST_MISSED + 1)
    return tuple(silent_s - number * beat_s for number in range(first, due + 1))


def _notice(
    trace: TreeTrace, incident: Incident | None, flat_from_s: float | None, *, at: datetime
) -> Notice | None:
    tree = trace.tree
    if flat_from_s is None or tree.ended_at is None:
        return None
    noticed_s = _ago(tree.ended_at, at)
    measured_ms = None if incident is None else incident.noticed_after_ms
    by = tree.ended_how or "unknown"
    after_s = None if measured_ms is None else measured_ms / 1_000
    if after_s is None and by == "age":
        after_s = max(0.0, flat_from_s - noticed_s)
    return Notice(noticed_s, by, after_s)


def _line(worker_id: str, trace: TreeTrace, *, at: datetime) -> ProcessLine:
    worker = next(each for each in trace.workers if each.id == worker_id)
    ended = worker.ended_at or trace.tree.ended_at
    is_own_death = worker.is_dead and worker.ended_how == "child_exit"
    return ProcessLine(
        worker_id,
        from_s=_ago(worker.started_at, at),
        until_s=0.0 if ended is None else _ago(ended, at),
        death=(worker.ended_cause or "it died") if is_own_death else None,
    )


def _worded(strip: Strip, trace: TreeTrace, *, name: str) -> Strip:
    parts = [_state_in_words(strip, trace, name=name)]
    deaths = sum(line.death is not None for line in strip.processes)
    if deaths:
        parts.append(f"{amount(deaths, 'worker process', plural='worker processes')} died")
    taken: dict[str, int] = {}
    for takeover in strip.takeovers:
        taken[takeover.dead] = taken.get(takeover.dead, 0) + takeover.count
    parts += [f"took over {amount(count, 'task')} of {dead}" for dead, count in taken.items()]
    if strip.is_pooled:
        parts.append("no session to watch")
    return replace(strip, says="; ".join(parts))


def _state_in_words(strip: Strip, trace: TreeTrace, *, name: str) -> str:
    judgement = trace.judgement
    silent = brief_duration(judgement.silent_s)
    match strip.state:
        case TreeState.BEATS:
            return f"{name} beats every {brief_duration(judgement.beat_s)}"
        case TreeState.LATE:
            when = (
                ""
                if judgement.decides_in_s is None
                else f"; age decides in {brief_duration(judgement.decides_in_s)}"
            )
            return f"{name} has not beaten for {silent}{when}"
        case TreeState.SUSPECT:
            why = "its session is lost" if judgement.session_lost else f"it has been silent for {silent}"
            return f"{name} might be dead: {why}"
        case TreeState.UNKNOWN:
            return f"whether {name} beats is not known"
        case TreeState.LEFT:
            return f"{name} shut down in an orderly way {brief_duration(strip.left_s or 0.0)} ago"
        case TreeState.DEAD:
            since = f" for {brief_duration(strip.flat_from_s or 0.0)}"
            if strip.notice is None:
                return f"{name} is dead; flat{since}"
            return f"{name} is dead; flat{since}; {noticed_words(strip.notice)}"
