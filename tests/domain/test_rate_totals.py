"""The totals of a tree never fall when counts are taken, put back, written or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from everbeat.domain.series import OTHER_NAME, RateBook, RateCounter, RateCounts

MINUTE = datetime(2030, 1, 1, tzinfo=UTC)


def started(counts: Sequence[RateCounts]) -> dict[tuple[str, str], int]:
    return {(each.queue, each.name): each.started for each in counts}


def test_totals_contain_what_waits_what_is_in_hand_and_what_was_dropped() -> None:
    counter, book = RateCounter(), RateBook()
    counter.waits("mail", "welcome").append(0.1)
    assert started(book.totals(counter.waiting())) == {("mail", "welcome"): 1}
    taken = counter.take()
    counter.waits("mail", "welcome").append(0.1)
    assert started(book.totals(taken, counter.waiting())) == {("mail", "welcome"): 2}
    book.add(MINUTE, taken)
    book.add(MINUTE + timedelta(minutes=1), counter.take())
    book.forget(before=MINUTE + timedelta(minutes=1), after=MINUTE + timedelta(minutes=2))
    (total,) = book.totals(counter.waiting())
    assert (total.started, total.wait_s, sum(total.waits)) == (2, 0.2, 2)
    total.started = 100
    assert started(book.totals()) == {("mail", "welcome"): 2}, "a caller cannot change the totals"


def test_totals_join_names_beyond_the_limit() -> None:
    counter, book = RateCounter(), RateBook(most_names=2)
    for name in ("a", "b", "c", "d"):
        counter.waits("mail", name).append(0.1)
    waiting = book.totals(counter.waiting())
    assert started(waiting) == {("mail", "a"): 1, ("mail", "b"): 1, ("mail", OTHER_NAME): 2}
    book.add(MINUTE, counter.take())
    assert started(book.totals()) == started(waiting)
