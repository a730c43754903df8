"""Test how measured run durations limit the number of tasks that wait for a slot."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.worker.claim.durations import (
    FEWEST_RUNS,
    LAST_RUNS,
    NO_PREFETCH_S,
    PREFETCH_WITHIN_S,
    RunDurations,
)

RUNS = st.lists(st.floats(min_value=0.0, max_value=100.0), min_size=FEWEST_RUNS, max_size=3 * LAST_RUNS)


class SettableClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def pace(clock: SettableClock) -> RunDurations:
    return RunDurations(clock)  # type: ignore[arg-type]


@given(RUNS)
def test_at_most_a_tenth_of_the_last_hundred_runs_exceed_the_estimate(
    runs: list[float],
) -> None:  # J5
    pace = RunDurations(SettableClock())  # type: ignore[arg-type]
    for took_s in runs:
        pace.ran("one", took_s)
    last, estimate = runs[-LAST_RUNS:], pace.slowest_s(["one"])
    assert sum(took_s > estimate for took_s in last) <= len(last) / 10
    assert sum(took_s >= estimate for took_s in last) > len(last) / 10
    assert pace.is_fast("one") == (estimate <= PREFETCH_WITHIN_S)
    assert pace.runs_within(["one"], PREFETCH_WITHIN_S) * estimate <= PREFETCH_WITHIN_S


def test_a_function_with_too_few_runs_counts_as_slow(pace: RunDurations) -> None:
    for _ in range(FEWEST_RUNS - 1):
        pace.ran("new", 0.001)
    assert (pace.is_fast("new"), pace.runs_within(["new"], PREFETCH_WITHIN_S)) == (False, 0)
    pace.ran("new", 0.001)
    assert (pace.is_fast("new"), pace.runs_within(["new"], PREFETCH_WITHIN_S)) == (True, 250)


def test_the_estimate_for_several_functions_is_that_of_the_slowest_or_unknown_one(pace: RunDurations) -> None:
    for _ in range(FEWEST_RUNS):
        pace.ran("quick", 0.01)
        pace.ran("medium", 0.1)
    assert pace.runs_within(["quick", "medium"], PREFETCH_WITHIN_S) == 2
    assert pace.slowest_s(["quick", "unknown"]) == math.inf
    assert pace.runs_within([], PREFETCH_WITHIN_S) == 0


def test_a_barred_function_counts_as_slow_for_five_seconds(pace: RunDurations, clock: SettableClock) -> None:
    for _ in range(FEWEST_RUNS):
        pace.ran("quick", 0.01)
    pace.stop_prefetch(["quick"])
    clock.at = NO_PREFETCH_S - 0.01
    assert not pace.is_fast("quick")
    clock.at = NO_PREFETCH_S
    assert pace.is_fast("quick")
