"""When a worker takes a step, and what it does about workflows that somebody else is at."""

from __future__ import annotations

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
