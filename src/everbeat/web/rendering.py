"""Makes HTML or JSON of the record of a page. Templates escape everything, and control characters become visible."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
from markupsafe import Markup
from msgspec import structs
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from everbeat.domain.documents import failure_document, plain_value
from everbeat.errors import EverbeatError
from everbeat.errors.wording import amount, visible, visible_json
from everbeat.web import wording
from everbeat.web.database_problems import Told
from everbeat.web.moments import STEP, replay_of, steps_around, written
from everbeat.web.navigation import PLACES
from everbeat.web.page import Page, Visit
from everbeat.web.refusals import RequestRefused, status_of
from everbeat.web.static import files
from everbeat.web.tick_drawing import tick_row, tick_shape
from everbeat.web.vitals import Vitals

_TEMPLATES: Final = Path(__file__).parent / "templates"


def _shown(value: Any) -> Any:
    """Return a value of a template with its control characters visible, so that data cannot reverse or hide text around it.

    A condition without `else` has an undefined value, which Jinja would turn into text by an exception. Other undefined values raise.
    """
    if type(value) is Undefined:
        return ""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        finalize=_shown,
    )
    made.filters |= {
        "span": wording.span,
        "clock": wording.clock,
        "precise": partial(wording.clock, precise=True),
        "number": wording.number,
        "short": wording.short_id,
        "json_text": wording.json_text,
        "json_line": wording.json_line,
        "mark": wording.mark,
        "moment": wording.form_moment,
        "address_time": written,
    }
    made.globals |= {
        "amount": amount,
        "places": PLACES,
        "static": _static,
        "tick_row": tick_row,
        "tick_shape": tick_shape,
    }
    return made


def _static(name: str) -> str:
    return f"/static/{name}?v={files()[name].version}"


def html_page(
    visit: Visit,
    page: Page,
    *,
    vitals: Vitals,
    said: str | None,
    changes: str | None = None,
    is_part: bool = False,
) -> Response:
    """Return a page as HTML. `changes` is the address of the stream that notifies its viewers of changes.

    `is_part`: only what differs from moment to moment, for the script that replays the past.
    """
    cookies = visit.request.cookies
    theme = cookies.get("everbeat-theme")
    context = {
        "page": page,
        "visit": visit,
        "vitals": vitals,
        "said": said,
        "changes": changes,
        "now": visit.now,
        "link": visit.link,
        "ago": partial(wording.ago, now=visit.now),
        "around": partial(steps_around, now=visit.now),
        "replay": None if visit.at is None else replay_of(visit.at, visit.query.get("around"), now=visit.now),
        "replay_step_s": int(STEP.total_seconds()),
        "is_part": is_part,
        "theme": theme if theme in ("light", "dark") else "auto",
        "clock_kind": "utc" if cookies.get("everbeat-clock") == "utc" else "local",
        "here": visit.request.scope["path"].removeprefix(visit.request.scope.get("root_path", "")),
        "json_here": visit.request.method == "GET",
        **page.data,
        **page.more,
    }
    return HTMLResponse(_environment().get_template(page.template).render(context), page.status)


def fragment(visit: Visit, template: str, context: Mapping[str, Any]) -> str:
    """Return a part of a page as HTML, which a live page replaces."""
    return _environment().get_template(template).render({"visit": visit, "link": visit.link, **context})


def json_page(visit: Visit, page: Page) -> Response:
    """Return a page as JSON: its sentence, its records, and the parts that could not be read."""
    missing = [structs.asdict(each) for each in visit.unread]
    document = {"says": page.says, "missing": missing, **page.data}
    return json_response(document, status=page.status)


def json_response(
    document: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON document."""
    encoded = msgspec.json.encode(document, enc_hook=plain_value).decode()
    return Response(visible_json(encoded), status, headers=dict(headers or {}), media_type="application/json")


def problem_page(problem: EverbeatError, told: Told | None) -> Page:
    """Return the page for an error of everbeat. Its JSON form is that of the command line. `told` has the words for this user, if any."""
    document = failure_document(problem)
    if told is not None:
        document |= {"message": told.message, "fix": told.fix}
    titles = {400: "This cannot be read", 404: "There is nothing here", 409: "Nothing was changed"}
    status = status_of(problem)
    title = titles.get(status, "The database does not answer")
    return Page(
        template="problem.html",
        title=title,
        says=document["message"],
        data={"error": document},
        status=status,
    )


def away_page(page: Page) -> Page:
    """Return the page for a problem of the database as the page that says that the database is away."""
    return structs.replace(page, title="The database is away", refresh_s=5)


def refusal_page(refusal: RequestRefused) -> Page:
    """Return the page for a refused request."""
    error = {"code": refusal.code, "message": refusal.message, "fix": refusal.fix}
    titles = {403: "This is not allowed", 404: "There is nothing here", 500: "This page has a defect"}
    title = titles.get(refusal.status, "This cannot be read")
    return Page(
        template="problem.html",
        title=title,
        says=refusal.message,
        data={"error": error},
        status=refusal.status,
    )


def stranger_page(request: Request, refusal: RequestRefused) -> Response:
    """Return the page for a client without a user. It says nothing about the installation."""
    root = request.scope.get("root_path", "")
    context = {"refusal": refusal, "root": root}
    html = _environment().get_template("stranger.html").render(context)
    return HTMLResponse(html, refusal.status, headers=refusal.headers)
