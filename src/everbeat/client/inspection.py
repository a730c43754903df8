"""The `App` methods that list tasks, workers, supervisors, queues, heartbeats, recoveries and workflows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, Literal, TypeAlias, Unpack
from uuid import UUID

from msgspec import structs

from everbeat.client.failures import FailureMethods
from everbeat.client.handle import to_batch_id, to_task_id, to_workflow_id
from everbeat.client.registry import Registry
from everbeat.client.task_pages import examined_page
from everbeat.client.workflow import operations as workflow_operations
from everbeat.domain.filters import RecoveryFilters, TaskFilters, WorkflowFilters
from everbeat.domain.inspection import (
    HeartbeatInfo,
    QueueInfo,
    RecoveryPage,
    SupervisorInfo,
    TaskPage,
    WorkerInfo,
    WorkerStateInfo,
    with_empty_queues,
)
from everbeat.domain.labels import split_labels
from everbeat.domain.settings.checks import (
    one_of,
    remark,
    reporting_wrong_calls,
    sought,
    sought_or_none,
    switch,
    whole,
)
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import Duration, When, to_milliseconds, to_past, to_past_moment
from everbeat.domain.task.states import TaskState, VirtualState
from everbeat.domain.workflow.states import WorkflowInfo, WorkflowPage, WorkflowState
from everbeat.errors.wording import nearest
from everbeat.store import inspection
from everbeat.store.diagnosis import known_queues
from everbeat.store.plan import Plan, ask
from everbeat.store.statement import Statement
from everbeat.store.workflow_control import WorkflowQuery

_limit: Final = whole(1, 100_000)
_limit_of_workflows: Final = whole(1, 10_000)
_most_counted: Final = whole(1, inspection.MOST_COUNTED)
_number: Final = whole(1, 2**63 - 1)
_order: Final = one_of("sent", "happened")
_DEAD: Final = frozenset((TaskState.FAILED, TaskState.EXPIRED))
TaskOrder: TypeAlias = Literal["sent", "happened"]


class InspectionMethods(FailureMethods):
    """The `App` methods that only read from the database.

    Unless stated otherwise, lists are sorted newest first. The age of a heartbeat is measured by the database's clock.
    """

    _alive_within_ms: int
    _queue_priorities: Mapping[str, int]
    _registry: Registry

    def list_tasks(
        self,
        *,
        before: UUID | str | None = None,
        order: TaskOrder = "sent",
        limit: int = 100,
        **filters: Unpack[TaskFilters],
    ) -> TaskPage:
        """Return the tasks that match all the given filters (see `TaskFilters`), newest first.

        `order="sent"` sorts by the time at which a task was sent. `order="happened"` sorts by a task's last change, and reads only
        tasks in flight, the 50,000 latest failures, and the 50,000 newest other tasks. To get the next page, pass the last id of the
        previous page as `before`.

        A call examines at most 50,000 tasks, or `limit` if that is more; with `arguments_contain`, 10,000. If older tasks might match,
        `continue_before` of the result is not None (see `TaskPage`). A call that lists only live states examines all live tasks. With
        `labels`, only the tasks with the rarest of these labels are examined. Raises ConfigurationError if a filter is invalid.

        app.list_tasks(state="FAILED", queue="mail", since=timedelta(hours=1), order="happened")
        """
        return self._run("list_tasks", _tasks(before=before, order=order, limit=limit, **filters))

    async def alist_tasks(
        self,
        *,
        before: UUID | str | None = None,
        order: TaskOrder = "sent",
        limit: int = 100,
        **filters: Unpack[TaskFilters],
    ) -> TaskPage:
        """Async version of `list_tasks` that does not block the running event loop."""
        return await self._arun(_tasks(before=before, order=order, limit=limit, **filters))

    def dead(
        self, *, before: UUID | str | None = None, limit: int = 100, **filters: Unpack[TaskFilters]
    ) -> TaskPage:
        """Return the tasks that FAILED or EXPIRED and were not retried since, the latest failure first.

        The filters are those of `list_tasks`; `state` can be one of the two states. As with `order="happened"`, the call reads only the
        50,000 latest failures and the 50,000 newest other tasks. `retry` runs a task again. Raises ConfigurationError if a filter is invalid.

        for task in app.dead(queue="mail", error="SMTP_DOWN"):
            app.retry(task.id)
        """
        return self._run("dead", _dead(before=before, limit=limit, **filters))

    async def adead(
        self, *, before: UUID | str | None = None, limit: int = 100, **filters: Unpack[TaskFilters]
    ) -> TaskPage:
        """Async version of `dead` that does not block the running event loop."""
        return await self._arun(_dead(before=before, limit=limit, **filters))

    def list_workers(self, *, ended: bool = True, limit: int = 1_000) -> list[WorkerInfo]:
        """Return up to `limit` workers. Workers that have ended are included unless `ended` is False."""
        return self._run("list_workers", self._workers(None, ended=ended, limit=limit))

    async def alist_workers(self, *, ended: bool = True, limit: int = 1_000) -> list[WorkerInfo]:
        """Async version of `list_workers` that does not block the running event loop."""
        return await self._arun(self._workers(None, ended=ended, limit=limit))

    def list_active_workers(
        self, *, stale_after: Duration | None = None, limit: int = 1_000
    ) -> list[WorkerInfo]:
        """Return workers that have not ended. `is_stale` is True for a worker whose last heartbeat is older than `stale_after`.

        By default, `stale_after` is the `claimed_stale_threshold_ms` of the app or of the worker's supervisor, whichever is longer.

        [worker for worker in app.list_active_workers(stale_after="60s") if worker.is_stale]
        """
        return self._run("list_active_workers", self._workers(stale_after, ended=False, limit=limit))

    async def alist_active_workers(
        self, *, stale_after: Duration | None = None, limit: int = 1_000
    ) -> list[WorkerInfo]:
        """Async version of `list_active_workers` that does not block the running event loop."""
        return await self._arun(self._workers(stale_after, ended=False, limit=limit))

    def _workers(self, stale_after: Duration | None, *, ended: bool, limit: int) -> Plan[list[WorkerInfo]]:
        return ask(
            inspection.workers(
                stale_ms=self._stale_ms(stale_after),
                exact=stale_after is not None,
                ended_too=switch(ended, subject="ended"),
                limit=_limit(limit, subject="limit"),
            )
        )

    def list_supervisors(
        self, *, ended: bool = True, stale_after: Duration | None = None, limit: int = 1_000
    ) -> list[SupervisorInfo]:
        """Return up to `limit` supervisors. Supervisors that have ended are included unless `ended` is False.

        `stale_after` works as in `list_active_workers`. If a supervisor cannot start a worker process, `start_problem` gives the reason.
        """
        return self._run("list_supervisors", self._supervisors(stale_after, ended=ended, limit=limit))

    async def alist_supervisors(
        self, *, ended: bool = True, stale_after: Duration | None = None, limit: int = 1_000
    ) -> list[SupervisorInfo]:
        """Async version of `list_supervisors` that does not block the running event loop."""
        return await self._arun(self._supervisors(stale_after, ended=ended, limit=limit))

    def _supervisors(
        self, stale_after: Duration | None, *, ended: bool, limit: int
    ) -> Plan[list[SupervisorInfo]]:
        return ask(
            inspection.supervisors(
                stale_ms=self._stale_ms(stale_after),
                exact=stale_after is not None,
                ended_too=switch(ended, subject="ended"),
                limit=_limit(limit, subject="limit"),
            )
        )

    def _stale_ms(self, stale_after: Duration | None) -> int:
        if stale_after is None:
            return self._alive_within_ms
        return to_milliseconds(stale_after, subject="stale_after")

    def queues(self, *, most: int = inspection.MOST_COUNTED) -> list[QueueInfo]:
        """Return the queues with live tasks, and the empty ones that are declared, served, paused or limited.

        They are sorted by priority and then by name.
        `most` is the number of tasks of each queue and state at which counting stops, 1 to 10,000.
        """
        return self._run("queues", self._listed_queues(most))

    async def aqueues(self, *, most: int = inspection.MOST_COUNTED) -> list[QueueInfo]:
        """Async version of `queues` that does not block the running event loop."""
        return await self._arun(self._listed_queues(most))

    def _listed_queues(self, most: int) -> Plan[list[QueueInfo]]:
        return self._with_empty_queues(inspection.queues(most=_most_counted(most, subject="queues.most")))

    def _with_empty_queues(self, counting: Statement[list[QueueInfo]]) -> Plan[list[QueueInfo]]:
        counted = yield from ask(counting)
        known = yield from ask(known_queues(stale_ms=self._alive_within_ms))
        return with_empty_queues(counted, {*known, *self._registry.queues}, declared=self._queue_priorities)

    def heartbeats(self, task_id: UUID | str | None = None, *, limit: int = 1_000) -> list[HeartbeatInfo]:
        """Return the latest heartbeat of every task in flight, or the heartbeats of one task if `task_id` is given."""
        return self._run("heartbeats", _heartbeats(task_id, limit))

    async def aheartbeats(
        self, task_id: UUID | str | None = None, *, limit: int = 1_000
    ) -> list[HeartbeatInfo]:
        """Async version of `heartbeats` that does not block the running event loop."""
        return await self._arun(_heartbeats(task_id, limit))

    def recoveries(
        self,
        task_id: UUID | str | None = None,
        *,
        limit: int = 100,
        **filters: Unpack[RecoveryFilters],
    ) -> RecoveryPage:
        """Return the recoveries of one task, or of all tasks, that match all the given filters (see `RecoveryFilters`).

        Of the recovered tasks that have moved to `history`, a call examines the 10,000 that ended last, or `limit` if that is more. If
        others might match, `continue_before` of the result is not None (see `RecoveryPage`).

        app.recoveries(since=timedelta(hours=1), cause="SIGKILL")
        """
        return self._run("recoveries", _recoveries(task_id, limit=limit, **filters))

    async def arecoveries(
        self,
        task_id: UUID | str | None = None,
        *,
        limit: int = 100,
        **filters: Unpack[RecoveryFilters],
    ) -> RecoveryPage:
        """Async version of `recoveries` that does not block the running event loop."""
        return await self._arun(_recoveries(task_id, limit=limit, **filters))

    def worker_states(self, worker_id: str | None = None, *, limit: int = 100) -> list[WorkerStateInfo]:
        """Return state snapshots of all workers, or of one worker if `worker_id` is given."""
        return self._run("worker_states", _worker_states(worker_id, limit))

    async def aworker_states(
        self, worker_id: str | None = None, *, limit: int = 100
    ) -> list[WorkerStateInfo]:
        """Async version of `worker_states` that does not block the running event loop."""
        return await self._arun(_worker_states(worker_id, limit))

    def list_workflows(
        self, *, before: UUID | str | None = None, limit: int = 100, **filters: Unpack[WorkflowFilters]
    ) -> list[WorkflowInfo]:
        """Return the latest workflows that match all the given filters (see `WorkflowFilters`), without their results.

        To get the next page, pass the last id of the previous page as `before`. Raises ConfigurationError if a filter is invalid.

        app.list_workflows(name="order", state="FAILED")
        """
        return self._run("list_workflows", _workflows(before=before, limit=limit, **filters))

    async def alist_workflows(
        self, *, before: UUID | str | None = None, limit: int = 100, **filters: Unpack[WorkflowFilters]
    ) -> list[WorkflowInfo]:
        """Async version of `list_workflows` that does not block the running event loop."""
        return await self._arun(_workflows(before=before, limit=limit, **filters))


def _tasks(
    *, before: UUID | str | None, order: TaskOrder, limit: int, **filters: Unpack[TaskFilters]
) -> Plan[TaskPage]:
    return task_page(before=before, order=order, limit=limit, most=None, **filters)


def task_page(
    *,
    before: UUID | str | None = None,
    order: TaskOrder = "sent",
    limit: int,
    most: int | None,
    **filters: Unpack[TaskFilters],
) -> Plan[TaskPage]:
    """Return a plan that lists tasks, as `App.list_tasks`. It examines at most `most` tasks (None: as many as usual)."""
    query = structs.replace(
        task_query("list_tasks", filters),
        before=None if before is None else to_task_id(before, subject="before"),
        latest=_order(order, subject="order") == "happened",
        most=most,
    )
    return examined_page(query, limit=_limit(limit, subject="limit"))


def task_query(method: str, filters: TaskFilters) -> inspection.TaskQuery:
    """Return the query of these filters. Raises ConfigurationError, in the name of the method, if a filter is invalid or unknown."""
    return reporting_wrong_calls(f"App.{method}")(_query)(**filters)


def _query(
    *,
    state: str | Sequence[str] | None = None,
    name: str | None = None,
    queue: str | None = None,
    key: str | None = None,
    workflow: UUID | str | None = None,
    parent: UUID | str | None = None,
    batch: UUID | str | None = None,
    since: When | None = None,
    worker: str | None = None,
    error: str | None = None,
    until: When | None = None,
    labels: Mapping[str, str | None] | None = None,
    arguments_contain: str | None = None,
) -> inspection.TaskQuery:
    states, virtual = (None, []) if state is None else _states(state)
    with_value, keys = split_labels(labels, subject="labels")
    return inspection.TaskQuery(
        states=states,
        virtual=virtual,
        name=sought_or_none(name, subject="name"),
        queue=sought_or_none(queue, subject="queue"),
        key=sought_or_none(key, subject="key"),
        workflow=None if workflow is None else to_workflow_id(workflow, subject="workflow"),
        parent=None if parent is None else to_task_id(parent, subject="parent"),
        batch=None if batch is None else to_batch_id(batch, subject="batch"),
        since=None if since is None else to_past(since, subject="since"),
        worker=sought_or_none(worker, subject="worker"),
        error=sought_or_none(error, subject="error"),
        until=None if until is None else to_past(until, subject="until"),
        labels=with_value,
        label_keys=keys,
        arguments_contain=None if arguments_contain is None else _part_of_arguments(arguments_contain),
    )


def _part_of_arguments(given: object) -> str:
    """Return the text to search for. An empty text would match all tasks, so a bulk action would have no limits."""
    if (text := sought(given, subject="arguments_contain")) == "":
        rule, fix = "must not be empty, because each task contains an empty text", "give a text, or omit it"
        raise refused(text, subject="arguments_contain", code="OUT_OF_RANGE", rule=rule, fix=fix)
    return text


def _dead(*, before: UUID | str | None, limit: int, **filters: Unpack[TaskFilters]) -> Plan[TaskPage]:
    given = filters.get("state")
    states, virtual = ([*_DEAD], []) if given is None else _states(given)
    if virtual or not _DEAD.issuperset(states or ()):
        raise refused(
            ", ".join(str(each) for each in (*(states or ()), *virtual)),
            subject="dead.state",
            code="UNKNOWN_CHOICE",
            rule="must be FAILED or EXPIRED",
            fix="use list_tasks for tasks in other states",
            shell_fix="use 'everbeat tasks list' for tasks in other states",
        )
    filters["state"] = states
    return _tasks(before=before, order="happened", limit=limit, **filters)


def _heartbeats(task_id: UUID | str | None, limit: int) -> Plan[list[HeartbeatInfo]]:
    chosen = None if task_id is None else to_task_id(task_id)
    return ask(inspection.heartbeats(chosen, limit=_limit(limit, subject="limit")))


@reporting_wrong_calls("App.recoveries")
def _recoveries(
    task_id: UUID | str | None,
    *,
    number: int | None = None,
    worker: str | None = None,
    since: When | None = None,
    cause: str | None = None,
    ended_before: datetime | None = None,
    limit: int,
) -> Plan[RecoveryPage]:
    return _recovery_page(
        inspection.RecoveryQuery(
            task_id=None if task_id is None else to_task_id(task_id),
            number=None if number is None else _number(number, subject="number"),
            worker=sought_or_none(worker, subject="worker"),
            since=None if since is None else to_past(since, subject="since"),
            cause=None if cause is None else remark(cause, subject="cause"),
            ended_before=None
            if ended_before is None
            else to_past_moment(ended_before, subject="ended_before"),
        ),
        limit=_limit(limit, subject="limit"),
    )


def _recovery_page(query: inspection.RecoveryQuery, *, limit: int) -> Plan[RecoveryPage]:
    """Return a plan that lists recoveries, as `examined_page`. A search for one recovery by its number continues until it is found."""
    most = max(inspection.MOST_RECOVERED, limit)
    while True:
        found = yield from ask(inspection.list_recoveries(query, limit=limit, most=most))
        if len(found) == limit:
            return RecoveryPage(found)
        last = yield from ask(inspection.last_recovered(query, most=most))
        if last is None:
            return RecoveryPage(found)
        found = yield from ask(inspection.list_recoveries(query, limit=limit, most=None, oldest=last))
        if len(found) == limit:
            return RecoveryPage(found)
        if query.number is None or found:
            return RecoveryPage(found, examined=most, continue_before=last)
        query = structs.replace(query, ended_before=last)


def _worker_states(worker_id: str | None, limit: int) -> Plan[list[WorkerStateInfo]]:
    known = sought_or_none(worker_id, subject="worker_id")
    return ask(inspection.worker_states(known, limit=_limit(limit, subject="limit")))


def _workflows(
    *, before: UUID | str | None, limit: int, **filters: Unpack[WorkflowFilters]
) -> Plan[list[WorkflowInfo]]:
    return _listed(workflow_page(before=before, limit=limit, most=None, **filters))  # checks the filters now


def _listed(page: Plan[WorkflowPage]) -> Plan[list[WorkflowInfo]]:
    return [*(yield from page)]


def workflow_page(
    *,
    before: UUID | str | None = None,
    limit: int,
    most: int | None,
    **filters: Unpack[WorkflowFilters],
) -> Plan[WorkflowPage]:
    """Return a plan that lists workflows, as `App.list_workflows`. It examines at most `most` of them (None: all)."""
    query = structs.replace(
        _workflow_query(**filters),
        before=None if before is None else to_workflow_id(before, subject="list_workflows.before"),
    )
    most_listed = _limit_of_workflows(limit, subject="list_workflows.limit")
    return workflow_operations.listing(query, limit=most_listed, most=most)


@reporting_wrong_calls("App.list_workflows")
def _workflow_query(
    *,
    name: str | None = None,
    state: WorkflowState | str | None = None,
    key: str | None = None,
    parent: UUID | str | None = None,
    children: bool = False,
    since: When | None = None,
    until: When | None = None,
    labels: Mapping[str, str | None] | None = None,
) -> WorkflowQuery:
    with_value, keys = split_labels(labels, subject="list_workflows.labels")
    states = one_of(*WorkflowState)
    return WorkflowQuery(
        name=sought_or_none(name, subject="list_workflows.name"),
        state=None if state is None else states(state, subject="list_workflows.state"),
        key=sought_or_none(key, subject="list_workflows.key"),
        parent=None if parent is None else to_task_id(parent, subject="list_workflows.parent"),
        roots=not switch(children, subject="list_workflows.children"),
        since=None if since is None else to_past(since, subject="since"),
        until=None if until is None else to_past(until, subject="until"),
        labels=with_value,
        label_keys=keys,
    )


def _states(given: str | Sequence[str]) -> tuple[list[TaskState] | None, list[VirtualState]]:
    """Return the states and the virtual states that are given. The states are None if only virtual ones are."""
    states: list[TaskState] = []
    virtual: list[VirtualState] = []
    asked: object = [given] if isinstance(given, str) else given
    if not isinstance(asked, Iterable):
        rule = f"must be a state, or a list of states, not {type(given).__name__}"
        raise refused(given, subject="state", code="WRONG_TYPE", rule=rule, fix="use 'FAILED', for example")
    for state in asked:
        if state in _VIRTUAL:
            virtual.append(VirtualState(state))
            continue
        try:
            states.append(TaskState(state))
        except ValueError:
            names = [*TaskState, *VirtualState]
            guess = nearest(str(state), [known.value for known in names])
            rule = f"must be one of {', '.join(names)}"
            fix = f"use {guess!r}" if guess else "use 'FAILED', for example"
            raise refused(state, subject="state", code="UNKNOWN_CHOICE", rule=rule, fix=fix) from None
    return (None if virtual and not states else states), virtual


_VIRTUAL: Final = frozenset(VirtualState)
