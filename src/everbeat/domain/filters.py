"""The filters of lists of tasks, recoveries, workflows and actions of operators, and those of bulk actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TypedDict
from uuid import UUID

from everbeat.domain.settings.units import When


class TaskFilters(TypedDict, total=False):
    """Filters for tasks. A task must match all given filters."""

    state: str | Sequence[str] | None
    """Select tasks in any of these states. Virtual states, such as "retrying", are also valid (see `VirtualState` in `everbeat.inspection`)."""
    name: str | None
    queue: str | None
    key: str | None
    """Select tasks that were sent with this key, also those that have ended."""
    workflow: UUID | str | None
    """Select the nodes of this workflow."""
    parent: UUID | str | None
    """Select the children of this task."""
    batch: UUID | str | None
    """Select the tasks of this batch."""
    since: When | None
    """Select tasks with an event since this time, or within this duration before now."""
    worker: str | None
    """Select tasks that this worker holds, was the last to hold, or has attempted."""
    error: str | None
    """Select tasks by error code, or by the name of the exception class with or without its module."""
    until: When | None
    """Select tasks whose last event was before this time, or earlier than this duration before now."""
    labels: Mapping[str, str | None] | None
    """Select tasks with all of these labels. None as a value selects tasks that have the key with any value."""
    arguments_contain: str | None
    """Select tasks whose arguments contain this text, in their stored form as JSON. Upper and lower case differ."""


class RecoveryFilters(TypedDict, total=False):
    """Filters for recoveries. A recovery must match all given filters."""

    number: int | None
    worker: str | None
    """Select recoveries after the death of this worker."""
    since: When | None
    cause: str | None
    """Select recoveries by part of the cause, or by how the death was noticed, such as "age"."""
    ended_before: datetime | None
    """Select recoveries of tasks that ended before this time."""


class WorkflowFilters(TypedDict, total=False):
    """Filters for workflows. A workflow must match all given filters."""

    name: str | None
    state: str | None
    key: str | None
    parent: UUID | str | None
    """Select workflows that this task started."""
    children: bool
    """Include workflows that are nodes of other workflows, which are omitted by default."""
    since: When | None
    """Select workflows that were sent, paused, cancelled or finished since this time, or within this duration before now."""
    until: When | None
    """Select workflows whose last such event was before this time, or earlier than this duration before now."""
    labels: Mapping[str, str | None] | None
    """Select workflows with all of these labels. None as a value selects workflows that have the key with any value."""


class BulkFilters(TaskFilters, total=False):
    """The filters of a bulk action, and how it is requested."""

    everything: bool
    """Allow the action without filters, on all tasks to which it applies."""
    dry_run: bool
    """Count the tasks that the action would change, and change nothing."""
    by: str | None
    """The name for the audit log. By default, the user and the host."""
    reason: str | None
    """A note for the audit log."""


class AuditFilters(TypedDict, total=False):
    """Filters for the audit log. An entry must match all given filters."""

    since: When | None
    actor: str | None
    action: str | None
    before: int | None
    """Select entries with smaller ids, which is the next page."""
