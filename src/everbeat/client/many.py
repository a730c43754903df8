"""Many calls or handles in one argument: what is taken, and what is said of anything else.

What lives here: from an iterable to a list whose entries are right. What may not: what is done with them.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from everbeat.client.handle import Handle
from everbeat.client.task import Call
from everbeat.domain.settings import refused, shown
from everbeat.errors import EverbeatError, PayloadError

R = TypeVar("R")


def calls_of(given: Iterable[Call[R]], *, name: str) -> list[Call[R]]:
    """The calls; raises PayloadError, which names the place of a wrong entry. `name`: of the method that got them."""
    return [*map(_require_call, enumerate(_walked(given, name)))]


async def acalls_of(given: Iterable[Call[R]] | AsyncIterable[Call[R]], *, name: str) -> list[Call[R]]:
    """The twin of `calls_of`; takes async iterables, too."""
    if isinstance(given, AsyncIterable):
        given = [call async for call in given]
    return calls_of(given, name=name)


def handles_of(given: Iterable[Handle[R]], *, name: str) -> list[Handle[R]]:
    """The handles; raises ConfigurationError, which names the place of a wrong entry."""
    return [*map(_require_handle, enumerate(_walked(given, name)))]


async def ahandles_of(given: Iterable[Handle[R]] | AsyncIterable[Handle[R]], *, name: str) -> list[Handle[R]]:
    """The twin of `handles_of`; takes async iterables, too."""
    if isinstance(given, AsyncIterable):
        given = [handle async for handle in given]
    return handles_of(given, name=name)


def _walked(given: Any, name: str) -> Iterator[Any]:
    try:
        entries: Iterator[Any] = iter(given)
        return entries
    except TypeError:
        raise _not_many(given, name) from None


def _not_many(given: object, name: str) -> EverbeatError:
    many = name.endswith("send_many")
    if isinstance(given, AsyncIterable):
        fix = f"await the twin a{name}(...), which takes it, or make a list of it"
    elif many:
        fix = "write [task.call(...)]" if isinstance(given, Call) else "pass [task.call(...), ...]"
    else:
        fix = f"write [handle], or ask handle.{name.removesuffix('s').removeprefix('a')}()"
    if many:
        kind = type(given).__name__
        return PayloadError(
            f"{name}() takes an iterable of calls, not {shown(given)}, which is of type {kind}.",
            fix=f"{fix}.",
        )
    rule = f"must be an iterable of handles, not of type {type(given).__name__}"
    return refused(given, subject=f"handles of {name}()", code="WRONG_TYPE", rule=rule, fix=fix)


def _require_call(entry: tuple[int, Any]) -> Call[Any]:
    place, call = entry
    if isinstance(call, Call):
        return call
    raise PayloadError(
        f"{shown(call)}, entry {place} of what is to be sent, is no call of a task, but of type {type(call).__name__}.",
        fix="make each with task.call(...).",
    )


def _require_handle(entry: tuple[int, Any]) -> Handle[Any]:
    place, handle = entry
    if isinstance(handle, Handle):
        return handle
    raise refused(
        handle,
        subject=f"handles[{place}]",
        code="WRONG_TYPE",
        rule=f"must be a handle, as send() gives it, not of type {type(handle).__name__}",
        fix="pass what send() or send_many() gave; of a task's id: app.handle(id)",
    )


def one_connection(calls: Sequence[Call[Any]], connection: object) -> object:
    """Whose transaction these are sent in: the one given, or that of all of them."""
    own = [call.connection for call in calls]
    given = own if connection is None else [connection, *(each for each in own if each is not None)]
    if any(each is not given[0] for each in given):
        raise refused(
            len({id(each) for each in given}),
            subject="connections of a send_many",
            code="CONTRADICTION",
            rule="is more than one, and one statement is part of one transaction",
            fix="make all calls by the same with_options(connection=...), or by none",
        )
    return given[0] if given else None


def longest_patience_s(calls: Sequence[Call[Any]], patience_s: float | None) -> float | None:
    """The patience of one statement for all of these: the one given, or the longest of theirs."""
    own = [call.patience_s for call in calls if call.patience_s is not None]
    return patience_s if patience_s is not None else max(own, default=None)
