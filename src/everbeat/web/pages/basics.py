"""The start page, the search by id, key or name, and the preferences of a browser."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from starlette.responses import RedirectResponse

from everbeat.client.database_access import database_of
from everbeat.client.inspection import task_page
from everbeat.domain.identifiers import bounds
from everbeat.errors import TaskNotFound, WorkflowNotFound
from everbeat.store.inspection import parties_named, tasks_between, workflows_between
from everbeat.store.plan import ask
from everbeat.web.filters import MOST_EXAMINED
from everbeat.web.navigation import PLACES
from everbeat.web.page import Goto, PageResult, Visit

THEMES: Final = ("auto", "light", "dark")
CLOCKS: Final = ("local", "utc")
_A_YEAR_S: Final = 365 * 24 * 3_600
_LONGEST: Final = 200


async def home(visit: Visit) -> PageResult:
    """Go to the first page of the navigation, at the moment and with the range that the address names."""
    first = next(place.path for place in PLACES if place.path in visit.web.paths)
    return Goto(visit.link(first, at=visit.query.get("at"), range=visit.query.get("range")))


async def find(visit: Visit) -> PageResult:
    """Go to the task, the workflow or the worker whose id begins with the text. Otherwise, list the tasks with this key or name."""
    sought = (visit.query.get("q") or "").replace("\0", "")[:_LONGEST]
    if not sought:
        return Goto(visit.link("/tasks"))
    if (path := await _by_id(visit, sought)) is not None:
        return Goto(visit.link(path))
    keyed = await database_of(visit.app).arun(task_page(key=sought, limit=1, most=MOST_EXAMINED))
    return Goto(visit.link("/tasks", **({"key": sought} if keyed else {"name": sought})))


async def _by_id(visit: Visit, sought: str) -> str | None:
    try:
        return await _by_uuid(visit, UUID(sought))
    except ValueError:
        pass
    access = database_of(visit.app)
    between = bounds(sought)
    if between is not None:
        for statement, place in ((workflows_between, "workflows"), (tasks_between, "tasks")):
            found = await access.arun(ask(statement(*between, limit=1)))
            if found:
                return f"/{place}/{found[0].id}"
    parties = await access.arun(ask(parties_named(sought, supervisors=False, limit=1)))
    return f"/workers/{parties[0].id}" if parties and len(sought) >= _SHORTEST_PARTY else None


_SHORTEST_PARTY: Final = 4


async def _by_uuid(visit: Visit, sought: UUID) -> str | None:
    try:
        await visit.app.workflow_handle(sought).ainfo()
    except WorkflowNotFound:
        pass
    else:
        return f"/workflows/{sought}"
    try:
        await visit.app.ainfo(sought)
    except TaskNotFound:
        return None
    return f"/tasks/{sought}"


async def set_preferences(visit: Visit) -> PageResult:
    """Store the theme and the clock in cookies, and go back to the page."""
    response = RedirectResponse(visit.back("/"), 303)
    path = f"{visit.request.scope.get('root_path', '')}/"
    for name, known in (("theme", THEMES), ("clock", CLOCKS)):
        if (value := visit.form.get(name)) in known:
            response.set_cookie(
                f"everbeat-{name}", str(value), max_age=_A_YEAR_S, path=path, samesite="lax", httponly=True
            )
    return response
