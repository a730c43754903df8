"""A crash of PostgreSQL ends all sessions and leaves its server process: who has not come back yet is not dead.

A real server, of which one backend is killed. The observers have just started, so they know nothing of the time before.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import psycopg
import pytest

from everbeat.config import RecoveryConfig
from everbeat.runtime.events import EventBus
from everbeat.services.observer import CALM_S
from everbeat.services.session_watch import SessionWatch
from everbeat.services.slot import SlotKeeper
from everbeat.store import migrating, workers
from everbeat.store.embedded import EmbeddedServer
from everbeat.store.predecessors import predecessors, take_slot
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.testing.clock import ManualClock
from tests.conftest import NewServer
from tests.services.conftest import Onlooker
from tests.services.test_session_watch import end, session_of
from tests.store.conftest import Hands


class Crashing:
    """A server that crashes on demand, and parties that find it again."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.target = Target.parse(server.url, schema="everbeat")
        with self.target.connect("everbeat test") as connection:
            migrating.migrate(connection, self.target)
        self.hands = self._new_hands()
        self.session = Session(self.target, "everbeat test caretakers")

    def _new_hands(self) -> Hands:
        return Hands(self.target, self.target.connect("everbeat test"))

    async def crash(self) -> None:
        """Kill a backend, and wait until the server that has recovered accepts connections again."""
        victim = self.hands.connection
        before = self._postmaster_started()
        self.hands.database.close()
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not victim.closed:
                with suppress(psycopg.Error):
                    victim.execute("select 1")
                await asyncio.sleep(0.01)  # the server notices the kill in its own time
            while True:
                with suppress(Exception):
                    self.hands = self._new_hands()
                    break
                await asyncio.sleep(0.01)  # the server is in recovery
        victim.close()
        assert self._postmaster_started() == before, (
            "the server process was started again, which is another fault"
        )

    def _postmaster_started(self) -> object:
        return self.hands.connection.execute("select pg_postmaster_start_time()").fetchone()

    def newcomer(self) -> Onlooker:
        """An observer that starts now."""
        return Onlooker(self.hands, self.session, clock=ManualClock(), events=EventBus())


@pytest.fixture
async def crashing(new_server: NewServer) -> AsyncIterator[Crashing]:
    made = Crashing(new_server(settings={"synchronous_commit": "on"}))
    made.hands.supervisor("s1", "w1")
    made.hands.supervisor("me")
    yield made
    await made.session.drop()
    made.hands.connection.close()
    made.hands.database.close()


async def look(onlooker: Onlooker, watch: SessionWatch, *, for_s: float) -> None:
    until = onlooker.clock.monotonic() + for_s
    while onlooker.clock.monotonic() < until:
        await watch.tick()
        await onlooker.clock.advance(0.5)


async def test_a_new_observer_waits_for_trees_that_lost_their_sessions_in_a_crash(
    crashing: Crashing,
) -> None:  # J16
    with session_of(crashing.hands, "s1"):
        await crashing.crash()
    newcomer = crashing.newcomer()
    watch = newcomer.session_watch()
    await look(newcomer, watch, for_s=CALM_S - 1)
    assert newcomer.living() == {"me", "s1"}
    with session_of(crashing.hands, "s1") as back:
        await look(newcomer, watch, for_s=CALM_S)
        assert newcomer.living() == {"me", "s1"}
        end(back, crashing.hands)
    await look(newcomer, watch, for_s=4.0)
    assert newcomer.living() == {"me"}, "a death after its return is noticed as ever"


async def test_a_tree_that_does_not_come_back_after_a_crash_is_given_up(crashing: Crashing) -> None:  # J16
    with session_of(crashing.hands, "s1"):
        await crashing.crash()
    newcomer = crashing.newcomer()
    await look(newcomer, newcomer.session_watch(), for_s=CALM_S + 4.0)
    assert newcomer.living() == {"me"}


async def test_a_tree_that_came_back_after_a_crash_and_died_is_noticed_at_once(
    crashing: Crashing,
) -> None:  # J16
    """The observer starts later, and sees neither."""
    await crashing.crash()
    with session_of(crashing.hands, "s1") as session:
        end(session, crashing.hands)
    newcomer = crashing.newcomer()
    await look(newcomer, newcomer.session_watch(), for_s=4.0)
    assert newcomer.living() == {"me"}


def bearers(hands: Hands) -> list[str]:
    found = hands.run(predecessors("nobody", boot_id="none", machine_id=None, slot="web-0"))
    return [each.id for each in found]


@pytest.mark.parametrize("returns", [True, False], ids=["it returns", "it is dead"])
async def test_a_slot_is_not_taken_from_a_tree_that_lost_its_sessions_in_a_crash(
    returns: bool, crashing: Crashing
) -> None:  # E10, J16
    assert crashing.hands.run(take_slot("s1", "web-0"))
    with session_of(crashing.hands, "s1"):
        await crashing.crash()
    newcomer = crashing.newcomer()
    keeper = SlotKeeper(
        newcomer.session, RecoveryConfig(), slot="web-0", recoverer=newcomer.recoverer(), observer=newcomer,
        events=newcomer.events, clock=newcomer.clock,
    )  # fmt: skip
    while newcomer.clock.monotonic() < CALM_S - 0.5:
        assert await keeper.tick() == 0.3
        await newcomer.clock.advance(0.3)
    assert bearers(crashing.hands) == ["s1"]
    if returns:
        with session_of(crashing.hands, "s1"):
            for _ in range(10):
                await keeper.tick()
                await newcomer.clock.advance(0.3)
            assert bearers(crashing.hands) == ["s1"]
    else:
        for _ in range(4):
            await keeper.tick()
            await newcomer.clock.advance(0.3)
        assert bearers(crashing.hands) == ["me"]


async def test_statistics_that_an_operator_resets_are_no_crash(crashing: Crashing) -> None:
    with session_of(crashing.hands, "s1") as session:
        crashing.hands.connection.execute("select pg_stat_reset_shared('bgwriter')")
        end(session, crashing.hands)
    (found,) = (one for one in crashing.hands.run(workers.watch_sessions()) if one.supervisor_id == "s1")
    assert not found.lost_in_crash
    crashing.hands.connection.execute("select pg_stat_reset_shared('archiver')")
    (found,) = (one for one in crashing.hands.run(workers.watch_sessions()) if one.supervisor_id == "s1")
    assert found.lost_in_crash, "this is how a crash looks to every role"
