"""Answers requests from running task code: checkpoints, commits, durable steps, sleeps, waits and children."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, TypeVar, assert_never
from uuid import UUID

from everbeat.domain.task.context_backend import (
    JoinChildren,
    ListChildren,
    LoadSteps,
    OpenStreams,
    RecordStep,
    SendChild,
    SendChildren,
    Sleep,
    StartWorkflow,
    StepAnswer,
    StepQuestion,
    StoreItems,
    WaitForEvent,
)
from everbeat.errors import DatabaseError, EverbeatError, StopReason
from everbeat.protocol import (
    Answer,
    CommitBegins,
    CommitEnds,
    CommitTerms,
    Committing,
    Request,
    StepRequest,
    StoreCheckpoint,
)
from everbeat.runtime.fork import generation
from everbeat.store import steps, streams
from everbeat.store.plan import Plan
from everbeat.store.refusals import is_refused_data
from everbeat.store.statement import Statement
from everbeat.store.steps import ChildVerdict, commit_outcome, installation, record_checkpoint, start_by_task
from everbeat.store.tasks import KEY_TRIES
from everbeat.worker.attempt import Attempt, Stage
from everbeat.worker.attempt_events import emit_failed_try
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.lifecycle import AttemptLifecycle
from everbeat.worker.progress import ProgressRecorder
from everbeat.worker.request_query import PATIENCE_S, RequestQuery, Stopped
from everbeat.worker.shutdown import Shutdown
from everbeat.worker.streams import StreamRecorder

T = TypeVar("T")

REST_IN_PLACE_S: Final = 5.0
"""A sleep of at most this many seconds keeps its slot. Releasing the slot would cost a settlement, a claim, and a second run of the
code before the sleep. If the worker must exit within a grace period, the slot is released nevertheless.
"""
_CHECK_EVERY_S: Final = 0.25


@contextmanager
def resting(attempt: Attempt) -> Iterator[None]:
    """Return a context manager in which a worker shutdown suspends the code instead of stopping it.

    Enter the block before the sleep is recorded. A shutdown between the record and the answer would otherwise fail the attempt.
    """
    attempt.rests += 1
    try:
        yield
    finally:
        attempt.rests -= 1


class Suspend(Exception):
    """Raised when the code must release its slot. The task's row stores the time or event that the code is waiting for."""


class StepRequests:
    """Answers the requests about durable steps, sleeps, waits and children."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        database: RequestQuery,
        streams: StreamRecorder,
        shutdown: Shutdown,
    ) -> None:
        self._streams = streams
        self._events = environment.events
        self._clock = environment.clock
        self._database = database
        self._shutdown = shutdown

    async def answer(self, attempt: Attempt, question: StepQuestion) -> StepAnswer:
        """Return the answer to a question from the code.

        Raises Stopped if the attempt should no longer be served, and Suspend if the code must release its slot until a time or an event.
        """
        match question:
            case LoadSteps(after):
                page = await self._database.ask(attempt, steps.load_steps(*attempt.lease, after=after))
                if page is None:
                    self._database.lost(attempt)
                return StepAnswer(records=page.records, next_after=page.next_after)
            case RecordStep(name, result, digest):
                record = steps.record_step(*attempt.lease, name=name, result=result.encode(), digest=digest)
                if not await self._database.ask(attempt, record):
                    self._database.lost(attempt)
                return StepAnswer()
            case Sleep():
                with resting(attempt):
                    return await self._sleep(attempt, question)
            case WaitForEvent():
                with resting(attempt):
                    return await self._wait(attempt, question)
            case SendChild():
                return await self._send(attempt, question)
            case SendChildren() | JoinChildren() | ListChildren():
                return await self._gather(attempt, question)
            case StartWorkflow():
                return await self._start(attempt, question)
            case OpenStreams():
                found = await self._database.ask(attempt, streams.list_streams(attempt.id))
                return StepAnswer(streams=tuple(found))
            case StoreItems():
                await self._store_items(attempt)
                return StepAnswer()
            case _:
                assert_never(question)

    async def _store_items(self, attempt: Attempt) -> None:
        await self._database.repeat(attempt, lambda: self._streams.flush(attempt))
        self._database.require_running(attempt)
        _require_stored(attempt)

    async def _sleep(self, attempt: Attempt, question: Sleep) -> StepAnswer:
        failed = question.failed
        begin = steps.begin_sleep(
            *attempt.lease, name=question.name, duration_ms=question.duration_ms, failed=failed
        )
        left_ms = await self._database.ask(attempt, begin)
        if left_ms is None:
            self._database.lost(attempt)
        if failed is not None:
            emit_failed_try(self._events, attempt, failed, retry_in_s=question.duration_ms / 1_000)
        if left_ms > REST_IN_PLACE_S * 1_000:
            raise Suspend
        await self._rest(attempt, left_ms / 1_000)
        return StepAnswer()

    async def _rest(self, attempt: Attempt, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while (left_s := until - self._clock.monotonic()) > 0:
            self._database.require_running(attempt)
            if attempt.stopped is not None:
                raise Stopped(attempt.stopped)
            if self._shutdown.is_urgent:  # another worker continues the task at that time
                raise Suspend
            await self._clock.sleep(min(left_s, _CHECK_EVERY_S))

    async def _wait(self, attempt: Attempt, question: WaitForEvent) -> StepAnswer:
        wait = steps.wait_for_signal(
            *attempt.lease,
            name=question.name,
            event=question.event,
            timeout_ms=question.timeout_ms,
            question=question.question,
        )
        async with attempt.wait_turn:
            # Read twice. The second read sees a signal that was being stored when the first read began. Any later signal
            # sees what the first read has written.
            for _ in range(2):
                found = await self._database.ask(attempt, wait)
                if found is None:
                    self._database.lost(attempt)
                if found.state != "OPEN":
                    return StepAnswer(state=found.state, value=found.value)
        raise Suspend

    async def _send(self, attempt: Attempt, question: SendChild) -> StepAnswer:
        send = steps.send_child(
            *attempt.lease,
            step=question.name,
            child=question.child,
            channel=self._database.channel,
            in_batch=question.in_batch,
        )
        child = question.child
        return await self._sent(
            attempt, lambda: self._database.ask(attempt, send), name=child.name, key=child.key
        )

    async def _gather(
        self, attempt: Attempt, question: SendChildren | JoinChildren | ListChildren
    ) -> StepAnswer:
        match question:
            case SendChildren():
                return await self._send_portion(attempt, question)
            case JoinChildren():
                with resting(attempt):
                    return await self._join(attempt, question)
            case ListChildren(ids):
                return StepAnswer(ends=await self._database.ask(attempt, steps.list_children(ids)))

    async def _send_portion(self, attempt: Attempt, question: SendChildren) -> StepAnswer:
        send = steps.send_children(*attempt.lease, question, channel=self._database.channel)
        is_cancelled = await self._database.ask(attempt, send)
        if is_cancelled is None:
            self._database.lost(attempt)
        if is_cancelled:
            raise Stopped("cancelled")
        return StepAnswer()

    async def _join(self, attempt: Attempt, question: JoinChildren) -> StepAnswer:
        join = steps.join_children(*attempt.lease, step=question.name, batch_id=question.batch_id)
        async with attempt.wait_turn:
            has_ended = await self._database.ask(attempt, join)
        if has_ended is None:
            self._database.lost(attempt)
        if not has_ended:
            raise Suspend
        return StepAnswer()

    async def _start(self, attempt: Attempt, question: StartWorkflow) -> StepAnswer:
        workflow = question.workflow

        def start() -> Plan[ChildVerdict | None]:
            return start_by_task(
                *attempt.lease, step=question.name, workflow=workflow, channel=self._database.channel
            )

        return await self._sent(
            attempt, lambda: self._database.transact(attempt, start), name=workflow.name, key=workflow.key
        )

    async def _sent(
        self,
        attempt: Attempt,
        send: Callable[[], Awaitable[ChildVerdict | None]],
        *,
        name: str,
        key: str | None,
    ) -> StepAnswer:
        for _ in range(KEY_TRIES):
            found = await send()
            if found is None:
                self._database.lost(attempt)
            if found.verdict == "cancelled":
                raise Stopped("cancelled")
            if found.id is not None or found.verdict == "no_batch":
                return StepAnswer(child=found.id)
        raise DatabaseError(
            f"The key of {name} ({key!r}) was taken and released again during each of {KEY_TRIES} tries to send.",
            fix="send again; nothing was stored for it.",
        )


def _require_stored(attempt: Attempt) -> None:
    """Raise DatabaseError if the database has refused an item of the attempt."""
    if attempt.items_refused is not None:
        raise DatabaseError(attempt.items_refused)


_OPEN_PAUSE_S: Final = 0.1
_MOST_UNCLEAR: Final = 5

_log = logging.getLogger("everbeat.worker")


class ContextRequests:
    """Answers all requests from running code.

    `submit` and `note_progress` can be called from any thread. Call the other methods on the worker's loop.
    """

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        progress: ProgressRecorder,
        streams: StreamRecorder,
        lifecycle: AttemptLifecycle,
        shutdown: Shutdown,
    ) -> None:
        self.tracing = environment.plan.middleware.tracing
        self._session = environment.session
        self._scope = environment.scope
        self._clock = environment.clock
        self._progress = progress
        self._streams = streams
        self._lifecycle = lifecycle
        self._database = RequestQuery(environment)
        self._steps = StepRequests(environment, database=self._database, streams=streams, shutdown=shutdown)
        self._loop = asyncio.get_running_loop()
        self._generation = generation()
        self._installation: UUID | None = None

    def note_progress(self, attempt: Attempt) -> None:
        """Write the attempt's pending progress soon. Safe to call from any thread."""
        self._progress.note(attempt)

    def note_items(self, attempt: Attempt) -> None:
        """Store the items that the attempt has emitted soon. Safe to call from any thread."""
        self._streams.note(attempt)

    def submit(self, attempt: Attempt, request: Request) -> Future[Answer]:
        """Start answering a request on the worker's loop, and return a future for the answer.

        Raises RuntimeError if the loop is closed, or if the caller is a forked child process, in which the loop is not running.
        """
        if generation() != self._generation:
            raise RuntimeError("The worker's loop does not run in a forked child.")
        work = self.answer(attempt, request)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    async def answer(self, attempt: Attempt, request: Request) -> Answer:
        """Return the answer to a request. Errors are returned as refusals, because code is waiting for the answer."""
        attempt.unanswered += 1
        try:
            # Use a separate task, so that cancelling the waiting code does not cancel a running statement.
            return await self._scope.start(self._answered(attempt, request), name=type(request).__name__)
        except RuntimeError:  # the worker is shutting down
            return self._stopped(request, "shutting_down")
        finally:
            attempt.unanswered -= 1
            attempt.reported_at = self._clock.monotonic()

    async def _answered(self, attempt: Attempt, request: Request) -> Answer:
        if attempt.stage is Stage.COMMITTED:
            return Answer(request.claim_id, request.ticket, "over")
        try:
            match request:
                case StoreCheckpoint():
                    return await self._checkpoint(attempt, request)
                case CommitBegins():
                    return await self._commit_begins(attempt, request)
                case Committing():
                    return await self._committing(attempt, request)
                case CommitEnds():
                    return await self._commit_ends(attempt, request)
                case StepRequest():
                    answer = await self._steps.answer(attempt, request.question)
                    return Answer(request.claim_id, request.ticket, "yes", step=answer)
                case _:
                    assert_never(request)
        except Suspend:
            attempt.suspended_at = attempt.suspended_at or self._clock.monotonic()
            return Answer(request.claim_id, request.ticket, "suspended")
        except Stopped as stopped:
            return self._stopped(request, stopped.reason)
        except EverbeatError as problem:
            return Answer(request.claim_id, request.ticket, "refused", message=problem.message)
        except Exception as problem:  # noqa: BLE001 - code is waiting for an answer
            if not is_refused_data(problem):
                _log.exception("request_not_answered task_id=%s", attempt.id)
            message = f"{type(problem).__name__}: {problem}".strip()
            return Answer(request.claim_id, request.ticket, "refused", message=message)

    async def _checkpoint(self, attempt: Attempt, request: StoreCheckpoint) -> Answer:
        async with (
            attempt.checkpoint_turn
        ):  # a request that is repeated after a lost reply must not overtake later requests
            if request.number > attempt.checkpoint_number:
                await self._store(attempt, request)
                attempt.checkpoint_number = request.number
        return Answer(request.claim_id, request.ticket, "yes")

    async def _store(self, attempt: Attempt, request: StoreCheckpoint) -> None:
        progress, attempt.progress = attempt.progress, None
        statement = record_checkpoint(
            attempt.id,
            attempt.claim_id,
            request.checkpoint.encode(),
            number=request.number,
            progress=progress,
        )
        try:
            held = await self._database.ask(attempt, statement)
        except BaseException:
            attempt.progress = attempt.progress or progress
            raise
        if not held:
            self._database.lost(attempt)

    async def _commit_begins(self, attempt: Attempt, request: CommitBegins) -> Answer:
        if self._installation is None:
            self._installation = await self._database.ask(attempt, installation())
        self._database.require_running(attempt)
        attempt.holds_progress = request.is_snapshot
        await self._write_progress(attempt)
        target = self._session.target
        terms = CommitTerms(
            installation=self._installation,
            schema=target.schema,
            channel=target.channel,
            shown=target.shown,
            ignores_result=attempt.policy.ignore_result,
        )
        return Answer(request.claim_id, request.ticket, "yes", terms=terms)

    async def _committing(self, attempt: Attempt, request: Committing) -> Answer:
        await self._database.repeat(attempt, lambda: self._streams.flush(attempt))
        _require_stored(attempt)
        await self._write_progress(attempt)
        self._database.require_running(attempt)
        if attempt.stopped in ("timed_out", "stalled", "lease_lost"):
            raise Stopped(attempt.stopped)
        attempt.move("COMMIT_BEGINS")
        attempt.may_commit = attempt.holds_progress = True
        return Answer(request.claim_id, request.ticket, "yes")

    async def _write_progress(self, attempt: Attempt) -> None:
        """Write pending progress now, because writing it later would block on the commit's transaction."""
        if not attempt.holds_progress:
            await self._progress.write(attempt)

    async def _commit_ends(self, attempt: Attempt, request: CommitEnds) -> Answer:
        if not attempt.may_commit:
            attempt.release_progress()
            return Answer(request.claim_id, request.ticket, "rolled_back")
        outcome: str = request.seen
        if outcome in ("landed", "unknown"):
            # Ask the database, because the client library might report the wrong outcome.
            outcome = await self._outcome(attempt, is_known=outcome == "landed")
        if outcome == "landed":
            self._lifecycle.committed(attempt)
            return Answer(request.claim_id, request.ticket, "landed")
        attempt.release_progress()
        self._lifecycle.commit_failed(attempt)
        if outcome == "lost":
            self._database.lost(attempt)
        return Answer(request.claim_id, request.ticket, "open" if outcome == "open" else "rolled_back")

    async def _outcome(self, attempt: Attempt, *, is_known: bool) -> str:
        unclear = 0
        while True:
            found = await self._ask_until_answered(commit_outcome(attempt.id, attempt.claim_id))
            match found:
                case "open" if not is_known:
                    pass  # the server does not know yet how the connection closed
                case "unclear" if unclear < _MOST_UNCLEAR:
                    unclear += 1
                case "unclear":
                    return "lost"
                case _:
                    return found
            await self._clock.sleep(_OPEN_PAUSE_S)

    async def _ask_until_answered(self, statement: Statement[T]) -> T:
        while True:
            try:
                return await self._session.run(statement, patience_s=PATIENCE_S)
            except EverbeatError as problem:
                _log.warning("commit_outcome_unknown error=%s", problem)
                await self._clock.sleep(PATIENCE_S)

    @staticmethod
    def _stopped(request: Request, reason: StopReason) -> Answer:
        return Answer(request.claim_id, request.ticket, "stopped", reason=reason)
