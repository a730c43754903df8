"""The incidents of the last 24 hours, each as a small Gantt chart with its certificate, and the report of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct, structs
from starlette.responses import Response

from everbeat.client.charts import read_charts
from everbeat.client.database_access import database_of
from everbeat.client.past import settings_at
from everbeat.domain.charts import RANGES, Charts
from everbeat.domain.documents import plain_value
from everbeat.domain.inspection import RecoveryInfo
from everbeat.domain.pulse.incident_report import incident_document, incident_markdown, incident_summary
from everbeat.domain.pulse.incidents import Incident, RecoveryCourse, certificate_of, totals_of
from everbeat.domain.pulse.sentences import notice_of, recoveries_say, rescue_of, title_of
from everbeat.domain.pulse.timeline import AROUND, RENEWAL, IncidentContext
from everbeat.domain.recovery.decision import counted_from
from everbeat.errors.wording import amount, brief_duration, spoken_way, visible_json
from everbeat.web import rendering, wording
from everbeat.web.hiding import plain_part
from everbeat.web.lane_drawing import Axis, axis_of, axis_svg, end_in_words, lane_svg, order_of
from everbeat.web.live import Parts, PulsePicture
from everbeat.web.moments import written
from everbeat.web.page import Page, PageResult, Visit
from everbeat.web.pages.pulse import (
    figures_of,
    mini_of,
    note_incidents,
    ticker_row,
    times_of,
    trees_of_workers,
    vital_html,
)
from everbeat.web.past import read_past
from everbeat.web.refusals import RequestRefused

COMMAND: Final = "everbeat recoveries list --since 24h"
MOST_LANES: Final = 100
_MOST_LISTED: Final = 200
_PARTS: Final = {
    "live-say": "recoveries_say.html",
    "live-list": "recoveries_list.html",
    "live-incident": "recoveries_one.html",
}


class Step(Struct, frozen=True):
    """One step of how a death was noticed."""

    tone: str
    icon: str
    title: str
    more: str
    at: Any


async def show(visit: Visit) -> PageResult:
    """Show the incidents of 24 hours, now or at a past moment, and one of them: the chosen one or the latest."""
    view = None if visit.at is None else await read_past(visit, visit.at)
    picture = await visit.web.live.picture() if view is None else view.picture
    note_incidents(visit, picture)
    content = _content(visit, picture)
    chosen = content["incident"]
    return Page(
        template="recoveries.html",
        title="Recoveries",
        says=content["say"].lead,
        data={
            "figures": figures_of(content["totals"]),
            "incidents": [
                incident_summary(each, content["trees"]) for each in picture.incidents[:_MOST_LISTED]
            ],
            "incident": None
            if chosen is None
            else incident_document(_shown(visit, chosen), content["trees"]),
            **({} if view is None else view.document()),
        },
        more={**content, **times_of(picture), "mini": mini_of(picture.memory.traces, picture), "view": view},
        command=COMMAND,
    )


async def stream(visit: Visit) -> PageResult:
    """Stream the parts of the page that change."""
    key = f"recoveries {visit.link('/')} {visit.query.get('incident')} {visit.user.role}"
    return await visit.web.live.stream(visit, key, partial(_parts, visit))


async def export(visit: Visit) -> PageResult:
    """Return the report of an incident as Markdown or JSON, as a file."""
    view = None if visit.at is None else await read_past(visit, visit.at)
    picture = await visit.web.live.picture() if view is None else view.picture
    latest = picture.incidents[0].id if picture.incidents else "ID"
    wanted = visit.query.parameter("incident", example=visit.link("/recoveries/export", incident=latest))
    incident = _chosen(visit, picture)
    if incident is None:
        fix = "choose one of the list; for one of an earlier day, add at= with a moment within 24 hours after it."
        raise RequestRefused(404, "NO_SUCH_INCIDENT", _missing(visit, wanted), fix=fix)
    shown, names = _shown(visit, incident), trees_of_workers(picture)
    context = await _context(visit, incident)
    name = "".join(
        char if char.isascii() and (char.isalnum() or char in "-.") else "-" for char in incident.id
    )[:80]
    if visit.query.get("as") == "json":
        document = msgspec.json.encode(incident_document(shown, names, context), enc_hook=plain_value)
        text, media, ending = visible_json(document.decode()), "application/json", "json"
    else:
        text = incident_markdown(shown, names, made_at=picture.at, context=context)
        media, ending = "text/markdown", "md"
    disposition = f'attachment; filename="incident-{name}.{ending}"'
    return Response(text, media_type=f"{media}; charset=utf-8", headers={"content-disposition": disposition})


async def _context(visit: Visit, incident: Incident) -> IncidentContext:
    """Read the numbers around an incident. Those that cannot be read are missing in its report."""
    access, since, until = database_of(visit.app), incident.at - AROUND, incident.at + AROUND
    found = await visit.parts(
        charts=("The rates and depths", access.arun(read_charts(RANGES[0], now=min(until, visit.now))), None),
        settings=("The pauses and limits", access.arun(settings_at(incident.at)), []),
    )
    charts: Charts | None = found["charts"]
    if charts is None or charts.is_empty:
        return IncidentContext(settings=found["settings"])
    return IncidentContext(
        points=[point for point in charts.points if since - _MINUTE < point.at <= until],
        marks=[mark for mark in charts.marks if since <= mark.at <= until],
        settings=found["settings"],
    )


_MINUTE: Final = timedelta(minutes=1)


async def dry_run(visit: Visit) -> PageResult:
    """Show what a sweep would recover now. It changes nothing."""
    result = await visit.app.asweep_stale_workers(dry_run=True)
    says = (
        f"A sweep would recover {amount(len(result.tasks), 'task')} of {amount(len(result.worker_ids), 'silent worker')}."
        if result.tasks
        else "A sweep would recover nothing: no task is held by a silent worker."
    )
    return Page(
        template="recoveries_sweep.html",
        title="Sweep, dry run",
        says=says,
        data={"sweep": structs.asdict(result)},
        command="everbeat sweep --dry-run",
    )


def _parts(visit: Visit, picture: PulsePicture) -> Parts:
    context = {**_content(visit, picture), **times_of(picture)}
    parts = {name: rendering.fragment(visit, template, context) for name, template in _PARTS.items()}
    return parts | {"live-vital": vital_html(visit, picture)}


def _content(visit: Visit, picture: PulsePicture) -> dict[str, Any]:
    last, trees = picture.memory.last, trees_of_workers(picture)
    totals = totals_of(picture.incidents)
    incident = _chosen(visit, picture)
    content: dict[str, Any] = {
        "say": recoveries_say(
            totals,
            overdue=None if picture.is_past else 0 if last is None else last.overdue,
            has_incidents=picture.has_incidents,
        ),
        "has_incidents": picture.has_incidents,
        "totals": totals,
        "trees": trees,
        "listed": [ticker_row(each, picture, trees) for each in picture.incidents[:_MOST_LISTED]],
        "not_listed": max(0, len(picture.incidents) - _MOST_LISTED),
        "incident": incident,
        "missing": _missing(visit, wanted)
        if incident is None and (wanted := visit.query.get("incident"))
        else "",
        "replayed": None if incident is None else _replayed(incident),
        "before_at": [] if incident is None else _moments(incident, picture.at),
        "problem": picture.problem,
    }
    return content | ({} if incident is None else _one(visit, incident, picture, trees))


def _chosen(visit: Visit, picture: PulsePicture) -> Incident | None:
    """Return the incident that the address names, by its id or by one of its supervisors and workers, or else the latest."""
    wanted = visit.query.get("incident")
    for incident in picture.incidents:
        if wanted is None or wanted == incident.id or wanted in incident.parties:
            return incident
    return None


def _missing(visit: Visit, wanted: str) -> str:
    """Return that an incident is not among those that were read."""
    when = "of the last 24 hours" if visit.at is None else f"of the 24 hours before {written(visit.at)}"
    return f"Incident {wanted[:100]!r} is not one {when}."


def _one(visit: Visit, incident: Incident, picture: PulsePicture, trees: dict[str, str]) -> dict[str, Any]:
    axis = axis_of(incident, now=picture.at)
    shown = _shown(visit, incident)
    lanes = order_of(shown.reruns)[:MOST_LANES]
    ran = sum(rerun.recovery.was == "RUNNING" for rerun in incident.reruns)
    return {
        "title": title_of(incident),
        "rescue": rescue_of(incident, trees),
        "ran": ran,
        "one": totals_of([incident]),
        "notice": notice_of(incident),
        "lanes": [
            (rerun, lane_svg(rerun, axis, now=picture.at), *_lane_words(rerun, trees)) for rerun in lanes
        ],
        "not_drawn": len(shown.reruns) - len(lanes),
        "axis": axis_svg(axis),
        "marks": _marks(incident, axis),
        "steps": list(_steps(incident)),
        "certificate": None if not shown.reruns else list(_certificate(shown.reruns[0])),
        "numbers": [rerun.recovery.id for rerun in incident.reruns],
    }


def _moments(incident: Incident, at: datetime) -> list[tuple[str, str]]:
    """Return links to the moments of an incident that are worth a look, as words and addresses."""
    again = max((each.again_at for each in incident.reruns if each.again_at is not None), default=None)
    moments = [
        ("5 minutes before", incident.at - timedelta(minutes=5)),
        ("just before", incident.at - timedelta(seconds=1)),
        ("when it was noticed", incident.noticed_at),
        *([] if again is None else [("when all ran again", again)]),
        ("5 minutes after", incident.noticed_at + timedelta(minutes=5)),
    ]
    return [(words, written(moment)) for words, moment in moments if moment <= at]


def _replayed(incident: Incident) -> dict[str, str]:
    """Return the parameters of the link that replays an incident: it begins a minute before the death."""
    begin = incident.at - timedelta(minutes=1)
    return {"at": written(begin), "around": written(incident.at), "play": "1"}


def _marks(incident: Incident, axis: Axis) -> list[tuple[str, float, str]]:
    """Return the words above the lanes, where they do not overlap."""
    found = [("k-dead", axis.place(incident.at), "last sign of life")]
    noticed = axis.place(incident.noticed_at)
    if noticed - found[-1][1] >= _WORDS_APART:
        found.append(("k-dead", noticed, "noticed"))
    again = [rerun.again_at for rerun in incident.reruns if rerun.again_at is not None]
    if again and axis.place(min(again)) - found[-1][1] >= _WORDS_APART:
        found.append(("k-run", axis.place(min(again)), "runs again"))
    return found


_WORDS_APART: Final = 18


def _lane_words(rerun: RecoveryCourse, trees: dict[str, str]) -> tuple[str, str, str]:
    """Return the mark, the words for the end of a lane, and the decision."""
    recovery = rerun.recovery
    mark, words = end_in_words(rerun)
    if mark == "RUNNING" and recovery.ran_again_on is not None:
        words = f"runs on {trees.get(recovery.ran_again_on, recovery.ran_again_on)}"
    charge = {"crash": "a crash", "loss": "a loss"}.get(recovery.charge or "", "no charge")
    return mark, words, f"{recovery.action}, {charge}{', suspect' if recovery.suspect else ''}"


def _steps(incident: Incident) -> Iterator[Step]:
    """Yield the steps from the last heartbeat until the tasks ran again."""
    first = min(incident.reruns, key=lambda rerun: rerun.noticed_at, default=None)
    if incident.beat_at is not None and incident.beat_at <= incident.at:
        what, meaning = RENEWAL
        yield Step("live", "s-live", what.capitalize(), meaning, incident.beat_at)
    if incident.noticed_by == "session" and incident.noticed_after_ms is None:
        yield Step(
            "live", "s-live", "The last heartbeat", "the end of its session is not stored", incident.at
        )
    elif incident.noticed_by == "session":
        yield Step(
            "dead",
            "s-dead",
            "Its session was seen held for the last time",
            "PostgreSQL frees the lock when the client is gone",
            incident.at,
        )
    elif incident.noticed_by == "child_exit":
        yield Step("dead", "s-dead", "The process ended", incident.cause, incident.at)
    after = (
        ""
        if incident.noticed_after_ms is None
        else f"{brief_duration(incident.noticed_after_ms / 1_000)} after {counted_from(incident.noticed_by)}"
    )
    yield Step("dead", "s-flat", f"Noticed by {spoken_way(incident.noticed_by)}", after, incident.noticed_at)
    if first is None:
        return
    decided = min(rerun.decided_at for rerun in incident.reruns)
    actions = Counter(rerun.recovery.action for rerun in incident.reruns)
    by = first.recovery.recovered_by
    told = ", ".join(f"{count} {_DONE.get(action, action)}" for action, count in actions.most_common())
    yield Step(
        "run",
        "i-rescue",
        f"{amount(incident.tasks, 'task')} recovered",
        f"{told}; by {by}" if by else told,
        decided,
    )
    again = [rerun.again_at for rerun in incident.reruns if rerun.again_at is not None]
    if again:
        yield Step("live", "s-running", f"{len(again)} of {incident.tasks} run again", "", max(again))


_DONE: Final = {
    "requeue": "put back in their place",
    "retry": "retried",
    "reschedule": "rescheduled by a hook",
    "fail": "failed",
    "cancel": "cancelled as requested",
}


def _certificate(rerun: RecoveryCourse) -> Iterator[tuple[str, str | None]]:
    """Yield the facts of a death certificate. A fact that is not known is None."""
    death, recovery = certificate_of(rerun.recovery), rerun.recovery
    rss = death.get("last_rss_bytes")
    yield "Supervisor", recovery.supervisor_id
    yield "Worker", recovery.worker_id
    yield (
        "Host",
        None if recovery.hostname is None else f"{recovery.hostname}, pid {death.get('pid', recovery.pid)}",
    )
    yield "Exit code", _fact(death, "exit_code")
    yield "Signal", _fact(death, "signal")
    yield "Out of memory", "yes" if death.get("out_of_memory") else "no" if "out_of_memory" in death else None
    yield "Last memory", f"{rss / 2**20:.0f} MiB" if isinstance(rss, int) else None
    progress = death.get("last_progress")
    yield "Last progress", None if progress is None else wording.progress_text(progress)
    yield (
        "Crashes, losses",
        f"{death.get('crash_count', 0)}, {death.get('loss_count', 0)}" if "crash_count" in death else None,
    )
    yield "Poison", "yes: it does not run again" if death.get("poison") else "no"
    yield "Hook", recovery.hook or "none asked"


def _fact(death: dict[str, Any], name: str) -> str | None:
    value = death.get(name)
    return None if value is None else str(value)


def _shown(visit: Visit, incident: Incident) -> Incident:
    """Return an incident without what this user must not see: the texts that the code of a task has written."""
    reruns = tuple(
        structs.replace(rerun, recovery=_hidden(rerun.recovery))
        if visit.hiding.touches(rerun.recovery.name)
        else rerun
        for rerun in incident.reruns
    )
    return structs.replace(incident, reruns=reruns)


def _hidden(recovery: RecoveryInfo) -> RecoveryInfo:
    data = plain_part(certificate_of(recovery))
    return structs.replace(recovery, certificate={"data": data}, hook=None)
