"""`everbeat sweep` recovers the tasks of dead workers on request. `everbeat prune` deletes old records on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer
from msgspec import structs

from everbeat import assembly
from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.output import ON_STANDBY, Column, duration, say, show_json, show_rows, show_table
from everbeat.cli.selection import (
    AppOption,
    JsonOption,
    SchemaOption,
    UrlOption,
    selected_app,
    short_ids,
    with_app,
)
from everbeat.client.database_access import database_of
from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import UNKNOWN_FATE, PruneResult, SweepResult, WorkerInfo
from everbeat.errors.wording import amount, some

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_MOST_WORKERS: Final = 100_000
_SWEEP_OPTIONS: Final = {
    "sweep_threshold": "--threshold",
    "recovery_delay": "--recovery-delay",
    "RecoveryConfig.recovery_delay_ms": "--recovery-delay",
    "RecoveryConfig.resilient_task_flags": "--resilient-flag",
    "RecoveryConfig.resilient_sweep_threshold_multiplier": "--multiplier",
}


@commands.command()
@with_app
def sweep(
    app: App,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be done; change nothing.")
    ] = False,
    threshold: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="A worker that is silent for this long is dead.  [default: the app's]"
        ),
    ] = None,
    recovery_delay: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Delay before the tasks run again.  [default: the app's]"),
    ] = None,
    resilient_flags: Annotated[
        list[str] | None,
        typer.Option(
            "--resilient-flag",
            metavar="FLAG",
            help="Tasks with this flag are resilient and get a longer threshold; can be repeated.",
        ),
    ] = None,
    multiplier: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Multiply the threshold of resilient tasks by this number."),
    ] = None,
    as_json: bool,
) -> None:
    """Recover the tasks of dead workers now.

    Workers do this by themselves. This command also works if automatic recovery is off. It judges live workers only by
    the age of their heartbeats, and recovers the tasks of released and ended workers at once. With --app, omitted
    options come from the app's RecoveryConfig.
    """
    with named_as_options(_SWEEP_OPTIONS):
        result = app.sweep_stale_workers(
            dry_run=dry_run,
            sweep_threshold=threshold,
            recovery_delay=recovery_delay,
            resilient_task_flags=resilient_flags or None,
            resilient_sweep_threshold_multiplier=multiplier,
        )
    if as_json:
        show_json(structs.asdict(result))
    elif result.skipped:
        say("Skipped: another sweep is in progress.")
    else:
        show_swept(app, result, empty="No dead worker holds a task.")
        _show_silent(_silent_holders(app, result))
        _show_summary(result)


def _show_silent(silent: Sequence[WorkerInfo]) -> None:
    """Print which silent workers hold tasks but are below the threshold. Otherwise, an empty table would suggest that all is well."""
    if not silent:
        return
    held = amount(sum(each.claimed + each.running for each in silent), "task")
    workers = amount(len(silent), "silent worker holds", plural="silent workers hold")
    names = some([each.worker_id for each in silent], limit=5)
    say(f"{workers} {held} but {'is' if len(silent) == 1 else 'are'} still below the threshold: {names}.")


def _show_summary(result: SweepResult) -> None:
    workers = len(result.worker_ids)
    unknown = sum(task.action == UNKNOWN_FATE for task in result.tasks)
    if unknown:
        say(
            f"{ON_STANDBY} {amount(unknown, 'task')} of silent workers: ask the primary whether these workers are dead."
        )
    if result.dry_run:
        say(
            f"Dry run: {amount(len(result.tasks) - unknown, 'task')} of {amount(workers, 'worker')} would be recovered."
        )
    elif result.worker_ids or result.missed:
        say(
            f"Recovered {amount(result.recovered_count, 'task')} of {amount(workers, 'dead worker')};"
            f" another process had already settled {result.missed}."
        )
    if result.sessions_problem is not None:
        say(
            f"The sessions of dead workers were not terminated; the supervisors try again. {result.sessions_problem}"
        )


def _silent_holders(app: App, result: SweepResult) -> list[WorkerInfo]:
    """Return workers that hold tasks and have missed two heartbeats, except workers that the sweep found dead."""
    missed = f"{2 * app.recovery.beat_interval_ms}ms"
    judged = {*result.worker_ids, *(task.worker_id for task in result.tasks)}
    return [
        each
        for each in app.list_active_workers(stale_after=missed, limit=_MOST_WORKERS)
        if each.is_stale and each.claimed + each.running and each.worker_id not in judged
    ]


def show_swept(app: App, result: SweepResult, *, empty: str) -> None:
    """Write the table of recovered tasks to stdout."""
    tasks = result.tasks
    ids = short_ids(app, uuids=[each.id for each in tasks], parties=[each.worker_id for each in tasks])
    rows = [
        (
            Column("TASK", ids.uuid(task.id)),
            Column("NAME", task.name),
            Column("WAS", task.was, drop=2),
            Column("ACTION", task.action),
            Column("SILENT FOR", duration(task.silent_ms / 1_000), drop=1, is_number=True),
            Column("WORKER", ids.party(task.worker_id)),
        )
        for task in tasks
    ]
    show_rows(rows, empty=empty)


_RECORDS: Final = "terminal_record_retention_hours"
_RETENTION: Final = {
    "beats": "heartbeat_retention_hours",
    **dict.fromkeys(
        ("worker_states", "workers", "supervisors", "schedule_versions"), "worker_state_retention_hours"
    ),
}
"""Maps tables to their retention settings. All other tables use the retention of terminal records."""
_PRUNE_OPTIONS: Final = {
    f"RecoveryConfig.{_RECORDS}": "--terminal-records",
    "RecoveryConfig.worker_state_retention_hours": "--worker-states",
    "RecoveryConfig.heartbeat_retention_hours": "--heartbeats",
}


@commands.command()
def prune(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count the rows to delete; change nothing.")
    ] = False,
    terminal_records: Annotated[
        int | None,
        typer.Option(metavar="HOURS", help="How long to keep ended tasks and their records."),
    ] = None,
    worker_states: Annotated[
        int | None, typer.Option(metavar="HOURS", help="How long to keep snapshots and ended workers.")
    ] = None,
    heartbeats: Annotated[
        int | None, typer.Option(metavar="HOURS", help="How long to keep heartbeats.")
    ] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete old records now, in small batches.

    Workers do this by themselves, hourly by default. The options override the retentions of the app (--app). Records
    without a retention are kept.
    """
    given = {
        "terminal_record_retention_hours": terminal_records,
        "worker_state_retention_hours": worker_states,
        "heartbeat_retention_hours": heartbeats,
    }
    retentions = {name: hours for name, hours in given.items() if hours is not None}
    if app is None and not retentions:
        raise typer.BadParameter(
            "no retention is given: give --app, or --terminal-records, --worker-states or --heartbeats."
        )
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        unset = dict.fromkeys((*given, "captured_log_retention_hours"))
        kept = chosen.recovery if app is not None else chosen.recovery.replace(**unset)
        with named_as_options(_PRUNE_OPTIONS):
            config = kept.replace(**retentions)
        database = database_of(chosen)
        plan = assembly.prune_plan(config, dry_run=dry_run, operator=database.operator)
        found = database.run(plan, name="prune", twin="asyncio.to_thread")
    _show_pruned(found, config, dry_run=dry_run, as_json=as_json)


def _shown_age(table: str, hours: int | None) -> str:
    if table == "results":
        return "by task"
    return "forever" if hours is None else f"{hours:,} h"


def _show_pruned(found: PruneResult, config: RecoveryConfig, *, dry_run: bool, as_json: bool) -> None:
    counts = found.by_table()
    kept = {table: getattr(config, _RETENTION.get(table, _RECORDS)) for table in counts} | {"results": None}
    if as_json:
        tables = {table: {"rows": rows, "kept_hours": kept[table]} for table, rows in counts.items()}
        document = {"dry_run": dry_run, "total": found.total, "at_least": found.at_least, "tables": tables}
        show_json(document)
        return
    rows = [
        (table, _shown_age(table, kept[table]), f"{number:,}{'+' if table in found.at_least else ''}")
        for table, number in counts.items()
    ]
    show_table(("TABLE", "KEPT", "OLD ROWS"), rows, numbers=("KEPT", "OLD ROWS"), empty="")
    deleted = f"{'at least ' if found.at_least else ''}{amount(found.total, 'row')}"
    if found.at_least:
        say(
            "A plus sign marks a count that can be too low: of a dropped partition, at most 10,000 tasks are counted."
        )
    say(f"Dry run: {deleted} would be deleted." if dry_run else f"Deleted {deleted}.")
