"""What a task has done for good, as its next attempt finds it: steps, sleeps, events, children.

What lives here: the records, and what is sent as a child. What may not: their names and codecs (`step_book`), who stores them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal, TypeAlias

from msgspec import Struct

StepKind: TypeAlias = Literal["step", "sleep", "event", "child"]
StepState: TypeAlias = Literal["OPEN", "DONE", "TIMED_OUT"]

RECORD_LIMIT_BYTES: Final = 1_048_576
"""The largest result of a step and the largest value of a signal, as JSON: a re-run reads all of them before it begins."""


class Recorded(Struct, frozen=True, array_like=True):
    """One record. `result` is JSON text; `left_ms` is what was left of a sleep when it was read."""

    kind: StepKind
    name: str
    state: StepState
    result: str | None
    left_ms: float | None


class NewChild(Struct, frozen=True, kw_only=True):
    """A task to send as a child of the running one; `args`, `policy` and `flags` are JSON text."""

    name: str
    queue: str
    priority: int
    args: str
    key: str | None = None
    policy: str | None = None
    flags: str | None = None
    good_until: datetime | None = None
    serial: str | None = None
