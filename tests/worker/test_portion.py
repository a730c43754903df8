"""A claim is as large as its answer comes in good time."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from everbeat.store.leases import CLAIM_BYTES, Claimed
from everbeat.worker.portion import FIRST_CLAIM, LATE_S, MOST_CLAIMED, Portion


def of(size: int, *, count: int = 4, checkpoint: int = 0) -> list[Claimed]:
    return [
        Claimed(
            id=uuid4(), claim_id=uuid4(), fence=1, name="work", queue="default", priority=0, args="x" * size, attempt=0,
            retry_count=0, crash_count=0, loss_count=0, policy=None, enqueued_at=datetime(2030, 1, 1, tzinfo=UTC),
            good_until=None, checkpoint="x" * checkpoint or None,
        )
        for _ in range(count)
    ]  # fmt: skip


def test_it_is_small_until_the_size_of_tasks_is_known() -> None:
    portion = Portion()
    assert (portion.rows, portion.most_bytes) == (FIRST_CLAIM, CLAIM_BYTES)
    portion.answered([], took_s=0.0)
    assert portion.rows == FIRST_CLAIM
    portion.answered(of(100), took_s=0.0)
    assert (portion.rows, portion.most_bytes) == (MOST_CLAIMED, CLAIM_BYTES)


def test_large_tasks_are_taken_few_at_a_time() -> None:
    portion = Portion()
    portion.answered(of(999_999), took_s=0.0)
    assert portion.rows == CLAIM_BYTES // 1_000_000
    portion.answered(of(499_999, checkpoint=500_000), took_s=0.0)
    assert portion.rows == CLAIM_BYTES // 1_000_000
    portion.answered(of(CLAIM_BYTES * 2, count=1), took_s=0.0)
    assert portion.rows == 1


def test_what_was_not_answered_is_followed_by_less_and_comes_back_step_by_step() -> None:
    portion = Portion()
    portion.answered(of(10), took_s=0.0)
    portion.unanswered()
    assert (portion.rows, portion.most_bytes) == (MOST_CLAIMED // 4, CLAIM_BYTES // 4)
    portion.answered(of(10), took_s=0.1)
    assert (portion.rows, portion.most_bytes) == (MOST_CLAIMED // 2, CLAIM_BYTES // 2)
    for _ in range(3):
        portion.answered(of(10), took_s=0.1)
    assert (portion.rows, portion.most_bytes) == (MOST_CLAIMED, CLAIM_BYTES)
    for _ in range(20):
        portion.unanswered()
    assert portion.rows == 1
    assert portion.most_bytes > 0


def test_an_answer_that_comes_late_makes_the_next_smaller_one_in_good_time_leaves_it() -> None:
    portion = Portion()
    portion.answered(of(10), took_s=LATE_S + 1)
    assert portion.most_bytes == CLAIM_BYTES // 2
    portion.answered(of(10), took_s=LATE_S - 1)
    assert portion.most_bytes == CLAIM_BYTES // 2
