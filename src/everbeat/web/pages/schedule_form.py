"""Makes and edits a schedule: a form, its preview with the next ticks, and the action that stores what was previewed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from shlex import quote
from typing import Any, Final, TypeVar

from msgspec import Struct, structs

from everbeat.client.database_access import database_of
from everbeat.client.schedules import Schedule
from everbeat.client.written_schedules import (
    KeptOptions,
    begins_anew,
    coming_ticks,
    kept_options,
    named_call,
    stored_definition,
)
from everbeat.domain.schedule.inspection import ScheduleInfo
from everbeat.domain.schedule.model import Definition
from everbeat.domain.schedule.timing import in_words
from everbeat.domain.settings.settings import StandIn
from everbeat.errors import ConfigurationError, PayloadError, ScheduleNotChanged, UnknownName
from everbeat.errors.wording import amount, visible
from everbeat.store import rows
from everbeat.store.plan import ask
from everbeat.store.schedules import read_call
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.pages.schedules import in_zone, shown_schedule
from everbeat.web.refusals import RequestRefused
from everbeat.web.schedule_fields import LABELS, MISSED, OVERLAP, ScheduleFields

T = TypeVar("T")
_NEXT: Final = 5
_LONGEST: Final = 20_000
"""Longer arguments are not offered in a form."""
_MORE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "most",
            "catchup_window",
            "jitter",
            "starts",
            "ends",
            "most_runs",
            "pause_after_failures",
            "expires",
            "note",
        ),
        "",
    ),
    "overlap": "allow",
    "missed": "latest",
}
"""The fields below "More options", with their usual texts. It is open if one of them has another text."""
_COMMAND: Final = "everbeat schedules next --cron {} --timezone {}"


class FieldMistake(Struct, frozen=True, kw_only=True):
    """A field that the app refuses: the code, the message and the fix of its error."""

    code: str
    message: str
    fix: str | None

    @classmethod
    def of_refusal(cls, refusal: RequestRefused) -> FieldMistake:
        """Return a refusal of this page as a mistake of the form."""
        return cls(code=refusal.code, message=refusal.message, fix=refusal.fix)


class Edited(Struct, frozen=True, kw_only=True):
    """The stored schedule that is edited, and the options of its call that it keeps."""

    info: ScheduleInfo
    kept: KeptOptions

    @property
    def seen(self) -> str:
        """Return the version of the schedule, which its next change replaces."""
        return self.info.changed_at.isoformat()


class DraftSchedule(Struct, kw_only=True):
    """The schedule that a form describes. `definition` is None if there are mistakes."""

    schedule: Schedule | None = None
    definition: Definition | None = None
    mistakes: list[FieldMistake] = []

    def settle(self, check: Callable[[], T]) -> T | None:
        """Return the result of the check, or note the mistakes that it raises."""
        try:
            return check()
        except ConfigurationError as error:
            self.mistakes += [
                FieldMistake(
                    code=each.code, message=structs.replace(each, where=None).finding(), fix=f"{each.fix}."
                )
                for each in error.problems
            ]
        except PayloadError as error:
            self.mistakes.append(FieldMistake(code=error.code, message=error.message, fix=error.fix))
        return None


async def show(visit: Visit) -> PageResult:
    """Show the form: empty, or filled with the schedule `name`. Raises UnknownName or ScheduleNotChanged."""
    name = visit.query.get("name")
    edited = None if name is None else await _edited(visit, name)
    fields = ScheduleFields({}) if edited is None else ScheduleFields.of_info(edited.info)
    return _page(visit, fields, edited, says="New schedule" if name is None else f"Edit {name}")


async def preview(visit: Visit) -> PageResult:
    """Show what the form would store and its next ticks, or its mistakes. Raises UnknownName or ScheduleNotChanged."""
    fields = ScheduleFields.read(visit.form)
    edited = await _submitted(visit, fields)
    draft = _draft(visit, fields, edited)
    if (taken := await _name_taken(visit, fields)) is not None:
        draft = DraftSchedule(mistakes=[FieldMistake.of_refusal(taken), *draft.mistakes])
    if draft.mistakes:
        verb = "prevents" if len(draft.mistakes) == 1 else "prevent"
        says = f"{amount(len(draft.mistakes), 'mistake')} {verb} saving"
        return _page(visit, fields, edited, says=says, draft=draft)
    says = f"Save {fields.get('name')}?"
    if edited is not None and not _changes(draft, edited):
        says = f"Nothing about {fields.get('name')} would change"
    return _page(visit, fields, edited, says=says, draft=draft)


async def put(visit: Visit) -> PageResult:
    """Store the schedule. Raises what `App.put_schedule` raises, and RequestRefused if the schedule is not the one that was edited."""
    fields = ScheduleFields.read(visit.form)
    edited = await _submitted(visit, fields)
    if (taken := await _name_taken(visit, fields)) is not None:
        raise taken
    draft = _draft(visit, fields, edited)
    if draft.schedule is None:
        first = draft.mistakes[0]
        message = "; ".join(each.message for each in draft.mistakes)
        raise RequestRefused(400, first.code, f"Nothing was saved: {message}", fix=first.fix)
    found = await visit.app.aput_schedule(draft.schedule)
    says = f"The schedule {found.name} is {'made' if edited is None else 'changed'}."
    data = {"schedule": structs.asdict(shown_schedule(visit, found))}
    return ActionDone(goto=visit.link(f"/schedules/{found.name}"), says=says, data=data)


async def _submitted(visit: Visit, fields: ScheduleFields) -> Edited | None:
    """Return the schedule that the form edits, or None for a new one. Raises RequestRefused if it was changed since the form was opened."""
    name, seen = fields.get("name"), visit.form.get("seen")
    if seen is None:
        return None
    edited = await _edited(visit, visit.form.require("name"))
    if edited.seen != seen:
        message = f"The schedule {name!r} was changed after this form was opened, so nothing was saved."
        raise RequestRefused(409, "SCHEDULE_CHANGED", message, fix="open the form again.")
    return edited


async def _name_taken(visit: Visit, fields: ScheduleFields) -> RequestRefused | None:
    """Return why a new schedule cannot have its name: `App.put_schedule` would replace the schedule that has it."""
    name = fields.get("name")
    if name is None or visit.form.get("seen") is not None:
        return None
    try:
        await visit.app.aschedule_info(name)
    except (UnknownName, ConfigurationError):  # the checks of the form say what is wrong with a name
        return None
    message = f"There is a schedule {name!r} already, so nothing was saved."
    return RequestRefused(409, "SCHEDULE_EXISTS", message, fix="use another name, or edit that one.")


async def _edited(visit: Visit, name: str) -> Edited:
    """Return the schedule to edit. Raises UnknownName, ScheduleNotChanged, or RequestRefused if this user cannot edit it here."""
    found = await visit.app.aschedule_info(name)
    if found.owner is not None:
        raise ScheduleNotChanged(name, owner=found.owner)
    if found.task not in visit.app.tasks:
        raise _unknown_task(found.task)
    if visit.hiding.arguments(found.task, found.arguments) != found.arguments:
        message = "Arguments of this schedule are hidden, so it cannot be edited here."
        raise RequestRefused(409, "NOT_EDITABLE", message, fix="change it with App.put_schedule.")
    text = ScheduleFields.of_info(found).get("arguments") or ""
    if rows.is_marker(found.arguments) or len(text) > _LONGEST or visible(text) != text:
        message = "The arguments of this schedule do not fit into a form, so it cannot be edited here."
        raise RequestRefused(409, "NOT_EDITABLE", message, fix="change it with App.put_schedule.")
    stored = await database_of(visit.app).arun(ask(read_call(name)))
    if stored is None:
        raise UnknownName("schedule", [name])
    return Edited(info=found, kept=kept_options(visit.app, found, stored))


def _unknown_task(task: str) -> RequestRefused:
    return RequestRefused(
        409,
        "TASK_UNKNOWN",
        f"The app of this dashboard does not declare the task {task!r}, so its schedule would lose the policy of the task.",
        fix="start the dashboard with the app that declares the task: everbeat web shop:app.",
    )


def _draft(visit: Visit, fields: ScheduleFields, edited: Edited | None) -> DraftSchedule:
    """Return the schedule that the fields describe, checked as the app does when a program puts it."""
    draft = DraftSchedule()
    draft.settle(fields.require_visible)
    task = fields.get("task") or ""
    if task not in visit.app.tasks:
        draft.mistakes.append(FieldMistake.of_refusal(_unknown_task(task)))
        call: Any = None
    else:
        known = len(draft.mistakes)
        arguments = draft.settle(fields.arguments)
        call = None
        if len(draft.mistakes) == known:
            send = fields.send_options()
            if edited is not None and task == edited.info.task:
                send = {**edited.kept.send, "key": None, **send}
            call = draft.settle(lambda: named_call(visit.app, task, arguments, send))
    options = draft.settle(fields.options)
    if options is not None:
        checked: Any = StandIn() if call is None else call
        schedule = draft.settle(lambda: Schedule(fields.get("name") or "", checked, **options))
        if schedule is not None and not draft.mistakes:
            definition = draft.settle(lambda: stored_definition(visit.app, schedule))
            if definition is not None:
                return DraftSchedule(schedule=schedule, definition=definition)
    return draft


def _changes(draft: DraftSchedule, edited: Edited) -> list[tuple[str, str, str]]:
    assert draft.definition is not None
    later = ScheduleFields.of_definition(draft.definition)
    return ScheduleFields.of_info(edited.info).changes(later)


def _page(
    visit: Visit,
    fields: ScheduleFields,
    edited: Edited | None,
    *,
    says: str,
    draft: DraftSchedule | None = None,
) -> Page:
    definition = None if draft is None else draft.definition
    info = None if edited is None else edited.info
    title = "New schedule" if edited is None else f"Edit {edited.info.name}"
    coming = [] if definition is None else list(islice(coming_ticks(definition, info, now=visit.now), _NEXT))
    timing = None if definition is None else definition.rule.timing
    mistakes: Sequence[FieldMistake] = () if draft is None else draft.mistakes
    replaced: Sequence[str] = ()
    if definition is not None and edited is not None and definition.call.task == edited.info.task:
        replaced = edited.kept.replaced
    return Page(
        template="schedule_form.html",
        title=title,
        says=says,
        status=400 if mistakes else 200,
        data={
            "fields": fields.values,
            "seen": None if edited is None else edited.seen,
            "mistakes": mistakes,
            "tasks": sorted(visit.app.tasks),
            "when": None if timing is None else in_words(timing),
            "next_ticks": coming,
            "begins_anew": definition is not None and begins_anew(definition, info),
            "replaced_options": replaced,
        },
        more={
            "definition": definition,
            "info": info,
            "labels": LABELS,
            "missed": MISSED,
            "overlap": OVERLAP,
            "local": [] if timing is None else [(tick, in_zone(tick, timing.timezone)) for tick in coming],
            "more_open": any(fields.values.get(name, usual) != usual for name, usual in _MORE.items()),
            "zone": None if timing is None else timing.timezone,
            "differing": ()
            if draft is None or definition is None or edited is None
            else _changes(draft, edited),
            "sends": None if definition is None else rows.mapping(definition.call.args),
        },
        command=None
        if timing is None or len(timing.cron) != 1
        else _COMMAND.format(quote(timing.cron[0]), quote(timing.timezone)),
    )
