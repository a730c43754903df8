"""From a dead lease to the order that the recovery statement carries out.

What lives here: reading the facts, asking the domain, writing the certificate. What may not: statements that run.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from random import Random
from typing import Literal

from everbeat.domain.certificate import DeathCertificate
from everbeat.domain.failure import error_to_json
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.recovery import (
    Cancel,
    Charge,
    Fail,
    LeaseFacts,
    Leave,
    RecoveryRules,
    Requeue,
    Retry,
    decide,
)
from everbeat.domain.states import TaskState
from everbeat.errors import PayloadError
from everbeat.services.death import Death
from everbeat.store.leases import Lease, RecoveryOrder

_log = logging.getLogger("everbeat.services")


def order_for(
    lease: Lease, death: Death, *, rules: RecoveryRules, charge: Charge, random: Random, by_swap: bool = False
) -> RecoveryOrder | None:
    """What is to be done with one lease; None where it is left as it is.

    `by_swap`: only if the worker itself has not beaten since the lease was read.
    """
    facts = facts_of(lease)
    poison = False
    action: Literal["requeue", "retry", "fail", "cancel"]
    retry_in_ms: int | None = None
    match decide(facts, rules=rules, charge=charge, random=random):
        case Leave():
            return None
        case Requeue(delay_ms=retry_in_ms):
            action = "requeue"
        case Retry(delay_ms=retry_in_ms):
            action = "retry"
        case Cancel():
            action = "cancel"
        case Fail(poison=poison):
            action = "fail"
    certificate = _certificate(lease, death, facts=facts, charge=charge, poison=poison)
    outcomes: dict[Charge, Literal["CRASHED", "LOST"]] = {Charge.CRASH: "CRASHED", Charge.LOSS: "LOST"}
    return RecoveryOrder(
        id=lease.id,
        claim_id=lease.claim_id,
        state=lease.state,
        action=action,
        retry_in_ms=retry_in_ms,
        outcome=outcomes[charge] if facts.started else None,
        error=error_to_json(certificate.error()),
        cause=death.cause,
        last_beat_at=lease.last_beat_at,
        noticed_after_ms=certificate.noticed_after_ms,
        worker_seq=lease.worker_seq if by_swap else None,
    )


def facts_of(lease: Lease) -> LeaseFacts:
    """What the domain needs to know of a lease."""
    try:
        policy = StoredPolicy.from_json(lease.policy)
    except PayloadError as problem:
        # One damaged row must not keep its neighbours from being recovered: it is treated as one without a policy.
        _log.error("policy_unreadable task_id=%s problem=%s", lease.id, problem)
        policy = StoredPolicy()
    return LeaseFacts(
        started=lease.state is TaskState.RUNNING,
        policy=policy,
        retry_count=lease.retry_count,
        crash_count=lease.crash_count,
        loss_count=lease.loss_count,
        cancel_requested=lease.cancel_requested,
    )


def _certificate(
    lease: Lease, death: Death, *, facts: LeaseFacts, charge: Charge, poison: bool
) -> DeathCertificate:
    after_ms = lease.silent_ms if death.noticed_after_ms is None else death.noticed_after_ms
    return DeathCertificate(
        worker_id=lease.worker_id,
        hostname=lease.hostname,
        pid=lease.pid if death.pid is None else death.pid,
        supervisor_id=lease.supervisor_id,
        cause=death.cause,
        exit_code=death.exit_code,
        signal=death.signal,
        out_of_memory=death.out_of_memory,
        started_at=lease.started_at,
        last_beat=lease.last_beat_at,
        # The database's now at the moment in which the lease was read.
        detected_at=lease.last_beat_at + timedelta(milliseconds=lease.silent_ms),
        noticed_by=death.noticed_by,
        noticed_after_ms=after_ms,
        crash_count=facts.crash_count + (facts.started and charge is Charge.CRASH),
        loss_count=facts.loss_count + (facts.started and charge is Charge.LOSS),
        poison=poison,
    )
