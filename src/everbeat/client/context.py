"""The public home of `Context`, which lies in the domain because workers make it and clients only name it."""

from __future__ import annotations

from everbeat.domain.context import Context, OutsideTask, OutsideWorker, TaskStopped, TaskSuspended
from everbeat.domain.durable import NamedStep

__all__ = ["Context", "NamedStep", "OutsideTask", "OutsideWorker", "TaskStopped", "TaskSuspended"]
