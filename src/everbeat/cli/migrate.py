"""`everbeat migrate`: creates or upgrades the schema."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from everbeat.cli.failures import ExitCode, named_as_options, show_labelled
from everbeat.cli.output import say, show_json, show_pairs
from everbeat.cli.selection import (
    AppOption,
    JsonOption,
    SchemaOption,
    UrlOption,
    chosen_schema,
    schema_as_typed,
    selected_app,
)
from everbeat.client.database_access import database_of
from everbeat.domain.doctor.server import UnfinishedUpgrade
from everbeat.domain.settings.units import span, spelled_duration
from everbeat.store.migrating import DEFAULT_LOCK_PATIENCE_S
from everbeat.store.migrations import SchemaStatus, known_migrations, script
from everbeat.store.target import Target

_PATIENCE: Final = "migrate.patience"

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


@commands.command()
def migrate(
    *,
    status: Annotated[
        bool,
        typer.Option(
            "--status", help="Only show the applied versions; exit code 1 unless this everbeat supports them."
        ),
    ] = False,
    as_sql: Annotated[
        bool, typer.Option("--sql", help="Only print the statements, for an empty database or from --from.")
    ] = False,
    since: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=0,
            metavar="VERSION",
            help="With --sql: print the steps that upgrade from this version.",
        ),
    ] = None,
    patience: Annotated[
        str,
        typer.Option(
            "--patience", metavar="DURATION", help="How long each upgrade step tries to get its lock."
        ),
    ] = spelled_duration(DEFAULT_LOCK_PATIENCE_S),
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create or upgrade the schema.

    One process migrates while others wait. A schema that is up to date or newer does not change. Migrations only go forward.
    """
    _require_compatible(status=status, as_sql=as_sql, since=since)
    with named_as_options({_PATIENCE: "--patience"}):
        lock_patience_s = span(0.5, 7 * 86_400)(patience, subject=_PATIENCE)
    if as_sql and app is None:
        name = chosen_schema(schema)
        with schema_as_typed(schema):
            Target.parse("postgresql://", schema=name)  # rejects an invalid schema name
        print(script(name, since=since or 0), end="")
        return
    with selected_app(url=url, schema=schema, locator=app, may_make=not status) as chosen:
        if as_sql:
            print(script(chosen.schema, since=since or 0), end="")
            return
        applied_now = (
            () if status else database_of(chosen).migrate(lock_patience_s=lock_patience_s, report=say)
        )
        found = chosen.schema_status()
        left = database_of(chosen).unfinished()
    _show(found, left, applied_now=applied_now, as_json=as_json, only_status=status)
    if status and not found.is_supported:
        raise typer.Exit(ExitCode.FAILED)


def _require_compatible(*, status: bool, as_sql: bool, since: int | None) -> None:
    if status and as_sql:
        raise typer.BadParameter("--status and --sql exclude each other.")
    if status and since is not None:
        raise typer.BadParameter("--status and --from exclude each other.")
    if since is None:
        return
    if not as_sql:
        raise typer.BadParameter("--from needs --sql: an upgrade starts from the schema's current version.")
    newest = known_migrations()[-1].version
    if since > newest:
        raise typer.BadParameter(
            f"--from {since}: this everbeat does not know version {since}. It knows versions 1 to {newest}."
        )


def _show(
    found: SchemaStatus,
    left: UnfinishedUpgrade,
    *,
    applied_now: tuple[int, ...],
    as_json: bool,
    only_status: bool,
) -> None:
    if as_json:
        same = ("schema", "applied", "pending", "unknown", "version")
        show_json(
            {name: getattr(found, name) for name in same}
            | {
                "newest_known": found.code,
                "oldest_code": found.oldest_code,
                "supported": found.is_supported,
                "applied_now": applied_now,
                "unfinished_steps": left.steps,
                "invalid_indexes": left.invalid_indexes,
                "migrator": None if left.migrator is None else left.migrator.who,
            }
        )
    elif only_status:
        show_pairs(
            [
                ("schema", found.schema),
                ("applied", _listed(found.applied)),
                ("pending", _listed(found.pending)),
                ("unknown", f"{_listed(found.unknown)} (from a newer everbeat)" if found.unknown else None),
                ("this everbeat", f"{found.code}, {'supported' if found.is_supported else 'not supported'}"),
                ("upgrade", left.text),
            ]
        )
        if (fix := left.fix(newest_known=found.code)) is not None:
            show_labelled("fix", fix)
    elif applied_now:
        say(f"Schema {found.schema!r}: applied {_listed(applied_now)}.")
    elif found.unknown:
        say(f"Nothing to do: {found.summary}.")
    else:
        say(f"Schema {found.schema!r} is up to date (version {found.version}).")


def _listed(versions: tuple[int, ...]) -> str:
    return ", ".join(str(version) for version in versions) or "none"
