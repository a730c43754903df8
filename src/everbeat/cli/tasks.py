"""`everbeat tasks list | show | cancel | retry | signal | pause | resume | pauses`."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec
import typer

from everbeat.cli.output import brief, brief_moment, say, show_json, show_table, state
from everbeat.cli.pauses import add_listing, add_pausing
from everbeat.cli.selection import AppOption, JsonOption, LimitOption, SchemaOption, UrlOption, selected_app
from everbeat.cli.several import Done, for_each
from everbeat.cli.task_page import show_task, task_document
from everbeat.cli.typed import typed_as
from everbeat.client.control import CancelVerdict
from everbeat.domain.inspection import TaskSummary
from everbeat.domain.states import TaskState
from everbeat.errors import TaskNotFound, TaskNotRetryable
from everbeat.errors.visible import on_one_line
from everbeat.runtime.clock import SystemClock

commands = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

IdArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="ID", help="The task's id.", show_default=False)
]
IdsArgument: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="ID...", help="The tasks' ids.", show_default=False)
]

_SAID: Final = {
    CancelVerdict.CANCELLED: "cancelled",
    CancelVerdict.REQUESTED: "asked to stop",
    CancelVerdict.ALREADY_ENDED: "had ended before and stays as it is",
}


@commands.command("list")
def list_tasks(
    *,
    states: Annotated[
        list[TaskState] | None,
        typer.Option("--state", case_sensitive=False, help="In this state; may be given several times."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="TASK", help="Of this task function.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="In this queue.")] = None,
    workflow: Annotated[
        str | None, typer.Option("--workflow", metavar="ID", help="Of the nodes of this workflow.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="ID", help="Sent by this task, as its children.")
    ] = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="Older than this one: the next page.")
    ] = None,
    limit: LimitOption = 50,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks, newest first."""
    options = {"workflow_id": "--workflow"}
    with selected_app(url=url, schema=schema, locator=app) as chosen, typed_as(options):
        found = chosen.list_tasks(
            state=states or None,
            name=name,
            queue=queue,
            workflow=workflow,
            parent=parent,
            before=before,
            limit=limit,
        )
    if as_json:
        show_json({"tasks": [task_document(task) for task in found]})
        return
    columns = ("ID", "STATE", "NAME", "QUEUE", "TRY", "SENT", "WHAT")
    rows = [
        (
            str(task.id),
            state(task.state),
            task.name,
            task.queue,
            str(task.attempt),
            brief_moment(task.sent_at),
            _remark(task),
        )
        for task in found
    ]
    show_table(columns, rows, numbers=("TRY",), empty="No task is like that.")
    if len(found) == limit:
        say(f"There may be more: --before {found[-1].id}")


def _remark(task: TaskSummary) -> str:
    if task.error is not None and task.state is not TaskState.COMPLETED:
        return brief(str(task.error))
    if task.progress is not None and task.state is TaskState.RUNNING:
        done = "" if task.progress.fraction is None else f" {task.progress.fraction:.0%}"
        return f"{task.progress.stage}{done} {task.progress.message}".rstrip()
    if task.waits_for is not None:
        return f"waits for event {task.waits_for}"
    if task.state is TaskState.PENDING and task.enqueued_at > SystemClock().wall():
        return f"due at {brief_moment(task.enqueued_at)}"
    return ""


@commands.command()
def show(
    task_id: IdArgument,
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything about one task: times, attempts, heartbeat, recoveries, and why it waits."""
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        task = chosen.info(task_id)
    if as_json:
        show_json(task_document(task))
    else:
        show_task(task)


@commands.command()
def cancel(
    task_ids: IdsArgument,
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel tasks: those that wait at once, running ones are asked to stop."""
    with selected_app(url=url, schema=schema, locator=app) as chosen:

        def one(task_id: str) -> Done:
            result = chosen.cancel(task_id)
            document = {"id": task_id, "verdict": result.verdict, "state": result.state}
            return Done(document, f"{task_id}  {result.state}  {_SAID[result.verdict]}")

        for_each(task_ids, one, refusals=(TaskNotFound,), key="id", listed_as="tasks", as_json=as_json)


@commands.command()
def retry(
    task_ids: IdsArgument,
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run tasks again that ended FAILED, CANCELLED or EXPIRED, now and with fresh retries."""
    with selected_app(url=url, schema=schema, locator=app) as chosen:

        def one(task_id: str) -> Done:
            chosen.retry(task_id)
            document = {"id": task_id, "state": TaskState.PENDING}
            return Done(document, f"{task_id}  {TaskState.PENDING}  runs again")

        refusals = (TaskNotFound, TaskNotRetryable)
        for_each(task_ids, one, refusals=refusals, key="id", listed_as="tasks", as_json=as_json)


@commands.command()
def signal(
    target: Annotated[
        str, typer.Argument(metavar="ID", help="The id of a task or a workflow.", show_default=False)
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the event.", show_default=False)],
    value: Annotated[
        str, typer.Argument(metavar="[JSON]", help="What is told with it, as JSON.", show_default=False)
    ] = "null",
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell a task, or all tasks of a workflow, of an event: whoever waits for it goes on."""
    told = _json(value)
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        chosen.signal(target, name, told)
    if as_json:
        show_json({"id": target, "name": name, "value": told})
    else:
        print(on_one_line(f"{target}  {name}  stored"))


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise typer.BadParameter(
            f"{text!r} is no JSON: {error}. Write a text in quotes of its own, such as '\"yes\"'."
        ) from None


add_pausing(commands, "task")
add_listing(commands)
