"""The pauses between attempts to connect."""

from __future__ import annotations

from random import Random

from everbeat.wake.delivery import FIRST_PAUSE_S, LONGEST_PAUSE_S, Pauses


def test_pauses_grow_from_the_first_to_the_longest_and_stay_there() -> None:
    pauses = Pauses(Random(1))
    told = [pauses.next() for _ in range(2_000)]
    assert FIRST_PAUSE_S / 2 <= told[0] <= FIRST_PAUSE_S
    assert max(told) <= LONGEST_PAUSE_S
    assert min(told[10:]) >= LONGEST_PAUSE_S / 2
    assert 0.7 * LONGEST_PAUSE_S < sum(told[10:]) / len(told[10:]) < 0.8 * LONGEST_PAUSE_S


def test_a_connection_that_proved_good_begins_anew() -> None:
    pauses = Pauses(Random(1))
    for _ in range(20):
        pauses.next()
    pauses.reset()
    assert pauses.next() <= FIRST_PAUSE_S


def test_two_listeners_do_not_return_together() -> None:
    assert Pauses(Random(1)).next() != Pauses(Random(2)).next()
