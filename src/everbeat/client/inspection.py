"""What an app shows of its schema: tasks, workers, supervisors, queues, heartbeats, recoveries, snapshots; it changes nothing.

What lives here: `Inspection`, the looking half of an app. What may not: what is seen (`domain.inspection`) and the SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from msgspec import structs

from everbeat.client.control import to_task_id
from everbeat.client.door import Door
from everbeat.client.twins import awaiting, blocking
from everbeat.client.workflow_control import to_workflow_id
from everbeat.domain.checks import remark, whole
from everbeat.domain.duration import Duration, When, to_milliseconds, to_when
from everbeat.domain.inspection import (
    HeartbeatInfo,
    QueueInfo,
    RecoveryInfo,
    SupervisorInfo,
    TaskSummary,
    WorkerInfo,
    WorkerStateInfo,
)
from everbeat.domain.settings import refused
from everbeat.domain.states import TaskState
from everbeat.errors import nearest
from everbeat.store import inspect
from everbeat.store.plan import Plan, ask

_limit: Final = whole(1, 100_000)
_number: Final = whole(1, 2**63 - 1)


class Inspection:
    """Every question has a twin to await, named with a leading `a`. Lists come newest first."""

    def __init__(self, door: Door, *, alive_within_ms: int, queue_priorities: Mapping[str, int]) -> None:
        self._door = door
        self._alive_within_ms = alive_within_ms
        self._queue_priorities = queue_priorities

    @property
    def door(self) -> Door:
        """The way to the database."""
        return self._door

    def _list_tasks(
        self,
        *,
        state: str | Sequence[str] | None = None,
        name: str | None = None,
        queue: str | None = None,
        workflow: UUID | str | None = None,
        before: UUID | str | None = None,
        parent: UUID | str | None = None,
        limit: int = 100,
    ) -> Plan[list[TaskSummary]]:
        """Tasks, newest first: of these states, this name, this queue, the nodes of one workflow, the children of this `parent`.
        `before` an id continues a page.

        app.list_tasks(state="FAILED", queue="mail", limit=20)
        """
        return ask(
            inspect.tasks(
                states=None if state is None else _states(state),
                name=name,
                queue=queue,
                workflow=None if workflow is None else to_workflow_id(workflow),
                before=None if before is None else to_task_id(before),
                parent=None if parent is None else to_task_id(parent),
                limit=_limit(limit, subject="limit"),
            )
        )

    def _list_workers(self, *, ended: bool = True, limit: int = 1_000) -> Plan[list[WorkerInfo]]:
        """Workers, also those that ended, newest beat first."""
        return ask(
            inspect.workers(
                stale_ms=self._alive_within_ms, ended_too=ended, limit=_limit(limit, subject="limit")
            )
        )

    def _list_active_workers(
        self, *, stale_after: Duration | None = None, limit: int = 1_000
    ) -> Plan[list[WorkerInfo]]:
        """Workers that were not ended, newest beat first; `is_stale` says whose beat is older than `stale_after`.

        `stale_after` None takes the claimed_stale_threshold_ms of the app or of the worker's own tree, whichever is longer. The age is by
        the database's clock.
        """
        return ask(
            inspect.workers(
                stale_ms=self._stale_ms(stale_after),
                exact=stale_after is not None,
                ended_too=False,
                limit=_limit(limit, subject="limit"),
            )
        )

    def _list_supervisors(
        self, *, ended: bool = True, stale_after: Duration | None = None, limit: int = 1_000
    ) -> Plan[list[SupervisorInfo]]:
        """Supervisors, also those that ended, newest beat first; `start_problem` says why one cannot start a worker process.

        `stale_after` is as in `list_active_workers`.
        """
        return ask(
            inspect.supervisors(
                stale_ms=self._stale_ms(stale_after),
                exact=stale_after is not None,
                ended_too=ended,
                limit=_limit(limit, subject="limit"),
            )
        )

    def _stale_ms(self, stale_after: Duration | None) -> int:
        if stale_after is None:
            return self._alive_within_ms
        return to_milliseconds(stale_after, subject="stale_after")

    def _queues(self) -> Plan[list[QueueInfo]]:
        """Declared queues and those with live tasks, in the order they are served, then by name."""
        found = yield from ask(inspect.queues())
        by_name = {name: QueueInfo(name=name) for name in self._queue_priorities}
        by_name |= {queue.name: queue for queue in found}
        known = [
            structs.replace(queue, priority=self._queue_priorities.get(queue.name))
            for queue in by_name.values()
        ]
        return sorted(
            known, key=lambda queue: (100 if queue.priority is None else queue.priority, queue.name)
        )

    def _heartbeats(
        self, task_id: UUID | str | None = None, *, limit: int = 1_000
    ) -> Plan[list[HeartbeatInfo]]:
        """The latest heartbeat of every task in flight, or the heartbeats of one of them, newest first."""
        chosen = None if task_id is None else to_task_id(task_id)
        return ask(inspect.heartbeats(chosen, limit=_limit(limit, subject="limit")))

    def _recoveries(
        self,
        task_id: UUID | str | None = None,
        *,
        number: int | None = None,
        worker: str | None = None,
        since: When | None = None,
        cause: str | None = None,
        limit: int = 100,
    ) -> Plan[list[RecoveryInfo]]:
        """Recoveries, newest first: of one task, of this number, of what one dead worker held, since a moment.

        `since` may be a timedelta before now; `cause` is a part of the cause, or a way of noticing such as "age".

        app.recoveries(since=timedelta(hours=1), cause="SIGKILL")
        """
        return ask(
            inspect.recoveries(
                None if task_id is None else to_task_id(task_id),
                number=None if number is None else _number(number, subject="number"),
                worker=worker,
                since=None if since is None else to_when(since, subject="since"),
                cause=None if cause is None else remark(cause, subject="cause"),
                limit=_limit(limit, subject="limit"),
            )
        )

    def _worker_states(
        self, worker_id: str | None = None, *, limit: int = 100
    ) -> Plan[list[WorkerStateInfo]]:
        """Snapshots of all workers or of one, newest first."""
        return ask(inspect.worker_states(worker_id, limit=_limit(limit, subject="limit")))

    list_tasks = blocking(_list_tasks)
    alist_tasks = awaiting(_list_tasks)
    list_workers = blocking(_list_workers)
    alist_workers = awaiting(_list_workers)
    list_active_workers = blocking(_list_active_workers)
    alist_active_workers = awaiting(_list_active_workers)
    list_supervisors = blocking(_list_supervisors)
    alist_supervisors = awaiting(_list_supervisors)
    queues = blocking(_queues)
    aqueues = awaiting(_queues)
    heartbeats = blocking(_heartbeats)
    aheartbeats = awaiting(_heartbeats)
    recoveries = blocking(_recoveries)
    arecoveries = awaiting(_recoveries)
    worker_states = blocking(_worker_states)
    aworker_states = awaiting(_worker_states)


def _states(given: str | Sequence[str]) -> list[TaskState]:
    found = []
    for state in [given] if isinstance(given, str) else given:
        try:
            found.append(TaskState(state))
        except ValueError:
            guess = nearest(str(state), [known.value for known in TaskState])
            rule = f"must be one of {', '.join(TaskState)}"
            fix = f"use {guess!r}" if guess else "use 'FAILED', for example"
            raise refused(state, subject="state", code="UNKNOWN_CHOICE", rule=rule, fix=fix) from None
    return found
