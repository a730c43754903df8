"""The state of a cluster in one record: its trees, its rates, the tasks that wait, and the latest recoveries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from everbeat.client.metrics import overdue_leases, queue_depths
from everbeat.client.trees import states_of_trees
from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import RecoveryInfo, SupervisorInfo, WorkerInfo
from everbeat.domain.pulse.judging import TreeState
from everbeat.store import inspection, series
from everbeat.store.plan import Plan, ask

MOST_TREES: Final = 1_000
_MOST_WORKERS: Final = 10_000
_MINUTE: Final = timedelta(minutes=1)


class TreeLoad(Struct, frozen=True):
    """A supervisor that has not ended, with the tasks that its workers hold. `state` is None if it ended meanwhile."""

    supervisor: SupervisorInfo
    state: TreeState | None
    claimed: int
    running: int


class Overview(Struct, frozen=True):
    """The state of a cluster at the database's time `at`.

    `started`, `completed`, `failed` and `retried` count attempts of the last whole minute. `due` counts at most 10,000 tasks of each queue.
    `overdue` are leases of dead workers that should have been recovered already.
    """

    at: datetime
    started: int
    completed: int
    failed: int
    retried: int
    due: int
    oldest_due_s: float | None
    oldest_queue: str | None
    overdue: int
    trees: Sequence[TreeLoad]
    recoveries: Sequence[RecoveryInfo]


def overview(config: RecoveryConfig, *, recoveries: int) -> Plan[Overview]:
    """Return the state of the cluster, with its latest `recoveries`, at most this many."""
    stale_ms = config.claimed_stale_threshold_ms
    now = yield from ask(inspection.read_clock())
    until = now.replace(second=0, microsecond=0)
    minutes = yield from ask(series.rates(since=until - _MINUTE, until=until, bucket_s=60))
    depths = yield from queue_depths()
    oldest = max(
        (each for each in depths if each.oldest_due_s is not None),
        key=lambda each: each.oldest_due_s or 0,
        default=None,
    )
    overdue = yield from overdue_leases(config)
    supervisors = yield from ask(inspection.supervisors(stale_ms=stale_ms, ended_too=False, limit=MOST_TREES))
    workers = yield from ask(inspection.workers(stale_ms=stale_ms, ended_too=False, limit=_MOST_WORKERS))
    return Overview(
        at=now,
        started=sum(each.started for each in minutes),
        completed=sum(each.completed for each in minutes),
        failed=sum(each.failed for each in minutes),
        retried=sum(each.retried for each in minutes),
        due=sum(each.due for each in depths),
        oldest_due_s=None if oldest is None else oldest.oldest_due_s,
        oldest_queue=None if oldest is None else oldest.queue,
        overdue=overdue,
        trees=_trees(supervisors, workers, (yield from states_of_trees(config))),
        recoveries=(yield from ask(inspection.recoveries(limit=recoveries))),
    )


def _trees(
    supervisors: Sequence[SupervisorInfo], workers: Sequence[WorkerInfo], states: Mapping[str, TreeState]
) -> list[TreeLoad]:
    claimed = dict.fromkeys((each.supervisor_id for each in supervisors), 0)
    running = dict(claimed)
    for worker in workers:
        claimed[worker.supervisor_id] = claimed.get(worker.supervisor_id, 0) + worker.claimed
        running[worker.supervisor_id] = running.get(worker.supervisor_id, 0) + worker.running
    ordered = sorted(supervisors, key=lambda each: (each.hostname, each.pid, each.supervisor_id))
    return [
        TreeLoad(
            each,
            states.get(each.supervisor_id),
            claimed[each.supervisor_id],
            running[each.supervisor_id],
        )
        for each in ordered
    ]
