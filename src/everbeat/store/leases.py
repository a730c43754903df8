"""Statements of whoever holds leases, or takes them from the dead: claim, start, settle, release, recover."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal, TypeAlias
from uuid import UUID, uuid4

from msgspec import Struct

from everbeat.domain.states import TaskState
from everbeat.store.declining import marked_json
from everbeat.store.lease_records import Claimed as Claimed
from everbeat.store.lease_records import Lease as Lease
from everbeat.store.lease_records import MarkedGroup as MarkedGroup
from everbeat.store.lease_records import Recovered as Recovered
from everbeat.store.lease_records import RecoveryOrder as RecoveryOrder
from everbeat.store.literals import booleans, integers, json_array, uuids, words
from everbeat.store.prospect import Prospect as Prospect
from everbeat.store.prospect import next_due as next_due
from everbeat.store.statement import Row, Statement, without

NO_POLICIES: Final[Mapping[UUID, bytes | None]] = MappingProxyType({})

Place: TypeAlias = tuple[datetime, UUID]
"""Where a task stands in its lane: by the time it was enqueued, then by its id."""
NO_FLOORS: Final[Mapping[tuple[str, int], Place]] = MappingProxyType({})

CLAIM_BYTES: Final = 16 * 1024 * 1024
"""So much of arguments and checkpoints one claim brings at most, unless a single task has more."""

AttemptOutcome = Literal[
    "COMPLETED", "FAILED", "CANCELLED", "RELEASED", "HANDED_BACK", "SUSPENDED", "DECLINED"
]
"""RELEASED is for code that never began, HANDED_BACK for code that a stop ended; both are stored as RELEASED."""


class Started(Struct, frozen=True):
    """The answer to a start: "started", "expired" or "lost"; the attempt's number, and when it began by the database's clock."""

    verdict: Literal["started", "expired", "lost"]
    attempt: int | None
    started_at: datetime | None = None


class Settlement(Struct, frozen=True, kw_only=True):
    """What became of an attempt. `result` and `error` are JSON text; `retry_in_ms` (None: no retry) counts from the database's now.

    What is SUSPENDED is due when its row says so: `store.steps` has written it there. DECLINED is for `store.declining`, not for `settle`: the
    rest says what is written instead if the row cannot be marked."""

    id: UUID
    claim_id: UUID
    outcome: AttemptOutcome
    result: bytes | None = None
    error: bytes | None = None
    retry_in_ms: int | None = None


def claim(
    *,
    worker_id: str,
    claim_call: UUID,
    names: Sequence[str],
    limit: int,
    queues: Sequence[str] | None,
    queue_priorities: Mapping[str, int],
    suspects: bool | None = None,
    starts: int = 0,
    policies: bytes | None = None,
    alone: bool = False,
    floors: Mapping[tuple[str, int], Place] = NO_FLOORS,
    most_bytes: int = CLAIM_BYTES,
    marked: Sequence[MarkedGroup] = (),
) -> Statement[list[Claimed]]:
    """Takes up to `limit` due tasks of these names, in order: queue priority, priority, first in first out.

    `suspects`: True takes only suspects, False only others, None both. The first `starts` of them begin at once: `policies` (a JSON
    object by name) and `alone` are as for `start`. `floors`: of a (queue, priority) only what stands behind this place.
    It ends before arguments and checkpoints exceed `most_bytes` together, but for the first task. Of marked tasks it takes only those of
    the `marked` groups.
    """
    parameters = {
        "worker_id": worker_id, "claim_call": claim_call, "names": list(names), "limit": limit,
        "most_bytes": most_bytes, "queues": None if queues is None else list(queues),
        "queue_names": list(queue_priorities), "queue_priorities": list(queue_priorities.values()), "suspects": suspects,
        "starts": starts, "policies": None if policies is None else policies.decode(), "alone": alone,
        "marked": marked_json(marked),
        "floor_queues": [queue for queue, _ in floors], "floor_priorities": integers([priority for _, priority in floors]),
        "floor_ats": [place[0] for place in floors.values()], "floor_ids": uuids([place[1] for place in floors.values()]),
    }  # fmt: skip

    def read(found: Sequence[Row]) -> list[Claimed]:
        claimed = [Claimed(*row) for row in found]
        claimed.sort(
            key=lambda task: (
                queue_priorities.get(task.queue, 100),
                task.priority,
                task.enqueued_at,
                task.id.int,
            )
        )
        return claimed

    # The search for groups takes the server a tenth of a claim even if there is none, and nearly always there is none.
    return Statement("task/claim" if marked else without("marked", name="task/claim"), parameters, read)


def start(
    leases: Sequence[tuple[UUID, UUID]],
    *,
    channel: str,
    policies: Mapping[UUID, bytes | None] = NO_POLICIES,
    alone: Collection[UUID] = (),
) -> Statement[dict[UUID, Started]]:
    """Starts claimed tasks, given as (id, claim_id); answers a verdict for each claim_id.

    `policies`: JSON text for tasks that were sent without one, so that whoever finds them dead knows what to do.
    `alone`: claim_ids whose code runs in a process of its own.
    """
    ordered = sorted(leases, key=_lease_place)
    parameters = {
        "ids": uuids([lease[0] for lease in ordered]),
        "claim_ids": uuids([lease[1] for lease in ordered]),
        "policies": json_array([policies.get(lease[0]) for lease in ordered]),
        "alone": booleans([lease[1] in alone for lease in ordered]),
        "channel": channel,
    }
    return Statement(
        "task/start", parameters, lambda found: {row[0]: Started(row[1], row[2], row[3]) for row in found}
    )


def settle(settlements: Sequence[Settlement], *, channel: str) -> Statement[dict[UUID, str]]:
    """Writes outcomes; answers for each claim_id the new state, "already" (an earlier try landed) or "lost". At most 1,000 at once."""
    ordered = sorted(settlements, key=_place)
    parameters = {
        "ids": uuids([one.id for one in ordered]), "claim_ids": uuids([one.claim_id for one in ordered]),
        "outcomes": words([one.outcome for one in ordered]),
        "results": json_array([one.result for one in ordered]), "errors": json_array([one.error for one in ordered]),
        "retry_in_ms": integers([one.retry_in_ms for one in ordered]), "channel": channel,
    }  # fmt: skip

    def read(found: Sequence[Row]) -> dict[UUID, str]:
        return dict(zip((one.claim_id for one in ordered), found[0][0].split(","), strict=True))

    return Statement("task/settle", parameters, read)


def complete(settlements: Sequence[Settlement], *, channel: str) -> Statement[list[UUID]]:
    """Writes outcomes that are all COMPLETED; answers the claim_ids that it landed for. `settle` answers for the others."""
    ordered = sorted(settlements, key=_place)
    parameters = {
        "ids": uuids([one.id for one in ordered]),
        "claim_ids": uuids([one.claim_id for one in ordered]),
        "results": json_array([one.result for one in ordered]),
        "channel": channel,
    }

    def read(found: Sequence[Row]) -> list[UUID]:
        return [ordered[place - 1].claim_id for place in found[0][0] or ()]

    return Statement("task/complete", parameters, read)


def release(leases: Sequence[tuple[UUID, UUID]], *, channel: str) -> Statement[list[UUID]]:
    """Gives claimed tasks back at no cost; answers those that were still held."""
    ordered = sorted(leases, key=_lease_place)
    parameters = {
        "ids": uuids([lease[0] for lease in ordered]),
        "claim_ids": uuids([lease[1] for lease in ordered]),
        "channel": channel,
    }
    return Statement("task/release", parameters, lambda found: [row[0] for row in found])


def check_leases(leases: Sequence[tuple[UUID, UUID]]) -> Statement[list[tuple[UUID, UUID, str]]]:
    """Which of these leases are "lost", and for which a "cancel" was asked: (id, claim_id, verdict)."""
    parameters = {
        "ids": uuids([lease[0] for lease in leases]),
        "claim_ids": uuids([lease[1] for lease in leases]),
    }
    return Statement(
        "task/check_leases", parameters, lambda found: [(row[0], row[1], row[2]) for row in found]
    )


def record_progress(task_id: UUID, claim_id: UUID, progress: bytes) -> Statement[bool]:
    """Stores reported progress; False when the lease was lost."""
    return Statement(
        "task/record_progress", {"id": task_id, "claim_id": claim_id, "progress": progress.decode()}, bool
    )


def leases_of_worker(worker_id: str, *, limit: int, after: Lease | None = None) -> Statement[list[Lease]]:
    """What one worker holds, oldest first, a page at a time."""
    return Statement(
        "task/leases_of_worker", {"worker_id": worker_id, "limit": limit, **_cursor(after)}, _leases
    )


def leases_of_ended(
    *,
    limit: int,
    states: Sequence[TaskState] = (TaskState.CLAIMED, TaskState.RUNNING),
    owner_ms: int = 0,
    after: Lease | None = None,
) -> Statement[list[Lease]]:
    """What ended workers still hold in these states, oldest first, a page at a time.

    `owner_ms`: so long what a supervisor saw end is that supervisor's own to recover, if it lives.
    """
    parameters = {
        "limit": limit, "states": [state.value for state in states], "owner_ms": owner_ms, **_cursor(after),
    }  # fmt: skip
    return Statement("task/leases_of_ended", parameters, _leases)


def leases_orphaned(*, silent_ms: int, limit: int, after: Lease | None = None) -> Statement[list[Lease]]:
    """What unknown workers have held for `silent_ms` by the database's clock, oldest first, a page at a time."""
    return Statement(
        "task/leases_orphaned", {"silent_ms": silent_ms, "limit": limit, **_cursor(after)}, _leases
    )


def leases_silent(*, silent_ms: int, limit: int, after: Lease | None = None) -> Statement[list[Lease]]:
    """What has been silent for `silent_ms` by the database's clock, oldest first, a page at a time."""
    return Statement(
        "task/leases_silent", {"silent_ms": silent_ms, "limit": limit, **_cursor(after)}, _leases
    )


def leases_of_supervisor(
    supervisor_id: str, *, limit: int, after: Lease | None = None
) -> Statement[list[Lease]]:
    """What the workers of one supervisor hold, oldest first, a page at a time."""
    parameters = {"supervisor_id": supervisor_id, "limit": limit, **_cursor(after)}
    return Statement("task/leases_of_supervisor", parameters, _leases)


def leases_by_id(ids: Sequence[UUID]) -> Statement[list[Lease]]:
    """The leases of these tasks, whoever holds them."""
    return Statement("task/leases_by_id", {"ids": list(ids)}, _leases)


def recover(
    orders: Sequence[RecoveryOrder],
    *,
    noticed_by: str,
    recovered_by: str,
    channel: str,
    holder: tuple[str, int] | None = None,
) -> Statement[list[Recovered]]:
    """Carry out decisions; return those that landed, by this try or an earlier one of the same statement.

    `holder` is the supervisor judged by age and the beat that was watched.
    """
    ordered = sorted(orders, key=_place)
    parameters = {
        "ids": [one.id for one in ordered], "claim_ids": [one.claim_id for one in ordered], "states": [one.state.value for one in ordered],
        "worker_seqs": [one.worker_seq for one in ordered], "actions": [one.action for one in ordered],
        "retry_in_ms": [one.retry_in_ms for one in ordered], "run_at": [one.run_at for one in ordered],
        "retry_counts": [one.retry_count for one in ordered], "outcomes": [one.outcome for one in ordered],
        "suspects": [one.suspect for one in ordered], "hooks": [one.hook for one in ordered],
        "errors": [_text(one.error) for one in ordered], "causes": [one.cause for one in ordered],
        "last_beats": [one.last_beat_at for one in ordered], "noticed_after_ms": [one.noticed_after_ms for one in ordered],
        "noticed_by": noticed_by, "recovered_by": recovered_by, "channel": channel,
        "call": uuid4(), "holder_id": holder[0] if holder else None, "holder_seq": holder[1] if holder else None,
    }  # fmt: skip
    return Statement(
        "task/recover", parameters,
        lambda found: [Recovered(row[0], row[1], TaskState(row[2]), row[3], TaskState(row[4]), *row[5:14]) for row in found],
    )  # fmt: skip


def leave(leases: Sequence[tuple[UUID, UUID]]) -> Statement[list[UUID]]:
    """Notes that a hook left these leases, given as (id, claim_id), as they are; answers those noted for the first time."""
    ordered = sorted(leases, key=_lease_place)
    parameters = {"ids": [lease[0] for lease in ordered], "claim_ids": [lease[1] for lease in ordered]}
    return Statement("task/leave", parameters, lambda found: [row[0] for row in found])


def _cursor(after: Lease | None) -> dict[str, object]:
    return {"after_at": after and after.claimed_at, "after_id": after and after.id}


def _leases(found: Sequence[Row]) -> list[Lease]:
    return [Lease(row[0], row[1], TaskState(row[2]), row[3], row[4] or "", *row[5:]) for row in found]


def _place(one: Settlement | RecoveryOrder) -> int:
    """By the key of the task, as PostgreSQL orders it: whoever locks rows does so in this order. A UUID is slow to compare."""
    return one.id.int


def _lease_place(lease: tuple[UUID, UUID]) -> int:
    return lease[0].int


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()
