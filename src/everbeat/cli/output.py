"""How commands speak: data on stdout, everything else on stderr; tables for people, one JSON document for programs.

What lives here: the two streams and the shapes of values. What may not: what is shown, which each command decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from everbeat.cli.streams import raw_stream
from everbeat.domain.outcome import TaskError
from everbeat.domain.states import TaskState
from everbeat.domain.workflow_info import NodeState, WorkflowState
from everbeat.errors.visible import on_one_line, visible, visible_json
from everbeat.runtime.clock import SystemClock

_PIPE_WIDTH = 1_000  # what reads a pipe wants whole lines
ON_STANDBY = (
    "This server is a standby: beats reach it with the delay of replication, so liveness is unknown here."
)
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
    """A console that writes its own styles and nothing else that a terminal obeys: text is data, never markup or emoji codes."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> None:
        super().__init__(
            stderr=stderr, width=width, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False
        )

    @property
    def file(self) -> IO[str]:
        """The stream as it is at each write: consoles are cached, and a program may replace its streams.

        The base class returns the stream below a live display's proxy, which writes back to this console.
        """
        return self._file or raw_stream(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text with its control characters visible, before its width is measured."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with the control characters of every text visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


@cache
def data_console() -> Console:
    """Stdout."""
    return VisibleConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


@cache
def side_console() -> Console:
    """Stderr."""
    return VisibleConsole(stderr=True, soft_wrap=True)


def say(text: str) -> None:
    """Writes a line that is no data to stderr."""
    side_console().print(text)


def show_json(document: Mapping[str, Any]) -> None:
    """Writes one JSON document to stdout: times in ISO format, keys as the records of the library name them."""
    encoded = msgspec.json.encode(document, enc_hook=_plain)
    print(visible_json(msgspec.json.format(encoded, indent=2).decode()))


def _plain(value: object) -> object:
    match value:
        case TaskError():
            return {
                "code": value.code,
                "message": value.message,
                "data": value.data,
                "type": value.type,
                "traceback": value.traceback,
            }
        case Mapping():
            return dict(value)
        case Path():
            return str(value)
        case _:
            return str(value)


_UNBROKEN = {"AFTER", "RECOVERED", "RAN AGAIN", "SENT", "STATE", "WAS"}
_NARROW = 30
_WIDE = 300
"""A longer value of one row would squeeze the columns of all others."""


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, empty: str, numbers: Sequence[str] = ()
) -> None:
    """Writes a table to stdout, or `empty` to stderr where there is no row; `numbers` are set flush right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        # The first column is what gets copied into the next command: it is never cut.
        table.add_column(
            column,
            justify="right" if column in numbers else "left",
            no_wrap=column in (columns[0], *numbers, *_UNBROKEN),
            overflow="fold",
        )
    for row in rows:
        table.add_row(
            *(
                cell
                if isinstance(cell, Text)
                else on_one_line(_cut(cell, _NARROW if name in (*numbers, *_UNBROKEN) else _WIDE))
                for name, cell in zip(columns, row, strict=True)
            )
        )
    if table.row_count:
        _write(table)
    else:
        say(empty)


def show_pairs(pairs: Iterable[tuple[str, str | Text | None]]) -> None:
    """Writes names and values, one a line, to stdout; those without a value are left out, `paragraph` keeps lines."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in pairs:
        if value is not None:
            table.add_row(name, value if isinstance(value, Text) else on_one_line(value))
    _write(table)


def paragraph(text: str) -> Text:
    """A value of several lines, such as a traceback."""
    return Text(visible(text))


def _write(table: Table) -> None:
    console = data_console()
    if sys.stdout.isatty():
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().removesuffix("\n").split("\n"):
        print(line.rstrip())  # a table is filled up with blanks to its right edge
    sys.stdout.flush()  # what is said of it on stderr comes after it, also where both go into one pipe


def show_heading(text: str) -> None:
    """Writes a heading between two tables."""
    data_console().print(Text(f"\n{text}", style="bold underline"))


def state(value: TaskState | WorkflowState | NodeState) -> Text:
    """A state in its colour."""
    return Text(value.value, style=state_style(value))


def state_style(value: TaskState | WorkflowState | NodeState) -> str:
    """The colour of a state."""
    return _STATE_STYLES[value.value]


def moment(value: datetime | None) -> str:
    """A time for people: local, to the millisecond."""
    return "" if value is None else value.astimezone().isoformat(sep=" ", timespec="milliseconds")


def brief_moment(value: datetime | None) -> str:
    """A time for a narrow table: the local time of today, or the day."""
    if value is None:
        return ""
    local = value.astimezone()
    today = SystemClock().wall().astimezone().date()
    return f"{local:%H:%M:%S}" if local.date() == today else f"{local:%Y-%m-%d}"


def optional_moment(value: datetime | None) -> str | None:
    """As `moment`; None where there is none."""
    return None if value is None else moment(value)


def duration(seconds: float | None) -> str:
    """A length of time for people: 850 ms, 12.3 s, 5 min, 3.4 h, 2.1 d."""
    if seconds is None:
        return ""
    for limit, unit, size, digits in (
        (1, "ms", 0.001, 0),
        (120, "s", 1, 1),
        (7_200, "min", 60, 1),
        (172_800, "h", 3_600, 1),
    ):
        if seconds < limit:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def brief(text: str, *, limit: int = 100) -> str:
    """The first line of a text, cut where it is too long for a table."""
    first = on_one_line(next(iter(text.splitlines()), ""))
    return first if len(first) <= limit else f"{first[: limit - 1]}…"


def amount(number: int, noun: str, *, plural: str | None = None) -> str:
    """A number with its noun: 0 tasks, 1 task, 1,000 tasks."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def compact_json(value: object) -> str:
    """A JSON value in one line."""
    return visible_json(msgspec.json.encode(value, enc_hook=_plain).decode())
