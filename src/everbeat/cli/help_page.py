"""The layout of `--help` pages, and groups with a default command. Does not load rich, so that --help is fast."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import cleandoc
from typing import Any, Final

from typer.core import TyperGroup

from everbeat.cli.streams import cells, hanging

_WIDEST: Final = 110
_WIDEST_NAME: Final = 28
_AS_WRITTEN: Final = "\b\n"
"""The prefix of a paragraph whose line breaks are preserved."""


def with_own_help(command: Any) -> Any:
    """Apply this module's help and usage layout to a command and its subcommands, and return the command."""
    command.format_help = partial(write_page, command)
    command.get_usage = partial(usage, command)
    for each in getattr(command, "commands", {}).values():
        with_own_help(each)
    return command


def write_page(command: Any, context: Any, formatter: Any) -> None:
    """Write the help page of a command. Replaces the command's `format_help` method."""
    formatter.write("\n".join(_page(command, context, width=_width())))


def usage(command: Any, context: Any) -> str:
    """Return the usage line of a command."""
    parts = ["[OPTIONS]"]
    parts += [_in_usage(each) for each in command.get_params(context) if _is_argument(each)]
    if hasattr(command, "commands"):
        parts.append("COMMAND [ARGS]...")
    return "\n".join(hanging(f"Usage: {context.command_path} ", " ".join(parts), width=_width()))


def _width() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST)


def _page(command: Any, context: Any, *, width: int) -> Iterator[str]:
    yield usage(command, context)
    yield from _text(command.help, width=width)
    records = [
        (_is_argument(each), _name(each), found[1])
        for each in command.get_params(context)
        if (found := each.get_help_record(context)) is not None
    ]
    yield from _list(
        "Arguments", [(name, text) for is_argument, name, text in records if is_argument], width=width
    )
    yield from _list(
        "Options", [(name, text) for is_argument, name, text in records if not is_argument], width=width
    )
    inner = [(name, each) for name, each in getattr(command, "commands", {}).items() if not each.hidden]
    yield from _list("Commands", [(name, _summary(each)) for name, each in inner], width=width)
    yield from _text(command.epilog, width=width)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _in_usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    if name.startswith("["):
        return str(name)
    return str(name if argument.required else f"[{name}]")


def _name(parameter: Any) -> str:
    if _is_argument(parameter):
        return _in_usage(parameter)
    short_first = sorted([*parameter.opts, *parameter.secondary_opts], key=lambda each: each.startswith("--"))
    names = ", ".join(short_first)
    # Only options that take a number lack a metavar.
    return names if parameter.is_flag else f"{names} {parameter.metavar or 'NUMBER'}"


def _summary(command: Any) -> str:
    return " ".join(next(_paragraphs(command.help), "").split())


def _paragraphs(text: str | None) -> Iterator[str]:
    return (each for each in re.split(r"\n[ \t]*\n", cleandoc(text or "")) if each.strip())


def _text(text: str | None, *, width: int) -> Iterator[str]:
    for paragraph in _paragraphs(text):
        yield ""
        raw = paragraph.removeprefix(_AS_WRITTEN)
        for line in raw.split("\n") if raw != paragraph else [" ".join(paragraph.split())]:
            yield from hanging("  ", line, width=width)


def _list(title: str, rows: Sequence[tuple[str, str]], *, width: int) -> Iterator[str]:
    """Yield lines with names and their descriptions side by side. A name that is too long is placed above its description."""
    if not rows:
        return
    yield f"\n{title}:"
    column = max((cells(name) for name, _ in rows if cells(name) <= _WIDEST_NAME), default=0) + 4
    for name, text in rows:
        if cells(name) + 4 > column:
            yield f"  {name}"
            name = ""
        yield from hanging(f"  {name}".ljust(column), re.sub(r"\s*\n\s*", " ", text), width=width)


DEFAULT = "list"


class ListByDefault(TyperGroup):
    """A command group that runs `list` if the command line names no command and does not request help.

    commands = typer.Typer(cls=ListByDefault)
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if needed, and parse the arguments."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)
