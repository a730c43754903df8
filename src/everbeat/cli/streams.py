"""The standard streams of a command: no control character in the output reaches a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

from everbeat.errors.visible import visible


class VisibleStream:
    """A text stream that writes control and format characters as visible escapes."""

    def __init__(self, raw: IO[str]) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write the text without anything that a terminal would obey."""
        self.raw.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Inside, stdout and stderr write no control characters."""
    out, err = (cast(IO[str], VisibleStream(raw_stream(stream))) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def own_voice() -> Iterator[None]:
    """Inside, the user's module is imported: what it prints goes to stderr as it is, because data is on stdout."""
    err = raw_stream(sys.stderr)
    with redirect_stdout(err), redirect_stderr(err):
        yield


def raw_stream(stream: IO[str]) -> IO[str]:
    """Return the stream below the guard: for a console that escapes data itself and adds styles, and for the user's own code."""
    return stream.raw if isinstance(stream, VisibleStream) else stream
