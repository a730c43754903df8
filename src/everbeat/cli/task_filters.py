"""The options by which commands select tasks: those of `everbeat tasks list`, `everbeat dead` and bulk actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Final

import typer
from msgspec import Struct

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.selection import (
    full_batch_id,
    full_task_id,
    full_worker_id,
    full_workflow_id,
    labels_sought,
    to_past,
)
from everbeat.domain.task.states import TaskState, VirtualState


class ListedState(StrEnum):
    """The states and virtual states by which tasks can be selected."""

    PENDING = TaskState.PENDING
    CLAIMED = TaskState.CLAIMED
    RUNNING = TaskState.RUNNING
    COMPLETED = TaskState.COMPLETED
    FAILED = TaskState.FAILED
    CANCELLED = TaskState.CANCELLED
    EXPIRED = TaskState.EXPIRED
    RETRYING = VirtualState.RETRYING
    SCHEDULED = VirtualState.SCHEDULED
    SUSPENDED = VirtualState.SUSPENDED
    SUSPECT = VirtualState.SUSPECT
    OVERDUE = VirtualState.OVERDUE


class _Filter(Struct, frozen=True):
    """The option of a filter. `read` turns the typed value into the filter's value, and is given the app."""

    flag: str
    metavar: str
    help: str
    read: Callable[[App, Any], Any] = lambda _, value: value
    type: Any = str | None


FILTERS: Final[Mapping[str, _Filter]] = {
    "state": _Filter(
        "--state",
        "STATE",
        f"In this state; can be repeated: {', '.join(ListedState).lower()}.",
        lambda _, states: states or None,
        list[ListedState] | None,
    ),
    "name": _Filter("--name", "TASK", "With this name."),
    "queue": _Filter("--queue", "QUEUE", "In this queue."),
    "key": _Filter("--key", "TEXT", "With this key."),
    "workflow": _Filter("--workflow", "ID", "Tasks of this workflow's nodes.", full_workflow_id),
    "parent": _Filter("--parent", "ID", "Sent by this task.", full_task_id),
    "batch": _Filter(
        "--batch", "ID", "Of this batch.", lambda app, given: given and full_batch_id(app, given)
    ),
    "since": _Filter(
        "--since",
        "WHEN",
        "Since 2030-01-31T12:00:00Z, or within the last 10m.",
        lambda _, given: to_past(given),
    ),
    "until": _Filter(
        "--until",
        "WHEN",
        "Before 2030-01-31T12:00:00Z, or earlier than 10m ago.",
        lambda _, given: to_past(given, option="--until"),
    ),
    "labels": _Filter(
        "--label",
        "KEY[=VALUE]",
        "With this label; can be repeated.",
        lambda _, given: labels_sought(given) or None,
        list[str] | None,
    ),
    "worker": _Filter("--worker", "WORKER", "Claimed or run by this worker.", full_worker_id),
    "error": _Filter("--error", "CODE", "Failed with this code or exception class."),
    "arguments_contain": _Filter(
        "--arguments-contain", "TEXT", "With this text in the JSON of its arguments."
    ),
}
"""The options of `TaskFilters`, by the name of the filter."""
_OPTIONS: Final = {name: each.flag for name, each in FILTERS.items()} | {
    "workflow_id": "--workflow",
    "batch_id": "--batch",
    "before": "--before",
}


def filter_parameters(*, prefix: str = "") -> list[Parameter]:
    """Return the parameters of a command for all filters. The help of each option begins with `prefix`."""
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(each, prefix=prefix))
        for name, each in FILTERS.items()
    ]


def _annotation(of: _Filter, *, prefix: str) -> Any:
    text = f"{prefix}{of.help[0].lower()}{of.help[1:]}" if prefix else of.help
    return Annotated[of.type, typer.Option(of.flag, metavar=of.metavar, help=text, case_sensitive=False)]


def read_filters(app: App, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters for `App.list_tasks` from the values of the options. Complete the ids. Raises the errors of `selection`."""
    return {name: each.read(app, given[name]) for name, each in FILTERS.items()}


def with_filters(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select tasks to a command, and pass them to it as `filters`.

    A ConfigurationError about a filter names its option.
    """
    declared = signature(command, eval_str=True)
    parameters: list[Parameter] = []
    for each in declared.parameters.values():
        parameters += filter_parameters() if each.name == "filters" else [each]

    @wraps(command)
    def run(app: App, **given: Any) -> None:
        chosen = {name: given.pop(name) for name in FILTERS}
        with filters_as_options():
            command(app, filters=read_filters(app, chosen), **given)

    run.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def filters_as_options() -> AbstractContextManager[None]:
    """Rename the subjects of a ConfigurationError about filters after their options."""
    return named_as_options(_OPTIONS)
