"""The audit log: what operators did, and how far the actions on all tasks that match have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import structs

from everbeat.client.bulk_methods import audit_page
from everbeat.client.database_access import database_of
from everbeat.client.handle import to_task_id
from everbeat.domain.bulk_actions import SKIPPED, AuditEntry, BulkActionInfo
from everbeat.domain.filters import AuditFilters
from everbeat.domain.hiding import HIDDEN
from everbeat.errors.wording import amount
from everbeat.web import wording
from everbeat.web.filters import page_size, to_moment_or_age
from everbeat.web.page import ActionDone, Page, PageResult, Visit
from everbeat.web.refusals import RequestRefused

_MOST_ACTIONS: Final = 20
_MOST_EXAMINED: Final = 20_000
"""How many entries a page examines. No index serves their actor and action."""
_PAYLOADS: Final = frozenset({"arguments_contain"})


async def show(visit: Visit) -> PageResult:
    """Return the actions of operators, newest first, and the latest actions on all tasks that match."""
    limit = page_size(visit.query)
    listing = audit_page(limit, most=_MOST_EXAMINED, **_filters(visit))
    found = await visit.parts(
        entries=("The audit log", database_of(visit.app).arun(listing), None),
        actions=("The actions on all that match", visit.app.abulk_actions(limit=_MOST_ACTIONS), None),
    )
    listed, last = found["entries"] or ([], None)
    entries = None if found["entries"] is None else [_shown(visit, each) for each in listed]
    actions = None if found["actions"] is None else [_shown_action(visit, each) for each in found["actions"]]
    data = {"entries": entries, "actions": actions}
    more = {
        "older": entries[-1].id if entries and len(entries) == limit else last,
        "examined": None if last is None else _MOST_EXAMINED,
        "given": {name: visit.query.get(name) for name in ("actor", "action", "since")},
        "skipped": SKIPPED,
        "is_going_on": any(not each.state.has_ended for each in actions or ()),
        "is_task": _is_task,
    }
    says = _sentence(visit, entries, actions)
    refresh_s = 3 if more["is_going_on"] else None
    return Page(
        template="audit.html",
        title="Audit",
        says=says,
        data=data,
        more=more,
        command="everbeat audit",
        refresh_s=refresh_s,
    )


def _filters(visit: Visit) -> AuditFilters:
    found: AuditFilters = {"actor": visit.query.get("actor"), "action": visit.query.get("action")}
    if (since := visit.query.get("since")) is not None:
        found["since"] = to_moment_or_age(since, subject="since")
    if (before := visit.query.get("before")) is not None:
        if not before.isdecimal() or len(before) > 18:
            raise RequestRefused(400, "WRONG_FORM", "The parameter 'before' is not the number of an entry.")
        found["before"] = int(before)
    return found


def _shown(visit: Visit, entry: AuditEntry) -> AuditEntry:
    return structs.replace(
        entry, filters=None if entry.filters is None else _without_payload(visit, entry.filters)
    )


def _shown_action(visit: Visit, action: BulkActionInfo) -> BulkActionInfo:
    return structs.replace(action, filters=_without_payload(visit, action.filters))


def _without_payload(visit: Visit, filters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the filters of an action. A text in arguments is a payload."""
    if not visit.hiding.has_rules:
        return filters
    return {name: HIDDEN if name in _PAYLOADS else value for name, value in filters.items()}


def _sentence(
    visit: Visit, entries: Sequence[AuditEntry] | None, actions: Sequence[BulkActionInfo] | None
) -> str:
    going = [each for each in actions or () if not each.state.has_ended]
    if going:
        first = going[0]
        done = f"{first.done:,} done, {first.skipped:,} skipped"
        return f"{first.action.value.replace('_', ' ').capitalize()} all that match is going on: {done}"
    if entries is None:
        return "The audit log could not be read"
    if not entries:
        return "No operator has changed anything" if not visit.query.names() else "No entries match"
    latest = entries[0]
    return f"{latest.actor} did the latest of {amount(len(entries), 'action')} shown, {wording.ago(latest.at, visit.now)}"


def _is_task(target: str | None) -> bool:
    try:
        to_task_id(target)
    except Exception:  # noqa: BLE001 - any other target is not a link
        return False
    return target is not None


async def stop(visit: Visit) -> PageResult:
    """Stop an action on all that match after its current portion."""
    action = await visit.app.abulk_action(visit.path_values["id"])
    info = await action.acancel(by=visit.user.name)
    return ActionDone(
        goto=visit.link("/audit"), says="The action stops after its current portion.", data={"action": info}
    )
