"""Several statements as one question, written once and run by threads and by event loops alike.

What lives here: the shape of a plan and its two runners. What may not: any particular question.

    def rename(old, new):                       # a plan
        found = yield from ask(find(old))
        return found is not None and (yield from ask(move(old, new)))
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

from everbeat.store.database import Database
from everbeat.store.statement import Statement

T = TypeVar("T")
Plan: TypeAlias = Generator[Statement[Any], Any, T]


def ask(statement: Statement[T]) -> Plan[T]:
    """One statement as a plan; `yield from ask(...)` gives its typed answer."""
    answer: T = yield statement
    return answer


def run_plan(database: Database, plan: Plan[T]) -> T:
    """Runs a plan in this thread."""
    answer: Any = None
    while True:
        try:
            statement = plan.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = database.run(statement)


async def arun_plan(database: Database, plan: Plan[T]) -> T:
    """Runs a plan on the running event loop."""
    answer: Any = None
    while True:
        try:
            statement = plan.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = await database.arun(statement)
