"""Hints that lead to nothing are followed at a bounded rate; those that lead to something are followed at once."""

from __future__ import annotations

import pytest

from everbeat.wake.hint_rate import BURST, PER_S, HintRate


def test_useless_hints_are_followed_at_once_for_a_burst_and_then_at_a_steady_rate() -> None:
    rate, now = HintRate(), 1_000.0
    pauses = [rate.pause_s(now) for _ in range(BURST)]
    assert pauses == [0.0] * BURST
    followed = 0
    while now < 1_010.0:
        now += rate.pause_s(now)
        followed += 1
    assert followed == pytest.approx(10 * PER_S, abs=2)


def test_a_hint_that_led_to_something_makes_the_next_ones_urgent_again() -> None:
    rate = HintRate()
    while not rate.pause_s(5.0):
        pass
    rate.paid_off()
    assert rate.pause_s(5.0) == 0.0


def test_a_quiet_time_restores_the_burst_and_no_more_than_that() -> None:
    rate = HintRate()
    while not rate.pause_s(5.0):
        pass
    assert [rate.pause_s(9_000.0) for _ in range(BURST + 1)][-2:] == [0.0, pytest.approx(1 / PER_S)]
