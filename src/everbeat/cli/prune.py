"""`everbeat prune`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from everbeat import assembly
from everbeat.cli.output import amount, say, show_json, show_table
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.cli.typed import typed_as
from everbeat.config import RecoveryConfig
from everbeat.domain.retention import PruneResult

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_KEPT_BY = {
    "tasks": "terminal_record_retention_hours",
    "attempts": "terminal_record_retention_hours",
    "recoveries": "terminal_record_retention_hours",
    "steps": "terminal_record_retention_hours",
    "signals": "terminal_record_retention_hours",
    "workflows": "terminal_record_retention_hours",
    "nodes": "terminal_record_retention_hours",
    "edges": "terminal_record_retention_hours",
    "beats": "heartbeat_retention_hours",
    "worker_states": "worker_state_retention_hours",
    "workers": "worker_state_retention_hours",
    "supervisors": "worker_state_retention_hours",
}

_OPTIONS: Final = {
    "RecoveryConfig.terminal_record_retention_hours": "--terminal-records",
    "RecoveryConfig.worker_state_retention_hours": "--worker-states",
    "RecoveryConfig.heartbeat_retention_hours": "--heartbeats",
}


@commands.command()
def prune(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only count what would be deleted; change nothing.")
    ] = False,
    terminal_records: Annotated[
        int | None,
        typer.Option(metavar="HOURS", help="Keep ended tasks, with all that is stored of them, so long."),
    ] = None,
    worker_states: Annotated[
        int | None, typer.Option(metavar="HOURS", help="Keep snapshots and ended workers so long.")
    ] = None,
    heartbeats: Annotated[int | None, typer.Option(metavar="HOURS", help="Keep heartbeats so long.")] = None,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete what is old now, in small batches.

    Workers do this by themselves, hourly by default. How long is kept is said by the app of --app, or by the options,
    which go first; what neither names is kept.
    """
    given = {
        "terminal_record_retention_hours": terminal_records,
        "worker_state_retention_hours": worker_states,
        "heartbeat_retention_hours": heartbeats,
    }
    said = {name: hours for name, hours in given.items() if hours is not None}
    if app is None and not said:
        raise typer.BadParameter(
            "nothing says what is old; give --app, or --terminal-records, --worker-states or --heartbeats."
        )
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        kept = chosen.recovery if app is not None else chosen.recovery.replace(**dict.fromkeys(given))
        with typed_as(_OPTIONS):
            config = kept.replace(**said)
        plan = assembly.prune_plan(config, dry_run=dry_run)
        found = chosen.door.run(plan, name="prune", twin="asyncio.to_thread")
    _show(found, config, dry_run=dry_run, as_json=as_json)


def _show(found: PruneResult, config: RecoveryConfig, *, dry_run: bool, as_json: bool) -> None:
    counts = found.by_table()
    kept = {table: getattr(config, field) for table, field in _KEPT_BY.items()}
    if as_json:
        tables = {table: {"rows": rows, "kept_hours": kept[table]} for table, rows in counts.items()}
        show_json({"dry_run": dry_run, "total": found.total, "tables": tables})
        return
    rows = [
        (table, "for ever" if kept[table] is None else f"{kept[table]:,} h", f"{number:,}")
        for table, number in counts.items()
    ]
    show_table(("TABLE", "KEPT", "OLD ROWS"), rows, numbers=("KEPT", "OLD ROWS"), empty="")
    gone = amount(found.total, "row")
    say(f"Dry run: {gone} would be deleted." if dry_run else f"Deleted {gone}.")
