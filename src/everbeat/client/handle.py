"""What a send gives back: a way to wait for its task, ask about it, and cancel it.

What lives here: `Handle`. What may not: how many handles share one listener.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar
from uuid import UUID

from everbeat.domain.duration import Duration
from everbeat.domain.outcome import Completed, Failed

R_co = TypeVar("R_co", covariant=True)


class Handle(Generic[R_co]):
    """One sent task, by its `id`; every blocking method has a twin to await, named with a leading `a`."""

    id: UUID

    def result(self, *, timeout: Duration | None = None) -> R_co:
        """What the task returned; raises TaskFailed if it did not complete, WaitTimeout after `timeout`."""
        raise NotImplementedError

    async def aresult(self, *, timeout: Duration | None = None) -> R_co:
        """As `result`, to await."""
        raise NotImplementedError

    def outcome(self, *, timeout: Duration | None = None) -> Completed[R_co] | Failed:
        """How the task ended; raises WaitTimeout after `timeout`."""
        raise NotImplementedError

    async def aoutcome(self, *, timeout: Duration | None = None) -> Completed[R_co] | Failed:
        """As `outcome`, to await."""
        raise NotImplementedError

    def info(self) -> Any:
        """The task as it is now; raises TaskNotFound."""
        raise NotImplementedError

    async def ainfo(self) -> Any:
        """As `info`, to await."""
        raise NotImplementedError

    def cancel(self) -> Any:
        """Asks for the task to be cancelled; a task that waits is cancelled at once."""
        raise NotImplementedError

    async def acancel(self) -> Any:
        """As `cancel`, to await."""
        raise NotImplementedError
