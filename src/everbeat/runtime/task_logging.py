"""Log records of running attempts: which task, attempt and worker a record belongs to."""

from __future__ import annotations

import logging
from typing import Any, Final

from everbeat.domain.task.current import current_attempt

TASK_FIELDS: Final = ("task_id", "task_name", "attempt", "worker_id", "trace_id", "span_id")
"""The attributes of a log record that `TaskFilter` sets."""


def task_fields() -> dict[str, Any]:
    """Return the task id, task name, attempt number and worker id of the running attempt, or an empty dict outside an attempt.

    If the app has a tracer, return also the trace id and the span id of the running code.
    """
    attempt = current_attempt()
    if attempt is None:
        return {}
    fields = {
        "task_id": str(attempt.task_id),
        "task_name": attempt.name,
        "attempt": attempt.attempt,
        "worker_id": attempt.worker_id,
    }
    ids = attempt._trace_ids()
    return fields if ids is None else {**fields, "trace_id": ids[0], "span_id": ids[1]}


class TaskFilter(logging.Filter):
    """Sets the attributes `task_id`, `task_name`, `attempt`, `worker_id`, `trace_id` and `span_id` of log records. It drops no record.

    Add the filter to a handler, so that it sees the records of all loggers. Outside an attempt, the attributes are empty strings.
    So are `trace_id` and `span_id` if the app has no tracer.
    Attributes that the record already has, for example from `extra`, are kept.

        handler.addFilter(TaskFilter())
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the attributes and return True."""
        fields = task_fields()
        for name in TASK_FIELDS:
            if not hasattr(record, name):
                setattr(record, name, fields.get(name, ""))
        return True


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the attributes of a record that `TaskFilter` has set, without those that are empty."""
    given = {name: getattr(record, name, "") for name in TASK_FIELDS}
    return {name: value for name, value in given.items() if value != ""}
