"""What the demo sees: one look at workers, leases and recoveries, through the questions that every app answers.

What lives here: looking, and telling the database's time. What may not: what follows from a look.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from everbeat import App, RecoveryInfo, SupervisorInfo, TaskState, TaskSummary, WorkerInfo
from everbeat.runtime.clock import Clock

MOST = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One look; `at` by the database's clock. Workers and supervisors also those that ended."""

    at: datetime
    workers: Sequence[WorkerInfo]
    supervisors: Mapping[str, SupervisorInfo]
    leases: Sequence[TaskSummary]
    recoveries: Sequence[RecoveryInfo]
    unfinished: int

    def held_by(self, worker_ids: Collection[str]) -> list[TaskSummary]:
        """The leases of these workers."""
        return [lease for lease in self.leases if lease.claimed_by_worker_id in worker_ids]

    def rescued_from(self, worker_ids: Collection[str]) -> list[RecoveryInfo]:
        """The recoveries of what these workers held."""
        return [recovery for recovery in self.recoveries if recovery.worker_id in worker_ids]

    def live_workers(self, pid: int) -> list[WorkerInfo]:
        """The workers that were not ended of the supervisor with this process id."""
        return [
            worker
            for worker in self.workers
            if worker.ended_at is None and self.supervisors[worker.supervisor_id].pid == pid
        ]


class DatabaseClock:
    """The database's time, told by the machine's clock and the moments at which the database stored tasks sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead: tuple[timedelta, timedelta] | None = None

    def learn(self, stored_at: datetime, *, before: datetime, after: datetime) -> None:
        """The database stored at `stored_at` what was sent between these two moments of the machine's clock."""
        least, most = stored_at - after, stored_at - before
        if self._ahead is not None:
            least, most = max(least, self._ahead[0]), min(most, self._ahead[1])
        if least <= most:  # else a clock was set meanwhile
            self._ahead = least, most

    def now(self) -> datetime:
        """The database's time now."""
        least, most = self._ahead or (timedelta(0), timedelta(0))
        return self._clock.wall() + (least + most) / 2


def look(app: App, clock: DatabaseClock) -> Sight:
    """Looks."""
    # Leases first: who is seen to hold one is then among the workers.
    leases = app.list_tasks(state=[TaskState.CLAIMED, TaskState.RUNNING], limit=MOST)
    workers = app.list_workers(limit=MOST)
    supervisors = app.list_supervisors(limit=MOST)
    queues = app.queues()
    return Sight(
        at=clock.now(),
        workers=workers,
        supervisors={supervisor.supervisor_id: supervisor for supervisor in supervisors},
        leases=leases,
        recoveries=app.recoveries(limit=MOST),
        unfinished=sum(queue.pending + queue.scheduled + queue.claimed + queue.running for queue in queues),
    )
