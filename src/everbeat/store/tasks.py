"""Statements of whoever sends, asks about, cancels and retries tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.domain.states import TaskState
from everbeat.store.literals import integers, json_array, uuids
from everbeat.store.plan import Plan, ask
from everbeat.store.statement import Row, Statement


class NewTask(Struct, frozen=True, kw_only=True):
    """A task to send. `args`, `policy`, `flags` are JSON text; due at `run_at` or `delay_ms` after the database's now.

    `serial`: the line it waits in, of which one task runs at a time.
    """

    id: UUID
    name: str
    queue: str
    priority: int
    args: bytes
    key: str | None = None
    policy: bytes | None = None
    flags: bytes | None = None
    good_until: datetime | None = None
    run_at: datetime | None = None
    delay_ms: int = 0
    serial: str | None = None


_Kind: TypeAlias = tuple[
    str, str, int, str | None, bytes | None, bytes | None, datetime | None, datetime | None, int, str | None
]


class StoredOutcome(Struct, frozen=True):
    """What is stored of a task's end: `result` and `error` are JSON text."""

    id: UUID
    name: str
    state: TaskState
    result: str | None
    error: str | None


def send_task(task: NewTask, *, channel: str, joined: bool = False) -> Plan[UUID | None]:
    """Sends one task, in somebody's own transaction if `joined`; its id, which is another's where a live task has the key. None when that one
    ended at this very moment (send again)."""
    inserted = yield from ask(insert_task(task, channel=channel, joined=joined))
    if inserted is not None:
        return inserted
    return (yield from ask(sent_before(task)))


def insert_task(task: NewTask, *, channel: str, joined: bool = False) -> Statement[UUID | None]:
    """Sends one task; None where it was sent before, or a live task has its key."""
    parameters = {
        "id": task.id, "name": task.name, "queue": task.queue, "priority": task.priority, "args": _text(task.args), "key": task.key,
        "policy": _text(task.policy), "flags": _text(task.flags), "good_until": task.good_until, "run_at": task.run_at,
        "delay_ms": task.delay_ms, "serial": task.serial, "channel": channel, "joined": joined,
    }  # fmt: skip
    return Statement("task/insert_task", parameters, _first_id)


def sent_before(task: NewTask) -> Statement[UUID | None]:
    """What is there in the place of a task that could not be inserted."""
    return Statement("task/sent", {"id": task.id, "name": task.name, "key": task.key}, _first_id)


def _first_id(found: Sequence[Row]) -> UUID | None:
    return _id(found[0][0]) if found else None


def insert_tasks(
    tasks: Sequence[NewTask], *, channel: str, joined: bool = False
) -> Statement[list[UUID | None]]:
    """Sends many tasks, all or none, as `insert_task`; the ids in the order asked (None: the key's holder ended at this very moment)."""
    kinds: dict[_Kind, int] = {}
    numbers = [kinds.setdefault(_kind(task), len(kinds) + 1) for task in tasks]
    names, queues, priorities, keys, policies, flags, good_until, run_at, delay_ms, serials = zip(
        *kinds, strict=True
    )
    parameters = {
        "ids": uuids([task.id for task in tasks]), "kinds": integers(numbers), "args": json_array([task.args for task in tasks]),
        "names": list(names), "queues": list(queues), "priorities": list(priorities), "keys": list(keys),
        "policies": [_text(each) for each in policies], "flags": [_text(each) for each in flags],
        "good_until": list(good_until), "run_at": list(run_at), "delay_ms": integers(delay_ms), "serials": list(serials),
        "channel": channel, "joined": joined,
    }  # fmt: skip

    def read(found: Sequence[Row]) -> list[UUID | None]:
        others = {_id(row[1]): None if row[0] is None else _id(row[0]) for row in found if row[1] is not None}
        if not others:
            return [task.id for task in tasks]
        return [others.get(task.id, task.id) for task in tasks]

    return Statement("task/insert_tasks", parameters, read)


def _kind(task: NewTask) -> _Kind:
    return (
        task.name, task.queue, task.priority, task.key, task.policy, task.flags, task.good_until, task.run_at, task.delay_ms, task.serial,
    )  # fmt: skip


def outcomes(ids: Sequence[UUID]) -> Statement[dict[UUID, StoredOutcome]]:
    """The states of these tasks and how they ended; unknown ids are missing."""
    return Statement(
        "task/outcomes", {"ids": uuids(ids)},
        lambda found: {row[0]: StoredOutcome(row[0], row[1], TaskState(row[2]), row[3], row[4]) for row in found},
    )  # fmt: skip


def cancel(task_id: UUID, *, channel: str, call: UUID) -> Statement[tuple[str, TaskState, bool] | None]:
    """Cancels, repeatable by its `call`; answers the verdict (CANCELLED, REQUESTED, or the terminal state), the state that it
    found, and whether this call cancelled it before its code started; None: no such task."""
    return Statement(
        "task/cancel",
        {"id": task_id, "channel": channel, "call": call},
        lambda found: (found[0][0], TaskState(found[0][1]), found[0][2]) if found else None,
    )


def cancel_children(task_id: UUID, *, channel: str) -> Statement[int]:
    """Cancels what the task has sent, and that in turn; answers how many this call cancelled or asked. Repeat it until there are none."""
    return Statement(
        "task/cancel_children", {"id": task_id, "channel": channel}, lambda found: int(found[0][0])
    )


def retry(
    task_id: UUID, *, channel: str, call: UUID
) -> Statement[tuple[UUID | None, TaskState, bool, UUID | None] | None]:
    """An operator's retry, repeatable by its `call`; answers of which workflow it is a node's, the state before, whether it was
    retried, and which live task has its key; None: no such task."""
    return Statement(
        "task/retry",
        {"id": task_id, "call": call, "channel": channel},
        lambda found: (
            (found[0][0], TaskState(found[0][1]), bool(found[0][2]), found[0][3]) if found else None
        ),
    )


def expire(*, channel: str, limit: int = 200) -> Statement[list[UUID]]:
    """Expires a batch of late tasks; answers their ids."""
    return Statement(
        "task/expire", {"channel": channel, "limit": limit}, lambda found: [row[0] for row in found]
    )


def _id(value: object) -> UUID:
    # The connection may be the user's, and psycopg2 gives UUIDs as text unless it was told.
    return value if isinstance(value, UUID) else UUID(str(value))


def _text(data: bytes | None) -> Any:
    return None if data is None else data.decode()
