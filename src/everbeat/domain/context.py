"""What a running task may know about itself and say to its worker.

What lives here: `Context`. It lies in this room because both workers make it and clients write it into
signatures. What may not live here: how progress is stored and how a cancel arrives, steps and sleeps (`durable`).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar, final
from uuid import UUID

from msgspec import field

from everbeat.domain.backend import ContextBackend as ContextBackend
from everbeat.domain.checkpoint import Checkpoint, PartialWork, Steps
from everbeat.domain.commit import TaskCommit
from everbeat.domain.durable import DurableContext
from everbeat.domain.steps import require_items, share_of
from everbeat.domain.stops import OutsideTask as OutsideTask
from everbeat.domain.stops import OutsideWorker as OutsideWorker
from everbeat.domain.stops import StopReason as StopReason
from everbeat.domain.stops import TaskStopped as TaskStopped
from everbeat.domain.stops import TaskSuspended as TaskSuspended
from everbeat.errors import EverbeatError

T = TypeVar("T")

_current: ContextVar[Context] = ContextVar("everbeat_context")


@final
class Context(DurableContext, frozen=True, kw_only=True, eq=False):
    """The attempt that is running: annotate a task's first parameter with it, or call `Context.current()`.

    `attempt` counts from 1. `fence` grows with every claim of the task: write `WHERE last_fence < fence`
    outside everbeat to refuse an old attempt. `deadline` is when the timeout ends, in UTC by the database's
    clock.
    """

    queue: str
    fence: int
    claim_id: UUID
    worker_id: str
    deadline: datetime | None = None
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
