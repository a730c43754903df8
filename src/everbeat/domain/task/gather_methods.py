"""The methods of a Context that send many children and wait for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload
from uuid import UUID

from everbeat.domain.labels import require_room
from everbeat.domain.settings.settings import shown
from everbeat.domain.task.context_backend import ChildEnd, NewChild
from everbeat.domain.task.outcome import Completed, Failed
from everbeat.domain.task.step_runner import StepMethods, StepPlan
from everbeat.errors import PayloadError, TaskFailed
from everbeat.errors.wording import amount

R = TypeVar("R")
R1 = TypeVar("R1")
R2 = TypeVar("R2")
R3 = TypeVar("R3")
R4 = TypeVar("R4")
R_co = TypeVar("R_co", covariant=True)


class GatherCall(Protocol[R_co]):
    """A call that a running task can send and whose outcome it can wait for: the result of `task.call(...)`."""

    def _as_child(self) -> NewChild: ...

    def _outcome_of(self, task_id: UUID, end: ChildEnd, /) -> Completed[R_co] | Failed: ...


class GatherMethods(StepMethods):
    """Methods of `Context`. They are in a class of their own because of their many overloads."""

    __slots__ = ()

    name: str
    labels: Mapping[str, str]

    @overload
    def gather(self, c1: GatherCall[R1], /) -> tuple[R1]: ...
    @overload
    def gather(self, c1: GatherCall[R1], c2: GatherCall[R2], /) -> tuple[R1, R2]: ...
    @overload
    def gather(self, c1: GatherCall[R1], c2: GatherCall[R2], c3: GatherCall[R3], /) -> tuple[R1, R2, R3]: ...
    @overload
    def gather(
        self, c1: GatherCall[R1], c2: GatherCall[R2], c3: GatherCall[R3], c4: GatherCall[R4], /
    ) -> tuple[R1, R2, R3, R4]: ...
    @overload
    def gather(self, *calls: GatherCall[R]) -> tuple[R, ...]: ...
    def gather(self, *calls: GatherCall[Any]) -> tuple[Any, ...]:
        """Send child tasks, wait until all of them have ended, and return their results in the order of the calls.

        Each child is sent only once across all attempts, and is cancelled with this task. The wait occupies no worker slot. Raises
        TaskFailed, after all children have ended, if a child did not complete. Raises PayloadError if there are more than 10,000 calls,
        or if one of them has a key or would have too many labels. Raises TaskSuspended to release the slot, TaskStopped if the task should
        stop, BlockingCallInLoop on an event loop, and DatabaseError if the database fails.

        sizes = ctx.gather(*(measure.call(film) for film in films))
        """
        return _results(self._steps.run("gather", self._gathered(calls)))

    @overload
    async def agather(self, c1: GatherCall[R1], /) -> tuple[R1]: ...
    @overload
    async def agather(self, c1: GatherCall[R1], c2: GatherCall[R2], /) -> tuple[R1, R2]: ...
    @overload
    async def agather(
        self, c1: GatherCall[R1], c2: GatherCall[R2], c3: GatherCall[R3], /
    ) -> tuple[R1, R2, R3]: ...
    @overload
    async def agather(
        self, c1: GatherCall[R1], c2: GatherCall[R2], c3: GatherCall[R3], c4: GatherCall[R4], /
    ) -> tuple[R1, R2, R3, R4]: ...
    @overload
    async def agather(self, *calls: GatherCall[R]) -> tuple[R, ...]: ...
    async def agather(self, *calls: GatherCall[Any]) -> tuple[Any, ...]:
        """Async version of `gather` that does not block the running event loop."""
        return _results(await self._steps.arun(self._gathered(calls)))

    def gather_outcomes(self, *calls: GatherCall[R]) -> tuple[Completed[R] | Failed, ...]:
        """Like `gather`, but return the outcome of each child, `Completed` or `Failed`, and do not raise TaskFailed.

        outcomes = ctx.gather_outcomes(*(measure.call(film) for film in films))
        """
        found = self._steps.run("gather_outcomes", self._gathered(calls))
        return tuple(outcome for _, outcome in found)

    async def agather_outcomes(self, *calls: GatherCall[R]) -> tuple[Completed[R] | Failed, ...]:
        """Async version of `gather_outcomes` that does not block the running event loop."""
        found = await self._steps.arun(self._gathered(calls))
        return tuple(outcome for _, outcome in found)

    def _gathered(self, calls: Sequence[GatherCall[R]]) -> StepPlan[list[tuple[UUID, Completed[R] | Failed]]]:
        children = [_child(place, call) for place, call in enumerate(calls)]
        for child in children:
            require_room(self.labels, child.labels, owner=f"Child task {child.name!r} of task {self.name!r}")
        ends = yield from self._steps.gather(children)
        return [
            (task_id, call._outcome_of(task_id, end))
            for call, (task_id, end) in zip(calls, ends, strict=True)
        ]


def _child(place: int, call: GatherCall[Any]) -> NewChild:
    if hasattr(call, "_as_child"):
        return call._as_child()
    raise PayloadError(
        f"Entry {place} of the calls to gather, {shown(call)}, is of type {type(call).__name__}, not a call of a task.",
        parameter="calls",
        fix="make each with task.call(...); to pass a list of calls, write ctx.gather(*calls).",
    )


def _results(outcomes: Sequence[tuple[UUID, Completed[Any] | Failed]]) -> tuple[Any, ...]:
    failed = [(task_id, outcome.error) for task_id, outcome in outcomes if isinstance(outcome, Failed)]
    if failed:
        task_id, error = failed[0]
        failure = TaskFailed(error, task_id=task_id, kind="task")
        if len(failed) > 1:
            failure.add_note(f"{amount(len(failed) - 1, 'other task')} of the gather did not complete.")
        raise failure from error
    return tuple(outcome.value for _, outcome in outcomes if isinstance(outcome, Completed))
