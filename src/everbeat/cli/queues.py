"""The commands of `everbeat queues`, and the pause and resume commands of `everbeat tasks`."""

from __future__ import annotations

from typing import Annotated

import typer

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.help_page import ListByDefault
from everbeat.cli.output import Column, duration, moment, say, show_json, show_rows
from everbeat.cli.pause_all import shown_since
from everbeat.cli.selection import Done, NamesArgument, for_each, with_app
from everbeat.domain.inspection import Pause, PauseKind, QueueInfo
from everbeat.errors import NotPaused, UnknownName

_PLURAL = {"task": "task functions", "queue": "queues"}


def add_pausing(commands: typer.Typer, kind: PauseKind) -> None:
    """Add the commands `pause` and `resume` for task functions or for queues."""

    @commands.command(help=f"Stop workers from claiming tasks of these {_PLURAL[kind]} until `resume`.")
    @with_app
    def pause(
        app: App,
        names: NamesArgument,
        *,
        reason: Annotated[
            str | None, typer.Option(metavar="TEXT", help="The reason, shown to other operators.")
        ] = None,
        as_json: bool,
    ) -> None:
        with named_as_options({f"pause_{kind}.reason": "--reason"}):
            _each(app, kind, names, pause=True, reason=reason, as_json=as_json)

    @commands.command(help=f"Let workers claim tasks of these {_PLURAL[kind]} again, at once.")
    @with_app
    def resume(app: App, names: NamesArgument, *, as_json: bool) -> None:
        _each(app, kind, names, pause=False, reason=None, as_json=as_json)


def _each(
    app: App, kind: PauseKind, names: list[str], *, pause: bool, reason: str | None, as_json: bool
) -> None:
    def one(name: str) -> Done:
        found = _one(app, kind, name, pause=pause, reason=reason)
        since = shown_since(found)
        paused = "was paused already," if found.already_paused else "is paused"
        note = None
        if found.already_paused and reason is not None and reason != found.reason:
            fix = f"everbeat {kind}s resume {name}, then pause it again"
            note = f"The reason {reason!r} is not stored. To change it: {fix}."
        line = f"{found.kind} {found.name} {paused if pause else 'is resumed; it was paused'} {since}"
        return Done(found, line, note)

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
    """Add the command `pauses`, which lists paused task functions and queues."""

    @commands.command()
    @with_app
    def pauses(app: App, *, as_json: bool) -> None:
        """List paused task functions and queues, and the pause of everything: since when, by whom and why."""
        found = app.list_pauses()
        if as_json:
            show_json({"pauses": found})
            return
        rows = [
            (
                Column("NAME", each.name),
                Column("KIND", each.kind),
                Column("SINCE", moment(each.paused_at), drop=1),
                Column("BY", each.paused_by, drop=2),
                Column("WHY", each.reason or "", is_text=True),
                Column("CRASHES", _number(each.crashes), drop=3, is_number=True),
            )
            for each in found
        ]
        show_rows(rows, empty="Nothing is paused.")


def _number(number: int | None) -> str:
    return "" if number is None else str(number)


def _count(queue: QueueInfo, state: str) -> str:
    number: int = getattr(queue, state)
    return f"{number:,}+" if state in queue.at_least else str(number)


commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="Show queues and how many tasks are waiting in them (`list`, the default); pause and resume queues.",
)


@commands.command("list")
@with_app
def list_queues(app: App, *, as_json: bool) -> None:
    """Show queues and how many tasks wait in them, also empty ones that live workers serve, or that are paused or limited.

    PENDING counts due tasks, SCHEDULED counts later ones. WAITING is how long the oldest due task has waited.
    Counting stops at 10,000, so 10,000+ means at least 10,000.
    Priorities are shown only with --app, because code declares them.
    """
    found = app.queues()
    if as_json:
        show_json({"queues": found})
        return
    rows = [
        (
            Column("QUEUE", queue.name),
            Column("PRIORITY", _number(queue.priority), drop=3, is_number=True),
            Column("PENDING", _count(queue, "pending"), is_number=True),
            Column("SCHEDULED", _count(queue, "scheduled"), drop=2, is_number=True),
            Column("CLAIMED", _count(queue, "claimed"), drop=1, is_number=True),
            Column("RUNNING", _count(queue, "running"), is_number=True),
            Column("WAITING", duration(queue.oldest_due_s), is_number=True),
        )
        for queue in found
    ]
    show_rows(rows, empty="No queues.")
    for pause in app.list_pauses():
        if pause.kind == "all":
            say(f"Everything is paused {shown_since(pause)}. To end it: everbeat resume --all.")
        elif pause.kind == "queue":
            say(f"Queue {pause.name} is paused {shown_since(pause)}.")


add_pausing(commands, "queue")
