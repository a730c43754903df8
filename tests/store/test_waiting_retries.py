"""A retry that waits for another transaction about its task acts on the task as that transaction left it. Errors about rows do not contain them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import psycopg
import pytest

from everbeat.store import leases, tasks
from everbeat.store.leases import Settlement
from tests.store.conftest import StoreHarness
from tests.store.test_batches import uncommitted
from tests.store.test_schedule_races import until_one_waits_for


@pytest.mark.parametrize("outcome", ["FAILED", "COMPLETED"])
def test_a_retry_waits_for_the_settle_of_its_task(db: StoreHarness, outcome: leases.AttemptOutcome) -> None:
    held = db.running()
    error = b'{"code": "X"}' if outcome == "FAILED" else None
    ended = Settlement(id=held.id, claim_id=held.claim_id, outcome=outcome, error=error)
    retry = tasks.retry(held.id, channel=db.target.channel, call=uuid4())
    with ThreadPoolExecutor(1) as pool:
        with uncommitted(db, leases.settle([ended], channel=db.target.channel)) as settling:
            waiting = pool.submit(db.run, retry)
            until_one_waits_for(db, settling.info.backend_pid)
        verdict = waiting.result(timeout=60)
    assert verdict is not None
    assert (verdict.was, verdict.retried) == (outcome, outcome == "FAILED")
    assert db.row(held.id, "state") == ("PENDING" if outcome == "FAILED" else "COMPLETED")
    assert db.row(held.id, "claim_id") is None


def test_the_error_of_a_refused_row_does_not_contain_the_row(db: StoreHarness) -> None:
    sent = db.send(args=b'{"card": "4242-secret"}')
    leased = db.plain("update {schema}.tasks set claim_id = gen_random_uuid() where id = %s")
    with pytest.raises(psycopg.errors.CheckViolation, match="4242-secret") as caught:
        db.connection.execute(leased, [sent])
    told = str(db.target.explain(caught.value))
    assert "tasks_lease" in told
    assert "4242-secret" not in told
