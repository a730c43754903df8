"""The home page: the strips of all trees, the figures of the last 24 hours, and the recoveries as they happen."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from msgspec import Struct

from everbeat.domain.pulse.incident_report import incident_summary
from everbeat.domain.pulse.incidents import Incident, IncidentKind, Totals, totals_of
from everbeat.domain.pulse.judging import TreeState, decides_at
from everbeat.domain.pulse.memory import TreeTrace
from everbeat.domain.pulse.sentences import notice_of, outcome_of, pulse_says, rescue_of, title_of
from everbeat.domain.pulse.strips import Strip, TakeOver, strip_of, takeovers_of
from everbeat.domain.pulse.wording import names_of
from everbeat.errors.wording import amount, brief_duration
from everbeat.web import rendering, wording
from everbeat.web.live import Parts, PulsePicture
from everbeat.web.page import Page, PageResult, Visit
from everbeat.web.pages.charts import busiest_of, chart_content, charts_of
from everbeat.web.past import read_past
from everbeat.web.requests import wants_json
from everbeat.web.strip_drawing import mini_svg, sparkline, strip_svg
from everbeat.web.wording import Mark

COMMAND: Final = "everbeat workers"
_PARTS: Final = {
    "live-say": "pulse_say.html",
    "live-strips": "pulse_strips.html",
    "live-figures": "pulse_figures.html",
    "live-ticker": "pulse_ticker.html",
}
_SHOWN: Final = 40
_TICKED: Final = 12
_RUNS: Final = 200
TREE_MARKS: Final = {
    TreeState.BEATS: Mark("live", "s-live", "beats"),
    TreeState.LATE: Mark("late", "s-late", "late"),
    TreeState.SUSPECT: Mark("late", "s-suspect", "suspect"),
    TreeState.DEAD: Mark("dead", "s-flat", "dead"),
    TreeState.LEFT: Mark("wait", "s-left", "left"),
    TreeState.UNKNOWN: Mark("wait", "s-suspect", "unknown"),
}
_INCIDENT_MARKS: Final = {
    IncidentKind.TREE: ("dead", "s-flat"),
    IncidentKind.MASS: ("dead", "s-flat"),
    IncidentKind.PROCESS: ("dead", "s-dead"),
    IncidentKind.STALL: ("late", "s-late"),
    IncidentKind.RELEASE: ("wait", "i-rescue"),
}


class TreeRow(Struct, frozen=True, kw_only=True):
    """One strip with the words beside it."""

    trace: TreeTrace
    name: str
    strip: Strip
    drawing: str
    who: str
    told: str
    mark: Mark


async def show(visit: Visit) -> PageResult:
    """Show the pulse, now or at a past moment. The page of the present is live: its parts are replaced as they change."""
    if visit.at is not None:
        return await _past(visit, visit.at)
    picture = await visit.web.live.picture()
    note_incidents(visit, picture)
    content = pulse_content(picture)
    charts, busiest = await asyncio.gather(charts_of(visit), busiest_of(visit))
    return Page(
        template="pulse.html",
        title="Pulse",
        says=" ".join([content["say"].lead, content["say"].rest]).strip(),
        data=_document(picture, content) | {"busiest_queues": busiest, "charts": charts},
        more={
            **content,
            **chart_content(visit, charts, path="/pulse"),
            **times_of(picture),
            "mini": mini_of(picture.memory.traces, picture),
            "busiest": [(each, sparkline(each.line, tone="run")) for each in busiest],
        },
        command=COMMAND,
    )


async def _past(visit: Visit, at: datetime) -> PageResult:
    """Show the pulse of a past moment: the trees, what ran on them, and the charts around it."""
    view = await read_past(visit, at)
    picture = view.picture
    content, trees = pulse_content(picture), trees_of_workers(picture)
    charts, busiest = await asyncio.gather(charts_of(visit), busiest_of(visit))
    document = _document(picture, content) | {"overdue_leases": None, "at": at}
    return Page(
        template="pulse_past.html",
        title="Pulse as of then",
        says=view.says,
        data=document
        | view.document()
        | {"runs": view.runs.runs, "more_runs": view.runs.more, "busiest_queues": busiest, "charts": charts},
        more={
            **content,
            **chart_content(visit, charts, path="/pulse"),
            **times_of(picture),
            "view": view,
            "runs_shown": [(run, trees.get(run.worker_id)) for run in view.runs.runs[:_RUNS]],
            "runs_left": max(0, len(view.runs.runs) - _RUNS),
            "busiest": [(each, sparkline(each.line, tone="run")) for each in busiest],
        },
    )


async def stream(visit: Visit) -> PageResult:
    """Stream the parts of the page that change."""
    return await visit.web.live.stream(visit, f"pulse {visit.link('/')}", partial(_parts, visit))


def _parts(visit: Visit, picture: PulsePicture) -> Parts:
    context = {**pulse_content(picture), **times_of(picture)}
    return {name: rendering.fragment(visit, template, context) for name, template in _PARTS.items()} | {
        "live-vital": vital_html(visit, picture)
    }


def vital_html(visit: Visit, picture: PulsePicture) -> str:
    """Return the state of all trees for the header of each page."""
    context = {"crew": picture.crew, "mini": mini_of(picture.memory.traces, picture)}
    return rendering.fragment(visit, "pulse_vital.html", context)


def mini_of(traces: Sequence[TreeTrace], picture: PulsePicture) -> str:
    """Return one small strip for several trees together."""
    beats = [(picture.at - at).total_seconds() for trace in traces for at, _ in trace.beats]
    return mini_svg(beats)


def times_of(picture: PulsePicture) -> dict[str, Any]:
    """Return the time of a picture for its templates."""
    return {"at": picture.at, "ago": partial(wording.ago, now=picture.at), "brief": brief_duration}


def pulse_content(picture: PulsePicture) -> dict[str, Any]:
    """Return what the templates of the Pulse page show."""
    memory, last = picture.memory, picture.memory.last
    traces = memory.traces
    names = names_of(trace.tree for trace in traces)
    overdue = 0 if last is None else last.overdue
    say = pulse_says(
        traces,
        picture.incidents,
        names=names,
        overdue=overdue,
        overdue_ms=None if last is None else last.overdue_ms,
        at=picture.at,
        has_incidents=picture.has_incidents,
        is_standby=last is not None and last.is_standby,
    )
    workers = trees_of_workers(picture)
    takeovers = takeovers_of(picture.incidents, traces, at=picture.at)
    rows = [
        tree_row(trace, names[trace.tree.id], picture, takeovers.get(trace.tree.id, ()))
        for trace in traces[:_SHOWN]
    ]
    return {
        "say": say,
        "rows": rows,
        "more_trees": max(0, len(traces) - _SHOWN),
        "overdue": overdue,
        "overdue_ms": None if last is None else last.overdue_ms,
        "totals": totals_of(picture.incidents),
        "ticker": [ticker_row(each, picture, workers) for each in picture.incidents[:_TICKED]],
        "problem": picture.problem,
        "has_incidents": picture.has_incidents,
    }


def note_incidents(visit: Visit, picture: PulsePicture) -> None:
    """Name the incidents in the record of a page if they could not be read. The page itself says so in its live part."""
    if picture.problem is not None and wants_json(visit.request):
        visit.could_not_read("The incidents", picture.problem)


def tree_row(trace: TreeTrace, name: str, picture: PulsePicture, takeovers: Sequence[TakeOver]) -> TreeRow:
    """Return the strip of a tree and the words beside it."""
    incident = incident_about(trace.tree.id, picture)
    strip = strip_of(trace, name=name, at=picture.at, takeovers=takeovers, incident=incident)
    return TreeRow(
        trace=trace,
        name=name,
        strip=strip,
        drawing=strip_svg(strip),
        who=_who(trace),
        told=_told(trace, strip, picture),
        mark=TREE_MARKS[trace.judgement.state],
    )


def incident_about(party: str, picture: PulsePicture) -> Incident | None:
    """Return the latest incident of a supervisor or worker."""
    return next((each for each in picture.incidents if party in each.parties), None)


def trees_of_workers(picture: PulsePicture) -> dict[str, str]:
    """Return the name of the tree of each worker that the pulse shows."""
    traces = picture.memory.traces
    names = names_of(trace.tree for trace in traces)
    return {worker.id: names[trace.tree.id] for trace in traces for worker in trace.workers}


def _who(trace: TreeTrace) -> str:
    state, crew = trace.judgement.state, trace.crew
    processes = amount(len(crew or trace.workers), "process", plural="processes")
    if state in (TreeState.DEAD, TreeState.LEFT):
        return processes
    if state is not TreeState.BEATS:
        return f"{processes}, holds {amount(trace.held, 'task')}"
    busy = sum(worker.running for worker in crew)
    return (
        f"{processes}, {busy} running"
        if trace.slots is None
        else f"{processes}, {busy} of {amount(trace.slots, 'slot')}"
    )


def _told(trace: TreeTrace, strip: Strip, picture: PulsePicture) -> str:
    judgement, tree = trace.judgement, trace.tree
    match judgement.state:
        case TreeState.BEATS:
            taken = sum(takeover.count for takeover in strip.takeovers)
            beat = f"{brief_duration(judgement.silent_s)} ago"
            if tree.quiet_since is not None:
                return f"{beat}; quiet, claims nothing"
            if tree.draining:
                return f"{beat}; draining"
            return f"{beat}; took over {amount(taken, 'task')}" if taken else beat
        case TreeState.LATE | TreeState.SUSPECT:
            held = (
                "its session then is unknown"
                if picture.is_past
                else "session lost"
                if judgement.session_lost
                else "session held"
                if tree.locked
                else "no session to watch"
            )
            if judgement.session_lost:
                return f"{held}, is being judged"
            if judgement.decides_in_s is None:
                return f"{held}; recovery by age is off"
            when = brief_duration(judgement.decides_in_s) if judgement.decides_in_s > 0 else "moments"
            return f"{held}, age decides in {when}"
        case TreeState.UNKNOWN:
            return "its heartbeats are not kept" if picture.is_past else "a standby gets its heartbeats late"
        case TreeState.LEFT:
            return f"{brief_duration(strip.left_s or 0.0)} ago"
        case TreeState.DEAD:
            incident = incident_about(tree.id, picture)
            return "its tasks are being recovered" if incident is None else outcome_of(incident)


def ticker_row(incident: Incident, picture: PulsePicture, names: Mapping[str, str]) -> dict[str, Any]:
    """Return one line of the list of incidents."""
    tone, icon = _INCIDENT_MARKS[incident.kind]
    again = incident.again_after_s
    told = f"noticed {notice_of(incident)}"
    if again:
        told += f", running again within {brief_duration(again[-1])}"
    elif incident.waiting:
        told += f", {incident.waiting} waiting to run again"
    if incident.kind is IncidentKind.PROCESS:
        told = f"{incident.cause}; {told}"
    return {
        "id": incident.id,
        "tone": tone,
        "icon": icon,
        "title": title_of(incident),
        "tasks": incident.tasks,
        "waiting": incident.waiting,
        "told": told,
        "rescue": rescue_of(incident, names),
        "outcome": outcome_of(incident),
        "at": incident.happened_at,
        "ago": brief_duration((picture.at - incident.happened_at).total_seconds()),
    }


def figures_of(totals: Totals) -> dict[str, Any]:
    """Return the figures of the last 24 hours as a document. Durations are in seconds."""
    return {
        "recovered_24h": totals.recovered,
        "is_complete": not totals.is_cut,
        "incidents_24h": totals.incidents,
        "poison_24h": totals.poison,
        "waiting": totals.waiting,
        "noticed_after_s": totals.noticed_s,
        "slowest_notice_s": totals.slowest_notice_s,
        "running_again_after_s": totals.again_s,
        "slowest_running_again_s": totals.slowest_again_s,
    }


def _document(picture: PulsePicture, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": picture.at,
        "overdue_leases": content["overdue"],
        "figures": figures_of(content["totals"]),
        "trees": [tree_document(trace, content["rows"], picture) for trace in picture.memory.traces],
        "incidents": [
            incident_summary(each, trees_of_workers(picture)) for each in picture.incidents[:_TICKED]
        ],
    }


def tree_document(trace: TreeTrace, rows: Sequence[TreeRow], picture: PulsePicture) -> dict[str, Any]:
    """Return a tree as a document: its state by the rules of the reaper, its heartbeats in the window, and what its strip says."""
    tree, judgement = trace.tree, trace.judgement
    says = next((row.strip.says for row in rows if row.trace is trace), None)
    is_known = judgement.state is not TreeState.UNKNOWN
    return {
        "supervisor_id": tree.id,
        "hostname": tree.hostname,
        "pid": tree.pid,
        "state": judgement.state,
        "silent_s": judgement.silent_s if is_known else None,
        "beat_interval_s": judgement.beat_s,
        "age_decides_at": decides_at(judgement, at=picture.at),
        "session": "held" if tree.locked else "lost" if judgement.session_lost else "unknown",
        "beat_seq": tree.beat_seq,
        "last_beat_at": tree.last_beat_at if is_known else None,
        "started_at": tree.started_at,
        "ended_at": tree.ended_at,
        "ended_how": tree.ended_how,
        "held": trace.held,
        "beats": [at for at, _ in trace.beats],
        "says": says,
    }
