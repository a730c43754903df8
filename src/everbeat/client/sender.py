"""From calls to rows: ids, policies and queues of what is sent, and the statements that store it.

What lives here: `CallSender`. What may not: arguments, which a call brings encoded, and registration.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

import msgspec

from everbeat.client.control import Control
from everbeat.client.door import Door, refuse_in_loop
from everbeat.client.handle import Handle
from everbeat.client.many import acalls_of, calls_of, longest_patience_s, one_connection
from everbeat.client.task import Call, Task
from everbeat.domain.duration import milliseconds
from everbeat.domain.graph import TaskSpec
from everbeat.domain.identifiers import RANDOM_BYTES, uuid7
from everbeat.domain.policy import OnCrash, TaskOptions
from everbeat.domain.recorded import NewChild
from everbeat.domain.settings import refused
from everbeat.domain.typed_json import LARGEST_BYTES
from everbeat.errors import PayloadError, SendError, nearest
from everbeat.runtime.clock import Clock
from everbeat.runtime.fork import call_in_forked_child
from everbeat.store.joined import arun_joined, run_joined
from everbeat.store.plan import Plan, aperform, ask, perform
from everbeat.store.tasks import NewTask, insert_tasks, send_task

R = TypeVar("R")
T = TypeVar("T")
_MOST_TRIES = 20


class TaskIds:
    """The ids of this process: each above the one before, whatever the clock does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._last: UUID | None = None

    def next(self) -> UUID:
        """A fresh UUIDv7."""
        unix_ms = int(self._clock.wall().timestamp() * 1_000)
        with self._lock:
            self._last = uuid7(unix_ms=unix_ms, random=os.urandom(RANDOM_BYTES), previous=self._last)
            return self._last


class CallSender:
    """Stores calls as tasks. `queues` are the queues the app declared; none declared means that any name will do.

    Of the tasks in each of `serial_queues` one runs at a time.
    """

    def __init__(
        self,
        control: Control,
        *,
        ids: TaskIds,
        on_crash: OnCrash,
        queues: Collection[str],
        serial_queues: Collection[str] = (),
        payload_limit: int = LARGEST_BYTES,
    ) -> None:
        self.payload_limit = payload_limit
        self._control = control
        self._ids = ids
        self._on_crash = on_crash
        self._queues = frozenset(queues)
        self._serial_queues = frozenset(serial_queues)
        self._stored: WeakKeyDictionary[Task[..., Any], tuple[bytes | None, bytes | None]] = (
            WeakKeyDictionary()
        )

    @property
    def ids(self) -> TaskIds:
        """Where ids come from."""
        return self._ids

    @property
    def door(self) -> Door:
        """The way to the database."""
        return self._control.door

    def send(self, call: Call[R], /) -> Handle[R]:
        """Stores one task. Raises BlockingCallInLoop, ConfigurationError, a DatabaseError."""
        return self.run(
            self._send(call), call.connection, name="send", twin="asend", patience_s=call.patience_s
        )

    async def asend(self, call: Call[R], /) -> Handle[R]:
        """The twin of `send`."""
        return await self.arun(self._send(call), call.connection, twin="send", patience_s=call.patience_s)

    def send_many(
        self, calls: Iterable[Call[R]], /, *, connection: object = None, patience_s: float | None = None
    ) -> list[Handle[R]]:
        """Stores many tasks in one statement: all of them, or none."""
        given = calls_of(calls, name="send_many")
        joined = one_connection(given, connection)
        return self.run(
            self._send_many(given, joined is not None),
            joined,
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
        """The twin of `send_many`."""
        given = await acalls_of(calls, name="asend_many")
        joined = one_connection(given, connection)
        return await self.arun(
            self._send_many(given, joined is not None),
            joined,
            twin="send_many",
            patience_s=longest_patience_s(given, patience_s),
        )

    def as_child(self, call: Call[Any], /) -> NewChild:
        """What a running task sends for a call; raises PayloadError for one that belongs to a transaction."""
        if call.connection is not None:
            raise PayloadError(
                f"The call of {call.name!r} belongs to the transaction of a connection, and a child is sent by the worker.",
                parameter="call",
                fix="leave with_options(connection=...) out, or send it as a task of its own: task.send(...).",
            )
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
        )

    def spec(self, task: Task[..., Any], /) -> TaskSpec:
        """How a node of a workflow sends this task. Raises ConfigurationError, as a send does."""
        new = self._new_task(Call(name=task.name, payload=b"", settings=task.settings, task=task))
        return TaskSpec(
            name=new.name,
            queue=new.queue,
            priority=new.priority,
            policy=None if new.policy is None else new.policy.decode(),
            flags=None if new.flags is None else new.flags.decode(),
            good_until=None if new.good_until is None else new.good_until.isoformat(),
            serial=new.serial,
        )

    def run(
        self, plan: Plan[T], connection: object, *, name: str, twin: str, patience_s: float | None = None
    ) -> T:
        """A plan in this thread, in a transaction of `connection` if there is one; raises BlockingCallInLoop."""
        if connection is None:
            with nullcontext() if patience_s is None else self.door.patience(patience_s):
                return self.door.run(plan, name=name, twin=twin)
        refuse_in_loop(name, twin=twin)
        schema = self.door.address.schema
        return perform(plan, lambda step: run_joined(connection, step, schema=schema, twin=twin))

    async def arun(
        self, plan: Plan[T], connection: object, *, twin: str, patience_s: float | None = None
    ) -> T:
        """The twin of `run`."""
        if connection is None:
            with nullcontext() if patience_s is None else self.door.patience(patience_s):
                return await self.door.arun(plan)
        schema = self.door.address.schema
        return await aperform(plan, lambda step: arun_joined(connection, step, schema=schema, twin=twin))

    def _send(self, call: Call[R]) -> Plan[Handle[R]]:
        task = self._new_task(call)
        for _ in range(_MOST_TRIES):
            sent = yield from send_task(task, channel=self.door.channel, joined=call.connection is not None)
            if sent is not None:
                return self.handle(call, sent)
        raise _key_moves([task])

    def _send_many(self, calls: Sequence[Call[R]], is_joined: bool, /) -> Plan[list[Handle[R]]]:
        if not calls:
            return []
        _require_room(calls)
        new = [self._new_task(call) for call in calls]
        ids: list[UUID | None] = []
        for _ in range(_MOST_TRIES):
            ids = yield from ask(insert_tasks(new, channel=self.door.channel, joined=is_joined))
            sent = [task_id for task_id in ids if task_id is not None]
            if len(sent) == len(calls):
                return [self.handle(call, task_id) for call, task_id in zip(calls, sent, strict=True)]
        raise _key_moves([task for task, task_id in zip(new, ids, strict=True) if task_id is None])

    def handle(self, call: Call[R], task_id: UUID, /) -> Handle[R]:
        """The handle of what was sent for a call."""
        if call.task is None:
            return Handle(task_id, name=call.name, control=self._control)
        decode: Callable[[str], Any] = call.task.definition.codec.decode_result
        return Handle(task_id, name=call.name, control=self._control, decode=decode)

    def _new_task(self, call: Call[Any]) -> NewTask:
        settings = call.settings
        self.require_queue(settings.queue, subject=f"queue of task {call.name!r}")
        policy, flags = self._stored_options(call)
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
        )

    def _line(self, call: Call[Any]) -> str | None:
        """The serial line of a call: a key's, the task function's or its queue's; raises ConfigurationError for two at once."""
        queue, serial = call.settings.queue, call.settings.serial
        own = None if serial is False else f"task:{call.name}" if serial is True else f"key:{serial}"
        if queue not in self._serial_queues:
            return own
        if own is not None:
            raise refused(
                serial,
                subject=f"serial of task {call.name!r}",
                code="CONTRADICTION",
                rule=f"puts it into a line of its own, but its queue {queue!r} is serial itself, and a task waits in one line",
                fix="leave serial out, or send it to a queue that is not serial",
            )
        return f"queue:{queue}"

    def require_queue(self, name: str, *, subject: str) -> None:
        """Raises ConfigurationError for a queue that the app did not declare, if it declared any."""
        if not self._queues or name in self._queues:
            return
        guess = nearest(name, self._queues)
        rule = f"is none of the queues this app declares: {', '.join(sorted(self._queues))}"
        fix = f"use {guess!r}" if guess else f"add QueueConfig({name!r}) to App(queues=...)"
        raise refused(name, subject=subject, code="UNKNOWN_QUEUE", rule=rule, fix=fix)

    def _stored_options(self, call: Call[Any]) -> tuple[bytes | None, bytes | None]:
        """Policy and flags as they are stored: what a reaper needs, which imports no user code."""
        if call.task is not None and (known := self._stored.get(call.task)) is not None:
            return known
        plain = TaskOptions() if call.task is None else call.task.definition.options
        options = plain.given(timeout=call.settings.timeout, retry=call.settings.retry)
        if options == plain:
            options = plain  # nothing is stored for what is plain: the worker's own definition is asked
        flags: Mapping[str, bool] = options.flag_values
        stored = (
            options.stored(on_crash=self._on_crash).to_json() or (None if options is plain else b"{}"),
            msgspec.json.encode(dict(flags)) if flags else None,
        )
        if call.task is not None:
            self._stored[call.task] = stored
        return stored


def _require_room(calls: Sequence[Call[Any]]) -> None:
    size = sum(len(call.payload) for call in calls)
    if size > LARGEST_BYTES:
        raise PayloadError(
            f"The arguments of the {len(calls):,} calls of a send_many would take {size:,} bytes of JSON;"
            f" one statement takes {LARGEST_BYTES:,}.",
            parameter="calls",
            fix="send them in several batches.",
        )


def _key_moves(tasks: Sequence[NewTask]) -> SendError:
    names = ", ".join(sorted({f"{task.name} ({task.key!r})" for task in tasks}))
    return SendError(
        f"The key of {names} was taken and freed again at each of {_MOST_TRIES} tries to send.",
        task_id=tasks[0].id,
        fix="send again; nothing was stored for it.",
    )
