"""What the worker does about the requests of running code: stores its checkpoints, and looks after its commits.

What lives here: the answers, each at the hand of the database. What may not: the code's half (`code_side`), its steps
(`step_clerk`), and what a stop or a loss means to an attempt (`conductor`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar, assert_never
from uuid import UUID

from everbeat.domain.context import StopReason
from everbeat.errors import EverbeatError
from everbeat.runtime.clock import Clock
from everbeat.runtime.fork import generation
from everbeat.runtime.nursery import Nursery
from everbeat.store.partial_work import commit_outcome, installation, record_checkpoint
from everbeat.store.refusals import is_refused_data
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.worker.attempt import Attempt
from everbeat.worker.inquiry import PATIENCE_S, Inquiry, Losses, Stopped
from everbeat.worker.progress import ProgressRecorder
from everbeat.worker.protocol import (
    Answer,
    Checkpoint,
    CommitBegins,
    CommitEnds,
    CommitTerms,
    Committing,
    Request,
    StepRequest,
)
from everbeat.worker.step_clerk import StepClerk, Suspend

T = TypeVar("T")

_OPEN_PAUSE_S: Final = 0.1
_MOST_UNCLEAR: Final = 5

_log = logging.getLogger("everbeat.worker")


class Commits(Losses, Protocol):
    """What becomes of an attempt whose code settles it by itself."""

    def commit_ended(self, attempt: Attempt) -> None:
        """It was not settled: what was asked of it meanwhile is done now."""

    def committed(self, attempt: Attempt) -> None:
        """It is settled: COMPLETED."""


class Clerk:
    """One for each worker; `submit` may be called from any thread, the rest on the worker's loop."""

    def __init__(
        self,
        session: Session,
        *,
        progress: ProgressRecorder,
        commits: Commits,
        nursery: Nursery,
        clock: Clock,
        is_leaving: Callable[[], bool],
    ) -> None:
        self._session = session
        self._progress = progress
        self._commits = commits
        self._nursery = nursery
        self._clock = clock
        self._inquiry = Inquiry(session, losses=commits)
        self._steps = StepClerk(self._inquiry, clock=clock, is_leaving=is_leaving)
        self._loop = asyncio.get_running_loop()
        self._generation = generation()
        self._installation: UUID | None = None

    def submit(self, attempt: Attempt, request: Request) -> Future[Answer]:
        """Begins to answer, on the worker's loop; raises RuntimeError when that is closed, and in a forked child, which has no such loop."""
        if generation() != self._generation:
            raise RuntimeError("The worker's loop does not run in a forked child.")
        work = self.answer(attempt, request)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    async def answer(self, attempt: Attempt, request: Request) -> Answer:
        """The answer, always: code waits for it."""
        attempt.unanswered += 1
        try:
            # A task of its own: code that is cancelled while it waits does not cancel a statement under way.
            return await self._nursery.start(self._answered(attempt, request), name=type(request).__name__)
        except RuntimeError:  # the worker is leaving
            return self._stopped(request, "shutting_down")
        finally:
            attempt.unanswered -= 1
            attempt.spoke_at = self._clock.monotonic()

    async def _answered(self, attempt: Attempt, request: Request) -> Answer:
        if attempt.is_committed:
            return Answer(request.claim_id, request.ticket, "over")
        try:
            match request:
                case Checkpoint():
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
            attempt.may_suspend = True
            return Answer(request.claim_id, request.ticket, "suspended")
        except Stopped as stopped:
            return self._stopped(request, stopped.reason)
        except EverbeatError as problem:
            return Answer(request.claim_id, request.ticket, "refused", message=problem.message)
        except Exception as problem:  # noqa: BLE001 - whatever it is, code waits for an answer
            if not is_refused_data(problem):
                _log.exception("request_not_answered task_id=%s", attempt.id)
            message = f"{type(problem).__name__}: {problem}".strip()
            return Answer(request.claim_id, request.ticket, "refused", message=message)

    async def _checkpoint(self, attempt: Attempt, request: Checkpoint) -> Answer:
        async with (
            attempt.checkpoint_turn
        ):  # what is repeated after a lost reply must not overtake what follows
            if request.number > attempt.checkpoint_number:
                await self._store(attempt, request)
                attempt.checkpoint_number = request.number
        return Answer(request.claim_id, request.ticket, "yes")

    async def _store(self, attempt: Attempt, request: Checkpoint) -> None:
        progress, attempt.progress = attempt.progress, None
        statement = record_checkpoint(
            attempt.id,
            attempt.claim_id,
            request.checkpoint.encode(),
            number=request.number,
            progress=progress,
        )
        try:
            held = await self._inquiry.ask(attempt, statement)
        except BaseException:
            attempt.progress = attempt.progress or progress
            raise
        if not held:
            self._inquiry.lost(attempt)

    async def _commit_begins(self, attempt: Attempt, request: CommitBegins) -> Answer:
        if self._installation is None:
            self._installation = await self._inquiry.ask(attempt, installation())
        self._inquiry.require_running(attempt)
        attempt.holds_progress = request.is_snapshot
        await self._write_progress(attempt)
        target = self._session.target
        terms = CommitTerms(
            installation=self._installation,
            schema=target.schema,
            channel=target.channel,
            shown=target.shown,
        )
        return Answer(request.claim_id, request.ticket, "yes", terms=terms)

    async def _committing(self, attempt: Attempt, request: Committing) -> Answer:
        await self._write_progress(attempt)
        self._inquiry.require_running(attempt)
        if attempt.stopped in ("timed_out", "stalled", "lease_lost"):
            raise Stopped(attempt.stopped)
        attempt.is_committing = attempt.holds_progress = True
        return Answer(request.claim_id, request.ticket, "yes")

    async def _write_progress(self, attempt: Attempt) -> None:
        """What waits is written now: later it would be in the way of the commit."""
        if not attempt.holds_progress:
            await self._progress.write(attempt)

    async def _commit_ends(self, attempt: Attempt, request: CommitEnds) -> Answer:
        if not attempt.is_committing:
            attempt.release_progress()
            return Answer(request.claim_id, request.ticket, "rolled_back")
        outcome: str = request.seen
        if outcome in ("landed", "unknown"):
            # Whatever the library says: the truth is in the database.
            outcome = await self._outcome(attempt, is_known=outcome == "landed")
        if outcome == "landed":
            self._commits.committed(attempt)
            return Answer(request.claim_id, request.ticket, "landed")
        attempt.release_progress()
        self._commits.commit_ended(attempt)
        if outcome == "lost":
            self._inquiry.lost(attempt)
        return Answer(request.claim_id, request.ticket, "open" if outcome == "open" else "rolled_back")

    async def _outcome(self, attempt: Attempt, *, is_known: bool) -> str:
        unclear = 0
        while True:
            found = await self._ask_until_answered(commit_outcome(attempt.id, attempt.claim_id))
            match found:
                case "open" if not is_known:
                    pass  # the server has not yet seen how the connection ended
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
