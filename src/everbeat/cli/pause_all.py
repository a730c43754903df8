"""`everbeat pause --all` stops all claims, and `everbeat resume --all` ends that pause."""

from __future__ import annotations

from typing import Annotated

import typer

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.output import moment, say, show_json
from everbeat.cli.selection import with_app
from everbeat.domain.inspection import Pause

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_ALL_HELP = "Everything. Required, so that a forgotten name does not stop all tasks."


@commands.command()
@with_app
def pause(
    app: App,
    *,
    everything: Annotated[bool, typer.Option("--all", help=_ALL_HELP)] = False,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The reason, shown to other operators.")
    ] = None,
    as_json: bool,
) -> None:
    """Stop workers from claiming any task until `resume --all`. Running code continues.

    To pause only some task functions or queues, use `everbeat tasks pause` or `everbeat queues pause`.
    """
    _require_all(everything, "pause")
    with named_as_options({"pause_all.reason": "--reason"}):
        found = app.pause_all(reason=reason)
    _show(found, "was paused already," if found.already_paused else "is paused", as_json=as_json)
    if found.already_paused and reason is not None and reason != found.reason:
        say(f"The reason {reason!r} is not stored. To change it: everbeat resume --all, then pause again.")


@commands.command()
@with_app
def resume(
    app: App,
    *,
    everything: Annotated[bool, typer.Option("--all", help=_ALL_HELP)] = False,
    as_json: bool,
) -> None:
    """End the pause of everything, at once. Other pauses of task functions and queues remain."""
    _require_all(everything, "resume")
    _show(app.resume_all(), "is resumed; it was paused", as_json=as_json)


def _require_all(everything: bool, command: str) -> None:
    if not everything:
        raise typer.BadParameter(
            f"give --all to {command} everything; for some names: everbeat tasks {command} NAME, or everbeat queues {command} NAME."
        )


def _show(found: Pause, state: str, *, as_json: bool) -> None:
    if as_json:
        show_json({"pauses": [found]})
        return
    print(f"everything {state} {shown_since(found)}")


def shown_since(pause: Pause) -> str:
    """Return when, by whom and why something was paused."""
    because = "" if pause.reason is None else f": {pause.reason}"
    return f"since {moment(pause.paused_at)}, by {pause.paused_by}{because}"
