"""Record the help text of every command, as a terminal of 80 columns shows it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

import typer

from everbeat.cli.main import COMMANDS, application, load_command

_TERMINAL = {"COLUMNS": "80", "LINES": "40", "NO_COLOR": "1", "TERM": "dumb"}


def text() -> str:
    """Return the help texts one below the other, each under its command line."""
    return "\n".join(f"$ everbeat {' '.join(path)} --help\n{_help(path)}" for path in _paths()).replace(
        "everbeat  --help", "everbeat --help"
    )


def _paths() -> Iterator[tuple[str, ...]]:
    yield ()
    for name in COMMANDS:
        yield from _below(load_command(name), (name,))


def _below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    for name, each in sorted(getattr(command, "commands", {}).items()):
        yield from _below(each, (*path, name))


def _help(path: tuple[str, ...]) -> str:
    shown = StringIO()
    with patch.dict(os.environ, _TERMINAL), redirect_stdout(shown):
        command = typer.main.get_command(application)
        command.main(args=[*path, "--help"], prog_name="everbeat", standalone_mode=False)
    return "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())
