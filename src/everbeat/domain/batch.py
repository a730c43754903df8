"""Batches as they are shown to users, and the callbacks that are stored with them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.domain.settings.checks import public

BatchState: TypeAlias = Literal["OPEN", "SEALED", "ENDED"]


@public
class BatchInfo(Struct, frozen=True, kw_only=True):
    """A batch and its progress.

    `total` is the number of its tasks. `waiting` counts those that have not started or wait for a retry, and `running` those whose code is
    running. The other numbers count ended tasks by their state. `on_end_id` and `on_success_id` are the ids of the callbacks, which are sent
    when the batch ends. `problem` says why PostgreSQL refused to store the callbacks.
    """

    id: UUID
    name: str
    total: int
    waiting: int
    running: int
    completed: int
    failed: int
    cancelled: int
    expired: int
    created_at: datetime
    sealed_at: datetime | None = None
    cancelled_at: datetime | None = None
    ended_at: datetime | None = None
    on_end_id: UUID | None = None
    on_success_id: UUID | None = None
    problem: str | None = None

    @property
    def sealed(self) -> bool:
        """Return whether the batch is sealed, so that only its own running tasks can add tasks."""
        return self.sealed_at is not None

    @property
    def ended(self) -> bool:
        """Return whether the batch is sealed and all its tasks have ended."""
        return self.ended_at is not None

    @property
    def state(self) -> BatchState:
        """Return OPEN, SEALED or ENDED."""
        return "ENDED" if self.ended else "SEALED" if self.sealed else "OPEN"


class BatchCallback(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task to send when a batch ends, as it is stored with the batch. `args`, `policy` and `flags` are JSON text."""

    id: UUID
    task: str
    queue: str
    priority: int
    args: str
    policy: str | None = None
    flags: str | None = None
    good_until: datetime | None = None
    serial: str | None = None
    gates: tuple[str, ...] | None = None
    costs: tuple[int, ...] | None = None
    labels: dict[str, str] | None = None


class ForgottenBatches(Struct, frozen=True):
    """The number of batches that have been open for more than a day, and the id and name of the first one."""

    number: int
    first: UUID
    name: str
