"""The report of an incident, for a post-mortem: as a document of plain values, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from everbeat.domain.charts import ChartPoint
from everbeat.domain.pulse.incidents import Incident, RecoveryCourse, certificate_of, totals_of
from everbeat.domain.pulse.sentences import notice_of, outcome_of, rescue_of, title_of
from everbeat.domain.pulse.timeline import IncidentContext, timeline_of
from everbeat.errors.wording import amount, brief_duration, on_one_line

LATE_WRITES: Final = (
    "A late write of the dead is refused, because its claim_id is no longer valid. The log of its worker has the refusal, and the database"
    " has no record of it."
)


def incident_document(
    incident: Incident, names: Mapping[str, str], context: IncidentContext | None = None
) -> dict[str, Any]:
    """Return an incident as plain values: its course, and a row with the certificate for each task. `context` adds what happened around it."""
    document = {
        **incident_summary(incident, names),
        "timeline": [{"at": each.at, "what": each.words} for each in timeline_of(incident, names)],
        "late_writes": LATE_WRITES,
        "tasks": [_row(rerun) for rerun in incident.reruns],
    }
    if context is not None:
        around = {"points": context.points, "marks": context.marks, "settings": context.settings}
        document["around"] = around
    return document


def incident_summary(incident: Incident, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of an incident as plain values. Durations are in seconds."""
    totals = totals_of([incident])
    return {
        "id": incident.id,
        "kind": incident.kind,
        "title": title_of(incident),
        "hosts": incident.hosts,
        "parties": incident.parties,
        "cause": incident.cause,
        "last_sign_of_life_at": incident.at,
        "noticed_at": incident.noticed_at,
        "noticed_by": incident.noticed_by,
        "noticed_after_s": None if incident.noticed_after_ms is None else incident.noticed_after_ms / 1_000,
        "recovered": incident.tasks,
        "is_complete": not incident.is_cut,
        "waiting": incident.waiting,
        "poison": incident.poison,
        "running_again_after_s": totals.again_s,
        "slowest_running_again_after_s": totals.slowest_again_s,
        "rescuers": incident.rescuers(names),
    }


def incident_markdown(
    incident: Incident,
    names: Mapping[str, str],
    *,
    made_at: datetime,
    context: IncidentContext | None = None,
) -> str:
    """Return an incident as one page of Markdown. All times are UTC. `names` are the trees of workers."""
    totals = totals_of([incident])
    lines = [
        f"# {_cell(title_of(incident))}",
        "",
        f"Last sign of life {_moment(incident.at)}. Noticed {notice_of(incident)}. {amount(incident.tasks, 'task')}: {outcome_of(incident)}.",
        "",
        "| Fact | Value |",
        "| --- | --- |",
        f"| Cause | {_cell(incident.cause)} |",
        f"| Hosts | {_cell(', '.join(incident.hosts))} |",
        f"| Supervisors and workers | {_cell(', '.join(incident.parties))} |",
        f"| Noticed | {_moment(incident.noticed_at)}, {notice_of(incident)} |",
        f"| Running again after | {_span(totals.again_s)} (median), {_span(totals.slowest_again_s)} (slowest) |",
        f"| Taken over by | {_cell(rescue_of(incident, names) or 'no tree')} |",
        f"| Late writes | {LATE_WRITES} |",
        "",
        "## Timeline",
        "",
        "| Time | What happened |",
        "| --- | --- |",
        *[f"| {_moment(each.at)} | {_cell(each.words)} |" for each in timeline_of(incident, names)],
        "",
    ]
    if incident.reruns:
        lines += [
            "## What happened to each task",
            "",
            "| Recovery | Task | Name | Was | Last sign of life | Noticed | Decided | Action | Ran again | Became |",
            "| ---: | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *[_line(rerun) for rerun in incident.reruns],
            "",
            "## Death certificate",
            "",
            *_certificate(incident.reruns[0]),
            "",
        ]
    if incident.is_cut:
        lines += [
            "Only the latest recoveries were read, so tasks can be missing: `everbeat recoveries list`.",
            "",
        ]
    if context is not None:
        lines += _around(context)
    lines.append(f"Made by everbeat at {_moment(made_at)}.")
    return "\n".join(lines) + "\n"


def _around(context: IncidentContext) -> list[str]:
    """Return the numbers of the whole installation around the incident, the events, and what operators had set."""
    lines = ["## The installation around it", ""]
    if context.settings:
        listed = ", ".join(
            f"{_cell(each.target)} ({each.action} by {_cell(each.actor)})" for each in context.settings
        )
        lines += [f"Paused or limited by operators, according to the audit log: {listed}.", ""]
    if not context.points:
        return [*lines, "No rate or depth of this time is kept.", ""]
    lines += [
        "| From | Ended | Failed, crashed or lost | Waited p95 | Ran p95 | Due | Oldest due | Claimed | Running |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *[_point(each) for each in context.points],
        "",
        *[f"- {_moment(mark.at)}: {_cell(mark.words)}" for mark in context.marks],
    ]
    return [*lines, ""] if context.marks else lines


def _point(point: ChartPoint) -> str:
    cells = (
        _moment(point.at), str(point.ended), str(point.failed), _known(point.wait_p95), _known(point.run_p95), _count(point.due),
        _known(point.oldest_due_s), _count(point.claimed), _count(point.running),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _known(seconds: float | None) -> str:
    return "" if seconds is None else brief_duration(seconds)


def _row(rerun: RecoveryCourse) -> dict[str, Any]:
    recovery = rerun.recovery
    return {
        "recovery": recovery.id,
        "task_id": recovery.task_id,
        "name": recovery.name,
        "queue": recovery.queue,
        "attempt": recovery.attempt,
        "worker_id": recovery.worker_id,
        "was": recovery.was,
        "started_at": rerun.started_at,
        "last_sign_of_life_at": rerun.silent_at,
        "noticed_at": rerun.noticed_at,
        "noticed_by": recovery.noticed_by,
        "decided_at": rerun.decided_at,
        "action": recovery.action,
        "charge": recovery.charge,
        "suspect": recovery.suspect,
        "recovered_by": recovery.recovered_by,
        "running_again_at": rerun.again_at,
        "running_again_after_s": rerun.again_after_s,
        "running_again_on": recovery.ran_again_on,
        "became": recovery.became,
        "ended_at": rerun.ended_at,
        "certificate": certificate_of(recovery),
    }


def _line(rerun: RecoveryCourse) -> str:
    recovery = rerun.recovery
    again = "" if rerun.again_at is None else f"{_moment(rerun.again_at)} on {recovery.ran_again_on}"
    cells = (
        str(recovery.id), str(recovery.task_id), recovery.name, str(recovery.was), _moment(rerun.silent_at),
        _moment(rerun.noticed_at), _moment(rerun.decided_at), recovery.action, again, str(recovery.became or "pruned"),
    )  # fmt: skip
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _certificate(rerun: RecoveryCourse) -> list[str]:
    found: Mapping[str, Any] = certificate_of(rerun.recovery)
    known = {name: value for name, value in found.items() if value is not None}
    return [f"- {name.replace('_', ' ')}: {_cell(str(value))}" for name, value in known.items()] or ["- none"]


def _cell(text: str) -> str:
    """Return a text that cannot leave its cell of a table or become markup."""
    plain = on_one_line(text).replace("\\", "\\\\")
    for mark in "|<>`*_[]#&~":
        plain = plain.replace(mark, f"\\{mark}")
    return plain.replace("://", ":\\/\\/").replace("www.", "www\\.")  # or else a name becomes a link


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def _span(seconds: float | None) -> str:
    return "unknown" if seconds is None else brief_duration(seconds)
