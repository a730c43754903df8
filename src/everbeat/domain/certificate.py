"""The death certificate: what is written down about a death, for the people who look into it later.

What lives here: its fields and its words. What may not: noticing the death, and storing the certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from everbeat.domain.duration import spelled
from everbeat.domain.outcome import WORKER_CRASHED, TaskError


class DeathCertificate(Struct, frozen=True, kw_only=True):
    """Who died, of what, how and how fast it was noticed; times by the database's clock.

    `noticed_after_ms` counts from what `counted_from` names, None where that is not known. `poison`: the task may not run again because of its
    `crash_count` or `loss_count`, both including this death. `last_rss_bytes`: the memory of the process, as it was last
    seen. `last_progress`: what the code last reported. What is not known of a worker that was not registered is None.
    """

    worker_id: str
    hostname: str | None
    pid: int | None
    supervisor_id: str | None
    cause: str
    exit_code: int | None
    signal: int | None
    out_of_memory: bool
    started_at: datetime | None
    last_beat: datetime
    detected_at: datetime
    noticed_by: str
    noticed_after_ms: int | None
    crash_count: int
    loss_count: int
    poison: bool
    last_rss_bytes: int | None = None
    last_progress: Mapping[str, Any] | None = None

    def error(self) -> TaskError:
        """The certificate as the error of its task."""
        return TaskError(WORKER_CRASHED, self.message(), self.data())

    def data(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        values = asdict(self)
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in values.items()
        }

    def message(self) -> str:
        """One or two sentences for people."""
        verb = "was running this task" if self.started_at is not None else "had claimed this task"
        place = "not registered" if self.pid is None else f"pid {self.pid} on {self.hostname}"
        released = self.noticed_by == "operator"  # it may live
        event = "an operator released it" if released else f"it died: {self.cause}"
        text = f"Worker {self.worker_id} ({place}) {verb} when {event}."
        if self.noticed_after_ms is not None:
            after = spelled(round(self.noticed_after_ms / 1_000, 3))
            how = "That was" if released else f"It was noticed by {self.noticed_by.replace('_', ' ')}"
            text += f" {how} {after} after {counted_from(self.noticed_by)}."
        if self.poison:
            text += (
                f" The task is not run again: {_times(self.crash_count, 'process')} died under it alone,"
                f" {_times(self.loss_count, 'holder')} vanished."
            )
        return text


def counted_from(noticed_by: str) -> str:
    """Since when `noticed_after_ms` counts, by the way of noticing."""
    match noticed_by:
        case "child_exit":
            return "it ended"
        case "progress":
            return "the last sign of life of its code"
        case _:
            return "its last sign of life"


def _times(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"
