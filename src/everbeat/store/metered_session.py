"""A session of a worker that records how long its claims and settlements take."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Final, TypeVar

from everbeat.domain.metrics.meters import Meters, Operation
from everbeat.errors.wording import class_name
from everbeat.store.session import Session
from everbeat.store.statement import Statement, parted

T = TypeVar("T")
_OPERATIONS: Final[dict[str, Operation]] = {
    "task/claim_tasks": "receive",
    "task/settle_attempts": "settle",
    "task/complete_attempts": "settle",
}


class MeteredSession(Session):
    """A session that reports the duration of claims and settlements, with all their tries. Claims that find nothing do not count."""

    def __init__(self, *settings: Any, meters: Meters, **more: Any) -> None:
        super().__init__(*settings, **more)
        self._meters = meters

    async def run(
        self,
        statement: Statement[T],
        *,
        patience_s: float | None = None,
        goes_on: Callable[[float], bool] | None = None,
    ) -> T:
        """Run one statement, as `Session.run` does, and record its duration."""
        operation = _OPERATIONS.get(parted(statement.name)[0])
        if operation is None:
            return await super().run(statement, patience_s=patience_s, goes_on=goes_on)
        began_at = monotonic()
        try:
            answer = await super().run(statement, patience_s=patience_s, goes_on=goes_on)
        except Exception as problem:
            took_s = monotonic() - began_at
            self._meters.operated(operation, None, took_s=took_s, error_type=class_name(type(problem)))
            raise
        queues = (
            {task.queue for task in answer} if operation == "receive" and isinstance(answer, list) else {None}
        )
        if queues:
            queue = queues.pop() if len(queues) == 1 else None
            self._meters.operated(operation, queue, took_s=monotonic() - began_at, error_type=None)
        return answer
