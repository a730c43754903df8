"""Task objects, which `@app.task` creates from functions, and calls that can be sent as tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    assert_never,
    cast,
    final,
)
from uuid import UUID, uuid4

from msgspec import Struct

from everbeat.client.handle import Handle, outcome_of
from everbeat.client.options import SendOptions, SendSettings, patience_of
from everbeat.domain.settings.checks import public
from everbeat.domain.settings.units import When, to_when
from everbeat.domain.task.checkpoint import Checkpoint
from everbeat.domain.task.context import Context, entered
from everbeat.domain.task.context_backend import (
    ChildEnd,
    Completion,
    EmittedItem,
    JoinChildren,
    ListChildren,
    LoadSteps,
    NewChild,
    OpenStreams,
    RecordStep,
    SendChild,
    SendChildren,
    Sleep,
    StartWorkflow,
    StepAnswer,
    StepQuestion,
    StoreItems,
    TaskCommit,
    WaitForEvent,
)
from everbeat.domain.task.definition import TaskDefinition
from everbeat.domain.task.outcome import Completed, Failed
from everbeat.domain.task.states import TaskState
from everbeat.errors import ConfigurationError, OutsideWorker, PayloadError, Problem, StopReason
from everbeat.runtime.blocking import in_time, refuse_in_loop, strand
from everbeat.store.tasks import StoredOutcome
from everbeat.store.user_connection.connection import DriverPlan, TransactionAction, UserTransaction

if TYPE_CHECKING:
    from everbeat.client.sender import CallSender

T = TypeVar("T")


@final
class LocalBackend:
    """The backend of a Context outside a worker. It stores nothing and never stops the code.

    Steps are plain function calls, and every sleep lasts its full time. A commit is a transaction that contains only the user's rows.
    Signals, child tasks and workflows are not available.
    """

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        """Discard the report."""
        del stage, fraction, message

    def emit(self, draw: Callable[[], EmittedItem]) -> EmittedItem:
        """Return the item without storing it."""
        return draw()

    def stop_reason(self) -> StopReason | None:
        """Return None, because nothing stops the code."""
        return None

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        """Raise BlockingCallInLoop on an event loop, as a worker does, so that tests reveal the mistake."""
        refuse_in_loop(name, instead=instead)

    def store(self, checkpoint: Checkpoint) -> None:
        """Do nothing, because the Context itself keeps the checkpoint."""
        del checkpoint

    async def astore(self, checkpoint: Checkpoint) -> None:
        """Do nothing, because the Context itself keeps the checkpoint."""
        del checkpoint

    def commit(self, connection: object) -> TaskCommit:
        """Return a transaction on the user's connection that does not involve a task."""
        return UserTransaction(connection, _RowsOnly(), line=self)

    def ask_step(self, question: StepQuestion) -> StepAnswer:
        """Reply as if nothing had been recorded. Raises OutsideWorker for requests that concern an event, a child task or a workflow."""
        if isinstance(question, Sleep):
            time.sleep(question.duration_ms / 1_000)
        return _answered(question)

    async def aask_step(self, question: StepQuestion) -> StepAnswer:
        """Async version of `ask_step` that does not block the running event loop."""
        if isinstance(question, Sleep):
            await asyncio.sleep(question.duration_ms / 1_000)
        return _answered(question)

    def strand(self) -> int:
        """Return a number that identifies the calling asyncio task or thread."""
        return strand()

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run the call in a thread, as a worker does, and return its result."""
        return await asyncio.to_thread(call)

    async def in_time(self, awaitable: Awaitable[T], *, timeout_s: float, late: str) -> T:
        """Await the awaitable for at most `timeout_s` seconds and return its result."""
        return await in_time(awaitable, timeout_s=timeout_s, late=late)

    @property
    def tracing(self) -> None:
        """Return None, because no attempt is running."""
        return

    def ask(self, request: Any) -> Any:
        """Raise AssertionError, because there is no worker to ask."""
        raise AssertionError(request)

    async def aask(self, request: Any) -> Any:
        """Raise AssertionError, because there is no worker to ask."""
        raise AssertionError(request)


def local_context(*, task_id: UUID, name: str, queue: str) -> Context:
    """Return the Context for a task function that is called directly, without a stored task."""
    return Context(
        task_id=task_id,
        name=name,
        queue=queue,
        attempt=1,
        fence=0,
        claim_id=UUID(int=0),
        worker_id="",
        _backend=LocalBackend(),
    )


def _answered(asked: StepQuestion) -> StepAnswer:
    match asked:
        case LoadSteps() | RecordStep() | Sleep() | OpenStreams() | StoreItems():
            return StepAnswer()
        case WaitForEvent(question=question):
            raise OutsideWorker("Context.wait_event" if question is None else "Context.ask")
        case SendChild():
            raise OutsideWorker("Context.send")
        case SendChildren() | JoinChildren() | ListChildren():
            raise OutsideWorker("Context.gather")
        case StartWorkflow():
            raise OutsideWorker("Context.start")
        case _:
            assert_never(asked)


class _RowsOnly:
    def begin(self) -> DriverPlan[Completion]:
        yield TransactionAction("begin")
        return Completion()

    def end(self, error: BaseException | None) -> DriverPlan[None]:
        if error is not None:
            yield TransactionAction("rollback")
            return
        try:
            yield TransactionAction("flush")
            yield TransactionAction("commit")
        except BaseException:
            yield TransactionAction("rollback")
            raise


P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_OF_LIMITS: Final = ("limits", "costs", "queue")
"""The options that can contradict the limits of the task."""


class Call(Struct, Generic[R_co], frozen=True, kw_only=True):
    """A task to send, with its options and its validated and encoded arguments. If `when` is None, the task is due immediately.

    `task` is None for a call by name, because the function need not exist in this program.
    """

    name: str
    payload: bytes
    settings: SendSettings
    when: When | None = None
    task: Task[..., R_co] | None = None
    connection: object = None
    """The connection in whose transaction the task is stored, or None for a separate transaction."""
    patience_s: float | None = None
    """How many seconds to wait for a database that does not respond. None means the app's patience."""

    def _as_child(self) -> NewChild:
        return self._sender.new_child(self)

    def _handle_of(self, task_id: UUID, /) -> Handle[R_co]:
        return self._sender.handle(self, task_id)

    def _outcome_of(self, task_id: UUID, end: ChildEnd, /) -> Completed[R_co] | Failed:
        stored = StoredOutcome(
            task_id, self.name, TaskState(end.state or TaskState.FAILED), end.result, end.error, end.missing
        )
        return outcome_of(self._handle_of(task_id), stored)

    @property
    def _sender(self) -> CallSender:
        if self.task is None:
            raise PayloadError(
                f"The call of {self.name!r} was made by name, and cannot be sent as a child.",
                parameter="call",
                fix="make it with task.call(...).",
            )
        return self.task._sender


def longest_patience_s(calls: Sequence[Call[Any]], patience_s: float | None) -> float | None:
    """Return the patience, in seconds, for storing all calls: `patience_s` if given, else the longest patience of any call."""
    own = [call.patience_s for call in calls if call.patience_s is not None]
    return patience_s if patience_s is not None else max(own, default=None)


@public
class Task(Generic[P, R_co]):
    """A registered task function. `send` and similar methods take the function's parameters, except for a leading Context."""

    def __init__(
        self, definition: TaskDefinition, *, sender: CallSender, options: SendOptions | None = None
    ) -> None:
        self._definition = definition
        self._sender = sender
        self._options: SendOptions = options or {}
        self._connection = self._options.get("connection")
        self._patience_s = patience_of(self._options)
        registered = SendSettings.of_task(definition.options)
        self._settings = SendSettings.of_options(self._options, registered)
        self.__name__ = definition.name
        self.__doc__ = definition.function.__doc__
        self.__module__ = definition.function.__module__
        self.__wrapped__ = definition.function

    def __repr__(self) -> str:
        options = "".join(
            f", {name}={value!r}" for name, value in self._options.items() if name != "connection"
        )
        return f"<{type(self).__name__} {self.name!r}{options}>"

    @property
    def name(self) -> str:
        """Return the name that is stored with each task. Workers use the name to find the function."""
        return self._definition.name

    def send(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Store one task to run as soon as possible. Raises PayloadError if the arguments do not match the signature.

        handle = welcome.send(42)
        """
        return self._sender.send(self._call(args, kwargs))

    async def asend(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Async version of `send` that does not block the running event loop."""
        return await self._sender.asend(self._call(args, kwargs))

    def schedule(self, when: When, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Store one task to run later, at a timezone-aware datetime or after a timedelta. The database's clock measures the delay.

        welcome.schedule(timedelta(minutes=5), 42)
        """
        return self._sender.send(self._call(args, kwargs, when=when))

    async def aschedule(self, when: When, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Async version of `schedule` that does not block the running event loop."""
        return await self._sender.asend(self._call(args, kwargs, when=when))

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R_co]:
        """Return a call to pass to `send_many` or `Context.send`. Raises PayloadError if the arguments do not match the signature.

        app.send_many([welcome.call(user) for user in users])
        """
        return self._call(args, kwargs)

    def send_many(self, calls: Iterable[Call[R_co]], /) -> list[Handle[R_co]]:
        """Store many tasks atomically in one statement, and return their handles."""
        return self._sender.send_many(calls, connection=self._connection, patience_s=self._patience_s)

    async def asend_many(
        self, calls: Iterable[Call[R_co]] | AsyncIterable[Call[R_co]], /
    ) -> list[Handle[R_co]]:
        """Async version of `send_many` that does not block the running event loop. Async iterables are also accepted."""
        return await self._sender.asend_many(calls, connection=self._connection, patience_s=self._patience_s)

    def with_options(self, **options: Unpack[SendOptions]) -> Self:
        """Return a copy of this task with different send options. Raises ConfigurationError if an option is invalid.

        welcome.with_options(priority=-10, key="u42").send(42)
        welcome.with_options(connection=connection).send(42)  # part of that connection's transaction
        """
        merged = cast(SendOptions, {**self._options, **options})
        if isinstance(given := options.get("labels"), Mapping):
            merged["labels"] = {**self._settings.labels, **given}
        chosen = type(self)(self._definition, sender=self._sender, options=merged)
        if not options.keys().isdisjoint(_OF_LIMITS):
            self._sender.limits.require_valid(chosen._call_of(b"", when=None))
        return chosen

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, when: When | None = None) -> Call[R_co]:
        moment = None if when is None else to_when(when, subject="when")
        good_until = self._settings.good_until
        if isinstance(moment, datetime) and good_until is not None and moment > good_until:
            raise _never_runs(self.name, moment, good_until)
        return self._call_of(self._definition.codec.encode(args, kwargs), when=moment)

    def _call_of(self, payload: bytes, *, when: When | None) -> Call[R_co]:
        return Call(
            name=self.name,
            payload=payload,
            settings=self._settings,
            when=when,
            task=self,
            connection=self._connection,
            patience_s=self._patience_s,
        )

    def _context(self) -> Context:
        running = Context.current_or_none()
        if running is not None:
            return running
        return local_context(task_id=uuid4(), name=self.name, queue=self._settings.queue)

    def _invoke(self, context: Context, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leading = (context,) if self._definition.codec.takes_context else ()
        return self._definition.function(*leading, *args, **kwargs)


@final
class SyncTask(Task[P, R_co]):
    """A task whose function is defined with `def`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function directly, without storing a task.

        The function uses the Context of the running task, or a local Context outside a task.
        """
        context = self._context()
        with entered(context):
            return cast(R_co, self._invoke(context, args, kwargs))


@final
class AsyncTask(Task[P, R_co]):
    """A task whose function is defined with `async def`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Call the function directly, without storing a task, and return an awaitable for its result.

        The function uses the Context of the running task, or a local Context outside a task.
        """
        return self._run(args, kwargs)

    async def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R_co:
        context = self._context()
        with entered(context):
            return cast(R_co, await self._invoke(context, args, kwargs))


def _never_runs(name: str, moment: datetime, good_until: datetime) -> ConfigurationError:
    problem = Problem(
        code="CONTRADICTION",
        subject=f"when of task {name!r}",
        value=moment.isoformat(),
        rule=f"is after good_until ({good_until.isoformat()}), so the task could never start",
        fix="schedule it earlier, or use a later good_until",
    )
    return ConfigurationError([problem])
