"""Failure handlers: tasks that are sent when another task fails for good."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable
from uuid import UUID

from msgspec import UNSET, Struct, UnsetType

from everbeat.domain.limit.model import NodeGate
from everbeat.domain.settings.checks import task_name
from everbeat.domain.settings.settings import refused
from everbeat.errors import TaskError


class FinalFailure(Struct, frozen=True, kw_only=True):
    """The final failure of a task, as passed to its failure handler.

    `state` is FAILED or EXPIRED, and `failed_at` the time of this change by the database's clock. `attempt` is the number of attempts that
    had started. `fence` is the number of claims. Together with `task_id`, it identifies the failed run. `node` is the name of the node, if the
    task belongs to a workflow. `arguments` are plain JSON values, or None if they take more than 100,000 bytes of JSON, in which case
    `arguments_omitted` is true. In the same way, `data_omitted` means that the error was so large that its `data` was left out.
    """

    task_id: UUID
    name: str
    queue: str
    state: Literal["FAILED", "EXPIRED"]
    error: TaskError
    attempt: int
    fence: int
    failed_at: datetime
    key: str | None = None
    labels: Mapping[str, Any] | None = None
    workflow_id: UUID | None = None
    node: str | None = None
    arguments: Mapping[str, Any] | None = None
    arguments_omitted: bool = False
    data_omitted: bool = False


class StoredHandler(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The task that PostgreSQL sends if another task fails. It is a part of the stored policy of the other task.

    `parameter` is the name of the handler's parameter that takes the FinalFailure. `policy` and `flags` are JSON text. The keys of the
    `gates` are computed when the handler is sent, because its argument is not known before.
    """

    name: str
    parameter: str
    queue: str
    priority: int = 0
    policy: str = "{}"
    flags: str | None = None
    serial: str | None = None
    gates: tuple[NodeGate, ...] | None = None
    costs: tuple[int, ...] | None = None


@runtime_checkable
class HandlerTask(Protocol):
    """A registered task function, as `@app.task` returns it."""

    @property
    def name(self) -> str:
        """Return the name of the task function."""
        ...

    def send(self) -> Any:
        """Store one task."""


OnFailure: TypeAlias = HandlerTask | str | UnsetType | None


def on_failure(value: object, /, *, subject: str) -> OnFailure:
    """Return a failure handler: a task, the name of one, None for no handler, or UNSET for the app's default handler.

    Raises ConfigurationError if the value is none of these.
    """
    if value is None or value is UNSET or (isinstance(value, HandlerTask) and isinstance(value.name, str)):
        return cast(OnFailure, value)
    if isinstance(value, str):
        return str(task_name(value, subject=subject))
    raise refused(
        value,
        subject=subject,
        code="WRONG_TYPE",
        rule=f"must be a task or the name of a task, not {type(value).__name__}",
        fix="register the handler with @app.task and pass it, or its name if it is registered later; None means no handler",
    )
