"""One task as people and as programs see it.

What lives here: the page of `everbeat tasks show`, and a task as a JSON document. What may not: fetching it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs
from rich.text import Text

from everbeat.cli.output import (
    brief,
    compact_json,
    duration,
    moment,
    optional_moment,
    paragraph,
    show_heading,
    show_pairs,
    show_table,
    state,
)
from everbeat.cli.recoveries import show_recoveries
from everbeat.domain.inspection import AttemptInfo, TaskInfo, TaskSummary
from everbeat.domain.needs import Needs
from everbeat.domain.outcome import TaskError


def task_document(task: TaskSummary) -> dict[str, object]:
    """A task with its record's names as keys, whether a worker has claimed it, and when it ended."""
    document = structs.asdict(task)
    return document | {"claimed": task.claimed, "ended_at": task.ended_at}


def show_task(task: TaskInfo) -> None:
    """Writes the page of one task to stdout."""
    show_pairs(_facts(task))
    if task.attempts:
        show_heading("Attempts")
        show_table(
            ("NO", "OUTCOME", "STARTED AT", "TOOK", "RETRIED", "ERROR", "WORKER"),
            [_attempt(each) for each in task.attempts],
            empty="",
        )
    if task.recoveries:
        show_heading("Recoveries")
        show_recoveries(task.recoveries, empty="")
    if task.error is not None and task.error.traceback:
        show_heading("Traceback")
        show_pairs([("", paragraph(task.error.traceback.rstrip()))])


def _facts(task: TaskInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "id", str(task.id)
    yield "name", task.name
    yield "queue", task.queue
    yield "workflow", None if task.workflow_id is None else str(task.workflow_id)
    yield "node", task.node
    yield "state", state(task.state)
    yield (
        "waits because",
        None if task.waiting_because is None else Text(task.waiting_because, style="yellow"),
    )
    yield "arguments", compact_json(task.arguments)
    yield "needs", _needs(task.needs)
    yield "result", None if task.completed_at is None else compact_json(task.result)
    yield "error", _error(task.error)
    yield "error data", _error_data(task.error)
    yield "progress", _progress(task)
    yield "priority", str(task.priority)
    yield "key", task.key
    yield "flags", compact_json(task.flags) if task.flags else None
    yield "attempt", str(task.attempt)
    counted = (
        (task.retry_count, "retry", "retries"),
        (task.crash_count, "crash", "crashes"),
        (task.loss_count, "loss", "losses"),
    )
    yield "counted", ", ".join(f"{number} {one if number == 1 else many}" for number, one, many in counted)
    for name in (
        "sent_at",
        "enqueued_at",
        "claimed_at",
        "started_at",
        "completed_at",
        "failed_at",
        "cancelled_at",
        "expired_at",
        "next_retry_at",
        "good_until",
        "cancel_requested_at",
    ):
        yield name.replace("_", " "), optional_moment(getattr(task, name))
    yield "worker", task.claimed_by_worker_id
    yield "parent", None if task.parent_id is None else str(task.parent_id)
    yield "heartbeat", _heartbeat(task)


def _needs(needs: Needs | None) -> str | None:
    if needs is None:
        return None
    arguments = f"code that takes the arguments {', '.join(needs.arguments) or 'none'}"
    return "; ".join([arguments, *needs.other])


def _heartbeat(task: TaskInfo) -> str | None:
    beat = task.heartbeat
    if beat is None:
        return None
    return f"{moment(beat.sent_at)} from {beat.sender_id} ({beat.role}, {beat.hostname}, pid {beat.pid})"


def _progress(task: TaskInfo) -> str | None:
    progress = task.progress
    if progress is None:
        return None
    done = "" if progress.fraction is None else f" {progress.fraction:.0%}"
    return f"{progress.stage}{done} {progress.message}".rstrip()


def _error(error: TaskError | None) -> Text | None:
    if error is None:
        return None
    return paragraph(f"{error} ({error.type})" if error.type else str(error))


def _error_data(error: TaskError | None) -> str | None:
    return None if error is None or error.data is None else compact_json(error.data)


def _attempt(attempt: AttemptInfo) -> tuple[str, ...]:
    return (
        str(attempt.attempt),
        attempt.outcome,
        moment(attempt.started_at),
        duration((attempt.ended_at - attempt.started_at).total_seconds()),
        "yes" if attempt.will_retry else "no",
        "" if attempt.error is None else brief(str(attempt.error)),
        attempt.worker_id,
    )
