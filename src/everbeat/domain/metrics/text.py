"""The text format of Prometheus, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct

from everbeat.domain.metrics.names import Metric
from everbeat.errors.wording import visible

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Value = TypeVar("Value")
Labels = TypeVar("Labels", bound=tuple[str, ...])
OTHER: Final = "other"
MOST_NAMES: Final = 200
"""How many different names a label has. Further names count as `other`."""


class Histogram(Struct):
    """Counts of durations by class. `bounds_s` are the upper bounds of all classes but the last, in seconds."""

    bounds_s: Sequence[float]
    counts: list[int]
    sum_s: float = 0.0

    @classmethod
    def empty(cls, bounds_s: Sequence[float]) -> Histogram:
        """Return a histogram without durations."""
        return cls(bounds_s, [0] * (len(bounds_s) + 1))

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[next((n for n, bound in enumerate(self.bounds_s) if seconds <= bound), -1)] += 1
        self.sum_s += seconds

    def plus(self, other: Histogram) -> Histogram:
        """Return the sum of two histograms with the same classes."""
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds_s, counts, self.sum_s + other.sum_s)


class MetricsText:
    """Collects samples, and writes them as text or as a document."""

    def __init__(self) -> None:
        self._families: list[tuple[Metric, Mapping[tuple[str, ...], float | Histogram]]] = []

    def add(
        self,
        metric: Metric,
        samples: Mapping[Labels, float] | Mapping[Labels, Histogram] | float,
    ) -> None:
        """Add a metric with its samples by the values of its labels, or with one value if it has no labels."""
        if any(known.name == metric.name for known, _ in self._families):
            raise ValueError(f"The metric {metric.name} was added twice.")
        given = samples if isinstance(samples, Mapping) else {(): samples}
        self._families.append((metric, {tuple(values): found for values, found in given.items()}))

    def text(self) -> str:
        """Return the samples in the text format."""
        lines: list[str] = []
        for metric, samples in self._families:
            described = metric.help.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {metric.name} {described}", f"# TYPE {metric.name} {metric.kind}"]
            for values, found in samples.items():
                lines += _lines(metric, values, found)
        return "".join(f"{line}\n" for line in lines)

    def values_of(self, metric: Metric) -> list[str]:
        """Return the values of the first label of a metric."""
        return [values[0] for known, samples in self._families if known == metric for values in samples]

    def document(self) -> list[dict[str, Any]]:
        """Return the samples as plain values for JSON."""
        return [
            {
                "name": metric.name,
                "type": metric.kind,
                "help": metric.help,
                "samples": [
                    {"labels": dict(zip(metric.labels, values, strict=True)), "value": _plain(found)}
                    for values, found in samples.items()
                ],
            }
            for metric, samples in self._families
        ]


def _plain(found: float | Histogram) -> Any:
    if isinstance(found, Histogram):
        return {"bounds_s": list(found.bounds_s), "counts": found.counts, "sum_s": found.sum_s}
    return found


def _lines(metric: Metric, values: tuple[str, ...], found: float | Histogram) -> Iterator[str]:
    if not isinstance(found, Histogram):
        yield f"{metric.name}{_labels(metric.labels, values)} {_number(found)}"
        return
    total = 0
    for bound, count in zip((*found.bounds_s, math.inf), found.counts, strict=True):
        total += count
        labels = _labels((*metric.labels, "le"), (*values, _number(bound)))
        yield f"{metric.name}_bucket{labels} {total}"
    labels = _labels(metric.labels, values)
    yield f"{metric.name}_sum{labels} {_number(found.sum_s)}"
    yield f"{metric.name}_count{labels} {total}"


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    pairs = zip(names, values, strict=True)
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: str) -> str:
    text = visible(value.encode("utf-8", "replace").decode())  # people read metrics on terminals
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def bounded(
    samples: Mapping[Labels, Value],
    add: Callable[[Value, Value], Value],
    *,
    most: int = MOST_NAMES,
    label: int = 0,
) -> dict[tuple[str, ...], Value]:
    """Return the samples with at most `most` different values of a label, by default the first.

    `add` joins the samples of all other values, under `other`.
    """
    kept = set(sorted({values[label] for values in samples})[:most])
    found: dict[tuple[str, ...], Value] = {}
    for values, value in samples.items():
        place = values if values[label] in kept else (*values[:label], OTHER, *values[label + 1 :])
        found[place] = add(found[place], value) if place in found else value
    return found
