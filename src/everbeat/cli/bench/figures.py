"""A figure of the benchmark: what was measured in each repeat, and what it is beside the bare server.

What lives here: values and their arithmetic. What may not: measuring.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from statistics import median, quantiles

from msgspec import Struct


class Target(Struct, frozen=True, kw_only=True):
    """A bound for a ratio, or for the value of what is measured beside nothing; met also where figure `unless` meets its own."""

    at_least: float | None = None
    at_most: float | None = None
    unless: str | None = None

    def holds(self, number: float) -> bool:
        """Whether a number lies within the bound."""
        return (self.at_least is None or number >= self.at_least) and (
            self.at_most is None or number <= self.at_most
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`values`: one for each repeat, in `unit`. `ratio` is the median beside that of the figure named `beside`.

    `is_met`: None where there is no target, or where what it is compared with was not measured.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    beside: str | None = None
    ratio: float | None = None
    target: Target | None = None
    is_met: bool | None = None

    @property
    def value(self) -> float:
        """The median of the repeats."""
        return median(self.values)

    @property
    def spread(self) -> float:
        """The whole range of the repeats, as a share of the median."""
        return (max(self.values) - min(self.values)) / self.value if self.value else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One repeat of one figure; `beside` names the figure that it is divided by, `target` bounds that ratio, or the value."""

    name: str
    value: float
    unit: str
    beside: str | None = None
    target: Target | None = None


def gathered(repeats: Sequence[Sequence[Sample]]) -> list[Figure]:
    """Figures from the samples of all repeats, in the order of the first one."""
    samples: dict[str, list[Sample]] = {}
    for repeat in repeats:
        for sample in repeat:
            samples.setdefault(sample.name, []).append(sample)
    middle = {name: median(one.value for one in found) for name, found in samples.items()}
    figures: list[Figure] = []
    for name, found in samples.items():
        first = found[0]
        other = middle.get(first.beside or "")
        judged = middle[name] if first.beside is None else middle[name] / other if other else None
        figures.append(
            Figure(
                name=name,
                unit=first.unit,
                values=tuple(one.value for one in found),
                beside=first.beside,
                ratio=None if first.beside is None else judged,
                target=first.target,
                is_met=None if first.target is None or judged is None else first.target.holds(judged),
            )
        )
    return [_spared(one, {each.name for each in figures if each.is_met}) for one in figures]


def _spared(figure: Figure, met: Set[str]) -> Figure:
    spared = figure.is_met is False and figure.target is not None and figure.target.unless in met
    return replace(figure, is_met=True) if spared else figure


def percentile(values: Sequence[float], percent: int) -> float:
    """That percentile of at least two values."""
    return quantiles(values, n=100)[percent - 1]
