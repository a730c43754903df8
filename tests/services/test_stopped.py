"""What a supervisor writes for code that ended with its stopped worker process."""

from __future__ import annotations

import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.failure_log import TaskFailure
from everbeat.services.stopped import settle_stopped
from everbeat.store import leases
from everbeat.store.session import Session
from tests.services.conftest import Hands

AGAIN = StoredPolicy(on_crash="retry").to_json()


@pytest.mark.parametrize("policy", [AGAIN, None])
async def test_a_stop_leaves_the_leases_that_a_recovery_hook_left(
    hands: Hands, policy: bytes | None
) -> None:  # J1
    left, other = hands.running(policy=policy), hands.running(policy=policy)
    assert hands.run(leases.leave([(left.id, left.claim_id)])) == [left.id]
    session = Session(hands.target, "everbeat test session")
    events, told = EventBus(), list[Event]()
    events.subscribe(told.append)
    await settle_stopped(session, "w1", channel=hands.target.channel, events=events)
    await session.drop()
    assert hands.row(left.id, "state, claim_id") == ("RUNNING", left.claim_id)
    assert hands.row(other.id, "state") == ("FAILED" if policy is None else "PENDING")
    failures = [(each.task_id, each.code) for each in told if isinstance(each, TaskFailure)]
    assert failures == ([(other.id, "WORKER_STOPPED")] if policy is None else [])


async def test_a_serial_line_stays_held_while_code_of_it_goes_on(hands: Hands) -> None:  # J1
    in_line, other = hands.running(serial="key:line"), hands.running()
    session = Session(hands.target, "everbeat test session")
    await settle_stopped(session, "w1", channel=hands.target.channel, events=EventBus(), code_runs=True)
    assert (hands.row(in_line.id, "state"), hands.row(other.id, "state")) == ("RUNNING", "FAILED")
    await settle_stopped(session, "w1", channel=hands.target.channel, events=EventBus())
    await session.drop()
    assert hands.row(in_line.id, "state") == "FAILED"
