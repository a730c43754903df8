"""When a worker takes a step, and what it does about workflows that somebody else is at."""

from __future__ import annotations

import asyncio

import pytest

from everbeat.runtime.clock import SystemClock
from everbeat.store import workflows
from everbeat.store.session import Session
from everbeat.worker.advancer import FIRST_PAUSE_S, Advancer
from tests.store.conftest import Hands
from tests.store.flows import Flow, task
from tests.store.test_advance import begun


async def test_a_workflow_that_somebody_is_at_is_looked_at_again_soon_and_then_later(hands: Hands) -> None:
    """Whoever signals or pauses it holds its row for a moment, and takes no step: a worker that took it for done would wait for a poll."""
    enqueued: list[bool] = []
    session = Session(hands.target, "everbeat test session")
    advancer = Advancer(session, on_enqueued=lambda: enqueued.append(True), clock=SystemClock())
    flow = Flow.start(hands, [task("a")])
    with hands.target.connect("the other") as other:
        begun(hands, other, workflows.lock(look=10, limit=10))
        assert [await advancer.tick() for _ in range(3)] == [
            FIRST_PAUSE_S,
            2 * FIRST_PAUSE_S,
            4 * FIRST_PAUSE_S,
        ]
        other.execute("commit")
    assert not enqueued
    assert await advancer.tick() is None
    assert enqueued == [True]
    assert flow.nodes() == {"a": "ENQUEUED"}
    # The next one that is held is a new story.
    held = Flow.start(hands, [task("b")])
    with hands.target.connect("the other") as other:
        begun(hands, other, workflows.lock(look=10, limit=10))
        advancer.look()
        assert await advancer.tick() == FIRST_PAUSE_S
        other.execute("commit")
    assert held.nodes() == {"b": "READY"}
    await session.drop()


async def test_a_step_whose_statement_times_out_is_put_aside_and_holds_up_no_other(
    hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:  # W12
    slow, other = Flow.start(hands, [task("a")]), Flow.start(hands, [task("b")])
    for text in (
        "create function {schema}.dawdle() returns trigger language plpgsql as $$ begin perform pg_sleep(30); return new; end $$",
        f"create trigger dawdle before update on {{schema}}.nodes for each row when (new.workflow_id = '{slow.id}')"
        " execute function {schema}.dawdle()",
    ):
        hands.connection.execute(hands.plain(text))
    clock = SteppedClock()
    session = Session(hands.target, "everbeat test session", statement_timeout_ms=300)
    advancer = Advancer(session, on_enqueued=lambda: None, clock=clock)
    pauses = []
    for _ in range(3):
        advancer.look()
        caplog.clear()
        await asyncio.wait_for(advancer.tick(), 60)
        (said,) = [each.args for each in caplog.records if "workflow_cannot_go_on" in each.message]
        pauses.append(said[1])  # type: ignore[index]
        clock.ahead_s += float(pauses[-1]) + 1  # type: ignore[arg-type]
    assert pauses == [60, 120, 240]
    assert other.nodes() == {"b": "ENQUEUED"}
    hands.connection.execute(hands.plain("drop trigger dawdle on {schema}.nodes"))
    await session.drop()
    slow.settle_down()
    assert slow.nodes() == {"a": "ENQUEUED"}


class SteppedClock(SystemClock):
    """A clock that a test sets ahead."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s
