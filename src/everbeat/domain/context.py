"""What a running task may know about itself and say to its worker.

What lives here: `Context`, the errors of using it, and what it needs from a worker. It lies in this room
because both workers make it and clients write it into signatures. What may not live here: how progress is
stored and how a cancel arrives.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from itertools import islice
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar, final
from uuid import UUID

from msgspec import Struct, field

from everbeat.domain.checkpoint import Checkpoint, PartialWork, Steps
from everbeat.domain.commit import TaskCommit
from everbeat.domain.steps import require_items, share_of
from everbeat.errors import EverbeatError

T = TypeVar("T")

StopReason: TypeAlias = Literal["cancelled", "lease_lost", "timed_out", "stalled", "shutting_down"]

_WHY: Final[dict[StopReason, str]] = {
    "cancelled": "somebody asked for it to be cancelled",
    "lease_lost": "its lease was lost, so another attempt may be running and this one can change nothing",
    "timed_out": "it ran longer than its timeout",
    "stalled": "it reported no progress for its stall_timeout",
    "shutting_down": "its worker is shutting down and hands it back",
}


class TaskStopped(BaseException):
    """Raised by `Context.check_cancelled` when the task should end; `reason` says why.

    Not an Exception, for the reason asyncio.CancelledError is none: an `except Exception` in the task must
    not swallow it.
    """

    def __init__(self, reason: StopReason, *, task_id: UUID | None = None) -> None:
        super().__init__(reason)
        self.reason: StopReason = reason
        self.task_id = task_id

    def __str__(self) -> str:
        return f"Task {self.task_id} should stop: {_WHY[self.reason]}."


class OutsideTask(EverbeatError):
    """`Context.current()` was called where no task runs."""

    code = "OUTSIDE_TASK"

    def __init__(self) -> None:
        super().__init__(
            "No task runs here, so there is no current Context.",
            fix="call it inside a task; a thread that a task starts itself needs the Context passed to it, "
            "or contextvars.copy_context().run(...).",
        )


class ContextBackend(Protocol):
    """What a Context needs from whoever runs the code. `report_progress` and `stop_reason` are called from any
    thread and must not block.
    """

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None: ...

    def stop_reason(self) -> StopReason | None: ...

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        """Raises BlockingCallInLoop where an event loop runs in this thread."""
        ...

    def store(self, checkpoint: Checkpoint) -> None:
        """Returns when it is stored. Raises TaskStopped where that cannot be any more, a DatabaseError."""
        ...

    async def astore(self, checkpoint: Checkpoint) -> None: ...

    def commit(self, connection: object) -> TaskCommit: ...


_current: ContextVar[Context] = ContextVar("everbeat_context")


@final
class Context(Struct, frozen=True, kw_only=True, eq=False):
    """The attempt that is running: annotate a task's first parameter with it, or call `Context.current()`.

    `attempt` counts from 1. `fence` grows with every claim of the task: write `WHERE last_fence < fence`
    outside everbeat to refuse an old attempt. `deadline` is when the timeout ends, in UTC by the database's
    clock.
    """

    task_id: UUID
    name: str
    queue: str
    attempt: int
    fence: int
    claim_id: UUID
    worker_id: str
    deadline: datetime | None = None
    backend: ContextBackend
    work: PartialWork = field(default_factory=PartialWork)

    def __repr__(self) -> str:
        return f"<Context of attempt {self.attempt} of task {self.name!r} {self.task_id}, fence {self.fence}>"

    @staticmethod
    def current() -> Context:
        """The Context of the task that runs here; raises OutsideTask elsewhere."""
        context = _current.get(None)
        if context is None:
            raise OutsideTask
        return context

    @staticmethod
    def current_or_none() -> Context | None:
        """The Context of the task that runs here, or None elsewhere."""
        return _current.get(None)

    @classmethod
    def detached(cls, *, task_id: UUID, name: str, queue: str, backend: ContextBackend) -> Context:
        """A Context of no attempt, for a task function that is called directly."""
        return cls(
            task_id=task_id,
            name=name,
            queue=queue,
            attempt=1,
            fence=0,
            claim_id=UUID(int=0),
            worker_id="",
            backend=backend,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes this the current Context of the block; a worker runs the task's code inside it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def progress(self, stage: str, fraction: float | None = None, message: str = "") -> None:
        """Says how far the task is, which also counts as a sign of life; fractions are cut to 0..1, NaN
        means unknown. Raises PayloadError for a stage that is no text and a fraction that is no number.

        ctx.progress("resize", n / total, f"frame {n}")
        """
        share = share_of(stage, fraction, task_name=self.name)
        self.backend.report_progress(stage=stage, fraction=share, message=str(message))

    @property
    def cancelled(self) -> bool:
        """Whether the task should stop: cancelled, timed out, stalled, its lease lost, or its worker
        shutting down.
        """
        return self.backend.stop_reason() is not None

    def check_cancelled(self) -> None:
        """Raises TaskStopped when the task should stop; call it now and then in threads, which nobody can
        interrupt.
        """
        reason = self.backend.stop_reason()
        if reason is not None:
            raise TaskStopped(reason, task_id=self.task_id)

    @property
    def last_checkpoint(self) -> Any:
        """The value of the latest checkpoint of this task, in whichever attempt, as plain JSON; None before the first."""
        return self.work.last

    def checkpoint(self, value: object) -> None:
        """Stores what the next attempt needs to go on from here, and returns when it is stored; also a sign of life.

        Raises PayloadError for what JSON would not bring back equal (a tuple may come back as a list) or takes more
        than 1 MB (nothing is stored then), TaskStopped when the task should end, BlockingCallInLoop on an event loop, a DatabaseError.
        """
        self.backend.refuse_in_loop("Context.checkpoint", instead="await Context.acheckpoint(...)")
        checkpoint = self.work.checkpoint(value, task_name=self.name)
        try:
            self.backend.store(checkpoint)
        except EverbeatError:
            self.work.take_back(checkpoint)
            raise
        self.check_cancelled()

    async def acheckpoint(self, value: object) -> None:
        """As `checkpoint`, to await."""
        checkpoint = self.work.checkpoint(value, task_name=self.name)
        try:
            await self.backend.astore(checkpoint)
        except EverbeatError:
            self.work.take_back(checkpoint)
            raise
        self.check_cancelled()

    def resume(self, name: str, items: Iterable[T], /) -> Iterator[T]:
        """Those of the items that no earlier attempt has done, in their order, which must be the same each time.

        A step is done when the loop's body comes back for the next: that stores it, reports progress, and raises
        TaskStopped when the task should end. Raises what `checkpoint` raises.

        for frame in ctx.resume("frame", range(1000)): ...
        """
        self.backend.refuse_in_loop("Context.resume", instead="write 'async for ... in Context.aresume(...)'")
        steps = self._steps(name, items)
        require_items(items, name=name, task_name=self.name)
        return self._resumed(steps, items)

    def aresume(self, name: str, items: Iterable[T] | AsyncIterable[T], /) -> AsyncIterator[T]:
        """As `resume`, for `async for`."""
        steps = self._steps(name, items)
        if not isinstance(items, AsyncIterable):
            require_items(items, name=name, task_name=self.name)
        return self._aresumed(steps, items)

    def commit(self, connection: object) -> TaskCommit:
        """One transaction for the user's rows and the task's completion: both are there, or neither.

        `connection` leads to the database of the tasks: psycopg, asyncpg, psycopg2, or a connection or session of
        SQLAlchemy over one of them. Raises CommitRefused for another; TaskStopped, with everything rolled back,
        when the lease was lost. Code after the block changes nothing of the task any more.

        with ctx.commit(connection) as completion: ...
        """
        return self.backend.commit(connection)

    def _steps(self, name: str, items: object) -> Steps:
        total = len(items) if isinstance(items, Sized) else None
        return self.work.steps(name, total=total, task_name=self.name)

    def _resumed(self, steps: Steps, items: Iterable[T]) -> Iterator[T]:
        self.check_cancelled()
        for item in islice(items, steps.done, None):
            yield item
            self.backend.store(self._counted(steps))
            self.check_cancelled()
        steps.finish()

    async def _aresumed(self, steps: Steps, items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
        self.check_cancelled()
        async for item in _undone(items, steps.done):
            yield item
            await self.backend.astore(self._counted(steps))
            self.check_cancelled()
        steps.finish()

    def _counted(self, steps: Steps) -> Checkpoint:
        checkpoint = steps.count()
        self.progress(steps.name, steps.fraction, steps.message)
        return checkpoint


def enter(context: Context) -> None:
    """Makes this the current Context for as long as the current `contextvars` context is in use."""
    _current.set(context)


async def _undone(items: Iterable[T] | AsyncIterable[T], done: int) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        index = 0
        async for item in items:
            if index >= done:
                yield item
            index += 1
    else:
        for item in islice(items, done, None):
            yield item
