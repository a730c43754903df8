"""What all foreign connections share: our statements in each driver's style of parameters, and the words of a refusal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final
from uuid import UUID

from everbeat.errors import CommitRefused
from everbeat.store.remedies import remedy_of_right
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
    """Whether the role may not do what was asked."""
    return sqlstate_of(problem) == "42501"


def sqlstate_of(problem: BaseException) -> str | None:
    """The SQLSTATE of an error of any of these libraries; each has it in its own attribute."""
    # SQLAlchemy wraps the driver's error as `orig`, Django raises its own from it.
    for each in (problem, getattr(problem, "orig", None), problem.__cause__):
        for name in ("sqlstate", "pgcode"):
            if isinstance(code := getattr(each, name, None), str):
                return code
    return None


def note_of(problem: BaseException, *, schema: str) -> str | None:
    """What the user can do about an error of a statement of ours on their connection; None if it is not about the schema."""
    match sqlstate_of(problem):
        case "3F000" | "42P01":
            return (
                f"everbeat: the database of this connection has no everbeat tables in schema {schema!r}."
                " Connect to the database of the tasks, or run 'everbeat migrate' with the URL of this one."
            )
        case "42703" | "42883" | "42P10":
            return (
                f"everbeat: schema {schema!r} in the database of this connection was made by another version of everbeat."
                " Run 'everbeat migrate' with the newest version in use."
            )
        case "42501":
            fix = remedy_of_right(str(problem), schema=schema)
            return f"everbeat: the role of this connection may not write in schema {schema!r}. Fix: {fix}"
        case _:
            return None
