"""`everbeat explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from everbeat.cli.output import data_console, moment, show_heading, show_json, show_pairs, state
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app
from everbeat.domain.explanation import Explanation, Reason

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


@commands.command()
def explain(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task's id.", show_default=False)],
    *,
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a task is not running, or why it was run again.

    Each reason with its code, since when, until when, and the command that helps. With --app the thresholds are those of
    the app's RecoveryConfig.
    """
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        found = chosen.explain(task_id)
    if as_json:
        show_json({"explanation": found})
    else:
        _show(found)


def _show(found: Explanation) -> None:
    show_pairs(
        [
            ("task", str(found.task_id)),
            ("name", found.name),
            ("queue", found.queue),
            ("state", state(found.state)),
            ("seen at", moment(found.at)),
        ]
    )
    show_reasons(found.reasons)
    if found.second_runs:
        show_heading("Taken up again, because")
        show_reasons(found.second_runs)


def show_reasons(reasons: Sequence[Reason]) -> None:
    """Reasons for people, one paragraph each."""
    console = data_console()
    for reason in reasons:
        console.print(Text.assemble("\n", (reason.code.value, "bold"), f"  {reason.text}"))
        times = [
            f"{word} {moment(value)}"
            for word, value in (("since", reason.since), ("until", reason.until))
            if value is not None
        ]
        if times:
            console.print(f"  {', '.join(times)}")
        if reason.command is not None:
            console.print(Text.assemble("  try: ", (reason.command, "cyan")))
