"""What is written for started code that did not end within the grace of its stopped worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from everbeat.domain.failure import error_to_json
from everbeat.domain.outcome import WORKER_STOPPED, TaskError
from everbeat.domain.policy import StoredPolicy
from everbeat.store.leases import Settlement
from everbeat.store.statement import Statement

_MESSAGE: Final = "The worker was told to stop, and the code did not end within the grace."


def stop_settlement(task_id: UUID, claim_id: UUID, *, policy: StoredPolicy) -> Settlement:
    """Return a release at no cost where the policy allows a second run, and a final failure otherwise."""
    if policy.retries_stop:
        return Settlement(id=task_id, claim_id=claim_id, outcome="HANDED_BACK")
    error = error_to_json(TaskError(WORKER_STOPPED, _MESSAGE))
    return Settlement(id=task_id, claim_id=claim_id, outcome="FAILED", error=error)


def left_by_hooks(task_ids: Sequence[UUID]) -> Statement[set[UUID]]:
    """Return those of these tasks whose present lease a recovery hook left as it is."""
    return Statement("task/left_by_hooks", {"ids": list(task_ids)}, lambda found: {row[0] for row in found})
