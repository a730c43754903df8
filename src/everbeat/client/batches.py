"""Batches: tasks that are sent together over time, and the callbacks that run when all of them have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self, TypeVar, final
from uuid import UUID

from msgspec import UNSET

from everbeat.client.database_access import DatabaseMethods
from everbeat.client.handle import Handle, to_batch_id
from everbeat.client.sender import CallSender, calls_of
from everbeat.client.sent_together import longest_patience_s
from everbeat.client.task import Call
from everbeat.client.traced_sends import traced
from everbeat.client.unique_sending import key_moves, require_plain
from everbeat.client.waiter import Deadline
from everbeat.domain.batch import BatchCallback, BatchInfo
from everbeat.domain.settings.checks import public, remark, switch, whole
from everbeat.domain.settings.settings import shown
from everbeat.domain.settings.units import Duration
from everbeat.errors import BatchNotFound, BatchSealed, PayloadError, WaitTimeout
from everbeat.runtime.clock import Backoff
from everbeat.store import batches
from everbeat.store.plan import Action, Plan, ask
from everbeat.store.tasks import KEY_TRIES, NewTask

R = TypeVar("R")

SENT_AT_ONCE: Final = 1_000
"""The number of tasks that one statement of `Batch.send_many` stores."""
SENT_BYTES: Final = 16 * 1024 * 1024
"""A statement stores no further task once the arguments of its tasks take this many bytes."""
_POLL: Final = Backoff(first_s=0.05, longest_s=2.0)
_limit: Final = whole(1, 10_000)


@public
@final
class Batch(DatabaseMethods):
    """A set of tasks that can grow until it is sealed. `App.batch` makes a new one, and `App.open_batch` finds one by its id.

    A new batch is stored when its `with` block begins, or by `open`. The block seals the batch when it ends without an exception. When a
    batch is sealed and all its tasks have ended, its callbacks are sent once.

        with app.batch("import-7", on_end=report.call("import-7")) as batch:
            for row in rows:
                batch.send(load.call(row))
    """

    def __init__(
        self,
        batch_id: UUID,
        *,
        sender: CallSender,
        name: str | None = None,
        on_end: Call[Any] | None = None,
        on_success: Call[Any] | None = None,
    ) -> None:
        self.id = batch_id
        self.name = name
        self._sender = sender
        self._database = sender._database
        self._calls = [call for call in (on_end, on_success) if call is not None]
        self._on_end = self._callback(on_end, "on_end")
        self._on_success = self._callback(on_success, "on_success")

    def __repr__(self) -> str:
        return f"<Batch {self.id}{'' if self.name is None else f' {self.name!r}'}>"

    def open(self) -> Self:
        """Store the new batch, and return it. A second call changes nothing. Raises DatabaseError if the database fails."""
        self._sender.run(
            self._opened(), None, calls=self._calls, name="Batch.open", twin="'async with' or Batch.aopen"
        )
        return self

    async def aopen(self) -> Self:
        """Async version of `open` that does not block the running event loop."""
        await self._sender.arun(self._opened(), None, calls=self._calls, twin="Batch.open")
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.seal()
        else:
            error.add_note(self._left_open)

    async def __aenter__(self) -> Self:
        return await self.aopen()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aseal()
        else:
            error.add_note(self._left_open)

    @property
    def _left_open(self) -> str:
        return f"Batch {self.id} stays open, so its callbacks wait. Seal or cancel it: everbeat batches seal {self.id}."

    def send(self, call: Call[R], /) -> Handle[R]:
        """Store one task of this batch, and return its handle.

        Raises BatchSealed if the batch is sealed, and BatchNotFound if it is not open yet. Raises the same errors as `Task.send` otherwise.

        handle = batch.send(load.call(row))
        """
        calls = calls_of([call], name="Batch.send")
        return self._stored(calls, name="Batch.send", twin="Batch.asend")[0]

    async def asend(self, call: Call[R], /) -> Handle[R]:
        """Async version of `send` that does not block the running event loop."""
        calls = calls_of([call], name="Batch.asend")
        return (await self._astored(calls, twin="Batch.send"))[0]

    def send_many(self, calls: Iterable[Call[R]], /) -> list[Handle[R]]:
        """Store many tasks of this batch, and return their handles in the order of the calls.

        One statement stores up to 1,000 tasks, or fewer if their arguments are large. If a later one fails, the tasks of the earlier ones
        are stored. Raises the same errors as `send`.

        batch.send_many(load.call(row) for row in rows)
        """
        handles: list[Handle[R]] = []
        given = iter(calls) if isinstance(calls, Iterable) else iter(calls_of(calls, name="Batch.send_many"))
        while part := calls_of(_portion(given), name="Batch.send_many", first=len(handles)):
            handles += self._stored(part, name="Batch.send_many", twin="Batch.asend_many")
        return handles

    async def asend_many(self, calls: Iterable[Call[R]] | AsyncIterable[Call[R]], /) -> list[Handle[R]]:
        """Async version of `send_many` that does not block the running event loop. Async iterables are also accepted."""
        handles: list[Handle[R]] = []
        async for part in _parts(calls):
            handles += await self._astored(part, twin="Batch.send_many")
        return handles

    def seal(self) -> None:
        """Seal the batch, so that it ends when all its tasks have ended. Only its own running tasks can then add tasks.

        A second call changes nothing. Raises BatchNotFound if the batch does not exist.
        """
        self._run("seal", self._sealed())

    async def aseal(self) -> None:
        """Async version of `seal` that does not block the running event loop."""
        await self._arun(self._sealed())

    def cancel(self) -> BatchInfo:
        """Seal the batch, cancel its waiting tasks, and ask the workers to stop the running ones. Return the batch.

        The descendants of these tasks are cancelled, too. `on_end` is sent as usual. A batch that has ended is left unchanged. Raises
        BatchNotFound if the batch does not exist.
        """
        return self._run("cancel", self._cancelled())

    async def acancel(self) -> BatchInfo:
        """Async version of `cancel` that does not block the running event loop."""
        return await self._arun(self._cancelled())

    def status(self) -> BatchInfo:
        """Return the progress of the batch: the numbers of its tasks by state, and whether it is sealed and has ended.

        Raises BatchNotFound if the batch does not exist.
        """
        return self._run("status", self._status())

    async def astatus(self) -> BatchInfo:
        """Async version of `status` that does not block the running event loop."""
        return await self._arun(self._status())

    def wait_end(self, *, timeout: Duration | None = None) -> BatchInfo:
        """Wait until the batch has ended, and return it. The callbacks are sent by then, but might not have run.

        Raises WaitTimeout if `timeout` expires first, and BatchNotFound if the batch does not exist. The method asks at least every 2 s.
        """
        until = Deadline(timeout)
        return self._run("wait_end", self._ended(until), within_s=until.within_s)

    async def await_end(self, *, timeout: Duration | None = None) -> BatchInfo:
        """Async version of `wait_end` that does not block the running event loop."""
        until = Deadline(timeout)
        return await self._arun(self._ended(until), within_s=until.within_s)

    def _callback(self, call: Call[Any] | None, option: str) -> BatchCallback | None:
        if call is None:
            return None
        what = f"the {option} of a batch"
        if not isinstance(call, Call):
            raise PayloadError(
                f"{shown(call)} cannot be {what}: it is not a call of a task, but of type {type(call).__name__}.",
                parameter=option,
                fix=f"make it with task.call(...): {option}=report.call('import-7').",
            )
        call = self._sender.outgoing(call)
        if call.settings.key is not None or call.connection is not None:
            raise PayloadError(
                f"The call of {call.name!r} cannot be {what}: it has a {'connection' if call.settings.key is None else 'key'}.",
                parameter=option,
                fix="leave with_options(key=...) and with_options(connection=...) out.",
            )
        stored = self._sender.scheduled_call(call, what=what)
        return BatchCallback(
            id=self._sender.ids.next(),
            task=stored.task,
            queue=stored.queue,
            priority=stored.priority,
            args=stored.args,
            policy=stored.policy,
            flags=stored.flags,
            good_until=call.settings.good_until,
            serial=stored.serial,
            gates=None if stored.gates is UNSET else stored.gates,
            costs=None if stored.costs is UNSET else stored.costs,
            labels=None if stored.labels is UNSET else stored.labels,
        )

    def _opened(self) -> Plan[None]:
        if self.name is not None:  # a batch by its id was stored before
            statement = batches.open_batch(
                self.id, name=self.name, on_end=self._on_end, on_success=self._on_success
            )
            yield from ask(statement)

    def _stored(self, calls: list[Call[R]], *, name: str, twin: str) -> list[Handle[R]]:
        calls = [self._sender.outgoing(call) for call in calls]
        patience_s = longest_patience_s(calls, None)
        return self._sender.run(
            self._sent(calls), None, calls=calls, name=name, twin=twin, patience_s=patience_s
        )

    async def _astored(self, calls: list[Call[R]], *, twin: str) -> list[Handle[R]]:
        calls = [self._sender.outgoing(call) for call in calls]
        patience_s = longest_patience_s(calls, None)
        return await self._sender.arun(self._sent(calls), None, calls=calls, twin=twin, patience_s=patience_s)

    def _sent(self, calls: list[Call[R]]) -> Plan[list[Handle[R]]]:
        for call in calls:
            require_plain(call.name, call.settings, what="a task of a batch")
            if call.connection is not None:
                raise PayloadError(
                    f"The call of {call.name!r} belongs to the transaction of a connection, which would lock the batch until its end.",
                    parameter="call",
                    fix="leave with_options(connection=...) out.",
                )
        new = yield from self._sender.new_tasks(calls)
        sender, store = self._sender, partial(self._sent_new, calls)
        return (yield from traced(sender.tracing, new, store, meters=sender.meters))

    def _sent_new(self, calls: list[Call[R]], new: Sequence[NewTask]) -> Plan[list[Handle[R]]]:
        sent = batches.SentToBatch([], None)
        for _ in range(KEY_TRIES):
            sent = yield from ask(batches.send_to_batch(self.id, new, channel=self._database.channel))
            ids = [task_id for task_id in sent.ids if task_id is not None]
            if len(ids) == len(calls):
                return [
                    self._sender.handle(call, task_id, existed=task_id != task.id)
                    for call, task_id, task in zip(calls, ids, new, strict=True)
                ]
            if sent.batch is None:
                raise BatchNotFound(self.id)
            if sent.batch == "sealed":
                raise BatchSealed(self.id)
        raise key_moves([task for task, task_id in zip(new, sent.ids, strict=True) if task_id is None])

    def _sealed(self) -> Plan[None]:
        if not (yield from ask(batches.seal_batch(self.id))):
            raise BatchNotFound(self.id)

    def _cancelled(self) -> Plan[BatchInfo]:
        has_ended = yield from ask(batches.mark_cancelled(self.id))
        if has_ended is None:
            raise BatchNotFound(self.id)
        while not has_ended and (
            yield from ask(batches.cancel_tasks(self.id, channel=self._database.channel))
        ):
            pass
        return (yield from self._status())

    def _status(self) -> Plan[BatchInfo]:
        found = yield from ask(batches.read_batch(self.id))
        if found is None:
            raise BatchNotFound(self.id)
        return found

    def _ended(self, until: Deadline) -> Plan[BatchInfo]:
        yield from self._database.announced()
        tries = 0
        while not (found := (yield from self._status())).ended:
            left_s = until.left_s
            if left_s is not None and left_s <= 0:
                raise WaitTimeout(self.id, until.waited_s, what="Batch")
            tries += 1
            pause_s = min(_POLL.delay(tries), until.within_s if left_s is None else left_s)
            yield Action(lambda: time.sleep(pause_s), lambda: asyncio.sleep(pause_s))  # noqa: B023 - used at once
        return found


def _bytes_of(call: object) -> int:
    return len(call.payload) if isinstance(call, Call) else 0


def _portion(calls: Iterator[Call[R]]) -> Iterator[Call[R]]:
    """Yield the calls that the next statement stores."""
    size = 0
    for call in islice(calls, SENT_AT_ONCE):
        yield call
        size += _bytes_of(call)
        if size >= SENT_BYTES:
            return


async def _parts(calls: Iterable[Call[R]] | AsyncIterable[Call[R]]) -> AsyncIterator[list[Call[R]]]:
    name, first = "Batch.asend_many", 0
    if not isinstance(calls, AsyncIterable):
        given = iter(calls) if isinstance(calls, Iterable) else iter(calls_of(calls, name=name))
        while part := calls_of(_portion(given), name=name, first=first):
            yield part
            first += len(part)
        return
    collected: list[Call[R]] = []
    size = 0
    async for call in calls:
        collected.append(call)
        size += _bytes_of(call)
        if len(collected) == SENT_AT_ONCE or size >= SENT_BYTES:
            yield calls_of(collected, name=name, first=first)
            first, collected, size = first + len(collected), [], 0
    yield calls_of(collected, name=name, first=first)


class BatchMethods(DatabaseMethods):
    """The `App` methods for batches."""

    _sender: CallSender

    def batch(
        self, name: str, /, *, on_end: Call[Any] | None = None, on_success: Call[Any] | None = None
    ) -> Batch:
        """Return a new batch. It is stored when its `with` block begins, or by `Batch.open`.

        `on_end` is sent when the batch is sealed and all its tasks have ended. `on_success` is sent then if all of them completed. Raises
        ConfigurationError or PayloadError if an argument is invalid.

            with app.batch("import-7", on_end=report.call("import-7"), on_success=publish.call()) as batch:
                batch.send_many(load.call(row) for row in rows)
        """
        checked = remark(name, subject="batch.name")
        return Batch(
            self._sender.ids.next(), sender=self._sender, name=checked, on_end=on_end, on_success=on_success
        )

    def open_batch(self, batch_id: UUID | str, /) -> Batch:
        """Return the batch with this id, which was stored before, for example by another process. Sends no query."""
        return Batch(to_batch_id(batch_id), sender=self._sender)

    def list_batches(
        self, *, live: bool = False, before: UUID | str | None = None, limit: int = 100
    ) -> list[BatchInfo]:
        """Return batches with their progress, the newest first. If `live` is set, omit ended batches.

        To get the next page, pass the id of the last batch of the previous page as `before`.
        """
        return self._run("list_batches", _listed(live=live, before=before, limit=limit))

    async def alist_batches(
        self, *, live: bool = False, before: UUID | str | None = None, limit: int = 100
    ) -> list[BatchInfo]:
        """Async version of `list_batches` that does not block the running event loop."""
        return await self._arun(_listed(live=live, before=before, limit=limit))


def _listed(*, live: bool, before: UUID | str | None, limit: int) -> Plan[list[BatchInfo]]:
    known = None if before is None else to_batch_id(before, subject="list_batches.before")
    return ask(
        batches.list_batches(
            before=known,
            live_only=switch(live, subject="list_batches.live"),
            limit=_limit(limit, subject="list_batches.limit"),
        )
    )
