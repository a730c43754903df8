"""Test that hints about a task that is being claimed are kept until the answer of the claim."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from everbeat.domain.task.policy import StoredPolicy
from everbeat.hints.topics import CancelAsked, LeaseTaken
from everbeat.store import claims
from everbeat.store.session import Session
from everbeat.worker.attempt import Attempt
from everbeat.worker.leases import LeaseTable, LeaseWatch
from everbeat.worker.messages import CancelRequested
from tests.worker.environments import Mailbox, environment_of
from tests.worker.harness import WorkerHarness
from tests.worker.sample_tasks import DEFINITIONS


async def test_the_lease_watch_keeps_a_hint_until_the_claims_in_flight_are_known(
    harness: WorkerHarness,
) -> None:  # B11
    session, table, mailbox = Session(harness.target, "everbeat test"), LeaseTable(), Mailbox()
    table.claims_sent = table.claims_known = 1
    watch = LeaseWatch(environment_of(session, mailbox=mailbox), table=table)
    watch.hints_arrive = True
    stranger = uuid4()
    watch.on_hint(CancelAsked(stranger))
    assert watch._suspects == {}, "no claim is in flight and the task is not in the table"

    task_id, table.claims_sent = harness.send("linger", word="x"), 2
    claim = claims.claim(
        worker_id=harness.welcome().worker_id, claim_call=uuid4(), names=["linger"], limit=1, queues=None, queue_priorities={}, starts=1,
    )  # fmt: skip
    (claimed,) = harness.run(claim)
    assert harness.cancel(task_id)[0] == "REQUESTED"
    watch.on_hint(CancelAsked(task_id))
    watch.on_hint(LeaseTaken((stranger,)))
    await watch.tick()
    assert watch._suspects.keys() == {task_id, stranger}, "the claim's answer has not been read"
    table.claims_sent = 3  # the next claim is sent before the result of the last one is in the table
    await watch.tick()
    assert watch._suspects.keys() == {task_id, stranger}

    requests: Any = None  # the test runs no code
    attempt = Attempt(
        task=claimed, executor_name="async", definition=DEFINITIONS["linger"], policy=StoredPolicy(), requests=requests
    )  # fmt: skip
    table.claims_known = 2
    table.add(attempt)
    await watch.tick()
    (message,) = mailbox.sent
    assert isinstance(message, CancelRequested)
    assert message.attempt is attempt
    assert watch._suspects == {}, "the unknown task was in none of the claims in flight when the hint came"
    await session.drop()
