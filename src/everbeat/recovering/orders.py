"""Descriptions of deaths, and the orders that the recovery statement applies to lost leases."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final, Literal, Self
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from everbeat.domain.inspection import Progress
from everbeat.domain.recovery.decision import (
    Blame,
    Charge,
    DeathCertificate,
    EndCancelled,
    Fail,
    LeaseFacts,
    Leave,
    RecoveryRules,
    Requeue,
    Rerun,
    Retry,
    Stall,
    StallCertificate,
    charge_of_stall,
    decide_as_told,
)
from everbeat.domain.recovery.hooks import (
    DEFAULT,
    Default,
    HookReply,
    InterruptionReason,
    NoAnswer,
    RecoveryContext,
)
from everbeat.domain.settings.units import When, to_milliseconds
from everbeat.domain.task.outcome import error_to_json
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.states import TaskState
from everbeat.errors import PayloadError
from everbeat.errors.wording import storable
from everbeat.runtime.processes import KILLED_BY_US, OWN_EXITS, ExitReport
from everbeat.store.leases import Lease, Recovered, RecoveryOrder
from everbeat.store.refusals import divided, is_refused_row, is_refused_value

CHILD_EXIT: Final = "child_exit"
SESSION: Final = "session"
AGE: Final = "age"
STARTUP: Final = "startup"
SWEEP: Final = "sweep"
OPERATOR: Final = "operator"
PROGRESS: Final = "progress"
_WAYS: Final = frozenset({CHILD_EXIT, SESSION, AGE, STARTUP, SWEEP, OPERATOR})
_OWN_CAUSES: Final = frozenset(ExitReport(pid=0, exit_code=code).cause for code in OWN_EXITS)
_SIGNALS_OF_CODE: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT})


class Death(Struct, frozen=True, kw_only=True):
    """A death, and how it was detected.

    `noticed_after_ms` counts from the last sign of life, or for a child exit from the exit itself. `None` means from the last heartbeat
    of each lease. For a child exit, `None` means that the time was not measured.

    `pid` is the process that died, if it is not the worker itself. `rss_bytes` is the process's peak memory usage. `hanged`: whether the
    process was killed because its event loop was blocked. `is_ours`: whether everbeat terminated the process for a reason unrelated to
    its code.
    """

    noticed_by: str
    cause: str
    noticed_after_ms: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    pid: int | None = None
    rss_bytes: int | None = None
    hanged: bool = False
    is_ours: bool = False
    reason: InterruptionReason = "worker_crashed"
    stall: Stall | None = None

    @classmethod
    def by_stall(cls, stall: Stall) -> Self:
        """Return the death of an attempt whose code is still running but reported nothing within its `stall_timeout`."""
        return cls(
            noticed_by=PROGRESS,
            cause=stall.cause,
            noticed_after_ms=round(stall.silent_s * 1_000),
            reason="task_stalled",
            stall=stall,
        )

    @classmethod
    def by_exit(cls, report: ExitReport, *, after_s: float, pid: int | None = None) -> Self:
        """Return the death of a process whose exit its parent process detected. The exit happened `after_s` seconds ago."""
        return cls(
            noticed_by=CHILD_EXIT,
            cause=report.cause,
            noticed_after_ms=round(after_s * 1_000),
            exit_code=report.exit_code,
            signal=report.signal_number,
            out_of_memory=report.out_of_memory,
            pid=pid,
            rss_bytes=report.max_rss_bytes,
            hanged=_stood_still(report.cause),
            is_ours=is_our_doing(report.cause),
        )

    @classmethod
    def on_record(cls, lease: Lease) -> Self:
        """Return the death that is recorded in the row of an ended worker."""
        noticed_by = lease.ended_how if lease.ended_how in _WAYS else SWEEP
        after_ms = None
        if lease.ended_at is not None and noticed_by not in (CHILD_EXIT, SWEEP):
            after_ms = round((lease.ended_at - lease.last_beat_at).total_seconds() * 1_000)
        cause = lease.ended_cause or f"ended ({lease.ended_how or 'how is not recorded'}) without settling"
        return cls(
            noticed_by=noticed_by,
            cause=cause,
            noticed_after_ms=after_ms,
            exit_code=lease.exit_code,
            signal=lease.signal,
            out_of_memory="out of memory" in cause,
            hanged=_stood_still(cause),
            is_ours=is_our_doing(cause),
        )

    def after_ms(self, lease: Lease) -> int | None:
        """Return how soon the death was detected, in milliseconds, or None if unknown."""
        if self.noticed_after_ms is None and self.noticed_by != CHILD_EXIT:
            return lease.silent_ms
        return self.noticed_after_ms

    @property
    def blame(self) -> Blame:
        """Return whether the task's code or its process caused the death, as far as this can be determined."""
        of_the_code = not self.is_ours and (
            self.signal in _SIGNALS_OF_CODE or self.exit_code is not None or self.out_of_memory or self.hanged
        )
        return Blame(
            of_the_code=of_the_code,
            of_the_process=self.noticed_by == CHILD_EXIT and not is_killed_by_us(self.cause),
        )


def _stood_still(cause: str) -> bool:
    return "stood still" in cause


def is_our_doing(cause: str) -> bool:
    """Return whether this cause of death means that everbeat terminated the process for a reason unrelated to its code."""
    return cause in _OWN_CAUSES or is_killed_by_us(cause)


def is_killed_by_us(cause: str) -> bool:
    """Return whether this cause of death means that everbeat sent SIGKILL for a reason unrelated to the code.

    User code cannot imitate this cause, but it can exit repeatedly with one of everbeat's exit codes.
    """
    return cause.endswith(KILLED_BY_US) and not _stood_still(cause)


class LostLease(Struct, frozen=True):
    """A lease, the death of its holder, and the charge against the task if its code had started."""

    lease: Lease
    death: Death
    charge: Charge = Charge.LOSS


_log = logging.getLogger("everbeat.recovering")
_OUTCOMES: Final[dict[Charge | None, Literal["CRASHED", "LOST", "FAILED"]]] = {
    Charge.CRASH: "CRASHED",
    Charge.LOSS: "LOST",
    None: "FAILED",
}
_LONGEST_PROBLEM: Final = 300
_LONGEST_REFUSAL: Final = 500
_TRIES: Final = 3
_MOST_KNOWN: Final = 10_000
_BROKEN: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
_decode_progress = msgspec.json.Decoder(Progress).decode


def order_for(
    lost: LostLease,
    *,
    rules: RecoveryRules,
    random: Random,
    unless_beaten: bool = False,
    answer: HookReply = DEFAULT,
    process_deaths: int = 0,
) -> RecoveryOrder | None:
    """Return the recovery order for one lease, or None if the lease is left unchanged.

    If `unless_beaten` is true, the order applies only if the worker itself has sent no heartbeat since the lease was read. `answer` is a
    recovery hook's reply. `process_deaths` is how many processes have died before while running the task.
    """
    lease, death = lost.lease, lost.death
    facts = replace(facts_of(lease), stalled=death.stall is not None, process_deaths=process_deaths)
    charge = charge_of_stall(facts, charge=lost.charge) if facts.stalled else lost.charge
    changes: dict[str, Any]
    poison = False
    decision = decide_as_told(answer, facts, rules=rules, charge=charge, random=random, blame=death.blame)
    match decision:
        case Leave():
            return None
        case Requeue(delay_ms=delay_ms):
            changes = {"action": "requeue", "retry_in_ms": delay_ms}
        case Retry(delay_ms=delay_ms, suspect=suspect):
            changes = {"action": "retry", "retry_in_ms": delay_ms, "suspect": suspect}
        case Rerun(run_at=run_at, attempts=attempts, suspect=suspect):
            changes = {"action": "reschedule", "retry_count": attempts, "suspect": suspect} | _moment(run_at)
        case EndCancelled():
            changes = {"action": "cancel"}
        case Fail(poison=poison):
            changes = {"action": "fail"}
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
        worker_seq=lease.worker_seq if unless_beaten else None,
        hook=_stored(answer),
        is_poison=poison,
        **{"retry_in_ms": None} | changes,
    )


def _stored(answer: HookReply) -> str | None:
    """Return the text to store for a hook's reply: its type, or why the hook gave no answer. Return None for the default reply."""
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
    """Return the facts about a lease on which the recovery decision is based."""
    try:
        policy = StoredPolicy.from_json(lease.policy)
    except PayloadError as problem:
        # A damaged row must not block the recovery of other rows. It is treated as a row without a policy.
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


def context_of(lost: LostLease, *, sweeping_worker_id: str) -> RecoveryContext:
    """Return the context of a lease that is passed to recovery hooks."""
    lease, death = lost.lease, lost.death
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
    """Return the flags of a leased task, or an empty dict if they cannot be read."""
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
        # This is the database's time when the lease was read.
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


class RefusedOrders:
    """Applies recovery orders, and remembers the orders that PostgreSQL rejects.

    `left` contains the claim ids of rejected orders that are not retried soon.
    """

    def __init__(self) -> None:
        self.left: set[UUID] = set()
        self._refusals: dict[UUID, int] = {}

    async def recover(
        self,
        orders: Sequence[RecoveryOrder],
        recover: Callable[[Sequence[RecoveryOrder]], Awaitable[list[Recovered]]],
    ) -> list[Recovered]:
        """Apply the orders and return the recovered tasks.

        If PostgreSQL rejects an order because of a value, the order is changed to "fail", because a finished row is in fewer indexes. If
        the changed order is also rejected, the lease is left. Other errors, such as an internal server error, might be temporary, so
        such a lease is left only after three rejections.
        """

        async def write(some: Sequence[RecoveryOrder]) -> list[Recovered]:
            landed = await recover(some)
            for one in some if self._refusals else ():
                self._refusals.pop(one.claim_id, None)
                self.left.discard(one.claim_id)
            return landed

        async def refused(order: RecoveryOrder, problem: Exception) -> list[Recovered]:
            if is_refused_value(problem) and order.action != "fail":
                _log.error(
                    "recovery_refused task_id=%s problem=%s", order.id, str(problem)[:_LONGEST_REFUSAL]
                )
                failed = replace(order, action="fail", retry_in_ms=None, run_at=None, suspect=False)
                return await divided([failed], write, refused, is_refused=is_refused_row)
            self._note(order, problem)
            return []

        return await divided(orders, write, refused, is_refused=is_refused_row)

    def _note(self, order: RecoveryOrder, problem: Exception) -> None:
        if len(self._refusals) >= _MOST_KNOWN:
            self._refusals.clear()
            self.left.clear()
        tries = self._refusals[order.claim_id] = self._refusals.get(order.claim_id, 0) + 1
        if is_refused_value(problem) or tries >= _TRIES:
            if order.claim_id not in self.left:
                _log.error(
                    "recovery_blocked task_id=%s problem=%r fix=%r",
                    order.id,
                    str(problem)[:_LONGEST_REFUSAL],
                    "repair or delete this row of the tasks table; everbeat doctor lists bad values (BAD_ROWS)",
                )
            self.left.add(order.claim_id)
