"""What a send gives back: a way to wait for its task, ask about it, cancel it and run it again.

What lives here: `Handle`. What may not: how many handles share one listener (`waiter`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from uuid import UUID

import msgspec

from everbeat.client.control import CancelResult, Control
from everbeat.client.door import Door
from everbeat.client.twins import awaiting, blocking
from everbeat.domain.duration import Duration
from everbeat.domain.failure import error_from_json
from everbeat.domain.inspection import TaskInfo
from everbeat.domain.outcome import (
    RESULT_NOT_AVAILABLE,
    TASK_CANCELLED,
    TASK_EXPIRED,
    Completed,
    Failed,
    TaskError,
    TaskFailed,
)
from everbeat.domain.states import TaskState
from everbeat.store.plan import Plan
from everbeat.store.tasks import StoredOutcome

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Handle(Generic[R_co]):
    """One sent task, by its `id`; every blocking method has a twin to await, named with a leading `a`.

    An end that was seen once is remembered; a timeout is not.
    """

    def __init__(
        self,
        task_id: UUID,
        *,
        name: str | None,
        control: Control,
        decode: Callable[[str], Any] = msgspec.json.decode,
    ) -> None:
        self.id = task_id
        self.name = name
        self._control = control
        self._decode = decode
        self._seen: Completed[R_co] | Failed | None = None

    def __repr__(self) -> str:
        return f"<Handle {self.id}{'' if self.name is None else f' of task {self.name!r}'}>"

    @property
    def door(self) -> Door:
        """The way to the database."""
        return self._control.door

    def result(self, *, timeout: Duration | None = None) -> R_co:
        """What the task returned; raises TaskFailed if it did not complete, WaitTimeout after `timeout`.

        handle.result(timeout="30s")
        """
        return self._value(
            self._seen or self._remember(self._control.wait(self.id, timeout=timeout, name="result"))
        )

    async def aresult(self, *, timeout: Duration | None = None) -> R_co:
        """As `result`, to await."""
        return self._value(await self.aoutcome(timeout=timeout))

    def outcome(self, *, timeout: Duration | None = None) -> Completed[R_co] | Failed:
        """How the task ended; raises WaitTimeout after `timeout`, TaskNotFound."""
        return self._seen or self._remember(self._control.wait(self.id, timeout=timeout, name="outcome"))

    async def aoutcome(self, *, timeout: Duration | None = None) -> Completed[R_co] | Failed:
        """As `outcome`, to await."""
        return self._seen or self._remember(await self._control.await_end(self.id, timeout=timeout))

    @staticmethod
    def all_outcomes(
        handles: Sequence[Handle[R]], *, timeout: Duration | None
    ) -> list[Completed[R] | Failed]:
        """How all of these ended, in their order: behind `App.outcomes`."""
        unseen = {handle.id: handle for handle in handles if handle._seen is None}
        if unseen:
            control = next(iter(unseen.values()))._control
            found = control.wait_for_all(unseen, timeout=timeout, name="outcomes")
            for handle in handles:
                handle._take(found)
        return [handle._outcome_seen() for handle in handles]

    @staticmethod
    async def await_outcomes(
        handles: Sequence[Handle[R]], *, timeout: Duration | None
    ) -> list[Completed[R] | Failed]:
        """The twin of `all_outcomes`."""
        unseen = {handle.id: handle for handle in handles if handle._seen is None}
        if unseen:
            control = next(iter(unseen.values()))._control
            found = await control.await_all(unseen, timeout=timeout)
            for handle in handles:
                handle._take(found)
        return [handle._outcome_seen() for handle in handles]

    def _take(self, found: Mapping[UUID, StoredOutcome]) -> None:
        if self._seen is None:
            self._remember(found[self.id])

    def _outcome_seen(self) -> Completed[R_co] | Failed:
        assert self._seen is not None
        return self._seen

    def _info(self) -> Plan[TaskInfo]:
        """The task as it is now; raises TaskNotFound."""
        return self._control.info(self.id)

    def _cancel(self) -> Plan[CancelResult]:
        """Cancels the task at once if it waits, asks its worker if it runs; raises TaskNotFound."""
        return self._control.cancel(self.id)

    def _retry(self) -> Plan[None]:
        """Runs the ended task again, now; raises TaskNotRetryable unless it FAILED, was CANCELLED or EXPIRED."""
        yield from self._control.retry(self.id)
        self._seen = None

    info = blocking(_info)
    ainfo = awaiting(_info)
    cancel = blocking(_cancel)
    acancel = awaiting(_cancel)
    retry = blocking(_retry)
    aretry = awaiting(_retry)

    def _value(self, outcome: Completed[R_co] | Failed) -> R_co:
        match outcome:
            case Completed(value):
                return value
            case Failed(error):
                raise TaskFailed(error, task_id=self.id) from error

    def _remember(self, stored: StoredOutcome) -> Completed[R_co] | Failed:
        self.name = stored.name
        if stored.state is TaskState.COMPLETED:
            self._seen = Completed(self._decode("null" if stored.result is None else stored.result))
        else:
            self._seen = Failed(_error_of(stored))
        return self._seen


def _error_of(stored: StoredOutcome) -> TaskError:
    error = None if stored.error is None else error_from_json(stored.error)
    match stored.state:
        case TaskState.CANCELLED:
            code = TASK_CANCELLED  # whatever its code raised when it was cancelled
        case TaskState.EXPIRED:
            code = TASK_EXPIRED
        case _:
            return error or TaskError(RESULT_NOT_AVAILABLE, f"The task is {stored.state} without an error.")
    if error is None:
        return TaskError(code)
    return TaskError(code, error.message, error.data, type=error.type, traceback=error.traceback)
