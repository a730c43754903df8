"""From a dead lease to the order that the recovery statement carries out.

What lives here: reading the facts, asking the domain, writing the certificate. What may not: statements that run.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from everbeat.domain.certificate import DeathCertificate
from everbeat.domain.duration import When, to_milliseconds
from everbeat.domain.failure import error_to_json
from everbeat.domain.hook_decision import Rerun, decide_as_told
from everbeat.domain.hooks import DEFAULT, Default, HookReply, NoAnswer, RecoveryContext
from everbeat.domain.inspection import Progress
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
    charge_of_stall,
)
from everbeat.domain.stall import Stall, StallCertificate
from everbeat.domain.states import TaskState
from everbeat.domain.stored_text import storable
from everbeat.errors import PayloadError
from everbeat.services.death import PROGRESS, Death
from everbeat.store.leases import Lease, RecoveryOrder

_log = logging.getLogger("everbeat.services")
_OUTCOMES: Final[dict[Charge | None, Literal["CRASHED", "LOST", "FAILED"]]] = {
    Charge.CRASH: "CRASHED",
    Charge.LOSS: "LOST",
    None: "FAILED",
}
_LONGEST_PROBLEM: Final = 300
_BROKEN: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
_decode_progress = msgspec.json.Decoder(Progress).decode


def order_for(
    lease: Lease,
    death: Death,
    *,
    rules: RecoveryRules,
    charge: Charge | None,
    random: Random,
    by_swap: bool = False,
    answer: HookReply = DEFAULT,
    process_deaths: int = 0,
) -> RecoveryOrder | None:
    """What is to be done with one lease; None where it is left as it is.

    `by_swap`: only if the worker itself has not beaten since the lease was read. `answer`: of a recovery hook. `process_deaths`: how
    many processes ended under its code before.
    """
    facts = replace(facts_of(lease), stalled=death.stall is not None, process_deaths=process_deaths)
    charge = charge_of_stall(facts, charge=charge) if facts.stalled and charge else charge
    when: dict[str, Any] = {"retry_in_ms": None}
    poison = False
    decision = decide_as_told(answer, facts, rules=rules, charge=charge, random=random, blame=death.blame)
    match decision:
        case Leave():
            return None
        case Requeue(delay_ms=delay_ms):
            when |= {"action": "requeue", "retry_in_ms": delay_ms}
        case Retry(delay_ms=delay_ms, suspect=suspect):
            when |= {"action": "retry", "retry_in_ms": delay_ms, "suspect": suspect}
        case Rerun(run_at=run_at, attempts=attempts, suspect=suspect):
            when |= {"action": "reschedule", "retry_count": attempts, "suspect": suspect} | _moment(run_at)
        case Cancel():
            when |= {"action": "cancel"}
        case Fail(poison=poison):
            when |= {"action": "fail"}
    certificate = _certificate(lease, death, facts=facts, charge=charge, poison=poison)
    stalled = _stall_certificate(lease, death.stall, facts=facts, charge=charge, poison=poison)
    return RecoveryOrder(
        id=lease.id,
        claim_id=lease.claim_id,
        state=lease.state,
        outcome=_OUTCOMES[charge] if facts.started else None,
        error=error_to_json((stalled or certificate).error()),
        cause=death.cause,
        last_beat_at=lease.last_beat_at,
        noticed_after_ms=certificate.noticed_after_ms,
        worker_seq=lease.worker_seq if by_swap else None,
        hook=_told(answer),
        **when,
    )


def _told(answer: HookReply) -> str | None:
    """What is kept of a hook's answer: its name, or why there is none."""
    match answer:
        case Default():
            return None
        case NoAnswer(problem=problem):
            return storable(f"no answer: {problem}", limit=_LONGEST_PROBLEM)
        case _:
            return type(answer).__name__


def _moment(run_at: When) -> dict[str, Any]:
    match run_at:
        case datetime():
            return {"run_at": run_at}
        case timedelta():
            return {"retry_in_ms": to_milliseconds(run_at, subject="Reschedule.run_at")}


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
        alone=lease.alone,
    )


def context_of(lease: Lease, death: Death, *, sweeping_worker_id: str) -> RecoveryContext:
    """The lease as a recovery hook sees it."""
    return RecoveryContext(
        task_id=lease.id,
        name=lease.name,
        queue=lease.queue,
        state=lease.state,
        attempt=lease.attempt,
        retry_count=lease.retry_count,
        crash_count=lease.crash_count,
        loss_count=lease.loss_count,
        flags=flags_of(lease),
        progress=_progress(lease),
        sweeping_worker_id=sweeping_worker_id,
        previous_worker_id=lease.worker_id,
        hostname=lease.hostname,
        reason=death.reason,
        cause=death.cause,
        noticed_by=death.noticed_by,
    )


def flags_of(lease: Lease) -> dict[str, bool]:
    """The flags of a task; none where they cannot be read."""
    if lease.flags is None:
        return {}
    try:
        stored = msgspec.json.decode(lease.flags, type=dict[str, object])
    except _BROKEN:
        _log.error("flags_unreadable task_id=%s", lease.id)
        return {}
    return {name: bool(value) for name, value in stored.items()}


def _progress(lease: Lease) -> Progress | None:
    if lease.progress is None:
        return None
    try:
        return _decode_progress(lease.progress)
    except _BROKEN:
        _log.error("progress_unreadable task_id=%s", lease.id)
        return None


def _certificate(
    lease: Lease, death: Death, *, facts: LeaseFacts, charge: Charge | None, poison: bool
) -> DeathCertificate:
    progress = _progress(lease)
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
        noticed_after_ms=death.after_ms(lease),
        crash_count=facts.crash_count + (facts.started and charge is Charge.CRASH),
        loss_count=facts.loss_count + (facts.started and charge is Charge.LOSS),
        poison=poison,
        last_rss_bytes=lease.last_rss_bytes if death.rss_bytes is None else death.rss_bytes,
        last_progress=None if progress is None else msgspec.to_builtins(progress),
    )


def _stall_certificate(
    lease: Lease, stall: Stall | None, *, facts: LeaseFacts, charge: Charge | None, poison: bool
) -> StallCertificate | None:
    if stall is None:
        return None
    last = _progress(lease)
    return StallCertificate(
        worker_id=lease.worker_id,
        hostname=lease.hostname,
        pid=lease.pid,
        cause=stall.cause,
        silent_for_s=round(stall.silent_s, 3),
        stall_timeout_s=stall.timeout_s,
        started_at=lease.started_at,
        last_progress_at=None if last is None else lease.progress_at,
        stage=None if last is None else last.stage,
        fraction=None if last is None else last.fraction,
        message=None if last is None else last.message,
        detected_at=lease.last_beat_at + timedelta(milliseconds=lease.silent_ms),
        noticed_by=PROGRESS,
        crash_count=facts.crash_count + (charge is Charge.CRASH),
        poison=poison,
    )
