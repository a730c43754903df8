"""Decides the outcomes of attempts, and writes them to the database in batches."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from random import Random
from typing import Final, TypeAlias
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from everbeat.domain.recovery.decision import LeaseFacts, RecoveryRules, Retry, decide
from everbeat.domain.series import AttemptResult
from everbeat.domain.settings.units import milliseconds
from everbeat.domain.task.ending import exhausted
from everbeat.domain.task.outcome import error_from_json, error_to_json
from everbeat.domain.task.retry import reasons_of
from everbeat.domain.tracing.model import TraceIds
from everbeat.errors import (
    TASK_TIMEOUT,
    UNHANDLED_EXCEPTION,
    WORKER_CRASHED,
    EverbeatError,
    TaskError,
    TaskSuspended,
)
from everbeat.errors.wording import amount, class_name, storable
from everbeat.runtime.events import Event
from everbeat.store.leases import Settlement, complete, decline, settle_telling, stop_settlement
from everbeat.store.refusals import is_refused_data, is_timeout
from everbeat.store.session import Session
from everbeat.store.steps import cancel_started
from everbeat.store.tasks import cancel_children
from everbeat.worker.attempt import (
    Attempt,
    AttemptEnd,
    CodeCancelled,
    CodeFailed,
    CodePostponed,
    CodeSuspended,
    Declined,
    Died,
    Succeeded,
)
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.messages import Settled
from everbeat.worker.progress import ProgressRecorder

_MESSAGE_BYTES: Final = 1_000
_TIMED_OUT: Final = reasons_of(TASK_TIMEOUT, TimeoutError())
"""The names under which a policy can list a timeout. It is treated like a TimeoutError that the code raised."""
_SUSPENDED_ITSELF: Final = reasons_of(UNHANDLED_EXCEPTION, TaskSuspended())


def settlement_of(attempt: Attempt, ended: AttemptEnd | None, *, random: Random) -> Settlement | None:
    """Return the settlement to write for an attempt, or None if nothing is to be written now.

    `ended` is None if the code has not finished. If the process died while the code was running, recovery decides. If the worker is
    shutting down and the code does not stop, the attempt is settled after the process has exited. A second run must not overlap the
    first.

    Code that was asked to stop and returned a value has succeeded, unless it timed out. Any other end is treated as a result of the
    stop request, not as a separate error.

    A task whose arguments do not fit this code is always left to other code, because no code has run.
    """
    if attempt.stop is None and isinstance(ended, Succeeded):  # the usual case
        return Settlement(
            id=attempt.id, claim_id=attempt.claim_id, outcome="COMPLETED", result=_kept(attempt, ended)
        )
    if isinstance(ended, Declined):
        failed = _failed(attempt, ended.failed.error, reasons=ended.failed.reasons, random=random)
        return replace(failed, outcome="DECLINED")
    if attempt.stop is not None and attempt.stop.is_fence:
        return _fenced(attempt, random)
    written = partial(Settlement, id=attempt.id, claim_id=attempt.claim_id)
    match attempt.stopped, ended:
        case "timed_out", _:
            return _failed(attempt, _timed_out(attempt), reasons=_TIMED_OUT, random=random)
        case _, Succeeded():
            return written(outcome="COMPLETED", result=_kept(attempt, ended))
        case "cancelled", _:
            return written(outcome="CANCELLED")
        case None | "shutting_down", CodeSuspended() if attempt.suspended_at is not None:
            return written(outcome="SUSPENDED")
        case None, CodeSuspended():
            return _failed(attempt, _suspended_itself(), reasons=_SUSPENDED_ITSELF, random=random)
        case None | "shutting_down", (CodePostponed() | CodeCancelled()) as chosen:
            return _chosen(attempt, chosen)
        case "shutting_down", _ if ended is not None:
            return stop_settlement(attempt.id, attempt.claim_id, policy=attempt.policy)
        case _, CodeFailed(error, reasons):
            return _failed(attempt, error, reasons=reasons, random=random)
        case _:
            return None


def _kept(attempt: Attempt, ended: Succeeded) -> bytes | None:
    """Return the result to store. None is stored as the JSON value null."""
    return None if attempt.policy.ignore_result else ended.result


class CodeFailedAfterItsCommit(Event, frozen=True, kw_only=True):
    """The code raised an exception or its process died after its own commit had completed the task. The task stays completed."""

    component = "worker"
    level = logging.WARNING
    task_id: UUID
    name: str
    code: str
    type: str
    message: str
    trace_ids: TraceIds | None = None


def failed_after_commit(
    attempt: Attempt, ended: CodeFailed | CodePostponed | CodeCancelled | Died
) -> CodeFailedAfterItsCommit:
    """Return the event for code that failed after its own commit. It includes no more of the error than an ordinary failure stores."""
    error = (
        TaskError(WORKER_CRASHED, ended.report.cause)
        if isinstance(ended, Died)
        else error_from_json(ended.error)
    )
    return CodeFailedAfterItsCommit(
        task_id=attempt.id,
        name=attempt.task.name,
        code=error.code,
        type=error.type,
        message=storable(error.message, limit=_MESSAGE_BYTES),
        trace_ids=attempt.trace_ids,
    )


def state_after(settlement: Settlement) -> str:
    """Return the state of the task after this settlement has been written."""
    match settlement.outcome:
        case "COMPLETED" | "CANCELLED":
            return settlement.outcome
        case "RELEASED" | "HANDED_BACK" | "SUSPENDED" | "POSTPONED" | "DECLINED":
            return "PENDING"
        case _:
            return "FAILED" if settlement.retry_in_ms is None else "PENDING"


def rate_of(settlement: Settlement, state: str) -> AttemptResult:
    """Return as what an attempt is counted that ended with this settlement. `state` is the task's state after it."""
    if state == "COMPLETED":  # the usual case
        return "completed"
    match state, settlement.outcome:
        case "FAILED", _:
            return "failed"
        case "CANCELLED", _:
            return "cancelled"
        case _, "SUSPENDED" | "POSTPONED":
            return "suspended"
        case _, "FAILED":
            return "retried"
        case _:
            return "released"


def cancels_its_children(settlement: Settlement) -> bool:
    """Return whether the code raised Cancel. If a cancel was requested, the caller of that request cancels the children."""
    return settlement.outcome == "CANCELLED" and settlement.error is not None


async def cancel_what_it_started(session: Session, settlement: Settlement) -> bool:
    """Cancel the children of a task whose code raised Cancel, and its workflows. Return whether a workflow was cancelled.

    Call this before the settlement is written. A task that is CANCELLED by its own code then has no live children, even if the worker
    exits at any point.
    """
    task_id, claim_id, channel = settlement.id, settlement.claim_id, session.target.channel
    while await session.run(cancel_children(task_id, channel=channel, claim_id=claim_id)):
        pass
    workflows = await session.run(cancel_started(task_id, channel=channel, claim_id=claim_id))
    return bool(workflows)


def undeclined(attempt: Settlement) -> Settlement:
    """Return the failure to write for a declined task that cannot be left to other code because its arguments are invalid."""
    return replace(attempt, outcome="FAILED")


def failed_instead(attempt: Settlement, error: bytes) -> Settlement:
    """Return the failure that the database wrote because the task cannot run again later. `error` is the stored error."""
    return replace(attempt, outcome="FAILED", error=error, retry_in_ms=None, run_at=None)


def refused_result(attempt: Settlement, reason: str) -> Settlement:
    """Return the failure to write in place of an outcome that the database cannot store. `reason` is the database's message."""
    error = TaskError(
        "RESULT_UNSERIALISABLE", f"PostgreSQL cannot store the outcome of this attempt: {reason}."
    )
    return Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="FAILED", error=error_to_json(error))


def _failed(attempt: Attempt, error: bytes, *, reasons: tuple[str, ...], random: Random) -> Settlement:
    retry_in_ms = _retry_in_ms(attempt, random) if attempt.policy.lists(reasons) else None
    return _failure(attempt, error, retry_in_ms=retry_in_ms)


def _failure(attempt: Attempt, error: bytes, *, retry_in_ms: int | None) -> Settlement:
    return Settlement(
        id=attempt.id, claim_id=attempt.claim_id, outcome="FAILED", error=error, retry_in_ms=retry_in_ms
    )


def _chosen(attempt: Attempt, ended: CodePostponed | CodeCancelled) -> Settlement:
    """Return the settlement for code that raised RetryLater or Cancel.

    The database counts the attempts that cost no retry, because a claim does not return their number.
    """
    written = partial(Settlement, id=attempt.id, claim_id=attempt.claim_id)
    if isinstance(ended, CodeCancelled):
        return written(outcome="CANCELLED", error=ended.error)
    policy, retry_count = attempt.policy, attempt.task.retry_count
    if not ended.counts:
        return written(
            outcome="POSTPONED",
            error=ended.error,
            retry_in_ms=ended.after_ms,
            run_at=ended.run_at,
            most_postponed=policy.max_retry_later,
        )
    if retry_count >= policy.max_retries:
        used = amount(policy.max_retries, "retry is", plural="retries are")
        has = f"its {used} used up" if policy.max_retries else "the task has no retry policy"
        why = f"The code raised RetryLater(counts=True), which costs a retry, but {has}."
        error = exhausted(error_from_json(ended.error), why=why)
        return written(outcome="FAILED", error=error_to_json(error))
    return written(outcome="FAILED", error=ended.error, retry_in_ms=ended.after_ms, run_at=ended.run_at)


def _fenced(attempt: Attempt, random: Random) -> Settlement:
    """Return the settlement for code that a fence stopped. It follows the rules for a lost worker, but counts no crash."""
    facts = LeaseFacts(started=True, policy=attempt.policy, retry_count=attempt.task.retry_count)
    decision = decide(facts, rules=RecoveryRules(), charge=None, random=random)
    retry_in_ms = decision.delay_ms if isinstance(decision, Retry) else None
    return _failure(attempt, _self_fenced(), retry_in_ms=retry_in_ms)


def _retry_in_ms(attempt: Attempt, random: Random) -> int | None:
    """Return the delay before the next retry in milliseconds, or None if no retries are left."""
    if attempt.task.retry_count >= attempt.policy.max_retries:
        return None
    return milliseconds(attempt.policy.delay(attempt.task.retry_count + 1, random))


def _timed_out(attempt: Attempt) -> bytes:
    limit_s = attempt.timeout_s or 0.0
    message = f"The attempt ran longer than its timeout of {limit_s:g} s."
    return error_to_json(TaskError(TASK_TIMEOUT, message, {"timeout_s": limit_s}))


def _suspended_itself() -> bytes:
    message = "The code raised TaskSuspended, which only Context.sleep and Context.wait_event can do."
    return error_to_json(TaskError(UNHANDLED_EXCEPTION, message, type=class_name(TaskSuspended)))


def _self_fenced() -> bytes:
    message = "The worker could not reach the database for most of the stale threshold and stopped its code."
    return error_to_json(TaskError(WORKER_CRASHED, message, {"cause": "self_fenced"}))


MOST_ROWS: Final = 1000
BATCHES_IN_A_ROW: Final = 16
"""The maximum number of batches per tick. `ServiceRunner` counts failed ticks, so a tick must end regularly."""
MOST_BYTES: Final = 8 * 1024 * 1024
LARGE_BYTES: Final = 256 * 1024
"""Outcomes larger than this many bytes are written after smaller ones."""
MOST_TIMEOUTS: Final = 2
"""How many times the statement for a large outcome can time out before the outcome is replaced by a failure."""

_log = logging.getLogger("everbeat.worker")


class Unsettled(Struct):
    """An outcome that has not been written yet.

    `is_replaced`: whether it replaces an outcome that the database refused or could not store in time.
    """

    attempt: Attempt
    settlement: Settlement
    is_replaced: bool = False
    timeouts: int = 0

    @property
    def size(self) -> int:
        """Return the size of the outcome in bytes of JSON."""
        settlement = self.settlement
        size = len(settlement.result or b"") + len(settlement.error or b"")
        # To decline a task, the server also reads its arguments.
        return size + len(self.attempt.task.args) if settlement.outcome == "DECLINED" else size


SettlementAnswer: TypeAlias = tuple[Unsettled, str]


class Settler:
    """A service that writes outcomes, and sends `Settled` for each batch."""

    name = "settler"
    interval_s = 3_600.0

    def __init__(self, environment: WorkerEnvironment, *, progress: ProgressRecorder) -> None:
        self.wake = asyncio.Event()
        self._session = environment.session
        self._scope = environment.scope
        self._send = environment.send
        self._progress = progress
        self._waiting: dict[Attempt, Unsettled] = {}
        self._large: dict[Attempt, Unsettled] = {}
        self._under_way: dict[Attempt, Unsettled] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._large) + len(self._under_way)

    def put(self, attempt: Attempt, settlement: Settlement) -> None:
        """Queue an outcome to be written as soon as possible. If the attempt already has a queued outcome, ignore the new one."""
        if attempt in self._under_way or attempt in self._waiting or attempt in self._large:
            return
        one = Unsettled(attempt, settlement)
        (self._large if one.size > LARGE_BYTES else self._waiting)[attempt] = one
        self.wake.set()

    async def tick(self) -> float | None:
        """Write the waiting outcomes. While the server writes the next batch, `Settled` is sent for the previous batch."""
        answers: list[SettlementAnswer] = []
        for turn in range(BATCHES_IN_A_ROW):
            # A steady stream of small outcomes must not delay large ones forever.
            is_last = turn == BATCHES_IN_A_ROW - 1
            waiting = self._large or self._waiting if is_last else self._waiting or self._large
            if not waiting:
                break
            # The order matters: the next statement is sent before the previous replies are handled.
            answers = await self._scope.beside(
                self._answers(waiting), partial(self._send_answers, answers), name="outcomes"
            )
        self._send_answers(answers)
        return 0.0 if self._waiting or self._large else None

    async def _answers(self, waiting: dict[Attempt, Unsettled]) -> list[SettlementAnswer]:
        """Write the next batch of `waiting` and return the database's verdicts.

        If writing fails, the batch is put back at the front of `waiting`.
        """
        batch = self._next_batch(waiting)
        taken = {one.attempt: waiting.pop(one.attempt) for one in batch}
        self._under_way |= taken
        try:
            for one in batch:
                if one.attempt.progress is not None:
                    await self._progress.write(one.attempt)
            return await self._settle(batch)
        except BaseException:
            for attempt in taken:
                del self._under_way[attempt]
            others = dict(waiting)
            waiting.clear()
            waiting.update(taken | others)
            raise

    def _send_answers(self, answers: list[SettlementAnswer]) -> None:
        if answers:
            for one, _ in answers:
                del self._under_way[one.attempt]
            self._send(Settled([(one.attempt, one.settlement, verdict) for one, verdict in answers]))

    @staticmethod
    def _next_batch(waiting: dict[Attempt, Unsettled]) -> list[Unsettled]:
        batch: list[Unsettled] = []
        room = MOST_BYTES
        for one in waiting.values():
            room -= one.size
            if batch and (room < 0 or len(batch) >= MOST_ROWS):
                break
            batch.append(one)
        return batch

    async def _settle(self, batch: list[Unsettled]) -> list[SettlementAnswer]:
        try:
            verdicts = await self._written(batch)
        except Exception as problem:
            # A row that PostgreSQL cannot store must not prevent the other rows from being written.
            is_refused = is_refused_data(problem) or self._is_too_slow(batch, problem)
            if not is_refused or all(one.is_replaced for one in batch):
                raise
            return await self._divided(batch, problem)
        if verdicts is None:
            return [(one, "COMPLETED") for one in batch]
        verdict_of = [(one, verdicts.get(one.attempt.claim_id, "lost")) for one in batch]
        unmarkable = [one for one, verdict in verdict_of if verdict == "unmarkable"]
        if not unmarkable:
            return verdict_of
        for one in unmarkable:
            one.settlement = undeclined(one.settlement)
        return [pair for pair in verdict_of if pair[1] != "unmarkable"] + await self._settle(unmarkable)

    async def _written(self, batch: list[Unsettled]) -> dict[UUID, str] | None:
        """Write the outcomes. Return a verdict for each outcome, or None if all attempts have completed.

        Completed attempts have a separate, cheaper statement, because most attempts complete.
        """
        # A large outcome is tried only once per tick, because repeating it endlessly would cost too much.
        patience_s = 0.0 if self._is_large(batch) else None
        channel = self._session.target.channel
        settlements = [one.settlement for one in batch]
        verdicts: dict[UUID, str] = {}
        if completed := [one for one in settlements if one.outcome == "COMPLETED"]:
            landed = await self._session.run(complete(completed, channel=channel), patience_s=patience_s)
            if len(landed) == len(settlements):
                return None
            verdicts = dict.fromkeys(landed, "COMPLETED")
        if declined := [one for one in settlements if one.outcome == "DECLINED"]:
            leases = [(one.id, one.claim_id) for one in declined]
            marked = await self._session.run(decline(leases, channel=channel), patience_s=patience_s)
            # A task without its lease has already been released to other workers.
            verdicts |= {one.claim_id: marked.get(one.claim_id, "already") for one in declined}
        if others := [one for one in settlements if one.claim_id not in verdicts]:
            telling = settle_telling(others, channel=channel)
            settled, errors = await self._session.run(telling, patience_s=patience_s)
            verdicts |= settled
            for one in batch if errors else ():
                if (error := errors.get(one.settlement.claim_id)) is not None:
                    one.settlement = failed_instead(one.settlement, error)
        return verdicts

    @staticmethod
    def _is_large(batch: list[Unsettled]) -> bool:
        return len(batch) == 1 and batch[0].size > MOST_BYTES

    def _is_too_slow(self, batch: list[Unsettled], problem: Exception) -> bool:
        if not (self._is_large(batch) and is_timeout(problem)):
            return False
        batch[0].timeouts += 1
        return batch[0].timeouts >= MOST_TIMEOUTS

    async def _divided(self, batch: list[Unsettled], problem: Exception) -> list[SettlementAnswer]:
        if len(batch) > 1:
            middle = len(batch) // 2
            return [*await self._settle(batch[:middle]), *await self._settle(batch[middle:])]
        if batch[0].settlement.outcome == "DECLINED":
            batch[0].settlement = undeclined(batch[0].settlement)
            return await self._settle(batch)
        reason = problem.message if isinstance(problem, EverbeatError) else str(problem).strip()
        batch[0].settlement = refused_result(batch[0].settlement, reason)
        batch[0].is_replaced = True
        return await self._settle(batch)
