"""What can be asked of one sent task, whoever holds its id: how it ended, what it looks like, cancel it, run it again.

What lives here: these questions as plans, and waiting. What may not: types of results, which are the handle's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from enum import StrEnum
from math import inf
from time import monotonic
from typing import Final
from uuid import UUID, uuid4

from msgspec import Struct, structs

from everbeat.client.door import Door, refuse_in_loop
from everbeat.client.explaining import MOST_RECOVERIES, explained, explained_with_locks, reasons_to_wait
from everbeat.client.waiter import Ended
from everbeat.client.workflow_explaining import explained_workflow
from everbeat.domain.duration import Duration, to_seconds
from everbeat.domain.explanation import Explanation, SilenceRules, WorkflowExplanation
from everbeat.domain.inspection import TaskInfo
from everbeat.domain.settings import refused
from everbeat.domain.states import TaskState
from everbeat.domain.typed_json import LARGEST_BYTES
from everbeat.domain.waiting import waiting_because
from everbeat.errors import TaskNotFound, TaskNotRetryable, WaitTimeout
from everbeat.store import inspect, tasks
from everbeat.store.plan import Plan, ask
from everbeat.store.tasks import StoredOutcome

_LAST_LOOK_S: Final = 0.5
"""The patience of the look after a wait whose time is up."""


class CancelVerdict(StrEnum):
    """What a cancel did."""

    CANCELLED = "CANCELLED"
    """The task had not started and never will."""
    REQUESTED = "REQUESTED"
    """The task is running; its worker is told to stop it."""
    ALREADY_ENDED = "ALREADY_ENDED"
    """The task had ended before and stays as it is."""


class CancelResult(Struct, frozen=True):
    """The answer to a cancel: what it did, and the state the task is in now."""

    verdict: CancelVerdict
    state: TaskState


def to_task_id(value: object) -> UUID:
    """A task's id, given as UUID or as text; raises ConfigurationError for anything else."""
    if isinstance(value, UUID):
        return value
    if isinstance(value, str):
        try:
            return UUID(value)
        except ValueError:
            pass
    raise refused(
        value,
        subject="task_id",
        code="WRONG_TYPE",
        rule="must be a UUID, or its text",
        fix="pass handle.id, as send() gave it",
        shell_fix="give the whole id, as 'everbeat send' and 'everbeat tasks list' show it",
    )


class Control:
    """Questions about tasks of one app. A worker without a beat for `alive_within_ms` does not count as live."""

    def __init__(
        self,
        door: Door,
        *,
        alive_within_ms: int,
        silence: SilenceRules,
        payload_limit: int = LARGEST_BYTES,
    ) -> None:
        self.door = door
        self.payload_limit = payload_limit
        self.alive_within_ms = alive_within_ms
        self._silence = silence

    def cancel(self, task_id: UUID) -> Plan[CancelResult]:
        """Cancels a task, or asks its worker to, and its children with it; raises TaskNotFound."""
        found = yield from ask(tasks.cancel(task_id, channel=self.door.channel, call=uuid4()))
        match found:
            case None:
                raise TaskNotFound(task_id)
            case _, was, False if was.is_terminal:
                if (
                    was is TaskState.CANCELLED
                ):  # whoever cancelled it may have been cut off before its children
                    yield from self._cancel_children(task_id)
                return CancelResult(CancelVerdict.ALREADY_ENDED, was)
            case "REQUESTED", was, _:
                yield from self._cancel_children(task_id)
                return CancelResult(CancelVerdict.REQUESTED, was)
            case _:
                yield from self._cancel_children(task_id)
                return CancelResult(CancelVerdict.CANCELLED, TaskState.CANCELLED)

    def _cancel_children(self, task_id: UUID) -> Plan[None]:
        """Until nothing is left to cancel: what a child has sent meanwhile is found by the next look."""
        while (yield from ask(tasks.cancel_children(task_id, channel=self.door.channel))):
            pass

    def retry(self, task_id: UUID) -> Plan[None]:
        """Runs an ended task again, now and with fresh budgets; raises TaskNotFound or TaskNotRetryable."""
        found = yield from ask(tasks.retry(task_id, channel=self.door.channel, call=uuid4()))
        if found is None:
            raise TaskNotFound(task_id)
        workflow_id, was, retried, other = found
        if not retried:
            raise TaskNotRetryable(task_id, state=was, workflow_id=workflow_id, other=other)

    def info(self, task_id: UUID) -> Plan[TaskInfo]:
        """Everything about a task; raises TaskNotFound."""
        stored = yield from ask(inspect.task(task_id))
        if stored is None:
            raise TaskNotFound(task_id)
        attempts = yield from ask(inspect.attempts(task_id))
        recoveries = yield from ask(inspect.recoveries(task_id, limit=MOST_RECOVERIES))
        heartbeats = yield from ask(inspect.heartbeats(task_id, limit=1))
        reasons = yield from reasons_to_wait(stored, recoveries, alive_within_ms=self.alive_within_ms)
        return TaskInfo(
            **structs.asdict(stored.summary),
            arguments=stored.arguments,
            result=stored.result,
            policy=stored.policy,
            flags=stored.flags,
            attempts=attempts,
            heartbeat=heartbeats[0] if heartbeats else None,
            recoveries=tuple(recoveries),
            waiting_because=waiting_because(reasons),
            needs=stored.needs,
        )

    def explain(self, task_id: UUID) -> Plan[Explanation]:
        """Why a task is not running, or was run again; raises TaskNotFound."""
        plan = explained(task_id, rules=self._silence, alive_within_ms=self.alive_within_ms)
        return explained_with_locks(plan, schema=self.door.address.schema)

    def explain_workflow(self, workflow_id: UUID) -> Plan[WorkflowExplanation]:
        """Why a workflow has not ended, or how it ended; raises WorkflowNotFound."""
        plan = explained_workflow(workflow_id, rules=self._silence, alive_within_ms=self.alive_within_ms)
        return explained_with_locks(plan, schema=self.door.address.schema)

    def wait(self, task_id: UUID, *, timeout: Duration | None, name: str) -> StoredOutcome:
        """The end of a task, waited for in this thread; raises WaitTimeout, TaskNotFound, AppClosed."""
        refuse_in_loop(f"Handle.{name}", twin=f"Handle.a{name}")
        limit_s, since = _limit(timeout), monotonic()
        database = self.door.database(within_s=inf if limit_s is None else limit_s)
        ended = self.door.waiter.wait(task_id)
        try:
            return ended.result(None if limit_s is None else max(0.0, since + limit_s - monotonic()))
        except TimeoutError:
            ended.cancel()
            last = (
                None
                if ended.seen
                else database.run(tasks.outcomes([task_id]), patience_s=_LAST_LOOK_S, is_final=True).get(
                    task_id
                )
            )
            return _ended_at_last(task_id, ended, last=last, waited_s=monotonic() - since)

    async def await_end(self, task_id: UUID, *, timeout: Duration | None) -> StoredOutcome:
        """The twin of `wait`."""
        limit_s, since = _limit(timeout), monotonic()
        database = await self.door.adatabase(within_s=inf if limit_s is None else limit_s)
        ended = self.door.waiter.wait(task_id)
        try:
            async with asyncio.timeout(None if limit_s is None else max(0.0, since + limit_s - monotonic())):
                return await asyncio.wrap_future(ended)
        except TimeoutError:
            ended.cancel()
            last = (
                None
                if ended.seen
                else (
                    await database.arun(tasks.outcomes([task_id]), patience_s=_LAST_LOOK_S, is_final=True)
                ).get(task_id)
            )
            return _ended_at_last(task_id, ended, last=last, waited_s=monotonic() - since)

    def wait_for_all(
        self, ids: Iterable[UUID], *, timeout: Duration | None, name: str
    ) -> dict[UUID, StoredOutcome]:
        """The ends of many tasks, looked up together; raises as `wait` does, for the first that is to blame."""
        refuse_in_loop(f"App.{name}", twin=f"App.a{name}")
        limit_s, since = _limit(timeout), monotonic()
        database = self.door.database(within_s=inf if limit_s is None else limit_s)
        ended = {task_id: self.door.waiter.wait(task_id) for task_id in ids}
        left_s = None if limit_s is None else max(0.0, since + limit_s - monotonic())
        try:
            futures.wait(ended.values(), timeout=left_s, return_when=futures.FIRST_EXCEPTION)
        finally:
            late = _given_up(ended)
        found = _known(ended)
        if late:
            last = database.run(tasks.outcomes(late), patience_s=_LAST_LOOK_S, is_final=True)
            found |= _all_ended(late, last, waited_for=len(ended), waited_s=monotonic() - since)
        return found

    async def await_all(self, ids: Iterable[UUID], *, timeout: Duration | None) -> dict[UUID, StoredOutcome]:
        """The twin of `wait_for_all`."""
        limit_s, since = _limit(timeout), monotonic()
        database = await self.door.adatabase(within_s=inf if limit_s is None else limit_s)
        ended = {task_id: self.door.waiter.wait(task_id) for task_id in ids}
        left_s = None if limit_s is None else max(0.0, since + limit_s - monotonic())
        waiting = [asyncio.wrap_future(future) for future in ended.values()]
        try:
            if waiting:
                await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            late = _given_up(ended)
            for each in waiting:
                each.cancel()
                each.add_done_callback(_is_read)
        found = _known(ended)
        if late:
            last = await database.arun(tasks.outcomes(late), patience_s=_LAST_LOOK_S, is_final=True)
            found |= _all_ended(late, last, waited_for=len(ended), waited_s=monotonic() - since)
        return found


def _given_up(ended: Mapping[UUID, Ended]) -> list[UUID]:
    """Those that have not ended yet: nobody waits for them any more, also where the wait itself was ended."""
    return [task_id for task_id, future in ended.items() if future.cancel()]


def _known(ended: Mapping[UUID, Ended]) -> dict[UUID, StoredOutcome]:
    """Those that have ended; raises what any wait failed with."""
    return {task_id: future.result() for task_id, future in ended.items() if not future.cancelled()}


def _is_read(future: asyncio.Future[StoredOutcome]) -> None:
    # What it failed with is raised from the future that it wraps; asyncio would complain that nobody asked this one.
    if not future.cancelled():
        future.exception()


def _all_ended(
    late: Sequence[UUID], last: dict[UUID, StoredOutcome], *, waited_for: int, waited_s: float
) -> dict[UUID, StoredOutcome]:
    """What ended at the last moment; raises for the first that did not, and says how many did not."""
    for task_id in late:
        if task_id not in last:
            raise TaskNotFound(task_id)
    missing = [task_id for task_id in late if not last[task_id].state.is_terminal]
    if missing:
        state = last[missing[0]].state
        raise WaitTimeout(missing[0], waited_s, state=state, missing=len(missing), waited_for=waited_for)
    return {task_id: last[task_id] for task_id in late}


def _limit(timeout: Duration | None) -> float | None:
    return None if timeout is None else to_seconds(timeout, subject="timeout")


def _ended_at_last(
    task_id: UUID, ended: Ended, *, last: StoredOutcome | None, waited_s: float
) -> StoredOutcome:
    """What a wait whose time is up gives: `last` was asked only if the waiter had not answered at all yet."""
    if last is not None and last.state.is_terminal:
        return last
    state = ended.seen or (last.state if last is not None else None)
    if state is None:
        raise TaskNotFound(task_id)
    raise WaitTimeout(task_id, waited_s, state=state)
