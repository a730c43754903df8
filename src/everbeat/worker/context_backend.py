"""The base of all Context backends. It sends requests to the worker and raises an error if a request is refused."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import TracebackType
from typing import Any, Final, Literal, TypeVar
from uuid import UUID

from everbeat.domain.task.checkpoint import Checkpoint as Finished
from everbeat.domain.task.context_backend import RESULT, Completion, StepAnswer, StepQuestion, TaskCommit
from everbeat.domain.task.definition import CallCodec
from everbeat.domain.tracing.model import TraceIds
from everbeat.domain.tracing.tracing import Tracing
from everbeat.errors import CommitRefused, DatabaseError, PayloadError, TaskStopped, TaskSuspended
from everbeat.protocol import (
    Answer,
    CommitBegins,
    CommitEnds,
    CommitTerms,
    Committing,
    LeaseKey,
    Request,
    StepRequest,
    StoreCheckpoint,
)
from everbeat.runtime.blocking import in_time, refuse_in_loop, strand
from everbeat.store.leases import Settlement, settle
from everbeat.store.statement import Statement
from everbeat.store.steps import ConnectionFacts, commit_facts, commit_hurry, commit_lease, commit_mark
from everbeat.store.user_connection.connection import (
    DriverPlan,
    DriverQuestion,
    DriverStatement,
    TransactionAction,
    UserTransaction,
)
from everbeat.store.user_connection.drivers import is_forbidden

T = TypeVar("T")

COMMIT_WITHIN_MS: Final = 10_000
"""How long a transaction can be idle between writing the outcome and COMMIT, in milliseconds."""
_TICKETS: Final = count(1)


class RequestingBackend(ABC):
    """A base class for backends that send the requests of running code to the worker."""

    trace_ids: TraceIds | None = None
    """The ids of the attempt's span, if the app has a tracer and the code has begun."""

    @property
    @abstractmethod
    def tracing(self) -> Tracing | None:
        """Return the tracers of the app, or None if it has none."""

    @property
    @abstractmethod
    def lease(self) -> LeaseKey:
        """Return (task id, claim_id)."""

    @property
    @abstractmethod
    def codec(self) -> CallCodec:
        """Return the codec of the task function."""

    @abstractmethod
    def ask(self, request: Request) -> Answer:
        """Send a request and return the worker's answer. Blocks the calling thread."""

    @abstractmethod
    async def aask(self, request: Request) -> Answer:
        """Send a request and return the worker's answer. Works on any event loop."""

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        """Raise BlockingCallInLoop if an event loop is running in this thread."""
        refuse_in_loop(name, instead=instead)

    def store(self, checkpoint: Finished) -> None:
        """Store the checkpoint in the database before returning."""
        self.check(self.ask(self._checkpoint(checkpoint)))

    async def astore(self, checkpoint: Finished) -> None:
        """Store the checkpoint. The async form of `store`."""
        self.check(await self.aask(self._checkpoint(checkpoint)))

    def ask_step(self, question: StepQuestion) -> StepAnswer:
        """Return the worker's answer to a question about a durable step."""
        return self._step(self.ask(StepRequest(self.lease[1], next(_TICKETS), question)))

    async def aask_step(self, question: StepQuestion) -> StepAnswer:
        """Return the worker's answer to a question about a durable step. The async form of `ask_step`."""
        return self._step(await self.aask(StepRequest(self.lease[1], next(_TICKETS), question)))

    def strand(self) -> int:
        """Return a number that identifies the calling asyncio task or thread."""
        return strand()

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread with a copy of the current context variables, and return its result."""
        return await asyncio.to_thread(call)

    async def in_time(self, awaitable: Awaitable[T], *, timeout_s: float, late: str) -> T:
        """Return the result of the awaitable. Raises TimeoutError with the message `late` if it takes longer than `timeout_s` seconds."""
        return await in_time(awaitable, timeout_s=timeout_s, late=late)

    def commit(self, connection: object) -> TaskCommit:
        """Return the context manager that commits the task on this connection."""
        transaction = UserTransaction(connection, AttemptCommit(self), line=self)
        return transaction if self.tracing is None else TracedCommit(transaction, self.tracing)

    def check(self, answer: Answer) -> None:
        """Raise the matching error if the worker refused the request."""
        task_id = self.lease[0]
        match answer.verdict:
            case "stopped":
                raise TaskStopped(answer.reason or "lease_lost", task_id=task_id)
            case "suspended":
                raise TaskSuspended(task_id=task_id)
            case "over":
                raise CommitRefused(
                    f"Task {task_id} is completed: its Context.commit has ended, and nothing more is stored for it.",
                    fix="checkpoint and commit before the block ends; code after the block is no longer part of the task.",
                )
            case "refused":
                raise DatabaseError(f"Task {task_id}: {answer.message}")
            case _:
                return

    def _step(self, answer: Answer) -> StepAnswer:
        self.check(answer)
        assert answer.step is not None
        return answer.step

    def _checkpoint(self, checkpoint: Finished) -> StoreCheckpoint:
        return StoreCheckpoint(self.lease[1], next(_TICKETS), checkpoint.number, checkpoint.data.decode())


class TracedCommit:
    """A commit that is surrounded by tracers."""

    def __init__(self, commit: TaskCommit, tracing: Tracing) -> None:
        self._commit = commit
        self._around = tracing.committing()

    def __enter__(self) -> Completion:
        self._around.__enter__()
        try:
            return self._commit.__enter__()
        except BaseException as problem:
            self._around.__exit__(type(problem), problem, problem.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ending(kind, error, trace):
            self._commit.__exit__(kind, error, trace)

    async def __aenter__(self) -> Completion:
        self._around.__enter__()
        try:
            return await self._commit.__aenter__()
        except BaseException as problem:
            self._around.__exit__(type(problem), problem, problem.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ending(kind, error, trace):
            await self._commit.__aexit__(kind, error, trace)

    @contextmanager
    def _ending(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Iterator[None]:
        """Exit the tracers with the error of the commit, if it fails, or else with that of the block."""
        try:
            yield
        except BaseException as problem:
            self._around.__exit__(type(problem), problem, problem.__traceback__)
            raise
        self._around.__exit__(kind, error, trace)


class AttemptCommit:
    """The transaction of a `Context.commit`: first the user's rows, then the attempt's outcome, which is fenced like any outcome."""

    def __init__(self, side: RequestingBackend) -> None:
        self._side = side
        self._task_id, self._claim_id = side.lease
        self._completion = Completion()
        self._terms: CommitTerms
        self._mark = f"{self._claim_id} {next(_TICKETS)}"
        self._is_awaited = False
        """Whether the worker is deferring events until it learns the result of the commit."""

    def begin(self) -> DriverPlan[Completion]:
        """Open the transaction on the user's connection, and verify that it reaches the task's database and that the lease is held."""
        answer: Answer = yield DriverQuestion(CommitBegins(self._claim_id, next(_TICKETS)))
        self._side.check(answer)
        assert answer.terms is not None
        self._terms = answer.terms
        yield TransactionAction("begin")
        facts: ConnectionFacts | None = None
        try:
            facts = yield self._run(commit_facts(schema=self._terms.schema, mark=self._mark))
            self._require_usable(facts)
            found: tuple[UUID, bool] = yield self._run(commit_lease(self._task_id, self._claim_id))
            self._require_same(found[0], facts)
            if not found[1]:
                raise TaskStopped("lease_lost", task_id=self._task_id)
        except BaseException as problem:
            yield from self._roll_back()
            if is_forbidden(problem):
                raise self._forbidden(problem, facts) from problem
            raise
        if facts.isolation != "read committed":
            self._is_awaited = True
            yield DriverQuestion(CommitBegins(self._claim_id, next(_TICKETS), is_snapshot=True))
        return self._completion

    def end(self, error: BaseException | None) -> DriverPlan[None]:
        """Write the outcome as the last statement and commit. If `error` is not None, roll everything back instead."""
        if error is None:
            yield from self._settle()
            yield from self._commit()
        else:
            yield from self._give_up()

    def _settle(self) -> DriverPlan[None]:
        try:
            yield TransactionAction("flush")
            result = self._result()
            if not (yield self._run(commit_mark(self._mark))):
                raise CommitRefused(
                    f"The transaction of Context.commit was ended inside its block, so task {self._task_id} is not completed by it.",
                    fix="leave commit and rollback to the block; raise an exception in it to roll back.",
                )
            answer: Answer = yield DriverQuestion(Committing(self._claim_id, next(_TICKETS)))
            self._side.check(answer)
            self._is_awaited = True
            outcome = Settlement(
                id=self._task_id, claim_id=self._claim_id, outcome="COMPLETED", result=result
            )
            yield self._run(commit_hurry(COMMIT_WITHIN_MS))
            verdicts = yield self._run(settle([outcome], channel=self._terms.channel))
        except BaseException:
            yield from self._give_up()
            raise
        if [*verdicts.values()] != ["COMPLETED"]:
            yield from self._roll_back()
            self._side.check((yield self._ends("lost")))
            raise TaskStopped("lease_lost", task_id=self._task_id)

    def _commit(self) -> DriverPlan[None]:
        try:
            yield TransactionAction("commit")
        except BaseException as problem:
            yield from self._roll_back()
            answer: Answer = yield self._ends("unknown")
            if answer.verdict == "landed" and isinstance(problem, Exception):
                return  # only the reply was lost
            self._side.check(answer)
            raise
        answer = yield self._ends("landed")
        self._side.check(answer)
        if answer.verdict != "landed":
            yield from self._roll_back()
            raise CommitRefused(
                f"The connection given to Context.commit did not commit: commit() returned, and its transaction was "
                f"{'still open' if answer.verdict == 'open' else 'rolled back'}, so task {self._task_id} is not completed.",
                fix="give it a connection or session whose commit() ends the transaction, not one joined to an outer one.",
            )

    def _give_up(self) -> DriverPlan[None]:
        yield from self._roll_back()
        if self._is_awaited:
            yield self._ends("rolled_back")

    def _roll_back(self) -> DriverPlan[None]:
        with suppress(Exception):  # a lost connection rolls back by itself
            yield TransactionAction("rollback")

    def _run(self, statement: Statement[Any]) -> DriverStatement:
        return DriverStatement(statement, self._terms.schema)

    def _ends(self, seen: Literal["landed", "rolled_back", "lost", "unknown"]) -> DriverQuestion:
        return DriverQuestion(CommitEnds(self._claim_id, next(_TICKETS), seen))

    def _result(self) -> bytes:
        if self._terms.ignores_result:
            return b"null"
        try:
            return self._side.codec.encode_result(self._completion.result)
        except PayloadError as problem:
            problem.parameter = RESULT
            if self._completion.result is None:
                problem.fix = "set completion.result inside the block; a value that the function returns after the block is not stored."
            raise

    def _require_usable(self, facts: ConnectionFacts) -> None:
        if not facts.has_tables:
            raise CommitRefused(
                f"The connection given to Context.commit leads to database {facts.database!r}, where schema "
                f"{self._terms.schema!r} has no tables of everbeat; {self._home}.",
                fix="connect to the database of the tasks.",
            )
        if facts.is_read_only:
            raise CommitRefused(
                f"The transaction given to Context.commit on database {facts.database!r} is read-only.",
                fix="give it a connection that may write, to the primary.",
            )

    def _require_same(self, installation: UUID, facts: ConnectionFacts) -> None:
        if installation != self._terms.installation:
            raise CommitRefused(
                f"The connection given to Context.commit leads to database {facts.database!r}, whose schema "
                f"{self._terms.schema!r} is another installation of everbeat ({installation}); {self._home}.",
                fix="connect to the database of the tasks.",
            )

    def _forbidden(self, problem: BaseException, facts: ConnectionFacts | None) -> CommitRefused:
        role = "role" if facts is None else f"role {facts.user!r}"
        return CommitRefused(
            f"The {role} of the connection given to Context.commit cannot complete tasks in schema "
            f"{self._terms.schema!r}: {' '.join(str(problem).split())}.",
            fix=f"connect as the role of the worker, or grant it the rights on schema {self._terms.schema}.",
        )

    @property
    def _home(self) -> str:
        terms = self._terms
        return f"the task lives in schema {terms.schema!r} of {terms.shown!r} ({terms.installation})"
