"""Test the rate at which a worker follows hints: bounded for useless hints, at once for useful ones."""

from __future__ import annotations

import pytest

from everbeat.hints.delivery import BURST, PER_S, HintRate


def test_useless_hints_are_followed_at_a_steady_rate_after_a_burst() -> None:
    rate, now = HintRate(), 1_000.0
    pauses = [rate.pause_s(now) for _ in range(BURST)]
    assert pauses == [0.0] * BURST
    followed = 0
    while now < 1_010.0:
        now += rate.pause_s(now)
        followed += 1
    assert followed == pytest.approx(10 * PER_S, abs=2)


def test_a_useful_hint_restores_the_burst_of_the_hint_rate() -> None:
    rate = HintRate()
    while not rate.pause_s(5.0):
        pass
    rate.paid_off()
    assert rate.pause_s(5.0) == 0.0


def test_a_quiet_time_restores_the_burst_of_the_hint_rate_and_no_more() -> None:
    rate = HintRate()
    while not rate.pause_s(5.0):
        pass
    assert [rate.pause_s(9_000.0) for _ in range(BURST + 1)][-2:] == [0.0, pytest.approx(1 / PER_S)]
