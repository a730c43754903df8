"""The commands of `everbeat tasks`, and a function that waits for a single task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, inf
from time import monotonic
from typing import Annotated, Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from everbeat.app import App
from everbeat.cli.acting import add_acting
from everbeat.cli.output import (
    Column,
    brief,
    brief_moment,
    compact_json,
    duration,
    moment,
    optional_moment,
    paragraph,
    say,
    show_heading,
    show_json,
    show_pairs,
    show_rows,
    shown_labels,
    state,
    stderr_console,
)
from everbeat.cli.queues import add_listing, add_pausing
from everbeat.cli.recoveries import show_recoveries
from everbeat.cli.selection import (
    LimitOption,
    ShortIds,
    TaskIdArgument,
    full_target_id,
    full_task_id,
    short_ids,
    with_app,
)
from everbeat.cli.task_filters import with_filters
from everbeat.cli.task_streams import add_streams
from everbeat.domain.documents import task_document
from everbeat.domain.explain.reasons import retry_of_step
from everbeat.domain.inspection import (
    AttemptInfo,
    TaskInfo,
    TaskPage,
    TaskSummary,
)
from everbeat.domain.settings.units import Duration, to_seconds
from everbeat.domain.task.gathering import awaited
from everbeat.domain.task.needs import Needs
from everbeat.domain.task.questions import is_answer
from everbeat.domain.task.states import TaskState
from everbeat.errors import TaskError, WaitTimeout
from everbeat.errors.wording import amount, on_one_line
from everbeat.runtime.clock import SystemClock


def _show_task(task: TaskInfo, *, ids: ShortIds) -> None:
    show_pairs(_facts(task))
    if task.attempts:
        show_heading("Attempts")
        show_rows(_attempt(each, ids=ids) for each in task.attempts)
    if task.recoveries:
        show_heading("Recoveries")
        show_recoveries(task.recoveries, ids=ids)
    if task.error is not None and task.error.traceback:
        show_heading("Traceback")
        show_pairs([("", paragraph(task.error.traceback.rstrip()))])


def _facts(task: TaskInfo) -> Iterator[tuple[str, str | Text | None]]:
    yield "id", str(task.id)
    yield "name", task.name
    yield "queue", task.queue
    yield "workflow", None if task.workflow_id is None else str(task.workflow_id)
    yield "node", task.node
    yield "schedule", task.schedule
    yield "tick", optional_moment(task.tick)
    yield "state", state(task.state)
    yield (
        "waits because",
        None if task.waiting_because is None else Text(on_one_line(task.waiting_because), style="yellow"),
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
    yield "labels", shown_labels(task.labels)
    yield "attempt", str(task.attempt)
    counted = (
        (task.retry_count, "retry", "retries"),
        (task.crash_count, "crash", "crashes"),
        (task.loss_count, "loss", "losses"),
    )
    yield "counted", ", ".join(amount(number, one, plural=many) for number, one, many in counted)
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
    yield "batch", None if task.batch_id is None else str(task.batch_id)
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


def _progress(task: TaskSummary) -> str | None:
    progress = task.progress
    if progress is None:
        return None
    done = "" if progress.fraction is None else f" {progress.fraction:.0%}"
    return f"{progress.stage}{done} {progress.message}".rstrip()


def _error(error: TaskError | None) -> Text | None:
    if error is None:
        return None
    text = str(error)
    return paragraph(text if error.type is None or error.type in text else f"{text} ({error.type})")


def _error_data(error: TaskError | None) -> str | None:
    return None if error is None or error.data is None else compact_json(error.data)


def _attempt(attempt: AttemptInfo, *, ids: ShortIds) -> tuple[Column, ...]:
    took_s = (attempt.ended_at - attempt.started_at).total_seconds()
    return (
        Column("NO", str(attempt.attempt)),
        Column("OUTCOME", attempt.outcome),
        Column("STARTED AT", moment(attempt.started_at), drop=1),
        Column("TOOK", duration(took_s), drop=2),
        Column("RETRIED", "yes" if attempt.will_retry else "no", drop=3),
        Column("ERROR", "" if attempt.error is None else brief(str(attempt.error)), is_text=True),
        Column("WORKER", ids.party(attempt.worker_id)),
    )


commands = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

TaskIdsArgument: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="ID...", help="The tasks' ids.", show_default=False)
]
_COUNTDOWN_S: Final = 120


@commands.command("list")
@with_app
@with_filters
def list_tasks(
    app: App,
    *,
    filters: Mapping[str, Any],
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="The page after this task in the list.")
    ] = None,
    order: Annotated[
        Literal["happened", "sent"],
        typer.Option("--order", help="Sort by the last change, or by the time of the send."),
    ] = "happened",
    limit: LimitOption = 50,
    as_json: bool,
) -> None:
    """List tasks, the most recently changed first.

    The list covers tasks in flight, the 50,000 latest failures, and the 50,000 newest others. Older tasks are listed
    with --order sent.
    """
    found = app.list_tasks(**filters, before=full_task_id(app, before), order=order, limit=limit)
    if as_json:
        tasks = [task_document(task) for task in found]
        show_json(
            {
                "tasks": tasks,
                "examined": found.examined,
                "continue_before": found.continue_before,
                "unindexed": found.unindexed,
            }
        )
        return
    show_page(app, found, limit=limit, again="--order sent")


def show_page(app: App, found: TaskPage, *, limit: int, again: str) -> None:
    """Print a table of tasks, and how to continue if there might be more. `again` lists the older tasks."""
    ids = short_ids(app, uuids=[task.id for task in found])
    rows = [
        (
            Column("ID", ids.uuid(task.id)),
            Column("STATE", state(task.state)),
            Column("NAME", task.name),
            Column("QUEUE", task.queue, drop=3),
            Column("TRY", str(task.attempt), drop=2, is_number=True),
            Column("SENT", brief_moment(task.sent_at), drop=4),
            Column("CHANGED", brief_moment(task.last_event_at), drop=1),
            Column("WHAT", _remark(task), is_text=True),
        )
        for task in found
    ]
    show_rows(rows, empty="No matching tasks.")
    if len(found) == limit:
        say(f"There might be more: --before {found[-1].id}")
    elif found.continue_before is not None:
        say(
            f"The search stopped after the {found.examined:,} newest tasks. Continue with older tasks:"
            f" {again} --before {found.continue_before}"
        )


def _remark(task: TaskSummary) -> str:
    due_in_s = (task.enqueued_at - SystemClock().wall()).total_seconds()
    if task.failed_try is not None:
        retry, error = retry_of_step(task.failed_try), brief(str(task.failed_try.error))
        return f"{retry} in {_countdown(due_in_s)}: {error}" if due_in_s > 0 else f"{retry}: {error}"
    if task.error is not None and task.state is TaskState.PENDING and due_in_s > 0:
        return f"retry in {_countdown(due_in_s)}: {brief(str(task.error))}"
    if task.state is TaskState.RUNNING and (progress := _progress(task)) is not None:
        return progress
    if task.error is not None and task.state is not TaskState.COMPLETED:
        return brief(str(task.error))
    if is_answer(task.waits_for):
        return "waits for an answer"
    if task.waits_for is not None:
        return f"waits for {awaited(task.waits_for)}"
    if task.state is TaskState.PENDING and due_in_s > 0:
        return f"due at {brief_moment(task.enqueued_at)}"
    return ""


def _countdown(seconds: float) -> str:
    return f"{ceil(seconds)} s" if seconds <= _COUNTDOWN_S else duration(seconds)


@commands.command()
@with_app
def show(app: App, task_id: TaskIdArgument, *, as_json: bool) -> None:
    """Show everything about one task: times, attempts, heartbeat, recoveries, and why it is waiting."""
    task = app.info(full_task_id(app, task_id))
    if as_json:
        show_json(task_document(task))
        return
    workers = [*(each.worker_id for each in task.attempts), *(each.worker_id for each in task.recoveries)]
    _show_task(task, ids=short_ids(app, uuids=[task.id], parties=workers))


add_acting(commands)


@commands.command()
@with_app
def signal(
    app: App,
    target: Annotated[
        str, typer.Argument(metavar="ID", help="The id of a task or a workflow.", show_default=False)
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the signal.", show_default=False)],
    value: Annotated[
        str, typer.Argument(metavar="[JSON]", help="The event's value, as JSON.", show_default=False)
    ] = "null",
    *,
    as_json: bool,
) -> None:
    """Send an event to a task, or to all tasks of a workflow. A task that waits for it continues."""
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise typer.BadParameter(
            f"{value!r} is not JSON: {error}. Put quotes around a text, such as '\"yes\"'."
        ) from None
    target = full_target_id(app, target)
    app.signal(target, name, decoded)
    if as_json:
        show_json({"id": target, "name": name, "value": decoded})
    else:
        print(on_one_line(f"{target}  {name}  stored"))


add_pausing(commands, "task")
add_listing(commands)
add_streams(commands)

_POLL_INTERVAL_S: Final = 0.5


def wait_for(app: App, task_id: UUID, *, timeout: Duration | None) -> TaskInfo:
    """Wait until a task ends and return its details. Raises WaitTimeout, TaskNotFound or a DatabaseError."""
    console = stderr_console()
    try:
        if console.is_terminal:
            _watch(app, task_id, timeout=timeout, console=console)
        else:
            app.handle(task_id).outcome(timeout=timeout)
    except WaitTimeout:
        if reason := app.info(task_id).waiting_because:
            console.print(on_one_line(f"It waits because: {reason}."))
        raise
    return app.info(task_id)


def _watch(app: App, task_id: UUID, *, timeout: Duration | None, console: Console) -> None:
    limit_s = None if timeout is None else to_seconds(timeout, subject="timeout")
    since = monotonic()
    handle = app.handle(task_id)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("PENDING", total=None)
        while True:
            left_s = inf if limit_s is None else since + limit_s - monotonic()
            try:
                handle.outcome(timeout=max(0.0, min(_POLL_INTERVAL_S, left_s)))
            except WaitTimeout:
                waited_s = monotonic() - since
                task = app.info(task_id)
                if limit_s is not None and waited_s >= limit_s:
                    raise WaitTimeout(task_id, waited_s, state=task.state) from None
                bars.update(bar, description=on_one_line(_described(task)))
                if task.progress is not None and task.progress.fraction is not None:
                    bars.update(bar, total=1.0, completed=task.progress.fraction)
            else:
                return


def _described(task: TaskInfo) -> str:
    if task.waiting_because is not None:
        return f"{task.state} ({task.waiting_because})"
    return str(task.state) if task.progress is None else f"{task.state} {task.progress.stage}"
