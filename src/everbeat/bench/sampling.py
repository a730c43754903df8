"""Take samples in interleaved rounds, repeat disturbed measurements, and compute figures, ratios and intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from math import comb
from statistics import median, quantiles
from typing import Any, ClassVar, Final

from msgspec import Struct
from msgspec.structs import replace

from everbeat.bench.machine import Meter, OtherUsage
from everbeat.cli.output import say
from everbeat.errors import EverbeatError
from everbeat.runtime.clock import SystemClock

CONFIDENCE: Final = 0.9
FEWEST: Final = 5
"""The fewest values for which an interval can contain the median with this confidence."""


class FigureBound(Struct, frozen=True, kw_only=True):
    """A bound for a figure's ratio, or for its value if the figure has no ratio.

    The bound also counts as met if the figure named `unless` meets its own bound.
    """

    at_least: float | None = None
    at_most: float | None = None
    unless: str | None = None

    def holds(self, number: float) -> bool:
        """Return whether `number` satisfies the bound."""
        return (self.at_least is None or number >= self.at_least) and (
            self.at_most is None or number <= self.at_most
        )


class Sample(Struct, frozen=True, kw_only=True):
    """One value of one figure.

    `beside` names the figure by which the value is divided. `target` is the bound for the resulting ratio, or for the value if there is no
    ratio.
    """

    name: str
    value: float
    unit: str
    beside: str | None = None
    target: FigureBound | None = None


class Measurement(Struct, frozen=True, kw_only=True):
    """A measurement that can be taken repeatedly. `take` returns its samples."""

    name: str
    take: Callable[[], Iterable[Sample]]


class MeasurementGroup(Struct, frozen=True, kw_only=True):
    """Measurements that are compared with one another and are therefore taken alternately."""

    name: str
    measurements: tuple[Measurement, ...]
    rounds: int


class Conditions(Struct, frozen=True, kw_only=True):
    """How many cores other processes may use, how long to wait until they do, and whether to measure regardless."""

    limit_cores: float
    patience_s: float
    allow_busy: bool


class TakenMeasurement(Struct, frozen=True, kw_only=True):
    """A measurement that was taken. `others` is None if the system does not report the usage of other processes."""

    group: str
    name: str
    round: int
    samples: tuple[Sample, ...]
    others: OtherUsage | None
    is_discarded: bool

    def document(self) -> dict[str, Any]:
        """Return the measurement as part of the JSON document."""
        others = self.others
        return {
            "section": self.group,
            "measurement": self.name,
            "pair": self.round,
            "discarded": self.is_discarded,
            "foreign_cores": None if others is None else others.cores,
            "own_cores": None if others is None else others.own_cores,
            "seconds": None if others is None else others.over_s,
            "busiest": [] if others is None else others.busiest,
            "values": {sample.name: sample.value for sample in self.samples},
        }


class MachineBusy(EverbeatError):
    """Raised if other processes use the machine and do not stop in time."""

    code: ClassVar[str] = "MACHINE_BUSY"


def take_all(
    groups: Iterable[MeasurementGroup], meter: Meter, conditions: Conditions
) -> Iterator[TakenMeasurement]:
    """Take and yield each measurement, including the discarded ones. Raises MachineBusy if other processes do not stop in time.

    Every other round runs in reverse order (A B, B A), so that a machine that becomes slower or faster favors neither side.
    """
    for group in groups:
        for number in range(group.rounds):
            of_all = f", {number + 1} of {group.rounds}" if group.rounds > 1 else ""
            say(f"measuring: {group.name}{of_all}")
            for measurement in group.measurements[:: -1 if number % 2 else 1]:
                yield from _take(group, number, measurement, meter, conditions)


def _take(
    group: MeasurementGroup, number: int, measurement: Measurement, meter: Meter, conditions: Conditions
) -> Iterator[TakenMeasurement]:
    clock, deadline = SystemClock(), None
    while True:
        samples: list[Sample] = []
        others = meter.during(lambda samples=samples: samples.extend(measurement.take()))  # type: ignore[misc]
        is_busy = others is not None and others.cores > conditions.limit_cores
        yield TakenMeasurement(
            group=group.name,
            name=measurement.name,
            round=number,
            samples=tuple(samples),
            others=others,
            is_discarded=is_busy and not conditions.allow_busy,
        )
        if others is None or not is_busy or conditions.allow_busy:
            return
        deadline = deadline or clock.monotonic() + conditions.patience_s
        say(
            f"discarded: {measurement.name}. Other processes used {others.cores:.2f} cores during it, more than "
            f"{conditions.limit_cores:g}: {others.shown}. Waiting for a quiet moment."
        )
        still = meter.wait_until_quiet(conditions.limit_cores, until_s=deadline)
        if still is not None:
            raise MachineBusy(
                f"The machine is busy: other processes use {still.cores:.2f} cores ({still.shown}), more than "
                f"{conditions.limit_cores:g}, and did not stop within {conditions.patience_s:g} s. {measurement.name!r} was "
                "not measured, and there are no figures.",
                fix="end those processes, or wait longer with --patience; --allow-busy measures regardless and marks every figure.",
            )


class Interval(Struct, frozen=True, kw_only=True):
    """An interval for a median. `coverage` is the exact probability that such an interval contains the true median."""

    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval | None:
    """Return the narrowest interval between two of the values that contains the median with this confidence, or None.

    For any distribution, each value lies below the true median with probability 1/2. So the k-th smallest and the k-th largest of n values
    enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < k). Source: W. R. Thompson, "On confidence ranges for the median", Annals
    of Mathematical Statistics 7 (1936); Conover, "Practical Nonparametric Statistics", section 3.2. The logarithm preserves the order, so
    the interval also holds for the logarithms of ratios.
    """
    ordered, count = sorted(values), len(values)
    found, tail = None, 0.0
    for rank in range(1, count // 2 + 1):
        tail += comb(count, rank - 1) / 2**count
        coverage = 1 - 2 * tail
        if coverage < confidence:
            break
        found = Interval(low=ordered[rank - 1], high=ordered[count - rank], coverage=coverage)
    return found


def conclusion(interval: Interval | None) -> str:
    """Return the conclusion that an interval of ratios supports."""
    if interval is None:
        return f"too few pairs for an interval, {FEWEST} at least"
    if interval.low > 1:
        return "higher"
    if interval.high < 1:
        return "lower"
    return "no difference proven"


class Figure(Struct, frozen=True, kw_only=True):
    """A measured figure. `values` has one value per round. `ratios` are the values divided by those of the figure `beside` in the same
    round.

    `is_met` is None if there is no target, or if the figure that this one is compared with was not measured.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    beside: str | None = None
    ratios: tuple[float, ...] = ()
    target: FigureBound | None = None
    is_met: bool | None = None

    @property
    def value(self) -> float:
        """Return the median of the values."""
        return median(self.values)

    @property
    def ratio(self) -> float | None:
        """Return the median of the ratios, or None if there is no figure to divide by."""
        return median(self.ratios) if self.ratios else None

    @property
    def interval(self) -> Interval | None:
        """Return the confidence interval of the ratio, or None if there are too few pairs."""
        return median_interval(self.ratios)

    @property
    def spread(self) -> float:
        """Return the range of the values as a share of their median."""
        return (max(self.values) - min(self.values)) / self.value if self.value else 0.0


def figures_of(samples: Iterable[tuple[int, Sample]]) -> list[Figure]:
    """Return the figures of `samples`, which are pairs of a round number and a sample, in the order in which the figures first appear.

    Values are divided only by values of the same round, because these were measured shortly after one another.
    """
    found: dict[str, dict[int, Sample]] = {}
    for number, sample in samples:
        found.setdefault(sample.name, {})[number] = sample
    figures = [_figure(name, rounds, found) for name, rounds in found.items()]
    met = {figure.name for figure in figures if figure.is_met}
    return [replace(figure, is_met=True) if _is_excused(figure, met) else figure for figure in figures]


def _figure(name: str, rounds: Mapping[int, Sample], found: Mapping[str, Mapping[int, Sample]]) -> Figure:
    first = next(iter(rounds.values()))
    other = found.get(first.beside or "", {})
    ratios = tuple(
        sample.value / other[number].value
        for number, sample in sorted(rounds.items())
        if number in other and other[number].value
    )
    figure = Figure(
        name=name,
        unit=first.unit,
        values=tuple(sample.value for _, sample in sorted(rounds.items())),
        beside=first.beside,
        ratios=ratios,
        target=first.target,
    )
    bounded = figure.value if first.beside is None else figure.ratio
    is_met = None if first.target is None or bounded is None else first.target.holds(bounded)
    return replace(figure, is_met=is_met)


def _is_excused(figure: Figure, met: Set[str]) -> bool:
    return figure.is_met is False and figure.target is not None and figure.target.unless in met


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the given percentile of at least two values."""
    return quantiles(values, n=100)[percent - 1]
