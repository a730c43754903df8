"""`everbeat recoveries list | show`; `list` is meant where neither is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from everbeat.cli.default_command import ListByDefault
from everbeat.cli.moments import to_past
from everbeat.cli.output import brief_moment, duration, show_json, show_table
from everbeat.cli.recovery_page import show_recovery
from everbeat.cli.selection import AppOption, JsonOption, LimitOption, SchemaOption, UrlOption, selected_app
from everbeat.cli.typed import typed_as
from everbeat.domain.inspection import RecoveryInfo
from everbeat.errors import RecoveryNotFound

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="Show what was rescued from dead workers: `list` (meant where nothing is named) or one of them.",
)


@commands.command("list")
def list_recoveries(
    *,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="Of this task only.")] = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="WORKER", help="Of what this dead worker held.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="WHEN", help="Recovered since 2030-01-31T12:00:00Z, or within 2h."),
    ] = None,
    cause: Annotated[
        str | None,
        typer.Option("--cause", metavar="TEXT", help="With this in the cause, or noticed in this way."),
    ] = None,
    limit: LimitOption = 50,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what was rescued from dead workers.

    One line a rescued task, newest first: who died of what, how and how soon that was noticed, what was done.
    """
    moment = None if since is None else to_past(since, option="--since")
    options = {"cause": "--cause"}
    with selected_app(url=url, schema=schema, locator=app) as chosen, typed_as(options):
        found = chosen.recoveries(task, worker=worker, since=moment, cause=cause, limit=limit)
    if as_json:
        show_json({"recoveries": found})
    else:
        is_all = (task, worker, since, cause) == (None,) * 4
        show_recoveries(
            found, empty="Nothing had to be recovered." if is_all else "No recovery is like that."
        )


@commands.command()
def show(
    number: Annotated[int, typer.Argument(metavar="NO", help="The recovery's number.", show_default=False)],
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything about one recovery: the death, what was done, and what became of the task."""
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        found = chosen.recoveries(number=number, limit=1)
    if not found:
        raise RecoveryNotFound(
            f"Recovery {number} does not exist: there never was one in this schema, or it was pruned with its task.",
            fix="list them with 'everbeat recoveries'; those of a task with --task.",
        )
    if as_json:
        show_json({"recovery": found[0]})
    else:
        show_recovery(found[0])


def show_recoveries(found: Sequence[RecoveryInfo], *, empty: str) -> None:
    """The table of recoveries."""
    columns = (
        "NO",
        "TASK",
        "NAME",
        "WAS",
        "CAUSE",
        "NOTICED BY",
        "AFTER",
        "ACTION",
        "RECOVERED",
        "RAN AGAIN",
        "WORKER",
    )
    rows = [
        (
            str(each.id),
            str(each.task_id),
            each.name,
            str(each.was),
            each.cause,
            each.noticed_by,
            "" if each.noticed_after_ms is None else duration(each.noticed_after_ms / 1_000),
            each.action,
            brief_moment(each.noticed_at),
            brief_moment(each.ran_again_at),
            each.worker_id,
        )
        for each in found
    ]
    show_table(columns, rows, numbers=("NO", "AFTER"), empty=empty)
