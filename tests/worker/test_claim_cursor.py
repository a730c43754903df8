"""Test the claim cursor: a claim continues where the last one ended, and tasks before that place are still found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.store import claims
from everbeat.store.claims import Claimed
from everbeat.store.tasks import NextDue, next_due
from everbeat.testing.clock import ManualClock
from everbeat.worker.claim import query
from everbeat.worker.claim.query import LONGEST_S, TRUSTED_S, WITHOUT_LINES_S, ClaimCursor, ClaimQuery
from tests.worker.harness import WorkerHarness
from tests.worker.sample_tasks import gate

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


def task(second: int, *, queue: str = "default", priority: int = 0, in_line: bool = False) -> Claimed:
    return Claimed(
        id=UUID(int=second), claim_id=uuid4(), fence=1, name="double", queue=queue, priority=priority, args="{}", attempt=0,
        retry_count=0, crash_count=0, loss_count=0, policy=None, enqueued_at=EPOCH + timedelta(seconds=second), good_until=None,
        in_line=in_line,
    )  # fmt: skip


def place(second: int) -> tuple[datetime, UUID]:
    return EPOCH + timedelta(seconds=second), UUID(int=second)


def test_a_full_claim_moves_the_cursor_of_each_lane() -> None:
    known = ClaimCursor(ManualClock())
    assert known.now() == {}
    known.learn([task(1, queue="mail"), task(5), task(6)], is_full=True, used=False, looked_s=0.0)
    assert known.now() == {("mail", 0): place(1), ("default", 0): place(6)}
    known.learn([task(9), task(2, priority=1)], is_full=True, used=True, looked_s=0.0)
    assert known.now() == {("mail", 0): place(1), ("default", 0): place(9), ("default", 1): place(2)}


def test_a_claim_that_is_not_full_clears_the_cursor() -> None:
    known = ClaimCursor(ManualClock())
    known.learn([task(1)], is_full=True, used=False, looked_s=0.0)
    known.learn([task(2)], is_full=False, used=True, looked_s=0.0)
    assert known.now() == {}


async def believed_s(clock: ManualClock, known: ClaimCursor, looked_s: float) -> float:
    """Return for how many seconds the cursor is used after a scan from the start of this duration."""
    known.learn([task(1)], is_full=True, used=False, looked_s=looked_s)
    seconds = 0.0
    while known.now():
        await clock.advance(0.25)
        seconds += 0.25
    return seconds


async def test_a_cursor_expires_after_one_second_regardless_of_later_claims() -> None:
    clock = ManualClock()
    known = ClaimCursor(clock)
    known.learn([task(1)], is_full=True, used=False, looked_s=0.01)
    await clock.advance(TRUSTED_S - 0.1)
    known.learn([task(2)], is_full=True, used=True, looked_s=9.0)
    await clock.advance(0.2)
    assert known.now() == {}


async def test_a_cursor_expires_later_if_scans_from_the_start_are_slow_repeatedly() -> None:
    clock = ManualClock()
    known = ClaimCursor(clock)
    assert [await believed_s(clock, known, each) for each in (0.1, 0.1, 60.0, 60.0)] == [
        TRUSTED_S, 2.0, 2.0, LONGEST_S
    ]  # fmt: skip


async def test_a_single_slow_scan_does_not_make_the_cursor_last_longer() -> None:
    clock = ManualClock()
    known = ClaimCursor(clock)
    assert [await believed_s(clock, known, each) for each in (20.0, 0.0, 20.0, 0.01)] == [TRUSTED_S] * 4


def test_serial_tasks_and_too_many_lanes_have_no_cursor() -> None:
    known = ClaimCursor(ManualClock())
    known.learn([task(1), task(9, in_line=True)], is_full=True, used=False, looked_s=0.0)
    assert known.now() == {("default", 0): place(1)}
    known.learn([task(1, queue=f"q{n}") for n in range(1_001)], is_full=True, used=False, looked_s=0.0)
    assert known.now() == {}


async def test_a_busy_cursor_includes_lines_in_one_claim_every_tenth_of_a_second() -> None:
    clock = ManualClock()
    known = ClaimCursor(clock)
    assert [known.includes_lines(), known.includes_lines()] == [True, True]
    known.learn([task(1)], is_full=True, used=False, looked_s=0.0)
    assert not known.includes_lines()
    await clock.advance(WITHOUT_LINES_S)
    assert [known.includes_lines(), known.includes_lines()] == [True, False]
    known.learn([task(2)], is_full=False, used=True, looked_s=0.0)
    assert known.includes_lines()


SEND_SERIAL = """
    insert into {schema}.tasks (id, name, queue, priority, state, args, sent_at, enqueued_at, serial, serial_at)
    values (gen_random_uuid(), 'note', 'default', 0, 'PENDING', '{{"word": "line"}}', now(), now(), 'key:s', now())
    returning id"""


async def test_an_idle_worker_leaves_lines_out_of_its_claims_until_it_finds_one(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool | None] = []
    claim, check = claims.claim, ClaimQuery.next_due

    def watched(**options: Any) -> object:
        asked.append(options["with_lines"])
        return claim(**options)

    async def checking(self: ClaimQuery, names: Sequence[str], **options: Any) -> NextDue:
        found = await check(self, names, **options)
        asked.append(None)
        return found

    monkeypatch.setattr(query.claims, "claim", watched)
    monkeypatch.setattr(ClaimQuery, "next_due", checking)
    async with harness.worker(poll_interval="30s") as running:

        async def used(task_id: UUID) -> set[bool]:
            """Return whether the claims for a task included lines, once the worker has checked that it is idle."""
            await running.finished(task_id, timeout_s=10)
            await running.until(lambda: bool(asked) and asked[-1] is None)
            kinds = {each for each in asked if each is not None}
            asked.clear()
            return kinds

        timer = running.worker._claimer._timer
        await running.until(lambda: timer.next_at > monotonic() + 15)  # polls do not find the tasks
        await used(harness.send("note", word="first"))
        assert await used(harness.send("note", word="second")) == {False}
        # Another worker has applied the change of a line, and left the line to this one.
        (sent,) = harness.query(SEND_SERIAL)
        harness.query("select {schema}.apply_line_changes(10, array['note'], null, null)")
        assert not harness.run(next_due(names=["note"], queues=None)).lines_changed
        harness.send("note", word="third")
        assert await used(sent["id"]) == {False, True}
        assert await used(harness.send("note", word="fourth")) == {True}


async def test_a_busy_worker_starts_a_serial_task_before_the_queue_is_empty(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serial task is sent while the worker claims no tasks of lines."""
    monkeypatch.setattr(query, "FIRST_CLAIM", 5)
    monkeypatch.setattr(query, "MOST_CLAIMED", 5)
    looked: list[bool] = []
    claim = claims.claim

    def watched(**options: Any) -> object:
        looked.append(options["with_lines"])
        return claim(**options)

    monkeypatch.setattr(query.claims, "claim", watched)
    harness.send_many("note", [{"word": str(n)} for n in range(5_000)])
    async with harness.worker(async_concurrency=5, prefetch=0) as running:
        await running.until(lambda: False in looked)
        line = harness.send_with("note", {"word": "line"}, serial="s")
        await running.finished(line)
        assert len(gate.journal) < 5_001  # others still wait
        asked = len(looked)
        await running.until(lambda: False in looked[asked:])  # soon, and not a minute later
        assert len(gate.journal) < 5_001
    assert True in looked


async def test_a_busy_worker_finds_a_task_that_appears_before_its_cursor(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand tasks wait behind the task, and claims are small."""
    monkeypatch.setattr(query, "FIRST_CLAIM", 5)
    monkeypatch.setattr(query, "MOST_CLAIMED", 5)
    used: list[int] = []
    now = ClaimCursor.now

    def watched(self: ClaimCursor) -> object:
        found = now(self)
        used.append(len(found))
        return found

    monkeypatch.setattr(query.ClaimCursor, "now", watched)
    early = harness.send_with("note", {"word": "early"}, delay_ms=3_600_000)
    harness.send_many("note", [{"word": str(n)} for n in range(1_000)])
    async with harness.worker(async_concurrency=5, prefetch=0) as running:
        await running.until(lambda: any(used))
        harness.connection.execute(
            f"update \"{harness.target.schema}\".tasks set enqueued_at = now() - interval '1 day' where id = %s",  # type: ignore[arg-type]
            [early],
        )
        await running.finished(early)
        await running.until(lambda: len(gate.journal) == 1_001)
    assert harness.states() == {"COMPLETED": 1_001}


async def test_a_claim_that_waited_for_a_lock_does_not_make_the_cursor_last_longer(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "FIRST_CLAIM", 5)
    monkeypatch.setattr(query, "MOST_CLAIMED", 5)
    looked, believed = [], []
    learn = ClaimCursor.learn

    def watched(
        self: ClaimCursor, claimed: Sequence[Claimed], *, is_full: bool, used: bool, looked_s: float
    ) -> None:
        learn(self, claimed, is_full=is_full, used=used, looked_s=looked_s)
        looked.append(looked_s)
        believed.append(self._until - self._clock.monotonic())

    monkeypatch.setattr(query.ClaimCursor, "learn", watched)
    async with harness.worker(async_concurrency=5, prefetch=0, hints=harness.silent_hints) as running:
        await running.finished(harness.send("double", x=1))
        claimer = running.worker._claimer
        await running.until(
            lambda: not claimer._busy.locked() and not any(pool.has_more for pool in claimer._slots)
        )
        with harness.holding("select from {schema}.workers for update"):
            harness.send_many("note", [{"word": str(n)} for n in range(200)])
            claimer.claim_soon()
            await running.until(lambda: claimer._query._is_running)
            await asyncio.sleep(0.5)  # the claim waits for its worker's row meanwhile
        await running.until(lambda: len(gate.journal) == 200)
    assert max(looked) > 0.4
    assert max(believed) <= TRUSTED_S
