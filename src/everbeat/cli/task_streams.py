"""The command `everbeat tasks stream`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from msgspec import structs

from everbeat.app import App
from everbeat.cli.failures import named_as_options
from everbeat.cli.output import Column, compact_json, say, show_json, show_rows
from everbeat.cli.selection import TaskIdArgument, full_task_id, with_app
from everbeat.client.handle import Handle
from everbeat.domain.task.streams import StreamItem
from everbeat.errors.wording import on_one_line, visible_json


def add_streams(commands: typer.Typer) -> None:
    """Add the command `stream` to a group of commands."""
    commands.command("stream")(with_app(stream))


def stream(
    app: App,
    task_id: TaskIdArgument,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="The stream's name, if the task has several.", show_default=False
        ),
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for new items until the task has ended.")
    ] = False,
    after: Annotated[
        int, typer.Option("--after", metavar="N", min=0, help="Begin after the item with this number.")
    ] = 0,
    as_json: bool,
) -> None:
    """Show the items that a task has emitted. If it has several streams and you name none, list them.

    --follow needs a NAME if the task has not emitted an item yet. With --follow and --json, each line is one item as JSON.
    """
    handle = app.handle(full_task_id(app, task_id))
    chosen = _chosen(handle, name, follows=follow, as_json=as_json)
    if chosen is None:
        return
    with named_as_options({"stream.after": "--after"}):
        items = handle.stream(chosen, after=after, follow=follow)
    known = [chosen] if follow else [each.name for each in handle.streams()]
    if chosen not in known:
        names = ", ".join(known) or "none"
        say(on_one_line(f"The task has emitted no items in stream {chosen!r}. Its streams: {names}"))
    if as_json and not follow:
        document = {"id": handle.id, "stream": chosen, "items": [structs.asdict(item) for item in items]}
        show_json(document)
        return
    for item in items:
        print(visible_json(msgspec.json.encode(item).decode()) if as_json else _line(item), flush=True)


def _chosen(handle: Handle[Any], name: str | None, *, follows: bool, as_json: bool) -> str | None:
    """Return the name of the stream to show. If there is no choice, show the task's streams instead, and return None."""
    if name is not None:
        return name
    found = handle.streams()
    if len(found) == 1:
        return found[0].name
    if follows:
        raise typer.BadParameter(
            f"Task {handle.id} has {len(found) or 'no'} streams yet. Name the stream to follow."
        )
    if as_json:
        show_json({"id": handle.id, "streams": found})
        return None
    rows = [
        (Column("STREAM", each.name), Column("ITEMS", f"{each.items:,}", is_number=True)) for each in found
    ]
    show_rows(rows, empty="The task has emitted no items.")
    if found:
        say(f"Show one of them: everbeat tasks stream {handle.id} NAME")
    return None


def _line(item: StreamItem[Any]) -> str:
    value = item.value if isinstance(item.value, str) else compact_json(item.value)
    return f"{item.number}  {on_one_line(value)}"
