"""When a worker advances workflows, and how it treats workflows that another process holds."""

from __future__ import annotations

import asyncio

import pytest

from everbeat.runtime.clock import SystemClock
from everbeat.store import workflows
from everbeat.store.session import Session
from everbeat.worker.messages import TasksEnqueued
from everbeat.worker.workflow_advancer import FIRST_PAUSE_S, Advancer
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, task
from tests.store.test_advance import begun
from tests.worker.environments import Mailbox, environment_of


async def test_the_advancer_retries_a_held_workflow_after_growing_pauses(
    db: StoreHarness,
) -> None:
    """A signal or pause holds the row for a moment; a worker that considered the workflow done would wait for the next poll."""
    mailbox = Mailbox()
    session = Session(db.target, "everbeat test session")
    advancer = Advancer(environment_of(session, mailbox=mailbox))
    flow = Flow.start(db, [task("a")])
    with db.target.connect("the other") as other:
        begun(db, other, workflows.lock(entries=10, limit=10))
        assert [await advancer.tick() for _ in range(3)] == [
            FIRST_PAUSE_S,
            2 * FIRST_PAUSE_S,
            4 * FIRST_PAUSE_S,
        ]
        other.execute("commit")
    assert not mailbox.sent
    assert await advancer.tick() is None
    assert [type(each) for each in mailbox.sent] == [TasksEnqueued]
    assert flow.nodes() == {"a": "ENQUEUED"}
    # The next held workflow starts with the first pause again.
    held = Flow.start(db, [task("b")])
    with db.target.connect("the other") as other:
        begun(db, other, workflows.lock(entries=10, limit=10))
        advancer.advance_soon()
        assert await advancer.tick() == FIRST_PAUSE_S
        other.execute("commit")
    assert held.nodes() == {"b": "READY"}
    await session.drop()


async def test_the_advancer_sets_aside_a_step_that_times_out_and_advances_other_workflows(
    db: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:  # W12
    slow, other = Flow.start(db, [task("a")]), Flow.start(db, [task("b")])
    for text in (
        "create function {schema}.dawdle() returns trigger language plpgsql as $$ begin perform pg_sleep(30); return new; end $$",
        f"create trigger dawdle before update on {{schema}}.nodes for each row when (new.workflow_id = '{slow.id}')"
        " execute function {schema}.dawdle()",
    ):
        db.connection.execute(db.plain(text))
    clock = SteppedClock()
    session = Session(db.target, "everbeat test session", statement_timeout_ms=300)
    advancer = Advancer(environment_of(session, clock=clock))
    pauses = []
    for _ in range(3):
        advancer.advance_soon()
        caplog.clear()
        await asyncio.wait_for(advancer.tick(), 60)
        (said,) = [each.args for each in caplog.records if "workflow_cannot_go_on" in each.message]
        pauses.append(said[1])  # type: ignore[index]
        clock.ahead_s += float(pauses[-1]) + 1  # type: ignore[arg-type]
    assert pauses == [60, 120, 240]
    assert other.nodes() == {"b": "ENQUEUED"}
    db.connection.execute(db.plain("drop trigger dawdle on {schema}.nodes"))
    await session.drop()
    slow.settle_down()
    assert slow.nodes() == {"a": "ENQUEUED"}


class SteppedClock(SystemClock):
    """A clock that a test can set ahead."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s
