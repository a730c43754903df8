"""Test the settler: it writes outcomes in batches, and one that cannot be stored does not affect the others."""

from __future__ import annotations

import asyncio
from functools import partial
from uuid import UUID

import msgspec
import pytest
from psycopg import conninfo

from everbeat.store.leases import AttemptOutcome, Settlement
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.worker import settlement, worker
from everbeat.worker.attempt import Succeeded
from everbeat.worker.lifecycle import AttemptLifecycle
from tests.worker.harness import WorkerHarness
from tests.worker.sample_tasks import gate


async def test_a_result_that_postgresql_refuses_fails_only_its_own_attempt(harness: WorkerHarness) -> None:
    # With the smallest stack, PostgreSQL refuses valid JSON that is a few hundred levels deep (54001).
    url = conninfo.make_conninfo(harness.target.url, options="-c max_stack_depth=100kB")
    direct, harness.target = harness.target, Target(url=url, schema=harness.target.schema)
    sent = [harness.send("double", x=n) for n in range(30)]
    guilty = harness.send("deep_result", depth=900)
    sent += [harness.send("double", x=n) for n in range(30)]
    try:
        async with harness.worker() as running:
            await running.finished(guilty, *sent)
            assert (await running.finished(harness.send("double", x=5)))["result"] == 10
    finally:
        harness.target = direct
    row = harness.task(guilty)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")
    assert "stack depth" in row["error"]["message"]
    assert {harness.task(each)["state"] for each in sent} == {"COMPLETED"}


async def test_the_settler_divides_a_batch_until_the_refused_row_is_alone(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL refuses text that is not JSON as a data error (class 22)."""
    settle_as_is = AttemptLifecycle._settle

    def settle(self: AttemptLifecycle, attempt: object, settlement: Settlement) -> None:
        if settlement.result == b"14":
            settlement = Settlement(
                id=settlement.id, claim_id=settlement.claim_id, outcome="COMPLETED", result=b"{broken"
            )
        settle_as_is(self, attempt, settlement)  # type: ignore[arg-type]

    monkeypatch.setattr(AttemptLifecycle, "_settle", settle)
    sent = [harness.send("double", x=n) for n in range(40)]
    async with harness.worker() as running:
        await running.finished(*sent)
    states = [harness.task(each)["state"] for each in sent]
    assert states == ["FAILED" if n == 7 else "COMPLETED" for n in range(40)]
    assert harness.task(sent[7])["error"]["code"] == "RESULT_UNSERIALISABLE"


async def test_the_settler_writes_many_outcomes_in_few_statements(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    complete = settlement.complete

    def counted(settlements: list[Settlement], *, channel: str) -> object:
        batches.append(len(settlements))
        return complete(settlements, channel=channel)

    monkeypatch.setattr(settlement, "complete", counted)
    sent = harness.send_many("double", [{"x": n} for n in range(1_000)])
    async with harness.worker() as running:
        await running.finished(*sent)
    print(f"1,000 outcomes in {len(batches)} statements, the largest of {max(batches)}")
    assert sum(batches) == 1_000
    assert max(batches) <= settlement.MOST_ROWS
    assert len(batches) < 100


async def test_the_settler_spreads_large_outcomes_over_several_statements(harness: WorkerHarness) -> None:
    async with harness.worker(async_concurrency=4) as running:
        sent = [harness.send_with("echo", {"text": "y" * 5_000_000}) for _ in range(4)]
        await running.finished(*sent, timeout_s=60)
    assert {harness.task(each)["state"] for each in sent} == {"COMPLETED"}


async def test_a_worker_starts_no_more_tasks_while_outcomes_cannot_be_settled(harness: WorkerHarness) -> None:
    """The worker claims no more while outcomes wait for a lock."""
    sent = harness.send_many("note", [{"word": str(n)} for n in range(200)])
    async with harness.worker(async_concurrency=5, prefetch=0) as running:
        with harness.holding("lock table {schema}.attempts in share mode"):
            await running.until(lambda: len(gate.journal) >= 10)
            await running.until(lambda: harness.states().get("RUNNING", 0) <= 10)
            assert len(gate.journal) <= 10
        await running.finished(*sent)
    assert harness.states() == {"COMPLETED": 200}


async def test_a_result_that_exceeds_the_statement_timeout_does_not_block_other_outcomes(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:  # promise 1
    monkeypatch.setattr(worker, "Session", partial(Session, statement_timeout_ms=400))
    async with harness.worker() as running:
        # The lock stands for a server that needs longer than the statement timeout.
        with harness.holding("lock table {schema}.attempts in share mode"):
            large = harness.send("fill", length=9_000_000)
            await running.until(lambda: harness.task(large)["state"] == "RUNNING")
            await asyncio.sleep(4)  # two attempts with their timeouts and the pauses after them
            small = harness.send("double", x=4)
        row = await running.finished(large, small)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")
    assert "statement timeout" in row["error"]["message"]
    assert harness.task(small)["state"] == "COMPLETED"


async def test_the_settler_keeps_new_outcomes_while_it_repeats_a_refused_batch(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL refuses the statement a few times, as for a missing table, while new outcomes arrive."""
    refusals = iter([True] * 3)
    complete = settlement.complete

    def refused(settlements: list[Settlement], *, channel: str) -> object:
        statement = complete(settlements, channel=channel)
        return (
            msgspec.structs.replace(statement, name="bench/vacuum_bare_table")
            if next(refusals, False)
            else statement
        )

    monkeypatch.setattr(settlement, "complete", refused)
    sent = harness.send_many("double", [{"x": n} for n in range(300)])
    async with harness.worker(async_concurrency=20) as running:
        await running.finished(*sent)
        assert len(running.worker._settler) == 0
    assert harness.states() == {"COMPLETED": 300}
    assert [len(harness.attempts(each)) for each in sent] == [1] * 300


async def test_the_settler_keeps_the_first_outcome_of_an_attempt_while_it_is_written(
    harness: WorkerHarness,
) -> None:
    async with harness.worker() as running:
        task_id = harness.send("linger", word="it")
        await running.until(lambda: ("begun", "it") in gate.journal)
        attempt, one = running.attempt(task_id), running.worker._settler
        with harness.holding("lock table {schema}.attempts in share mode"):
            running.worker._lifecycle.ended(attempt, Succeeded(b"1"))
            await running.until(lambda: len(one._under_way) == 1)
            one.put(attempt, Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="RELEASED"))
            assert len(one) == 1
        row = await running.finished(task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", 1)


async def outcomes_in_order(
    harness: WorkerHarness, *, small: int, large: int
) -> tuple[list[UUID], list[UUID], list[UUID]]:
    """Return the order of the outcomes of one task, then large, then small ones; all end before the first is written."""
    async with harness.worker(async_concurrency=small + large + 1) as running:
        with harness.holding("lock table {schema}.attempts in share mode"):
            first = harness.send("double", x=0)
            await running.until(lambda: len(running.worker._settler._under_way) == 1)
            much = [harness.send("echo", text="y" * 300_000) for _ in range(large)]
            await running.until(lambda: len(running.worker._settler) == 1 + large)
            little = harness.send_many("double", [{"x": n} for n in range(small)])
            await running.until(lambda: len(running.worker._settler) == 1 + large + small)
        await running.finished(first, *much, *little)
        return much, little, [one.task_id for one in running.finishes()][1:]


async def test_the_settler_writes_small_outcomes_before_large_ones(
    harness: WorkerHarness,
) -> None:
    large, small, order = await outcomes_in_order(harness, small=50, large=3)
    assert set(order[:50]) == set(small)
    assert order[50:] == large


async def test_the_settler_does_not_starve_a_large_outcome_behind_small_ones(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "MOST_ROWS", 1)
    (large,), _, order = await outcomes_in_order(harness, small=3 * settlement.BATCHES_IN_A_ROW, large=1)
    assert (
        order.index(large) == settlement.BATCHES_IN_A_ROW - 2
    )  # counted after the first outcome, which took the first turn


@pytest.mark.parametrize(
    ("outcome", "state", "expected"),
    [
        ("COMPLETED", "COMPLETED", "completed"), ("FAILED", "FAILED", "failed"), ("FAILED", "PENDING", "retried"),
        ("FAILED", "CANCELLED", "cancelled"), ("CANCELLED", "CANCELLED", "cancelled"), ("SUSPENDED", "PENDING", "suspended"),
        ("POSTPONED", "PENDING", "suspended"), ("POSTPONED", "FAILED", "failed"), ("HANDED_BACK", "PENDING", "released"),
        ("DECLINED", "PENDING", "released"),
    ],
)  # fmt: skip
def test_an_attempt_is_counted_by_its_outcome_and_the_state_of_its_task(
    outcome: AttemptOutcome, state: str, expected: str
) -> None:
    written = Settlement(id=UUID(int=1), claim_id=UUID(int=2), outcome=outcome)
    assert settlement.rate_of(written, state) == expected
