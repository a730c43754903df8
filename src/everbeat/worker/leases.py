"""The table of leases that this worker holds, the service that checks them, and functions that release them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Final
from uuid import UUID

from everbeat.hints.delivery import HintRate
from everbeat.hints.topics import CancelAsked, Everything, Hint, LeaseTaken
from everbeat.protocol import LeaseKey
from everbeat.store import leases
from everbeat.store.leases import check_leases
from everbeat.store.refusals import divided
from everbeat.store.session import Session
from everbeat.worker.attempt import CODE_RUNS, Attempt, Stage
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.messages import AttemptLost, CancelRequested


class LeaseTable:
    """The attempts whose leases this worker holds.

    An attempt is in the table from the reply to its claim until its settlement, release or loss is certain.
    """

    def __init__(self) -> None:
        self._held: dict[UUID, Attempt] = {}
        self._by_task: dict[UUID, Attempt] = {}
        self._unreported: dict[Attempt, None] = {}
        self._removed: list[UUID] = []
        self.claims_sent = 0
        self.claims_known = 0
        """How many of the sent claims are resolved, so that their tasks are in this table or never will be.

        While this number is less than `claims_sent`, the database might hold leases for this worker that are not in the table yet.
        """

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(tuple(self._held.values()))

    def add(self, attempt: Attempt) -> None:
        """Add the lease that a claim returned."""
        self._held[attempt.claim_id] = attempt
        self._by_task[attempt.id] = attempt
        self._unreported[attempt] = None

    def remove(self, attempt: Attempt) -> bool:
        """Remove a lease, so that heartbeats no longer renew it. Return False if the lease was not held."""
        if self._held.pop(attempt.claim_id, None) is None:
            return False
        latest = self._by_task.pop(attempt.id, attempt)
        if latest is not attempt:
            self._by_task[attempt.id] = latest
        if attempt in self._unreported:
            del self._unreported[attempt]
        else:
            self._removed.append(attempt.claim_id)
        return True

    def by_claim(self, claim_id: UUID) -> Attempt | None:
        """Return the attempt held under this `claim_id`, or None if there is no such attempt."""
        return self._held.get(claim_id)

    def by_task(self, task_id: UUID) -> Attempt | None:
        """Return the attempt held for this task, or None if there is no such attempt."""
        return self._by_task.get(task_id)

    def of(self, leases: Iterable[LeaseKey]) -> list[Attempt]:
        """Return the attempts held under these leases. Leases that are not held are skipped."""
        found = (self._held.get(claim_id) for _, claim_id in leases)
        return [attempt for attempt in found if attempt is not None]

    def at(self, *stages: Stage) -> list[Attempt]:
        """Return the held attempts that are in one of these stages."""
        return [attempt for attempt in self._held.values() if attempt.stage in stages]

    def changes(self) -> tuple[list[LeaseKey], list[UUID]]:
        """Return the leases added and the claim ids removed since the last call.

        A lease that was both added and removed since then is in neither list.
        """
        added, removed = [attempt.lease for attempt in self._unreported], self._removed
        self._unreported, self._removed = {}, []
        return added, removed

    def clear(self) -> list[Attempt]:
        """Remove and return all attempts. The next call of `changes` does not report their removal."""
        held = list(self)
        self._held, self._by_task, self._unreported, self._removed = {}, {}, {}, []
        return held

    def unknown(self, proposed: Iterable[LeaseKey]) -> list[LeaseKey]:
        """Return the leases in `proposed` that are not in this table."""
        return [lease for lease in proposed if lease[1] not in self._held]


POLL_WITHOUT_HINTS_S: Final = 1.0
"""The longest interval between two polls, and between two checks of all leases, while no hints are arriving, in seconds."""
MOST_SUSPECTS: Final = 10_000
"""The maximum number of task ids from hints to remember. If hints name more tasks, the worker checks all leases instead."""


class LeaseWatch:
    """A service that checks the leases that hints name, and checks all leases regularly while no hints are arriving."""

    name = "lease watch"

    def __init__(self, environment: WorkerEnvironment, *, table: LeaseTable) -> None:
        self.wake = asyncio.Event()
        self.hints_arrive = False
        self._session = environment.session
        self._clock = environment.clock
        self._send = environment.send
        self._table = table
        self._hint_rate = HintRate()
        self._suspects: dict[UUID, int] = {}
        self._all_of_claim: int | None = None
        self._check_all = False

    @property
    def interval_s(self) -> float:
        """Return the number of seconds between two ticks: an hour while hints are arriving, otherwise one second."""
        return 3_600.0 if self.hints_arrive else POLL_WITHOUT_HINTS_S

    def on_hint(self, hint: Hint) -> None:
        """Check the leases that a hint might concern."""
        match hint:
            case CancelAsked(task_id) if self._may_hold(task_id):
                self._note(task_id)
            case LeaseTaken(ids) if suspects := {task_id for task_id in ids if self._may_hold(task_id)}:
                self._note(*suspects)
            case Everything():
                self._check_all = True
                self.wake.set()
            case _:
                pass

    def hints_changed(self, *, arrive: bool) -> None:
        """Record whether hints are arriving. While they are not, all leases are checked once per second."""
        self.hints_arrive = arrive
        self.wake.set()

    def claimed(self) -> None:
        """Check the tasks that hints named while a claim was running, because the claim might have returned them."""
        if self._suspects:
            self.wake.set()

    def _may_hold(self, task_id: UUID) -> bool:
        return self._table.claims_sent > self._table.claims_known or self._table.by_task(task_id) is not None

    def _note(self, *task_ids: UUID) -> None:
        asked = self._table.claims_sent
        if len(self._suspects) < MOST_SUSPECTS:
            self._suspects.update(dict.fromkeys(task_ids, asked))
        else:
            self._all_of_claim = asked
        self.wake.set()

    async def tick(self) -> float | None:
        """Check the leases that hints named, or all leases."""
        suspects = self._suspects
        # Leases that a pending claim might return are checked once its reply has arrived.
        known = self._table.claims_known
        self._suspects = {
            one: claim for one, claim in suspects.items() if claim > known and not self._table.by_task(one)
        }
        everything, self._check_all = (
            self._check_all or not self.hints_arrive or self._all_of_claim is not None,
            False,
        )
        if self._all_of_claim is not None and self._all_of_claim <= known:
            self._all_of_claim = None
        held = self._table.at(Stage.CLAIMED, Stage.STARTING, *CODE_RUNS)
        asked = [attempt for attempt in held if everything or attempt.id in suspects]
        if asked:
            if self.hints_arrive:
                await self._clock.sleep(self._hint_rate.pause_s(self._clock.monotonic()))
            for _, claim_id, verdict in await self._session.run(check_leases([one.lease for one in asked])):
                attempt = self._table.by_claim(claim_id)
                match verdict:
                    case "lost" if attempt is not None:
                        self._hint_rate.paid_off()
                        self._send(AttemptLost(attempt))
                    case "cancel" if attempt is not None:
                        self._hint_rate.paid_off()
                        self._send(CancelRequested(attempt))
                    case _:
                        pass
        return None


_PAGE: Final = 1_000
_LONGEST_PROBLEM: Final = 500
_log = logging.getLogger("everbeat.worker")


async def release(session: Session, held: Sequence[LeaseKey]) -> list[UUID]:
    """Release claimed tasks, and return the ids of the tasks whose leases were still held.

    PostgreSQL can refuse to store a row as PENDING, for example because a name is too long for the index. The task then keeps its
    lease until its worker shuts down, and recovery sets the task to FAILED.
    """

    def write(some: Sequence[LeaseKey]) -> Awaitable[list[UUID]]:
        return session.run(leases.release(some, channel=session.target.channel))

    return await divided(held, write, _refused)


async def _refused(lease: LeaseKey, problem: Exception) -> list[UUID]:
    _log.error("release_refused task_id=%s problem=%s", lease[0], str(problem)[:_LONGEST_PROBLEM])
    return []


async def give_back(session: Session, phantoms: Sequence[LeaseKey]) -> None:
    """Release leases that are not in this worker's table, whether or not their tasks have started. Their code never ran here."""
    released = await release(session, phantoms)
    if running := [lease for lease in phantoms if lease[0] not in released]:
        await divided(running, lambda some: _hand_back(session, some), _refused)


async def _hand_back(session: Session, running: Sequence[LeaseKey]) -> list[UUID]:
    outcomes = [
        leases.Settlement(id=task_id, claim_id=claim_id, outcome="RELEASED") for task_id, claim_id in running
    ]
    settled = await session.run(leases.settle(outcomes, channel=session.target.channel))
    return list(settled)


async def give_back_unknown(session: Session, table: LeaseTable, worker_id: str) -> None:
    """Release the leases that the database stores under this worker's id but that are not in the table.

    Do not call this function while a claim is pending.
    """
    last = None
    while page := await session.run(leases.leases_of_worker(worker_id, limit=_PAGE, after=last)):
        last = page[-1]
        if phantoms := table.unknown((lease.id, lease.claim_id) for lease in page):
            await give_back(session, phantoms)
