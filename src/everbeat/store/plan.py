"""Plans: sequences of statements that are written once and that both threads and event loops can run.

def rename(old, new):                       # a plan
    found = yield from ask(find(old))
    return found is not None and (yield from ask(move(old, new)))
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct

from everbeat.domain.plan import aperform, perform
from everbeat.errors import DatabaseError
from everbeat.store.announcer import FLUSH_S, announcement
from everbeat.store.database import Database
from everbeat.store.statement import Statement

T = TypeVar("T")


class Bounded(Struct, Generic[T], frozen=True):
    """A statement that is abandoned after `within_s` seconds, even if the server is still working on it."""

    statement: Statement[T]
    within_s: float


class Action(Struct, Generic[T], frozen=True):
    """An action between two statements. Threads call `run`, event loops `arun`."""

    run: Callable[[], T]
    arun: Callable[[], Awaitable[T]]


class Transaction(Struct, Generic[T], frozen=True):
    """A plan that consists only of statements and runs in one transaction. `make` is called again if the transaction has to be repeated."""

    make: Callable[[], Generator[Any, Any, T]]


Plan: TypeAlias = Generator[Statement[Any] | Bounded[Any] | Action[Any] | Transaction[Any], Any, T]


def ask(statement: Statement[T]) -> Plan[T]:
    """Return a plan of one statement. `yield from ask(...)` evaluates to the statement's typed result."""
    answer: T = yield statement
    return answer


def together(make: Callable[[], Plan[T]]) -> Plan[T]:
    """Return a plan that runs in one transaction, so that either all of it takes effect or none of it.

    `make` returns a plan that consists only of statements.
    """
    answer: T = yield Transaction(make)
    return answer


def planned(begin: Callable[[], Coroutine[Any, Any, T]]) -> Plan[T]:
    """Return a plan that runs a coroutine.

    The coroutine may await only `PlannedStatements.run` and `done`. It is created when the plan starts, so it is never left unawaited.
    """
    value = yield from begin().__await__()
    return value


class PlannedStatements:
    """Runs statements for a coroutine that awaits their results. The plan of the coroutine can run in a thread or on an event loop."""

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        """Run a statement and return its result.

        `patience_s` is how many seconds the statement may take. If it is None, the patience of the plan's runner applies.
        """
        answer: T = await _asked(statement if patience_s is None else Bounded(statement, patience_s))
        return answer


@types.coroutine
def done(action: Action[T]) -> Plan[T]:
    """Run an action in the coroutine of a plan, and return the action's result."""
    answer: T = yield action
    return answer


@types.coroutine
def _asked(step: Statement[T] | Bounded[T]) -> Plan[T]:
    answer: T = yield step
    return answer


def announced(database: Database) -> Plan[None]:
    """Announce the waiting hints of earlier sends now, because the caller waits for a result."""
    if hints := database.announcer.take_waiting():
        try:
            yield Bounded(announcement(hints, channel=database.target.channel), FLUSH_S)
        except DatabaseError as problem:
            database.announcer.failed(problem)


def run_plan(database: Database, plan: Plan[T], *, patience_s: float | None = None) -> T:
    """Run a plan in this thread and return its result. If `patience_s` is None, the database's own patience applies."""

    def do(step: Any) -> Any:
        match step:
            case Action():
                return step.run()
            case Bounded():
                return database.run(step.statement, patience_s=step.within_s, is_final=True)
            case Transaction():
                return database.transact(lambda run: perform(step.make(), run), patience_s=patience_s)
            case _:
                return database.run(step, patience_s=patience_s)

    return perform(plan, do)


async def arun_plan(database: Database, plan: Plan[T], *, patience_s: float | None = None) -> T:
    """The asynchronous counterpart of `run_plan`."""

    async def do(step: Any) -> Any:
        match step:
            case Action():
                return await step.arun()
            case Bounded():
                return await database.arun(step.statement, patience_s=step.within_s, is_final=True)
            case Transaction():
                return await database.atransact(lambda run: aperform(step.make(), run), patience_s=patience_s)
            case _:
                return await database.arun(step, patience_s=patience_s)

    return await aperform(plan, do)
