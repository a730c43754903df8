"""Changes of the ticked tasks of a list, and of all tasks that match its filters: first counted, then confirmed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from everbeat.client.bulk_methods import BulkAction
from everbeat.domain.bulk_actions import SKIPPED, BulkVerb
from everbeat.errors import DatabaseError, EverbeatError
from everbeat.errors.wording import amount, some
from everbeat.web.filters import ListFilters, require_filters, to_uuid
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.refusals import RequestRefused

PAST: Final[Mapping[BulkVerb, str]] = {
    BulkVerb.RETRY: "Retried",
    BulkVerb.CANCEL: "Cancelled",
    BulkVerb.RUN_NOW: "Made due",
    BulkVerb.MOVE: "Moved",
    BulkVerb.REPRIORITISE: "Reprioritised",
    BulkVerb.DELETE: "Deleted",
}
_MOST_TICKED: Final = 500
_COUNTED_BY: Final = ("to",)
"""The field besides the filters. The form on the list has it for all actions."""
_CONFIRMED_BY: Final = (*_COUNTED_BY, "digest", "reason")


async def count_all(visit: Visit, verb: BulkVerb) -> PageResult:
    """Count the tasks that an action would change, and ask whether to change them. Nothing is changed."""
    require_filters(visit.form, others=_COUNTED_BY)
    filters = ListFilters.read(visit.form).fixed(visit.now)
    _require_searchable(visit, filters)
    parameters = _parameters(visit, verb)
    action = await _request(visit, verb, filters, parameters, dry_run=True)
    info = action.info
    data = {"action": info, "digest": filters.digest(verb.value, parameters)}
    more = {"filters": filters, "verb": verb, "parameters": parameters, "skipped": SKIPPED}
    least = "" if info.is_exact else "at least "
    says = f"{_imperative(verb)} {least}{amount(info.done, 'task')}?"
    return Page(template="bulk.html", title="Confirm", says=says, data=data, more=more)


async def act_on_all(visit: Visit, verb: BulkVerb) -> PageResult:
    """Request the action that was counted. Its filters and parameters must be those that were shown."""
    require_filters(visit.form, others=_CONFIRMED_BY)
    filters = ListFilters.read(visit.form)
    _require_searchable(visit, filters)
    parameters = _parameters(visit, verb)
    if visit.form.require("digest") != filters.fixed(visit.now).digest(verb.value, parameters):
        raise RequestRefused(
            409,
            "FILTERS_CHANGED",
            "The filters are not those that were counted, so nothing was changed.",
            fix="count the tasks again.",
        )
    action = await _request(visit, verb, filters, parameters, dry_run=False)
    joined = " An identical action had not ended, so it was joined." if action.info.joined else ""
    return ActionDone(
        goto=visit.link("/audit"),
        says=f"The action was requested: {verb.value.replace('_', ' ')} all that match. The workers carry it out.{joined}",
        data={"action": action.info},
    )


async def act_on_ticked(visit: Visit, verb: BulkVerb) -> PageResult:
    """Change the ticked tasks one by one. Those that cannot be changed are reported, and the others are changed."""
    ids = visit.form.all("id")
    if not ids:
        raise RequestRefused(
            400, "MISSING", "No task is ticked, so nothing was changed.", fix="tick the tasks to change."
        )
    if len(ids) > _MOST_TICKED:
        fix = "use filters, and act on all that match."
        raise RequestRefused(
            400, "OUT_OF_RANGE", f"More than {amount(_MOST_TICKED, 'task')} are ticked.", fix=fix
        )
    act = _on_one(visit, verb)
    done: list[str] = []
    refused: dict[str, str] = {}
    for text in dict.fromkeys(ids):
        try:
            await act(str(to_uuid(text, what="task")))
        except DatabaseError:
            raise
        except (EverbeatError, RequestRefused) as problem:
            refused[text] = problem.message
        else:
            done.append(text)
    says = f"{PAST[verb]} {amount(len(done), 'task')}."
    if refused:
        says += f" {amount(len(refused), 'task')} could not be changed: {some([*refused.values()], limit=1)}"
    return ActionDone(goto=visit.back("/tasks"), says=says, data={"done": done, "refused": refused})


def _on_one(visit: Visit, verb: BulkVerb) -> Callable[[str], Awaitable[object]]:
    app = visit.app
    match verb:
        case BulkVerb.RETRY:
            return app.aretry
        case BulkVerb.CANCEL:
            return app.acancel
        case BulkVerb.RUN_NOW:
            return app.arun_now
        case BulkVerb.DELETE:
            return app.adelete
        case BulkVerb.MOVE:
            queue = visit.form.require("to")
            return lambda task_id: app.amove(task_id, queue=queue)
        case BulkVerb.REPRIORITISE:
            priority = _priority(visit)
            return lambda task_id: app.areprioritise(task_id, priority=priority)


async def _request(
    visit: Visit, verb: BulkVerb, filters: ListFilters, parameters: Mapping[str, Any], *, dry_run: bool
) -> BulkAction:
    app = visit.app
    given: Any = {**filters.task_filters(), "dry_run": dry_run, "reason": visit.form.get("reason")}
    match verb:
        case BulkVerb.RETRY:
            return await app.aretry_all(**given)
        case BulkVerb.CANCEL:
            return await app.acancel_all(**given)
        case BulkVerb.RUN_NOW:
            return await app.arun_all_now(**given)
        case BulkVerb.DELETE:
            return await app.adelete_all(**given)
        case BulkVerb.MOVE:
            return await app.amove_all(to=parameters["to"], **given)
        case BulkVerb.REPRIORITISE:
            return await app.areprioritise_all(to=parameters["to"], **given)


def _parameters(visit: Visit, verb: BulkVerb) -> dict[str, Any]:
    match verb:
        case BulkVerb.MOVE:
            return {"to": visit.form.require("to")}
        case BulkVerb.REPRIORITISE:
            return {"to": _priority(visit)}
        case _:
            return {}


def _priority(visit: Visit) -> int:
    text = visit.form.require("to")
    try:
        return int(text)
    except ValueError:
        raise RequestRefused(
            400, "WRONG_FORM", "The priority is not a whole number.", fix="write 10, for example."
        ) from None


def _imperative(verb: BulkVerb) -> str:
    return {BulkVerb.RUN_NOW: "Make due", BulkVerb.REPRIORITISE: "Reprioritise"}.get(
        verb, verb.value.capitalize()
    )


def _require_searchable(visit: Visit, filters: ListFilters) -> None:
    if visit.hiding.has_rules and "arguments_contain" in filters.values:
        raise RequestRefused(
            403, "ARGUMENTS_HIDDEN", "Arguments are hidden here, so they cannot be searched."
        )
