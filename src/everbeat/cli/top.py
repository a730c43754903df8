"""`everbeat top`: shows the trees, the rates and the latest recoveries in the terminal, again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.live import Live
from rich.text import Text

from everbeat.app import App
from everbeat.cli.output import (
    Column,
    brief_moment,
    duration,
    show_json,
    stdout_console,
    stdout_is_terminal,
    table_lines,
)
from everbeat.cli.selection import with_app
from everbeat.cli.workers import beat_age, liveness
from everbeat.client.database_access import database_of
from everbeat.client.overview import Overview, TreeLoad, overview
from everbeat.domain.inspection import RecoveryInfo
from everbeat.errors import DatabaseError
from everbeat.errors.wording import amount, on_one_line

commands = typer.Typer(rich_markup_mode=None, add_completion=False)

_MOST_RECOVERIES: Final = 10
_FIXED_LINES: Final = 9
"""The lines of the summary, of the headings and between the parts."""
_PIPE_LINES: Final = 1_000


@commands.command()
@with_app
def top(
    app: App,
    *,
    every: Annotated[
        float, typer.Option(min=0.5, max=60, metavar="SECONDS", help="How often to refresh the picture.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the picture once and exit.")] = False,
    as_json: bool,
) -> None:
    """Watch the cluster: one line for each tree, rates, the oldest due task, and recoveries as they happen.

    The rates are those of the last whole minute. Ctrl-C ends the command. Without a terminal, or with --once or --json,
    the command prints the picture once.
    """
    if as_json:
        show_json({"top": _look(app)})
        return
    console = stdout_console()
    if (
        once or not stdout_is_terminal() or console.is_dumb_terminal
    ):  # a dumb terminal cannot show a screen again
        print(Text("\n").join(frame(_look(app), width=None, height=_PIPE_LINES)).plain)
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(Text("\n").join(_frame_now(app)), refresh=True)
            time.sleep(every)


def _frame_now(app: App) -> Sequence[Text]:
    """Return the next frame, or a message if the database cannot be reached: the command continues to look."""
    console = stdout_console()
    try:
        with database_of(app).patience(2.0):
            found = _look(app)
    except DatabaseError as problem:
        return [Text("The database cannot be reached. Looking again.", style="bold red"), Text(str(problem))]
    return frame(found, width=console.width, height=console.height)


def _look(app: App) -> Overview:
    plan = overview(app.recovery, recoveries=_MOST_RECOVERIES)
    return database_of(app).run(plan, name="top", twin="top")


def frame(found: Overview, *, width: int | None, height: int) -> list[Text]:
    """Return the lines of one frame. Trees that do not fit into the height are counted. Recoveries get at most half of it."""
    lines = [*_summary(found), Text()]
    recoveries = found.recoveries[: max(1, (height - _FIXED_LINES) // 2)]
    room = max(1, height - _FIXED_LINES - len(recoveries))
    if found.trees:
        lines += _table([_tree_row(each) for each in found.trees[:room]], width=width)
        if len(found.trees) > room:
            lines.append(Text(f"… and {amount(len(found.trees) - room, 'more tree')}", style="dim"))
    else:
        lines.append(Text("No supervisor runs.", style="bold red"))
    lines += [Text(), Text("Latest recoveries", style="bold")]
    if recoveries:
        return [*lines, *_table([_recovery_row(each) for each in recoveries], width=width)]
    return [*lines, Text("None are recorded.", style="dim")]


def _summary(found: Overview) -> list[Text]:
    overdue = Text(f"{found.overdue:,} overdue", style="bold red" if found.overdue else "green")
    oldest = "none due"
    if found.oldest_due_s is not None:
        oldest = f"oldest {duration(found.oldest_due_s)} in {on_one_line(found.oldest_queue or '')}"
    return [
        Text.assemble(f"{brief_moment(found.at)}   {amount(len(found.trees), 'tree')}   leases: ", overdue),
        Text(
            f"each second: {found.started / 60:.1f} started, {found.completed / 60:.1f} completed, "
            f"{found.failed / 60:.1f} failed, {found.retried / 60:.1f} retried"
        ),
        Text(f"tasks: {found.due:,} due, {oldest}"),
    ]


def _table(rows: Sequence[Sequence[Column]], *, width: int | None) -> list[Text]:
    return table_lines(rows[0], [[each.value for each in row] for row in rows], width=width)


def _tree_row(tree: TreeLoad) -> tuple[Column, ...]:
    one = tree.supervisor
    wanted = "" if one.processes is None else f" of {one.processes}"
    return (
        Column("SUPERVISOR", one.supervisor_id, drop=3),
        Column("HOST", one.hostname),
        Column("PID", str(one.pid), is_number=True),
        Column("STATE", liveness(one, tree.state, ended=None)),
        Column("PROCESSES", f"{one.workers}{wanted}", drop=2),
        Column("CLAIMED", f"{tree.claimed:,}", drop=1, is_number=True),
        Column("RUNNING", f"{tree.running:,}", is_number=True),
        beat_age(one),
    )


def _recovery_row(one: RecoveryInfo) -> tuple[Column, ...]:
    noticed = "" if one.noticed_after_ms is None else duration(one.noticed_after_ms / 1_000)
    return (
        Column("AT", brief_moment(one.noticed_at)),
        Column("TASK", one.name),
        Column("WAS", one.was.value),
        Column("NOTICED BY", one.noticed_by),
        Column("AFTER", noticed, drop=2, is_number=True),
        Column("ACTION", one.action),
        Column("NOW", "" if one.became is None else one.became.value, drop=1),
        Column("CAUSE", one.cause, drop=3, is_text=True),
    )
