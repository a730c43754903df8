"""Read-only statements that list tasks, workers, queues, heartbeats and recoveries, and that find ids by prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.inspection import (
    AttemptInfo,
    HeartbeatInfo,
    QueueInfo,
    RecoveryInfo,
    SupervisorInfo,
    TaskSummary,
    WorkerInfo,
    WorkerStateInfo,
)
from everbeat.domain.labels import NO_LABELS, decode_labels, encode_labels
from everbeat.domain.settings.units import When, milliseconds
from everbeat.domain.task.needs import Needs, read_needs
from everbeat.domain.task.outcome import error_from_json
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.states import OVERDUE_MS, TASK_TERMINAL_STATES, TaskState, VirtualState
from everbeat.errors import TaskError
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

_SUMMARY_COLUMNS = 36
_LEASED: Final = frozenset({TaskState.CLAIMED, TaskState.RUNNING})
MOST_EXAMINED: Final = 50_000
"""How many tasks a list examines. Most filters have no index. Without this limit, a list would read all tasks to find none."""
STEP_OF_LABEL: Final = 1_000
"""How many tasks with a label one statement examines. With a larger number, the planner might sort the whole table of labels."""
MOST_SEARCHED: Final = 10_000
"""How many tasks a list examines that searches their arguments, which can be large."""
MOST_RECOVERED: Final = 10_000
"""How many recovered tasks in `history` a list of recoveries examines."""
MOST_COUNTED: Final = 10_000
"""How many tasks of a queue and state are counted."""
MOST_OF_ALL: Final = 1_000_000
"""How many tasks of all queues together are counted."""
LAST_ID = UUID(int=2**128 - 1)


class StoredTask(Struct, frozen=True, kw_only=True):
    """A task's row: its summary, the fields that lists omit, and the database's time when the row was read."""

    summary: TaskSummary
    at: datetime
    arguments: Mapping[str, Any]
    result: Any
    policy: StoredPolicy
    flags: Mapping[str, bool]
    needs: Needs | None
    schedule: str | None = None
    tick: datetime | None = None
    batch_id: UUID | None = None

    @property
    def given(self) -> Needs | None:
        """Return the needs that the task would have if it were marked, or None if its arguments cannot be read."""
        return None if rows.is_marker(self.arguments) else Needs(tuple(sorted(self.arguments)))


def task(task_id: UUID) -> Statement[StoredTask | None]:
    """Return a task as it is stored, or None if the task does not exist."""

    def read(found: Sequence[Row]) -> StoredTask | None:
        if not found:
            return None
        at, arguments, result, policy, flags, needs, schedule, tick, batch_id = found[0][_SUMMARY_COLUMNS:]
        return StoredTask(
            summary=_summary(found[0]),
            at=at,
            arguments=rows.mapping(arguments),
            result=rows.document(result),
            policy=StoredPolicy.from_json(policy),
            flags=rows.mapping(flags),
            needs=read_needs(needs),
            schedule=schedule,
            tick=tick,
            batch_id=batch_id,
        )

    return Statement("inspect/read_task", {"id": task_id}, read)


class TaskQuery(Struct, frozen=True, kw_only=True):
    """The filters of a list of tasks. None matches all tasks. `before` is the last id of the previous page.

    A task matches if its state is in `states`, or if it is in one of the `virtual` states. `label_keys` are the keys of labels that can have
    any value. `rarest` is the one of `labels` by which an index finds the tasks (None: another index does). `latest` sorts by the last
    event instead of by id. If `most` is given, a list examines at most this many tasks, also if all are live.
    """

    states: Sequence[TaskState] | None = None
    virtual: Sequence[VirtualState] = ()
    name: str | None = None
    queue: str | None = None
    key: str | None = None
    workflow: UUID | None = None
    before: UUID | None = None
    parent: UUID | None = None
    batch: UUID | None = None
    since: When | None = None
    worker: str | None = None
    error: str | None = None
    until: When | None = None
    labels: Mapping[str, str] = NO_LABELS
    label_keys: Sequence[str] = ()
    arguments_contain: str | None = None
    rarest: tuple[str, str] | None = None
    latest: bool = False
    most: int | None = None

    @property
    def is_live(self) -> bool:
        """Return whether only tasks that have not ended match. Such tasks are never in `history`."""
        has_states = self.states is not None or bool(self.virtual)
        return has_states and not TASK_TERMINAL_STATES.intersection(self.states or ())

    @property
    def is_of_failures(self) -> bool:
        """Return whether the list consists of the latest failures. An index has their order."""
        is_failed = self.states is not None and {*self.states} == {TaskState.FAILED}
        return self.latest and is_failed and not (self.virtual or self.labels)

    @property
    def most_examined(self) -> int | None:
        """Return how many tasks a list examines, or None if it examines all of them: live tasks are found by their state."""
        if self.most is not None and not self._is_leased:
            return self.most
        if self.arguments_contain is not None:
            return MOST_SEARCHED
        return None if self.is_live and not self.labels else MOST_EXAMINED

    @property
    def _is_leased(self) -> bool:
        """Return whether only tasks that workers hold match. These are few, and an index finds them."""
        return not (self.virtual or self.labels) and _LEASED.issuperset(self.states or TaskState)

    @property
    def unindexed(self) -> tuple[str, ...]:
        """Return the names of the filters that no index serves."""
        given = {
            "state": bool(self.virtual) or (self.states is not None and not self.is_live and not self.is_of_failures),
            "name": self.name, "queue": self.queue, "key": self.key, "worker": self.worker, "error": self.error,
            "since": self.since, "until": self.until, "labels": self.label_keys, "arguments_contain": self.arguments_contain,
            "workflow": self.labels and self.workflow, "parent": self.labels and self.parent,
            "batch": self.labels and self.batch,
        }  # fmt: skip
        return tuple(name for name, value in given.items() if value or value == "")

    def scope(self) -> dict[str, Any]:
        """Return the parameters of the filters that an index serves."""
        first, last = (UUID(int=0), LAST_ID) if self.workflow is None else _ids_in(self.workflow)
        if self.before is not None and not self.latest:
            last = min(last, UUID(int=max(self.before.int - 1, 0)))
        return {
            "parent": self.parent,
            "workflow": self.workflow,
            "batch": self.batch,
            "first_id": first,
            "last_id": last,
        }

    def filters(self) -> dict[str, Any]:
        """Return the parameters of all filters."""
        until = moment_or_age(self.until)
        return {
            "name": self.name, "queue": self.queue, "key": self.key, "worker": self.worker, "error": self.error,
            "virtual_states": [each.value for each in self.virtual] or None, "plain_states": [state.value for state in self.states or ()],
            "overdue_ms": OVERDUE_MS, "until": until["since"], "before_ms": until["within_ms"], "labels": encode_labels(self.labels),
            "label_keys": [*self.label_keys] or None, "arguments_contain": self.arguments_contain,
        } | self.live_states() | self.scope() | moment_or_age(self.since)  # fmt: skip

    def live_states(self) -> dict[str, Any]:
        """Return the parameters of the states that tasks can have, which an index serves if tasks in these states have not ended."""
        possible = {*(self.states or ()), *(state for each in self.virtual for state in each.states)}
        has_states = self.states is not None or bool(self.virtual)
        return {"states": sorted(possible) if has_states else None, "is_live": self.is_live}


def tasks(
    *, limit: int, most: int | None = MOST_EXAMINED, oldest: UUID | None = None, **filters: Any
) -> Statement[list[TaskSummary]]:
    """List the tasks of a `TaskQuery` with these filters, in descending order of id or of their last event. See `list_tasks`."""
    return list_tasks(TaskQuery(**filters), limit=limit, most=most, oldest=oldest)


def list_tasks(
    query: TaskQuery, *, limit: int, most: int | None = MOST_EXAMINED, oldest: UUID | None = None
) -> Statement[list[TaskSummary]]:
    """List tasks in descending order of id or of their last event.

    Of the newest tasks, at most `most` are examined (None: all; 0: only tasks in flight and failures). If `oldest` is given,
    tasks with smaller ids are not among the newest.
    """
    if query.most_examined is None:
        most = None
    parameters = query.filters() | {"limit": limit, "most": most}
    if query.latest and query.rarest is None:
        more = {
            "before": query.before,
            "oldest": oldest or UUID(int=0),
            "most_sorted": query.most or MOST_EXAMINED,
        }
        return Statement("inspect/list_latest_tasks", parameters | more, _summaries)
    if oldest is not None:
        parameters["first_id"] = max(oldest, parameters["first_id"])
    if query.rarest is None:
        return Statement("inspect/list_tasks", parameters, _summaries)
    parameters |= {"label": query.rarest[0], "label_value": query.rarest[1], "before": query.before}
    name = "inspect/list_latest_labelled_tasks" if query.latest else "inspect/list_labelled_tasks"
    return Statement(name, parameters, _summaries)


def rarest_label(labels: Mapping[str, str]) -> Statement[tuple[str, str]]:
    """Return the one of these labels that the fewest tasks and workflows have. If several are frequent, return any of those."""
    return Statement(
        "inspect/find_rarest_label",
        {"labels": encode_labels(labels)},
        lambda found: (found[0][0], found[0][1]),
    )


def latest_failures(query: TaskQuery, *, limit: int, most: int) -> Statement[tuple[list[TaskSummary], bool]]:
    """List failed tasks in descending order of their last event, and return whether all were examined, which are the `most` latest at most."""
    parameters = query.filters() | {"limit": limit, "most": most, "before": query.before}
    return Statement(
        "inspect/list_latest_failures",
        parameters,
        lambda found: (_summaries([row for row in found if row[0] is not None]), bool(found[0][-1])),
    )


def last_examined(query: TaskQuery, *, most: int) -> Statement[UUID | None]:
    """Return the id of the last task that a list examines, or None if it examines all tasks. A list examines at most `most` tasks."""
    parameters = query.scope() | query.live_states() | {"most": most}
    if query.rarest is not None:
        parameters |= {"label": query.rarest[0], "label_value": query.rarest[1]}
    return Statement(
        "inspect/find_last_examined" if query.rarest is None else "inspect/find_last_labelled",
        parameters,
        lambda found: found[0][0] if len(found) == 2 else None,
    )


def _summaries(found: Sequence[Row]) -> list[TaskSummary]:
    return [_summary(row) for row in found]


def moment_or_age(since: When | None) -> dict[str, Any]:
    """Return the statement parameters for a time, or for an age relative to the database's current time."""
    return {
        "since": since if isinstance(since, datetime) else None,
        "within_ms": milliseconds(since.total_seconds()) if isinstance(since, timedelta) else None,
    }


def _ids_in(workflow: UUID) -> tuple[UUID, UUID]:
    """Return the range of ids that a workflow's tasks can have. Their ids begin with the same timestamp as the workflow's id."""
    time = workflow.int >> 80 << 80
    return UUID(int=time), UUID(int=time + 2**80 - 1)


def attempts(task_id: UUID) -> Statement[tuple[AttemptInfo, ...]]:
    """Return the finished attempts of a task, oldest first."""
    return Statement(
        "inspect/list_attempts",
        {"id": task_id},
        lambda found: tuple(AttemptInfo(*_with(row, {9: _error})) for row in found),
    )


def heartbeats(task_id: UUID | None, *, limit: int) -> Statement[list[HeartbeatInfo]]:
    """Return the heartbeats of one running task or, if `task_id` is None, the latest heartbeat of every running task.

    The newest heartbeats come first.
    """
    if task_id is None:
        return Statement("inspect/list_heartbeats", {"limit": limit}, _heartbeats)
    return Statement("inspect/list_task_heartbeats", {"id": task_id, "limit": limit}, _heartbeats)


class RecoveryQuery(Struct, frozen=True, kw_only=True):
    """The filters of a list of recoveries. None matches all recoveries.

    `since` is a time, or an age relative to the database's current time. `cause` is either a part of the cause, in upper or lower case, or
    the name of a way to detect deaths. With `ended_before`, only tasks that ended before this time match.
    """

    task_id: UUID | None = None
    number: int | None = None
    worker: str | None = None
    since: When | None = None
    cause: str | None = None
    ended_before: datetime | None = None

    def scope(self) -> dict[str, Any]:
        """Return the parameters of the filters that an index serves."""
        return {"task_id": self.task_id, "ended_before": self.ended_before} | moment_or_age(self.since)

    def filters(self) -> dict[str, Any]:
        """Return the parameters of all filters."""
        return {"number": self.number, "worker": self.worker, "cause": self.cause} | self.scope()


def recoveries(task_id: UUID | None = None, *, limit: int, **filters: Any) -> Statement[list[RecoveryInfo]]:
    """List the recoveries of a `RecoveryQuery` with these filters, newest first. See `list_recoveries`."""
    return list_recoveries(RecoveryQuery(task_id=task_id, **filters), limit=limit)


def list_recoveries(
    query: RecoveryQuery, *, limit: int, most: int | None = MOST_RECOVERED, oldest: datetime | None = None
) -> Statement[list[RecoveryInfo]]:
    """List recoveries, newest first.

    Of the recovered tasks in `history`, at most `most` are examined (None: all), and only those that ended at `oldest` or later.
    """
    parameters = query.filters() | {"limit": limit, "most": most, "oldest": oldest}
    return Statement("inspect/list_recoveries", parameters, read_recoveries)


def last_recovered(query: RecoveryQuery, *, most: int) -> Statement[datetime | None]:
    """Return when the last recovered task ended that a list examines, or None if it examines all of them.

    A list examines at most `most` tasks.
    """
    return Statement(
        "inspect/find_last_recovered",
        query.scope() | {"most": most},
        lambda found: found[0][0] if len(found) == 2 else None,
    )


def workers(
    *, stale_ms: int, ended_too: bool, limit: int, exact: bool = False
) -> Statement[list[WorkerInfo]]:
    """List workers, those with the newest heartbeats first.

    If a tree recorded a staleness threshold longer than `stale_ms`, the tree is judged by its own threshold unless `exact` is set.
    """
    parameters = {"stale_ms": stale_ms, "exact": exact, "ended_too": ended_too, "limit": limit}
    return Statement("inspect/list_workers", parameters, lambda found: [_worker(row) for row in found])


def supervisors(
    *, stale_ms: int, ended_too: bool, limit: int, exact: bool = False
) -> Statement[list[SupervisorInfo]]:
    """List supervisors, those with the newest heartbeats first.

    If a tree recorded a staleness threshold longer than `stale_ms`, the tree is judged by its own threshold unless `exact` is set.
    """
    parameters = {"stale_ms": stale_ms, "exact": exact, "ended_too": ended_too, "limit": limit}
    return Statement("inspect/list_supervisors", parameters, rows.each(SupervisorInfo))


def worker_states(worker_id: str | None, *, limit: int) -> Statement[list[WorkerStateInfo]]:
    """Return the snapshots of one worker (None: all workers), newest first."""
    parameters = {"worker_id": worker_id, "limit": limit}
    return Statement(
        "inspect/list_worker_states",
        parameters,
        lambda found: [WorkerStateInfo(*_with(row, {8: rows.optional_mapping})) for row in found],
    )


def queues(*, most: int = MOST_COUNTED, most_of_all: int = MOST_OF_ALL) -> Statement[list[QueueInfo]]:
    """List the queues that have live tasks, ordered by name. Count at most `most` tasks of a queue and state.

    If there are so many queues that more than `most_of_all` tasks would be counted, fewer are counted of each queue, but at least 100.
    """

    def read(*row: Any) -> QueueInfo:
        names = ("name", "pending", "scheduled", "claimed", "running", "oldest_due_s")
        return QueueInfo(**dict(zip(names, row[:-1], strict=True)), at_least=tuple(row[-1]))

    return Statement("inspect/list_queues", {"most": most, "most_of_all": most_of_all}, rows.each(read))


def _summary(row: Row) -> TaskSummary:
    return TaskSummary(
        *_with(
            row[:_SUMMARY_COLUMNS],
            {4: TaskState, 23: rows.progress, 24: _error, 34: rows.failed_try, 35: decode_labels},
        )
    )


def _heartbeats(found: Sequence[Row]) -> list[HeartbeatInfo]:
    return [HeartbeatInfo(*row) for row in found]


def read_recoveries(found: Sequence[Row]) -> list[RecoveryInfo]:
    """Return the records of the rows of a list of recoveries."""
    return [
        RecoveryInfo(*_with(row, {10: rows.state, 19: rows.optional_mapping, 25: rows.state}))
        for row in found
    ]


def _worker(row: Row) -> WorkerInfo:
    return WorkerInfo(*_with(row, {4: rows.names, 14: rows.mapping}))


def _with(row: Row, readers: Mapping[int, Callable[[Any], Any]]) -> list[Any]:
    """Return the columns of a row. Each column whose position is in `readers` is converted by that reader."""
    return [readers[place](value) if place in readers else value for place, value in enumerate(row)]


def _error(text: str | None) -> TaskError | None:
    return None if text is None else error_from_json(text)


LIVE: Final = "live"


def turns() -> Statement[list[tuple[str, float]]]:
    """Return the services of the cluster, and when each last took its turn, in seconds since 1970."""
    return Statement("inspect/list_turns", {}, lambda found: [(row[0], row[1]) for row in found])


def live_workflows(*, most: int = MOST_COUNTED) -> Statement[dict[str, int]]:
    """Count the workflows that have not ended by state. Counting stops at `most` workflows."""
    return Statement(
        "inspect/count_live_workflows", {"most": most}, lambda found: {row[0]: row[1] for row in found}
    )


class Candidate(Struct, frozen=True):
    """A task, workflow, worker or supervisor that a text may refer to. A lower `rank` means a better match."""

    kind: str
    id: str
    name: str
    state: str
    rank: int = 1


def tasks_between(first: UUID, last: UUID, *, limit: int) -> Statement[list[Candidate]]:
    """List the tasks with ids from `first` to `last`, newest first."""
    parameters = {"first": first, "last": last, "limit": limit}
    return Statement("inspect/find_tasks_by_id", parameters, lambda found: candidates("task", found))


def read_clock() -> Statement[datetime]:
    """Return the database's time, in UTC. The clock of this machine can differ from it."""
    return Statement("inspect/read_clock", {}, lambda found: found[0][0].astimezone(UTC))


def workflows_between(first: UUID, last: UUID, *, limit: int) -> Statement[list[Candidate]]:
    """List the workflows with ids from `first` to `last`, newest first."""
    parameters = {"first": first, "last": last, "limit": limit}
    return Statement("inspect/find_workflows_by_id", parameters, lambda found: candidates("workflow", found))


def candidates(kind: str, found: Sequence[Row]) -> list[Candidate]:
    """Read the rows of a search by id."""
    return [Candidate(kind, str(each), name, state) for each, name, state in found]


def neighbours(ids: Sequence[UUID]) -> Statement[dict[UUID, tuple[UUID, ...]]]:
    """Return, for each given id, the nearest ids of tasks and workflows."""

    def read(found: Sequence[Row]) -> dict[UUID, tuple[UUID, ...]]:
        return {row[0]: tuple(each for each in row[1:] if each is not None) for row in found}

    return Statement("inspect/find_neighbouring_ids", {"ids": list(ids)}, read)


def parties_named(text: str, *, supervisors: bool, limit: int) -> Statement[list[Candidate]]:
    """Return the workers whose id is `text` or starts with it. If `supervisors` is set, also return matching supervisors.

    The best matches come first.
    """

    def read(found: Sequence[Row]) -> list[Candidate]:
        return [
            Candidate(kind, party, kind, "ended" if is_ended else LIVE, rank)
            for rank, kind, party, is_ended in found
        ]

    parameters = {"text": text, "supervisors": supervisors, "limit": limit}
    return Statement("inspect/find_workers", parameters, read)


def parties_alike(stems: Sequence[str]) -> Statement[list[str]]:
    """Return the ids of workers and supervisors that start with one of `stems` followed by a hyphen."""
    return Statement("inspect/find_similar_workers", {"stems": list(stems)}, rows.first_column)
