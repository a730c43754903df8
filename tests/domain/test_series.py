"""Counters and the book of a tree: sums, limits, and rows that are written again after an error."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from everbeat.domain.series import CLASS_BOUNDS_S, CLASSES, RateBook, RateCounter, RateCounts, class_of

AT = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
LATER = AT + timedelta(minutes=1)


def counted(queue: str = "default", name: str = "work", *, times: int = 1) -> list[RateCounts]:
    counter = RateCounter()
    for _ in range(times):
        counter.waits(queue, name).append(0.3)
        counter.runs(queue, name).append(4.0)
    return counter.take()


def test_a_counter_returns_each_count_once() -> None:
    counter = RateCounter()
    counter.waits("default", "work").append(-1.0)
    counter.ended("default", "work", "retried", run_s=90_000.0)
    counter.ended("default", "work", "crashed")
    counter.expired("default", "work")
    counter.add(counted(times=2))
    [found] = counter.take()
    assert (found.started, found.completed, found.retried, found.crashed, found.expired) == (3, 2, 1, 1, 1)
    assert (found.waits[0], found.waits[class_of(0.3)]) == (1, 2)
    assert (found.runs[class_of(4.0)], found.runs[CLASSES - 1], sum(found.runs)) == (2, 1, 3)
    assert counter.take() == []


def test_many_durations_are_classified_like_single_ones_and_none_is_lost() -> None:
    durations = [*CLASS_BOUNDS_S, *(bound_s + 1e-6 for bound_s in CLASS_BOUNDS_S), -1.0, 0.0] * 50
    counter, expected = RateCounter(), [0] * CLASSES
    for each in durations:  # more than are kept unclassified
        counter.waits("default", "work").append(each)
        counter.runs("default", "work").append(each)
        expected[class_of(each)] += 1
    [found] = counter.take()
    assert (found.waits, found.started) == (expected, len(durations))
    assert (found.runs, found.completed) == (expected, len(durations))
    assert found.run_s == pytest.approx(sum(max(0.0, each) for each in durations))


def test_counts_pass_between_processes_unchanged() -> None:
    counts = counted(times=3)
    assert msgspec.json.decode(msgspec.json.encode(counts), type=list[RateCounts]) == counts


def test_a_book_keeps_absolute_values_and_returns_only_rows_that_have_changed() -> None:
    book = RateBook()
    book.add(AT, counted(times=2))
    assert [row["started"] for row in book.take_changed(10)] == [2]
    assert book.take_changed(10) == []
    book.add(AT, counted())
    book.add(LATER, counted())
    assert [(row["at"], row["started"]) for row in book.take_changed(10)] == [(AT, 3), (LATER, 1)]


def test_rows_that_were_put_back_are_returned_again_with_later_counts() -> None:
    book = RateBook()
    book.add(AT, counted())
    rows = book.take_changed(10)
    book.add(AT, counted())
    book.put_back(rows)
    assert [row["started"] for row in book.take_changed(10)] == [2]


def test_old_and_future_minutes_are_dropped_with_their_changes() -> None:
    book = RateBook()
    for at in (AT, LATER, LATER + timedelta(minutes=1)):
        book.add(at, counted())
    rows = book.take_changed(1)
    book.forget(before=LATER, after=LATER)
    book.put_back(rows)
    assert [row["at"] for row in book.take_changed(10)] == [LATER]


def test_names_and_queues_above_the_limit_are_counted_together() -> None:
    book = RateBook(most_names=2, most_queues=1)
    for number in range(4):
        book.add(AT, counted(f"queue_{number}", f"task_{number}"))
    rows = {(row["queue"], row["name"]): row["completed"] for row in book.take_changed(10)}
    assert rows == {("queue_0", "task_0"): 1, ("other", "task_1"): 1, ("other", "other"): 2}
    book.add(LATER, counted("queue_0", "task_1"))
    assert [(row["queue"], row["name"]) for row in book.take_changed(10)] == [("queue_0", "task_1")]
