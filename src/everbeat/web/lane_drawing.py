"""Draws the Gantt chart of an incident: one lane for each task, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from markupsafe import Markup
from msgspec import Struct

from everbeat.domain.pulse.incidents import Incident, RecoveryCourse
from everbeat.domain.task.states import TaskState
from everbeat.errors.wording import brief_duration, spoken_way
from everbeat.web.wording import shown_text

_BEFORE: Final = 12.0
"""How many percent of the axis show what happened before the last sign of life."""
_TICKS_UNTIL: Final = 0.95
_SHORTEST_S: Final = 1.0
_LONGEST_PART: Final = 0.35
"""How much of the axis the last bars get at most, as a part of the time between the death and the last rerun."""


class Axis(Struct, frozen=True):
    """The axis of an incident: the death is at 12 percent, and the last rerun before 90 percent."""

    at: datetime
    whole_s: float

    def place(self, moment: datetime) -> float:
        """Return where a moment is, in percent."""
        passed = (moment - self.at).total_seconds()
        return max(0.0, min(100.0, _BEFORE + (100 - _BEFORE) * passed / self.whole_s))

    def ticks(self) -> list[tuple[float, str]]:
        """Return at most five marks of the axis, each with its words."""
        step = next((each for each in _STEPS if self.whole_s / each <= 5), _STEPS[-1])
        marks = [(_BEFORE, "+0 s")]
        number = 1
        while number * step < _TICKS_UNTIL * self.whole_s and number <= 5:
            marks.append(
                (self.place(self.at + timedelta(seconds=number * step)), f"+{brief_duration(number * step)}")
            )
            number += 1
        return marks


_STEPS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 21_600, 43_200)


def axis_of(incident: Incident, *, now: datetime) -> Axis:
    """Return an axis that separates all moments of the recovery."""
    moments = [incident.noticed_at]
    for rerun in incident.reruns:
        moments += [rerun.decided_at, rerun.again_at or rerun.decided_at]
    last_s = max((moment - incident.at).total_seconds() for moment in moments)
    ends = [(rerun.ended_at or now) for rerun in incident.reruns if rerun.again_at is not None]
    until_s = max(((moment - incident.at).total_seconds() for moment in ends), default=last_s)
    whole_s = min(max(until_s, last_s), last_s * (1 + _LONGEST_PART))
    return Axis(incident.at, max(whole_s, last_s, _SHORTEST_S) * 1.04)


def lane_svg(rerun: RecoveryCourse, axis: Axis, *, now: datetime) -> Markup:
    """Return the lane of one task: code or claim, silence, notice, decision, rerun, and its end."""
    silent, noticed = axis.place(rerun.silent_at), axis.place(rerun.noticed_at)
    decided = axis.place(rerun.decided_at)
    began = (
        0.0 if rerun.started_at is None else axis.place(max(rerun.started_at, axis.at - timedelta(days=1)))
    )
    held = "k-run" if rerun.recovery.was is TaskState.RUNNING else "f-wait"
    drawn = [
        f'<svg role="img" aria-label="{shown_text(lane_in_words(rerun))}">',
        _bar(held, min(began, max(0.0, silent - 1)), silent),
        _line("l-dead", silent, noticed),
        _line("l-dead dash", noticed, decided),
    ]
    if rerun.again_at is not None:
        again = axis.place(rerun.again_at)
        until = axis.place(rerun.ended_at or now)
        drawn.append(_line("l-late dash", decided, again))
        drawn.append(_bar("k-run", again, max(until, again + 0.6)))
    elif rerun.recovery.action in ("requeue", "retry", "reschedule") and rerun.ended_at is None:
        drawn.append(_line("l-late dash", decided, 100.0))
    drawn.append(
        f'<rect class="k-dead" x="{noticed:.2f}%" y="8" width="8" height="8" transform="translate(-4 0)"/></svg>'
    )
    return Markup("".join(drawn))


def _bar(classes: str, from_: float, until: float) -> str:
    if until <= from_:
        return ""
    return f'<rect class="{classes}" opacity=".8" x="{from_:.2f}%" width="{until - from_:.2f}%" y="7" height="10" rx="2"/>'


def _line(classes: str, from_: float, until: float) -> str:
    return f'<line class="{classes}" x1="{from_:.2f}%" x2="{until:.2f}%" y1="12" y2="12"/>'


_AT_THE_END: Final = 90
"""From this place on, in percent, a label ends at its tick, or else it would leave the drawing."""
_LABEL: Final = 30
"""How many percent of the axis of a phone the last two labels need."""


def axis_svg(axis: Axis) -> Markup:
    """Return the axis below the lanes."""
    ticks = list(axis.ticks())
    if len(ticks) > 1 and ticks[-1][0] > _AT_THE_END and ticks[-1][0] - ticks[-2][0] < _LABEL:
        del ticks[-2]  # on a phone, the last label begins below it
    marks = "".join(
        f'<text class="{"e" if place > _AT_THE_END else "m"}" x="{place:.2f}%" y="14">{shown_text(words)}</text>'
        for place, words in ticks
    )
    return Markup(f'<svg aria-hidden="true">{marks}</svg>')


def lane_in_words(rerun: RecoveryCourse) -> str:
    """Return what the lane of a task shows, for readers who do not see it."""
    recovery = rerun.recovery
    noticed = brief_duration((rerun.noticed_at - rerun.silent_at).total_seconds())
    words = f"{recovery.name}: noticed by {spoken_way(recovery.noticed_by)} after {noticed}"
    if rerun.again_after_s is not None:
        words += f", running again after {brief_duration(rerun.again_after_s)}"
    return f"{words}; {end_in_words(rerun)[1]}"


def end_in_words(rerun: RecoveryCourse) -> tuple[str, str]:
    """Return the state that marks the end of a lane, and what became of the task."""
    recovery = rerun.recovery
    if recovery.became is None:
        return "CANCELLED", "its record was pruned"
    if recovery.became is TaskState.RUNNING:
        return "RUNNING", "runs again"
    if recovery.became in (TaskState.PENDING, TaskState.CLAIMED):
        return (
            ("retrying", "waits to run again")
            if recovery.ran_again_at is None
            else ("PENDING", "waits again")
        )
    return str(recovery.became), str(recovery.became).lower()


def order_of(reruns: Sequence[RecoveryCourse]) -> list[RecoveryCourse]:
    """Return the lanes in their order: those that wait first, then by name and number."""
    return sorted(reruns, key=lambda each: (each.again_at is not None, each.recovery.name, each.recovery.id))
