"""The state of an installation at a past moment: the records that the as-of view shows, without later knowledge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from msgspec import Struct, structs

from everbeat.domain.inspection import RecoveryInfo
from everbeat.domain.pulse.sample import PulseSample, SampledWorker
from everbeat.domain.task.states import TaskState

STEPS_S: Final = (-300, -60, -10, 10, 60, 300)
"""The steps of the links around a past moment, in seconds."""


class PastRun(Struct, frozen=True, kw_only=True):
    """An attempt whose code ran at the moment. `ended_at` and `outcome` are None if it still runs. A pruned task has no name."""

    task_id: UUID
    name: str | None
    queue: str | None
    attempt: int
    worker_id: str
    started_at: datetime
    ended_at: datetime | None = None
    outcome: str | None = None


class PastSetting(Struct, frozen=True):
    """A pause or a limit that an operator had set by the moment, according to the audit log."""

    at: datetime
    action: str
    target: str
    actor: str
    note: str | None


def has_expired(setting: PastSetting, at: datetime) -> bool:
    """Return whether a limit was set for a time that had passed by the moment. Its note begins with the numbers, and the reason is last."""
    if setting.action != "set_limit":
        return False
    numbers = f", {setting.note or ''}".partition(", reason=")[0]
    try:
        return datetime.fromisoformat(numbers.partition(", until=")[2].partition(", ")[0]) <= at
    except ValueError:  # it was set for all time
        return False


class PastSample(Struct, frozen=True, kw_only=True):
    """The trees at the moment, as a sample of the pulse. `beats_since` is the time of the oldest heartbeat that is kept."""

    sample: PulseSample
    beats_since: datetime | None


class PastRuns(Struct, frozen=True, kw_only=True):
    """The attempts that ran at the moment. `more`: there were more than are listed."""

    runs: Sequence[PastRun] = ()
    more: bool = False


def as_known_at(recovery: RecoveryInfo, at: datetime) -> RecoveryInfo:
    """Return a recovery without what happened to its task after the moment."""
    ran_again = recovery.ran_again_at is not None and recovery.ran_again_at <= at
    has_ended = recovery.became_at is not None and recovery.became_at <= at
    if has_ended:
        return recovery
    became = TaskState.RUNNING if ran_again else TaskState.PENDING
    return structs.replace(
        recovery,
        ran_again_at=recovery.ran_again_at if ran_again else None,
        ran_again_on=recovery.ran_again_on if ran_again else None,
        became=None if recovery.became is None else became,
        became_at=None,
    )


def with_runs(sample: PulseSample, found: PastRuns) -> PulseSample:
    """Return a sample whose workers run what their attempts say. Snapshots say it only every some seconds."""
    if found.more:
        return sample
    running: dict[str, int] = {}
    for run in found.runs:
        running[run.worker_id] = running.get(run.worker_id, 0) + 1

    def exact(worker: SampledWorker) -> SampledWorker:
        is_ended = worker.ended_at is not None
        return structs.replace(
            worker,
            running=0 if is_ended else running.get(worker.id, 0),
            claimed=0 if is_ended else worker.claimed,
        )

    return structs.replace(sample, workers=tuple(exact(worker) for worker in sample.workers))


def not_kept(
    at: datetime,
    *,
    now: datetime,
    beats_since: datetime | None,
    hours: Iterable[tuple[str, int | None]],
) -> list[str]:
    """Return what is no longer kept of that moment, as phrases. `hours` are names of records with the hours for which they are kept."""
    gone = [
        f"{name} (kept for {kept} h)"
        for name, kept in hours
        if kept is not None and at < now - timedelta(hours=kept)
    ]
    if not gone and (beats_since is None or at < beats_since):
        gone.append("heartbeats (the records begin later)")
    return gone
