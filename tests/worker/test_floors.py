"""Claims go on from where the last one came to, and what appears before that place is found all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from everbeat.store.leases import Claimed
from everbeat.testing.clock import ManualClock
from everbeat.worker import floors, portion
from everbeat.worker.floors import LONGEST_S, TRUSTED_S, Floors
from tests.worker.deeds import gate
from tests.worker.stand import Stand

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


def task(second: int, *, queue: str = "default", priority: int = 0, in_line: bool = False) -> Claimed:
    return Claimed(
        id=UUID(int=second), claim_id=uuid4(), fence=1, name="double", queue=queue, priority=priority, args="{}", attempt=0,
        retry_count=0, crash_count=0, loss_count=0, policy=None, enqueued_at=EPOCH + timedelta(seconds=second), good_until=None,
        in_line=in_line,
    )  # fmt: skip


def place(second: int) -> tuple[datetime, UUID]:
    return EPOCH + timedelta(seconds=second), UUID(int=second)


def test_a_full_claim_moves_the_floors_of_its_lanes() -> None:
    known = Floors(ManualClock())
    assert known.now() == {}
    known.learn([task(1, queue="mail"), task(5), task(6)], is_full=True, used=False, looked_s=0.0)
    assert known.now() == {("mail", 0): place(1), ("default", 0): place(6)}
    known.learn([task(9), task(2, priority=1)], is_full=True, used=True, looked_s=0.0)
    assert known.now() == {("mail", 0): place(1), ("default", 0): place(9), ("default", 1): place(2)}


def test_a_claim_that_found_less_than_it_asked_for_forgets_them() -> None:
    known = Floors(ManualClock())
    known.learn([task(1)], is_full=True, used=False, looked_s=0.0)
    known.learn([task(2)], is_full=False, used=True, looked_s=0.0)
    assert known.now() == {}


async def believed_s(clock: ManualClock, known: Floors, looked_s: float) -> float:
    """For how long, after a look from the start that took so long."""
    known.learn([task(1)], is_full=True, used=False, looked_s=looked_s)
    seconds = 0.0
    while known.now():
        await clock.advance(0.25)
        seconds += 0.25
    return seconds


async def test_they_are_believed_for_a_second_however_many_claims_follow() -> None:
    clock = ManualClock()
    known = Floors(clock)
    known.learn([task(1)], is_full=True, used=False, looked_s=0.01)
    await clock.advance(TRUSTED_S - 0.1)
    known.learn([task(2)], is_full=True, used=True, looked_s=9.0)
    await clock.advance(0.2)
    assert known.now() == {}


async def test_they_are_believed_longer_where_looks_from_the_start_take_long_again_and_again() -> None:
    clock = ManualClock()
    known = Floors(clock)
    assert [await believed_s(clock, known, each) for each in (0.1, 0.1, 60.0, 60.0)] == [
        TRUSTED_S, 2.0, 2.0, LONGEST_S
    ]  # fmt: skip


async def test_a_single_slow_look_may_have_waited_for_a_lock() -> None:
    clock = ManualClock()
    known = Floors(clock)
    assert [await believed_s(clock, known, each) for each in (20.0, 0.0, 20.0, 0.01)] == [TRUSTED_S] * 4


def test_serial_lines_and_too_many_lanes_have_none() -> None:
    known = Floors(ManualClock())
    known.learn([task(1), task(9, in_line=True)], is_full=True, used=False, looked_s=0.0)
    assert known.now() == {("default", 0): place(1)}
    known.learn([task(1, queue=f"q{n}") for n in range(101)], is_full=True, used=False, looked_s=0.0)
    assert known.now() == {}


async def test_what_appears_before_the_place_is_found_while_the_worker_is_busy(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand wait behind it, and claims are small."""
    monkeypatch.setattr(portion, "FIRST_CLAIM", 5)
    monkeypatch.setattr(portion, "MOST_CLAIMED", 5)
    used: list[int] = []
    now = Floors.now

    def watched(self: Floors) -> object:
        found = now(self)
        used.append(len(found))
        return found

    monkeypatch.setattr(floors.Floors, "now", watched)
    early = stand.send_with("note", {"word": "early"}, delay_ms=3_600_000)
    stand.send_many("note", [{"word": str(n)} for n in range(1_000)])
    async with stand.worker(async_concurrency=5, prefetch=0) as running:
        await running.until(lambda: any(used))
        stand.connection.execute(
            f"update \"{stand.target.schema}\".tasks set enqueued_at = now() - interval '1 day' where id = %s",  # type: ignore[arg-type]
            [early],
        )
        await running.finished(early)
        await running.until(lambda: len(gate.journal) == 1_001)
    assert stand.states() == {"COMPLETED": 1_001}


async def test_a_claim_that_waited_for_a_lock_makes_them_believed_no_longer(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portion, "FIRST_CLAIM", 5)
    monkeypatch.setattr(portion, "MOST_CLAIMED", 5)
    looked, believed = [], []
    learn = Floors.learn

    def watched(
        self: Floors, claimed: Sequence[Claimed], *, is_full: bool, used: bool, looked_s: float
    ) -> None:
        learn(self, claimed, is_full=is_full, used=used, looked_s=looked_s)
        looked.append(looked_s)
        believed.append(self._until - self._clock.monotonic())

    monkeypatch.setattr(floors.Floors, "learn", watched)
    async with stand.worker(async_concurrency=5, prefetch=0, wake=stand.silent_wake) as running:
        await running.finished(stand.send("double", x=1))
        claimer = running.worker._claimer
        await running.until(
            lambda: not claimer._busy.locked() and not any(lane.has_more for lane in claimer._lanes)
        )
        with stand.holding("select from {schema}.workers for update"):
            stand.send_many("note", [{"word": str(n)} for n in range(200)])
            claimer.look()
            await running.until(lambda: claimer._asking._is_asking)
            await asyncio.sleep(0.5)  # the claim waits for its worker's row meanwhile
        await running.until(lambda: len(gate.journal) == 200)
    assert max(looked) > 0.4
    assert max(believed) <= TRUSTED_S
