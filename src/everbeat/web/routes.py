"""The table of all addresses: which function serves each, and which role it needs. Nothing else is served but static files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Literal

from msgspec import Struct

from everbeat.web.page import Answer, Visit
from everbeat.web.pages import basics
from everbeat.web.rights import Role


class Route(Struct, frozen=True, kw_only=True):
    """One address. `changes`: it changes something, so a read-only dashboard refuses it, and the audit log notes the user.

    `needs_database` is False for a page that says something even if the database is away.
    """

    path: str
    serve: Callable[[Visit], Awaitable[Answer]]
    role: Role
    method: Literal["GET", "POST"] = "GET"
    changes: bool = False
    needs_database: bool = True


ROUTES: Final[tuple[Route, ...]] = (
    Route(path="/", serve=basics.home, role=Role.SEE, needs_database=False),
    Route(path="/find", serve=basics.find, role=Role.SEE),
    Route(
        path="/preferences", serve=basics.set_preferences, role=Role.SEE, method="POST", needs_database=False
    ),
)
