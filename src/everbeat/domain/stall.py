"""Code that lives but says nothing, and what is written down about it.

What lives here: the silence and its certificate. What may not: noticing it, what becomes of the attempt (`recovery`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from everbeat.domain.duration import spelled
from everbeat.domain.outcome import TASK_STALLED, TaskError


class Stall(Struct, frozen=True, kw_only=True):
    """A silence of running code, in seconds by its observer's clock, and how long its policy allows one to last.

    `loop_blocked`: nothing else on the event loop of its worker ran meanwhile either.
    """

    silent_s: float
    timeout_s: float
    loop_blocked: bool = False

    @property
    def cause(self) -> str:
        """One phrase for logs and records."""
        cause = f"no progress for {spelled(round(self.timeout_s, 3))}"
        return f"{cause}: the event loop of its worker is blocked" if self.loop_blocked else cause


class StallCertificate(Struct, frozen=True, kw_only=True):
    """Whose code fell silent, for how long, and what it last said; times by the database's clock.

    `last_progress_at` None: it never said anything. `poison`: the task may not run again because of its `crash_count`,
    which includes this stall if it was charged.
    """

    worker_id: str
    hostname: str | None
    pid: int | None
    cause: str
    silent_for_s: float
    stall_timeout_s: float
    started_at: datetime | None
    last_progress_at: datetime | None
    stage: str | None
    fraction: float | None
    message: str | None
    detected_at: datetime
    noticed_by: str
    crash_count: int
    poison: bool

    def error(self) -> TaskError:
        """The certificate as the error of its task."""
        return TaskError(TASK_STALLED, self.summary(), self.data())

    def data(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        values = asdict(self)
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in values.items()
        }

    def summary(self) -> str:
        """One or two sentences for people."""
        text = (
            f"The code lived but said nothing for {self.silent_for_s:.1f} s, of {spelled(self.stall_timeout_s)} allowed,"
            f" in worker {self.worker_id} (pid {self.pid} on {self.hostname})."
        )
        if self.last_progress_at is None:
            text += " It had reported no progress at all."
        else:
            text += f" Its last word was {self.stage!r}{'' if not self.message else f', {self.message!r}'}."
        if self.poison:
            text += f" The task is not run again: {self.crash_count} crashes and stalls are charged to it."
        return text
