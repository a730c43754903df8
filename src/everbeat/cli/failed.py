"""The commands `everbeat failures`, which groups failures, and `everbeat dead`, which lists dead letters and runs them again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Annotated, Any

import typer
from msgspec import structs

from everbeat.app import App
from everbeat.cli.acting import retry_tasks
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import Column, brief, brief_moment, say, show_json, show_rows
from everbeat.cli.selection import (
    LabelFilterOption,
    LimitOption,
    SinceOption,
    SmallLimitOption,
    full_task_id,
    labels_sought,
    short_ids,
    to_moment,
    to_past,
    with_app,
)
from everbeat.cli.task_filters import with_filters
from everbeat.cli.tasks import TaskIdsArgument, show_page
from everbeat.domain.documents import task_document
from everbeat.errors.wording import amount

NameOption = Annotated[str | None, typer.Option("--name", metavar="TASK", help="With this name.")]
QueueOption = Annotated[str | None, typer.Option("--queue", metavar="QUEUE", help="In this queue.")]

commands = typer.Typer(rich_markup_mode=None, add_completion=False)
dead = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="Show tasks that FAILED or EXPIRED: `list` (the default). Run some of them again: `redrive`.",
)
commands.add_typer(dead, name="dead")


@commands.command()
@with_app
def failures(
    app: App,
    *,
    name: NameOption = None,
    queue: QueueOption = None,
    label: LabelFilterOption = None,
    since: SinceOption = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="TIME", help="Failed before 2030-01-31T12:00:00Z.")
    ] = None,
    limit: SmallLimitOption = 50,
    as_json: bool,
) -> None:
    """Count failures by task, error code and exception class, the latest first.

    The list covers the 10,000 latest failures, and the EXPIRED tasks among the 10,000 newest tasks. A retried task is not
    counted until it fails again.
    """
    with named_as_options({"labels": "--label", "since": "--since", "before": "--before"}):
        found = app.failures(
            name=name,
            queue=queue,
            labels=labels_sought(label),
            since=to_past(since),
            before=None if before is None else to_moment(before, option="--before"),
            limit=limit,
        )
    if as_json:
        groups = [structs.asdict(group) for group in found]
        show_json({"failures": groups, "examined": found.examined, "continue_before": found.continue_before})
        return
    ids = short_ids(app, uuids=[group.example_id for group in found])
    show_rows(
        (
            (
                Column("COUNT", f"{group.count:,}", is_number=True),
                Column("NAME", group.name),
                Column("CODE", group.code),
                Column("CLASS", group.type, drop=2),
                Column("FIRST", brief_moment(group.first_at), drop=3),
                Column("LAST", brief_moment(group.last_at), drop=1),
                Column("EXAMPLE", ids.uuid(group.example_id)),
                Column("MESSAGE", brief(group.message), is_text=True),
            )
            for group in found
        ),
        empty="No failures.",
    )
    if found.continue_before is not None:
        say(
            f"The search stopped after the {found.examined:,} latest failures. Continue with earlier ones:"
            f" --before {found.continue_before.astimezone(UTC).isoformat()}"
        )


@dead.command("list")
@with_app
@with_filters
def list_dead(
    app: App,
    *,
    filters: Mapping[str, Any],
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="The page after this task in the list.")
    ] = None,
    limit: LimitOption = 50,
    as_json: bool,
) -> None:
    """List the tasks that FAILED or EXPIRED and were not retried since, the latest failure first.

    The list covers the 50,000 latest failures, and the EXPIRED tasks among the 50,000 newest tasks.
    """
    with named_as_options({"dead.state": "--state"}):
        found = app.dead(**filters, before=full_task_id(app, before), limit=limit)
    if as_json:
        tasks = [task_document(task) for task in found]
        show_json({"tasks": tasks, "examined": found.examined, "continue_before": found.continue_before})
        return
    show_page(
        app, found, limit=limit, again="everbeat tasks list --state failed --state expired --order sent"
    )
    if alone := [task for task in found if task.workflow_id is None]:
        say(f"Run {amount(len(alone), 'task')} again, each by its id: everbeat dead redrive ID...")
        say("Run all tasks of a name again: everbeat tasks retry --all --name TASK")
    if of_workflows := len(found) - len(alone):
        say(f"{amount(of_workflows, 'task')} of workflows: everbeat workflows retry ID")


@dead.command()
@with_app
def redrive(app: App, task_ids: TaskIdsArgument, *, as_json: bool) -> None:
    """Run tasks that FAILED or EXPIRED again, now and with all their retries, as `everbeat tasks retry` does."""
    retry_tasks(app, task_ids, as_json=as_json)
