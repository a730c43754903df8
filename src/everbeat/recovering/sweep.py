"""An operator's sweep and release: recover tasks whose holders have been silent for too long, or that a released worker held."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Final
from uuid import UUID

from msgspec.structs import replace

from everbeat.domain.inspection import UNKNOWN_FATE, SweepResult, SweptTask
from everbeat.errors import DatabaseError, UnknownName
from everbeat.recovering.observer import Thresholds, pages
from everbeat.recovering.orders import OPERATOR, SWEEP, Death, LostLease, order_for
from everbeat.recovering.recoverer import ORPHANED, Recoverer, Recovery, RecoveryResult
from everbeat.store import diagnosis, leases, retention, workers
from everbeat.store.leases import Lease

TURN: Final = "sweep"
TURN_S: Final = 10.0
"""How long the turn of a sweeper that died blocks other sweeps, in seconds. The time limit of its hooks is added."""
AFTERWARDS_S: Final = 5.0
"""How long a sweep retries each of its final statements after the recovery itself, in seconds."""
_CAUSE: Final = "its holder was silent for longer than the sweep allowed"
_RELEASED: Final = Death(noticed_by=OPERATOR, cause="it was released by an operator")
_PAGE: Final = 1_000


class Sweep:
    """A sweep, which recovers stale leases. If `threshold_ms` is None, the configured thresholds apply."""

    def __init__(self, recoverer: Recoverer, *, threshold_ms: int | None = None) -> None:
        environment = recoverer.environment
        sweeper_id = environment.observer.supervisor_id
        self._environment = environment
        self._statements = environment.statements
        self._recoverer = recoverer
        self._thresholds = Thresholds.manual(environment.config, threshold_ms=threshold_ms)
        self._turn = workers.take_turn(
            TURN, interval_ms=round((TURN_S + recoverer.hook_time_s) * 1_000), taken_by=sweeper_id
        )
        self._end_turn = retention.end_turn(TURN, taken_by=sweeper_id)

    async def preview(self) -> SweepResult:
        """Return what a sweep would do now, without writing anything or calling hooks."""
        tasks: list[SweptTask] = []
        stale = Counter[str]()
        is_standby = (await self._statements.run(diagnosis.standing())).is_standby
        rules, random = self._recoverer.unswitched_rules, self._environment.random
        async for page in self._stale():
            for lease in page:
                if is_standby and lease.ended_at is None:
                    tasks.append(_swept(lease, UNKNOWN_FATE))
                    continue
                order = order_for(LostLease(lease, _death(lease)), rules=rules, random=random)
                tasks.append(_swept(lease, "leave" if order is None else order.action))
                stale[lease.worker_id] += 1
        dead = set(stale)
        for each in [] if is_standby else await self._silent():
            if all(stale[worker_id] == held for worker_id, held in each.held.items()):
                dead.update(each.worker_ids)
        return _result(dead, tasks, dry_run=True)

    async def run(self) -> SweepResult:
        """Recover stale leases now and return the result. If another sweep is running, do nothing and return a skipped result."""
        if not await self._statements.run(self._turn):
            return replace(_result((), ()), skipped=True)
        try:
            result, recovered = await self._recover()
        except Exception:  # do not use a finally block: a closed plan must not run another statement
            await self._return_turn()
            raise
        await self._return_turn()
        await self._recoverer.announce(recovered)
        return result

    async def _return_turn(self) -> None:
        with suppress(DatabaseError):  # the turn also expires by itself
            await self._statements.run(self._end_turn, patience_s=AFTERWARDS_S)

    async def _recover(self) -> tuple[SweepResult, RecoveryResult]:
        recovered, tasks = RecoveryResult(), list[SweptTask]()
        async for page in self._stale():
            await self._statements.run(self._turn)  # renew the turn
            for last_beat, group in groupby(sorted(page, key=_last_beat_key), key=_last_beat):
                held = list(group)
                lost = [LostLease(lease, _death(lease)) for lease in held]
                part = await self._recoverer.recover_part(
                    Recovery(lost=lost, rules=self._recoverer.unswitched_rules, last_beat=last_beat)
                )
                tasks += _swept_by(part, held)
                recovered.add(part)
        dead = {task.worker_id for task in tasks}.union(await self._end_the_silent())
        result = _result(dead, tasks, recovered, sessions_problem=await self._end_sessions())
        return result, recovered

    async def _end_sessions(self) -> str | None:
        """Terminate the remaining database sessions of dead trees. Return an error message on failure, else None."""
        try:
            found = await self._statements.run(retention.remaining_sessions(), patience_s=AFTERWARDS_S)
            if doomed := [each for each in found if each.is_left and each.may_end]:
                await self._statements.run(retention.end_sessions(doomed), patience_s=AFTERWARDS_S)
        except DatabaseError as problem:
            return problem.message
        return None

    async def _end_the_silent(self) -> list[str]:
        """Declare dead the silent supervisors that no longer hold leases, and their workers. Return the workers' ids."""
        ended: list[str] = []
        for each in await self._silent():
            if each.held or not await self._statements.run(
                workers.end_supervisor(each.id, how=SWEEP, beat_seq=each.beat_seq)
            ):
                continue
            bury = workers.bury_workers(supervisor_id=each.id, how=SWEEP, cause=_CAUSE)
            buried = await self._statements.run(bury)
            ended += buried
        return ended

    async def _silent(self) -> list[retention.SilentSupervisor]:
        thresholds = self._thresholds
        return await self._statements.run(
            retention.silent_supervisors(silent_ms=thresholds.longest_plain_ms, exact=thresholds.exact)
        )

    async def _stale(self) -> AsyncIterator[list[Lease]]:
        """Yield the stale leases, oldest first, in batches."""
        query = partial(leases.leases_silent, silent_ms=self._thresholds.all_ms()[0])
        async for page in pages(self._statements, query, size=self._environment.config.sweep_batch_size):
            # The lease of an ended worker needs no threshold, because the worker is known to be dead.
            yield [lease for lease in page if lease.ended_at is not None or self._thresholds.is_stale(lease)]


async def release(recoverer: Recoverer, worker_ids: Sequence[str]) -> SweepResult:
    """Declare these workers dead and recover their tasks by the usual rules.

    `worker_ids` in the result contains only workers that were still registered as alive. A worker that is in fact alive loses its leases
    and continues under a new id. Raises UnknownName if a worker is unknown, before anything is changed.
    """
    statements = recoverer.environment.statements
    known = await statements.run(retention.known_workers())
    unknown = [name for name in worker_ids if name not in {each.id for each in known}]
    if unknown:
        raise UnknownName(
            "worker",
            unknown,
            known=[each.id for each in known if not each.is_ended],
            former=[each.id for each in known if each.is_ended],
        )
    await statements.run(retention.release_workers(worker_ids, cause=_RELEASED.cause))
    # The result of this statement is not used, because it is wrong if the statement is repeated after a lost reply.
    ended = {each.id for each in known if not each.is_ended}
    recovered, tasks = RecoveryResult(), list[SweptTask]()
    for worker_id in dict.fromkeys(worker_ids):
        async for held in pages(statements, partial(leases.leases_of_worker, worker_id), size=_PAGE):
            lost = [LostLease(lease, _RELEASED) for lease in held]
            part = await recoverer.recover_part(Recovery(lost=lost, rules=recoverer.unswitched_rules))
            tasks += _swept_by(part, held)
            recovered.add(part)
    await recoverer.announce(recovered)
    result = _result((), tasks, recovered)
    return replace(result, worker_ids=tuple(name for name in dict.fromkeys(worker_ids) if name in ended))


def _last_beat(lease: Lease) -> tuple[str, int] | None:
    """Return a lease's supervisor id and the sequence number of its last heartbeat, or None if the worker has ended or is unknown."""
    if lease.supervisor_id is None or lease.supervisor_seq is None or lease.ended_at is not None:
        return None
    return lease.supervisor_id, lease.supervisor_seq


def _last_beat_key(lease: Lease) -> tuple[str, int]:
    return _last_beat(lease) or ("", 0)


def _death(lease: Lease) -> Death:
    if lease.is_orphan:
        return ORPHANED
    if lease.ended_at is not None:
        return replace(Death.on_record(lease), noticed_by=SWEEP, noticed_after_ms=None)
    return Death(noticed_by=SWEEP, cause=_CAUSE)


def _swept_by(part: RecoveryResult, held: Sequence[Lease]) -> list[SweptTask]:
    """Return the tasks of the leases in `held` that were recovered or left unchanged."""
    left = {lease.id: "leave" for lease in part.left.values()}
    actions: Mapping[UUID, str] = left | {one.id: one.action for one in part.landed}
    return [_swept(lease, actions[lease.id]) for lease in held if lease.id in actions]


def _swept(lease: Lease, action: str) -> SweptTask:
    return SweptTask(
        id=lease.id,
        name=lease.name,
        worker_id=lease.worker_id,
        was=lease.state.value,
        action=action,
        silent_ms=lease.silent_ms,
    )


def _result(
    worker_ids: set[str] | tuple[str, ...],
    tasks: Sequence[SweptTask],
    recovered: RecoveryResult | None = None,
    *,
    dry_run: bool = False,
    sessions_problem: str | None = None,
) -> SweepResult:
    return SweepResult(
        worker_ids=tuple(sorted(worker_ids)),
        recovered_count=0 if recovered is None else len(recovered.landed),
        tasks=tuple(tasks),
        missed=0 if recovered is None else len(recovered.missed),
        skipped=False,
        dry_run=dry_run,
        sessions_problem=sessions_problem,
    )
