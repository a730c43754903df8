"""Samples become figures with ratios and intervals, and disturbed measurements are taken again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.bench.machine import OtherUsage, ProcessorUser
from everbeat.bench.sampling import (
    Conditions,
    Figure,
    FigureBound,
    Interval,
    MachineBusy,
    Measurement,
    MeasurementGroup,
    Sample,
    conclusion,
    figures_of,
    median_interval,
    take_all,
)


def test_the_ratio_of_a_figure_is_the_median_of_its_pairs() -> None:
    samples = [
        (number, sample)
        for number, (rows, ours) in enumerate(((100.0, 50.0), (200.0, 60.0), (110.0, 10.0)))
        for sample in (
            Sample(name="rows", value=rows, unit="rows/s"),
            Sample(name="ours", value=ours, unit="tasks/s", beside="rows"),
        )
    ]
    rows, ours = figures_of(samples)
    assert (rows.value, rows.ratio, rows.values) == (110.0, None, (100.0, 200.0, 110.0))
    assert ours.ratios == pytest.approx((0.5, 0.3, 1 / 11))
    assert ours.ratio == pytest.approx(0.3)
    assert ours.spread == pytest.approx(50 / 50)


def test_only_values_of_the_same_round_form_a_pair() -> None:
    """Rounds can go backwards, and one side can be missing."""
    samples = [
        (1, Sample(name="ours", value=60.0, unit="tasks/s", beside="rows")),
        (1, Sample(name="rows", value=200.0, unit="rows/s")),
        (0, Sample(name="rows", value=100.0, unit="rows/s")),
        (2, Sample(name="ours", value=10.0, unit="tasks/s", beside="rows")),
    ]
    figures = {one.name: one for one in figures_of(samples)}
    assert figures["ours"].values == (60.0, 10.0)
    assert figures["ours"].ratios == pytest.approx((0.3,))


def figures_with(**values: float) -> dict[str, Figure]:
    """Two figures beside plain rows, of whose targets one is enough, and one figure beside nothing."""
    targets = {
        "one": FigureBound(at_least=1.3, unless="other"),
        "other": FigureBound(at_least=0.75, unless="one"),
        "wait": FigureBound(at_most=2),
    }
    beside = {"one": "rows", "other": "rows"}
    samples = [
        Sample(name=name, value=value, unit="ms", beside=beside.get(name), target=targets.get(name))
        for name, value in values.items()
    ]
    return {one.name: one for one in figures_of((0, sample) for sample in samples)}


def test_a_target_bounds_the_ratio_or_the_value_without_one() -> None:
    found = figures_with(rows=100, one=140, other=80, wait=2.5)
    assert [found[name].is_met for name in ("rows", "one", "other", "wait")] == [None, True, True, False]
    assert figures_with(wait=2.0)["wait"].is_met is True
    assert figures_with(one=140)["one"].is_met is None  # the plain rows were not measured
    assert figures_with(one=140)["one"].ratio is None


def test_a_figure_needs_only_one_of_two_alternative_targets() -> None:
    assert figures_with(rows=100, one=100, other=80)["one"].is_met is True
    assert figures_with(rows=100, one=140, other=70)["other"].is_met is True
    found = figures_with(rows=100, one=100, other=70)
    assert (found["one"].is_met, found["other"].is_met) == (False, False)


class ScriptedMeter:
    """A meter that reports what the test gives it, one value after the other."""

    def __init__(self, *cores: float) -> None:
        self.cores = [*cores]

    def _next(self) -> OtherUsage:
        user = ProcessorUser(name="burner", pid=7, cores=1.0)
        return OtherUsage(cores=self.cores.pop(0), own_cores=1.0, over_s=1.0, busiest=(user,))

    def during(self, work: Callable[[], None]) -> OtherUsage:
        work()
        return self._next()

    def wait_until_quiet(self, limit_cores: float, *, until_s: float) -> OtherUsage | None:
        seen = self._next()
        return None if seen.cores <= limit_cores else seen


def taken(*cores: float, allow_busy: bool = False) -> list[tuple[float, bool]]:
    """The values of one measurement, which counts how often it was taken, and whether each was discarded."""
    values = iter(range(1, 100))
    measurement = Measurement(name="it", take=lambda: [Sample(name="it", value=next(values), unit="times")])
    takes = take_all(
        [MeasurementGroup(name="all", measurements=(measurement,), rounds=1)],
        ScriptedMeter(*cores),  # type: ignore[arg-type]
        Conditions(limit_cores=0.15, patience_s=5, allow_busy=allow_busy),
    )
    return [(each.samples[0].value, each.is_discarded) for each in takes]


def test_a_discarded_measurement_is_taken_again_after_a_quiet_moment() -> None:
    assert taken(0.1) == [(1, False)]
    assert taken(0.9, 0.1, 0.2, 0.0, 0.15) == [(1, True), (2, True), (3, False)]
    assert taken(0.9, allow_busy=True) == [(1, False)]


def test_a_machine_that_stays_busy_gives_no_figure() -> None:
    with pytest.raises(MachineBusy, match=r"use 0\.80 cores \(burner \(pid 7\) 1\.00\), more than 0\.15"):
        taken(0.9, 0.8)


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    [(5, 1, 0.9375), (7, 1, 0.984375), (8, 2, 0.9296875), (12, 3, 0.961426), (20, 6, 0.958611)],
)
def test_the_ranks_of_a_median_interval_match_the_binomial_tables(
    count: int, rank: int, coverage: float
) -> None:
    found = median_interval([float(number) for number in range(count, 0, -1)])
    assert found == Interval(low=rank, high=count + 1 - rank, coverage=pytest.approx(coverage, abs=1e-6))


def test_four_pairs_are_too_few_for_a_median_interval() -> None:
    assert median_interval([1.0, 1.1, 1.2, 1.3]) is None
    assert median_interval([]) is None


@pytest.mark.parametrize("count", range(5, 12))
def test_a_median_interval_covers_the_median_as_often_as_it_states(count: int) -> None:
    """Each value lies below the true median, 0 here, with probability 1/2: all patterns are equally likely."""
    covered = 0
    for signs in product((-1, 1), repeat=count):
        found = median_interval([float(sign * size) for size, sign in enumerate(signs, start=1)])
        assert found is not None
        covered += found.low <= 0 <= found.high
    assert found is not None
    assert covered / 2**count == pytest.approx(found.coverage)
    assert found.coverage >= 0.9


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=100))
def test_a_median_interval_contains_the_median_and_ignores_the_order(ratios: list[float]) -> None:
    found = median_interval(ratios)
    assert found is not None
    assert min(ratios) <= found.low <= sorted(ratios)[len(ratios) // 2] <= found.high <= max(ratios)
    assert found == median_interval(ratios[::-1])


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.01, 1.2, "higher"),
        (0.8, 0.99, "lower"),
        (0.97, 1.02, "no difference proven"),
        (1.0, 1.1, "no difference proven"),
    ],
)
def test_a_difference_is_proven_only_if_the_interval_excludes_one(
    low: float, high: float, words: str
) -> None:
    assert conclusion(Interval(low=low, high=high, coverage=0.93)) == words
    assert conclusion(None).startswith("too few pairs")
