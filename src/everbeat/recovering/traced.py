"""Adds to recovered tasks what the app's tracers need, because these run in a process that does not read the database."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from msgspec.structs import replace

from everbeat.domain.recovery.hooks import RecoveryContext
from everbeat.errors import EverbeatError
from everbeat.recovering.observer import ONE_TRY, RecoveryEnvironment
from everbeat.runtime.events import Event
from everbeat.store.traced import traced_recoveries

_MOST: Final = 100


class RecoveriesNotTraced(Event, frozen=True, kw_only=True):
    """Tasks were recovered, but the spans of these recoveries are missing. `problem` is the reason."""

    component = "recovering"
    level = logging.WARNING
    count: int
    task_ids: tuple[UUID, ...]
    problem: str


async def with_traces(
    environment: RecoveryEnvironment, contexts: Sequence[RecoveryContext]
) -> Sequence[RecoveryContext]:
    """Return the contexts of recovered tasks with their traces, if the app has tracers.

    If the database fails, the contexts have no traces, because a recovery must not depend on them.
    """
    if not environment.hooks.scopes.traced:
        return contexts
    found: list[RecoveryContext] = []
    for first in range(0, len(contexts), _MOST):
        some = contexts[first : first + _MOST]
        statement = traced_recoveries(
            [each.task_id for each in some], recovered_by=environment.observer.supervisor_id
        )
        try:
            traces = await environment.statements.run(statement, patience_s=ONE_TRY)
        except EverbeatError as problem:
            ids = tuple(each.task_id for each in some)
            lost = RecoveriesNotTraced(count=len(some), task_ids=ids, problem=str(problem))
            environment.events.emit(lost)
            traces = {}
        found += [replace(each, _traced=traces.get(each.task_id)) for each in some]
    return found
