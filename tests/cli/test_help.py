"""Test that the pages of `--help` fit into the terminal, break no word and cut no text."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rich.cells import cell_len

from everbeat.cli.main import COMMANDS, load_command
from tests.cli.conftest import Command
from tests.cli.terminal import pages_at_terminal

WIDE = 110


def every_command() -> dict[tuple[str, ...], Any]:
    """Return every command and subcommand by the words that call it."""
    found: dict[tuple[str, ...], Any] = {}
    waiting = [((name,), load_command(name)) for name in COMMANDS]
    while waiting:
        words, command = waiting.pop(0)
        found[words] = command
        waiting += [((*words, name), each) for name, each in getattr(command, "commands", {}).items()]
    return found


def help_pages(everbeat: Command, *, columns: int) -> dict[tuple[str, ...], str]:
    paths: list[tuple[str, ...]] = [(), *every_command()]
    pages = pages_at_terminal(
        [[*words, "--help"] for words in paths],
        folder=everbeat.folder,
        environment=everbeat.environment,
        columns=columns,
    )
    return dict(zip(paths, pages, strict=True))


@pytest.mark.parametrize("columns", [pytest.param(60, marks=pytest.mark.long), 80])
def test_the_help_of_every_command_fits_into_the_terminal_and_breaks_no_word(
    everbeat: Command, columns: int
) -> None:  # J10
    wide = help_pages(everbeat, columns=WIDE)
    assert len(wide) > 40
    for words, page in help_pages(everbeat, columns=columns).items():
        assert [line for line in page.splitlines() if cell_len(line) > columns] == [], words
        assert page.split() == wide[words].split(), words


@pytest.mark.long
def test_the_help_of_every_command_has_the_whole_text_of_its_options_and_subcommands(
    everbeat: Command,
) -> None:  # J10
    pages = help_pages(everbeat, columns=60)
    for words, command in every_command().items():
        page = " ".join(pages[words].split())
        assert page.startswith(f"Usage: everbeat {' '.join(words)} [OPTIONS]"), words
        for parameter in command.params:
            text = " ".join((getattr(parameter, "help", None) or "").split())
            assert text in page, (words, parameter.name)
            assert max(parameter.opts, key=len) in page or parameter.param_type_name == "argument"
        for name, each in getattr(command, "commands", {}).items():
            summary = " ".join((each.help or "").split("\n\n")[0].split())
            assert each.hidden or f"{name} {summary}" in page, (words, name)
        assert not re.search("<[a-z]", page), (words, "the name of a Python type")
        assert "[[" not in page, (words, "an argument in brackets twice")
