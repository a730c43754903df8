"""The records that tracers get about the work, and the class from which a tracer inherits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.domain.tracing.carrier import NO_CARRIER, Carrier

TraceIds: TypeAlias = tuple[str, str]
"""A trace id and a span id, in hexadecimal digits."""
CodeEnd: TypeAlias = Literal["completed", "failed", "suspended", "postponed", "cancelled", "declined"]


class TracedSend(Struct, frozen=True, kw_only=True):
    """A task that is about to be sent. `task_id` is None if the database chooses it. `size` is that of the arguments, in bytes of JSON.

    `parent_id` is the running task that sends a child.
    """

    name: str
    queue: str
    task_id: UUID | None
    size: int
    key: str | None = None
    labels: Mapping[str, str] = {}
    parent_id: UUID | None = None


class TracedWorkflow(Struct, frozen=True, kw_only=True):
    """A workflow that is about to start."""

    name: str
    workflow_id: UUID
    nodes: int
    key: str | None = None


class PreviousAttempt(Struct, frozen=True):
    """The number and the ids of an earlier attempt of the same task."""

    number: int
    trace_id: str
    span_id: str


class TracedAttempt(Struct, frozen=True, kw_only=True):
    """An attempt whose code is about to run. `size` is that of the arguments, in bytes of JSON. `carrier` is that of the task's send.

    `retried_for` are the reasons for which the task runs again if this attempt fails: codes and classes. It is empty without a retry left.
    `workflow_id` and `node` (a number) are set for tasks of a workflow, `parent_id` for children of a task, and `schedule` and `tick` for
    tasks that a schedule has sent. `limits` are the names of the limits under which the task runs. `previous` is the
    latest attempt that ended with a span and after which the task runs again.
    """

    task_id: UUID
    name: str
    queue: str
    attempt: int
    fence: int
    worker_id: str
    retry_count: int
    crash_count: int
    size: int
    due_at: datetime
    started_at: datetime | None
    sent_at: datetime | None = None
    key: str | None = None
    labels: Mapping[str, str] = {}
    workflow_id: UUID | None = None
    node: int | None = None
    parent_id: UUID | None = None
    schedule: str | None = None
    tick: datetime | None = None
    limits: tuple[str, ...] = ()
    previous: PreviousAttempt | None = None
    carrier: Carrier = NO_CARRIER
    retried_for: tuple[str, ...] = ()


class TracedEnd(Struct):
    """How the code of an attempt has ended. It is filled in when the code has ended.

    `will_retry`: the task's policy runs it again after this failure.

    `exception` is what the code raised, if it was raised in this process. `code`, `type` and `message` are those of the task's error.
    """

    how: CodeEnd | None = None
    code: str | None = None
    type: str | None = None
    message: str | None = None
    exception: BaseException | None = None
    will_retry: bool = False


class TracedRecovery(Struct, frozen=True, kw_only=True):
    """A recovery after it was committed. `started_at` is None if the code of the attempt had not started.

    `certificate` is the data of the death certificate. `action` is what recovery did: requeue, retry, reschedule, fail or cancel.
    """

    task_id: UUID
    name: str
    queue: str
    attempt: int
    fence: int
    worker_id: str
    hostname: str | None
    pid: int | None
    action: str
    cause: str
    noticed_by: str
    recovered_by: str
    started_at: datetime | None
    last_beat_at: datetime | None
    recovered_at: datetime
    workflow_id: UUID | None = None
    certificate: Mapping[str, Any] = {}
    carrier: Carrier = NO_CARRIER


class Tracer:
    """The base class of tracers. Each method does nothing. A tracer overrides those that it needs.

    everbeat calls these methods around its work, in every process that runs user code. The context managers run in the thread and with
    the context variables of the code that they surround. An exception that a method raises is logged once and otherwise ignored.
    """

    def database(self, host: str, port: int, /) -> None:
        """Note the database of an app with this tracer. Called once for each app whose URL names one server. `host` can be a path of a socket."""

    def sending(self, sends: Sequence[TracedSend], /) -> AbstractContextManager[Sequence[Carrier]]:
        """Surround the statement that sends these tasks, and give a carrier for each of them."""
        return nullcontext([NO_CARRIER] * len(sends))

    def starting(self, workflow: TracedWorkflow, /) -> AbstractContextManager[Carrier]:
        """Surround the statement that starts a workflow, and give the carrier for its tasks."""
        del workflow
        return nullcontext(NO_CARRIER)

    def running(self, attempt: TracedAttempt, end: TracedEnd, /) -> AbstractContextManager[object]:
        """Surround the code of an attempt. `end` is filled in before the context manager exits."""
        del attempt, end
        return nullcontext()

    def killed(self, attempt: TracedAttempt, end: TracedEnd, ended_at: datetime, /) -> None:
        """Note an attempt whose task process was killed after a stop, so that its `running` did not exit. Called in the worker process."""

    def step(self, name: str, /) -> AbstractContextManager[object]:
        """Surround the call of a step's function. An exception of the function passes through the context manager."""
        del name
        return nullcontext()

    def step_recorded(self, name: str, /) -> None:
        """Note that a step is not called, because an earlier attempt recorded its result."""

    def committing(self) -> AbstractContextManager[object]:
        """Surround the block of a `Context.commit`."""
        return nullcontext()

    def recovered(self, recoveries: Sequence[TracedRecovery], /) -> None:
        """Note recoveries. Called in one process of the tree, soon after each recovery was committed."""

    def ids(self) -> TraceIds | None:
        """Return the trace id and the span id for log records of the running code, in hexadecimal digits, or None."""
        return None
