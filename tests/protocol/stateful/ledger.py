"""The expected state of every task, kept beside the database and compared with it after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from everbeat.store.claims import Claimed

TERMINAL = ("COMPLETED", "FAILED", "CANCELLED", "EXPIRED")
Policy = Literal["fails", "crash_again", "listed"]
POLICIES: dict[Policy, bytes] = {
    "fails": b'{"max_crashes": 2, "max_losses": 2}',
    "crash_again": b'{"on_crash": "retry", "max_crashes": 2, "max_losses": 2}',
    "listed": b'{"max_retries": 2, "intervals": [0], "retry_for": ["WORKER_CRASHED"], "max_crashes": 9, "max_losses": 9}',
}
CAPS: dict[Policy, tuple[int, int]] = {"fails": (2, 2), "crash_again": (2, 2), "listed": (9, 9)}


@dataclass(eq=False)
class Grant:
    """One claim in the memory of its worker, kept forever: a worker that lost it can still act on it."""

    task: UUID
    claimed: Claimed
    worker_id: str
    call: UUID
    phase: Literal["claimed", "running"] = "claimed"
    done: str | None = None

    @property
    def lease(self) -> tuple[UUID, UUID]:
        """Return (task id, claim_id)."""
        return self.task, self.claimed.claim_id


@dataclass
class Entry:
    """The expected state of one task. `grant`: the claim that holds it."""

    id: UUID
    policy: Policy
    serial: str | None
    state: str = "PENDING"
    grant: Grant | None = None
    fence: int = 0
    attempt: int = 0
    retries: int = 0
    crashes: int = 0
    losses: int = 0
    cancel: bool = False
    alone: bool = False
    is_late: bool = False

    def shown(self) -> tuple[object, ...]:
        """Return the values that the database must show."""
        holder = None if self.grant is None else (self.grant.claimed.claim_id, self.grant.worker_id)
        return (
            self.state, holder, self.fence, self.attempt, self.retries, self.crashes, self.losses, self.cancel,
        )  # fmt: skip

    def free(self, state: str) -> None:
        """End the lease."""
        self.state, self.grant = state, None

    def recovered(self, charge: Literal["crash", "loss"]) -> None:
        """Recover the task after the death of its holder."""
        if self.state == "CLAIMED":
            self.free("PENDING")
            return
        self.crashes += charge == "crash"
        self.losses += charge == "loss"
        most_crashes, most_losses = CAPS[self.policy]
        is_over = self.crashes >= most_crashes if charge == "crash" else self.losses >= most_losses
        again = self.policy == "crash_again" or (self.policy == "listed" and self.retries < 2)
        if self.cancel:
            self.free("CANCELLED")
        elif is_over or not again or self.is_late:
            self.free("FAILED")
        else:
            self.free("PENDING")
            self.retries += 1

    def settled(self, outcome: str, *, again: bool) -> str:
        """Settle the task after its code ended; return its state."""
        if outcome == "COMPLETED":
            self.free("COMPLETED")
        elif self.cancel or outcome == "CANCELLED":
            self.free("CANCELLED")
        elif outcome == "RELEASED":
            self.free("PENDING")
        elif again and not self.is_late:
            self.free("PENDING")
            self.retries += 1
        else:
            self.free("FAILED")
        return self.state

    def retried(self) -> None:
        """Apply an operator's retry: fresh retries."""
        self.free("PENDING")
        self.retries = self.crashes = self.losses = 0
        self.cancel = self.is_late = False


@dataclass
class Ledger:
    """All tasks, and every claim that ever existed."""

    entries: dict[UUID, Entry] = field(default_factory=dict)
    grants: list[Grant] = field(default_factory=list)

    def holds(self, grant: Grant) -> bool:
        """Whether exactly this claim holds its task now."""
        return self.entries[grant.task].grant is grant

    def claimed(self, claimed: Claimed, worker_id: str, call: UUID) -> Grant:
        """Record that a claim took a task."""
        entry = self.entries[claimed.id]
        grant = Grant(claimed.id, claimed, worker_id, call)
        self.grants.append(grant)
        entry.state, entry.grant, entry.fence, entry.alone = "CLAIMED", grant, entry.fence + 1, False
        return grant

    def retried(self, entry: Entry) -> None:
        """Apply an operator's retry: fresh retries, and the end of its line."""
        entry.retried()
        self.entries[entry.id] = self.entries.pop(entry.id)

    def eligible(self) -> list[Entry]:
        """Return the tasks that a claim can take: of a serial line only its first live task."""
        live = [entry for entry in self.entries.values() if entry.state not in TERMINAL]
        heads = {entry.serial: entry for entry in reversed(live) if entry.serial is not None}
        return [
            entry
            for entry in live
            if entry.state == "PENDING"
            and not entry.is_late
            and (entry.serial is None or heads[entry.serial] is entry)
        ]

    def held_by(self, worker_id: str) -> list[Entry]:
        """Return the tasks that a worker holds."""
        return [
            each
            for each in self.entries.values()
            if each.grant is not None and each.grant.worker_id == worker_id
        ]
