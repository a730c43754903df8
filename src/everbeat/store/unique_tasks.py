"""The statements for tasks with a scope of uniqueness or an answer to duplicates, and the look-up of a task by its key."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from msgspec import Struct

from everbeat.domain.task.uniqueness import OnDuplicate
from everbeat.store import rows
from everbeat.store.announcer import hints_of
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, integers, json_array, uuids
from everbeat.store.tasks import NewTask, contexts_of, traced_if


class UniqueTask(Struct, frozen=True, kw_only=True):
    """A task to send, and what its key means. `unique_for` is the stored scope (None: while the task is live)."""

    task: NewTask
    unique_for: str | None
    on_duplicate: OnDuplicate
    at_latest_ms: int | None = None


def insert_unique_tasks(
    asked: Sequence[UniqueTask], *, channel: str, joined: bool = False
) -> Statement[list[UUID | None]]:
    """Send tasks, either all or none, and return the task that each of them has become.

    That is the task itself, or the task that has its key. If one of the latter has the answer "reject", nothing was stored. None: the task
    that has the key has just changed, so send again. No key may occur twice with the same kind of scope.
    """
    tasks = [each.task for each in asked]
    texts = {"policies": [task.policy for task in tasks], "flags": [task.flags for task in tasks]}
    parameters = {
        "ids": uuids([task.id for task in tasks]), "kinds": integers(range(1, len(tasks) + 1)),
        "args": json_array([task.args for task in tasks]), "names": [task.name for task in tasks], "queues": [task.queue for task in tasks],
        "priorities": [task.priority for task in tasks], "keys": [task.key for task in tasks],
        **{name: [None if text is None else text.decode() for text in given] for name, given in texts.items()},
        "good_until": [task.good_until for task in tasks], "run_at": [task.run_at for task in tasks],
        "delay_ms": integers([task.delay_ms for task in tasks]), "serials": [task.serial for task in tasks],
        "unique_for": [each.unique_for for each in asked], "on_duplicate": [each.on_duplicate for each in asked],
        "at_latest_ms": integers([each.at_latest_ms for each in asked]), "channel": channel, "joined": joined,
        "gates": [task.gates for task in tasks], "costs": [task.costs for task in tasks],
        "labels": [task.labels for task in tasks], "contexts": contexts_of(tasks),
    }  # fmt: skip

    def read(found: Sequence[Row]) -> list[UUID | None]:
        others = {
            rows.as_uuid(row[1]): None if row[0] is None else rows.as_uuid(row[0])
            for row in found
            if row[1] is not None
        }
        return [others.get(task.id, task.id) for task in tasks]

    hints = hints_of([task.queue for task in tasks], count=len(tasks), joined=joined)
    name = traced_if(tasks, name="task/insert_unique_tasks")
    return Statement(name, parameters, read, hints=hints)


def task_with_key(name: str, key: str) -> Statement[UUID | None]:
    """Return the id of the task of this function that has the key now, or None."""
    return Statement(
        "task/find_task_by_key",
        {"name": name, "key": key},
        lambda found: rows.as_uuid(found[0][0]) if found else None,
    )
