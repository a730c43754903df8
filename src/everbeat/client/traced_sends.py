"""Surrounds the statements that send tasks with the app's tracers, and stores the carriers that these give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs

from everbeat.domain.labels import decode_labels
from everbeat.domain.tracing.model import TracedSend
from everbeat.domain.tracing.tracing import Tracing
from everbeat.store.plan import Plan
from everbeat.store.tasks import NewTask

T = TypeVar("T")


def traced(
    tracing: Tracing | None, tasks: Sequence[NewTask], store: Callable[[Sequence[NewTask]], Plan[T]]
) -> Plan[T]:
    """Return the plan that stores the tasks, surrounded by the tracers, if there are any. All sends of tasks pass through here."""
    if tracing is None or not tasks:
        return (yield from store(tasks))
    with tracing.sending([_traced(task) for task in tasks]) as contexts:
        given = zip(tasks, contexts, strict=True)
        return (yield from store([structs.replace(task, context=context) for task, context in given]))


def _traced(task: NewTask) -> TracedSend:
    return TracedSend(
        name=task.name,
        queue=task.queue,
        task_id=task.id,
        size=len(task.args),
        key=task.key,
        labels=decode_labels(task.labels),
    )
