"""Test a crash of PostgreSQL, which ends all sessions but not the server: trees that have not returned are not dead.

The tests kill one backend of a real server. The observers have just started, so they have no earlier observations.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import psycopg
import pytest

from everbeat.embedded.server import EmbeddedServer
from everbeat.recovering.notice.session import SessionWatch
from everbeat.recovering.notice.startup import SlotKeeper
from everbeat.recovering.observer import CALM_S
from everbeat.runtime.events import EventBus
from everbeat.store import migrating, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.store.workers import predecessors, take_slot
from everbeat.testing.clock import ManualClock
from tests.conftest import NewServer
from tests.recovering.conftest import ManualObserver
from tests.recovering.notice.test_session import end, session_of
from tests.store.conftest import StoreHarness


class Crashing:
    """A server that crashes on demand, and clients that reconnect to it."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.target = Target.parse(server.url, schema="everbeat")
        with self.target.connect("everbeat test") as connection:
            migrating.migrate(connection, self.target)
        self.db = self._new_harness()
        self.session = Session(self.target, "everbeat test caretakers")

    def _new_harness(self) -> StoreHarness:
        return StoreHarness(self.target, self.target.connect("everbeat test"))

    async def crash(self) -> None:
        """Kill a backend and wait until the recovered server accepts connections again."""
        victim = self.db.connection
        before = self._postmaster_started()
        self.db.database.close()
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not victim.closed:
                with suppress(psycopg.Error):
                    victim.execute("select 1")
                await asyncio.sleep(0.01)  # the server notices the kill a moment later
            while True:
                with suppress(Exception):
                    self.db = self._new_harness()
                    break
                await asyncio.sleep(0.01)  # the server is in recovery
        victim.close()
        assert self._postmaster_started() == before, (
            "the server process was started again, which is another fault"
        )

    def _postmaster_started(self) -> object:
        return self.db.connection.execute("select pg_postmaster_start_time()").fetchone()

    def newcomer(self) -> ManualObserver:
        """Return an observer that starts now."""
        return ManualObserver(self.db, self.session, clock=ManualClock(), events=EventBus())


@pytest.fixture
async def crashing(new_server: NewServer) -> AsyncIterator[Crashing]:
    made = Crashing(new_server(settings={"synchronous_commit": "on"}))
    made.db.supervisor("s1", "w1")
    made.db.supervisor("me")
    yield made
    await made.session.drop()
    made.db.connection.close()
    made.db.database.close()


async def look(observer: ManualObserver, watch: SessionWatch, *, for_s: float) -> None:
    until = observer.clock.monotonic() + for_s
    while observer.clock.monotonic() < until:
        await watch.tick()
        await observer.clock.advance(0.5)


async def test_a_new_observer_waits_for_trees_that_lost_their_sessions_in_a_server_crash(
    crashing: Crashing,
) -> None:  # J16
    with session_of(crashing.db, "s1"):
        await crashing.crash()
    newcomer = crashing.newcomer()
    watch = newcomer.session_watch()
    await look(newcomer, watch, for_s=CALM_S - 1)
    assert newcomer.living() == {"me", "s1"}
    with session_of(crashing.db, "s1") as back:
        await look(newcomer, watch, for_s=CALM_S)
        assert newcomer.living() == {"me", "s1"}
        end(back, crashing.db)
    await look(newcomer, watch, for_s=4.0)
    assert newcomer.living() == {"me"}, "a death after the return is noticed as usual"


async def test_a_tree_that_does_not_come_back_after_a_server_crash_is_declared_dead(
    crashing: Crashing,
) -> None:  # J16
    with session_of(crashing.db, "s1"):
        await crashing.crash()
    newcomer = crashing.newcomer()
    await look(newcomer, newcomer.session_watch(), for_s=CALM_S + 4.0)
    assert newcomer.living() == {"me"}


async def test_a_tree_that_came_back_after_a_server_crash_and_died_is_noticed_at_once(
    crashing: Crashing,
) -> None:  # J16
    """The observer starts later and sees neither event."""
    await crashing.crash()
    with session_of(crashing.db, "s1") as session:
        end(session, crashing.db)
    newcomer = crashing.newcomer()
    await look(newcomer, newcomer.session_watch(), for_s=4.0)
    assert newcomer.living() == {"me"}


def slot_holders(db: StoreHarness) -> list[str]:
    found = db.run(predecessors("nobody", boot_id="none", machine_id=None, slot="web-0"))
    return [each.id for each in found]


@pytest.mark.parametrize("returns", [True, False], ids=["it returns", "it is dead"])
async def test_a_tree_that_lost_its_sessions_in_a_server_crash_keeps_its_slot(
    returns: bool, crashing: Crashing
) -> None:  # E10, J16
    assert crashing.db.run(take_slot("s1", "web-0"))
    with session_of(crashing.db, "s1"):
        await crashing.crash()
    newcomer = crashing.newcomer()
    keeper = SlotKeeper(newcomer.recoverer(), slot="web-0", witness=newcomer.witness())
    while newcomer.clock.monotonic() < CALM_S - 0.5:
        assert await keeper.tick() == 0.3
        await newcomer.clock.advance(0.3)
    assert slot_holders(crashing.db) == ["s1"]
    if returns:
        with session_of(crashing.db, "s1"):
            for _ in range(10):
                await keeper.tick()
                await newcomer.clock.advance(0.3)
            assert slot_holders(crashing.db) == ["s1"]
    else:
        for _ in range(4):
            await keeper.tick()
            await newcomer.clock.advance(0.3)
        assert slot_holders(crashing.db) == ["me"]


async def test_reset_statistics_do_not_look_like_a_server_crash(crashing: Crashing) -> None:
    with session_of(crashing.db, "s1") as session:
        crashing.db.connection.execute("select pg_stat_reset_shared('bgwriter')")
        end(session, crashing.db)
    (found,) = (one for one in crashing.db.run(workers.watch_sessions()) if one.supervisor_id == "s1")
    assert not found.lost_in_crash
    crashing.db.connection.execute("select pg_stat_reset_shared('archiver')")
    (found,) = (one for one in crashing.db.run(workers.watch_sessions()) if one.supervisor_id == "s1")
    assert found.lost_in_crash, "a crash looks like this to every role"
