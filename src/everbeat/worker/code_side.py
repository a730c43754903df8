"""The half of a Context's backend that is alike wherever code runs: it asks the worker, and makes errors of its answers.

What lives here: checkpoints, steps and the plan of a commit, as the code sees them. What may not: how a request reaches the
worker (`attempt`, `task_process`), and what the worker does about it (`clerk`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final, Literal, TypeVar
from uuid import UUID

from everbeat.domain.backend import StepAnswer, StepQuestion
from everbeat.domain.checkpoint import Checkpoint as Finished
from everbeat.domain.codec import CallCodec
from everbeat.domain.commit import RESULT, Completion, TaskCommit
from everbeat.domain.context import TaskStopped, TaskSuspended
from everbeat.errors import CommitRefused, DatabaseError, PayloadError
from everbeat.runtime.blocking import refuse_in_loop
from everbeat.store.foreign import Ask, Do, Plan, Run, Transaction
from everbeat.store.foreign_statement import is_forbidden
from everbeat.store.leases import Settlement, settle
from everbeat.store.partial_work import (
    ConnectionFacts,
    commit_facts,
    commit_hurry,
    commit_lease,
    commit_mark,
)
from everbeat.store.statement import Statement
from everbeat.worker.protocol import (
    Answer,
    Checkpoint,
    CommitBegins,
    CommitEnds,
    CommitTerms,
    Committing,
    Lease,
    Request,
    StepRequest,
)

T = TypeVar("T")

COMMIT_WITHIN_MS: Final = 10_000
"""So long a transaction may stand still between the outcome and its COMMIT."""
_TICKETS: Final = count(1)


class CodeSide(ABC):
    """What running code may ask."""

    __slots__ = ()

    @property
    @abstractmethod
    def lease(self) -> Lease:
        """(task id, claim_id)."""

    @property
    @abstractmethod
    def codec(self) -> CallCodec:
        """Of the task function."""

    @abstractmethod
    def ask(self, request: Request) -> Answer:
        """Asks the worker and waits, in any thread."""

    @abstractmethod
    async def aask(self, request: Request) -> Answer:
        """Asks the worker and waits, on any loop."""

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        """Raises BlockingCallInLoop where an event loop runs in this thread."""
        refuse_in_loop(name, instead=instead)

    def store(self, checkpoint: Finished) -> None:
        """Returns when the checkpoint is stored."""
        self.check(self.ask(self._checkpoint(checkpoint)))

    async def astore(self, checkpoint: Finished) -> None:
        """The twin of `store`."""
        self.check(await self.aask(self._checkpoint(checkpoint)))

    def ask_step(self, question: StepQuestion) -> StepAnswer:
        """What is known of it, or was done about it."""
        return self._step(self.ask(StepRequest(self.lease[1], next(_TICKETS), question)))

    async def aask_step(self, question: StepQuestion) -> StepAnswer:
        """The twin of `ask_step`."""
        return self._step(await self.aask(StepRequest(self.lease[1], next(_TICKETS), question)))

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Calls it in a thread, with the current context variables."""
        return await asyncio.to_thread(call)

    def commit(self, connection: object) -> TaskCommit:
        """The block of a commit on this connection."""
        return Transaction(connection, AttemptCommit(self), line=self)

    def check(self, answer: Answer) -> None:
        """Raises what a refusal means to the code."""
        task_id = self.lease[0]
        match answer.verdict:
            case "stopped":
                raise TaskStopped(answer.reason or "lease_lost", task_id=task_id)
            case "suspended":
                raise TaskSuspended(task_id=task_id)
            case "over":
                raise CommitRefused(
                    f"Task {task_id} is completed: its Context.commit has ended, and nothing more is stored for it.",
                    fix="checkpoint and commit before the block ends; what comes after it is not the task's any more.",
                )
            case "refused":
                raise DatabaseError(f"Task {task_id}: {answer.message}")
            case _:
                return

    def _step(self, answer: Answer) -> StepAnswer:
        self.check(answer)
        assert answer.step is not None
        return answer.step

    def _checkpoint(self, checkpoint: Finished) -> Checkpoint:
        return Checkpoint(self.lease[1], next(_TICKETS), checkpoint.number, checkpoint.data.decode())


class AttemptCommit:
    """What the transaction of a commit is for: the user's rows, then the outcome of the attempt, fenced like any other."""

    def __init__(self, side: CodeSide) -> None:
        self._side = side
        self._task_id, self._claim_id = side.lease
        self._completion = Completion()
        self._terms: CommitTerms
        self._mark = f"{self._claim_id} {next(_TICKETS)}"
        self._is_awaited = False
        """Whether the worker holds something back until it is told how this ended."""

    def begin(self) -> Plan[Completion]:
        """Open the transaction, where the task lives."""
        answer: Answer = yield Ask(CommitBegins(self._claim_id, next(_TICKETS)))
        self._side.check(answer)
        assert answer.terms is not None
        self._terms = answer.terms
        yield Do("begin")
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
            yield Ask(CommitBegins(self._claim_id, next(_TICKETS), is_snapshot=True))
        return self._completion

    def end(self, error: BaseException | None) -> Plan[None]:
        """Write the outcome last, and commit; or roll everything back."""
        if error is None:
            yield from self._settle()
            yield from self._commit()
        else:
            yield from self._give_up()

    def _settle(self) -> Plan[None]:
        try:
            yield Do("flush")
            result = self._result()
            if not (yield self._run(commit_mark(self._mark))):
                raise CommitRefused(
                    f"The transaction of Context.commit was ended inside its block, so task {self._task_id} is not completed by it.",
                    fix="leave commit and rollback to the block; raise an exception in it to roll back.",
                )
            answer: Answer = yield Ask(Committing(self._claim_id, next(_TICKETS)))
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

    def _commit(self) -> Plan[None]:
        try:
            yield Do("commit")
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

    def _give_up(self) -> Plan[None]:
        yield from self._roll_back()
        if self._is_awaited:
            yield self._ends("rolled_back")

    def _roll_back(self) -> Plan[None]:
        with suppress(Exception):  # a connection that is gone rolls back by itself
            yield Do("rollback")

    def _run(self, statement: Statement[Any]) -> Run:
        return Run(statement, self._terms.schema)

    def _ends(self, seen: Literal["landed", "rolled_back", "lost", "unknown"]) -> Ask:
        return Ask(CommitEnds(self._claim_id, next(_TICKETS), seen))

    def _result(self) -> bytes:
        try:
            return self._side.codec.encode_result(self._completion.result)
        except PayloadError as problem:
            problem.parameter = RESULT
            if self._completion.result is None:
                problem.fix = "set completion.result inside the block; what the function returns after it is not stored."
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
            f"The {role} of the connection given to Context.commit may not complete tasks in schema "
            f"{self._terms.schema!r}: {' '.join(str(problem).split())}.",
            fix=f"connect as the role of the worker, or grant it the rights on schema {self._terms.schema}.",
        )

    @property
    def _home(self) -> str:
        terms = self._terms
        return f"the task lives in schema {terms.schema!r} of {terms.shown!r} ({terms.installation})"
