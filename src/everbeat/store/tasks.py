"""Statements that send, cancel, retry, pause and resume tasks, store signals, and find the next task that a worker can claim."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct, structs

from everbeat.domain.inspection import Pause, PauseKind
from everbeat.domain.task.states import TaskState
from everbeat.store import rows
from everbeat.store.announcer import hints_of
from everbeat.store.plan import Plan, ask
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, integers, json_array, uuids, without

KEY_TRIES: Final = 20
"""The maximum number of tries to send a task or workflow with a key, if the key's owner ends between two statements."""


class NewTask(Struct, frozen=True, kw_only=True):
    """A task to send. `args`, `policy`, `flags`, `labels` and `context` are JSON text.

    The task is due at `run_at`, or `delay_ms` milliseconds after the database's current time. `serial` is the task's serial line. The tasks
    of a line run one at a time. `gates` and `costs` are the texts of arrays: what the task must pass to start, and the permits that it takes.
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
    gates: str | None = None
    costs: str | None = None
    labels: str | None = None
    context: str | None = None
    """The carrier of the send, if it is traced."""


_Kind: TypeAlias = tuple[Any, ...]
"""The values of a task that many tasks can share."""


class StoredOutcome(Struct, frozen=True):
    """The stored outcome of a task. `result` and `error` are JSON text.

    `missing` says why a completed task has no result: its policy ignores results, or the result was removed after its time.
    """

    id: UUID
    name: str
    state: TaskState
    result: str | None
    error: str | None
    missing: Literal["ignored", "removed"] | None = None


class SentTask(Struct, frozen=True):
    """The task that a send has become: the sent task, or a task that was there before."""

    id: UUID
    name: str


class FullGate(Struct, frozen=True):
    """A gate that has no room for `cost` permits, although no task holds permits of it or waits for them."""

    gate: str
    concurrency: int
    cost: int


def send_task(task: NewTask, *, channel: str, joined: bool = False) -> Plan[UUID | None]:
    """Send one task. Return its id, or the id of the live task that has its key. If `joined` is set, use the user's transaction.

    Return None if the task with the key has just ended. In that case, send the task again.
    """
    inserted = yield from ask(insert_task(task, channel=channel, joined=joined))
    if inserted is not None:
        return inserted
    return (yield from ask(sent_before(task)))


def send_unless_full(
    task: NewTask, *, channel: str, joined: bool = False
) -> Plan[SentTask | FullGate | None]:
    """Send one task, unless a limit of it that drops tasks is full. Otherwise works like `send_task`.

    If a limit is full, return the task that has the key, or else the task that holds the oldest permit. Return the gate if there
    is neither.
    """
    found = yield from ask(insert_unless_full(task, channel=channel, joined=joined))
    if isinstance(found, SentTask) and (found.id == task.id or task.key is None):
        return found
    owner = yield from ask(sent_before(task))
    return found if owner is None else SentTask(owner, task.name)


def insert_task(task: NewTask, *, channel: str, joined: bool = False) -> Statement[UUID | None]:
    """Send one task and return its id. Return None if the task was sent before, or if a live task has its key.

    If `joined` is set, the statement itself notifies the workers, because it is part of the user's transaction.
    """
    texts = {"args": _text(task.args), "policy": _text(task.policy), "flags": _text(task.flags)}
    parameters = structs.asdict(task) | texts | {"channel": channel, "joined": joined}
    hints = hints_of([task.queue], joined=joined)
    return Statement(traced_if([task], name="task/insert_task"), parameters, _first_id, hints=hints)


def insert_unless_full(
    task: NewTask, *, channel: str, joined: bool = False
) -> Statement[SentTask | FullGate | None]:
    """Send one task, unless a limit of it that drops tasks is full. Return it, or the task that holds the oldest permit.

    Return the full gate if no task holds a permit or waits for one. Return None if a live task has the key.
    """
    texts = {"args": _text(task.args), "policy": _text(task.policy), "flags": _text(task.flags)}
    parameters = structs.asdict(task) | texts | {"channel": channel, "joined": joined}

    def read(found: Sequence[Row]) -> SentTask | FullGate | None:
        if not found:
            return None
        task_id, name, gate, concurrency, cost, *_ = found[0]
        return FullGate(gate, concurrency, cost) if task_id is None else SentTask(rows.as_uuid(task_id), name)

    hints = hints_of([task.queue], joined=joined)
    return Statement(traced_if([task], name="task/insert_unless_full"), parameters, read, hints=hints)


def sent_before(task: NewTask) -> Statement[UUID | None]:
    """Return the id of the task that prevented this one from being inserted."""
    return Statement("task/find_sent_task", {"id": task.id, "name": task.name, "key": task.key}, _first_id)


def traced_if(tasks: Iterable[NewTask], *, name: str) -> str:
    """Return the name of the statement, without the part that stores carriers if no task has one."""
    return name if any(task.context is not None for task in tasks) else without("context", name=name)


def contexts_of(tasks: Iterable[NewTask]) -> str:
    """Return the carriers of the tasks as the text of one JSON array."""
    return json_array([None if task.context is None else task.context.encode() for task in tasks])


def _first_id(found: Sequence[Row]) -> UUID | None:
    return rows.as_uuid(found[0][0]) if found else None


def insert_tasks(
    tasks: Sequence[NewTask], *, channel: str, joined: bool = False
) -> Statement[list[UUID | None]]:
    """Send many tasks, either all or none. Return their ids in the same order (None: the task with that key has just ended)."""
    kinds: dict[_Kind, int] = {}
    numbers = [kinds.setdefault(_kind(task), len(kinds) + 1) for task in tasks]
    (
        names,
        queues,
        priorities,
        keys,
        policies,
        flags,
        good_until,
        run_at,
        delay_ms,
        serials,
        gates,
        costs,
        labels,
    ) = zip(*kinds, strict=True)
    parameters = {
        "ids": uuids([task.id for task in tasks]), "kinds": integers(numbers), "args": json_array([task.args for task in tasks]),
        "names": list(names), "queues": list(queues), "priorities": list(priorities), "keys": list(keys),
        "policies": [_text(each) for each in policies], "flags": [_text(each) for each in flags],
        "good_until": list(good_until), "run_at": list(run_at), "delay_ms": integers(delay_ms), "serials": list(serials),
        "gates": list(gates), "costs": list(costs), "labels": list(labels),
        "contexts": contexts_of(tasks), "channel": channel, "joined": joined,
    }  # fmt: skip

    def read(found: Sequence[Row]) -> list[UUID | None]:
        others = {
            rows.as_uuid(row[1]): None if row[0] is None else rows.as_uuid(row[0])
            for row in found
            if row[1] is not None
        }
        if not others:
            return [task.id for task in tasks]
        return [others.get(task.id, task.id) for task in tasks]

    name = traced_if(tasks, name=without("batch", name="task/insert_tasks"))
    return Statement(name, parameters, read, hints=hints_of(queues, count=len(tasks), joined=joined))


def _kind(task: NewTask) -> _Kind:
    return (
        task.name, task.queue, task.priority, task.key, task.policy, task.flags, task.good_until, task.run_at, task.delay_ms, task.serial,
        task.gates, task.costs, task.labels,
    )  # fmt: skip


def count_waiting(queue: str, *, limit: int) -> Statement[int]:
    """Return how many tasks of a queue are PENDING. Counting stops at about `limit`."""
    return Statement("task/count_waiting", {"queue": queue, "limit": limit}, rows.only(int))


def outcomes(ids: Sequence[UUID]) -> Statement[dict[UUID, StoredOutcome]]:
    """Return the states and outcomes of these tasks, except those in `history`. Unknown ids are omitted."""
    return Statement("task/list_outcomes", {"ids": uuids(ids)}, read_outcomes)


def read_outcomes(found: Sequence[Row]) -> dict[UUID, StoredOutcome]:
    """Return the outcomes by the ids of their tasks."""
    return {row[0]: StoredOutcome(row[0], row[1], TaskState(row[2]), *row[3:]) for row in found}


def cancel(task_id: UUID, *, channel: str, call: UUID) -> Statement[tuple[str, TaskState, bool] | None]:
    """Cancel a task. `call` is the id of this call and makes it idempotent. Return None if the task does not exist.

    Otherwise, return the verdict (CANCELLED, REQUESTED, or the terminal state), the previous state, and whether this call cancelled the
    task before its code started.
    """
    return Statement(
        "task/cancel_task",
        {"id": task_id, "channel": channel, "call": call},
        lambda found: (found[0][0], TaskState(found[0][1]), found[0][2]) if found else None,
    )


def cancel_children(task_id: UUID, *, channel: str, claim_id: UUID | None = None) -> Statement[int]:
    """Cancel a task's children and their descendants. If `claim_id` is given and the lease was lost, cancel nothing.

    Return how many tasks this call cancelled or asked to stop. Repeat the statement until it returns 0.
    """
    parameters = {"id": task_id, "channel": channel, "claim_id": claim_id}
    return Statement("task/cancel_children", parameters, lambda found: int(found[0][0]))


class RetryVerdict(Struct, frozen=True):
    """The result of a retry: the task's workflow, its previous state, whether it was retried, and the live task that has its key.

    `is_moved`: the task is in `history`, so it must be moved back before it can be retried.
    """

    workflow_id: UUID | None
    was: TaskState
    retried: bool
    other: UUID | None
    is_moved: bool = False

    @property
    def may_move(self) -> bool:
        """Return whether the task can be retried after it was moved back."""
        return self.is_moved and self.workflow_id is None and self.was is not TaskState.COMPLETED


def retry(task_id: UUID, *, channel: str, call: UUID) -> Statement[RetryVerdict | None]:
    """Retry a task on behalf of an operator. `call` is the id of this call and makes it idempotent. Return None if the task does not exist."""

    def read(found: Sequence[Row]) -> RetryVerdict | None:
        if not found:
            return None
        workflow_id, was, retried, other, is_moved, *_ = found[0]
        return RetryVerdict(workflow_id, TaskState(was), retried, other, is_moved)

    return Statement("task/retry_task", {"id": task_id, "call": call, "channel": channel}, read)


def _text(data: bytes | None) -> Any:
    return None if data is None else data.decode()


def pause(
    kind: PauseKind, name: str, *, paused_by: str, reason: str | None, call: UUID
) -> Statement[Pause | None]:
    """Pause a task function or queue.

    Return the current pause, which may be an earlier one. Return None if another pause began or ended in the meantime.
    """
    parameters = {"kind": kind, "name": name, "paused_by": paused_by, "reason": reason, "call": call}
    return Statement("pause/pause_name", parameters, rows.first(Pause))


def resume(pause: Pause, *, channel: str) -> Statement[None]:
    """End this pause if it has not ended yet. A later pause of the same name stays in effect."""
    parameters = {"kind": pause.kind, "name": pause.name, "paused_at": pause.paused_at, "channel": channel}
    return Statement("pause/resume_name", parameters, rows.nothing)


def pause_all(*, paused_by: str, reason: str | None, call: UUID) -> Statement[Pause | None]:
    """Pause everything. Otherwise works like `pause`."""
    return Statement(
        "pause/pause_all", {"paused_by": paused_by, "reason": reason, "call": call}, rows.first(Pause)
    )


def resume_all(pause: Pause, *, channel: str) -> Statement[None]:
    """End this pause of everything if it has not ended yet. A later one stays in effect."""
    return Statement("pause/resume_all", {"paused_at": pause.paused_at, "channel": channel}, rows.nothing)


def pauses() -> Statement[list[Pause]]:
    """List the pauses, newest first."""
    return Statement("pause/list_pauses", {}, rows.each(Pause))


def known_names(kind: PauseKind) -> Statement[list[str]]:
    """Return the names of task functions or queues that the database knows."""
    return Statement("pause/list_known_names", {"kind": kind}, rows.first_column)


def pause_crashing(
    names: Collection[str], *, crashes: int, window_ms: int, reason: str
) -> Statement[list[tuple[str, int, str]]]:
    """Pause each task function with at least `crashes` crashes within `window_ms`. Return (name, crashes, reason) for each new pause."""
    parameters = {"names": sorted(set(names)), "crashes": crashes, "window_ms": window_ms, "reason": reason}

    def read(found: Sequence[Row]) -> list[tuple[str, int, str]]:
        return [(row[0], row[1], row[2]) for row in found]

    return Statement("pause/pause_crashing_tasks", parameters, read)


class SignalVerdict(Struct, frozen=True):
    """The result of sending a signal: "stored", or refused because its target has "ended" or is "unknown"."""

    verdict: Literal["stored", "ended", "unknown"]
    kind: Literal["task", "workflow"] | None
    state: str | None


def send_signal(
    signal_id: UUID, *, target: UUID, name: str, value: bytes, channel: str
) -> Statement[SignalVerdict]:
    """Store a signal. If a task is waiting for the signal, make the task due. The signal's id makes the statement idempotent."""
    parameters = {
        "id": signal_id,
        "target": target,
        "name": name,
        "value": value.decode(),
        "channel": channel,
    }
    return Statement("signal/send_signal", parameters, rows.only(SignalVerdict))


_NONE: Final = "[]"
_FIRST_ID: Final = UUID(int=0)
_FIRST_PRIORITY: Final = -32_768


class MarkedGroup(Struct, frozen=True):
    """Marked tasks with the same name, queue, priority and needs. `needs` is JSON text.

    A group without a queue and priority contains marked tasks from serial lines, in any queue.
    """

    needs_id: UUID
    queue: str | None
    priority: int | None
    name: str
    needs: str


class MarkedPlace(Struct, frozen=True):
    """The position that a scan of the marked groups has reached: the last group, and the last group of serial lines."""

    needs_id: UUID = _FIRST_ID
    queue: str = ""
    priority: int = _FIRST_PRIORITY
    in_line: UUID = _FIRST_ID


BEGINNING: Final = MarkedPlace()


class MarkedPage(Struct, frozen=True):
    """A page of marked groups, and the position where the scan continues. `after` is None at the end."""

    groups: tuple[MarkedGroup, ...]
    after: MarkedPlace | None


def marked(after: MarkedPlace = BEGINNING, *, most: int) -> Statement[MarkedPage]:
    """Return the next marked groups: up to `most` outside serial lines, and up to `most` in serial lines."""
    parameters = {
        "after_id": after.needs_id, "after_queue": after.queue, "after_priority": after.priority, "after_in_line": after.in_line,
        "most": most,
    }  # fmt: skip

    def read(found: Sequence[Row]) -> MarkedPage:
        # Sort by the scan's own row numbers, because PostgreSQL may sort the names of queues differently from Python.
        rows = sorted(found, key=_number)
        groups = tuple(MarkedGroup(*row[:5]) for row in rows if row[3] is not None)
        placed = [row for row in rows if row[1] is not None]
        in_line = [row for row in rows if row[1] is None]
        if len(placed) < most and len(in_line) < most:
            return MarkedPage(groups, None)
        place = after
        if placed:
            needs_id, queue, priority = placed[-1][:3]
            place = MarkedPlace(needs_id, queue, priority, place.in_line)
        if in_line:
            place = structs.replace(place, in_line=in_line[-1][0])
        return MarkedPage(groups, place)

    return Statement("task/list_marked_tasks", parameters, read)


def marked_json(groups: Sequence[MarkedGroup]) -> str:
    """Return the groups as JSON text for a statement parameter."""
    if not groups:
        return _NONE
    return msgspec.json.encode(
        [
            {"needs_id": each.needs_id, "name": each.name, "queue": each.queue, "priority": each.priority}
            for each in groups
        ]
    ).decode()


def _number(row: Row) -> int:
    return int(row[5])


def process_ends(ids: Sequence[UUID]) -> Statement[list[tuple[UUID, str]]]:
    """Return (task id, cause) for each process that exited earlier while running any of these tasks."""
    return Statement(
        "task/list_process_ends", {"ids": list(ids)}, lambda found: [(row[0], row[1]) for row in found]
    )


class NextDue(Struct, frozen=True):
    """How long an idle worker can wait.

    `due_in_ms` is the time until the next task becomes due (negative: a task has just become due; None: no task is scheduled). `happened`:
    workflows can be advanced. `suspects`: a suspect is due. `lines_changed`: `lines.apply_changes` has something to apply. `lines_ready`:
    a claim might find tasks of lines. `has_marked`: marked tasks are waiting. `by_queue`: the time until the next task of a queue becomes
    due, for the queues that come first. `others_in_ms`: the same for everything else.
    """

    due_in_ms: float | None
    happened: bool
    suspects: bool
    lines_changed: bool = False
    lines_ready: bool = False
    has_marked: bool = False
    others_in_ms: float | None = None
    by_queue: Mapping[str, float] = {}


MOST_DUE: Final = 64
"""The number of queues for which an idle worker remembers when their next task becomes due."""


def next_due(
    *,
    names: Sequence[str],
    queues: Sequence[str] | None,
    margin_ms: int = 0,
    marked: Sequence[MarkedGroup] = (),
) -> Statement[NextDue]:
    """Return how long an idle worker can wait for tasks with these names. Tasks that became due in the last `margin_ms` also count."""
    parameters = {
        "names": list(names),
        "queues": None if queues is None else list(queues),
        "margin_ms": margin_ms,
        "marked": marked_json(marked),
        "most": MOST_DUE,
    }

    def read(found: Sequence[Row]) -> NextDue:
        *most, others_in_ms, by_queue = found[0]
        due_in_ms, happened, suspects, lines_changed, lines_ready, has_marked = most
        return NextDue(
            due_in_ms=None if due_in_ms is None else float(due_in_ms),
            happened=happened,
            suspects=suspects,
            lines_changed=lines_changed,
            lines_ready=lines_ready,
            has_marked=has_marked,
            others_in_ms=None if others_in_ms is None else float(others_in_ms),
            by_queue={} if by_queue is None else msgspec.json.decode(by_queue, type=dict[str, float]),
        )

    return Statement("task/find_next_due", parameters, read)
