"""Statements that request, carry out and list bulk actions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.bulk_actions import BulkActionInfo, BulkProblem, BulkState, BulkVerb, SkippedTask
from everbeat.store import rows
from everbeat.store.inspection import Candidate, TaskQuery
from everbeat.store.rows import Row
from everbeat.store.statement import LATEST, Statement, uuids

FIRST_ID: Final = UUID(int=0)
MOST_EXAMINED: Final = 2_000
"""How many tasks one portion examines."""
_TO: Final[Mapping[str, None]] = {"to_queue": None, "to_priority": None}
_ANY: Final[Mapping[str, Any]] = TaskQuery().filters()
_VERBS: Final = [verb.value for verb in BulkVerb]


def filters_of(query: TaskQuery) -> dict[str, Any]:
    """Return the parameters of a query that differ from those of a query for all tasks. They can be stored as JSON.

    The query must not depend on the time of the call: `since` must be a moment.
    """
    left_out = {"is_live"} if query.virtual else {"is_live", "plain_states"}
    found = {
        name: value for name, value in query.filters().items() if value != _ANY[name] and name not in left_out
    }
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return decoded


def parameters_of(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored filters as all parameters of a query."""
    return {**_ANY, **filters}


class BulkOrder(Struct, frozen=True, kw_only=True):
    """A bulk action that is being carried out, as its row is stored."""

    id: UUID
    action: BulkVerb
    filters: Mapping[str, Any]
    parameters: Mapping[str, Any]
    requested_by: str
    origin: str
    requested_at: datetime
    is_cancelled: bool
    cancelled_by: str | None
    position: UUID
    is_walked: bool
    locked: Sequence[UUID]
    families: Sequence[UUID]
    examined: int
    matched: int
    done: int
    skipped: int
    reasons: Mapping[str, int]
    examples: Sequence[SkippedTask]
    portion: int
    failures: int
    waits: int
    problem: str | None


_ORDER: Final = BulkOrder.__struct_fields__
_INFO: Final = (
    "id", "action", "filters", "parameters", "state", "requested_by", "origin", "requested_at", "started_at", "ended_at", "cancel_requested_at",
    "cancelled_by", "changed_at", "carried_out_by", "examined", "matched", "done", "skipped", "reasons", "examples", "problem",
)  # fmt: skip


def _decoded(row: Row, names: Sequence[str]) -> dict[str, Any]:
    found = dict(zip(names, row, strict=True))
    return found | {
        "action": BulkVerb(found["action"]),
        "filters": msgspec.json.decode(found["filters"]),
        "parameters": msgspec.json.decode(found["parameters"]),
        "reasons": msgspec.json.decode(found["reasons"]),
        "examples": msgspec.json.decode(found["examples"], type=list[SkippedTask]),
    }


def _info(row: Row) -> BulkActionInfo:
    found = _decoded(row, _INFO)
    return BulkActionInfo(**found | {"state": BulkState(found["state"])})


def _first_info(found: Sequence[Row]) -> BulkActionInfo | None:
    return _info(found[0]) if found else None


def request(
    action_id: UUID,
    verb: BulkVerb,
    *,
    filters: Mapping[str, Any],
    asked: Mapping[str, Any],
    parameters: Mapping[str, Any],
    by: str,
    origin: str,
    note: str | None = None,
) -> Statement[BulkActionInfo | None]:
    """Request a bulk action. Return it, or an identical action that has not ended. Return None if the request must be repeated.

    `asked` are the filters as they were given, for example with an age instead of a moment: requests with the same ones are identical.
    """
    stored, same, given = (
        msgspec.json.encode(each, order="sorted").decode() for each in (filters, asked, parameters)
    )
    digest = hashlib.sha256(f"{verb.value} {same} {given}".encode()).hexdigest()
    values = {
        "id": action_id, "action": verb.value, "filters": stored, "parameters": given, "digest": digest, "by": by, "origin": origin, "note": note,
    }  # fmt: skip
    return Statement("bulk/request_action", values, _first_info)


def hold(task_id: UUID) -> Statement[str | None]:
    """Lock a task, and return its state. A task in `history` is not locked. Return None if it does not exist."""
    return Statement("bulk/hold_task", {"id": task_id}, lambda found: str(found[0][0]) if found else None)


def is_due() -> Statement[bool]:
    """Return whether the next portion of a bulk action is due."""
    return Statement("bulk/check_due", {}, rows.only(bool))


def take() -> Statement[BulkOrder | None]:
    """Lock the bulk action whose portion is due next, for the rest of the transaction."""

    def read(found: Sequence[Row]) -> BulkOrder | None:
        return BulkOrder(**_decoded(found[0], _ORDER)) if found else None

    return Statement("bulk/take_action", {"actions": _VERBS, "filters": [*_ANY]}, read)


class Walked(NamedTuple):
    """One step of a walk: the last decided id, whether the walk is over, and the tasks that match."""

    position: UUID | None
    is_over: bool
    examined: int
    ids: Sequence[UUID]
    refused: Sequence[tuple[UUID, str]]


def find(
    verb: BulkVerb,
    *,
    filters: Mapping[str, Any],
    parameters: Mapping[str, Any],
    requested_at: datetime,
    after: UUID,
    acted: int,
    most: int = MOST_EXAMINED,
) -> Statement[Walked]:
    """Find the next tasks of a bulk action, at most `acted` of them. Examine at most `most` tasks with ids greater than `after`."""

    def read(found: Sequence[Row]) -> Walked:
        position, is_over, examined, ids, refused, refusals = found[0]
        return Walked(position, is_over, examined, ids, [*zip(refused, refusals, strict=True)])

    name = "bulk/find_ended_tasks" if verb.is_of_ended else "bulk/find_live_tasks"
    values = {
        **_TO,
        **filters,
        **parameters,
        "action": verb.value,
        "applicable": _applicable(verb),
        "requested_at": requested_at,
    }
    return Statement(name, values | {"after": after, "acted": acted, "most": most}, read)


def recall(ids: Sequence[UUID]) -> Statement[int]:
    """Move those of these tasks that are in `history` back, so that they can be retried. Return how many tasks moved."""
    return Statement("bulk/recall_tasks", {"ids": uuids(ids)}, rows.only(int))


class Acted(Struct, frozen=True):
    """A task of a portion: why it was skipped, or None, and whether its children must be cancelled, too."""

    id: UUID
    refusal: str | None
    has_family: bool = False


def act(
    verb: BulkVerb,
    ids: Sequence[UUID],
    *,
    call: UUID,
    parameters: Mapping[str, Any],
    channel: str,
    requested_at: datetime = LATEST,
    states: Sequence[str] | None = None,
) -> Statement[list[Acted]]:
    """Act on these tasks, except those that another session has locked. `call` identifies the action, which retries each task once.

    A live task must still be in one of `states` (None: those of the action). An ended task must have ended until `requested_at`.
    """

    def read(found: Sequence[Row]) -> list[Acted]:
        return [Acted(row[0], row[1], verb is BulkVerb.CANCEL and row[2]) for row in found]

    name = {BulkVerb.RETRY: "retry_tasks", BulkVerb.CANCEL: "cancel_tasks", BulkVerb.DELETE: "delete_tasks"}
    values: dict[str, Any] = {
        "ids": uuids(ids),
        "call": call,
        "channel": channel,
        "requested_at": requested_at,
        "action": verb.value,
    }
    applicable = (
        _applicable(verb) if states is None else [each for each in _applicable(verb) if each in states]
    )
    return Statement(
        f"bulk/{name.get(verb, 'change_tasks')}",
        {**_TO, **parameters, **values, "applicable": applicable},
        read,
    )


def existing(verb: BulkVerb, ids: Sequence[UUID]) -> Statement[list[UUID]]:
    """Return those of these tasks that exist where an action finds its tasks."""
    values = {"ids": uuids(ids), "is_of_ended": verb.is_of_ended}
    return Statement("bulk/list_existing", values, rows.first_column)


def _applicable(verb: BulkVerb) -> list[str]:
    return sorted(state.value for state in verb.applicable)


def record_portion(order: BulkOrder, *, state: BulkState, by: str, rest_ms: int) -> Statement[bool]:
    """Record a portion. `order` is the new state of the action. Run the statement in the transaction that acted."""
    values = {
        "id": order.id, "state": state.value, "rest_ms": rest_ms, "by": by, "position": order.position, "is_walked": order.is_walked,
        "locked": uuids(order.locked), "families": uuids(order.families), "examined": order.examined, "matched": order.matched,
        "done": order.done, "skipped": order.skipped, "reasons": msgspec.json.encode(order.reasons).decode(),
        "examples": msgspec.json.encode(order.examples).decode(), "portion": order.portion, "waits": order.waits, "problem": order.problem,
    }  # fmt: skip
    return Statement("bulk/record_portion", values, rows.any_row)


def record_family(action_id: UUID, task_id: UUID) -> Statement[None]:
    """Record that the children of a cancelled task have been cancelled."""
    return Statement("bulk/record_family", {"id": action_id, "task_id": task_id}, rows.nothing)


def record_failure(order: BulkOrder, *, problem: str, by: str, most: int) -> Statement[bool]:
    """Record that a portion failed. The next portion is half as large. After `most` failures in a row, the action ends as FAILED."""
    values = {"id": order.id, "failures": order.failures, "problem": problem, "by": by, "most": most}
    return Statement("bulk/record_failure", values, rows.any_row)


def cancel_action(action_id: UUID, *, by: str, origin: str) -> Statement[BulkActionInfo | None]:
    """Request that a bulk action stops after its current portion. Return the action, or None if it does not exist."""
    return Statement("bulk/cancel_action", {"id": action_id, "by": by, "origin": origin}, _first_info)


def actions(*, limit: int) -> Statement[list[BulkActionInfo]]:
    """List bulk actions: first those that have not ended, then those that were requested last."""
    return Statement(
        "bulk/list_actions", {"id": None, "limit": limit}, lambda found: [_info(row) for row in found]
    )


def action(action_id: UUID) -> Statement[BulkActionInfo | None]:
    """Return a bulk action, or None if it does not exist."""
    return Statement("bulk/list_actions", {"id": action_id, "limit": 1}, _first_info)


def actions_between(first: UUID, last: UUID, *, limit: int) -> Statement[list[Candidate]]:
    """List the bulk actions with ids from `first` to `last`, newest first."""

    def read(found: Sequence[Row]) -> list[Candidate]:
        return [Candidate("bulk action", str(each), name, state) for each, name, state in found]

    return Statement("bulk/find_actions_by_id", {"first": first, "last": last, "limit": limit}, read)


def problems() -> Statement[list[BulkProblem]]:
    """Return the bulk actions that failed within a day, and those that are stuck."""
    return Statement("bulk/find_problems", {}, rows.each(BulkProblem))
