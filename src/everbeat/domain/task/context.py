"""The Context of a running attempt: its identity, progress, checkpoints, steps, child tasks and commits."""

from __future__ import annotations

from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, ParamSpec, Protocol, TypeVar, cast, final, overload
from uuid import UUID

from msgspec import Struct, field

from everbeat.domain.labels import NO_LABELS, require_room
from everbeat.domain.settings.checks import public
from everbeat.domain.settings.settings import shown
from everbeat.domain.settings.units import Duration
from everbeat.domain.task.asking import AskMethods
from everbeat.domain.task.checkpoint import Checkpoint, PartialWork, Steps, require_items, share_of
from everbeat.domain.task.context_backend import ContextBackend, NewWorkflow, TaskCommit
from everbeat.domain.task.current import AttemptLogger, current_attempt, current_log, make_current
from everbeat.domain.task.gather_methods import GatherMethods
from everbeat.domain.task.retry import RetryPolicy
from everbeat.domain.task.step_runner import StepPlan, StepRunner
from everbeat.domain.task.steps import StepBook, StepOptions, checked_name, name_of, require_callable
from everbeat.domain.task.streams import StreamBook, StreamMethods
from everbeat.domain.task.task_batch import ChildCall, TaskBatch
from everbeat.errors import EverbeatError, NonDeterministic, OutsideTask, PayloadError, StopReason

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H_co = TypeVar("H_co", covariant=True)


class StartableWorkflow(Protocol[H_co]):
    """A workflow that a running task can start.

    It is the result of `definition.call(...)` or `wf.call(...)`, or a `Workflow` without an output.
    """

    def _as_started_by(self, task_name: str, labels: Mapping[str, str], /) -> NewWorkflow: ...

    def _handle_of(self, workflow_id: UUID, /) -> H_co: ...


@public
@final
class Context(Struct, StreamMethods, AskMethods, GatherMethods, frozen=True, kw_only=True, eq=False):
    """The running attempt of a task.

    To get the Context, annotate the task function's first parameter with `Context`, or call `Context.current()`.

    `attempt` counts from 1. `fence` increases with every claim of the task, so the condition `WHERE last_fence < fence` on a write to
    another system rejects writes from outdated attempts. `deadline` is the time at which the timeout expires, in UTC by the database's
    clock. `tick` is the moment of the schedule for which the task was sent, in UTC, or None if it was sent otherwise.
    `retries_left` is the number of retries that are left if this attempt fails, or None without a retry policy. `labels` are the task's
    labels, which its child tasks and workflows inherit. Every blocking method has an async counterpart whose name begins with `a`.
    """

    task_id: UUID
    name: str
    queue: str
    attempt: int
    fence: int
    claim_id: UUID
    worker_id: str
    deadline: datetime | None = None
    tick: datetime | None = None
    retries_left: int | None = None
    labels: Mapping[str, str] = NO_LABELS
    _backend: ContextBackend
    _work: PartialWork = field(default_factory=PartialWork)
    _book: StepBook = field(default_factory=StepBook)
    _streams: StreamBook = field(default_factory=StreamBook)

    def __repr__(self) -> str:
        return f"<Context of attempt {self.attempt} of task {self.name!r} {self.task_id}, fence {self.fence}>"

    @staticmethod
    def current() -> Context:
        """Return the Context of the current task. Raises OutsideTask if the code does not run in a task."""
        context = Context.current_or_none()
        if context is None:
            raise OutsideTask
        return context

    @staticmethod
    def current_or_none() -> Context | None:
        """Return the Context of the current task, or None if the code does not run in a task."""
        return cast("Context | None", current_attempt())

    def progress(self, stage: str, fraction: float | None = None, message: str = "") -> None:
        """Report the progress of the task. A report also shows that the code is still alive, so it restarts the stall timeout.

        `fraction` is clamped to 0..1; None and NaN mean unknown. Raises PayloadError if `stage` is not a string or `fraction` is not a
        number.

        ctx.progress("resize", n / total, f"frame {n}")
        """
        share = share_of(stage, fraction, task_name=self.name)
        self._backend.report_progress(stage=stage, fraction=share, message=str(message))

    @property
    def cancelled(self) -> bool:
        """Return whether the task should stop because of cancellation, a timeout, a stall, a lost lease, or the worker's shutdown."""
        return self._backend.stop_reason() is not None

    def _trace_ids(self) -> tuple[str, str] | None:
        tracing = self._backend.tracing
        return None if tracing is None else tracing.ids()

    def check_cancelled(self) -> None:
        """Raise TaskStopped if the task should stop.

        Call this method regularly in tasks that run in threads, because threads cannot be interrupted.
        """
        self._steps.check_cancelled()

    @property
    def last_checkpoint(self) -> Any:
        """Return the value of the task's last checkpoint, from any attempt, as plain JSON values. Return None if there is no checkpoint."""
        return self._work.last

    def checkpoint(self, value: object) -> None:
        """Store the state from which a later attempt can continue, and return once it is stored. Also restarts the stall timeout.

        Raises PayloadError, and stores nothing, if JSON would change the value (tuples may become lists) or the value exceeds 1 MB.
        Raises TaskStopped if the task should stop, BlockingCallInLoop on an event loop, and DatabaseError if the database fails.

        ctx.checkpoint({"page": 17})
        """
        self._backend.refuse_in_loop("Context.checkpoint", instead="await Context.acheckpoint(...)")
        with self._checkpointed(value) as checkpoint:
            self._backend.store(checkpoint)

    async def acheckpoint(self, value: object) -> None:
        """Async version of `checkpoint` that does not block the running event loop."""
        with self._checkpointed(value) as checkpoint:
            await self._backend.astore(checkpoint)

    @contextmanager
    def _checkpointed(self, value: object) -> Iterator[Checkpoint]:
        checkpoint = self._work.checkpoint(value, task_name=self.name)
        try:
            yield checkpoint
        except EverbeatError:
            self._work.take_back(checkpoint)
            raise
        self.check_cancelled()

    def resume(self, name: str, items: Iterable[T], /) -> Iterator[T]:
        """Iterate over the items that no earlier attempt has finished. Each attempt must pass the items in the same order.

        An item is finished when the loop requests the next one. `resume` then stores the number of finished items and reports progress.
        Raises the same errors as `checkpoint`, such as TaskStopped if the task should stop.

        for frame in ctx.resume("frame", range(1000)): ...
        """
        self._backend.refuse_in_loop(
            "Context.resume", instead="write 'async for ... in Context.aresume(...)'"
        )
        steps = self._resumable(name, items)
        require_items(items, name=name, task_name=self.name)
        return self._resumed(steps, items)

    def aresume(self, name: str, items: Iterable[T] | AsyncIterable[T], /) -> AsyncIterator[T]:
        """Async version of `resume`, for use with `async for`. `items` can also be an async iterable."""
        steps = self._resumable(name, items)
        if not isinstance(items, AsyncIterable):
            require_items(items, name=name, task_name=self.name)
        return self._aresumed(steps, items)

    def _resumable(self, name: str, items: object) -> Steps:
        total = len(items) if isinstance(items, Sized) else None
        return self._work.steps(name, total=total, task_name=self.name)

    def _resumed(self, steps: Steps, items: Iterable[T]) -> Iterator[T]:
        self.check_cancelled()
        for item in islice(items, steps.done, None):
            yield item
            self._backend.store(self._counted(steps))
            self.check_cancelled()
        steps.finish()

    async def _aresumed(self, steps: Steps, items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
        self.check_cancelled()
        async for item in _remaining(items, steps.done):
            yield item
            await self._backend.astore(self._counted(steps))
            self.check_cancelled()
        steps.finish()

    def _counted(self, steps: Steps) -> Checkpoint:
        checkpoint = steps.count()
        self.progress(steps.name, steps.fraction, steps.message)
        return checkpoint

    def commit(self, connection: object) -> TaskCommit:
        """Complete the task in the same transaction as your own rows: both are committed, or neither is.

        `connection` must be a psycopg, asyncpg or psycopg2 connection to the database that stores the tasks. It can also be an SQLAlchemy
        connection or session that uses one of these drivers. Code after the `with` block cannot change the outcome of the task. Raises
        CommitRefused for any other connection. If the task has lost its lease, raises TaskStopped and rolls everything back.

        with ctx.commit(connection) as completion: ...
        """
        self._book.require_deterministic()
        return self._backend.commit(connection)

    def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, record its result, and return it. Later attempts return the recorded result without calling the function.

        A step is identified by its function's name and, if the name is used several times, by its position. Exceptions are not recorded.
        Raises PayloadError if the result does not match its annotation, cannot be represented in JSON, or exceeds 1 MB. Raises
        TaskStopped if the task should stop, BlockingCallInLoop on an event loop, and DatabaseError if the database fails.

        payment = ctx.step(charge, order)
        """
        return self._steps.run_step(name_of(fn, task_name=self.name), fn, args, kwargs)

    @overload
    async def astep(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def astep(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def astep(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Async version of `step`. An async function runs on the running event loop, and a sync function runs in a thread."""
        return self._steps.arun_step(name_of(fn, task_name=self.name), fn, args, kwargs)

    def named(self, name: str, /) -> NamedStep:
        """Return an object that runs the next step, or starts the next workflow, under this name.

        ctx.named("deposit").step(charge, order, 1_000)
        """
        return NamedStep(self, checked_name(name, owner=f"a step in task {self.name!r}"))

    def with_options(
        self, *, name: str | None = None, retry: RetryPolicy | None = None, timeout: Duration | None = None
    ) -> NamedStep:
        """Return an object that runs the next step with its own name, retry policy or timeout.

        `retry`: call the function again after an exception that the policy lists. A delay of more than 5 s occupies no worker slot.
        `timeout`: if one try takes longer, cancel the async function and raise TimeoutError. Raises PayloadError or ConfigurationError if
        an option is invalid.

        await ctx.with_options(retry=RetryPolicy(auto_retry_for=[TimeoutError]), timeout="10s").astep(charge, order)
        """
        checked = None if name is None else checked_name(name, owner=f"a step in task {self.name!r}")
        return NamedStep(self, checked, StepOptions.checked(retry=retry, timeout=timeout))

    def sleep(self, duration: Duration, /) -> None:
        """Sleep for the given duration, but only once across all attempts. A sleep of more than 5 s occupies no worker slot.

        The first attempt that sleeps fixes the end time, by the database's clock. Raises TaskSuspended to release the slot, and
        ConfigurationError if the duration is invalid. Raises TaskStopped if the task should stop, BlockingCallInLoop on an event loop,
        and DatabaseError if the database fails.

        ctx.sleep("3d")
        """
        self._steps.run("sleep", self._steps.sleep(duration))

    async def asleep(self, duration: Duration, /) -> None:
        """Async version of `sleep` that does not block the running event loop."""
        await self._steps.arun(self._steps.sleep(duration))

    @overload
    def wait_event(self, name: str, /, *, timeout: Duration | None = None, type: type[T]) -> T: ...
    @overload
    def wait_event(self, name: str, /, *, timeout: Duration | None = None, type: Any = Any) -> Any: ...
    def wait_event(self, name: str, /, *, timeout: Duration | None = None, type: Any = Any) -> Any:  # noqa: A002
        """Wait for the next signal with this name that is sent to this task or its workflow, and return its value.

        The wait occupies no worker slot. `timeout` is measured from the start of the first wait. Raises EventTimeout if it expires,
        PayloadError if the value does not match `type`, and TaskSuspended to release the slot. Raises TaskStopped if the task should stop,
        BlockingCallInLoop on an event loop, and DatabaseError if the database fails.

        answer = ctx.wait_event("approved", timeout="7d", type=bool)
        """
        return self._steps.run("wait_event", self._steps.wait_event(name, timeout, type))

    @overload
    async def await_event(self, name: str, /, *, timeout: Duration | None = None, type: type[T]) -> T: ...
    @overload
    async def await_event(self, name: str, /, *, timeout: Duration | None = None, type: Any = Any) -> Any: ...
    async def await_event(self, name: str, /, *, timeout: Duration | None = None, type: Any = Any) -> Any:  # noqa: A002
        """Async version of `wait_event` that does not block the running event loop."""
        return await self._steps.arun(self._steps.wait_event(name, timeout, type))

    def send(self, call: ChildCall[H_co], /) -> H_co:
        """Send a child task and return its Handle. The child is sent only once across all attempts, and is cancelled with this task.

        Raises PayloadError if the value is not a call. Raises TaskStopped if the task should stop, BlockingCallInLoop on an event loop, and
        DatabaseError if the database fails.

        handle = ctx.send(measure.call(film))
        """
        return self._steps.run("send", self._sent(call))

    async def asend(self, call: ChildCall[H_co], /) -> H_co:
        """Async version of `send` that does not block the running event loop."""
        return await self._steps.arun(self._sent(call))

    @property
    def batch(self) -> TaskBatch:
        """Return the batch to which this task belongs, so that the task can add tasks to it. Sends no query.

        ctx.batch.send(load.call(row))
        """
        return TaskBatch(self._steps, self._sent)

    def _sent(self, call: ChildCall[H_co], *, in_batch: bool = False) -> StepPlan[H_co]:
        if not hasattr(call, "_as_child"):
            raise PayloadError(
                f"{shown(call)} cannot be sent by task {self.name!r}: it is of type {type(call).__name__}, not a call of a task.",
                parameter="call",
                fix="make it with task.call(...).",
            )
        child = call._as_child()
        require_room(self.labels, child.labels, owner=f"Child task {child.name!r} of task {self.name!r}")
        return call._handle_of((yield from self._steps.send(child, in_batch=in_batch)))

    def start(self, workflow: StartableWorkflow[H_co], /) -> H_co:
        """Start a workflow and return its handle. The workflow starts only once across all attempts, and is cancelled with this task.

        Raises PayloadError if the value is not a workflow of this app, and ConfigurationError if the workflow is invalid. Raises
        TaskStopped if the task should stop, BlockingCallInLoop on an event loop, and DatabaseError if the database fails.

        handle = ctx.start(order.call(17))
        """
        return self._steps.run("start", self._started(workflow))

    async def astart(self, workflow: StartableWorkflow[H_co], /) -> H_co:
        """Async version of `start` that does not block the running event loop."""
        return await self._steps.arun(self._started(workflow))

    def _started(self, workflow: StartableWorkflow[H_co], *, named: str | None = None) -> StepPlan[H_co]:
        if not hasattr(workflow, "_as_started_by"):
            raise _not_startable(workflow, task_name=self.name)
        new = workflow._as_started_by(self.name, self.labels)
        return workflow._handle_of((yield from self._steps.start(new, named=named)))

    @property
    def _steps(self) -> StepRunner:
        return StepRunner(self.task_id, self.name, self._backend, self._book)


@public
@final
class NamedStep(Struct, frozen=True):
    """The next step of a task, with its own name or options. Returned by `Context.named` and `Context.with_options`."""

    _context: Context
    _name: str | None
    _options: StepOptions = StepOptions()

    def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step like `Context.step`, with this name and these options."""
        return self._context._steps.run_step(self._name_of(fn), fn, args, kwargs, self._options)

    @overload
    async def astep(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def astep(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def astep(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the step like `Context.astep`, with this name and these options."""
        return self._context._steps.arun_step(self._name_of(fn), fn, args, kwargs, self._options)

    def _name_of(self, fn: Callable[..., Any]) -> str:
        if self._name is None:
            return name_of(fn, task_name=self._context.name)
        require_callable(fn, task_name=self._context.name)
        return self._name

    def start(self, workflow: StartableWorkflow[H_co], /) -> H_co:
        """Start the workflow like `Context.start`. Raises PayloadError if a retry policy or timeout is set: only steps have them."""
        return self._context._steps.run("start", self._started(workflow))

    async def astart(self, workflow: StartableWorkflow[H_co], /) -> H_co:
        """Async version of `start` that does not block the running event loop."""
        return await self._context._steps.arun(self._started(workflow))

    def _started(self, workflow: StartableWorkflow[H_co]) -> StepPlan[H_co]:
        if self._options == StepOptions():
            return (yield from self._context._started(workflow, named=self._name))
        raise PayloadError(
            f"Context.start of task {self._context.name!r} takes neither a retry nor a timeout: only steps have them.",
            parameter="workflow",
            fix="give them to the tasks of the workflow, and write ctx.start(...) or ctx.named(...).start(...).",
        )


def _not_startable(given: object, *, task_name: str) -> PayloadError:
    fix = "pass definition.call(...) of a defined workflow, or wf.call(output=node) of one from app.workflow(...)"
    rule = f"it is of type {type(given).__name__}, not a workflow"
    if hasattr(given, "_as_child"):
        fix = "send a task with ctx.send(task.call(...))"
    elif hasattr(given, "build"):
        rule, fix = "it is a definition without its arguments", "pass definition.call(...)"
    elif hasattr(given, "result_of"):
        rule, fix = (
            "it was started already",
            "use its handle, or pass definition.call(...) to start another one",
        )
    return PayloadError(
        f"{shown(given)} cannot be started by task {task_name!r}: {rule}.",
        parameter="workflow",
        fix=f"{fix}.",
    )


class ContextSource:
    """Makes the Context of an attempt when the code first needs it, because most code never does.

    `home` and `exception_codes` are those of the Context's StepBook. `log` captures what the code logs.
    """

    __slots__ = ("_home", "_made", "_make", "exception_codes", "log")

    def __init__(self, make: Callable[[], Context], *, log: AttemptLogger | None = None) -> None:
        self._make = make
        self.log = log
        self._made: dict[str, Context] = {}
        self._home: int | None = None
        self.exception_codes: Mapping[type[BaseException], str] = {}

    @property
    def misfit(self) -> NonDeterministic | None:
        """Return how the code has deviated from the records of earlier attempts, or None if it has not."""
        return self._made["made"]._book.misfit if self._made else None

    def stop_reason(self) -> StopReason | None:
        """Return why the code was asked to stop, or None. Makes the Context if the code has not needed it."""
        return self.get()._backend.stop_reason()

    def begin(self, home: int) -> None:
        """Record the strand in which the code starts."""
        self._home = home
        if self._made:
            self._made["made"]._book.home = home

    def get(self) -> Context:
        """Return the Context. All callers get the same one, from any thread."""
        if not self._made:
            context = self._make()
            context._book.home, context._book.exception_codes = self._home, self.exception_codes
            self._made.setdefault("made", context)  # of two threads at the same time, the first one's is kept
        return self._made["made"]


@contextmanager
def entered(context: Context | ContextSource) -> Iterator[None]:
    """Make `context` the current Context inside the `with` block."""
    token = make_current.set(context.get if isinstance(context, ContextSource) else lambda: context)
    log = context.log if isinstance(context, ContextSource) else None
    outer = None if log is None else current_log.set(log)
    try:
        yield
    finally:
        make_current.reset(token)
        if outer is not None:
            current_log.reset(outer)


def enter(context: ContextSource) -> None:
    """Make `context` the current Context for the rest of the current `contextvars` context."""
    make_current.set(context.get)
    if context.log is not None:
        current_log.set(context.log)


def leave() -> None:
    """Let the current `contextvars` context have no current Context from here on."""
    make_current.set(None)
    if current_log.get() is not None:
        current_log.set(None)


async def _remaining(items: Iterable[T] | AsyncIterable[T], done: int) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        index = 0
        async for item in items:
            if index >= done:
                yield item
            index += 1
    else:
        for item in islice(items, done, None):
            yield item
