"""The attempt to which the running code belongs. A log filter reads it without loading the Context."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, Protocol
from uuid import UUID


class CurrentAttempt(Protocol):
    """The identity of an attempt, which is part of its Context."""

    @property
    def task_id(self) -> UUID:
        """Return the task's id."""

    @property
    def name(self) -> str:
        """Return the task's name."""

    @property
    def attempt(self) -> int:
        """Return the attempt's number."""

    @property
    def worker_id(self) -> str:
        """Return the id of the worker that runs it."""

    def _trace_ids(self) -> tuple[str, str] | None:
        """Return the trace id and the span id of the running code, or None if the app has no tracer."""


make_current: Final[ContextVar[Callable[[], CurrentAttempt] | None]] = ContextVar(
    "everbeat_context", default=None
)
"""Returns the Context of the running code. It is made when it is first needed."""


class AttemptLogger(Protocol):
    """Captures the log records of one attempt."""

    def capture(self, record: logging.LogRecord) -> None:
        """Add a record to the log of the attempt."""


current_log: Final[ContextVar[AttemptLogger | None]] = ContextVar("everbeat_log", default=None)
"""The captured log of the running code, if its log is captured."""


def current_attempt() -> CurrentAttempt | None:
    """Return the Context of the running code, or None outside an attempt."""
    make = make_current.get()
    return None if make is None else make()
