"""What all foreign connections share: our statements in each driver's style of parameters, and the words of a refusal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final
from uuid import UUID

from everbeat.errors import CommitRefused
from everbeat.store.statement import compose

_PLACEHOLDER: Final = re.compile(r"%(?:\((\w+)\)[sb]|%)")
IN_BLOCK: Final = "is inside a transaction block that somebody else will end"
BLOCK_FIX: Final = (
    "open ctx.commit outside of it; blocks opened inside ctx.commit are savepoints, and welcome."
)


def refused(what: str, *, fix: str = "give ctx.commit a connection of its own.") -> CommitRefused:
    """The error for a connection on which no transaction of ours can be."""
    return CommitRefused(f"The connection given to Context.commit {what}.", fix=fix)


@cache
def named(name: str, schema: str) -> str:
    """The statement with %(name)s for every parameter, as psycopg2 wants them."""
    return _PLACEHOLDER.sub(
        lambda found: f"%({found[1]})s" if found[1] else "%%", compose(name, schema).decode()
    )


@cache
def numbered(name: str, schema: str) -> tuple[str, tuple[str, ...]]:
    """The statement with $1, $2 … and the names of these parameters, as asyncpg wants them."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if not found[1]:
            return "%"
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return _PLACEHOLDER.sub(number, compose(name, schema).decode()), tuple(names)


def as_text(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """psycopg2 knows no UUID unless it was told."""
    return {name: _plain(value) for name, value in parameters.items()}


def _plain(value: Any) -> Any:
    match value:
        case UUID():
            return str(value)
        case list():
            return [_plain(each) for each in value]
        case _:
            return value


def is_forbidden(problem: BaseException) -> bool:
    """Whether the role may not do what was asked; each library says so in its own attribute."""
    problem = getattr(problem, "orig", None) or problem  # SQLAlchemy wraps the driver's
    code = getattr(problem, "sqlstate", None) or getattr(problem, "pgcode", None)
    return code == "42501"
