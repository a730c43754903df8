"""Test the size of claims, which shrinks when answers come late."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from everbeat.store.claims import CLAIM_BYTES, Claimed
from everbeat.worker.claim.query import FIRST_CLAIM, LATE_S, MOST_CLAIMED, ClaimSize


def of(size: int, *, count: int = 4, checkpoint: int = 0) -> list[Claimed]:
    return [
        Claimed(
            id=uuid4(), claim_id=uuid4(), fence=1, name="work", queue="default", priority=0, args="x" * size, attempt=0,
            retry_count=0, crash_count=0, loss_count=0, policy=None, enqueued_at=datetime(2030, 1, 1, tzinfo=UTC),
            good_until=None, checkpoint="x" * checkpoint or None,
        )
        for _ in range(count)
    ]  # fmt: skip


def test_a_claim_is_small_until_the_size_of_tasks_is_known() -> None:
    size = ClaimSize()
    assert (size.rows, size.most_bytes) == (FIRST_CLAIM, CLAIM_BYTES)
    size.answered([], took_s=0.0)
    assert size.rows == FIRST_CLAIM
    size.answered(of(100), took_s=0.0)
    assert (size.rows, size.most_bytes) == (MOST_CLAIMED, CLAIM_BYTES)


def test_a_claim_of_large_tasks_has_few_rows() -> None:
    size = ClaimSize()
    size.answered(of(999_999), took_s=0.0)
    assert size.rows == CLAIM_BYTES // 1_000_000
    size.answered(of(499_999, checkpoint=500_000), took_s=0.0)
    assert size.rows == CLAIM_BYTES // 1_000_000
    size.answered(of(CLAIM_BYTES * 2, count=1), took_s=0.0)
    assert size.rows == 1


def test_a_claim_shrinks_after_an_unanswered_one_and_grows_back_step_by_step() -> None:
    size = ClaimSize()
    size.answered(of(10), took_s=0.0)
    size.unanswered()
    assert (size.rows, size.most_bytes) == (MOST_CLAIMED // 4, CLAIM_BYTES // 4)
    size.answered(of(10), took_s=0.1)
    assert (size.rows, size.most_bytes) == (MOST_CLAIMED // 2, CLAIM_BYTES // 2)
    for _ in range(3):
        size.answered(of(10), took_s=0.1)
    assert (size.rows, size.most_bytes) == (MOST_CLAIMED, CLAIM_BYTES)
    for _ in range(20):
        size.unanswered()
    assert size.rows == 1
    assert size.most_bytes > 0


def test_a_claim_shrinks_after_a_late_answer_and_not_after_a_timely_one() -> None:
    size = ClaimSize()
    size.answered(of(10), took_s=LATE_S + 1)
    assert size.most_bytes == CLAIM_BYTES // 2
    size.answered(of(10), took_s=LATE_S - 1)
    assert size.most_bytes == CLAIM_BYTES // 2
