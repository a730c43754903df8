"""Outcomes reach the database in batches, and one that cannot be stored takes no neighbour with it."""

from __future__ import annotations

import asyncio
from functools import partial
from uuid import UUID

import msgspec
import pytest
from psycopg import conninfo

from everbeat.store.leases import Settlement
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.worker import settler, worker
from everbeat.worker.attempt import Succeeded
from everbeat.worker.conductor import Conductor
from tests.worker.deeds import gate
from tests.worker.stand import Stand


async def test_a_result_that_postgresql_refuses_fails_its_own_attempt_only(stand: Stand) -> None:
    # With the least stack the server allows, JSON a few hundred levels deep is refused by it (54001), though it is sound.
    url = conninfo.make_conninfo(stand.target.url, options="-c max_stack_depth=100kB")
    direct, stand.target = stand.target, Target(url=url, schema=stand.target.schema)
    sent = [stand.send("double", x=n) for n in range(30)]
    guilty = stand.send("deep_result", depth=900)
    sent += [stand.send("double", x=n) for n in range(30)]
    try:
        async with stand.worker() as running:
            await running.finished(guilty, *sent)
            assert (await running.finished(stand.send("double", x=5)))["result"] == 10
    finally:
        stand.target = direct
    row = stand.task(guilty)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")
    assert "stack depth" in row["error"]["message"]
    assert {stand.task(each)["state"] for each in sent} == {"COMPLETED"}


async def test_a_batch_is_divided_until_the_guilty_row_is_alone(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is no JSON is refused as data (class 22)."""
    settle_as_is = Conductor._settle

    def settle(self: Conductor, attempt: object, settlement: Settlement) -> None:
        if settlement.result == b"14":
            settlement = Settlement(
                id=settlement.id, claim_id=settlement.claim_id, outcome="COMPLETED", result=b"{broken"
            )
        settle_as_is(self, attempt, settlement)  # type: ignore[arg-type]

    monkeypatch.setattr(Conductor, "_settle", settle)
    sent = [stand.send("double", x=n) for n in range(40)]
    async with stand.worker() as running:
        await running.finished(*sent)
    states = [stand.task(each)["state"] for each in sent]
    assert states == ["FAILED" if n == 7 else "COMPLETED" for n in range(40)]
    assert stand.task(sent[7])["error"]["code"] == "RESULT_UNSERIALISABLE"


async def test_many_outcomes_go_in_few_statements(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    complete = settler.complete

    def counted(settlements: list[Settlement], *, channel: str) -> object:
        batches.append(len(settlements))
        return complete(settlements, channel=channel)

    monkeypatch.setattr(settler, "complete", counted)
    sent = stand.send_many("double", [{"x": n} for n in range(1_000)])
    async with stand.worker() as running:
        await running.finished(*sent)
    print(f"1,000 outcomes in {len(batches)} statements, the largest of {max(batches)}")
    assert sum(batches) == 1_000
    assert max(batches) <= settler.MOST_ROWS
    assert len(batches) < 100


async def test_large_outcomes_are_spread_over_statements_and_all_land(stand: Stand) -> None:
    async with stand.worker(async_concurrency=4) as running:
        sent = [stand.send_with("echo", {"text": "y" * 5_000_000}) for _ in range(4)]
        await running.finished(*sent, timeout_s=60)
    assert {stand.task(each)["state"] for each in sent} == {"COMPLETED"}


async def test_memory_stays_bounded_while_nothing_can_be_settled(stand: Stand) -> None:
    """No claims run ahead of outcomes that hang behind a lock."""
    sent = stand.send_many("note", [{"word": str(n)} for n in range(200)])
    async with stand.worker(async_concurrency=5, prefetch=0) as running:
        with stand.holding("lock table {schema}.attempts in share mode"):
            await running.until(lambda: len(gate.journal) >= 10)
            await running.until(lambda: stand.states().get("RUNNING", 0) <= 10)
            assert len(gate.journal) <= 10
        await running.finished(*sent)
    assert stand.states() == {"COMPLETED": 200}


async def test_a_result_that_takes_the_server_too_long_is_refused_and_holds_up_nobody_for_ever(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:  # promise 1
    monkeypatch.setattr(worker, "Session", partial(Session, statement_timeout_ms=400))
    async with stand.worker() as running:
        # The lock stands for a server that needs longer than a statement may take.
        with stand.holding("lock table {schema}.attempts in share mode"):
            large = stand.send_with("echo", {"text": "y" * 9_000_000})
            await running.until(lambda: stand.task(large)["state"] == "RUNNING")
            await asyncio.sleep(4)  # two tries, their timeouts and the pauses after them
            small = stand.send("double", x=4)
        row = await running.finished(large, small)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")
    assert "statement timeout" in row["error"]["message"]
    assert stand.task(small)["state"] == "COMPLETED"


async def test_a_refused_batch_keeps_what_came_after_it_and_all_land(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement is refused a few times, as where a table is missing, while new outcomes come."""
    refusals = iter([True] * 3)
    complete = settler.complete

    def refused(settlements: list[Settlement], *, channel: str) -> object:
        statement = complete(settlements, channel=channel)
        return (
            msgspec.structs.replace(statement, name="bench/plain_vacuum")
            if next(refusals, False)
            else statement
        )

    monkeypatch.setattr(settler, "complete", refused)
    sent = stand.send_many("double", [{"x": n} for n in range(300)])
    async with stand.worker(async_concurrency=20) as running:
        await running.finished(*sent)
        assert len(running.worker._settler) == 0
    assert stand.states() == {"COMPLETED": 300}
    assert [len(stand.attempts(each)) for each in sent] == [1] * 300


async def test_the_first_outcome_of_an_attempt_stands_while_it_is_written(stand: Stand) -> None:
    async with stand.worker() as running:
        task_id = stand.send("linger", word="it")
        await running.until(lambda: ("begun", "it") in gate.journal)
        attempt, one = running.attempt(task_id), running.worker._settler
        with stand.holding("lock table {schema}.attempts in share mode"):
            running.worker._conductor.ended(attempt, Succeeded(b"1"))
            await running.until(lambda: len(one._under_way) == 1)
            one.put(attempt, Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="RELEASED"))
            assert len(one) == 1
        row = await running.finished(task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", 1)


async def outcomes_in_order(
    stand: Stand, *, small: int, large: int
) -> tuple[list[UUID], list[UUID], list[UUID]]:
    """Of a first task, then large ones, then small ones, which all have ended before the first outcome is written."""
    async with stand.worker(async_concurrency=small + large + 1) as running:
        with stand.holding("lock table {schema}.attempts in share mode"):
            first = stand.send("double", x=0)
            await running.until(lambda: len(running.worker._settler._under_way) == 1)
            much = [stand.send("echo", text="y" * 300_000) for _ in range(large)]
            await running.until(lambda: len(running.worker._settler) == 1 + large)
            little = stand.send_many("double", [{"x": n} for n in range(small)])
            await running.until(lambda: len(running.worker._settler) == 1 + large + small)
        await running.finished(first, *much, *little)
        return much, little, [one.task_id for one in running.finishes()][1:]


async def test_large_outcomes_are_written_after_the_small_ones_that_wait_with_them(stand: Stand) -> None:
    large, small, order = await outcomes_in_order(stand, small=50, large=3)
    assert set(order[:50]) == set(small)
    assert order[50:] == large


async def test_small_outcomes_that_keep_coming_do_not_hold_up_large_ones_for_ever(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settler, "MOST_ROWS", 1)
    (large,), _, order = await outcomes_in_order(stand, small=3 * settler.MOST_AHEAD, large=1)
    assert (
        order.index(large) == settler.MOST_AHEAD - 2
    )  # of those after the first one, which took the first turn
