"""The table of all addresses: which function serves each, and which role it needs. Nothing else is served but static files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final, Literal

from msgspec import Struct

from everbeat.web.page import PageResult, Visit
from everbeat.web.pages import (
    audit,
    backfills,
    basics,
    bulk,
    changes,
    inbox,
    limits,
    new_task,
    pulse,
    queues,
    reconciling,
    recoveries,
    schedule_form,
    schedules,
    sending,
    system,
    task,
    tasks,
    workers,
    workflows,
)
from everbeat.web.rights import Role


class Route(Struct, frozen=True, kw_only=True):
    """One address. `changes`: it changes something, so a read-only dashboard refuses it, and the audit log notes the user. `has_past`: with the
    parameter `at`, it shows a past moment.

    `needs_database` is False for a page that says something even if the database is away.
    """

    path: str
    serve: Callable[[Visit], Awaitable[PageResult]]
    role: Role
    method: Literal["GET", "POST"] = "GET"
    changes: bool = False
    needs_database: bool = True
    has_past: bool = False


def _action(
    path: str, serve: Callable[[Visit], Awaitable[PageResult]], *, role: Role = Role.OPERATE
) -> Route:
    return Route(path=path, serve=serve, role=role, method="POST", changes=True)


def _changes_of_tasks() -> Iterator[Route]:
    """Yield the addresses that change tasks. Counting what an action would change needs the role of the action, but changes nothing."""
    for verb, role in tasks.VERB_ROLES.items():
        path = f"/tasks/all/{verb.value}"
        counting, acting = partial(bulk.count_all, verb=verb), partial(bulk.act_on_all, verb=verb)
        ticked = partial(bulk.act_on_ticked, verb=verb)
        yield Route(path=f"{path}/count", serve=counting, role=role, method="POST")
        yield Route(path=path, serve=acting, role=role, method="POST", changes=True)
        yield Route(path=f"/tasks/ticked/{verb.value}", serve=ticked, role=role, method="POST", changes=True)


ROUTES: Final[tuple[Route, ...]] = (
    Route(path="/", serve=basics.home, role=Role.SEE, needs_database=False),
    Route(path="/pulse", serve=pulse.show, role=Role.SEE, has_past=True),
    Route(path="/pulse/stream", serve=pulse.stream, role=Role.SEE),
    Route(path="/workers", serve=workers.show, role=Role.SEE, has_past=True),
    Route(path="/workers/stream", serve=workers.stream, role=Role.SEE),
    Route(path="/workers/{worker_id}", serve=workers.show_one, role=Role.SEE),
    _action("/workers/{supervisor_id}/quiet", workers.quiet),
    _action("/workers/{supervisor_id}/resume", workers.resume),
    _action("/workers/{supervisor_id}/release", workers.release, role=Role.ADMIN),
    Route(path="/recoveries", serve=recoveries.show, role=Role.SEE, has_past=True),
    Route(path="/recoveries/stream", serve=recoveries.stream, role=Role.SEE),
    Route(path="/recoveries/export", serve=recoveries.export, role=Role.READ, has_past=True),
    Route(path="/recoveries/sweep", serve=recoveries.dry_run, role=Role.OPERATE),
    Route(path="/changes/stream", serve=changes.stream, role=Role.SEE),
    Route(path="/find", serve=basics.find, role=Role.SEE),
    Route(
        path="/preferences", serve=basics.set_preferences, role=Role.SEE, method="POST", needs_database=False
    ),
    Route(path="/tasks", serve=tasks.show, role=Role.SEE),
    Route(path="/tasks/search", serve=tasks.search, role=Role.READ, method="POST"),
    *_changes_of_tasks(),
    Route(path="/tasks/new", serve=new_task.show, role=Role.OPERATE),
    _action("/tasks/new", new_task.send),
    Route(path="/tasks/{id}", serve=task.show, role=Role.SEE),
    _action("/tasks/{id}/retry", task.retry),
    _action("/tasks/{id}/cancel", task.cancel),
    _action("/tasks/{id}/run_now", task.run_now),
    _action("/tasks/{id}/signal", task.signal),
    _action("/tasks/{id}/send", sending.send_again),
    Route(path="/tasks/{id}/items", serve=sending.show_items, role=Role.SEE),
    Route(path="/queues", serve=queues.show, role=Role.SEE, has_past=True),
    _action("/queues/pause", queues.pause),
    _action("/queues/resume", queues.resume),
    _action("/limits/set", limits.set_numbers, role=Role.ADMIN),
    _action("/limits/clear", limits.clear, role=Role.ADMIN),
    Route(path="/workflows", serve=workflows.show, role=Role.SEE),
    Route(path="/workflows/reconcile", serve=reconciling.dry_run, role=Role.OPERATE),
    _action("/workflows/reconcile", reconciling.reconcile),
    Route(path="/workflows/{id}", serve=workflows.show_one, role=Role.SEE),
    _action("/workflows/{id}/pause", workflows.pause),
    _action("/workflows/{id}/resume", workflows.resume),
    _action("/workflows/{id}/cancel", workflows.cancel),
    _action("/workflows/{id}/retry", workflows.retry),
    Route(path="/schedules", serve=schedules.show, role=Role.SEE),
    _action("/schedules/pause", schedules.pause),
    _action("/schedules/resume", schedules.resume),
    _action("/schedules/run", schedules.run),
    Route(path="/schedules/backfill/count", serve=backfills.count, role=Role.OPERATE, method="POST"),
    _action("/schedules/backfill", backfills.send),
    _action("/schedules/delete", schedules.delete, role=Role.ADMIN),
    _action("/schedules/put", schedule_form.put, role=Role.ADMIN),
    Route(path="/schedules/{name:path}", serve=schedules.show_one, role=Role.SEE),
    # Not below /schedules/, because a schedule can have any name.
    Route(path="/schedule-form", serve=schedule_form.show, role=Role.ADMIN),
    Route(path="/schedule-form", serve=schedule_form.preview, role=Role.ADMIN, method="POST"),
    Route(path="/inbox", serve=inbox.show, role=Role.SEE),
    _action("/inbox/{id}", inbox.answer),
    Route(path="/audit", serve=audit.show, role=Role.SEE),
    _action("/audit/{id}/stop", audit.stop),
    Route(path="/system", serve=system.show, role=Role.READ, needs_database=False),
    Route(path="/system/examine", serve=system.examine, role=Role.READ, method="POST", needs_database=False),
)
