"""`Web`: the ASGI app of the dashboard. It opens the database on first use and sends every request through one function."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final
from urllib.parse import quote, unquote

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as Address
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from everbeat.app import App
from everbeat.client.database_access import DatabaseAccess, database_of
from everbeat.domain.bulk_actions import Operator
from everbeat.domain.hiding import hide_rules
from everbeat.domain.settings.checks import remark, switch
from everbeat.domain.settings.settings import refused
from everbeat.errors import DatabaseError, EverbeatError
from everbeat.store.reading import ReadingDatabase
from everbeat.web import rendering
from everbeat.web.database_clock import PageClock
from everbeat.web.database_problems import DatabaseProblems
from everbeat.web.double_clicks import DoubleClicks
from everbeat.web.examination import Examiner
from everbeat.web.hiding import Hiding
from everbeat.web.kept_charts import KeptCharts
from everbeat.web.live import Live
from everbeat.web.moments import moment_of
from everbeat.web.page import ActionDone, Goto, Page, PageResult, Visit
from everbeat.web.pages.changes import address_of, mark_of
from everbeat.web.refusals import RequestRefused
from everbeat.web.requests import FormFields, is_json, read_form, read_query, require_same_origin, wants_json
from everbeat.web.rights import Authentication, Role, User, authenticated, require
from everbeat.web.routes import ROUTES, Route
from everbeat.web.static import serve_file
from everbeat.web.vitals import Vitals, VitalsWatch

MOST_CONNECTIONS: Final = 3
PATIENCE_S: Final = 1.0
"""How long a page waits for a database that does not respond."""
SAID: Final = "everbeat-said"
"""The cookie that carries what an action did to the page that follows it. It lives for seconds."""
PART: Final = "x-everbeat-part"
"""The header with which the script of a replay requests only what differs from moment to moment."""
_LONGEST_SAID: Final = 300
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_log = logging.getLogger("everbeat.web")


class Web:
    """The dashboard of an app as an ASGI app. Serve it, or mount it in another ASGI app. It opens the database on first use.

    `auth` is required, and returns the user of a request. It is `Basic`, `TrustedHeader`, `Loopback`, or your own function that returns a
    `User` with a role, or None. If `read_only` is set, no action is possible. `hide` lists payloads that no user sees: "TASK" or
    "TASK:PARAMETER", where * stands for any text. `name` is shown as the name of the installation.

    Pages share three separate connections. Their statements only read, and the server cancels a statement after 5 s.

    Raises ConfigurationError if an argument is invalid.

        api.mount("/everbeat", Web(app, auth=who, hide=["*:password"]))
    """

    def __init__(
        self,
        app: App,
        *,
        auth: Authentication,
        read_only: bool = False,
        hide: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        if not callable(auth):
            raise refused(
                auth,
                subject="Web.auth",
                code="MISSING",
                rule="must return the user of a request",
                fix="pass Basic(...), TrustedHeader(...), a function, or Loopback() for this machine only",
            )
        self.app = app
        self.read_only: bool = switch(read_only, subject="Web.read_only")
        self.name = app.name if name is None else str(remark(name, subject="Web.name"))
        self.clock = PageClock()
        self.vitals = VitalsWatch()
        self.examiner = Examiner(app)
        self.live = Live(self)
        self.kept_charts = KeptCharts()
        self.problems = DatabaseProblems()
        self._auth = auth
        self._clicks = DoubleClicks()
        self._rules = hide_rules(hide)
        self._reading: ReadingDatabase | None = None
        self._opening = asyncio.Lock()
        self.paths = frozenset(route.path for route in ROUTES)
        self.past_paths = frozenset(route.path for route in ROUTES if route.has_past)
        addresses = [Address(route.path, self._endpoint(route), methods=[route.method]) for route in ROUTES]
        addresses.append(Address("/static/{name}", self._static, methods=["GET"]))
        # A redirect of the router would contain the scheme and the host that the server sees behind a proxy.
        self._router = Router(
            addresses, default=self._absent, lifespan=self._lifespan, redirect_slashes=False
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI defines it."""

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._router(scope, receive, secured)

    @property
    def access(self) -> DatabaseAccess:
        """Return the app's access to the database, which the actions use."""
        return database_of(self.app)

    def hiding_for(self, user: User) -> Hiding:
        """Return what this user does not see."""
        return Hiding(self._rules, everything=not user.role.includes(Role.READ))

    async def reading(self) -> ReadingDatabase:
        """Return the connections of the pages. The first call opens and checks the database. Raises DatabaseError if that fails."""
        async with self._opening:
            if self._reading is None:
                with self.access.patience(PATIENCE_S):
                    opened = await self.access.adatabase(within_s=PATIENCE_S * 10)
                self._reading = ReadingDatabase(
                    opened.target,
                    application_name="everbeat web",
                    patience_s=PATIENCE_S,
                    connections=MOST_CONNECTIONS,
                )
        return self._reading

    async def aclose(self) -> None:
        """End the streams of live pages, and close the connections of the pages, after the current examination. The app stays open."""
        await self.live.aclose()
        await asyncio.to_thread(self.examiner.wait)
        reading, self._reading = self._reading, None
        if reading is not None:
            await reading.aclose()

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.aclose()

    def _endpoint(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            return await self._serve(route, request)

        return serve

    async def _serve(self, route: Route, request: Request) -> Response:
        """Answer a request: authenticate, check the role and the origin, read the form, run the page function, and render its answer."""
        visit = None
        try:
            user = await self._user(request)
            visit = Visit(self, request, user, query=FormFields({}), form=FormFields({}))
            require(user, route.role, changes=route.changes, read_only=self.read_only)
            visit.query = read_query(request)
            if route.method != "GET":
                require_same_origin(request)
                visit.form = await read_form(request)
            return await self._rendered(visit, await self._acted(route, visit))
        except RequestRefused as refusal:
            return await self._refused(visit, request, refusal)
        except EverbeatError as problem:
            return await self._rendered(visit, self._problem(visit, problem)) if visit else _plain(500)
        except Exception as problem:  # noqa: BLE001 - a defect must not end the server, and its message can contain a payload
            return await self._refused(visit, request, _defect(f"The page {route.path}", problem))

    async def _user(self, request: Request) -> User:
        """Return the user of a request. If the function fails, no user is admitted."""
        try:
            return await authenticated(self._auth, request)
        except RequestRefused:
            raise
        except Exception as problem:  # noqa: BLE001 - the function of the installation; its message can contain a secret
            raise _defect("The function that authenticates", problem) from None

    async def _acted(self, route: Route, visit: Visit) -> PageResult:
        """Return the answer of a page, or of an action, which a double click carries out once. A program's request is never a double click."""
        if not route.changes or is_json(visit.request):
            return await self._answered(route, visit)
        form = (visit.request.scope["path"], visit.form.key())
        return await self._clicks.once(visit.user.name, form, partial(self._answered, route, visit))

    async def _answered(self, route: Route, visit: Visit) -> PageResult:
        operator = Operator(visit.user.name[:200], "web")
        if route.changes:
            with self.access.acting_as(operator), self.access.patience(PATIENCE_S * 5):
                return await route.serve(visit)
        try:
            reading = await self.reading()
            await self.clock.measure(reading)
            visit.now = self.clock.now()
        except DatabaseError as problem:
            if not route.needs_database:
                return await route.serve(visit)
            visit.could_not_read("The database", problem)
            return rendering.away_page(self._problem(visit, problem))
        if route.has_past:
            visit.at = moment_of(visit.query.get("at"), now=visit.now)
        with self.access.acting_as(operator), self.access.reading_from(reading):
            if route.method == "GET" and not wants_json(visit.request):
                visit.mark = await mark_of(visit)
            return await route.serve(visit)

    def _problem(self, visit: Visit, problem: EverbeatError) -> Page:
        told = self.problems.told(problem, visit.user) if isinstance(problem, DatabaseError) else None
        return rendering.problem_page(problem, told)

    async def _rendered(self, visit: Visit, answer: PageResult) -> Response:
        match answer:
            case Response():
                return answer
            case Goto(path=path):
                return RedirectResponse(path, 303)
            case ActionDone():
                if wants_json(visit.request):
                    return rendering.json_response({"says": answer.says, **answer.data})
                response = RedirectResponse(answer.goto, 303)
                said = quote(answer.says[:_LONGEST_SAID])
                root = f"{visit.request.scope.get('root_path', '')}/"
                response.set_cookie(SAID, said, max_age=30, path=root, httponly=True, samesite="strict")
                return response
            case Page():
                if wants_json(visit.request):
                    return rendering.json_page(visit, answer)
                return await self._html(visit, answer)

    async def _html(self, visit: Visit, page: Page) -> Response:
        if visit.at is not None and PART in visit.request.headers:
            return rendering.html_page(visit, page, vitals=Vitals(), said=None, is_part=True)
        said = unquote(visit.request.cookies.get(SAID, ""))[:_LONGEST_SAID] or None
        response = rendering.html_page(
            visit, page, vitals=await self._vitals(visit), said=said, changes=address_of(visit, page)
        )
        if said:
            response.delete_cookie(SAID, path=f"{visit.request.scope.get('root_path', '')}/")
        return response

    async def _vitals(self, visit: Visit) -> Vitals:
        try:
            reading = await self.reading()
        except DatabaseError as problem:
            return Vitals(problem=problem.code)
        with self.access.reading_from(reading):
            return await self.vitals.read(
                self.app, now=visit.now, crew=self.live.crew(), fresh=bool(visit.unread)
            )

    async def _refused(self, visit: Visit | None, request: Request, refusal: RequestRefused) -> Response:
        if wants_json(request):
            error = {"code": refusal.code, "message": refusal.message, "fix": refusal.fix}
            return rendering.json_response({"error": error}, status=refusal.status, headers=refusal.headers)
        if visit is None:
            return rendering.stranger_page(request, refusal)
        response = await self._html(visit, rendering.refusal_page(refusal))
        response.headers.update(refusal.headers)
        return response

    async def _static(self, request: Request) -> Response:
        return serve_file(request.path_params["name"], version=request.query_params.get("v"))

    async def _absent(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": ""})
            return
        request = Request(scope, receive)
        refusal = RequestRefused(
            404, "NO_SUCH_PAGE", "There is no such page.", fix="follow a link of the navigation."
        )
        try:
            user = await self._user(request)
            visit = Visit(self, request, user, query=FormFields({}), form=FormFields({}))
            page = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
            if page in self.paths and scope["method"] in ("GET", "HEAD"):
                response: Response = RedirectResponse(visit.link(page), 307)
            else:
                response = await self._refused(visit, request, refusal)
        except RequestRefused as stranger:
            response = await self._refused(None, request, stranger)
        await response(scope, receive, send)


def _defect(what: str, problem: Exception) -> RequestRefused:
    """Write where something failed to the log, without the message, and return the answer."""
    frames = "".join(traceback.format_tb(problem.__traceback__))
    _log.error("%s failed with %s:\n%s", what, type(problem).__name__, frames)
    return RequestRefused(500, "DEFECT", "This page has a defect. The log of the dashboard has the details.")


def _plain(status: int) -> Response:
    return Response(status_code=status)
