"""The task object: what `@app.task` makes of a function, and what users send, schedule and call.

What lives here: `Task` and its two kinds, one call of it (`Call`), and what it needs from the app
(`Sender`). What may not: talking to PostgreSQL, registering (`decorator`).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Coroutine, Iterable, Mapping
from datetime import datetime
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, cast, final
from uuid import UUID, uuid4

from msgspec import Struct

from everbeat.client.detached import Detached
from everbeat.client.handle import Handle
from everbeat.client.options import SendOptions, SendSettings, patience_of
from everbeat.domain.context import Context
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.duration import When, to_when
from everbeat.domain.recorded import NewChild
from everbeat.errors import ConfigurationError, PayloadError, Problem

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Call(Struct, Generic[R_co], frozen=True, kw_only=True):
    """One execution to send: arguments are checked and encoded, options complete; `when` None means now.

    `task` is None for a call by name, whose function this program does not know.
    """

    name: str
    payload: bytes
    settings: SendSettings
    when: When | None = None
    task: Task[..., R_co] | None = None
    connection: object = None
    """Whose transaction it is sent in; None: one of its own."""
    patience_s: float | None = None
    """How long the send goes on without a sign of life from the database; None: as long as the app's calls."""

    def as_child(self) -> NewChild:
        """What a running task sends for it, by `Context.send`; raises PayloadError for a call by name, and one with a connection."""
        return self._known().as_child(self)

    def child_handle(self, task_id: UUID, /) -> Handle[R_co]:
        """The handle of the child that was sent."""
        return self._known().handle(self, task_id)

    def _known(self) -> Sender:
        if self.task is None:
            raise PayloadError(
                f"The call of {self.name!r} was made by name, and cannot be sent as a child.",
                parameter="call",
                fix="make it with task.call(...).",
            )
        return self.task.sender


class Sender(Protocol):
    """What the app does with calls; the blocking half refuses to run inside an event loop."""

    def send(self, call: Call[R], /) -> Handle[R]: ...

    async def asend(self, call: Call[R], /) -> Handle[R]: ...

    def send_many(
        self, calls: Iterable[Call[R]], /, *, connection: object = None, patience_s: float | None = None
    ) -> list[Handle[R]]: ...

    async def asend_many(
        self,
        calls: Iterable[Call[R]] | AsyncIterable[Call[R]],
        /,
        *,
        connection: object = None,
        patience_s: float | None = None,
    ) -> list[Handle[R]]: ...

    def as_child(self, call: Call[Any], /) -> NewChild: ...

    def handle(self, call: Call[R], task_id: UUID, /) -> Handle[R]: ...


class Task(Generic[P, R_co]):
    """A registered function. Its parameters, without a leading Context, are those of `send` and of every
    twin.
    """

    def __init__(
        self, definition: TaskDefinition, *, sender: Sender, options: SendOptions | None = None
    ) -> None:
        self.definition = definition
        self._sender = sender
        self._options: SendOptions = options or {}
        self._connection = self._options.get("connection")
        self._patience_s = patience_of(self._options)
        registered = SendSettings.of_task(definition.options)
        self.settings = SendSettings.of_options(self._options, registered)
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
    def sender(self) -> Sender:
        """What the app does with calls of it."""
        return self._sender

    @property
    def name(self) -> str:
        """The name that is stored with every task, by which workers find the function."""
        return self.definition.name

    @property
    def connection(self) -> object:
        """Whose transaction its sends are part of; None: one of their own."""
        return self._connection

    def send(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Stores one task to run now; raises PayloadError for arguments that do not fit.

        handle = welcome.send(42)
        """
        return self._sender.send(self._call(args, kwargs))

    async def asend(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """As `send`, to await."""
        return await self._sender.asend(self._call(args, kwargs))

    def schedule(self, when: When, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Stores one task to run at an aware datetime, or after a timedelta counted by the database.

        welcome.schedule(timedelta(minutes=5), 42)
        """
        return self._sender.send(self._call(args, kwargs, when=when))

    async def aschedule(self, when: When, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """As `schedule`, to await."""
        return await self._sender.asend(self._call(args, kwargs, when=when))

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R_co]:
        """One execution, checked and encoded, for `send_many`.

        app.send_many([welcome.call(user) for user in users])
        """
        return self._call(args, kwargs)

    def send_many(self, calls: Iterable[Call[R_co]], /) -> list[Handle[R_co]]:
        """Stores many tasks in one statement: all of them, or none."""
        return self._sender.send_many(calls, connection=self._connection, patience_s=self._patience_s)

    async def asend_many(
        self, calls: Iterable[Call[R_co]] | AsyncIterable[Call[R_co]], /
    ) -> list[Handle[R_co]]:
        """As `send_many`, to await."""
        return await self._sender.asend_many(calls, connection=self._connection, patience_s=self._patience_s)

    def with_options(self, **options: Unpack[SendOptions]) -> Self:
        """The same task with other options for what is sent through it; raises ConfigurationError for wrong
        ones.

        welcome.with_options(priority=-10, key="u42").send(42)
        welcome.with_options(connection=connection).send(42)  # part of that connection's transaction
        """
        merged = cast(SendOptions, {**self._options, **options})
        return type(self)(self.definition, sender=self._sender, options=merged)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, when: When | None = None) -> Call[R_co]:
        moment = None if when is None else to_when(when, subject="when")
        good_until = self.settings.good_until
        if isinstance(moment, datetime) and good_until is not None and moment > good_until:
            raise _never_runs(self.name, moment, good_until)
        payload = self.definition.codec.encode(args, kwargs)
        return Call(
            name=self.name,
            payload=payload,
            settings=self.settings,
            when=moment,
            task=self,
            connection=self._connection,
            patience_s=self._patience_s,
        )

    def _context(self) -> Context:
        running = Context.current_or_none()
        if running is not None:
            return running
        return Context.detached(
            task_id=uuid4(), name=self.name, queue=self.settings.queue, backend=Detached()
        )

    def _invoke(self, context: Context, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leading = (context,) if self.definition.codec.takes_context else ()
        return self.definition.function(*leading, *args, **kwargs)


@final
class SyncTask(Task[P, R_co]):
    """A task made of `def`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Runs the function here and now, without a row; its Context is that of the running task, or a
        detached one.
        """
        context = self._context()
        with context.entered():
            return cast(R_co, self._invoke(context, args, kwargs))


@final
class AsyncTask(Task[P, R_co]):
    """A task made of `async def`."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """As SyncTask's, to await."""
        return self._run(args, kwargs)

    async def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R_co:
        context = self._context()
        with context.entered():
            return cast(R_co, await self._invoke(context, args, kwargs))


def _never_runs(name: str, moment: datetime, good_until: datetime) -> ConfigurationError:
    problem = Problem(
        code="CONTRADICTION",
        subject=f"when of task {name!r}",
        value=moment.isoformat(),
        rule=f"it lies after good_until ({good_until.isoformat()}), so the task could never start",
        fix="schedule it earlier, or move good_until",
    )
    return ConfigurationError([problem])
