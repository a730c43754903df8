"""The text format of Prometheus, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from everbeat.domain.metrics.names import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
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


class MetricsText:
    """Collects samples, and writes them as text."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._written: set[str] = set()

    def add(self, metric: Metric, samples: Mapping[tuple[str, ...], float] | float) -> None:
        """Add a metric with its samples by the values of its labels, or with one value if it has no labels."""
        self._head(metric)
        found = samples if isinstance(samples, Mapping) else {(): samples}
        for values, number in found.items():
            self._lines.append(f"{metric.name}{_labels(metric.labels, values)} {_number(number)}")

    def add_histogram(self, metric: Metric, samples: Mapping[tuple[str, ...], Histogram]) -> None:
        """Add a histogram by the values of its labels."""
        self._head(metric)
        for values, found in samples.items():
            total = 0
            for bound, count in zip((*found.bounds_s, math.inf), found.counts, strict=True):
                total += count
                labels = _labels((*metric.labels, "le"), (*values, _number(bound)))
                self._lines.append(f"{metric.name}_bucket{labels} {total}")
            labels = _labels(metric.labels, values)
            self._lines.append(f"{metric.name}_sum{labels} {_number(found.sum_s)}")
            self._lines.append(f"{metric.name}_count{labels} {total}")

    def text(self) -> str:
        """Return the text."""
        return "".join(f"{line}\n" for line in self._lines)

    def _head(self, metric: Metric) -> None:
        if metric.name in self._written:
            raise ValueError(f"The metric {metric.name} was added twice.")
        self._written.add(metric.name)
        described = metric.help.replace("\\", r"\\").replace("\n", r"\n")
        self._lines += [f"# HELP {metric.name} {described}", f"# TYPE {metric.name} {metric.kind}"]


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    pairs = zip(names, values, strict=True)
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: str) -> str:
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


class BoundedNames:
    """Keeps the number of different values of a label bounded: the first names are kept, and all others are `other`."""

    def __init__(self, *, most: int = MOST_NAMES) -> None:
        self._most = most
        self._known: set[str] = set()

    def name(self, name: str) -> str:
        """Return the name, or `other` if too many other names are known."""
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(name)
        return name
