"""Stores calls as task rows, one or many at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from msgspec import UNSET

from everbeat.client.database_access import refuse_in_loop
from everbeat.client.failure_handlers import FailureHandlers
from everbeat.client.handle import Handle, TaskOperations
from everbeat.client.limit_declarations import LimitDeclarations
from everbeat.client.limits import LimitBook
from everbeat.client.queue_limits import QueueLimits
from everbeat.client.send_call import AroundSend, outgoing
from everbeat.client.sent_together import longest_patience_s, one_connection, require_room
from everbeat.client.stored_options import StoredOptions, StoredOptionsOfTasks
from everbeat.client.task import Call, Task
from everbeat.client.task_ids import TaskIds
from everbeat.client.traced_sends import traced
from everbeat.client.unique_sending import key_moves, require_key, require_plain, send_unique
from everbeat.config import QueueConfig
from everbeat.domain.labels import encode_labels
from everbeat.domain.limit.model import NO_GATES, limit_of
from everbeat.domain.metrics.meters import Meters
from everbeat.domain.plan import aperform, perform
from everbeat.domain.schedule.model import ScheduledCall
from everbeat.domain.settings.settings import refused, shown
from everbeat.domain.settings.units import milliseconds
from everbeat.domain.task.argument_digest import digest_of_values
from everbeat.domain.task.context_backend import NewChild
from everbeat.domain.task.failure_handler import StoredHandler
from everbeat.domain.task.policy import OnCrash
from everbeat.domain.tracing.tracing import Tracing
from everbeat.domain.workflow.graph import TaskSpec
from everbeat.errors import LimitFull, PayloadError
from everbeat.errors.wording import nearest
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.sent_counter import SentCounter
from everbeat.store.plan import Plan, ask
from everbeat.store.statement import integers, texts
from everbeat.store.tasks import KEY_TRIES, FullGate, NewTask, insert_tasks, send_task, send_unless_full
from everbeat.store.user_connection.connection import arun_joined, run_joined

R = TypeVar("R")


def calls_of(given: Iterable[Call[R]], *, name: str, first: int = 0) -> list[Call[R]]:
    """Return the given calls as a list. Raises PayloadError, which gives the entry's position, if an entry is not a call.

    `name` is the name of the called method, for use in the error message. `first` is the position of the first entry.
    """
    if (entries := _iterated(given)) is None:
        fix = "write [task.call(...)]" if isinstance(given, Call) else "pass [task.call(...), ...]"
        raise PayloadError(
            f"{name}() takes an iterable of calls, not {shown(given)}, which is of type {type(given).__name__}.",
            fix=f"{_fix_of_async(given, name) or fix}.",
        )
    return [_require_call(place, call) for place, call in enumerate(entries, first)]


async def acalls_of(given: Iterable[Call[R]] | AsyncIterable[Call[R]], *, name: str) -> list[Call[R]]:
    """Async version of `calls_of` that also accepts async iterables."""
    if isinstance(given, AsyncIterable):
        given = [call async for call in given]
    return calls_of(given, name=name)


def handles_of(given: Iterable[Handle[R]], *, name: str) -> list[Handle[R]]:
    """Return the given handles as a list. Raises ConfigurationError, which gives the entry's position, if an entry is not a handle."""
    if (entries := _iterated(given)) is None:
        fix = f"write [handle], or call handle.{name.removesuffix('s').removeprefix('a')}()"
        raise refused(
            given,
            subject=f"handles of {name}()",
            code="WRONG_TYPE",
            rule=f"must be an iterable of handles, not of type {type(given).__name__}",
            fix=_fix_of_async(given, name) or fix,
        )
    return [_require_handle(place, handle) for place, handle in enumerate(entries)]


async def ahandles_of(given: Iterable[Handle[R]] | AsyncIterable[Handle[R]], *, name: str) -> list[Handle[R]]:
    """Async version of `handles_of` that also accepts async iterables."""
    if isinstance(given, AsyncIterable):
        given = [handle async for handle in given]
    return handles_of(given, name=name)


def _iterated(given: Any) -> Iterator[Any] | None:
    try:
        entries: Iterator[Any] = iter(given)
    except TypeError:
        return None
    return entries


def _fix_of_async(given: object, name: str) -> str | None:
    if isinstance(given, AsyncIterable):
        return f"await a{name}(...), which accepts it, or make a list of it"
    return None


def _require_call(place: int, call: Any) -> Call[Any]:
    if isinstance(call, Call):
        return call
    raise PayloadError(
        f"Entry {place} of the calls to send, {shown(call)}, is not a call of a task, but of type {type(call).__name__}.",
        fix="make each with task.call(...).",
    )


def _require_handle(place: int, handle: Any) -> Handle[Any]:
    if isinstance(handle, Handle):
        return handle
    raise refused(
        handle,
        subject=f"handles[{place}]",
        code="WRONG_TYPE",
        rule=f"must be a handle, as send() returns it, not of type {type(handle).__name__}",
        fix="pass the results of send() or send_many(); for the id of a task: app.handle(id)",
    )


T = TypeVar("T")


class CallSender:
    """Stores calls as tasks.

    `queues` are the queues that the app declares. If it declares none, any queue name is valid. `limits` bound the tasks that run.
    """

    def __init__(
        self,
        operations: TaskOperations,
        *,
        on_crash: OnCrash,
        stall_timeout_ms: int | None,
        queues: Sequence[QueueConfig] = (),
        limits: LimitBook | None = None,
        tracing: Tracing | None = None,
        meters: Meters | None = None,
    ) -> None:
        self.limits = LimitBook() if limits is None else limits
        self.declarations = LimitDeclarations(operations.database, self.limits)
        self.handlers = FailureHandlers(self._node_spec)
        self.payload_limit = operations.payload_limit
        self.around_send: list[AroundSend] = []
        self.tracing, self.meters = tracing, meters
        self.sent = SentCounter()
        self._operations = operations
        self._database = operations.database
        self._ids = TaskIds(SystemClock())
        self._stored = StoredOptionsOfTasks(
            self.handlers, on_crash=on_crash, stall_timeout_ms=stall_timeout_ms
        )
        self._queues = frozenset({"default", *(queue.name for queue in queues)} if queues else ())
        self.serial_queues = frozenset(queue.name for queue in queues if queue.serial)
        self._queue_limits = QueueLimits(queues, clock=SystemClock())

    @property
    def ids(self) -> TaskIds:
        """Return the task id generator."""
        return self._ids

    def send(self, call: Call[R], /) -> Handle[R]:
        """Store one task and return its handle.

        Raises BlockingCallInLoop on an event loop, ConfigurationError if an option is invalid, and DatabaseError if the database fails.
        """
        call = self.outgoing(call)
        return self.run(
            self._send(call),
            call.connection,
            calls=[call],
            name="send",
            twin="asend",
            patience_s=call.patience_s,
        )

    async def asend(self, call: Call[R], /) -> Handle[R]:
        """Async version of `send` that does not block the running event loop."""
        call = self.outgoing(call)
        return await self.arun(
            self._send(call), call.connection, calls=[call], twin="send", patience_s=call.patience_s
        )

    def send_many(
        self, calls: Iterable[Call[R]], /, *, connection: object = None, patience_s: float | None = None
    ) -> list[Handle[R]]:
        """Store many tasks atomically, in one statement, and return their handles."""
        given = [self.outgoing(call) for call in calls_of(calls, name="send_many")]
        joined = one_connection(given, connection)
        return self.run(
            self._send_many(given, joined is not None),
            joined,
            calls=given,
            name="send_many",
            twin="asend_many",
            patience_s=longest_patience_s(given, patience_s),
        )

    async def asend_many(
        self,
        calls: Iterable[Call[R]] | AsyncIterable[Call[R]],
        /,
        *,
        connection: object = None,
        patience_s: float | None = None,
    ) -> list[Handle[R]]:
        """Async version of `send_many` that does not block the running event loop."""
        given = [self.outgoing(call) for call in await acalls_of(calls, name="asend_many")]
        joined = one_connection(given, connection)
        return await self.arun(
            self._send_many(given, joined is not None),
            joined,
            calls=given,
            twin="send_many",
            patience_s=longest_patience_s(given, patience_s),
        )

    def new_child(self, call: Call[Any], /) -> NewChild:
        """Convert a call into a child task that a running task can send. Raises PayloadError if the call has a connection."""
        call = self.outgoing(call)
        require_plain(call.name, call.settings, what="a child task")
        if call.connection is not None:
            raise PayloadError(
                f"The call of {call.name!r} belongs to the transaction of a connection, and a child is sent by the worker.",
                parameter="call",
                fix="leave with_options(connection=...) out, or send it as a separate task: task.send(...).",
            )
        self.limits.require_waiting(call, what="a child task")
        task = self._new_task(call)
        return NewChild(
            name=task.name,
            queue=task.queue,
            priority=task.priority,
            args=task.args.decode(),
            key=task.key,
            policy=None if task.policy is None else task.policy.decode(),
            flags=None if task.flags is None else task.flags.decode(),
            good_until=task.good_until,
            serial=task.serial,
            gates=task.gates,
            costs=task.costs,
            labels=task.labels,
            digest=None
            if call.task is None
            else digest_of_values(*call.task._definition.codec.decode(task.args)),
        )

    def scheduled_call(self, call: Call[Any], /, *, what: str = "a schedule") -> ScheduledCall:
        """Return the task that each tick of a schedule sends. Raises ConfigurationError in the same cases as a send."""
        require_plain(call.name, call.settings, what=what)
        self.limits.require_waiting(call, what=what)
        task = self._new_task(call)
        gates = self.limits.gates(call)
        return ScheduledCall(
            task=task.name,
            args=task.args.decode(),
            queue=task.queue,
            priority=task.priority,
            key=task.key,
            policy=None if task.policy is None else task.policy.decode(),
            flags=None if task.flags is None else task.flags.decode(),
            serial=task.serial,
            gates=gates.names or UNSET,
            costs=UNSET if gates.costs is None else gates.costs,
            labels=dict(call.settings.labels) or UNSET,
        )

    def spec(self, task: Task[..., Any], /) -> TaskSpec:
        """Return the specification of the task that a workflow node sends. Raises ConfigurationError in the same cases as a send."""
        call = Call(name=task.name, payload=b"", settings=task._settings, task=task)
        require_plain(task.name, task._settings, what="a workflow node")
        return self._node_spec(
            call, what="a workflow node", handler=self.handlers.of(call.name, task._definition.options)
        )

    def _node_spec(self, call: Call[Any], *, what: str, handler: StoredHandler | None) -> TaskSpec:
        """Return the specification of a task whose arguments are not known yet."""
        self.limits.require_waiting(call, what=what)
        new = self._new_task(call, options=self._stored.with_handler(handler, call), is_node=True)
        gates, costs = self.limits.node_gates(call)
        return TaskSpec(
            name=new.name,
            queue=new.queue,
            priority=new.priority,
            policy=None if new.policy is None else new.policy.decode(),
            flags=None if new.flags is None else new.flags.decode(),
            good_until=None if new.good_until is None else new.good_until.isoformat(),
            serial=new.serial,
            gates=gates or None,
            costs=costs,
            labels=new.labels,
        )

    def run(
        self,
        plan: Plan[T],
        connection: object,
        *,
        calls: Sequence[Call[Any]] | None,
        name: str,
        twin: str,
        patience_s: float | None = None,
    ) -> T:
        """Run a plan in this thread, in the transaction of `connection` if given, after the limits of the calls (None: any) are stored."""
        if connection is None:
            plan = self.declarations.before(plan, calls)
            with nullcontext() if patience_s is None else self._database.patience(patience_s):
                return self._database.run(plan, name=name, twin=twin)
        refuse_in_loop(name, twin=twin)
        self.declarations.store_beside(calls, name=name, twin=twin, patience_s=patience_s)
        schema = self._database.address.schema
        return perform(plan, lambda step: run_joined(connection, step, schema=schema, twin=twin))

    async def arun(
        self,
        plan: Plan[T],
        connection: object,
        *,
        calls: Sequence[Call[Any]] | None,
        twin: str,
        patience_s: float | None = None,
    ) -> T:
        """Async version of `run` that does not block the running event loop."""
        if connection is None:
            plan = self.declarations.before(plan, calls)
            with nullcontext() if patience_s is None else self._database.patience(patience_s):
                return await self._database.arun(plan)
        await self.declarations.astore_beside(calls, patience_s=patience_s)
        schema = self._database.address.schema
        return await aperform(plan, lambda step: arun_joined(connection, step, schema=schema, twin=twin))

    def outgoing(self, call: Call[R]) -> Call[R]:
        """Return the call after the app's functions around sends have seen it."""
        return outgoing(call, self.around_send) if self.around_send else call

    def _send(self, call: Call[R]) -> Plan[Handle[R]]:
        new, store = [self._new_task(call)], partial(self._send_new, call)
        return (yield from traced(self.tracing, new, store, meters=self.meters))

    def _send_new(self, call: Call[R], new: Sequence[NewTask]) -> Plan[Handle[R]]:
        (task,) = new
        joined = call.connection is not None
        if self._queue_limits:
            yield from self._admitted([task], is_joined=joined)
        if not call.settings.is_plain:
            (handle,) = yield from self._send_unique([call], [task], joined)
            return handle
        if self.limits.drops(call):
            return (yield from self._send_unless_full(call, task, joined))
        for _ in range(KEY_TRIES):
            sent = yield from send_task(task, channel=self._database.channel, joined=joined)
            if sent is not None:
                return self.handle(call, sent, existed=sent != task.id)
        raise key_moves([task])

    def _send_unless_full(self, call: Call[R], task: NewTask, joined: bool) -> Plan[Handle[R]]:
        for _ in range(KEY_TRIES):
            sent = yield from send_unless_full(task, channel=self._database.channel, joined=joined)
            if isinstance(sent, FullGate):
                limit = limit_of(sent.gate)
                raise LimitFull(limit, task=task.name, concurrency=sent.concurrency, cost=sent.cost)
            if sent is not None and sent.name != task.name:  # this call's decoder does not fit its result
                return Handle(sent.id, name=sent.name, operations=self._operations, existed=True)
            if sent is not None:
                return self.handle(call, sent.id, existed=sent.id != task.id)
        raise key_moves([task])

    def _send_unique(
        self, calls: Sequence[Call[R]], new: Sequence[NewTask], joined: bool
    ) -> Plan[list[Handle[R]]]:
        channel = self._database.channel
        for call in calls:
            if not call.settings.is_plain:
                self.limits.require_waiting(call, what="a send with unique_for or on_duplicate")
        sent = yield from send_unique(calls, new, channel=channel, joined=joined, tries=KEY_TRIES)
        if sent is None:
            raise key_moves([task for task in new if task.key is not None])
        return [
            self.handle(call, each.id, existed=each.existed) for call, each in zip(calls, sent, strict=True)
        ]

    def _send_many(self, calls: Sequence[Call[R]], is_joined: bool, /) -> Plan[list[Handle[R]]]:
        if not calls:
            return []
        new = yield from self.new_tasks(calls, is_joined=is_joined)
        store = partial(self._send_all_new, calls, is_joined)
        return (yield from traced(self.tracing, new, store, meters=self.meters))

    def _send_all_new(
        self, calls: Sequence[Call[R]], is_joined: bool, new: Sequence[NewTask], /
    ) -> Plan[list[Handle[R]]]:
        if not all(call.settings.is_plain for call in calls):
            return (yield from self._send_unique(calls, new, is_joined))
        ids: list[UUID | None] = []
        for _ in range(KEY_TRIES):
            ids = yield from ask(insert_tasks(new, channel=self._database.channel, joined=is_joined))
            sent = [task_id for task_id in ids if task_id is not None]
            if len(sent) == len(calls):
                return [
                    self.handle(call, task_id, existed=task_id != task.id)
                    for call, task_id, task in zip(calls, sent, new, strict=True)
                ]
        raise key_moves([task for task, task_id in zip(new, ids, strict=True) if task_id is None])

    def new_tasks(self, calls: Sequence[Call[Any]], *, is_joined: bool = False) -> Plan[list[NewTask]]:
        """Return the tasks to store for these calls, once their queues have room for them."""
        require_room(calls)
        for call in calls:
            self.limits.require_waiting(call, what="a send of many tasks")
        new = [self._new_task(call) for call in calls]
        if self._queue_limits:
            yield from self._admitted(new, is_joined=is_joined)
        return new

    def _admitted(self, tasks: Sequence[NewTask], *, is_joined: bool) -> Plan[None]:
        """Return if the queues have room for the tasks. A send in the user's transaction does not wait, because the transaction may hold locks."""
        sending = Counter(task.queue for task in tasks)
        return self._queue_limits.admit(sending, patience_s=None if is_joined else self._database.patience_s)

    def handle(self, call: Call[R], task_id: UUID, /, *, existed: bool | None = None) -> Handle[R]:
        """Return a handle for the task that was sent for a call, and count the task unless it `existed`.

        None means that a worker sends the task, which is not counted here.
        """
        if existed is False:
            self.sent.count(call.settings.queue, call.name)
            if self.meters is not None:
                self.meters.sent(call.settings.queue, call.name)
        name, had_it = call.name, bool(existed)
        if call.task is None:
            return Handle(task_id, name=name, operations=self._operations, existed=had_it)
        decode: Callable[[str], Any] = call.task._definition.codec.decode_result
        return Handle(task_id, name=name, operations=self._operations, decode=decode, existed=had_it)

    def _new_task(
        self, call: Call[Any], *, options: StoredOptions | None = None, is_node: bool = False
    ) -> NewTask:
        settings = call.settings
        self.require_queue(settings.queue, subject=f"queue of task {call.name!r}")
        require_key(call.name, settings)
        policy, flags = options or self._stored.of(call)
        gates = NO_GATES if is_node else self.limits.gates(call)
        return NewTask(
            id=self._ids.next(),
            name=call.name,
            queue=settings.queue,
            priority=settings.priority,
            args=call.payload,
            key=settings.key,
            policy=policy,
            flags=flags,
            good_until=settings.good_until,
            run_at=call.when if isinstance(call.when, datetime) else None,
            delay_ms=milliseconds(call.when.total_seconds()) if isinstance(call.when, timedelta) else 0,
            serial=self._line(call),
            gates=texts(gates.names) if gates.names else None,
            costs=None if gates.costs is None else integers(gates.costs),
            labels=encode_labels(settings.labels),
        )

    def _line(self, call: Call[Any]) -> str | None:
        """Return the call's serial line, derived from its key, task function or queue, or None if the call is not serial.

        Raises ConfigurationError if both the call and its queue are serial.
        """
        queue, serial = call.settings.queue, call.settings.serial
        own = None if serial is False else f"task:{call.name}" if serial is True else f"key:{serial}"
        if queue not in self.serial_queues:
            return own
        if own is not None:
            raise refused(
                serial,
                subject=f"serial of task {call.name!r}",
                code="CONTRADICTION",
                rule=f"puts the task into a serial line, but its queue {queue!r} is also serial, and a task can wait in one line only",
                fix="leave serial out, or send it to a queue that is not serial",
            )
        return f"queue:{queue}"

    def require_queue(self, name: str, *, subject: str) -> None:
        """Raise ConfigurationError if the app declares queues and `name` is not one of them."""
        if not self._queues or name in self._queues:
            return
        guess = nearest(name, self._queues)
        rule = f"is not one of the queues that this app declares: {', '.join(sorted(self._queues))}"
        fix = f"use {guess!r}" if guess else f"add QueueConfig({name!r}) to App(queues=...)"
        raise refused(name, subject=subject, code="UNKNOWN_QUEUE", rule=rule, fix=fix)
