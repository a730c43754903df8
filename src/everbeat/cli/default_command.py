"""A group of commands of which one is meant when none is named: `everbeat recoveries --task ID` is `... list --task ID`.

What lives here: finding out which one is meant. What may not: any command.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

DEFAULT = "list"


class ListByDefault(TyperGroup):
    """Goes on with `list` unless a command or the group's own help is asked for.

    commands = typer.Typer(cls=ListByDefault)
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments with the command that is meant."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)
