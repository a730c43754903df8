"""The requests that a Context sends to the process that is running it, the replies, and the records of steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar, final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.task.checkpoint import Checkpoint
from everbeat.domain.tracing.tracing import Tracing
from everbeat.errors import StopReason, TaskError, TaskSuspended

RESULT: Final = "completion.result"
"""The value of `parameter` in the error for a result that cannot be stored."""


@final
class Completion(Struct):
    """Holds the task's result, which is stored when the transaction is committed. Set `result` inside the `with` block."""

    result: Any = None


class TaskCommit(Protocol):
    """A transaction as a context manager: `with` for sync connections, `async with` for async ones."""

    def __enter__(self) -> Completion: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def __aenter__(self) -> Completion: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


StepKind: TypeAlias = Literal["step", "sleep", "event", "child"]
StepState: TypeAlias = Literal["OPEN", "DONE", "TIMED_OUT"]

RECORD_LIMIT_BYTES: Final = 1_048_576
"""The maximum JSON size, in bytes, of a step's result or a signal's value. Every later attempt reads all of these values."""


class Recorded(Struct, frozen=True, array_like=True):
    """One step record of a task. `result` is JSON text. `left_ms` is the remaining time of a sleep when the record was read.

    `digest` is the digest of the arguments of a step or child. A record without a digest matches any arguments.
    """

    kind: StepKind
    name: str
    state: StepState
    result: str | None
    left_ms: float | None
    digest: str | None = None


class FailedTry(Struct, frozen=True):
    """The last failed try of a step, and the number of the retry that follows it.

    `code`, `message` and `type` (the name of the exception class) have the same meaning as in a task's error.
    """

    step: str
    retry: int
    max_retries: int
    code: str
    message: str
    type: str

    @property
    def error(self) -> TaskError:
        """Return the exception in the form of a task's error."""
        return TaskError(self.code, self.message, type=self.type)


class NewChild(Struct, frozen=True, kw_only=True):
    """A child task to send. `args`, `policy`, `flags`, `labels` and `context` are JSON text. `digest` is the digest of the arguments.

    `gates` and `costs` are the texts of arrays.
    """

    name: str
    queue: str
    priority: int
    args: str
    key: str | None = None
    policy: str | None = None
    flags: str | None = None
    good_until: datetime | None = None
    serial: str | None = None
    digest: str | None = None
    gates: str | None = None
    costs: str | None = None
    labels: str | None = None
    context: str | None = None


class ChildEnd(Struct, frozen=True, array_like=True):
    """The outcome of a child. `result` and `error` are JSON text, and `missing` says why a completed child has no result.

    `state` is None if the child was deleted. It is not terminal if an operator has retried the child.
    """

    state: str | None
    result: str | None = None
    error: str | None = None
    missing: Literal["ignored", "removed"] | None = None


class NewWorkflow(Struct, frozen=True, kw_only=True):
    """A workflow that a running task starts. `graph` is JSON text, and `digest` is the digest of the workflow's arguments.

    `largest` is the maximum JSON size, in bytes, of one node's arguments.
    """

    name: str
    graph: str
    key: str | None = None
    largest: int | None = None
    digest: str | None = None


def is_suspension(exception: BaseException) -> bool:
    """Return whether the exception is a suspension, or an exception group that contains only suspensions.

    Checks the class itself, because a user's exception class might override `isinstance`.
    """
    pending = [exception]
    while pending:
        each = pending.pop()
        if issubclass(type(each), BaseExceptionGroup):
            pending.extend(BaseExceptionGroup.exceptions.__get__(each))
        elif not issubclass(type(each), TaskSuspended):
            return False
    return True


T = TypeVar("T")


class Question(Struct, frozen=True, tag=True, array_like=True):
    """Base class of the requests that running code sends about its steps."""


class LoadSteps(Question, frozen=True):
    """A request to load the records of earlier attempts that follow the (kind, name) in `after`."""

    after: tuple[str, str]


class RecordStep(Question, frozen=True):
    """A request to record the result of a step, as JSON text, with the digest of the step's arguments."""

    name: str
    result: str
    digest: str | None = None


class Sleep(Question, frozen=True):
    """A request to sleep until `duration_ms` after the sleep was first requested. `failed` is the failed try before the sleep, if any."""

    name: str
    duration_ms: int
    failed: FailedTry | None = None


class WaitForEvent(Question, frozen=True):
    """A request for the next signal of `event`. `name` is the wait's name. The timeout is measured from the first request for the wait.

    `question` describes, as JSON text, what a person is to answer. It is None for other events.
    """

    name: str
    event: str
    timeout_ms: int | None
    question: str | None = None


class SendChild(Question, frozen=True):
    """A request to send a child task. The child is sent only once per name in the parent.

    If `in_batch` is set, the child belongs to the batch of its parent. The answer has no id if there is no batch.
    """

    name: str
    child: NewChild
    in_batch: bool = False


class SendChildren(Question, frozen=True):
    """A request to send a portion of the children of a gather. Each child is sent only once, because its id does not change.

    `batch_id` is the gather's id, and `digest` the digest of all its calls. After the last portion, the gather has no further children.
    """

    name: str
    batch_id: UUID
    ids: tuple[UUID, ...]
    children: tuple[NewChild, ...]
    digest: str
    is_last: bool


class JoinChildren(Question, frozen=True):
    """A request to wait until all children of a gather have ended."""

    name: str
    batch_id: UUID


class ListChildren(Question, frozen=True):
    """A request for the outcomes of ended children. The answer contains at least the first one."""

    ids: tuple[UUID, ...]


class StartWorkflow(Question, frozen=True):
    """A request to start a workflow. The workflow is started only once per name in the task."""

    name: str
    workflow: NewWorkflow


class OpenStreams(Question, frozen=True):
    """A request for the streams that earlier attempts have begun, with the numbers of their last items."""


class StoreItems(Question, frozen=True):
    """A request to store all items that the code has emitted so far. The reply comes once they are stored."""


StepQuestion: TypeAlias = (
    LoadSteps
    | RecordStep
    | Sleep
    | WaitForEvent
    | SendChild
    | SendChildren
    | JoinChildren
    | ListChildren
    | StartWorkflow
    | OpenStreams
    | StoreItems
)


class EmittedItem(Struct, frozen=True, array_like=True):
    """One item that running code has emitted. `value` is JSON text."""

    name: str
    number: int
    value: str


class StreamInfo(Struct, frozen=True):
    """A stream of a task. `items` is the number of its items, which is also the number of the last one."""

    name: str
    items: int


class StepAnswer(Struct, frozen=True, array_like=True):
    """The worker's reply to one request.

    The reply contains a page of records and the key of the next page. For a wait, it contains the state, and the value as JSON
    text. For a child task or a workflow, the reply contains the id. For `OpenStreams`, it contains the streams.
    For a list of children, it contains their outcomes.
    """

    records: tuple[Recorded, ...] = ()
    next_after: tuple[str, str] | None = None
    state: StepState = "DONE"
    value: str | None = None
    child: UUID | None = None
    streams: tuple[StreamInfo, ...] = ()
    ends: tuple[ChildEnd, ...] = ()


class ContextBackend(Protocol):
    """The interface between a Context and its process.

    Any thread can call `report_progress`, `emit` and `stop_reason`, so they must not block.
    """

    @property
    def tracing(self) -> Tracing | None:
        """Return the tracers of the app, or None if it has none."""
        ...

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None: ...

    def emit(self, draw: Callable[[], EmittedItem]) -> EmittedItem:
        """Draw an item, store it soon, and return it. Items of several threads are drawn and stored in the same order."""
        ...

    def stop_reason(self) -> StopReason | None: ...

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        """Raise BlockingCallInLoop if an event loop is running in this thread."""
        ...

    def store(self, checkpoint: Checkpoint) -> None:
        """Store the checkpoint. Raises TaskStopped if it can no longer be stored, and DatabaseError if the database fails."""
        ...

    async def astore(self, checkpoint: Checkpoint) -> None: ...

    def commit(self, connection: object) -> TaskCommit: ...

    def ask_step(self, question: StepQuestion) -> StepAnswer:
        """Return the worker's reply.

        Raises TaskStopped if the task should stop, TaskSuspended to release the slot, and DatabaseError if the database fails.
        """
        ...

    async def aask_step(self, question: StepQuestion) -> StepAnswer: ...

    def strand(self) -> int:
        """Return a number that identifies the calling asyncio task or thread."""
        ...

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run a call in a thread with the current context variables, and return its result."""
        ...

    async def in_time(self, awaitable: Awaitable[T], *, timeout_s: float, late: str) -> T:
        """Return the result of the awaitable. After `timeout_s` seconds, cancel it and raise TimeoutError with the message `late`."""
        ...
