"""A task function that is called directly: its Context works, and nothing of it reaches a task's row.

What lives here: the backend of such a Context. What may not: rows, workers.
"""

from __future__ import annotations

from typing import Any, final

from everbeat.domain.checkpoint import Checkpoint
from everbeat.domain.commit import Completion, TaskCommit
from everbeat.domain.context import StopReason
from everbeat.runtime.blocking import refuse_in_loop
from everbeat.store.foreign import Do, Plan, Transaction


@final
class Detached:
    """Progress goes nowhere, nothing stops the code, checkpoints live as long as the call; a commit is the user's rows only."""

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        """Nobody looks."""
        del stage, fraction, message

    def stop_reason(self) -> StopReason | None:
        """Nobody asks it to stop."""
        return None

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        """As in a worker, so that a test finds the mistake."""
        refuse_in_loop(name, instead=instead)

    def store(self, checkpoint: Checkpoint) -> None:
        """The Context itself remembers it."""
        del checkpoint

    async def astore(self, checkpoint: Checkpoint) -> None:
        """The Context itself remembers it."""
        del checkpoint

    def commit(self, connection: object) -> TaskCommit:
        """The user's transaction, without a task."""
        return Transaction(connection, _RowsOnly(), line=self)

    def ask(self, request: Any) -> Any:
        """There is nobody to ask."""
        raise AssertionError(request)

    async def aask(self, request: Any) -> Any:
        """There is nobody to ask."""
        raise AssertionError(request)


class _RowsOnly:
    def begin(self) -> Plan[Completion]:
        yield Do("begin")
        return Completion()

    def end(self, error: BaseException | None) -> Plan[None]:
        if error is not None:
            yield Do("rollback")
            return
        try:
            yield Do("flush")
            yield Do("commit")
        except BaseException:
            yield Do("rollback")
            raise
