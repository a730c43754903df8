"""Schedules: when they tick, what became of their last ticks, and their next ones in their own time zone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from msgspec import structs

from everbeat.client.database_access import database_of
from everbeat.client.schedule_methods import next_ticks_of
from everbeat.client.schedule_runs import last_runs
from everbeat.domain.hiding import HIDDEN
from everbeat.domain.schedule.cron import zone_of
from everbeat.domain.schedule.inspection import ScheduleInfo, TickInfo
from everbeat.domain.schedule.timing import in_words
from everbeat.domain.task.states import TaskState
from everbeat.errors import ConfigurationError
from everbeat.errors.wording import amount, some
from everbeat.store.plan import ask
from everbeat.store.schedules import list_latest_ticks, list_live_runs
from everbeat.web.filters import page_size, to_moment_or_age
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.reasons import lead_of, shown_reasons
from everbeat.web.tick_drawing import TickKind, TickMark

_MARKS: Final = 24
_NEXT: Final = 5
_MOST_RUNS: Final = 20
_LATE: Final = timedelta(minutes=1)
_BAD: Final = (TaskState.FAILED, TaskState.EXPIRED)


async def show(visit: Visit) -> PageResult:
    """Return the schedules by name, each with its last ticks."""
    limit, after = page_size(visit.query), visit.query.get("after")
    found = await visit.part("The schedules", visit.app.alist_schedules(limit=limit, after=after), None)
    schedules: list[ScheduleInfo] = found or []
    parts = await visit.parts(
        ticks=("The ticks", _ticks_of(visit, schedules), {}),
        runs=("The last runs", database_of(visit.app).arun(last_runs(schedules)), {}),
    )
    ticks, runs = parts["ticks"], parts["runs"]
    shown = [shown_schedule(visit, each) for each in schedules]
    coming = {each.name: _coming(each) for each in schedules}
    data = {
        "schedules": None if found is None else [structs.asdict(each) for each in shown],
        "next_ticks": None if found is None else coming,
        "last_runs": None
        if found is None
        else {each.name: _last_run(visit, each, runs) for each in schedules},
    }
    more = {
        "runs": runs,
        "rows": [
            (each, _words(each), marks_of(ticks.get(each.name, ())), coming[each.name], _is_late(each))
            for each in shown
        ],
        "older": schedules[-1].name if len(schedules) == limit else None,
    }
    says = _sentence(found, ticks, runs)
    return Page(
        template="schedules.html",
        title="Schedules",
        says=says,
        data=data,
        more=more,
        command="everbeat schedules",
    )


def _coming(found: ScheduleInfo) -> list[datetime]:
    """Return the next ticks of a schedule, or none if its rule cannot be read."""
    try:
        return list(islice(next_ticks_of(found), _NEXT))
    except ConfigurationError:  # the stored rule is unreadable, or this machine does not know its time zone
        return []


async def _ticks_of(visit: Visit, schedules: Sequence[ScheduleInfo]) -> dict[str, list[TickInfo]]:
    names = [each.name for each in schedules]
    return await database_of(visit.app).arun(ask(list_latest_ticks(names, limit=_MARKS)))


def shown_schedule(visit: Visit, found: ScheduleInfo) -> ScheduleInfo:
    """Return a schedule without what this user does not see."""
    arguments = visit.hiding.arguments(found.task, found.arguments)
    if not visit.hiding.touches(found.task):
        return structs.replace(found, arguments=arguments)
    last = None if found.last_tick is None else _shown_tick(visit, found.task, found.last_tick)
    return structs.replace(found, arguments=arguments, last_tick=last)


def _shown_tick(visit: Visit, task: str, tick: TickInfo) -> TickInfo:
    return structs.replace(tick, detail=visit.hiding.text(task, tick.detail) if tick.detail else tick.detail)


def marks_of(ticks: Sequence[TickInfo]) -> list[TickMark]:
    """Return the marks of ticks, the newest at the right."""
    return [TickMark(_kind_of(tick), tick) for tick in reversed(ticks[:_MARKS])]


def _kind_of(tick: TickInfo) -> TickKind:
    """Return the kind of a tick's mark. A tick that was sent more than a minute after its moment is late."""
    match tick.outcome:
        case "SENT":
            return "late" if tick.decided_at - tick.at > _LATE else "sent"
        case "SKIPPED":
            return "skipped"
        case _:
            return "missed"


def _words(found: ScheduleInfo) -> str:
    """Return when a schedule ticks in plain English."""
    return "unreadable" if found.rule is None else in_words(found.rule.timing)


def _is_late(found: ScheduleInfo) -> bool:
    """Return whether a tick is due for more than a minute and no scheduler has decided it."""
    return found.state == "ACTIVE" and found.next_at is not None and found.next_at < found.at - _LATE


def _last_run(visit: Visit, found: ScheduleInfo, runs: Mapping[str, TickInfo]) -> TickInfo | None:
    run = runs.get(found.name)
    return None if run is None else _shown_tick(visit, found.task, run)


def _sentence(
    found: Sequence[ScheduleInfo] | None, ticks: dict[str, list[TickInfo]], runs: Mapping[str, TickInfo]
) -> str:
    if found is None:
        return "The schedules could not be read"
    if not found:
        return "No schedules"
    missed = Counter({name: sum(tick.outcome == "MISSED" for tick in each) for name, each in ticks.items()})
    worst, count = missed.most_common(1)[0] if missed else ("", 0)
    if count:
        return f"{worst} missed {amount(count, 'tick')} of its last {len(ticks[worst])}"
    if late := [each.name for each in found if _is_late(each)]:
        return f"{late[0]} is late: no scheduler has decided its tick"
    if failing := [name for name, run in runs.items() if run.state in _BAD]:
        verb = "has" if len(failing) == 1 else "have"
        return f"The last {'run' if len(failing) == 1 else 'runs'} of {some(failing, limit=3)} {verb} failed"
    paused = sum(each.state == "PAUSED" for each in found)
    rest = f", and {paused} {'is' if paused == 1 else 'are'} paused" if paused else ""
    return f"{amount(len(found), 'schedule')}, none of which missed a tick{rest}"


async def show_one(visit: Visit) -> PageResult:
    """Return the page of a schedule. Raises UnknownName."""
    name, app = visit.path_values["name"], visit.app
    found = await visit.part("The schedule", app.aschedule_info(name), None)
    if found is None:
        return Page(
            template="schedule.html",
            title="Schedule",
            says="The schedule could not be read",
            data={"schedule": None},
            status=503,
        )
    parts = await visit.parts(
        ticks=("The ticks", app.alist_ticks(name, limit=_MARKS), None),
        runs=("The live runs", database_of(app).arun(ask(list_live_runs(name, limit=_MOST_RUNS))), None),
        explanation=("The reasons", app.aexplain_schedule(name), None),
    )
    hides, coming = visit.hiding.touches(found.task), _coming(found)
    explanation = parts["explanation"]
    reasons = () if explanation is None else shown_reasons(explanation.reasons, hides=hides)
    shown = shown_schedule(visit, found)
    ticks = (
        None if parts["ticks"] is None else [_shown_tick(visit, found.task, each) for each in parts["ticks"]]
    )
    data = {
        "schedule": structs.asdict(shown),
        "explanation": None if explanation is None else structs.replace(explanation, reasons=reasons),
        "runs_live": parts["runs"],
        "ticks": ticks,
        "next_ticks": coming,
    }
    zone = zone_name(found)
    more = {
        "info": shown,
        "words": _words(found),
        "marks": marks_of(ticks or ()),
        "reasons": reasons,
        "coming": coming,
        "local": [(tick, in_zone(tick, zone)) for tick in coming],
        "zone": zone,
        "hidden": HIDDEN,
    }
    says = lead_of(reasons, otherwise=f"It is {found.state.lower()}")
    return Page(
        template="schedule.html",
        title=name,
        says=says,
        data=data,
        more=more,
        command=f"everbeat schedules show {name}",
        targets=[name],
    )


def zone_name(found: ScheduleInfo) -> str:
    """Return the time zone of a schedule, which is UTC if its rule is unreadable."""
    return "UTC" if found.rule is None else found.rule.timing.timezone


def in_zone(tick: datetime, zone: str) -> str:
    """Return a tick in the time zone of its schedule."""
    return f"{tick.astimezone(zone_of(zone)):%a %Y-%m-%d %H:%M:%S %Z}"


async def pause(visit: Visit) -> PageResult:
    """Stop a schedule from sending tasks until it is resumed. Raises UnknownName."""
    name = visit.form.require("name")
    text = visit.form.get("until")
    until = None if text is None else to_moment_or_age(text, subject="until")
    found = await visit.app.apause_schedule(name, reason=visit.form.get("reason"), until=until)
    return _done(visit, found, f"The schedule {name} is paused.")


async def resume(visit: Visit) -> PageResult:
    """End the pause of a schedule. Raises UnknownName."""
    name = visit.form.require("name")
    return _done(visit, await visit.app.aresume_schedule(name), f"The schedule {name} is resumed.")


async def run(visit: Visit) -> PageResult:
    """Send the task of a schedule now, outside its ticks. Raises UnknownName."""
    handle = await visit.app.arun_schedule(visit.form.require("name"))
    goto = visit.link(f"/tasks/{handle.id}")
    return ActionDone(
        goto=goto, says="The schedule sent its task. This is the task.", data={"task_id": handle.id}
    )


async def delete(visit: Visit) -> PageResult:
    """Delete a schedule that was made at run time, or a retired one. Raises UnknownName or ScheduleNotChanged."""
    name = visit.form.require("name")
    await visit.app.adelete_schedule(name)
    return ActionDone(
        goto=visit.link("/schedules"), says=f"The schedule {name} is deleted.", data={"name": name}
    )


def _done(visit: Visit, found: ScheduleInfo, says: str) -> ActionDone:
    document = structs.asdict(shown_schedule(visit, found))
    return ActionDone(goto=visit.link(f"/schedules/{found.name}"), says=says, data={"schedule": document})
