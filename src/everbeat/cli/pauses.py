"""`everbeat tasks | queues pause, resume` and `everbeat tasks pauses`: the same commands under two names.

What lives here: these commands, and how they are added to a group. What may not: the other commands of those groups.
"""

from __future__ import annotations

from typing import Annotated

import typer

from everbeat.app import App
from everbeat.cli.output import moment, show_json, show_table
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.cli.several import Done, for_each
from everbeat.cli.typed import typed_as
from everbeat.domain.pauses import Pause, PauseKind
from everbeat.errors import NotPaused, UnknownName

_WHAT = {"task": "task functions", "queue": "queues"}


def add_pausing(commands: typer.Typer, kind: PauseKind) -> None:
    """Adds `pause` and `resume` for task functions or queues."""

    @commands.command(help=f"Let no worker claim anything of these {_WHAT[kind]} until they are resumed.")
    def pause(
        names: Annotated[list[str], typer.Argument(metavar="NAME...", show_default=False)],
        *,
        reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why, for the others.")] = None,
        url: UrlOption = None,
        schema: SchemaOption = None,
        app: AppOption = None,
        as_json: JsonOption = False,
    ) -> None:
        options = {f"pause_{kind}.reason": "--reason"}
        with selected_app(url=url, schema=schema, locator=app) as chosen, typed_as(options):
            _each(chosen, kind, names, pause=True, reason=reason, as_json=as_json)

    @commands.command(help=f"Let these {_WHAT[kind]} be claimed again, at once.")
    def resume(
        names: Annotated[list[str], typer.Argument(metavar="NAME...", show_default=False)],
        *,
        url: UrlOption = None,
        schema: SchemaOption = None,
        app: AppOption = None,
        as_json: JsonOption = False,
    ) -> None:
        with selected_app(url=url, schema=schema, locator=app) as chosen:
            _each(chosen, kind, names, pause=False, reason=None, as_json=as_json)


def _each(
    app: App, kind: PauseKind, names: list[str], *, pause: bool, reason: str | None, as_json: bool
) -> None:
    def one(name: str) -> Done:
        found = _one(app, kind, name, pause=pause, reason=reason)
        because = "" if found.reason is None else f": {found.reason}"
        since = f"since {moment(found.paused_at)}, by {found.paused_by}{because}"
        told = "was paused already," if found.already_paused else "is paused"
        aside = None
        if found.already_paused and reason is not None and reason != found.reason:
            fix = f"everbeat {kind}s resume {name}, then pause it again"
            aside = f"The reason {reason!r} is not kept. To change it: {fix}."
        line = f"{found.kind} {found.name} {told if pause else 'is resumed; it was paused'} {since}"
        return Done(found, line, aside)

    refusals = (UnknownName, NotPaused)
    for_each(names, one, refusals=refusals, key="name", listed_as="pauses", as_json=as_json)


def _one(app: App, kind: PauseKind, name: str, *, pause: bool, reason: str | None) -> Pause:
    match kind, pause:
        case "task", True:
            return app.pause_task(name, reason=reason)
        case "task", False:
            return app.resume_task(name)
        case "queue", True:
            return app.pause_queue(name, reason=reason)
        case _:
            return app.resume_queue(name)


def add_listing(commands: typer.Typer) -> None:
    """Adds `pauses`, which shows both kinds."""

    @commands.command()
    def pauses(
        *,
        url: UrlOption = None,
        schema: SchemaOption = None,
        app: AppOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """List what is paused, task functions and queues: since when, by whom and why."""
        with selected_app(url=url, schema=schema, locator=app) as chosen:
            found = chosen.list_pauses()
        if as_json:
            show_json({"pauses": found})
            return
        rows = [
            (each.name, each.kind, moment(each.paused_at), each.paused_by, each.reason or "", _count(each))
            for each in found
        ]
        columns = ("NAME", "KIND", "SINCE", "BY", "WHY", "CRASHES")
        show_table(columns, rows, numbers=("CRASHES",), empty="Nothing is paused.")


def _count(pause: Pause) -> str:
    return "" if pause.crashes is None else str(pause.crashes)
