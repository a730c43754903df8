"""`everbeat queues list | pause | resume`; `list` is meant where none is named."""

from __future__ import annotations

import typer

from everbeat.cli.default_command import ListByDefault
from everbeat.cli.output import duration, show_json, show_table
from everbeat.cli.pauses import add_pausing
from everbeat.cli.selection import AppOption, JsonOption, SchemaOption, UrlOption, selected_app

commands = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="Show queues and what waits in them (`list`, meant where nothing is named); pause and resume them.",
)


@commands.command("list")
def list_queues(
    *, url: UrlOption = None, schema: SchemaOption = None, app: AppOption = None, as_json: JsonOption = False
) -> None:
    """Show queues and what waits in them.

    PENDING counts tasks that are due, SCHEDULED those for later; WAITING is how long the oldest due one has waited.
    Priorities are known with --app only: they are declared in code.
    """
    with selected_app(url=url, schema=schema, locator=app) as chosen:
        found = chosen.queues()
    if as_json:
        show_json({"queues": found})
        return
    numbers = ("PRIORITY", "PENDING", "SCHEDULED", "CLAIMED", "RUNNING", "WAITING")
    rows = [
        (
            queue.name,
            "" if queue.priority is None else str(queue.priority),
            str(queue.pending),
            str(queue.scheduled),
            str(queue.claimed),
            str(queue.running),
            duration(queue.oldest_due_s),
        )
        for queue in found
    ]
    show_table(("QUEUE", *numbers), rows, numbers=numbers, empty="No queue has live tasks.")


add_pausing(commands, "queue")
