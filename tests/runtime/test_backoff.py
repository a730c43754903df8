"""Test the growing delays between attempts."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.hints.delivery import reconnect_backoff
from everbeat.runtime.clock import Backoff

shares = st.floats(0.1, 2.0)
backoffs = st.builds(
    lambda first, longer, factor, spread, seed: Backoff(
        first_s=first,
        longest_s=first * longer,
        factor=factor,
        spread=tuple(sorted(spread)),
        random=Random(seed),
    ),
    st.floats(0.001, 60.0),
    st.floats(1.0, 1_000.0),
    st.floats(1.5, 10.0),
    st.tuples(shares, shares),
    st.integers(0, 1_000),
)


def without_chance(backoff: Backoff) -> Backoff:
    return Backoff(first_s=backoff.first_s, longest_s=backoff.longest_s, factor=backoff.factor)


@given(backoffs, st.integers(1, 100_000))
def test_a_backoff_delay_stays_between_the_first_and_the_longest_delay(
    backoff: Backoff, failures: int
) -> None:
    least, most = backoff.spread
    assert backoff.first_s * least * 0.999 <= backoff.delay(failures) <= backoff.longest_s * most * 1.001


@given(backoffs, st.integers(1, 100_000))
def test_a_backoff_delay_without_jitter_grows_by_its_factor_up_to_the_longest(
    backoff: Backoff, failures: int
) -> None:
    plain = without_chance(backoff)
    assert plain.delay(1) == plain.first_s
    grown = plain.delay(failures) * plain.factor
    assert plain.delay(failures + 1) == pytest.approx(min(grown, plain.longest_s), rel=1e-6)
    assert plain.delay(100_000) == pytest.approx(plain.longest_s)


@given(backoffs, st.integers(0, 50))
def test_a_reset_backoff_starts_with_the_first_delay(backoff: Backoff, failures: int) -> None:
    plain = without_chance(backoff)
    assert [plain.next() for _ in range(failures)] == [plain.delay(number + 1) for number in range(failures)]
    plain.reset()
    assert plain.next() == plain.first_s


def test_backoff_delays_are_spread_evenly_over_their_range() -> None:
    backoff = Backoff(first_s=1.0, longest_s=4.0, spread=(0.5, 1.5), random=Random(1))
    found = [backoff.delay(3) for _ in range(5_000)]
    assert 2.0 <= min(found) < 2.1
    assert 5.9 < max(found) <= 6.0
    assert sum(found) / len(found) == pytest.approx(4.0, rel=0.02)


def test_listeners_reconnect_within_five_seconds_and_not_all_at_once() -> None:
    backoff = reconnect_backoff(Random(1))
    delays = [backoff.next() for _ in range(2_000)]
    assert 0.05 <= delays[0] <= 0.1
    assert max(delays) <= 5.0
    assert min(delays[10:]) >= 2.5
    backoff.reset()
    assert backoff.next() <= 0.1
    assert reconnect_backoff(Random(1)).next() != reconnect_backoff(Random(2)).next()
