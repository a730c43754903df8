"""Report the figures of a benchmark as a table with explanations, or as one JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec import Struct
from rich.text import Text

from everbeat.bench.machine import OtherUsage
from everbeat.bench.sampling import (
    CONFIDENCE,
    Conditions,
    Figure,
    FigureBound,
    TakenMeasurement,
    conclusion,
    figures_of,
)
from everbeat.cli.output import say, show_json, show_table

_OR: Final = " *"
_MET: Final = {True: "yes", False: "MISSED", None: ""}


class BenchReport(Struct, frozen=True, kw_only=True):
    """All measurements of a run, including the discarded ones. `head` describes the measured versions and machine."""

    head: dict[str, Any]
    taken: tuple[TakenMeasurement, ...]
    conditions: Conditions

    @property
    def kept(self) -> list[TakenMeasurement]:
        """Return the measurements that were not discarded."""
        return [each for each in self.taken if not each.is_discarded]

    @property
    def figures(self) -> list[Figure]:
        """Return the figures of the measurements that were not discarded."""
        return figures_of((each.round, sample) for each in self.kept for sample in each.samples)

    @property
    def most_cores(self) -> float | None:
        """Return the cores that other processes used during the most disturbed measurement, or None if the system does not report it."""
        return _most(each.others for each in self.kept)

    def other_cores(self, figure: Figure) -> float | None:
        """Return `most_cores` for only the measurements of this figure and of the figure that it is compared with."""
        names = {figure.name, figure.beside}
        return _most(
            each.others for each in self.kept if any(sample.name in names for sample in each.samples)
        )

    def is_busy(self, cores: float | None) -> bool | None:
        """Return whether `cores` exceeds the limit, or None if `cores` is None."""
        return None if cores is None else cores > self.conditions.limit_cores

    def publish(self, *, as_json: bool) -> None:
        """Print the report, either as JSON or as a table."""
        if as_json:
            show_json(self.document())
        else:
            self.show()

    def document(self) -> dict[str, Any]:
        """Return all results of the measurements as a JSON document."""
        return {
            **self.head,
            "foreign": {
                "limit_cores": self.conditions.limit_cores,
                "most_cores": self.most_cores,
                "busy": self.is_busy(self.most_cores),
                "allow_busy": self.conditions.allow_busy,
                "discarded": len(self.taken) - len(self.kept),
            },
            "confidence": CONFIDENCE,
            "figures": [self._figure(figure) for figure in self.figures],
            "samples": [each.document() for each in self.taken],
        }

    def show(self) -> None:
        """Print the table on stdout and the explanation of its columns on stderr."""
        figures = self.figures
        marks = [self._mark(figure) for figure in figures]
        busy = ("BUSY",) if any(marks) else ()
        show_table(
            ("WHAT", "VALUE", "UNIT", "SPREAD", "RATIO", "INTERVAL", "BESIDE", "TARGET", "MET", *busy),
            [
                (*_row(figure), *((mark,) if busy else ()))
                for figure, mark in zip(figures, marks, strict=True)
            ],
            numbers=("VALUE", "SPREAD", "RATIO", "INTERVAL"),
            empty="",
        )
        for line in (*_legend(figures), *self._remarks()):
            say(line)

    def _figure(self, figure: Figure) -> dict[str, object]:
        cores = self.other_cores(figure)
        return figure_document(figure) | {"foreign_cores": cores, "busy": self.is_busy(cores)}

    def _mark(self, figure: Figure) -> str:
        cores = self.other_cores(figure)
        if cores is None:
            return "unknown"
        return f"{cores:.2f} cores" if self.is_busy(cores) else ""

    def _remarks(self) -> Iterator[str]:
        limit, most = self.conditions.limit_cores, self.most_cores
        if most is None:
            yield "BUSY: unknown. This system does not report what other processes used, so all figures are doubtful."
            return
        yield f"Other processes used at most {most:.2f} cores during a measurement; the limit is {limit:g}."
        if self.is_busy(most):
            yield "BUSY: these figures were measured on a busy machine (--allow-busy) and prove nothing."
        if discarded := len(self.taken) - len(self.kept):
            yield f"Discarded and measured again: {discarded} of {len(self.taken)} measurements."


def figure_document(figure: Figure) -> dict[str, object]:
    """Return one figure as part of the JSON document."""
    return {
        "name": figure.name, "value": figure.value, "unit": figure.unit, "values": figure.values, "spread": figure.spread,
        "ratio": figure.ratio, "ratios": figure.ratios, "interval": figure.interval, "beside": figure.beside,
        "verdict": conclusion(figure.interval) if figure.ratios else None, "target": _target_document(figure),
    }  # fmt: skip


def _most(found: Iterable[OtherUsage | None]) -> float | None:
    seen = [*found]
    cores = [others.cores for others in seen if others is not None]
    return max(cores) if cores and len(cores) == len(seen) else None


def _target_document(figure: Figure) -> dict[str, object] | None:
    target = figure.target
    if target is None:
        return None
    return {
        "of": "value" if figure.beside is None else "ratio",
        "at_least": target.at_least,
        "at_most": target.at_most,
        "unless": target.unless,
        "met": figure.is_met,
    }


def _row(figure: Figure) -> tuple[str | Text, ...]:
    spread = f"{figure.spread:.0%}" if len(figure.values) > 1 else ""
    ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
    return (
        figure.name,
        f"{figure.value:,.1f}",
        figure.unit,
        spread,
        ratio,
        _interval(figure),
        figure.beside or "" if ratio else "",
        "" if figure.target is None else _bound(figure, figure.target),
        Text(_MET[figure.is_met], style="red" if figure.is_met is False else ""),
    )


def _interval(figure: Figure) -> str:
    found = figure.interval
    return "" if found is None else f"{found.low:.3f} to {found.high:.3f}"


def _bound(figure: Figure, target: FigureBound) -> str:
    bound = f">= {target.at_least:g}" if target.at_least is not None else f"<= {target.at_most:g}"
    of_what = f"{bound} {figure.unit}" if figure.beside is None else f"ratio {bound}"
    return of_what if target.unless is None else f"{of_what}{_OR}"


def _legend(figures: Sequence[Figure]) -> Iterator[str]:
    if any(one.ratio is not None for one in figures):
        yield (
            "RATIO: the median of all pairs, each the value divided by that of the row named BESIDE; only ratios can be "
            "compared with other runs."
        )
    if found := next((one.interval for one in figures if one.interval is not None), None):
        yield (
            f"INTERVAL: contains the true ratio with a probability of {found.coverage:.0%}; a difference is proven only where "
            "1 lies outside."
        )
    elif any(one.ratio is not None for one in figures):
        yield f"INTERVAL: {conclusion(None)} (--pairs)."
    if any(one.target is not None for one in figures):
        yield "TARGET: the project's goal for the ratio, or for the value if there is no ratio; a MISSED target does not make the command fail."
    if any(one.target is not None and one.target.unless is not None for one in figures):
        yield f"{_OR.strip()} One of these two is enough."
    if any(len(one.values) > 1 for one in figures):
        yield "VALUE: the median of all values. SPREAD: the range from the smallest to the largest value, as a share of the median."
