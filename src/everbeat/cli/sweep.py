"""`everbeat sweep`."""

from __future__ import annotations

from typing import Annotated

import typer

from everbeat.cli.output import duration, say, show_json, show_table
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


@commands.command()
def sweep(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only name what would be done; change nothing.")
    ] = False,
    threshold: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Silent for so long is dead.  [default: the app's]")
    ] = None,
    recovery_delay: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Run the tasks again no sooner.  [default: the app's]"),
    ] = None,
    resilient_flags: Annotated[
        list[str] | None,
        typer.Option(
            "--resilient-flag", metavar="FLAG", help="Tasks with it get more time; may be repeated."
        ),
    ] = None,
    multiplier: Annotated[
        int | None, typer.Option(min=1, max=100, help="So many times the threshold for them.")
    ] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recover the tasks of dead workers now.

    Workers do this by themselves. A sweep is the operator's own word: it judges by the age of heartbeats alone, and
    works with automatic recovery switched off. With --app the app's RecoveryConfig gives what is left out.
    """
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        result = chosen.sweep_stale_workers(
            dry_run=dry_run,
            sweep_threshold=threshold,
            recovery_delay=recovery_delay,
            resilient_task_flags=resilient_flags or None,
            resilient_sweep_threshold_multiplier=multiplier,
        )
    if as_json:
        show_json(
            {
                "dry_run": result.dry_run,
                "worker_ids": result.worker_ids,
                "recovered_count": result.recovered_count,
                "skipped": result.skipped,
                "tasks": result.tasks,
            }
        )
        return
    rows = [
        (str(task.id), task.name, task.was, task.action, duration(task.silent_ms / 1_000), task.worker_id)
        for task in result.tasks
    ]
    show_table(
        ("TASK", "NAME", "WAS", "ACTION", "SILENT FOR", "WORKER"),
        rows,
        numbers=("SILENT FOR",),
        empty="No task is held by a dead worker.",
    )
    if dry_run:
        say(f"Dry run: {len(result.tasks)} tasks of {len(result.worker_ids)} workers would be recovered.")
    elif result.tasks or result.skipped:
        say(f"Recovered {result.recovered_count} tasks; {result.skipped} were somebody else's meanwhile.")
