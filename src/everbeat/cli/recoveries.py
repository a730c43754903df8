"""`everbeat recoveries`."""

from __future__ import annotations

from typing import Annotated

import typer

from everbeat.cli.output import brief_moment, duration, show_json, show_table
from everbeat.cli.selection import AppOption, JsonOption, LimitOption, SchemaOption, UrlOption, selected_app
from everbeat.domain.inspection import RecoveryInfo

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


@commands.command()
def recoveries(
    *,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="Of this task only.")] = None,
    limit: LimitOption = 50,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what was rescued from dead workers.

    One line a rescued task, newest first: who died of what, how and how soon that was noticed, what was done.
    """
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        found = chosen.recoveries(task, limit=limit)
    if as_json:
        show_json({"recoveries": found})
    else:
        show_recoveries(found, empty="Nothing had to be recovered.")


def show_recoveries(found: list[RecoveryInfo] | tuple[RecoveryInfo, ...], *, empty: str) -> None:
    """The table of recoveries."""
    columns = (
        "TASK",
        "NAME",
        "WAS",
        "CAUSE",
        "NOTICED BY",
        "AFTER",
        "ACTION",
        "NOTICED",
        "RAN AGAIN",
        "WORKER",
    )
    rows = [
        (
            str(each.task_id),
            each.name,
            each.was.value,
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
    show_table(columns, rows, numbers=("AFTER",), empty=empty)
