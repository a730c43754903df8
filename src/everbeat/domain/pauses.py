"""What is not claimed for now: the record of a pause."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

import msgspec

PauseKind: TypeAlias = Literal["task", "queue"]


class Pause(msgspec.Struct, frozen=True):
    """A task function or a queue of which nothing is claimed. The `brake` pauses by itself, and says after how many `crashes`.

    `already_paused`: the answer to another pause, which changed nothing: this one stood, and stands with its own reason.
    """

    kind: PauseKind
    name: str
    paused_at: datetime
    paused_by: str
    reason: str | None
    crashes: int | None
    already_paused: bool = False
