"""The output of a run: a table for people, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from tests.chaos.evidence import Breach, Evidence
from tests.chaos.figures import Figures

MOST_BREACHES: Final = 12
_HEAD: Final = (
    "fault",
    "injected",
    "recovered",
    "lost",
    "duplicated",
    "refused",
    "notice median",
    "notice max",
)


def words(evidence: Evidence, figures: Figures, found: Sequence[Breach]) -> Iterator[str]:
    """Yield the lines of the report for people: skipped faults, breaches and figures."""
    for skipped in evidence.timeline.skipped:
        yield f"NOT INJECTED: {skipped}"
    for breach in found[:MOST_BREACHES]:
        yield f"{breach.number}: {breach.what}"
    if len(found) > MOST_BREACHES:
        yield f"... and {len(found) - MOST_BREACHES} more"
    yield from _table(figures)
    yield ""
    yield from _totals(evidence, figures)


def _table(figures: Figures) -> Iterator[str]:
    """Yield the figures for each type of fault, as lines of a Markdown table."""
    yield "| " + " | ".join(_HEAD) + " |"
    yield "| --- |" + " ---: |" * (len(_HEAD) - 1)
    for kind, line in sorted(figures.lines.items()):
        cells = [kind, line.injected, line.recovered, line.lost, line.duplicated, line.refused]
        yield "| " + " | ".join(map(str, [*cells, _seconds(line.median_s), _seconds(line.longest_s)])) + " |"


def _totals(evidence: Evidence, figures: Figures) -> Iterator[str]:
    states = ", ".join(f"{count} {state}" for state, count in sorted(figures.states.items()))
    ways = ", ".join(f"{count} by {way}" for way, count in sorted(figures.noticed_by.items()))
    replies = ", ".join(f"{count} of {verb}" for verb, count in sorted(figures.replies_lost.items()))
    yield f"tasks: {figures.sent} acknowledged, {figures.in_doubt} in doubt; {states}; {figures.moved} of them in the history"
    yield f"code: {figures.starts} starts, {figures.run_again} of them again"
    yield f"recovered: {figures.recovered_running} running, {figures.recovered_claimed} claimed; {ways or 'none'}"
    yield f"refused late attempts: {figures.refused}; false deaths: {figures.false_deaths}"
    seen = evidence.timeline.messages
    if seen is not None:
        drained = "never" if seen.drained_after_s is None else f"after {seen.drained_after_s:.1f} s"
        found = "never" if seen.found_after_s is None else f"after {seen.found_after_s:.1f} s"
        yield f"tasks whose messages were destroyed ended {found}"
        yield f"messages: at least {seen.delivered} deliveries; stream and outbox empty {drained}"
    yield f"replies lost after COMMIT: {replies or 'none'}"
    yield f"writes without room on the disk: {figures.writes_without_room}"
    again = ", ".join(f"{seconds:.2f} s" for seconds in figures.works_again_s)
    yield f"from the database's return to the next start of code: {again or 'no return'}"
    quiet = "never" if figures.quiet_after_s is None else f"after {figures.quiet_after_s:.1f} s"
    yield f"quiet {quiet}; longest farewell {figures.stop_s:.1f} s"
    yield f"the machine stood still {figures.stalls} times; {figures.ended_by_themselves} trees met no database when they started"


def verdict(evidence: Evidence, figures: Figures, found: Sequence[Breach]) -> tuple[bool, str]:
    """Return whether all promises held, and the last line of the report."""
    seed = evidence.plan.seed
    if found:
        return (
            False,
            f"FAILED: seed {seed}: {len(found)} breaches of {', '.join(sorted({one.number for one in found}))}",
        )
    if emptiness := figures.emptiness:
        return False, f"EMPTY: seed {seed}: {emptiness}, so the run proves nothing"
    return True, (
        f"HELD: seed {seed}: {figures.injected} faults, {figures.sent} tasks, 0 lost, 0 duplicated, "
        f"{figures.refused} late attempts refused, 0 false deaths"
    )


def as_json(evidence: Evidence, figures: Figures, found: Sequence[Breach], *, held: bool) -> str:
    """Return the whole report as JSON, for programs."""
    lines = {
        kind: {**asdict(line), "median_s": line.median_s, "longest_s": line.longest_s}
        for kind, line in figures.lines.items()
    }
    whole: dict[str, Any] = {
        "seed": evidence.plan.seed,
        "seconds": evidence.plan.seconds,
        "held": held,
        "breaches": [asdict(breach) for breach in found],
        "skipped": list(evidence.timeline.skipped),
        "figures": {**asdict(figures), "lines": lines},
    }
    return json.dumps(whole, indent=1) + "\n"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
