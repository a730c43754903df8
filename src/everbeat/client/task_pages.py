"""Plans that list a page of tasks, and that report whether older tasks were not examined."""

from __future__ import annotations

from functools import partial

from msgspec import structs

from everbeat.domain.inspection import TaskPage, TaskSummary
from everbeat.store import inspection
from everbeat.store.plan import Plan, ask


def examined_page(query: inspection.TaskQuery, *, limit: int) -> Plan[TaskPage]:
    """Return a plan that lists tasks and reports whether it has examined all of them.

    If the page is not full because the search stopped early, the plan searches again down to a fixed id. So no task is skipped if other
    tasks were deleted in the meantime.
    """
    page = partial(TaskPage, unindexed=query.unindexed)
    most = max(query.most_examined or 0, limit)
    if query.labels:
        return (yield from _labelled_page(query, limit=limit, most=most))
    if query.is_of_failures:
        return (yield from _page_of_failures(query, limit=limit, most=most))
    newest = inspection.list_tasks(query, limit=limit, most=most)
    # Without filters that no index serves, the page is usually full. With them, the older tasks are usually of interest, too.
    found = None
    if query.most_examined is None or not query.unindexed:
        found = yield from ask(newest)
        if len(found) == limit or query.most_examined is None:
            return page(found)
    last = yield from ask(inspection.last_examined(query, most=most))
    if last is None:
        return page((yield from ask(newest)) if found is None else found)
    found = yield from ask(inspection.list_tasks(query, limit=limit, most=None, oldest=last))
    return page(found) if len(found) == limit else page(found, examined=most, continue_before=last)


def _page_of_failures(query: inspection.TaskQuery, *, limit: int, most: int) -> Plan[TaskPage]:
    """Return a plan that lists failed tasks. It examines the latest failures and, if these are not all failures, the newest tasks.

    The newest tasks can contain further failures: many older tasks might have failed after them.
    """
    page = partial(TaskPage, unindexed=query.unindexed)
    found, is_complete = yield from ask(inspection.latest_failures(query, limit=limit, most=most))
    if len(found) == limit or is_complete:
        return page(found)
    last = yield from ask(inspection.last_examined(query, most=most))
    if query.before is not None or last is None:
        found = yield from ask(inspection.list_tasks(query, limit=limit, most=None, oldest=last))
    else:
        by_id = structs.replace(query, latest=False)
        newest = yield from ask(inspection.list_tasks(by_id, limit=most, most=None, oldest=last))
        known = {task.id: task for task in (*found, *newest)}
        found = sorted(known.values(), key=lambda task: (task.last_event_at, task.id), reverse=True)[:limit]
    if len(found) == limit or last is None:
        return page(found)
    return page(found, examined=most, continue_before=last)


def _labelled_page(query: inspection.TaskQuery, *, limit: int, most: int) -> Plan[TaskPage]:
    """Return a plan that lists tasks with labels, as `examined_page`, in steps.

    Each step reads the tasks with the rarest label down to a fixed id. A list by the last event reads all of them at once, and the steps
    only find out where it stopped.
    """
    rarest = yield from ask(inspection.rarest_label(query.labels))
    query = structs.replace(query, rarest=rarest)
    found: list[TaskSummary] = []
    if query.latest:
        found = yield from ask(inspection.list_tasks(query, limit=limit, most=most))
    by_id = structs.replace(query, latest=False, before=None if query.latest else query.before)
    examined, step = 0, min(inspection.STEP_OF_LABEL, most)
    while examined < most and len(found) < limit:
        last = yield from ask(inspection.last_examined(by_id, most=step))
        if not query.latest:
            rows = inspection.list_tasks(by_id, limit=limit - len(found), most=2 * step, oldest=last)
            found += yield from ask(rows)
        if last is None:
            return TaskPage(found, unindexed=query.unindexed)
        examined += step
        by_id = structs.replace(by_id, before=last)
    if len(found) == limit:
        return TaskPage(found, unindexed=query.unindexed)
    return TaskPage(found, unindexed=query.unindexed, examined=examined, continue_before=by_id.before)
