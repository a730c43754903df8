"""Several statements as one question, written once and run by threads and by event loops alike.

What lives here: the shape of a plan and its two runners, which also run plans of other steps. What may not: any particular
question.

    def rename(old, new):                       # a plan
        found = yield from ask(find(old))
        return found is not None and (yield from ask(move(old, new)))
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct

from everbeat.store.database import Database
from everbeat.store.statement import Statement

T = TypeVar("T")


class Bounded(Struct, Generic[T], frozen=True):
    """A statement whose answer is waited for at most `within_s` seconds, even while the server works on it."""

    statement: Statement[T]
    within_s: float


class Errand(Struct, Generic[T], frozen=True):
    """Something between two statements that is no statement: how a thread does it, and how an event loop does."""

    run: Callable[[], T]
    arun: Callable[[], Awaitable[T]]


class Transaction(Struct, Generic[T], frozen=True):
    """A plan of statements only, in one transaction: `make` is called again where it has to be repeated."""

    make: Callable[[], Generator[Any, Any, T]]


Plan: TypeAlias = Generator[Statement[Any] | Bounded[Any] | Errand[Any] | Transaction[Any], Any, T]


def ask(statement: Statement[T]) -> Plan[T]:
    """One statement as a plan; `yield from ask(...)` gives its typed answer."""
    answer: T = yield statement
    return answer


def together(make: Callable[[], Plan[T]]) -> Plan[T]:
    """A plan of statements only, as one transaction: all of it happens, or nothing."""
    answer: T = yield Transaction(make)
    return answer


def planned(begin: Callable[[], Coroutine[Any, Any, T]]) -> Plan[T]:
    """A coroutine that waits for nothing but `PlannedStatements`, as a plan; begun with it, so that none is left unawaited."""
    value = yield from begin().__await__()
    return value


class PlannedStatements:
    """Runs statements for code that awaits its answers, wherever its plan is run."""

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        """Return the answer, within `patience_s` seconds; None takes the patience of what runs the plan."""
        answer: T = await _asked(statement if patience_s is None else Bounded(statement, patience_s))
        return answer


@types.coroutine
def done(errand: Errand[T]) -> Plan[T]:
    """An errand, awaited by the coroutine of a plan."""
    answer: T = yield errand
    return answer


@types.coroutine
def _asked(step: Statement[T] | Bounded[T]) -> Plan[T]:
    answer: T = yield step
    return answer


def perform(plan: Generator[Any, Any, T], do: Callable[[Any], Any]) -> T:
    """Runs a plan in this thread: `do` answers each of its steps, and what it raises is raised there."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = plan.send(answer) if failure is None else plan.throw(failure)
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            answer, failure = do(step), None
        except BaseException as error:  # noqa: BLE001 - the plan may mend or undo something, else it comes back from there
            failure = error


async def aperform(plan: Generator[Any, Any, T], do: Callable[[Any], Awaitable[Any]]) -> T:
    """The twin of `perform` for event loops."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = plan.send(answer) if failure is None else plan.throw(failure)
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            answer, failure = await do(step), None
        except BaseException as error:  # noqa: BLE001 - as above
            failure = error


def run_plan(database: Database, plan: Plan[T], *, patience_s: float | None = None) -> T:
    """Runs a plan of statements, errands and transactions in this thread; `patience_s` None takes the database's."""

    def do(step: Any) -> Any:
        match step:
            case Errand():
                return step.run()
            case Bounded():
                return database.run(step.statement, patience_s=step.within_s, is_final=True)
            case Transaction():
                return database.transact(lambda run: perform(step.make(), run), patience_s=patience_s)
            case _:
                return database.run(step, patience_s=patience_s)

    return perform(plan, do)


async def arun_plan(database: Database, plan: Plan[T], *, patience_s: float | None = None) -> T:
    """The twin of `run_plan` for event loops."""

    async def do(step: Any) -> Any:
        match step:
            case Errand():
                return await step.arun()
            case Bounded():
                return await database.arun(step.statement, patience_s=step.within_s, is_final=True)
            case Transaction():
                return await database.atransact(lambda run: aperform(step.make(), run), patience_s=patience_s)
            case _:
                return await database.arun(step, patience_s=patience_s)

    return await aperform(plan, do)
