"""What a task does for good: steps that a re-run does not do again, sleeps, events it waits for, children it sends.

What lives here: `DurableContext`, that half of a Context, and `NamedStep`. What may not: how records are kept and asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar, final, overload
from uuid import UUID

from msgspec import Struct, field

from everbeat.domain.backend import ContextBackend
from everbeat.domain.duration import Duration
from everbeat.domain.recorded import NewChild
from everbeat.domain.step_asking import (
    aread_records,
    arun_step,
    child_id,
    child_of,
    event_of,
    known_child,
    known_wait,
    read_records,
    run_step,
    sleep_of,
    wait_of,
)
from everbeat.domain.step_book import StepBook, checked_name, name_of, require_callable
from everbeat.domain.stops import TaskStopped

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H_co = TypeVar("H_co", covariant=True)


class ChildCall(Protocol[H_co]):
    """A call that a running task can send as its child: what `task.call(...)` gives."""

    def as_child(self) -> NewChild: ...

    def child_handle(self, task_id: UUID, /) -> H_co: ...


class DurableContext(Struct, frozen=True, kw_only=True, eq=False):
    """The half of a Context that is about what is done for good."""

    task_id: UUID
    name: str
    attempt: int
    backend: ContextBackend
    book: StepBook = field(default_factory=StepBook)

    def check_cancelled(self) -> None:
        """Raises TaskStopped when the task should stop; call it now and then in threads, which nobody can
        interrupt.
        """
        reason = self.backend.stop_reason()
        if reason is not None:
            raise TaskStopped(reason, task_id=self.task_id)

    def named(self, name: str, /) -> NamedStep:
        """The next step under a name of its own, in place of the function's.

        ctx.named("deposit").step(charge, order, 1_000)
        """
        return NamedStep(self, checked_name(name, what="a step", task_name=self.name))

    def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function and records what it returns; a re-run of the task is given that, without a call.

        Steps are told apart by the function's name, and by their order where it is used again. What it raises is not recorded.
        Raises PayloadError for a result that its annotation, JSON or 1 MB cannot carry, TaskStopped when the task should end,
        BlockingCallInLoop on an event loop, a DatabaseError.

        payment = ctx.step(charge, order)
        """
        return run_step(self, name_of(fn, task_name=self.name), fn, args, kwargs)

    @overload
    async def astep(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def astep(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def astep(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As `step`, to await; the function may be async, and one that is not runs in a thread."""
        return await arun_step(self, name_of(fn, task_name=self.name), fn, args, kwargs)

    def sleep(self, duration: Duration, /) -> None:
        """Sleeps, also through a re-run: its end is set once, by the database's clock. Sleeps above 5 s hold no slot meanwhile.

        Raises TaskSuspended to give the slot back, TaskStopped when the task should end, ConfigurationError for what is no length of
        time, BlockingCallInLoop on an event loop, a DatabaseError.

        ctx.sleep("3d")
        """
        self.backend.refuse_in_loop("Context.sleep", instead="await Context.asleep(...)")
        question = sleep_of(self, duration)
        read_records(self)
        self.check_cancelled()
        if self.book.find("sleep", question.name) is None:
            self.backend.ask_step(question)
            self.check_cancelled()

    async def asleep(self, duration: Duration, /) -> None:
        """As `sleep`, to await."""
        question = sleep_of(self, duration)
        await aread_records(self)
        self.check_cancelled()
        if self.book.find("sleep", question.name) is None:
            await self.backend.aask_step(question)
            self.check_cancelled()

    @overload
    def wait_event(self, name: str, /, *, timeout: Duration | None = None, type: type[T]) -> T: ...
    @overload
    def wait_event(self, name: str, /, *, timeout: Duration | None = None, type: Any = Any) -> Any: ...
    def wait_event(self, name: str, /, *, timeout: Duration | None = None, type: Any = Any) -> Any:  # noqa: A002
        """The value of the next signal of this name to this task, or to its workflow; holds no slot while it waits.

        Raises EventTimeout (a TaskError, EVENT_TIMEOUT) after `timeout`, which counts from the first time this was asked; PayloadError
        for a value that is not of the `type`; TaskSuspended to give the slot back, TaskStopped, BlockingCallInLoop, a DatabaseError.

        answer = ctx.wait_event("approved", timeout="7d", type=bool)
        """
        self.backend.refuse_in_loop("Context.wait_event", instead="await Context.await_event(...)")
        question = wait_of(self, name, timeout, type)
        read_records(self)
        self.check_cancelled()
        answer = known_wait(self, question) or self.backend.ask_step(question)
        return event_of(self, question, answer, type)

    @overload
    async def await_event(self, name: str, /, *, timeout: Duration | None = None, type: type[T]) -> T: ...
    @overload
    async def await_event(self, name: str, /, *, timeout: Duration | None = None, type: Any = Any) -> Any: ...
    async def await_event(self, name: str, /, *, timeout: Duration | None = None, type: Any = Any) -> Any:  # noqa: A002
        """As `wait_event`, to await."""
        question = wait_of(self, name, timeout, type)
        await aread_records(self)
        self.check_cancelled()
        answer = known_wait(self, question) or await self.backend.aask_step(question)
        return event_of(self, question, answer, type)

    def send(self, call: ChildCall[H_co], /) -> H_co:
        """Sends a task as a child of this one: once, however often this one is run again; cancelled with it. Returns its Handle.

        Raises PayloadError for what is no call, TaskStopped when the task should end, BlockingCallInLoop, a DatabaseError.

        handle = ctx.send(measure.call(film))
        """
        self.backend.refuse_in_loop("Context.send", instead="await Context.asend(...)")
        question = child_of(self, call)
        read_records(self)
        self.check_cancelled()
        return call.child_handle(known_child(self, question) or child_id(self.backend.ask_step(question)))

    async def asend(self, call: ChildCall[H_co], /) -> H_co:
        """As `send`, to await."""
        question = child_of(self, call)
        await aread_records(self)
        self.check_cancelled()
        return call.child_handle(
            known_child(self, question) or child_id(await self.backend.aask_step(question))
        )


@final
class NamedStep(Struct, frozen=True):
    """The next step of a task, under a name of its own: made by `Context.named`."""

    context: DurableContext
    name: str

    def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As `Context.step`."""
        require_callable(fn, task_name=self.context.name)
        return run_step(self.context, self.name, fn, args, kwargs)

    @overload
    async def astep(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def astep(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def astep(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As `Context.astep`."""
        require_callable(fn, task_name=self.context.name)
        return await arun_step(self.context, self.name, fn, args, kwargs)
