"""The attempts of a task as lanes on one axis of time, with the beats of their holders, their steps and their last progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from msgspec import Struct, structs

from everbeat.domain.inspection import HeartbeatInfo, Progress, TaskInfo
from everbeat.errors.wording import brief_duration
from everbeat.store.recorded import RecordedStep

_LONGEST_LANES: Final = 50
_MOST_MARKS: Final = 100
"""How many steps a lane shows. The table and the list of steps show all that were read."""
_TONES: Final = {
    "COMPLETED": "live",
    "RUNNING": "run",
    "CLAIMED": "wait",
    "SUSPENDED": "sleep",
    "RELEASED": "wait",
    "CANCELLED": "wait",
}
_LOW, _HIGH = 24.0, 10.0
"""The heights of 0 and 100 percent in a lane."""
_KINDS: Final = {"step": "step", "sleep": "sleep", "event": "wait for the event", "child": "child"}


class StepMark(Struct, frozen=True, kw_only=True):
    """A step, sleep, wait or child on a lane, at `left` percent of the axis. `told` describes it, with the duration that is known."""

    shape: Literal["done", "open", "late"]
    left: float
    at: datetime
    told: str


class ProgressMark(Struct, frozen=True, kw_only=True):
    """The last progress of an attempt: its place, its share as a height and as text (None if the code reported none), and its words."""

    left: float
    top: float
    share: str | None
    at: datetime
    told: str


class AttemptLane(Struct, frozen=True, kw_only=True):
    """One attempt on the common time axis. `left`, `width` and `beats` are percentages of the axis. `not_drawn` counts earlier steps."""

    number: int
    worker_id: str
    outcome: str
    tone: str
    started_at: datetime
    ended_at: datetime
    left: float
    width: float
    beats: Sequence[float]
    code: str | None
    message: str
    is_open: bool
    steps: Sequence[StepMark] = ()
    not_drawn: int = 0
    progress: ProgressMark | None = None

    @property
    def seconds(self) -> float:
        """Return how long the attempt ran."""
        return (self.ended_at - self.started_at).total_seconds()

    @property
    def told(self) -> str:
        """Return what the lane shows, for readers who do not see it."""
        parts = [f"Attempt {self.number}: {self.outcome}, {brief_duration(self.seconds)}"]
        if count := len(self.steps) + self.not_drawn:
            parts.append(f"{count} recorded")
        if self.progress is not None:
            parts.append(f"last progress {self.progress.told}")
        return "; ".join(parts)


class AxisMark(Struct, frozen=True):
    """A moment on the axis, as a percentage and as a time."""

    left: float
    at: datetime


class LaneEvent(Struct, frozen=True):
    """A row of the table that has the same content as the lanes."""

    at: datetime
    attempt: int
    told: str


class _Axis(Struct, frozen=True):
    first: datetime
    whole_s: float

    def place(self, moment: datetime) -> float:
        passed = (moment - self.first).total_seconds() / self.whole_s
        return round(min(max(passed, 0.0), 1.0) * 92 + 2, 2)

    def marks(self) -> list[AxisMark]:
        moments = [self.first + timedelta(seconds=self.whole_s * part / 4) for part in range(5)]
        return [AxisMark(self.place(each), each) for each in moments]


def lanes_of(
    task: TaskInfo, beats: Sequence[HeartbeatInfo], steps: Sequence[RecordedStep], *, now: datetime
) -> tuple[list[AttemptLane], list[AxisMark]]:
    """Return the attempts on one time axis, which begins with the first of them and ends with the last, or now."""
    lanes = _plain_lanes(task, now=now)
    if not lanes:
        return [], []
    first = min(each.started_at for each in lanes)
    whole_s = (max(each.ended_at for each in lanes) - first).total_seconds()
    axis = _Axis(first, max(whole_s, 0.001))
    return [_placed(each, axis, task, beats, steps) for each in lanes], axis.marks()


def _plain_lanes(task: TaskInfo, *, now: datetime) -> list[AttemptLane]:
    """Return the lanes without places on the axis."""
    lanes = [
        AttemptLane(
            number=each.attempt, worker_id=each.worker_id, outcome=each.outcome, tone=_TONES.get(each.outcome, "dead"),
            started_at=each.started_at, ended_at=each.ended_at, left=0, width=0, beats=(), is_open=False,
            code=None if each.error is None else each.error.code, message="" if each.error is None else each.error.message,
        )
        for each in task.attempts[-_LONGEST_LANES:]
    ]  # fmt: skip
    open_since = task.started_at or task.claimed_at if task.claimed else None
    if open_since is not None:
        lanes.append(
            AttemptLane(
                number=task.attempt, worker_id=task.claimed_by_worker_id or "unknown", outcome=task.state.value,
                tone=_TONES[task.state.value], started_at=open_since, ended_at=max(now, open_since), left=0, width=0, beats=(),
                is_open=True, code=None, message="",
            )
        )  # fmt: skip
    return lanes


def _placed(
    lane: AttemptLane,
    axis: _Axis,
    task: TaskInfo,
    beats: Sequence[HeartbeatInfo],
    steps: Sequence[RecordedStep],
) -> AttemptLane:
    own = [each for each in steps if each.attempt == lane.number]
    marks = _step_marks(own, lane, axis)
    left = axis.place(lane.started_at)
    return structs.replace(
        lane,
        left=left,
        width=round(max(axis.place(lane.ended_at) - left, 0.4), 2),
        beats=[
            axis.place(each.sent_at) for each in beats if lane.started_at <= each.sent_at <= lane.ended_at
        ],
        steps=marks[-_MOST_MARKS:],
        not_drawn=max(len(marks) - _MOST_MARKS, 0),
        progress=_progress_mark(task, lane, axis),
    )


def _step_marks(steps: Sequence[RecordedStep], lane: AttemptLane, axis: _Axis) -> list[StepMark]:
    """Return the marks of an attempt's steps. A step is stored when it is done, so only the time since the mark before it is known."""
    marks: list[StepMark] = []
    before = lane.started_at
    for each in sorted(steps, key=lambda one: (one.begun_at, one.name)):
        kind = f"{_KINDS[each.kind]} {each.name}"
        shape: Literal["done", "open", "late"] = "late" if each.state == "TIMED_OUT" else "open"
        if each.kind == "step":
            shape = "done"
            after = brief_duration(max((each.recorded_at - before).total_seconds(), 0))
            since = "the start" if not marks else "the mark before"
            told = f"{kind} done, {after} after {since}"
        else:
            told = f"{kind} {_wait_in_words(each)}"
        marks.append(StepMark(shape=shape, left=axis.place(each.begun_at), at=each.begun_at, told=told))
        before = each.begun_at
    return marks


def _wait_in_words(step: RecordedStep) -> str:
    if step.kind == "sleep" and step.due_at is not None:
        return f"for {brief_duration(max((step.due_at - step.begun_at).total_seconds(), 0))}"
    took = brief_duration(max((step.recorded_at - step.begun_at).total_seconds(), 0))
    return {"OPEN": "begun", "TIMED_OUT": f"timed out after {took}"}.get(step.state, f"ended after {took}")


def _progress_mark(task: TaskInfo, lane: AttemptLane, axis: _Axis) -> ProgressMark | None:
    """Return the last progress of an attempt: the task has that of its latest attempt, and certificates have those of dead ones."""
    found, at = _last_progress(task, lane)
    if found is None or at is None:
        return None
    at = min(max(at, lane.started_at), lane.ended_at)
    share = None if found.fraction is None else f"{min(max(found.fraction, 0.0), 1.0):.0%}".replace("%", " %")
    height = 0.0 if found.fraction is None else min(max(found.fraction, 0.0), 1.0)
    told = " ".join(each for each in (found.stage, share, found.message) if each)
    return ProgressMark(
        left=axis.place(at), top=round(_LOW - (_LOW - _HIGH) * height, 1), share=share, at=at, told=told
    )


def _last_progress(task: TaskInfo, lane: AttemptLane) -> tuple[Progress | None, datetime | None]:
    if lane.number == task.attempt and task.progress is not None:
        return task.progress, task.progress_at
    for recovery in task.recoveries:
        if recovery.attempt == lane.number and (stored := _stored_progress(recovery.certificate)) is not None:
            return _progress_in(stored), lane.ended_at  # its own time is not stored
    return None, None


def _stored_progress(certificate: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the progress in a certificate of a death or of a stall, which is stored as the error of the attempt."""
    death = None if certificate is None else certificate.get("data")
    if not isinstance(death, Mapping):  # hidden, or a lease without an attempt
        return None
    found = death.get("last_progress", death)
    return found if isinstance(found, Mapping) and found.get("stage") is not None else None


def _progress_in(stored: Mapping[str, Any]) -> Progress:
    fraction = stored.get("fraction")
    return Progress(
        stage=str(stored["stage"]),
        fraction=float(fraction) if isinstance(fraction, int | float) else None,
        message=str(stored.get("message") or ""),
    )


def events_of(lanes: Sequence[AttemptLane]) -> list[LaneEvent]:
    """Return all that the lanes show, in the order of time. The beats are left out: they say only that the holder lived."""
    found = []
    for lane in lanes:
        found.append(LaneEvent(lane.started_at, lane.number, f"started on {lane.worker_id}"))
        found += [LaneEvent(each.at, lane.number, each.told) for each in lane.steps]
        if lane.progress is not None:
            found.append(LaneEvent(lane.progress.at, lane.number, f"last progress: {lane.progress.told}"))
        if not lane.is_open:
            ended = f"{lane.outcome.lower()} after {brief_duration(lane.seconds)}"
            found.append(
                LaneEvent(lane.ended_at, lane.number, f"{ended}{f', {lane.code}' if lane.code else ''}")
            )
    return sorted(found, key=lambda each: (each.at, each.attempt))
