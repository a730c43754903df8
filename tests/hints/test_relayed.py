"""Hints that a supervisor passes on: their state, gaps, and a supervisor that falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from everbeat.hints.relayed import RelayedHintSource
from everbeat.hints.topics import Everything, TasksReady
from tests.hints.conftest import CallbackLog

SILENT_S = 0.2


class Relayed:
    """A source that is running, and what its callbacks received."""

    def __init__(self, *, silent_s: float = 3_600.0) -> None:
        self.source = RelayedHintSource("channel", silent_s=silent_s)
        self.log = CallbackLog()
        self.running: asyncio.Task[None] | None = None

    def run(self) -> None:
        if self.running is not None:
            self.running.cancel()
        self.running = asyncio.create_task(self.source.run(self._on_hint, self._on_state))

    def _on_hint(self, hint: object) -> None:
        self.log.hints.append(hint)  # type: ignore[arg-type]
        self.log.change.set()

    def _on_state(self, arrive: bool) -> None:
        self.log.states.append(arrive)
        self.log.change.set()


@pytest.fixture
async def relayed() -> AsyncIterator[Relayed]:
    made = Relayed()
    yield made
    if made.running is not None:
        made.running.cancel()


async def test_a_source_that_starts_later_knows_the_state_and_begins_with_everything(
    relayed: Relayed,
) -> None:
    relayed.source.deliver(["t:early"])
    relayed.source.told(arrive=True)
    relayed.run()
    await relayed.log.expect_connected()
    relayed.source.deliver(["t:a", "unknown"])
    assert relayed.log.hints == [Everything(), TasksReady("a")]


async def test_hints_do_not_arrive_until_the_supervisor_says_so(relayed: Relayed) -> None:
    relayed.run()
    await asyncio.sleep(0)  # one iteration of the loop, in which the source starts
    relayed.source.told(arrive=False)
    relayed.source.heard()
    assert (relayed.log.states, relayed.log.hints) == ([], [])


async def test_everything_follows_a_gap(relayed: Relayed) -> None:
    relayed.run()
    await asyncio.sleep(0)  # one iteration of the loop, in which the source starts
    for arrive in (True, False, True, True):
        relayed.source.told(arrive=arrive)
    assert relayed.log.states == [True, False, True]
    assert relayed.log.hints == [Everything(), Everything()]


async def test_hints_do_not_arrive_while_the_supervisor_is_silent() -> None:
    relayed = Relayed(silent_s=SILENT_S)
    relayed.source.told(arrive=True)
    relayed.run()
    await relayed.log.expect(lambda log: log.states == [True, False])
    relayed.source.heard()
    assert relayed.log.states == [True, False, True]
    assert relayed.log.hints == [Everything(), Everything()]
    assert relayed.running is not None
    relayed.running.cancel()


async def test_hints_arrive_after_a_second_run_has_replaced_the_first(relayed: Relayed) -> None:
    relayed.source.told(arrive=True)
    relayed.run()
    await relayed.log.expect_connected()
    first = relayed.running
    relayed.run()
    await relayed.log.expect_connected(times=2)
    assert first is not None
    await asyncio.wait([first])
    assert relayed.log.states[-1]
    relayed.source.deliver(["t:a"])
    assert relayed.log.hints[-1] == TasksReady("a")


async def test_an_error_in_a_callback_does_not_reach_the_supervisors_messages(relayed: Relayed) -> None:
    def fail(_: object) -> None:
        raise ValueError("no")

    running = asyncio.create_task(relayed.source.run(fail, fail))
    await asyncio.sleep(0)  # one iteration of the loop, in which the source starts
    relayed.source.told(arrive=True)
    relayed.source.deliver(["t:a"])
    assert not running.done()
    running.cancel()
