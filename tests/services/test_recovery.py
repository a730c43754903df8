"""Carrying out: batched, fenced, by anybody, landing once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from uuid import UUID

import pytest
from psycopg import AsyncConnection, sql

from everbeat.domain.policy import StoredPolicy
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import TaskRecovered
from everbeat.runtime.exit_report import ExitReport
from everbeat.services.death import Death
from everbeat.store import workers
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from tests.services.conftest import Hands, Onlooker

KILLED = ExitReport(pid=2, signal_number=signal.SIGKILL, signal_name="SIGKILL")
SEGFAULT = ExitReport(pid=77, signal_number=signal.SIGSEGV, signal_name="SIGSEGV")
AGAIN = StoredPolicy(on_crash="retry").to_json()


def bury(hands: Hands, worker: str = "w1", report: ExitReport = KILLED) -> None:
    assert hands.run(
        workers.bury_workers(
            worker_ids=[worker], how="child_exit", cause=report.cause, signal=report.signal_number
        )
    ) == [worker]


async def test_the_only_running_task_of_a_dead_process_is_charged_the_crash(
    onlooker: Onlooker, hands: Hands
) -> None:
    running, neighbour = hands.running(), hands.running("w2")
    hands.send()
    (claimed,) = hands.claim(limit=1)
    bury(hands)
    assert (
        await onlooker.recoverer().recover_worker("w1", KILLED, died_at=onlooker.clock.monotonic() - 0.25)
        == 2
    )
    assert hands.row(claimed.id, "state, crash_count, loss_count") == ("PENDING", 0, 0)
    assert hands.row(running.id, "state, crash_count, loss_count") == ("FAILED", 1, 0)
    data = hands.row(running.id, "error")["data"]
    expected = {"cause": "killed by SIGKILL", "signal": 9, "exit_code": None, "noticed_by": "child_exit",
                "noticed_after_ms": 250, "crash_count": 1, "poison": False, "out_of_memory": False}  # fmt: skip
    assert {name: data[name] for name in expected} == expected
    assert hands.row(neighbour.id, "state") == "RUNNING"
    event = next(one for one in onlooker.told(TaskRecovered) if one.task_id == running.id)  # type: ignore[attr-defined]
    assert event.noticed_after_s == 0.25  # type: ignore[attr-defined]


async def test_several_running_tasks_of_a_dead_process_are_charged_a_loss(
    onlooker: Onlooker, hands: Hands
) -> None:
    tasks = [hands.running(policy=AGAIN) for _ in range(7)]
    bury(hands)
    recoverer = onlooker.recoverer(sweep_batch_size=2)
    assert await recoverer.recover_worker("w1", KILLED, died_at=0.0) == 7
    assert {hands.row(task.id, "state, crash_count, loss_count") for task in tasks} == {("PENDING", 0, 1)}


async def test_a_task_process_that_died_under_its_task_is_charged_until_the_cap(
    onlooker: Onlooker, hands: Hands
) -> None:  # E8
    task_id = hands.send(policy=AGAIN)
    recoverer = onlooker.recoverer()
    for count in (1, 2, 3):
        (claimed,) = hands.claim(limit=1)
        hands.start(claimed)
        landed = await recoverer.recover_lease(claimed.id, claimed.claim_id, SEGFAULT)
        assert landed is not None
        assert landed.action == ("fail" if count == 3 else "retry")
    assert hands.row(task_id, "state, crash_count, attempt") == ("FAILED", 3, 3)
    error = hands.row(task_id, "error")
    assert (error["data"]["poison"], error["data"]["signal"], error["data"]["pid"]) == (True, 11, 77)
    attempts = hands.table("attempts", "attempt, outcome, error->'data'->>'cause'")
    assert sorted(attempts) == [(number, "CRASHED", "killed by SIGSEGV") for number in (1, 2, 3)]
    assert hands.claim() == []


async def test_a_task_process_is_settled_also_where_automatic_recovery_is_off(
    onlooker: Onlooker, hands: Hands
) -> None:
    claimed = hands.running()
    recoverer = onlooker.recoverer(auto_fail_stale_running=False, auto_requeue_stale_claimed=False)
    assert await recoverer.recover_lease(claimed.id, claimed.claim_id, SEGFAULT) is not None
    assert await recoverer.recover_lease(claimed.id, claimed.claim_id, SEGFAULT) is None


async def test_every_sweep_revisits_what_the_ended_hold_whoever_ended_them(
    onlooker: Onlooker, hands: Hands
) -> None:
    running, other = hands.running(), hands.running("w2")
    bury(hands, "w1", SEGFAULT)
    # Declared dead by an observer that died before it could bury the workers.
    assert hands.run(workers.end_supervisor("s1", how="session"))
    assert await onlooker.recoverer().recover_ended() == 2
    how = {row[0]: row[1:] for row in hands.table("recoveries", "task_id, noticed_by, cause")}
    after = dict(hands.table("recoveries", "task_id, noticed_after_ms"))
    assert after[running.id] is None, "how long after its exit nobody wrote down, and its beats do not tell"
    assert after[other.id] is not None
    assert how[running.id] == ("child_exit", "killed by SIGSEGV")
    assert how[other.id] == ("session", "its supervisor ended before it (session)")
    assert hands.row(running.id, "error")["data"]["signal"] == 11


def put_back(hands: Hands, worker: str, seconds: float) -> None:
    """As if the worker had ended so much earlier."""
    text = "update {}.workers set ended_at = ended_at - %s * interval '1 second' where id = %s"
    hands.connection.execute(sql.SQL(text).format(sql.Identifier(hands.target.schema)), [seconds, worker])


async def test_a_crash_belongs_to_the_supervisor_that_saw_it_while_that_lives_and_is_not_late(
    onlooker: Onlooker, hands: Hands
) -> None:  # E8
    running, late = hands.running("w1", policy=AGAIN), hands.running("w2", policy=AGAIN)
    bury(hands, "w1", SEGFAULT)
    bury(hands, "w2", SEGFAULT)
    peer = onlooker.recoverer(running_stale_threshold_ms=60_000)
    assert await peer.recover_ended() == 0, "a peer would have to call it a loss"
    put_back(hands, "w2", 59)
    assert await peer.recover_ended() == 0
    put_back(hands, "w2", 2)
    assert await peer.recover_ended() == 1, "but nobody waits for ever"
    assert hands.row(late.id, "state, crash_count, loss_count") == ("PENDING", 0, 1)
    own = onlooker.recoverer()
    assert await own.recover_worker("w1", SEGFAULT, died_at=0.0) == 1
    assert hands.row(running.id, "state, crash_count, loss_count") == ("PENDING", 1, 0)


@dataclass
class Refusing:
    """A session of which the server refuses one statement, the so-many-th of its name."""

    session: Session
    name: str
    at: int
    asked: int = 0

    async def run(self, statement: Statement[Any], *, patience_s: float | None = None) -> Any:
        self.asked += statement.name == self.name
        if statement.name == self.name and self.asked == self.at:
            raise DatabaseError("refused", fix="ask again")
        return await self.session.run(statement, patience_s=patience_s)


async def test_a_recovery_that_was_refused_halfway_still_knows_who_shared_the_process(
    onlooker: Onlooker, hands: Hands
) -> None:  # E8
    tasks = [hands.running(policy=AGAIN) for _ in range(2)]
    bury(hands)
    onlooker.session = Refusing(onlooker.session, "task/recover", at=2)  # type: ignore[assignment]
    own = onlooker.recoverer(sweep_batch_size=1)
    with pytest.raises(DatabaseError):
        await own.recover_worker("w1", KILLED, died_at=0.0)
    assert await own.recover_worker("w1", KILLED, died_at=0.0) == 1
    assert {hands.row(task.id, "state, crash_count, loss_count") for task in tasks} == {("PENDING", 0, 1)}


async def test_a_burial_that_is_refused_keeps_no_lease_of_the_ended_waiting(
    onlooker: Onlooker, hands: Hands
) -> None:
    running = hands.running()
    bury(hands)
    assert hands.run(workers.end_supervisor("s1", how="session"))
    onlooker.session = Refusing(onlooker.session, "worker/bury_orphans", at=1)  # type: ignore[assignment]
    with pytest.raises(DatabaseError):
        await onlooker.recoverer().recover_ended()
    assert hands.row(running.id, "state") == "FAILED"


async def test_a_requested_cancel_ends_cancelled(onlooker: Onlooker, hands: Hands) -> None:
    running = hands.running(policy=AGAIN)
    assert hands.cancel(running.id) == "REQUESTED"
    bury(hands)
    await onlooker.recoverer().recover_worker("w1", KILLED, died_at=0.0)
    assert hands.row(running.id, "state") == "CANCELLED"


async def test_a_damaged_policy_holds_up_nobody(onlooker: Onlooker, hands: Hands) -> None:
    damaged, sound = hands.running(policy=b"[1, 2]"), hands.running()
    bury(hands)
    assert await onlooker.recoverer().recover_worker("w1", KILLED, died_at=0.0) == 2
    assert {hands.row(task.id, "state") for task in (damaged, sound)} == {"FAILED"}


@pytest.mark.parametrize("recoverers", [8])
async def test_recoverers_side_by_side_recover_each_task_once(
    recoverers: int, onlooker: Onlooker, hands: Hands
) -> None:  # E9, F3
    ids = {hands.send(policy=AGAIN if number % 2 else None) for number in range(50)}
    claimed = hands.claim(limit=50)
    hands.start(*claimed[:40])
    death = Death(noticed_by="session", cause="gone")
    hands.run(workers.end_supervisor("s1", how="session"))
    sessions = [
        Session(hands.target, "everbeat test sweeper", random=Random(one)) for one in range(recoverers)
    ]
    onlookers = [Onlooker(hands, session, supervisor_id=f"o{one}") for one, session in enumerate(sessions)]
    each = [one.recoverer(sweep_batch_size=5) for one in onlookers]
    counts = await asyncio.gather(
        *(one.recover_ended() for one in each[:4]), *(one.recover_supervisor("s1", death) for one in each[4:])
    )
    # What was locked by another when it was read is that other's to recover.
    assert sum(counts) == 50
    assert len(hands.table("recoveries")) == len(ids) == 50
    assert sum(len(one.told(TaskRecovered)) for one in onlookers) == 50
    for session in sessions:
        await session.drop()


@asynccontextmanager
async def locked_for_a_while(hands: Hands, task_id: UUID) -> AsyncIterator[None]:
    """A stranger's transaction has the row while the block begins."""
    async with await AsyncConnection.connect(hands.target.url) as stranger:
        await stranger.execute(
            sql.SQL("select from {}.tasks where id = %s for update").format(
                sql.Identifier(hands.target.schema)
            ),
            [task_id],
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(let_go(stranger))
            yield


async def let_go(stranger: AsyncConnection[Any]) -> None:
    await asyncio.sleep(0.3)  # long enough to be met with, and nothing tells that it was
    await stranger.rollback()


async def test_a_crash_is_settled_by_its_policy_though_the_row_is_locked(
    onlooker: Onlooker, hands: Hands
) -> None:
    """Given up for once, the lease would be a phantom, and its code run again whatever the policy says."""
    onlooker.clock = SystemClock()  # type: ignore[assignment]
    running = hands.running()
    async with asyncio.timeout(10), locked_for_a_while(hands, running.id):
        landed = await onlooker.recoverer().recover_lease(running.id, running.claim_id, SEGFAULT)
    assert landed is not None
    assert hands.row(running.id, "state, crash_count") == ("FAILED", 1)


async def test_a_dead_worker_is_settled_at_once_though_a_row_is_locked(
    onlooker: Onlooker, hands: Hands
) -> None:  # E4
    onlooker.clock = SystemClock()  # type: ignore[assignment]
    running, neighbour = hands.running(), hands.running()
    bury(hands)
    async with asyncio.timeout(10), locked_for_a_while(hands, running.id):
        assert await onlooker.recoverer().recover_worker("w1", KILLED, died_at=0.0) == 2
    assert {hands.row(one.id, "state, loss_count") for one in (running, neighbour)} == {("FAILED", 1)}
