"""The parameters and results of page functions: the visit, the parts that could and could not be read, and the record of the page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from everbeat.app import App
from everbeat.errors import DatabaseError
from everbeat.web.hiding import Hiding
from everbeat.web.moments import written
from everbeat.web.requests import FormFields
from everbeat.web.rights import Role, User

if TYPE_CHECKING:
    from everbeat.web.application import Web

T = TypeVar("T")


class Unread(Struct, frozen=True):
    """A part of a page that could not be read, why not, and what helps."""

    part: str
    problem: str
    fix: str | None = None


class Page(Struct, frozen=True, kw_only=True):
    """The record of one page, of which both forms are made: HTML with `template`, and JSON.

    `says` is the sentence that answers the question of the page. `data` are the records that the JSON document contains, which the template
    gets too. `more` is only for the template. `command` prints the same in a terminal. `refresh_s`: the browser loads the page again after
    this many seconds, because a part is not ready. `targets` names what a page about one thing shows, as the audit log does: its viewers are
    notified when an action changes one of them.
    """

    template: str
    title: str
    says: str
    data: Mapping[str, Any]
    more: Mapping[str, Any] = {}
    command: str | None = None
    status: int = 200
    refresh_s: int | None = None
    targets: Sequence[str] = ()


class ActionDone(Struct, frozen=True, kw_only=True):
    """The effect of an action: the page to which the browser goes, what to say there, and the record for JSON."""

    goto: str
    says: str
    data: Mapping[str, Any] = {}


class Goto(Struct, frozen=True):
    """Another address of the dashboard."""

    path: str


PageResult: TypeAlias = Page | ActionDone | Goto | Response
"""The result of a page function. A stream or a file is a Response."""


class Visit:
    """One request of an authenticated user. `app` reads for the pages, with the limits of the dashboard (see `Web`).

    `at` is the past moment that the page shows, or None for a page of the present.
    """

    def __init__(
        self, web: Web, request: Request, user: User, *, query: FormFields, form: FormFields
    ) -> None:
        self.web = web
        self.request = request
        self.user = user
        self.query = query
        self.form = form
        self.now = web.clock.now()
        """The time of the database."""
        self.unread: list[Unread] = []
        self.mark: str | None = None
        """The place in the order of operators' actions at which the page is read."""
        self.at: datetime | None = None
        self.hiding: Hiding = web.hiding_for(user)

    @property
    def app(self) -> App:
        """Return the app whose tasks are shown."""
        return self.web.app

    @property
    def path_values(self) -> Mapping[str, str]:
        """Return the values of the path's parameters."""
        return self.request.path_params

    def may(self, role: str) -> bool:
        """Return whether pages offer this user the actions of a role, which none does for the past. The action itself decides again."""
        return self.user.role.includes(Role(role)) and not self.web.read_only and self.at is None

    def link(self, path: str, **parameters: Any) -> str:
        """Return the address of a path below the dashboard's root. Parameters that are None are left out; lists are repeated.

        A page of the past links to other pages of the same moment, unless `at` is given.
        """
        if self.at is not None and path in self.web.past_paths:
            parameters = {"at": written(self.at), **parameters}
        given = tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in parameters.items()
            if value not in (None, "", [])
        )
        return f"{self.request.scope.get('root_path', '')}{_address(path, given)}"

    def back(self, otherwise: str) -> str:
        """Return the page on which the form is, or another one. The browser names it, so only its path below the root is used."""
        sent = urlsplit(self.request.headers.get("referer", ""))
        root = f"{self.request.scope.get('root_path', '')}/"
        if not sent.path.startswith(root) or sent.path.startswith(("//", "/\\")):
            return self.link(otherwise)
        return f"{sent.path}?{sent.query}" if sent.query else sent.path

    async def part(self, name: str, reading: Awaitable[T], default: T) -> T:
        """Return a part of the page, or `default` if the database does not provide it. The page then names the part.

        Other errors, such as TaskNotFound, are raised.
        """
        try:
            return await reading
        except DatabaseError as problem:
            self.could_not_read(name, problem)
            return default

    def could_not_read(self, name: str, problem: DatabaseError) -> None:
        """Note that a part of the page is missing, and why, as far as the user may know it."""
        told = self.web.problems.told(problem, self.user)
        self.unread.append(Unread(name, told.message, told.fix))

    async def parts(self, **readings: tuple[str, Awaitable[Any], Any]) -> dict[str, Any]:
        """Return several parts, which are read side by side. Each has a name for the reader, what reads it, and a default."""
        found = await asyncio.gather(*(self.part(*reading) for reading in readings.values()))
        return dict(zip(readings, found, strict=True))


_PATH: Final = "/:@!$&'()*+,;=~-._"


@lru_cache(maxsize=4_096)
def _address(path: str, parameters: tuple[tuple[str, Any], ...]) -> str:
    """Return an address below the dashboard's root. A page can contain a thousand of them, and the same ones when it is opened again."""
    query = f"?{urlencode(parameters, doseq=True)}" if parameters else ""
    return f"{quote(path, safe=_PATH)}{query}"
