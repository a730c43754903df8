"""Test the recovery of leases: in batches, fenced, by any observer, and once for each lease."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from uuid import UUID

import pytest
from psycopg import AsyncConnection, sql

from everbeat.domain.recovery.hooks import HookReply, HookScopes, NoHooks, RecoveryContext
from everbeat.domain.task.policy import StoredPolicy
from everbeat.errors import DatabaseError
from everbeat.recovering.orders import Death, LostLease
from everbeat.recovering.recoverer import Recovery
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import TaskRecovered
from everbeat.runtime.processes import ExitReport
from everbeat.store import leases, workers
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from tests.recovering.conftest import ManualObserver, StoreHarness

KILLED = ExitReport(pid=2, signal_number=signal.SIGKILL, signal_name="SIGKILL")
SEGFAULT = ExitReport(pid=77, signal_number=signal.SIGSEGV, signal_name="SIGSEGV")
CRASHED = Death.by_exit(SEGFAULT, after_s=0.0, pid=SEGFAULT.pid)
AGAIN = StoredPolicy(on_crash="retry").to_json()


def bury(db: StoreHarness, worker: str = "w1", report: ExitReport = KILLED) -> None:
    assert db.run(
        workers.bury_workers(
            worker_ids=[worker], how="child_exit", cause=report.cause, signal=report.signal_number
        )
    ) == [worker]


async def test_the_only_running_task_of_a_dead_process_is_charged_the_crash(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running, neighbour = db.running(), db.running("w2")
    db.send()
    (claimed,) = db.claim(limit=1)
    bury(db)
    assert (
        await observer.recoverer().recover_worker("w1", KILLED, died_at=observer.clock.monotonic() - 0.25)
        == 2
    )
    assert db.row(claimed.id, "state, crash_count, loss_count") == ("PENDING", 0, 0)
    assert db.row(running.id, "state, crash_count, loss_count") == ("FAILED", 1, 0)
    data = db.row(running.id, "error")["data"]
    expected = {"cause": "killed by SIGKILL", "signal": 9, "exit_code": None, "noticed_by": "child_exit",
                "noticed_after_ms": 250, "crash_count": 1, "poison": False, "out_of_memory": False}  # fmt: skip
    assert {name: data[name] for name in expected} == expected
    assert db.row(neighbour.id, "state") == "RUNNING"
    event = next(one for one in observer.told(TaskRecovered) if one.task_id == running.id)  # type: ignore[attr-defined]
    assert event.noticed_after_s == 0.25  # type: ignore[attr-defined]


async def test_several_running_tasks_of_a_dead_process_are_charged_a_loss(
    observer: ManualObserver, db: StoreHarness
) -> None:
    tasks = [db.running(policy=AGAIN) for _ in range(7)]
    bury(db)
    recoverer = observer.recoverer(sweep_batch_size=2)
    assert await recoverer.recover_worker("w1", KILLED, died_at=0.0) == 7
    assert {db.row(task.id, "state, crash_count, loss_count") for task in tasks} == {("PENDING", 0, 1)}


async def test_a_task_whose_process_dies_is_charged_crashes_until_max_crashes(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E8
    task_id = db.send(policy=AGAIN)
    recoverer = observer.recoverer()
    for count in (1, 2, 3):
        (claimed,) = db.claim(limit=1)
        db.start(claimed)
        landed = await recoverer.recover_attempt(claimed.id, claimed.claim_id, CRASHED)
        assert landed is not None
        assert landed.action == ("fail" if count == 3 else "retry")
    assert db.row(task_id, "state, crash_count, attempt") == ("FAILED", 3, 3)
    error = db.row(task_id, "error")
    assert (error["data"]["poison"], error["data"]["signal"], error["data"]["pid"]) == (True, 11, 77)
    attempts = db.table("attempts", "attempt, outcome, error->'data'->>'cause'")
    assert sorted(attempts) == [(number, "CRASHED", "killed by SIGSEGV") for number in (1, 2, 3)]
    assert db.claim() == []


async def test_a_task_whose_process_died_is_settled_with_automatic_recovery_off(
    observer: ManualObserver, db: StoreHarness
) -> None:
    claimed = db.running()
    recoverer = observer.recoverer(auto_fail_stale_running=False, auto_requeue_stale_claimed=False)
    assert await recoverer.recover_attempt(claimed.id, claimed.claim_id, CRASHED) is not None
    assert await recoverer.recover_attempt(claimed.id, claimed.claim_id, CRASHED) is None


async def test_recover_ended_recovers_leases_of_workers_ended_by_any_observer(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running, other = db.running(), db.running("w2")
    bury(db, "w1", SEGFAULT)
    # An observer declared it dead and died before it could bury the workers.
    assert db.run(workers.end_supervisor("s1", how="session"))
    assert await observer.recoverer().recover_ended() == 2
    how = {row[0]: row[1:] for row in db.table("recoveries", "task_id, noticed_by, cause")}
    after = dict(db.table("recoveries", "task_id, noticed_after_ms"))
    assert after[running.id] is None, "the exit time is not recorded, and the heartbeats do not show it"
    assert after[other.id] is not None
    assert how[running.id] == ("child_exit", "killed by SIGSEGV")
    assert how[other.id] == ("session", "its supervisor ended before it (session)")
    assert db.row(running.id, "error")["data"]["signal"] == 11


class HeldUpHooks(NoHooks):
    """Hooks that do not answer before `go`, and whose first call then fails."""

    scopes = HookScopes(every_task=True)

    def __init__(self) -> None:
        self.asked, self.go, self.calls = asyncio.Event(), asyncio.Event(), 0

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        self.calls += 1
        if self.calls == 1:
            self.asked.set()
            await self.go.wait()
            raise ConnectionError("meant by the test")
        return {}


async def test_a_dead_worker_is_recovered_again_if_another_pass_fails(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    bury(db)
    observer.hooks = hooks = HeldUpHooks()
    recoverer = observer.recoverer()
    (lease,) = db.run(leases.leases_of_worker("w1", limit=10))
    other = asyncio.create_task(recoverer.recover(Recovery(lost=[LostLease(lease, CRASHED)])))
    await hooks.asked.wait()
    settled = asyncio.create_task(recoverer.recover_worker("w1", KILLED, died_at=0.0))
    while not observer.clock.waiting and not settled.done():
        await asyncio.sleep(0.01)  # until it waits for the other pass
    assert not settled.done(), "the lease is still held"
    hooks.go.set()
    with pytest.raises(ConnectionError):
        await other
    await observer.clock.advance(60)
    assert await settled == 1
    assert db.row(running.id, "state") == "FAILED"


def put_back(db: StoreHarness, worker: str, seconds: float) -> None:
    """Date the end of the worker back by this many seconds."""
    text = "update {}.workers set ended_at = ended_at - %s * interval '1 second' where id = %s"
    db.connection.execute(sql.SQL(text).format(sql.Identifier(db.target.schema)), [seconds, worker])


async def test_only_the_supervisor_that_saw_a_crash_recovers_it_within_its_threshold(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E8
    running, late = db.running("w1", policy=AGAIN), db.running("w2", policy=AGAIN)
    bury(db, "w1", SEGFAULT)
    bury(db, "w2", SEGFAULT)
    peer = observer.recoverer(running_stale_threshold_ms=60_000)
    assert await peer.recover_ended() == 0, "another supervisor could only charge a loss"
    put_back(db, "w2", 59)
    assert await peer.recover_ended() == 0
    put_back(db, "w2", 2)
    assert await peer.recover_ended() == 1, "the wait must end"
    assert db.row(late.id, "state, crash_count, loss_count") == ("PENDING", 0, 1)
    own = observer.recoverer()
    assert await own.recover_worker("w1", SEGFAULT, died_at=0.0) == 1
    assert db.row(running.id, "state, crash_count, loss_count") == ("PENDING", 1, 0)


@dataclass
class Refusing:
    """A session whose server refuses one statement, number `at` of its name."""

    session: Session
    name: str
    at: int
    asked: int = 0

    async def run(self, statement: Statement[Any], *, patience_s: float | None = None) -> Any:
        self.asked += statement.name == self.name
        if statement.name == self.name and self.asked == self.at:
            raise DatabaseError("refused", fix="ask again")
        return await self.session.run(statement, patience_s=patience_s)


async def test_a_recovery_repeated_halfway_still_knows_which_tasks_shared_the_process(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E8
    tasks = [db.running(policy=AGAIN) for _ in range(2)]
    bury(db)
    observer.session = Refusing(observer.session, "task/recover_leases", at=2)  # type: ignore[assignment]
    own = observer.recoverer(sweep_batch_size=1)
    with pytest.raises(DatabaseError):
        await own.recover_worker("w1", KILLED, died_at=0.0)
    assert await own.recover_worker("w1", KILLED, died_at=0.0) == 1
    assert {db.row(task.id, "state, crash_count, loss_count") for task in tasks} == {("PENDING", 0, 1)}


async def test_a_refused_burial_does_not_delay_the_recovery_of_other_leases(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running()
    bury(db)
    assert db.run(workers.end_supervisor("s1", how="session"))
    observer.session = Refusing(observer.session, "worker/bury_orphans", at=1)  # type: ignore[assignment]
    with pytest.raises(DatabaseError):
        await observer.recoverer().recover_ended()
    assert db.row(running.id, "state") == "FAILED"


async def test_a_recovered_task_with_a_cancel_request_ends_cancelled(
    observer: ManualObserver, db: StoreHarness
) -> None:
    running = db.running(policy=AGAIN)
    assert db.cancel(running.id) == "REQUESTED"
    bury(db)
    await observer.recoverer().recover_worker("w1", KILLED, died_at=0.0)
    assert db.row(running.id, "state") == "CANCELLED"


async def test_a_damaged_policy_does_not_block_the_recovery_of_other_tasks(
    observer: ManualObserver, db: StoreHarness
) -> None:
    damaged, sound = db.running(policy=b"[1, 2]"), db.running()
    bury(db)
    assert await observer.recoverer().recover_worker("w1", KILLED, died_at=0.0) == 2
    assert {db.row(task.id, "state") for task in (damaged, sound)} == {"FAILED"}


@pytest.mark.parametrize("recoverers", [8])
async def test_concurrent_recoverers_recover_each_task_once(
    recoverers: int, observer: ManualObserver, db: StoreHarness
) -> None:  # E9, F3
    ids = {db.send(policy=AGAIN if number % 2 else None) for number in range(50)}
    claimed = db.claim(limit=50)
    db.start(*claimed[:40])
    death = Death(noticed_by="session", cause="gone")
    db.run(workers.end_supervisor("s1", how="session"))
    sessions = [Session(db.target, "everbeat test sweeper", random=Random(one)) for one in range(recoverers)]
    onlookers = [ManualObserver(db, session, supervisor_id=f"o{one}") for one, session in enumerate(sessions)]
    each = [one.recoverer(sweep_batch_size=5) for one in onlookers]
    counts = await asyncio.gather(
        *(one.recover_ended() for one in each[:4]), *(one.recover_supervisor("s1", death) for one in each[4:])
    )
    # A lease that another recoverer had locked is recovered by that one.
    assert sum(counts) == 50
    assert len(db.table("recoveries")) == len(ids) == 50
    assert sum(len(one.told(TaskRecovered)) for one in onlookers) == 50
    for session in sessions:
        await session.drop()


@asynccontextmanager
async def locked_for_a_while(db: StoreHarness, task_id: UUID) -> AsyncIterator[None]:
    """Lock the row in another session while the block begins."""
    async with await AsyncConnection.connect(db.target.url) as stranger:
        await stranger.execute(
            sql.SQL("select from {}.tasks where id = %s for update").format(sql.Identifier(db.target.schema)),
            [task_id],
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(let_go(stranger))
            yield


async def let_go(stranger: AsyncConnection[Any]) -> None:
    await asyncio.sleep(0.3)  # long enough that the recovery meets the lock, of which no event reports
    await stranger.rollback()


async def test_a_crash_is_settled_by_its_policy_after_a_row_lock(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """If the recovery skipped the locked row, the lease would become unknown and its code would run again against the policy."""
    observer.clock = SystemClock()  # type: ignore[assignment]
    running = db.running()
    async with asyncio.timeout(10), locked_for_a_while(db, running.id):
        landed = await observer.recoverer().recover_attempt(running.id, running.claim_id, CRASHED)
    assert landed is not None
    assert db.row(running.id, "state, crash_count") == ("FAILED", 1)


async def test_tasks_of_a_dead_worker_are_settled_despite_a_row_lock(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E4
    observer.clock = SystemClock()  # type: ignore[assignment]
    running, neighbour = db.running(), db.running()
    bury(db)
    async with asyncio.timeout(10), locked_for_a_while(db, running.id):
        assert await observer.recoverer().recover_worker("w1", KILLED, died_at=0.0) == 2
    assert {db.row(one.id, "state, loss_count") for one in (running, neighbour)} == {("FAILED", 1)}
