"""Standard streams that keep control characters away from the terminal, and the layout of lines on the terminal.

This module does not load rich, because every command loads this module.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, Final, cast
from unicodedata import combining, east_asian_width

from everbeat.errors.wording import visible


class VisibleStream:
    """A text stream that escapes control and format characters."""

    def __init__(self, raw: IO[str]) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write the text with its control characters escaped."""
        self.raw.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line with its control characters escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Replace stdout and stderr with streams that never write control characters."""
    out, err = (cast(IO[str], VisibleStream(raw_stream(stream))) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def user_output_to_stderr() -> Iterator[None]:
    """Redirect the output of the user's module to stderr unchanged, because stdout is reserved for data."""
    err = raw_stream(sys.stderr)
    with redirect_stdout(err), redirect_stderr(err):
        yield


def raw_stream(stream: IO[str]) -> IO[str]:
    """Return the underlying stream, for the user's own code and for a console that escapes data itself."""
    return stream.raw if isinstance(stream, VisibleStream) else stream


_WORD: Final = re.compile(r"\s*\S+")
_LEAST: Final = 24
"""The minimum width of text beside its label. If less is available, the text is indented by two columns instead."""


def terminal_width(stream: IO[str]) -> int | None:
    """Return the width of the stream's terminal in columns, or None if the stream is not a terminal."""
    if not stream.isatty():
        return None
    if (given := os.environ.get("COLUMNS", "")).isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # a test stream, or a terminal without a size
        return None


def hanging(label: str, text: str, *, width: int | None, margin: int | None = None) -> list[str]:
    """Return the lines of `text` after its label. Continuation lines are indented by `margin`, or by the width of the label.

    Words are never split, even if they are too long for a line, so that they can be copied. If `width` is None, nothing is
    wrapped or indented.
    """
    if width is None:
        return f"{label}{text}".split("\n")
    margin = cells(label) if margin is None else margin
    margin = margin if width - margin >= _LEAST else 2
    lines: list[str] = []
    for line in text.split("\n"):
        first = width - (margin if lines else cells(label))
        for part in _wrapped(line, first=first, width=width - margin):
            if not lines and cells(part) <= first:
                lines.append(f"{label}{part}")
                continue
            if not lines and label.strip():
                lines.append(label.rstrip())
            lines.append(" " * max(0, min(margin, width - cells(part))) + part)
    return lines


def cells(text: str) -> int:
    """Return the number of terminal columns that the text occupies."""
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def _wrapped(line: str, *, first: int, width: int) -> Iterator[str]:
    """Yield the wrapped parts of one line. The first part has `first` columns; the others have `width` columns and keep the indentation."""
    indentation = line[: len(line) - len(line.lstrip())]
    part, room = "", first
    for word in _WORD.findall(line):
        if part.strip() and cells(part) + cells(word) > room:
            yield part
            part, room = f"{indentation}{word.lstrip()}", width
        else:
            part += word
    yield part
