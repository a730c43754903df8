"""Surrounds the statements that send tasks with the app's tracers and meters, and stores the carriers that these give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar
from uuid import UUID

import msgspec
from msgspec import structs

from everbeat.domain.labels import decode_labels
from everbeat.domain.metrics.meters import Meters
from everbeat.domain.schedule.inspection import ScheduleInfo
from everbeat.domain.tracing.model import TracedSend
from everbeat.domain.tracing.tracing import Tracing
from everbeat.errors.wording import class_name
from everbeat.store.plan import Plan
from everbeat.store.tasks import NewTask

T = TypeVar("T")


def traced(
    tracing: Tracing | None,
    tasks: Sequence[NewTask],
    store: Callable[[Sequence[NewTask]], Plan[T]],
    *,
    meters: Meters | None = None,
) -> Plan[T]:
    """Return the plan that stores the tasks, surrounded by the tracers and recorded by the meters, if there are any.

    All sends of tasks pass through here.
    """
    if meters is not None and tasks:
        return (yield from _measured(meters, tasks, traced(tracing, tasks, store)))
    if tracing is None or not tasks:
        return (yield from store(tasks))
    with tracing.sending([_traced(task) for task in tasks]) as contexts:
        given = zip(tasks, contexts, strict=True)
        return (yield from store([structs.replace(task, context=context) for task, context in given]))


def traced_run(
    tracing: Tracing | None, schedule: ScheduleInfo, task_id: UUID, store: Callable[[str | None], Plan[T]]
) -> Plan[T]:
    """Return the plan that runs a schedule by hand, surrounded by the tracers. `store` makes it from the carrier as JSON text, or None."""
    if tracing is None:
        return (yield from store(None))
    size = len(msgspec.json.encode(schedule.arguments))
    send = TracedSend(name=schedule.task, queue=schedule.queue, task_id=task_id, size=size)
    with tracing.sending([send]) as contexts:
        return (yield from store(contexts[0]))


def _measured(meters: Meters, tasks: Sequence[NewTask], plan: Plan[T]) -> Plan[T]:
    queues = {task.queue for task in tasks}
    queue = queues.pop() if len(queues) == 1 else None
    began_at = monotonic()
    try:
        sent = yield from plan
    except Exception as problem:
        took_s = monotonic() - began_at
        meters.operated("send", queue, took_s=took_s, error_type=class_name(type(problem)))
        raise
    meters.operated("send", queue, took_s=monotonic() - began_at, error_type=None)
    return sent


def _traced(task: NewTask) -> TracedSend:
    return TracedSend(
        name=task.name,
        queue=task.queue,
        task_id=task.id,
        size=len(task.args),
        key=task.key,
        labels=decode_labels(task.labels),
    )
