"""`everbeat workers quiet`: trees that claim nothing for now."""

from __future__ import annotations

from typing import Annotated

import typer

from everbeat.cli.output import moment, say, show_json
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.domain.explanation import counted
from everbeat.domain.inspection import QuietTree


def add_quiet(commands: typer.Typer) -> None:
    """Adds `quiet`."""

    @commands.command()
    def quiet(
        ids: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[ID...]", help="Supervisors; a worker stands for its whole tree.", show_default=False
            ),
        ] = None,
        *,
        host: Annotated[
            str | None, typer.Option(metavar="HOST", help="All supervisors on this host.")
        ] = None,
        everyone: Annotated[bool, typer.Option("--all", help="All supervisors that run now.")] = False,
        resume: Annotated[bool, typer.Option("--resume", help="Let them claim again, at once.")] = False,
        url: UrlOption = None,
        schema: SchemaOption = None,
        app: AppOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """Let these supervisors claim nothing until they are resumed or end; what they run goes on.

        Their workers give back what they have claimed and not started, and go on beating. Supervisors that start later are not quiet.
        """
        if sum((bool(ids), host is not None, everyone)) != 1:
            raise typer.BadParameter("give ids, or --host, or --all.")
        with selected_app(url=url, schema=schema, locator=app) as chosen:
            order = chosen.resume_workers if resume else chosen.quiet_workers
            found = order(ids or (), host=host, everyone=everyone)
        if as_json:
            show_json({"supervisors": found})
            return
        for tree in found:
            say(_line(tree))
        if not found:
            say("No supervisor is registered.")


def _line(tree: QuietTree) -> str:
    who = f"Supervisor {tree.supervisor_id} (host {tree.hostname}, PID {tree.pid}, {counted(len(tree.workers), 'worker')})"
    return (
        f"{who} claims." if tree.quiet_since is None else f"{who} is quiet since {moment(tree.quiet_since)}."
    )
