"""Task handles, and the operations on tasks: wait, inspect, explain, cancel, retry and signal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar, cast
from uuid import UUID, uuid4

import msgspec
from msgspec import structs

from everbeat.client.captured_logs import LogReaders
from everbeat.client.database_access import DatabaseAccess, DatabaseMethods
from everbeat.client.explaining import (
    MOST_RECOVERIES,
    explain_plan,
    explained_schedule,
    explained_with_locks,
    explained_workflow,
    reasons_to_wait,
)
from everbeat.client.questions import AnswerMethods
from everbeat.client.streams import StreamReaders
from everbeat.client.waiter import Deadline, ends_of
from everbeat.client.workflow.operations import advanced
from everbeat.domain.explain.reasons import Explanation, SilenceRules, WorkflowExplanation
from everbeat.domain.explain.schedules import ScheduleExplanation
from everbeat.domain.explain.waiting import waiting_because
from everbeat.domain.inspection import CancelResult, CancelVerdict, TaskInfo
from everbeat.domain.settings.checks import public
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import Duration
from everbeat.domain.task.outcome import Completed, Failed, error_from_json
from everbeat.domain.task.states import TaskState
from everbeat.domain.task.steps import checked_name, encode_signal
from everbeat.errors import (
    RESULT_NOT_AVAILABLE,
    TASK_CANCELLED,
    TASK_EXPIRED,
    ResultNotStored,
    SignalRefused,
    TaskError,
    TaskFailed,
    TaskNotFound,
    TaskNotRetryable,
)
from everbeat.store import history, inspection, tasks
from everbeat.store.plan import Plan, ask, together
from everbeat.store.steps import cancel_started
from everbeat.store.tasks import RetryVerdict, StoredOutcome

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


def to_task_id(value: object, *, subject: str = "task_id") -> UUID:
    """Return a task id from a UUID or its string form. Raises ConfigurationError for any other value."""
    return _to_id(value, subject, given_by="send", listed_by="tasks")


def to_workflow_id(value: object, *, subject: str = "workflow_id") -> UUID:
    """Return a workflow id from a UUID or its string form. Raises ConfigurationError for any other value."""
    return _to_id(value, subject, given_by="start", listed_by="workflows")


def to_batch_id(value: object, *, subject: str = "batch_id") -> UUID:
    """Return a batch id from a UUID or its string form. Raises ConfigurationError for any other value."""
    return _to_id(value, subject, given_by="batch", listed_by="batches")


def _to_id(value: object, subject: str, *, given_by: str, listed_by: str) -> UUID:
    if isinstance(value, UUID):
        return value
    if isinstance(value, str):
        try:
            return UUID(value)
        except ValueError:
            pass
    raise refused(
        value,
        subject=subject,
        code="WRONG_TYPE",
        rule="must be a UUID, or its string form",
        shell_rule="must be an id, or at least its first 4 digits",
        fix=f"pass handle.id of the handle that {given_by}() returned",
        shell_fix=f"give the id, or at least the first 4 of its digits, as 'everbeat {listed_by} list' shows it",
    )


_MOST_MOVED_ON: Final = 20
"""The maximum number of cancelled workflows that a call advances itself. Workers advance the rest."""


class TaskOperations:
    """Operations on the tasks of one app. A worker that has sent no heartbeat for `alive_within_ms` is considered dead."""

    def __init__(
        self, database: DatabaseAccess, *, alive_within_ms: int, silence: SilenceRules, payload_limit: int
    ) -> None:
        self.database = database
        self.payload_limit = payload_limit
        self.alive_within_ms = alive_within_ms
        self._silence = silence

    def cancel(self, task_id: UUID) -> Plan[CancelResult]:
        """Cancel a task that is waiting, or ask the worker to stop a task that is running. Also cancel the task's children.

        Raises TaskNotFound if the task does not exist.
        """
        call = uuid4()
        found = yield from ask(tasks.cancel(task_id, channel=self.database.channel, call=call))
        if found is None:  # the task might have moved to `history` at that moment
            found = yield from ask(tasks.cancel(task_id, channel=self.database.channel, call=call))
        match found:
            case None:
                raise TaskNotFound(task_id)
            case _, was, False if was.is_terminal:
                if (
                    was is TaskState.CANCELLED
                ):  # an earlier cancel call might have been interrupted before it cancelled the children
                    yield from self._cancel_children(task_id)
                return CancelResult(CancelVerdict.ALREADY_ENDED, was)
            case "REQUESTED", was, _:
                yield from self._cancel_children(task_id)
                return CancelResult(CancelVerdict.REQUESTED, was)
            case _:
                yield from self._cancel_children(task_id)
                return CancelResult(CancelVerdict.CANCELLED, TaskState.CANCELLED)

    def _cancel_children(self, task_id: UUID) -> Plan[None]:
        """Cancel all children of a task, and then the workflows that the task and its children started.

        Repeats until no children are left, because a child can send more children in the meantime.
        """
        while (yield from ask(tasks.cancel_children(task_id, channel=self.database.channel))):
            pass
        # Once its cancellation is requested, a task starts no more workflows, so this query finds all of them.
        started = yield from ask(cancel_started(task_id, channel=self.database.channel))
        for one in started[:_MOST_MOVED_ON]:
            yield from advanced(one, self.database.channel)

    def retry(self, task_id: UUID) -> Plan[None]:
        """Requeue a FAILED, CANCELLED or EXPIRED task to run again immediately, and reset its retry and recovery budgets.

        Raises TaskNotFound if the task does not exist, and TaskNotRetryable if it cannot be retried.
        """
        call = uuid4()

        def make() -> Plan[RetryVerdict | None]:
            yield from ask(history.recall_task(task_id))
            return (yield from ask(tasks.retry(task_id, channel=self.database.channel, call=call)))

        found = yield from ask(tasks.retry(task_id, channel=self.database.channel, call=call))
        if found is None or found.may_move:
            found = yield from together(make)
        if found is None:
            raise TaskNotFound(task_id)
        if not found.retried:
            raise TaskNotRetryable(task_id, state=found.was, workflow_id=found.workflow_id, other=found.other)

    def signal(self, target: UUID, name: str, value: object, *, signal_id: UUID) -> Plan[None]:
        """Store a signal for a task or a workflow.

        Raises SignalRefused if the target has already finished, and TaskNotFound if it does not exist. Raises PayloadError if `name` or
        `value` is invalid.
        """
        event = checked_name(name, owner="a signal")
        data = encode_signal(value, event=event)
        channel = self.database.channel
        found = yield from ask(
            tasks.send_signal(signal_id, target=target, name=event, value=data, channel=channel)
        )
        match found.verdict:
            case "ended":
                raise SignalRefused(target, kind=found.kind or "task", state=found.state or "", name=event)
            case "unknown":
                raise TaskNotFound(target)
            case _:
                return

    def info(self, task_id: UUID) -> Plan[TaskInfo]:
        """Return all details of a task. Raises TaskNotFound if the task does not exist."""
        stored = yield from ask(inspection.task(task_id))
        if stored is None:
            raise TaskNotFound(task_id)
        attempts = yield from ask(inspection.attempts(task_id))
        recoveries = yield from ask(inspection.recoveries(task_id, limit=MOST_RECOVERIES))
        heartbeats = yield from ask(inspection.heartbeats(task_id, limit=1))
        reasons = yield from reasons_to_wait(
            stored, recoveries, rules=self._silence, alive_within_ms=self.alive_within_ms
        )
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
            schedule=stored.schedule,
            tick=stored.tick,
            batch_id=stored.batch_id,
        )

    def explain(self, task_id: UUID) -> Plan[Explanation]:
        """Return why a task is not running, or why it ran again. Raises TaskNotFound if the task does not exist."""
        plan = explain_plan(task_id, rules=self._silence, alive_within_ms=self.alive_within_ms)
        return explained_with_locks(plan, schema=self.database.address.schema)

    def explain_workflow(self, workflow_id: UUID) -> Plan[WorkflowExplanation]:
        """Return why a workflow has not finished, or how it finished. Raises WorkflowNotFound if the workflow does not exist."""
        plan = explained_workflow(workflow_id, rules=self._silence, alive_within_ms=self.alive_within_ms)
        return explained_with_locks(plan, schema=self.database.address.schema)

    def explain_schedule(self, name: str) -> Plan[ScheduleExplanation]:
        """Return why a schedule sends no tasks. Raises UnknownName if the schedule does not exist."""
        plan = explained_schedule(name, rules=self._silence, alive_within_ms=self.alive_within_ms)
        return explained_with_locks(plan, schema=self.database.address.schema)


class OutcomeHandle(DatabaseMethods, ABC, Generic[R_co]):
    """Base class for the handles of tasks and workflows. Caches the outcome once it is known."""

    _kind = "task"

    def __init__(
        self, id_: UUID, *, operations: TaskOperations, decode: Callable[[str], Any] = msgspec.json.decode
    ) -> None:
        self.id = id_
        self._operations = operations
        self._database = operations.database
        self._decode = decode
        self._seen: Completed[R_co] | Failed | None = None
        self._is_ignored = False

    def result(self, *, timeout: Duration | None = None) -> R_co:
        """Wait for the task or workflow to finish, and return its result.

        Raises TaskFailed if the task or workflow did not complete, and WaitTimeout if `timeout` expires first. Raises ResultNotStored if
        the task's function has `ignore_result`, or its `keep_result_for` has passed.

        handle.result(timeout="30s")
        """
        until = Deadline(timeout)
        return self._value(self._seen or self._run("result", self._end(until), within_s=until.within_s))

    async def aresult(self, *, timeout: Duration | None = None) -> R_co:
        """Async version of `result` that does not block the running event loop."""
        return self._value(await self.aoutcome(timeout=timeout))

    def outcome(self, *, timeout: Duration | None = None) -> Completed[R_co] | Failed:
        """Wait for the task or workflow to finish, and return its outcome.

        If the task's function has `ignore_result`, the value of `Completed` is None. Raises WaitTimeout if `timeout` expires first, and
        TaskNotFound or WorkflowNotFound if the task or workflow does not exist. Raises ResultNotStored if `keep_result_for` has passed.

        match handle.outcome(timeout="30s"):
            case Completed(value): ...
            case Failed(error): ...
        """
        until = Deadline(timeout)
        return self._seen or self._run("outcome", self._end(until), within_s=until.within_s)

    async def aoutcome(self, *, timeout: Duration | None = None) -> Completed[R_co] | Failed:
        """Async version of `outcome` that does not block the running event loop."""
        until = Deadline(timeout)
        if self._seen is not None:
            return self._seen
        return await self._arun(self._end(until), within_s=until.within_s)

    def _end(self, until: Deadline) -> Plan[Completed[R_co] | Failed]:
        yield from self._database.announced()
        found = yield from ends_of(self._database.waiter, [self.id], until=until)
        return self._remember(found[self.id])

    def _value(self, outcome: Completed[R_co] | Failed) -> R_co:
        match outcome:
            case Completed() if self._is_ignored:
                raise ResultNotStored(self.id, missing="ignored")
            case Completed(value):
                return value
            case Failed(error):
                raise TaskFailed(error, task_id=self.id, kind=self._kind) from error

    def _remember(self, stored: StoredOutcome) -> Completed[R_co] | Failed:
        if stored.missing == "removed":
            raise ResultNotStored(self.id, missing="removed")
        self._is_ignored = stored.missing == "ignored"
        if self._is_ignored:
            self._seen = Completed(cast(R_co, None))
        elif self._is_completed(stored):
            self._seen = Completed(self._decode("null" if stored.result is None else stored.result))
        else:
            self._seen = Failed(self._error_of(stored))
        return self._seen

    def _is_completed(self, stored: StoredOutcome) -> bool:
        return stored.state is TaskState.COMPLETED

    @abstractmethod
    def _error_of(self, stored: StoredOutcome) -> TaskError:
        """Return the error of a stored outcome whose state is not COMPLETED."""


@public
class Handle(StreamReaders, LogReaders, AnswerMethods, OutcomeHandle[R_co]):
    """A reference to one sent task, identified by `id`. Every blocking method has an async counterpart whose name begins with `a`.

    `existed` is True if the send stored no task because this task already had its key, and for the handles of `App.find`. It is also True if
    a limit with `when_full="drop"` was full. If the limit is shared, this task can be of another function. Then `name` is that of the other
    function, and the result is decoded as plain JSON.
    """

    def __init__(
        self,
        task_id: UUID,
        *,
        name: str | None,
        operations: TaskOperations,
        decode: Callable[[str], Any] = msgspec.json.decode,
        existed: bool = False,
    ) -> None:
        super().__init__(task_id, operations=operations, decode=decode)
        self.name = name
        self.existed = existed

    def __repr__(self) -> str:
        return f"<Handle {self.id}{'' if self.name is None else f' of task {self.name!r}'}>"

    def info(self) -> TaskInfo:
        """Return the current details of the task. Raises TaskNotFound if the task does not exist."""
        return self._run("info", self._operations.info(self.id))

    async def ainfo(self) -> TaskInfo:
        """Async version of `info` that does not block the running event loop."""
        return await self._arun(self._operations.info(self.id))

    def cancel(self) -> CancelResult:
        """Cancel the task if it is waiting, or ask its worker to stop it if it is running.

        Raises TaskNotFound if the task does not exist.
        """
        return self._run("cancel", self._operations.cancel(self.id))

    async def acancel(self) -> CancelResult:
        """Async version of `cancel` that does not block the running event loop."""
        return await self._arun(self._operations.cancel(self.id))

    def retry(self) -> None:
        """Requeue the FAILED, CANCELLED or EXPIRED task to run again immediately, and reset its retry and recovery budgets.

        Raises TaskNotRetryable if the task cannot be retried, and TaskNotFound if it does not exist.
        """
        self._run("retry", self._retried())

    async def aretry(self) -> None:
        """Async version of `retry` that does not block the running event loop."""
        await self._arun(self._retried())

    def _retried(self) -> Plan[None]:
        yield from self._operations.retry(self.id)
        self._seen = None

    def _remember(self, stored: StoredOutcome) -> Completed[R_co] | Failed:
        self.name = stored.name
        return super()._remember(stored)

    def _error_of(self, stored: StoredOutcome) -> TaskError:
        error = None if stored.error is None else error_from_json(stored.error)
        match stored.state:
            case TaskState.CANCELLED:
                code = TASK_CANCELLED  # even if the code raised another error when it was cancelled
            case TaskState.EXPIRED:
                code = TASK_EXPIRED
            case _:
                return error or TaskError(
                    RESULT_NOT_AVAILABLE, f"The task is {stored.state} without an error."
                )
        if error is None:
            return TaskError(code)
        return TaskError(code, error.message, error.data, type=error.type, traceback=error.traceback)


def seen_of(handles: Sequence[Handle[R]]) -> list[Completed[R] | Failed]:
    """Return the outcomes that the handles have already cached. Sends no query."""
    return [handle._seen for handle in handles if handle._seen is not None]


def outcomes_of(handles: Sequence[Handle[R]], *, until: Deadline) -> Plan[list[Completed[R] | Failed]]:
    """Wait for the tasks to finish, and return their outcomes. At least one outcome must not be cached yet.

    A task whose result was removed is `Failed` with RESULT_NOT_STORED, so that it does not hide the other outcomes. Raises WaitTimeout if
    the deadline passes first, and TaskNotFound if a task does not exist.
    """
    unseen = {handle.id: handle for handle in handles if handle._seen is None}
    database = next(iter(unseen.values()))._database
    yield from database.announced()
    found = yield from ends_of(database.waiter, unseen, until=until)
    return [handle._seen or outcome_of(handle, found[handle.id]) for handle in handles]


def outcome_of(handle: Handle[R], stored: StoredOutcome) -> Completed[R] | Failed:
    """Return the outcome that was read for the task of a handle. A removed result is `Failed` with RESULT_NOT_STORED."""
    try:
        return handle._remember(stored)
    except ResultNotStored as problem:
        return Failed(TaskError(problem.code, f"{problem.message} Fix: {problem.fix}"))
