"""Output of commands: tables for people and JSON for programs, without control characters on terminals."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import IO, Any, Final, TypeAlias

import msgspec
from msgspec import Struct
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from everbeat.cli.streams import hanging, raw_stream
from everbeat.domain.documents import plain_value
from everbeat.domain.settings.units import shown_moment
from everbeat.domain.task.states import TaskState
from everbeat.domain.workflow.states import NodeState, WorkflowState
from everbeat.errors.wording import brief_duration, on_one_line, visible, visible_json
from everbeat.runtime.clock import SystemClock

_COLUMN_GAP: Final = 2
_LEAST_TEXT: Final = 24
_LONGEST: Final = 300
"""Longer values are truncated, because they would widen the column for all other rows."""
_LONGEST_NUMBER: Final = 30


class Id(Struct, frozen=True):
    """An id with its shortest unambiguous prefix."""

    whole: str
    short: str


Cell: TypeAlias = str | Text | Id


class Column(Struct, frozen=True):
    """A column and its value in one row.

    A narrow table omits columns with a `drop`, highest value first. Free text (`is_text`) can be truncated.
    """

    name: str
    value: Cell = ""
    drop: int = 0
    is_text: bool = False
    is_number: bool = False


class _Grid(Struct, frozen=True):
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Text]]

    def width(self, place: int) -> int:
        return max(cell_len(self.columns[place].name), *(row[place].cell_len for row in self.rows))


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, width: int | None
) -> list[Text]:
    """Return the lines of a table with at least one row. If `width` is None, nothing is shortened or omitted."""
    everything = tuple(range(len(columns)))
    grid = _grid(columns, rows, whole=True)
    if width is None or _total(grid, everything) <= width:
        return _lines(grid, everything, (), width=None)
    everything = tuple(place for place in everything if any(row[place].plain for row in grid.rows))
    if _total(grid, everything) <= width:
        return _lines(grid, everything, (), width=None)
    grid = _grid(columns, rows, whole=False)
    below: tuple[int, ...] = ()
    while True:
        places = tuple(place for place in everything if place not in below)
        kept = _fitting(grid, places, width - (2 if 0 in below else 0))
        if kept is not None:
            return _lines(grid, kept, below, width=width)
        below = tuple(sorted((*below, _widest(grid, places))))


def _widest(grid: _Grid, places: Sequence[int]) -> int:
    """Return the next column to move below the row: the widest column, preferably not free text, which can be truncated."""
    fixed = [place for place in places if not grid.columns[place].drop]
    return max(fixed, key=lambda place: (not grid.columns[place].is_text, grid.width(place)))


def _grid(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, whole: bool) -> _Grid:
    return _Grid(
        tuple(columns),
        [[_text(cell, each, whole=whole) for cell, each in zip(row, columns, strict=True)] for row in rows],
    )


def _text(cell: Cell, column: Column, *, whole: bool) -> Text:
    if isinstance(cell, Id):
        return Text(on_one_line(cell.whole if whole else cell.short))
    if isinstance(cell, Text):
        shown = on_one_line(cell.plain)
        return cell if shown == cell.plain else Text(shown, style=cell.style)
    limit = _LONGEST_NUMBER if column.is_number else _LONGEST
    return Text(on_one_line(cell if len(cell) <= limit else f"{cell[: limit - 1]}…"))


def _total(grid: _Grid, places: Sequence[int]) -> int:
    return sum(grid.width(place) for place in places) + _COLUMN_GAP * (len(places) - 1)


def _least(grid: _Grid, places: Sequence[int]) -> int:
    """Return the minimum width of these columns, with their free text truncated as far as possible."""
    widths = [
        min(grid.width(place), _LEAST_TEXT) if grid.columns[place].is_text else grid.width(place)
        for place in places
    ]
    return sum(widths) + _COLUMN_GAP * (len(places) - 1)


def _fitting(grid: _Grid, places: tuple[int, ...], width: int) -> tuple[int, ...] | None:
    """Return the columns that fit side by side, or None if the mandatory columns do not fit."""
    while places and _least(grid, places) > width:
        droppable = [place for place in places if grid.columns[place].drop]
        if not droppable:
            return None
        gone = max(droppable, key=lambda place: grid.columns[place].drop)
        places = tuple(place for place in places if place != gone)
    return places


def _widths(grid: _Grid, places: Sequence[int], width: int | None) -> list[int]:
    """Return the widths of these columns. Free text gets the remaining width."""
    if width is None:
        return [grid.width(place) for place in places]
    widths = [_least(grid, [place]) for place in places]
    left = width - sum(widths) - _COLUMN_GAP * (len(places) - 1)
    for number, place in enumerate(places):
        more = min(left, grid.width(place) - widths[number])
        widths[number] += more
        left -= more
    return widths


def _lines(grid: _Grid, places: Sequence[int], below: Sequence[int], *, width: int | None) -> list[Text]:
    """Return the lines for the columns in `places`. Each row is followed by its columns in `below`.

    A first column that is too wide is placed above its row.
    """
    head = 0 in below
    margin = "  " if head else ""
    widths = _widths(grid, places, None if width is None else width - len(margin))
    names = [Text(column.name, style="bold") for column in grid.columns]
    lines = [names[0]] if head else []
    lines.append(_line(grid, names, widths, places, margin=margin))
    for row in grid.rows:
        if head:
            lines.append(row[0])
        lines.append(_line(grid, row, widths, places, margin=margin))
        lines.extend(
            _labelled(grid.columns[place], row[place], width=width)
            for place in below
            if place and row[place].plain
        )
    return lines


def _labelled(column: Column, value: Text, *, width: int | None) -> Text:
    label = Text.assemble("  ", (column.name, "bold"), "  ")
    if width is None or label.cell_len + value.cell_len <= width:
        return Text.assemble(label, value)
    return (
        Text.assemble(label, _cut(value, width - label.cell_len))
        if column.is_text
        else Text.assemble("  ", value)
    )


def _line(
    grid: _Grid, row: Sequence[Text], widths: Sequence[int], places: Sequence[int], *, margin: str
) -> Text:
    line = Text(margin)
    for place, width in zip(places, widths, strict=True):
        shown = _cut(row[place], width)
        blank = " " * (width - shown.cell_len)
        line.append_text(
            Text.assemble(blank, shown) if grid.columns[place].is_number else Text.assemble(shown, blank)
        )
        line.append(" " * _COLUMN_GAP)
    line.rstrip()
    return line


def _cut(text: Text, width: int) -> Text:
    if text.cell_len <= width:
        return text
    return Text(f"{set_cell_size(text.plain, width - 1).rstrip()}…", style=text.style)


_GAP = 2
_PIPE_WIDTH = 1_000  # programs that read from a pipe need unbroken lines
ON_STANDBY = "This server is a standby: replication delays the heartbeats, so liveness is unknown here."
_STATE_STYLES = {
    "PENDING": "cyan",
    "READY": "cyan",
    "ENQUEUED": "blue",
    "CLAIMED": "blue",
    "RUNNING": "yellow",
    "PAUSED": "cyan",
    "CANCELLING": "magenta",
    "COMPLETED": "green",
    "FAILED": "red",
    "CANCELLED": "magenta",
    "EXPIRED": "magenta",
    "SKIPPED": "bright_black",
}


class VisibleConsole(Console):
    """A console that treats text as data, never as markup or emoji codes. Its only terminal controls are its own styles.

    Styles are written only to a terminal that supports them, and never if NO_COLOR is set. FORCE_COLOR is ignored, because
    build systems set it for other programs, and pipes would receive escape sequences.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> None:
        super().__init__(
            stderr=stderr,
            width=width,
            soft_wrap=soft_wrap,
            highlight=False,
            markup=False,
            emoji=False,
            color_system=None if os.environ.get("NO_COLOR") else "auto",
            force_terminal=(sys.stderr if stderr else sys.stdout).isatty(),
        )

    @property
    def file(self) -> IO[str]:
        """Return the current stream. It is looked up at each write, because consoles are cached and a program can replace its streams.

        A default stream is unwrapped, because the proxy of a live display would write back to this console.
        """
        return self._file or raw_stream(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text with its control characters escaped. This happens before the width of the text is measured."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object with all control characters in its text escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


@cache
def stdout_console() -> Console:
    """Return the console for stdout."""
    return VisibleConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


@cache
def stderr_console() -> Console:
    """Return the console for stderr."""
    # A terminal would break long lines inside words. Programs that read from a pipe get unbroken lines.
    return VisibleConsole(stderr=True, soft_wrap=not sys.stderr.isatty())


def say(text: str) -> None:
    """Write a message, which is not data, to stderr."""
    stderr_console().print(text)


def show_json(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout, with times in ISO format and the record fields as keys."""
    encoded = msgspec.json.encode(document, enc_hook=plain_value)
    print(visible_json(msgspec.json.format(encoded, indent=2).decode()))


def stdout_is_terminal() -> bool:
    """Return whether stdout is a terminal, whose width tables must fit. A pipe receives complete tables."""
    return sys.stdout.isatty()


def show_table(
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[Cell]],
    *,
    empty: str,
    numbers: Sequence[str] = (),
) -> None:
    """Write a table to stdout, or `empty` to stderr if there are no rows. The columns in `numbers` are right-aligned."""
    found = list(rows)
    if not found:
        say(empty)
        return
    described = [
        each if isinstance(each, Column) else Column(each, is_number=each in numbers) for each in columns
    ]
    width = stdout_console().width if stdout_is_terminal() else None
    _write(Text("\n").join(table_lines(described, found, width=width)))


def show_rows(rows: Iterable[Sequence[Column]], *, empty: str = "") -> None:
    """Write a table of rows with the same columns to stdout, or `empty` to stderr if there are no rows."""
    found = list(rows)
    show_table(found[0] if found else (), [[each.value for each in row] for row in found], empty=empty)


def show_pairs(pairs: Iterable[tuple[str, str | Text | None]]) -> None:
    """Write names and values to stdout, one pair per line. Pairs whose value is None are omitted."""
    shown = [
        (name, value if isinstance(value, Text) else Text(on_one_line(value)))
        for name, value in pairs
        if value is not None
    ]
    margin = max((cell_len(name) for name, _ in shown), default=0) + _GAP
    lines = (line for name, value in shown for line in _pair(name, value, margin=margin))
    _write(Text("\n").join(lines))


def _pair(name: str, value: Text, *, margin: int) -> Iterator[Text]:
    """Yield lines with a name beside its value, which is wrapped between words.

    If a word of the value is too long to fit beside the name, the name is placed above the value.
    """
    console = stdout_console()
    longest = max(map(cell_len, value.plain.split()), default=0)
    title = Text(name, style="bold")
    if stdout_is_terminal() and console.width - margin < longest <= console.width - _GAP:
        yield title
        title, margin = Text(), _GAP
    for line in value.wrap(console, console.width - margin):
        line.rstrip()
        yield Text.assemble(title, " " * (margin - title.cell_len), line)
        title = Text()


def show_hanging(label: Text, text: str, *, style: str = "") -> None:
    """Write a label followed by text to stdout. On a terminal, the text has a hanging indent."""
    width = stdout_console().width if stdout_is_terminal() else None
    lines = "\n".join(hanging(label.plain, on_one_line(text), width=width))
    _write(Text.assemble(label, lines[len(label.plain) :], style=style))


def paragraph(text: str) -> Text:
    """Return a text, such as a traceback, as a value whose line breaks are preserved."""
    return Text(visible(text))


def _write(lines: Text) -> None:
    console = stdout_console()
    if stdout_is_terminal():
        console.print(lines, soft_wrap=True)
        return
    with console.capture() as captured:
        console.print(lines, soft_wrap=True)
    for line in captured.get().removesuffix("\n").split("\n"):
        print(line.rstrip())
    sys.stdout.flush()  # messages on stderr must follow the data if both streams share a pipe


def show_heading(text: str) -> None:
    """Write a heading between two tables."""
    stdout_console().print(Text(f"\n{text}", style="bold underline"))


def state(value: TaskState | WorkflowState | NodeState) -> Text:
    """Return a state as text in its color."""
    return Text(value.value, style=state_style(value))


def state_style(value: TaskState | WorkflowState | NodeState) -> str:
    """Return the style of a state."""
    return _STATE_STYLES[value.value]


def moment(value: datetime | None) -> str:
    """Format a time for people, as local time with milliseconds. Return an empty string for None."""
    return "" if value is None else shown_moment(value)


def brief_moment(value: datetime | None) -> str:
    """Format a time for a narrow table: as the local time if it is today, else as the date."""
    if value is None:
        return ""
    local = value.astimezone()
    today = SystemClock().wall().astimezone().date()
    return f"{local:%H:%M:%S}" if local.date() == today else f"{local:%Y-%m-%d}"


def optional_moment(value: datetime | None) -> str | None:
    """Format a time like `moment`, but return None for None."""
    return None if value is None else moment(value)


def duration(seconds: float | None) -> str:
    """Format a duration as `brief_duration` does, or return an empty string for None."""
    return "" if seconds is None else brief_duration(seconds)


def brief(text: str, *, limit: int = 100) -> str:
    """Return a text on one line, truncated to `limit` characters. Newlines, which class names can contain, are escaped."""
    line = on_one_line(text[: limit + 1])
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def shown_labels(labels: Mapping[str, str]) -> str | None:
    """Return the labels on one line, such as `team=billing, tenant=42`, or None if there are none."""
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or None


def compact_json(value: object) -> str:
    """Return a value as JSON on one line."""
    return visible_json(msgspec.json.encode(value, enc_hook=plain_value).decode())
