"""A figure of the benchmark: what was measured in each repeat, and what it is beside the bare server.

What lives here: values and their arithmetic. What may not: measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`values`: one for each repeat, in `unit`. `ratio` is the median beside that of the figure named `beside`."""

    name: str
    unit: str
    values: tuple[float, ...]
    beside: str | None = None
    ratio: float | None = None
    target: str | None = None

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
    """One repeat of one figure; `beside` names the figure that it is divided by, `target` what the ratio or value should be."""

    name: str
    value: float
    unit: str
    beside: str | None = None
    target: str | None = None


def gathered(repeats: Sequence[Sequence[Sample]]) -> list[Figure]:
    """Figures from the samples of all repeats, in the order of the first one."""
    samples: dict[str, list[Sample]] = {}
    for repeat in repeats:
        for sample in repeat:
            samples.setdefault(sample.name, []).append(sample)
    middle = {name: median(one.value for one in found) for name, found in samples.items()}
    figures = []
    for name, found in samples.items():
        first = found[0]
        other = middle.get(first.beside or "")
        figures.append(
            Figure(
                name=name,
                unit=first.unit,
                values=tuple(one.value for one in found),
                beside=first.beside if other else None,
                ratio=middle[name] / other if other else None,
                target=first.target,
            )
        )
    return figures


def percentile(values: Sequence[float], percent: int) -> float:
    """That percentile of at least two values."""
    return quantiles(values, n=100)[percent - 1]
