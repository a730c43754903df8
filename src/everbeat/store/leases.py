"""Stored leases, and the statements that claim, start, settle, release and recover them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID, uuid4

import msgspec
from msgspec import Struct, structs

from everbeat.domain.series import AttemptResult
from everbeat.domain.task.outcome import error_to_json
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.states import TaskState
from everbeat.errors import WORKER_STOPPED, TaskError
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, booleans, integers, json_array, moments, uuids, words

NO_POLICIES: Final[Mapping[UUID, bytes | None]] = MappingProxyType({})

_ERRORS: Final = msgspec.json.Decoder(dict[int, msgspec.Raw])

AttemptOutcome = Literal[
    "COMPLETED", "FAILED", "CANCELLED", "RELEASED", "HANDED_BACK", "SUSPENDED", "POSTPONED", "DECLINED"
]
"""RELEASED: the code never started. HANDED_BACK: a shutdown interrupted the code. Both are stored as RELEASED.

POSTPONED: the code raised RetryLater. It is stored as SUSPENDED, or as FAILED if the task cannot run again.
"""

RecoveryAction: TypeAlias = Literal["requeue", "retry", "reschedule", "fail", "cancel"]


class Lease(Struct, frozen=True):
    """Another worker's lease, as recovery reads it. The worker of an orphaned lease is not registered, so the worker's columns are None.

    `claimed_stale_ms` and `running_stale_ms` are the staleness thresholds that the holder's tree recorded. A lease that has been silent for
    longer is stale.
    """

    id: UUID
    claim_id: UUID
    state: TaskState
    name: str
    worker_id: str
    supervisor_id: str | None
    hostname: str | None
    pid: int | None
    claimed_at: datetime
    started_at: datetime | None
    last_beat_at: datetime
    policy: str | None
    flags: str | None
    retry_count: int
    crash_count: int
    loss_count: int
    cancel_requested: bool
    attempt: int
    fence: int
    worker_seq: int | None
    ended_how: str | None
    ended_cause: str | None
    ended_at: datetime | None
    silent_ms: int
    supervisor_seq: int | None
    exit_code: int | None
    signal: int | None
    queue: str
    alone: bool
    suspect: bool
    progress_at: datetime | None
    progress: str | None
    serial: str | None
    last_rss_bytes: int | None
    claimed_stale_ms: int | None = None
    running_stale_ms: int | None = None

    @property
    def is_orphan(self) -> bool:
        """Return whether this lease's worker is not registered."""
        return self.supervisor_id is None


class RecoveryOrder(Struct, frozen=True, kw_only=True):
    """A recovery that has been decided but not yet carried out.

    `outcome` is CRASHED, LOST or FAILED (uncharged) if code ran, and None if the lease was never started. The next run is due at `run_at`,
    or `retry_in_ms` milliseconds after the database's current time. Either way, the task keeps its place in its queue. For the action
    "reschedule", `retry_count` replaces the task's retry count; None counts the retry as usual. `hook` is the decision that a recovery hook
    returned. `is_poison`: the task fails because it has used up its crashes or losses.
    """

    id: UUID
    claim_id: UUID
    state: TaskState
    action: RecoveryAction
    retry_in_ms: int | None
    outcome: Literal["CRASHED", "LOST", "FAILED"] | None
    error: bytes | None
    cause: str
    last_beat_at: datetime | None
    noticed_after_ms: int | None
    worker_seq: int | None = None
    run_at: datetime | None = None
    retry_count: int | None = None
    suspect: bool = False
    hook: str | None = None
    is_poison: bool = False


class Recovered(Struct, frozen=True):
    """A recovery that took effect. Its counts are the task's counts after the recovery."""

    id: UUID
    name: str
    was: TaskState
    action: RecoveryAction
    state: TaskState
    worker_id: str
    cause: str
    noticed_after_ms: int | None
    outcome: Literal["CRASHED", "LOST", "FAILED"] | None
    hook: str | None
    retry_count: int
    crash_count: int
    loss_count: int
    attempt: int

    @property
    def attempt_result(self) -> AttemptResult | None:
        """How `rates` counts the attempt that the recovery ended. None: the lease was never started, so it had no attempt."""
        match self.outcome:
            case "FAILED":
                return "failed" if self.state is TaskState.FAILED else "retried"
            case "CRASHED":
                return "crashed"
            case "LOST":
                return "lost"
            case None:
                return None


class Started(Struct, frozen=True):
    """The reply to `start`: the verdict, the attempt number, and the time when the attempt started by the database's clock."""

    verdict: Literal["started", "expired", "lost"]
    attempt: int | None
    started_at: datetime | None = None


class Settlement(Struct, frozen=True, kw_only=True):
    """The outcome of an attempt. `result` and `error` are JSON text.

    `retry_in_ms` is the delay before the retry, counted from the database's current time (None: no retry). If `run_at` is set, it replaces
    the delay. A POSTPONED task fails if `most_postponed` of its attempts since an operator's last retry were postponed. A SUSPENDED task
    becomes due at the time that `store.steps` has written to its row. DECLINED settlements are passed to `decline`, not to `settle`. If the
    row of a declined task cannot be marked, the remaining fields are written instead. `context` is the carrier for the next attempt, as JSON
    text, or None if the carrier stays.
    """

    id: UUID
    claim_id: UUID
    outcome: AttemptOutcome
    result: bytes | None = None
    error: bytes | None = None
    retry_in_ms: int | None = None
    run_at: datetime | None = None
    most_postponed: int | None = None
    context: str | None = None


def lease_keys(leases: Sequence[tuple[UUID, UUID]]) -> dict[str, Any]:
    """Return the statement parameters for leases given as (id, claim_id) pairs."""
    return {"ids": uuids([lease[0] for lease in leases]), "claim_ids": uuids([lease[1] for lease in leases])}


def start(
    leases: Sequence[tuple[UUID, UUID]],
    *,
    channel: str,
    policies: Mapping[UUID, bytes | None] = NO_POLICIES,
    alone: Collection[UUID] = (),
) -> Statement[dict[UUID, Started]]:
    """Start claimed tasks, given as (id, claim_id) pairs. Return a verdict for each claim_id.

    `policies` contains policies as JSON text for tasks that were sent without one, because recovery needs a policy. `alone` contains the
    claim_ids of tasks whose code runs in a separate process.
    """
    ordered = sorted(leases, key=_lease_place)
    parameters = {
        **lease_keys(ordered),
        "policies": json_array([policies.get(lease[0]) for lease in ordered]),
        "alone": booleans([lease[1] in alone for lease in ordered]),
        "channel": channel,
    }
    return Statement(
        "task/start_tasks",
        parameters,
        lambda found: {row[0]: Started(row[1], row[2], row[3]) for row in found},
    )


def settle(settlements: Sequence[Settlement], *, channel: str) -> Statement[dict[UUID, str]]:
    """Write up to 1,000 outcomes. For each claim_id, return the new state, "already" (an earlier try took effect) or "lost"."""
    told = settle_telling(settlements, channel=channel)
    return structs.replace(told, read=lambda found: told.read(found)[0])  # type: ignore[arg-type]


def settle_telling(
    settlements: Sequence[Settlement], *, channel: str
) -> Statement[tuple[dict[UUID, str], dict[UUID, bytes]]]:
    """Write outcomes like `settle`. Return the verdicts, and the stored error of each POSTPONED attempt that failed instead."""
    ordered = sorted(settlements, key=_place)
    parameters = {
        "ids": uuids([one.id for one in ordered]), "claim_ids": uuids([one.claim_id for one in ordered]),
        "outcomes": words([one.outcome for one in ordered]),
        "results": json_array([one.result for one in ordered]), "errors": json_array([one.error for one in ordered]),
        "retry_in_ms": integers([one.retry_in_ms for one in ordered]), "run_ats": moments([one.run_at for one in ordered]),
        "most_postponed": integers([one.most_postponed for one in ordered]), "channel": channel,
        "contexts": json_array([None if one.context is None else one.context.encode() for one in ordered]),
    }  # fmt: skip

    def read(found: Sequence[Row]) -> tuple[dict[UUID, str], dict[UUID, bytes]]:
        verdicts = dict(zip((one.claim_id for one in ordered), found[0][0].split(","), strict=True))
        errors = {} if found[0][2] is None else _ERRORS.decode(found[0][2])
        return verdicts, {ordered[place - 1].claim_id: bytes(error) for place, error in errors.items()}

    return Statement("task/settle_attempts", parameters, read)


def complete(settlements: Sequence[Settlement], *, channel: str) -> Statement[list[UUID]]:
    """Write outcomes that are all COMPLETED. Return the claim_ids whose outcomes were written.

    For the others, `settle` returns the verdicts.
    """
    ordered = sorted(settlements, key=_place)
    parameters = {
        "ids": uuids([one.id for one in ordered]),
        "claim_ids": uuids([one.claim_id for one in ordered]),
        "results": json_array([one.result for one in ordered]),
        "channel": channel,
    }

    def read(found: Sequence[Row]) -> list[UUID]:
        return [ordered[place - 1].claim_id for place in found[0][0] or ()]

    return Statement("task/complete_attempts", parameters, read)


def release(leases: Sequence[tuple[UUID, UUID]], *, channel: str) -> Statement[list[UUID]]:
    """Release claimed tasks without charging an attempt. Return the claim_ids that were still held."""
    ordered = sorted(leases, key=_lease_place)
    return Statement("task/release_leases", lease_keys(ordered) | {"channel": channel}, rows.first_column)


def decline(leases: Sequence[tuple[UUID, UUID]], *, channel: str) -> Statement[dict[UUID, str]]:
    """Release tasks, given as (id, claim_id) pairs, and mark them with their needs.

    Return a verdict for each claim_id that still held its task: "PENDING", "CANCELLED", or "unmarkable" if the task was left unchanged.
    """
    parameters = lease_keys(sorted(leases)) | {"channel": channel}
    return Statement("task/decline_tasks", parameters, lambda found: {row[0]: row[1] for row in found})


def check_leases(leases: Sequence[tuple[UUID, UUID]]) -> Statement[list[tuple[UUID, UUID, str]]]:
    """Return the leases that were lost and those with a cancel request, as (id, claim_id, verdict). The verdict is "lost" or "cancel"."""
    return Statement(
        "task/check_leases", lease_keys(leases), lambda found: [(row[0], row[1], row[2]) for row in found]
    )


def record_progress(task_id: UUID, claim_id: UUID, progress: bytes) -> Statement[bool]:
    """Store the progress that a task has reported. Return False if the lease was lost."""
    return Statement(
        "task/record_progress", {"id": task_id, "claim_id": claim_id, "progress": progress.decode()}, bool
    )


def leases_of_worker(worker_id: str, *, limit: int, after: Lease | None = None) -> Statement[list[Lease]]:
    """Return a page of one worker's leases, oldest first."""
    return Statement(
        "task/list_leases_of_worker", {"worker_id": worker_id, "limit": limit, **_cursor(after)}, _leases
    )


def leases_of_ended(
    *,
    limit: int,
    states: Sequence[TaskState] = (TaskState.CLAIMED, TaskState.RUNNING),
    owner_ms: int = 0,
    after: Lease | None = None,
) -> Statement[list[Lease]]:
    """Return a page of the leases in these states that ended workers still hold, oldest first.

    For `owner_ms` milliseconds after a process exits, only the live supervisor that saw the exit can recover the leases of that process.
    """
    parameters = {
        "limit": limit, "states": [state.value for state in states], "owner_ms": owner_ms, **_cursor(after),
    }  # fmt: skip
    return Statement("task/list_leases_of_ended_workers", parameters, _leases)


def leases_orphaned(*, silent_ms: int, limit: int, after: Lease | None = None) -> Statement[list[Lease]]:
    """Return a page of the leases of unregistered workers that are older than `silent_ms` by the database's clock, oldest first."""
    return Statement(
        "task/list_orphaned_leases", {"silent_ms": silent_ms, "limit": limit, **_cursor(after)}, _leases
    )


def leases_silent(*, silent_ms: int, limit: int, after: Lease | None = None) -> Statement[list[Lease]]:
    """Return a page of the leases whose holder has been silent for `silent_ms` by the database's clock, oldest first."""
    return Statement(
        "task/list_silent_leases", {"silent_ms": silent_ms, "limit": limit, **_cursor(after)}, _leases
    )


def leases_of_supervisor(
    supervisor_id: str, *, limit: int, after: Lease | None = None
) -> Statement[list[Lease]]:
    """Return a page of the leases that one supervisor's workers hold, oldest first."""
    parameters = {"supervisor_id": supervisor_id, "limit": limit, **_cursor(after)}
    return Statement("task/list_leases_of_supervisor", parameters, _leases)


def leases_by_id(ids: Sequence[UUID]) -> Statement[list[Lease]]:
    """Return the current leases of these tasks."""
    return Statement("task/list_leases_by_id", {"ids": list(ids)}, _leases)


def recover(
    orders: Sequence[RecoveryOrder],
    *,
    noticed_by: str,
    recovered_by: str,
    channel: str,
    last_beat: tuple[str, int] | None = None,
) -> Statement[list[Recovered]]:
    """Carry out recoveries. Return the recoveries that took effect, whether now or in an earlier try of the same statement.

    `last_beat` is the id of a supervisor that was judged by its age, and the number of its last heartbeat. If the supervisor has sent a
    later heartbeat, nothing is recovered.
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
        "call": uuid4(), "holder_id": last_beat[0] if last_beat else None, "holder_seq": last_beat[1] if last_beat else None,
    }  # fmt: skip
    return Statement(
        "task/recover_leases", parameters,
        lambda found: [Recovered(row[0], row[1], TaskState(row[2]), row[3], TaskState(row[4]), *row[5:14]) for row in found],
    )  # fmt: skip


def leave(leases: Sequence[tuple[UUID, UUID]]) -> Statement[list[UUID]]:
    """Record that a recovery hook skipped these leases, given as (id, claim_id) pairs. Return the task ids of newly recorded leases."""
    ordered = sorted(leases, key=_lease_place)
    parameters = {"ids": [lease[0] for lease in ordered], "claim_ids": [lease[1] for lease in ordered]}
    return Statement("task/leave_leases", parameters, rows.first_column)


def _cursor(after: Lease | None) -> dict[str, object]:
    return {"after_at": after and after.claimed_at, "after_id": after and after.id}


def _leases(found: Sequence[Row]) -> list[Lease]:
    return [Lease(row[0], row[1], TaskState(row[2]), row[3], row[4] or "", *row[5:]) for row in found]


def _place(one: Settlement | RecoveryOrder) -> int:
    """Return a key that sorts tasks as PostgreSQL sorts UUIDs. Every statement locks rows in this order. Comparing UUID objects is slow."""
    return one.id.int


def _lease_place(lease: tuple[UUID, UUID]) -> int:
    return lease[0].int


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()


_MESSAGE: Final = "The worker was stopped, and the code did not finish within the grace period."


def stop_settlement(task_id: UUID, claim_id: UUID, *, policy: StoredPolicy) -> Settlement:
    """Return the settlement for a task whose code was interrupted by a shutdown.

    It releases the task without charging an attempt if the policy allows a second run, and otherwise fails the task permanently.
    """
    if policy.retries_stop:
        return Settlement(id=task_id, claim_id=claim_id, outcome="HANDED_BACK")
    error = error_to_json(TaskError(WORKER_STOPPED, _MESSAGE))
    return Settlement(id=task_id, claim_id=claim_id, outcome="FAILED", error=error)


def left_by_hooks(task_ids: Sequence[UUID]) -> Statement[set[UUID]]:
    """Return the ids of those tasks whose current lease a recovery hook left unchanged."""
    return Statement(
        "task/list_leases_left_by_hooks", {"ids": list(task_ids)}, lambda found: {row[0] for row in found}
    )
