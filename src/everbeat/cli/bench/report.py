"""What a bench tells: a table with the words that explain it, or one JSON document.

What lives here: the shape of the report. What may not: measuring, and whether a target is met.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.text import Text

from everbeat.cli.bench.figures import Figure, Target
from everbeat.cli.output import say, show_table

_OR: Final = " *"
_MET: Final = {True: "yes", False: "MISSED", None: ""}


def show_figures(figures: Sequence[Figure]) -> None:
    """The table on stdout, what its columns mean on stderr."""
    show_table(
        ("WHAT", "VALUE", "UNIT", "SPREAD", "RATIO", "BESIDE", "TARGET", "MET"),
        [_row(one) for one in figures],
        numbers=("VALUE", "SPREAD", "RATIO"),
        empty="",
    )
    for line in _legend(figures):
        say(line)


def figure_document(figure: Figure) -> dict[str, object]:
    """One figure as programs read it."""
    return {
        "name": figure.name, "value": figure.value, "unit": figure.unit, "values": figure.values, "spread": figure.spread,
        "ratio": figure.ratio, "beside": figure.beside, "target": _target_document(figure),
    }  # fmt: skip


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
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    return (
        figure.name,
        f"{figure.value:,.1f}",
        figure.unit,
        spread,
        ratio,
        figure.beside or "" if ratio else "",
        "" if figure.target is None else _bound(figure, figure.target),
        Text(_MET[figure.is_met], style="red" if figure.is_met is False else ""),
    )


def _bound(figure: Figure, target: Target) -> str:
    bound = f">= {target.at_least:g}" if target.at_least is not None else f"<= {target.at_most:g}"
    of_what = f"{bound} {figure.unit}" if figure.beside is None else f"ratio {bound}"
    return of_what if target.unless is None else f"{of_what}{_OR}"


def _legend(figures: Sequence[Figure]) -> Iterable[str]:
    if any(one.ratio is not None for one in figures):
        yield "RATIO: the value divided by that of the row named BESIDE, in this run; only ratios can be compared with other runs."
    if any(one.target is not None for one in figures):
        yield "TARGET: what the project wants of the ratio, or of the value itself; MISSED is no failure of the command."
    if any(one.target is not None and one.target.unless is not None for one in figures):
        yield f"{_OR.strip()} one of these two is enough."
    if any(len(one.values) > 1 for one in figures):
        yield "VALUE: the median of all repeats. SPREAD: from the smallest to the largest of them, as a share of the median."
