"""Statements for running tasks: checkpoints, durable steps, commits together with the user's rows, and workflows that a task starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from msgspec import Struct, json, structs
from psycopg import sql

from everbeat.domain.task.context_backend import (
    ChildEnd,
    FailedTry,
    NewChild,
    NewWorkflow,
    Recorded,
    SendChildren,
    StepState,
)
from everbeat.domain.workflow.graph import decode_graph
from everbeat.store import rows
from everbeat.store.plan import Plan, ask
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, integers, json_array, uuids, without
from everbeat.store.workflows import insert

PAGE_ROWS: Final = 500
PAGE_BYTES: Final = 16 * 1024 * 1024

StepPlace: TypeAlias = tuple[str, str]
"""The (kind, name) key of a record, by which records are ordered."""
FIRST: Final[StepPlace] = ("", "")


class StepsPage(Struct, frozen=True):
    """A page of a task's records. `next_after` is the key after which the next page begins, or None after the last page."""

    records: tuple[Recorded, ...]
    next_after: StepPlace | None


class Waited(Struct, frozen=True):
    """The result of a wait for a signal: OPEN, DONE with the signal's value as JSON text, or TIMED_OUT."""

    state: StepState
    value: str | None


class ChildVerdict(Struct, frozen=True):
    """The result of sending a child.

    The verdict is "sent", "cancelled" (the parent has a cancel request), "again" (repeat the statement), or "no_batch" (the parent belongs to
    no batch).
    """

    verdict: Literal["sent", "cancelled", "again", "no_batch"]
    id: UUID | None


def load_steps(task_id: UUID, claim_id: UUID, *, after: StepPlace = FIRST) -> Statement[StepsPage | None]:
    """Return a page of the records that earlier attempts of the task left, or None if the lease was lost."""
    parameters = {
        "id": task_id,
        "claim_id": claim_id,
        "kind": after[0],
        "name": after[1],
        "limit": PAGE_ROWS,
        "bytes": PAGE_BYTES,
    }
    return Statement("step/load_steps", parameters, _page)


def record_step(
    task_id: UUID, claim_id: UUID, *, name: str, result: bytes, digest: str | None = None
) -> Statement[bool]:
    """Record the result of a step unless it is already recorded. Return False if the lease was lost."""
    parameters = {
        "id": task_id,
        "claim_id": claim_id,
        "name": name,
        "result": result.decode(),
        "digest": digest,
    }
    return Statement("step/record_step", parameters, bool)


def begin_sleep(
    task_id: UUID, claim_id: UUID, *, name: str, duration_ms: int, failed: FailedTry | None = None
) -> Statement[float | None]:
    """Set the wake-up time of a sleep unless it is already set. Return how many milliseconds are left, or None if the lease was lost.

    `failed` describes the failed try of a step that will be repeated after this sleep.
    """
    parameters = {
        "id": task_id,
        "claim_id": claim_id,
        "name": name,
        "duration_ms": duration_ms,
        "failed": None if failed is None else json.encode(failed).decode(),
    }
    return Statement("step/begin_sleep", parameters, lambda found: float(found[0][0]) if found else None)


def wait_for_signal(
    task_id: UUID,
    claim_id: UUID,
    *,
    name: str,
    event: str,
    timeout_ms: int | None,
    question: str | None = None,
) -> Statement[Waited | None]:
    """Consume a signal, or record that the task is waiting for one. `question` is what a person is to answer, as JSON text.

    Return None if the lease was lost. Repeat the statement while the state of the result is OPEN.
    """
    parameters = {
        "id": task_id,
        "claim_id": claim_id,
        "name": name,
        "event": event,
        "timeout_ms": timeout_ms,
        "question": question,
    }
    return Statement("step/wait_for_signal", parameters, rows.first(Waited))


def send_child(
    task_id: UUID, claim_id: UUID, *, step: str, child: NewChild, channel: str, in_batch: bool = False
) -> Statement[ChildVerdict | None]:
    """Send a child task under the name of this step, once across all attempts. Return None if the lease was lost.

    If `in_batch` is set, the child belongs to the batch of its parent.
    """
    parameters = {
        "id": task_id, "claim_id": claim_id, "step": step, "channel": channel, **structs.asdict(child)
    }  # fmt: skip
    omitted = [
        part
        for part, is_needed in (("batch", in_batch), ("context", child.context is not None))
        if not is_needed
    ]
    return Statement(without(*omitted, name="step/send_child"), parameters, _child)


def send_children(
    task_id: UUID, claim_id: UUID, portion: SendChildren, *, channel: str
) -> Statement[bool | None]:
    """Send a portion of a gather's children, each once across all attempts.

    Return whether the parent has a cancel request, so that nothing was sent. Return None if the lease was lost.
    """
    kinds: dict[tuple[Any, ...], int] = {}
    numbers = [kinds.setdefault(_kind(child), len(kinds) + 1) for child in portion.children]
    columns = [list(column) for column in zip(*kinds, strict=True)] or [[] for _ in _KIND]
    parameters = {
        "id": task_id, "claim_id": claim_id, "step": portion.name, "batch_id": portion.batch_id, "digest": portion.digest,
        "is_last": portion.is_last, "ids": uuids(portion.ids), "kinds": integers(numbers),
        "args": json_array([child.args.encode() for child in portion.children]), "channel": channel,
        "contexts": json_array([None if child.context is None else child.context.encode() for child in portion.children]),
        **dict(zip(_KIND, columns, strict=True)),
    }  # fmt: skip
    name = "step/send_children"
    if all(child.context is None for child in portion.children):
        name = without("context", name=name)
    return Statement(name, parameters, lambda found: bool(found[0][0]) if found else None)


_KIND: Final = (
    "names",
    "queues",
    "priorities",
    "policies",
    "flags",
    "good_until",
    "serials",
    "gates",
    "costs",
    "labels",
)


def _kind(child: NewChild) -> tuple[Any, ...]:
    return (
        child.name, child.queue, child.priority, child.policy, child.flags, child.good_until, child.serial, child.gates,
        child.costs, child.labels,
    )  # fmt: skip


def join_children(task_id: UUID, claim_id: UUID, *, step: str, batch_id: UUID) -> Statement[bool | None]:
    """Return whether a gather has ended. If not, record that the task is waiting for its end. Return None if the lease was lost."""
    parameters = {"id": task_id, "claim_id": claim_id, "step": step, "batch_id": batch_id}
    return Statement("step/join_children", parameters, lambda found: bool(found[0][0]) if found else None)


def list_children(ids: Sequence[UUID]) -> Statement[tuple[ChildEnd, ...]]:
    """Return the outcomes of the first of these tasks, at least one, in their order."""

    def read(found: Sequence[Row]) -> tuple[ChildEnd, ...]:
        return tuple(ChildEnd(*row[1:5]) for row in found)

    return Statement("step/list_children", {"ids": uuids(ids), "bytes": PAGE_BYTES}, read)


def _page(found: Sequence[Row]) -> StepsPage | None:
    if not found:
        return None
    records = tuple(Recorded(*row[:6]) for row in found if row[0] is not None)
    if not records:
        return StepsPage((), None)
    looked = found[0][6]
    is_last = looked < PAGE_ROWS and len(records) == looked
    return StepsPage(records, None if is_last else (records[-1].kind, records[-1].name))


def _child(found: Sequence[Row]) -> ChildVerdict | None:
    if not found:
        return None
    return ChildVerdict(*found[0][:2])


CommitOutcome = Literal["landed", "rolled_back", "open", "lost", "unclear"]


class ConnectionFacts(Struct, frozen=True, kw_only=True):
    """The database, the role and the transaction of a connection that the user supplied."""

    database: str
    user: str
    has_tables: bool
    is_read_only: bool
    isolation: str


def record_checkpoint(
    task_id: UUID, claim_id: UUID, checkpoint: bytes, *, number: int, progress: bytes | None
) -> Statement[bool]:
    """Store a checkpoint unless one with a higher number is already stored. If `progress` is given, store it too.

    Return False if the lease was lost.
    """
    parameters = {
        "id": task_id,
        "claim_id": claim_id,
        "checkpoint": checkpoint.decode(),
        "number": number,
        "progress": None if progress is None else progress.decode(),
    }
    return Statement("task/record_checkpoint", parameters, bool)


def installation() -> Statement[UUID]:
    """Return the id of this installation."""
    return Statement("commit/read_installation", {}, lambda found: rows.as_uuid(found[0][0]))


def commit_facts(*, schema: str, mark: str) -> Statement[ConnectionFacts]:
    """Return the database, role and transaction state of the user's connection, and mark its transaction."""
    table = sql.Identifier(schema, "installation").as_string(None)
    return Statement("commit/read_connection", {"installation": table, "mark": mark}, _facts)


def commit_lease(task_id: UUID, claim_id: UUID) -> Statement[tuple[UUID, bool]]:
    """Return the id of the installation that the user's connection found, and whether the attempt still holds its task there."""
    return Statement(
        "commit/check_lease",
        {"id": task_id, "claim_id": claim_id},
        lambda found: (rows.as_uuid(found[0][0]), bool(found[0][1])),
    )


def commit_mark(mark: str) -> Statement[bool]:
    """Return whether the user's connection is still in the marked transaction."""
    return Statement("commit/check_transaction", {"mark": mark}, rows.only(bool))


def commit_hurry(most_ms: int) -> Statement[None]:
    """Limit the idle time of the user's transaction.

    If the transaction exceeds the limit, the server closes the session, which releases the lock on the task.
    """
    return Statement("commit/limit_idle_time", {"most_ms": most_ms}, rows.nothing)


def commit_outcome(task_id: UUID, claim_id: UUID) -> Statement[CommitOutcome]:
    """Return the outcome of a commit. It is "open" while a transaction still holds the task. If it is "unclear", repeat the statement."""
    return Statement("commit/read_outcome", {"id": task_id, "claim_id": claim_id}, _outcome)


def _facts(found: Sequence[Row]) -> ConnectionFacts:
    database, user, has_tables, read_only, isolation, _ = found[0]
    return ConnectionFacts(
        database=database,
        user=user,
        has_tables=bool(has_tables),
        is_read_only=read_only == "on",
        isolation=isolation,
    )


def _outcome(found: Sequence[Row]) -> CommitOutcome:
    match found[0]:
        case ("COMPLETED", _, _):
            return "landed"
        case (str(), _, _) | (None, None, False):
            return "lost"
        case (None, True, _):
            return "rolled_back"
        case (None, None, _):
            return "open"
        case _:
            return "unclear"  # the row has changed since the snapshot in which the outcome was looked up


_CANCELLED: Final = ChildVerdict("cancelled", None)
_AGAIN: Final = ChildVerdict("again", None)


class HeldParent(Struct, frozen=True):
    """A running task whose row is locked.

    `child_id` is the id to use for the workflow of this step. `known` is the id that an earlier attempt recorded, if any.
    """

    is_cancelled: bool
    child_id: UUID
    known: UUID | None


def start_by_task(
    task_id: UUID, claim_id: UUID, *, step: str, workflow: NewWorkflow, channel: str
) -> Plan[ChildVerdict | None]:
    """Start a workflow under the name of this step, once across all attempts. Run this plan in one transaction.

    Return None if the lease was lost.
    """
    held = yield from ask(hold_parent(task_id, claim_id, step=step))
    if held is None:
        return None
    if held.known is not None:
        return ChildVerdict("sent", held.known)
    if held.is_cancelled:
        return _CANCELLED
    started = yield from ask(
        insert(
            held.child_id,
            decode_graph(workflow.graph),
            channel=channel,
            key=workflow.key,
            parent_task=task_id,
            largest=workflow.largest,
            joined=True,
        )
    )
    if started is None:
        return _AGAIN
    record = record_child(task_id, claim_id, step=step, child_id=started.id, digest=workflow.digest)
    return ChildVerdict("sent", (yield from ask(record)))


def cancel_started(task_id: UUID, *, channel: str, claim_id: UUID | None = None) -> Statement[list[UUID]]:
    """Request the cancellation of the workflows that a task or its children have started. Return the ids of these workflows.

    If `claim_id` is given and the lease was lost, cancel nothing.
    """
    parameters = {"id": task_id, "channel": channel, "claim_id": claim_id}
    return Statement("workflow/cancel_started", parameters, lambda found: [*found[0][0]])


def hold_parent(task_id: UUID, claim_id: UUID, *, step: str) -> Statement[HeldParent | None]:
    """Lock the row of a running task. Return None if the lease was lost."""
    parameters = {"id": task_id, "claim_id": claim_id, "step": step}
    return Statement("step/hold_parent", parameters, rows.first(HeldParent))


def record_child(
    task_id: UUID, claim_id: UUID, *, step: str, child_id: UUID, digest: str | None
) -> Statement[UUID]:
    """Record the workflow that a locked task has started. Return the recorded id."""
    parameters = {"id": task_id, "claim_id": claim_id, "step": step, "child_id": child_id, "digest": digest}

    return Statement("step/record_child", parameters, lambda found: found[0][0])
