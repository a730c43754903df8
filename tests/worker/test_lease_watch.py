"""A hint about a task that is just being claimed is kept until it is known what the claim brought, and no longer."""

from __future__ import annotations

from uuid import uuid4

from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.clock import SystemClock
from everbeat.store import leases
from everbeat.store.session import Session
from everbeat.wake.topics import CancelAsked, LeaseLost
from everbeat.worker.attempt import Attempt
from everbeat.worker.lease_watch import LeaseWatch
from everbeat.worker.leases import LeaseTable
from tests.worker.deeds import DEFINITIONS
from tests.worker.stand import Stand


async def test_hints_wait_for_the_claims_that_were_under_way_and_no_longer(stand: Stand) -> None:  # B11
    session, table, cancelled = Session(stand.target, "everbeat test"), LeaseTable(), list[Attempt]()
    asked, known = 1, 1
    watch = LeaseWatch(
        session, table=table, on_cancel=cancelled.append, on_lost=lambda _: None, claims=lambda: (asked, known),
        clock=SystemClock(),
    )  # fmt: skip
    watch.is_deaf = False
    stranger = uuid4()
    watch.heard(CancelAsked(stranger))
    assert watch._suspects == {}, "nothing is being claimed, and it is not ours"

    task_id, asked = stand.send("linger", word="x"), 2
    claim = leases.claim(
        worker_id=stand.welcome().worker_id, claim_call=uuid4(), names=["linger"], limit=1, queues=None, queue_priorities={}, starts=1,
    )  # fmt: skip
    (claimed,) = stand.run(claim)
    assert stand.cancel(task_id)[0] == "REQUESTED"
    watch.heard(CancelAsked(task_id))
    watch.heard(LeaseLost((stranger,)))
    await watch.tick()
    assert watch._suspects.keys() == {task_id, stranger}, "the claim's answer has not been read"
    asked = 3  # the next claim is under way before that of the last one is in the table
    await watch.tick()
    assert watch._suspects.keys() == {task_id, stranger}

    attempt = Attempt(
        task=claimed, lane="async", definition=DEFINITIONS["linger"], policy=StoredPolicy(), on_progress=lambda _: None
    )  # fmt: skip
    known = 2
    table.add(attempt)
    await watch.tick()
    assert cancelled == [attempt]
    assert watch._suspects == {}, (
        "the stranger was in none of the claims that were under way when it was heard of"
    )
    await session.drop()
