"""The list of tasks: all filters, groups by error, and the actions on the ticked tasks or on all that match."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from msgspec import Struct, structs

from everbeat.client.database_access import database_of
from everbeat.client.failures import failure_page
from everbeat.client.inspection import task_page
from everbeat.domain.bulk_actions import BulkVerb
from everbeat.domain.documents import task_document
from everbeat.domain.inspection import FailureGroup, FailurePage, TaskPage, TaskSummary
from everbeat.domain.task.gathering import awaited
from everbeat.domain.task.questions import is_answer
from everbeat.domain.task.states import OVERDUE_MS, TaskState, VirtualState
from everbeat.errors.wording import amount
from everbeat.web.failure_drawing import hours_svg
from everbeat.web.filters import LABELS, MOST_EXAMINED, STATES, ListFilters, page_size, to_state
from everbeat.web.page import Page, PageResult, Visit
from everbeat.web.refusals import RequestRefused
from everbeat.web.rights import Role
from everbeat.web.state_counts import ALL, read_state_counts

_MOST_GROUPS: Final = 20
_MOST_GROUPED: Final = 3_000
"""How many failures are grouped. Their errors are large."""
_FAILED: Final = frozenset({TaskState.FAILED, TaskState.EXPIRED})
_GROUPED_BY: Final = frozenset({"state", "name", "queue", "label", "since", "until"})
"""The filters with which failures can be grouped. With another one, the groups would count tasks that the list does not show."""
_TABS: Final = (
    ("", "All"),
    ("PENDING", "Pending"),
    ("RUNNING", "Running"),
    ("FAILED", "Failed"),
    ("retrying", "Retrying"),
    ("scheduled", "Scheduled"),
    ("suspended", "Suspended"),
    ("overdue", "Overdue"),
    ("suspect", "Suspects"),
    ("COMPLETED", "Completed"),
    ("CANCELLED", "Cancelled"),
    ("EXPIRED", "Expired"),
)
VERB_ROLES: Final = {
    BulkVerb.RETRY: Role.OPERATE,
    BulkVerb.CANCEL: Role.OPERATE,
    BulkVerb.RUN_NOW: Role.OPERATE,
    BulkVerb.MOVE: Role.ADMIN,
    BulkVerb.REPRIORITISE: Role.ADMIN,
    BulkVerb.DELETE: Role.ADMIN,
}
"""The role that each change of tasks needs."""


class Look(Struct, frozen=True):
    """How a task appears in a list: the name of its mark, and what there is to say about it."""

    mark: str
    code: str | None
    remark: str


def look_of(task: TaskSummary, *, now: datetime) -> Look:
    """Return how a task appears in a list. A PENDING task is due, scheduled, retrying, or suspended."""
    if task.state is not TaskState.PENDING:
        return Look(task.state.value, *_ended_or_held(task))
    due_in_s = (task.enqueued_at - now).total_seconds()
    if task.failed_try is not None:
        return Look("retrying", task.failed_try.code, task.failed_try.message)
    if is_answer(task.waits_for):
        return Look("waits", None, "for an answer")
    if task.waits_for is not None:
        return Look("waits", None, f"for {awaited(task.waits_for)}")
    if task.wake_at is not None:
        return Look("suspended", None, "")
    if task.error is not None:
        return Look("retrying", task.error.code, task.error.message)
    if due_in_s > 0:
        return Look("scheduled", None, "")
    if task.suspect:
        return Look("suspect", None, "runs alone next")
    return Look("overdue" if due_in_s * 1_000 < -OVERDUE_MS else "PENDING", None, "")


def _ended_or_held(task: TaskSummary) -> tuple[str | None, str]:
    if task.state is TaskState.RUNNING and task.progress is not None:
        done = "" if task.progress.fraction is None else f" {task.progress.fraction:.0%}"
        return None, f"{task.progress.stage}{done} {task.progress.message}".strip()
    if task.error is not None and task.state is not TaskState.COMPLETED:
        return task.error.code, task.error.message
    return None, ""


async def show(visit: Visit) -> PageResult:
    """Return the list of tasks that match the parameters of the address."""
    return await _listed(visit, ListFilters.read(visit.query))


async def search(visit: Visit) -> PageResult:
    """Return the list of tasks whose arguments contain a text. The text is sent in a form, because addresses are logged."""
    if visit.hiding.has_rules and visit.form.get("arguments_contain"):
        raise RequestRefused(
            403,
            "ARGUMENTS_HIDDEN",
            "Arguments are hidden from you here, so they cannot be searched.",
            fix="filter by key or label, or ask an administrator of the dashboard.",
        )
    return await _listed(visit, ListFilters.read(visit.form))


async def _listed(visit: Visit, filters: ListFilters) -> Page:
    form = visit.query if visit.request.method == "GET" else visit.form
    for state in filters.states:
        to_state(state, STATES)
    if visit.request.method == "GET" and "arguments_contain" in filters.values:
        raise RequestRefused(
            400, "PAYLOAD_IN_ADDRESS", "The text in arguments must not be in an address.", fix="use the form."
        )
    limit, before = page_size(form), form.get("before")
    is_of_failures = bool(filters.states) and _FAILED.issuperset(filters.states)
    order = form.get("order") or ("happened" if is_of_failures else "sent")
    plan = task_page(order=order, before=before, limit=limit, most=MOST_EXAMINED, **filters.task_filters())  # type: ignore[arg-type]
    listing = database_of(visit.app).arun(plan)
    readings: dict[str, tuple[str, Any, Any]] = {"tasks": ("The list of tasks", listing, None)}
    if set(filters.values) <= {"state"}:  # the numbers are those of all tasks
        readings["counts"] = ("The numbers in the tabs", read_state_counts(visit), None)
    if is_of_failures and before is None and _GROUPED_BY.issuperset(filters.values):
        readings["groups"] = ("The groups by error", _groups(visit, filters), None)
    found = await visit.parts(**readings)
    tasks: TaskPage | None = found["tasks"]
    grouped: FailurePage | None = found.get("groups")
    groups = None if grouped is None else _by_size(grouped, filters.states)
    least = "at least " if grouped is not None and grouped.continue_before is not None else ""
    shown = [visit.hiding.summary(task) for task in tasks or ()]
    data = {
        "tasks": None if tasks is None else [task_document(task) for task in shown],
        "examined": None if tasks is None else tasks.examined,
        "continue_before": None if tasks is None else tasks.continue_before,
        "unindexed": () if tasks is None else tasks.unindexed,
        "counts": found.get("counts"),
        "groups": None if groups is None else [_group(visit, each) for each in groups],
    }
    more = {
        "rows": [(task, look_of(task, now=visit.now)) for task in shown],
        "filters": filters,
        "chips": [
            (name, LABELS[name], ", ".join(values))
            for name, values in filters.values.items()
            if name != "state"
        ],
        "tabs": [(value, title, (found.get("counts") or {}).get(value or ALL)) for value, title in _TABS],
        "chosen_state": filters.states[0] if len(filters.states) == 1 else "" if not filters.states else None,
        "hours_svg": partial(hours_svg, now=visit.now, counted_since=_counted_since(visit, filters, grouped)),
        "order": order,
        "is_full": tasks is not None and len(tasks) == limit,
        "older": _older(tasks, limit),
        "verbs": _verbs(visit, filters),
        "can_send": visit.may(Role.OPERATE) and bool(visit.app.tasks),
        "is_search": "arguments_contain" in filters.values,
        "can_search": visit.user.role.includes(Role.READ) and not visit.hiding.has_rules,
    }
    says = (
        _failed_say(groups, least) if tasks is not None and groups else _sentence(filters, tasks, limit=limit)
    )
    command = f"everbeat tasks list --order {order} {filters.command()}".rstrip()
    return Page(template="tasks.html", title="Tasks", says=says, data=data, more=more, command=command)


def _groups(visit: Visit, filters: ListFilters) -> Any:
    given = filters.task_filters()
    until: Any = given.get("until")
    plan = failure_page(
        given.get("name"),
        given.get("queue"),
        given.get("since"),
        visit.now - until if isinstance(until, timedelta) else until,
        given.get("labels"),
        _MOST_GROUPS,
        most=_MOST_GROUPED,
    )
    return database_of(visit.app).arun(plan)


def _by_size(groups: FailurePage, states: Sequence[str]) -> list[FailureGroup]:
    """Return the groups with tasks in these states, the largest first: is it one cause, or are they many?"""
    chosen = {
        TaskState.FAILED: [each for each in groups if each.expired < each.count],
        TaskState.EXPIRED: [each for each in groups if each.expired],
    }
    found = {id(each): each for state in states for each in chosen[TaskState(state)]}
    return sorted(found.values(), key=lambda group: -group.count)


def _group(visit: Visit, group: FailureGroup) -> FailureGroup:
    return structs.replace(group, message=visit.hiding.text(group.name, group.message))


def _counted_since(visit: Visit, filters: ListFilters, groups: FailurePage | None) -> datetime | None:
    """Return before which moment the groups contain no failures, because they were not examined or do not match. None: all were counted."""
    since = filters.fixed(visit.now).task_filters().get("since")
    cut = None if groups is None else groups.continue_before
    moments = [each for each in (since, cut) if isinstance(each, datetime)]
    return max(moments, default=None)


def _older(tasks: TaskPage | None, limit: int) -> str | None:
    if tasks is None:
        return None
    if len(tasks) == limit:
        return str(tasks[-1].id)
    return None if tasks.continue_before is None else str(tasks.continue_before)


def _verbs(visit: Visit, filters: ListFilters) -> list[BulkVerb]:
    """Return what this user can do with all tasks that match, if the filters select states to which it applies."""
    states = _states_of(filters.states)
    return [
        verb
        for verb, role in VERB_ROLES.items()
        if visit.may(role) and (not states or states & verb.applicable)
    ]


def _states_of(names: Sequence[str]) -> frozenset[TaskState]:
    virtual = [VirtualState(each).states for each in names if each in set(VirtualState)]
    own = [TaskState(each) for each in names if each not in set(VirtualState)]
    return frozenset([*own, *(state for states in virtual for state in states)])


def _failed_say(groups: Sequence[FailureGroup], least: str) -> str:
    """Return how many tasks failed, and the largest group, which is the first."""
    total, worst = sum(group.count for group in groups), groups[0]
    share = "all" if worst.count == total else f"{worst.count:,}"
    return (
        f"{least.capitalize()}{amount(total, 'task')} failed, {share} of them {worst.name} with {worst.code}"
    )


def _sentence(filters: ListFilters, tasks: TaskPage | None, *, limit: int) -> str:
    if tasks is None:
        return "The tasks could not be read"
    kind = "".join(f"{state.lower()} " for state in filters.states[:1]) if len(filters.states) == 1 else ""
    if not tasks:
        examined = "" if tasks.examined is None else f" among the {tasks.examined:,} newest"
        return f"No {kind}tasks{' match' if filters.values else ''}{examined}"
    if len(tasks) == limit:
        return f"The {limit} newest {kind}tasks{' that match' if len(filters.values) > bool(kind) else ''}"
    return f"{amount(len(tasks), f'{kind}task')}{' match' if len(filters.values) > bool(kind) else ''}"
