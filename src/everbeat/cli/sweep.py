"""`everbeat sweep`."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from msgspec import structs

from everbeat.cli.output import ON_STANDBY, amount, duration, say, show_json, show_table
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.cli.typed import typed_as
from everbeat.domain.inspection import UNKNOWN_FATE, SweepResult

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_OPTIONS: Final = {
    "sweep_threshold": "--threshold",
    "recovery_delay": "--recovery-delay",
    "RecoveryConfig.recovery_delay_ms": "--recovery-delay",
    "RecoveryConfig.resilient_task_flags": "--resilient-flag",
    "RecoveryConfig.resilient_sweep_threshold_multiplier": "--multiplier",
}


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

    Workers do this by themselves. A sweep is the operator's own word: it judges live workers by the age of heartbeats
    alone, takes at once what released and ended workers still hold, and works with automatic recovery switched off. With
    --app the app's RecoveryConfig gives what is left out.
    """
    with selected_app(url=url, schema=schema, locator=app) as chosen, typed_as(_OPTIONS):
        result = chosen.sweep_stale_workers(
            dry_run=dry_run,
            sweep_threshold=threshold,
            recovery_delay=recovery_delay,
            resilient_task_flags=resilient_flags or None,
            resilient_sweep_threshold_multiplier=multiplier,
        )
    if as_json:
        show_json(swept_document(result))
        return
    if result.skipped:
        say("Skipped: another sweep is going on at this moment.")
        return
    show_swept(result, empty="No task is held by a dead worker.")
    workers = len(result.worker_ids)
    unknown = sum(task.action == UNKNOWN_FATE for task in result.tasks)
    if unknown:
        say(
            f"{ON_STANDBY} {amount(unknown, 'task')} of silent workers: ask the primary whether those are dead."
        )
    if dry_run:
        say(
            f"Dry run: {amount(len(result.tasks) - unknown, 'task')} of {amount(workers, 'worker')} would be recovered."
        )
    elif result.worker_ids or result.missed:
        say(
            f"Recovered {amount(result.recovered_count, 'task')} of {amount(workers, 'dead worker')};"
            f" {result.missed} {'was' if result.missed == 1 else 'were'} somebody else's meanwhile."
        )
    if result.sessions_problem is not None:
        say(
            f"The sessions of dead workers were not ended; the supervisors try it again. {result.sessions_problem}"
        )


def swept_document(result: SweepResult) -> dict[str, object]:
    """The result for programs."""
    return structs.asdict(result)


def show_swept(result: SweepResult, *, empty: str) -> None:
    """The tasks of a result, for people."""
    rows = [
        (str(task.id), task.name, task.was, task.action, duration(task.silent_ms / 1_000), task.worker_id)
        for task in result.tasks
    ]
    columns = ("TASK", "NAME", "WAS", "ACTION", "SILENT FOR", "WORKER")
    show_table(columns, rows, numbers=("SILENT FOR",), empty=empty)
