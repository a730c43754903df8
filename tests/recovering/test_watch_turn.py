"""Of all supervisors that observe alike, three watch. Others take over at once if a watcher dies, and later if it is frozen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from everbeat.recovering.watch_turn import AGAIN_S, PASSED_ON_S, TURN_S, Watching, WatchTurn
from everbeat.store.session import Session
from tests.recovering.conftest import ManualObserver
from tests.recovering.notice.test_session import end, session_of
from tests.store.conftest import StoreHarness

CONNECTED = "select 1 from pg_stat_activity where application_name like %s"
NewWatcher = Callable[..., Awaitable["Watcher"]]


class Watcher:
    """A supervisor that asks for turns in its own session."""

    def __init__(self, db: StoreHarness, name: str, **settings: Any) -> None:
        self.observer = ManualObserver(db, Session(db.target, f"everbeat test {name}"), supervisor_id=name)
        self.taken = 0
        self.proofs = 0
        self.turn = WatchTurn(
            self.observer.environment(**settings), on_taken=self._on_taken, prove_deaths=self._prove
        )

    def _on_taken(self) -> None:
        self.taken += 1

    async def _prove(self) -> None:
        self.proofs += 1

    async def asks(self) -> bool:
        """Ask for a turn, and return whether the supervisor has one now."""
        await self.turn.tick()
        return self.turn.is_held

    async def dies(self) -> None:
        """Close the session, and wait until the server has released its lock."""
        await self.observer.session.drop()
        name = f"everbeat test {self.observer.supervisor_id}%"
        ends_at = time.monotonic() + 30
        while self.observer.db.connection.execute(CONNECTED, [name]).fetchone():
            assert time.monotonic() < ends_at, "the session does not end"
            await asyncio.sleep(0.005)  # polls from outside


@pytest.fixture
async def watcher(db: StoreHarness) -> AsyncIterator[NewWatcher]:
    started: list[Watcher] = []

    async def start(name: str, **settings: Any) -> Watcher:
        db.supervisor(name)
        started.append(Watcher(db, name, **settings))
        return started[-1]

    yield start
    for each in started:
        await each.dies()


async def four(watcher: NewWatcher) -> list[Watcher]:
    found = [await watcher(name) for name in ("a", "b", "c", "d")]
    assert [await each.asks() for each in found] == [True, True, True, False]
    return found


async def test_three_supervisors_watch_and_keep_their_turns(watcher: NewWatcher) -> None:  # R3
    found = await four(watcher)
    for each in found:
        await each.observer.clock.advance(5)
    assert [await each.asks() for each in reversed(found)] == [False, True, True, True]
    assert [each.taken for each in found] == [1, 1, 1, 0]


async def test_the_turn_of_a_dead_watcher_is_taken_at_the_second_request(watcher: NewWatcher) -> None:  # R3
    """A live watcher reconnects between the two requests."""
    found = await four(watcher)
    await found[1].dies()
    assert await found[3].turn.tick() == AGAIN_S
    assert not found[3].turn.is_held
    assert await found[3].asks()
    assert found[3].taken == 1


async def test_a_watcher_that_reconnects_keeps_its_turn_and_its_observations(  # E4
    watcher: NewWatcher,
) -> None:
    found = await four(watcher)
    await found[1].dies()
    await found[3].turn.tick()
    found[1].observer.disturbances += 1
    assert await found[1].asks()
    assert not await found[3].asks()
    assert found[1].taken == 1


async def test_a_frozen_watcher_loses_its_turn_and_begins_anew(  # E4
    watcher: NewWatcher, db: StoreHarness
) -> None:
    found = await four(watcher)
    db.connection.execute(db.plain("update {schema}.turns set taken_until = now() where taken_by = 'a'"))
    assert await found[3].asks()
    await found[0].observer.clock.advance(TURN_S[1])
    assert not found[0].turn.is_held, "by its own clock"
    assert not await found[0].asks()
    await found[3].dies()
    await found[0].turn.tick()
    assert await found[0].asks()
    assert (found[0].taken, found[0].turn.episode) == (2, 2)


async def test_a_check_of_sessions_finds_that_another_supervisor_has_the_turn(  # E4
    watcher: NewWatcher, db: StoreHarness
) -> None:
    found = await four(watcher)
    watch = found[0].observer.session_watch(turn=found[0].turn)
    await watch.tick()
    assert found[0].turn.is_held
    db.connection.execute(db.plain("update {schema}.turns set taken_by = 'd' where taken_by = 'a'"))
    await watch.tick()
    assert not found[0].turn.is_held


async def test_a_check_of_sessions_renews_a_turn_that_ends_soon(
    watcher: NewWatcher, db: StoreHarness
) -> None:
    first = await watcher("a")
    assert await first.asks()
    left = "extract(epoch from taken_until - now())::float8"
    watch = first.observer.session_watch(turn=first.turn)
    db.connection.execute(db.plain("update {schema}.turns set taken_until = now() + interval '8 s'"))
    await watch.tick()
    assert db.table("turns", left)[0][0] < 8.1, "each renewal writes, so a check does not always renew"
    db.connection.execute(db.plain("update {schema}.turns set taken_until = now() + interval '5 s'"))
    await watch.tick()
    assert db.table("turns", left)[0][0] > 9


@pytest.mark.parametrize("others", [(), ("b", "c", "d")])
async def test_a_watcher_that_cannot_connect_leaves_its_turn_to_another_supervisor(
    watcher: NewWatcher, db: StoreHarness, others: tuple[str, ...]
) -> None:  # E4
    found = [await watcher(name) for name in ("a", *others)]
    for each in found:
        await each.asks()
    first = found[0]
    watch = first.observer.session_watch(turn=first.turn)
    with session_of(db, "s1") as session:
        await watch.tick()
        end(session, db)

    async def look(seconds: float) -> None:
        await first.observer.clock.advance(seconds)
        await first.turn.tick()
        await watch.tick()

    await look(0.5)
    assert first.turn.is_held
    first.observer.is_served = False
    await look(1.0)
    if not others:
        assert first.turn.is_held, "nobody else could take the turn"
        return
    assert not first.turn.is_held
    for _ in range(3):
        await look(PASSED_ON_S)
        assert not first.turn.is_held, "it still cannot connect"
    assert await found[3].asks(), "the turn has ended"
    await found[3].dies()
    first.observer.is_served = True
    await look(PASSED_ON_S)
    await look(PASSED_ON_S)
    assert first.turn.is_held


async def test_a_watcher_that_excuses_a_silence_leaves_its_turn_to_another_supervisor(
    watcher: NewWatcher, db: StoreHarness
) -> None:  # E4
    """This also works if the loss of sessions is not watched."""
    found = await four(watcher)
    first = found[0]
    reaper = first.observer.reaper(turn=first.turn)
    with session_of(db, "s1") as session:
        end(session, db)
    await reaper.tick()
    first.observer.is_served = False
    for _ in range(3):
        await first.observer.clock.advance(40.0)  # longer than the interval of beats
        await first.turn.tick()
        await reaper.tick()
    assert not first.turn.is_held
    assert await found[3].asks()


async def test_a_watcher_that_was_suspended_while_it_should_judge_leaves_its_turn_to_another_supervisor(
    watcher: NewWatcher, db: StoreHarness
) -> None:  # E4
    found = await four(watcher)
    first = found[0]
    watch = first.observer.session_watch(turn=first.turn)
    with session_of(db, "s1") as session:
        await watch.tick()
        await first.observer.clock.advance(60.0)
        await first.turn.tick()
        await watch.tick()
        assert first.turn.is_held, "nothing was to be judged"
        end(session, db)
    await first.observer.clock.advance(1.0)
    await watch.tick()
    await first.observer.clock.advance(8.0)
    await watch.tick()
    assert not first.turn.is_held
    assert await found[3].asks()


async def test_observers_that_could_judge_differently_have_their_own_turns(watcher: NewWatcher) -> None:
    await four(watcher)
    assert await (await watcher("e", session_grace_ms=2_000)).asks()
    pooled = await watcher("f")
    pooled.observer.is_pooled = True
    assert await pooled.asks()


async def test_a_watch_begins_anew_with_each_turn_and_does_nothing_without_one(watcher: NewWatcher) -> None:
    made: list[Pass] = []

    def make() -> Pass:
        made.append(Pass())
        return made[-1]

    found = await four(watcher)
    watches = [Watching(make, each.turn) for each in (found[0], found[3])]
    for each in watches:
        await each.tick()
        await each.tick()
    assert [each.ticks for each in made] == [2, 0]
    found[0].turn.lose()
    await watches[0].tick()
    assert await found[0].asks()
    await watches[0].tick()
    assert [each.ticks for each in made] == [2, 0, 1]


class Pass:
    """A service that counts its passes."""

    name = "pass"
    interval_s = 1.0

    def __init__(self) -> None:
        self.ticks = 0

    async def tick(self) -> None:
        self.ticks += 1


async def test_other_supervisors_look_for_proof_while_a_watcher_reports_a_mass_loss(  # E4
    watcher: NewWatcher,
) -> None:
    found = await four(watcher)
    await found[3].turn.tick()
    assert found[3].proofs == 0
    found[0].turn.report_mass()
    await found[0].turn.tick()
    await found[3].turn.tick()
    assert found[3].proofs == 1


async def test_many_supervisors_seldom_ask_for_a_turn(watcher: NewWatcher, db: StoreHarness) -> None:  # R3
    found = await four(watcher)
    wait_s = await found[3].turn.tick()
    assert wait_s is not None
    assert 0.9 <= wait_s <= 1
    for number in range(60):
        db.supervisor(f"more-{number}")
    wait_s = await found[3].turn.tick()
    assert wait_s is not None
    assert 5.7 <= wait_s <= 6.5
