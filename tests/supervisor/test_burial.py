"""Test how a supervisor settles code that ended with its stopped worker process."""

from __future__ import annotations

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.runtime.failure_log import TaskFailure
from everbeat.store import leases
from everbeat.supervisor.workers import WorkerBurial
from tests.recovering.conftest import ManualObserver, StoreHarness

AGAIN = StoredPolicy(on_crash="retry").to_json()


@pytest.mark.parametrize("policy", [AGAIN, None])
async def test_a_stop_keeps_the_leases_that_a_recovery_hook_skipped(
    observer: ManualObserver, db: StoreHarness, policy: bytes | None
) -> None:  # J1
    left, other = db.running(policy=policy), db.running(policy=policy)
    assert db.run(leases.leave([(left.id, left.claim_id)])) == [left.id]
    recoverer = observer.recoverer()
    await WorkerBurial(recoverer).settle_stopped("w1")
    [counts] = recoverer.environment.rates.take()
    assert (counts.failed, counts.released) == ((1, 0) if policy is None else (0, 1))
    assert db.row(left.id, "state, claim_id") == ("RUNNING", left.claim_id)
    assert db.row(other.id, "state") == ("FAILED" if policy is None else "PENDING")
    failures = [(each.task_id, each.code) for each in observer.seen if isinstance(each, TaskFailure)]
    assert failures == ([(other.id, "WORKER_STOPPED")] if policy is None else [])


async def test_a_serial_line_stays_blocked_while_its_code_still_runs(
    observer: ManualObserver, db: StoreHarness
) -> None:  # J1
    in_line, other = db.running(serial="key:line"), db.running()
    burial = WorkerBurial(observer.recoverer())
    await burial.settle_stopped("w1", code_runs=True)
    assert (db.row(in_line.id, "state"), db.row(other.id, "state")) == ("RUNNING", "FAILED")
    await burial.settle_stopped("w1")
    assert db.row(in_line.id, "state") == "FAILED"
