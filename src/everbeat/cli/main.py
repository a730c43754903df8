"""The command `everbeat`: its table of commands, loaded one at a time, and how an error becomes an exit code.

What lives here: what `everbeat --help` needs, and nothing heavier. What may not: any command; each has its own module
with a `commands: typer.Typer`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from everbeat import __version__
from everbeat.cli.exit_codes import MEANINGS, ExitCode, exit_code_of
from everbeat.cli.failures import show_failure, wants_traceback, wrong_usage
from everbeat.cli.streams import guarded_streams
from everbeat.errors import EverbeatError
from everbeat.runtime.inherited import correct_inherited

COMMANDS: Final = {
    "demo": ("everbeat.cli.demo.command", "Watch workers being killed and their work being finished."),
    "worker": ("everbeat.cli.worker", "Run the tasks of an app until told to stop."),
    "send": ("everbeat.cli.send", "Send one task by name."),
    "tasks": ("everbeat.cli.tasks", "List, show, cancel and retry tasks."),
    "workflows": ("everbeat.cli.workflows", "List, show, pause, resume, cancel and retry workflows."),
    "workers": ("everbeat.cli.workers", "Show workers, what they hold and whether they beat."),
    "queues": ("everbeat.cli.queues", "Show queues and what waits in them."),
    "recoveries": ("everbeat.cli.recoveries", "Show what was rescued from dead workers."),
    "explain": (
        "everbeat.cli.explain",
        "Say why a task is not running, or a workflow has not ended.",
    ),
    "doctor": ("everbeat.cli.doctor", "Examine the database and the workers, and say what helps."),
    "sweep": ("everbeat.cli.sweep", "Recover the tasks of dead workers now."),
    "prune": ("everbeat.cli.prune", "Delete what is older than is kept, now."),
    "migrate": ("everbeat.cli.migrate", "Create or upgrade the schema."),
    "check": ("everbeat.cli.check", "Report every mistake in an app's settings and tasks."),
    "bench": ("everbeat.cli.bench.command", "Measure sends, drains, latency and recovery on this machine."),
    "db": ("everbeat.cli.database", "Start, stop and enter the embedded PostgreSQL."),
}
"""Where each command lives and its one line of help: enough for --help, without loading any of them."""


# What the parser raises; it has lived in more than one package.
_USAGE_ERROR: Final = cast("type[Exception]", typer.BadParameter.__base__)


class LazyGroup(TyperGroup):
    """A group that knows its commands by their one line and loads the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, summary) in COMMANDS.items():
            self.commands[name] = TyperCommand(name=name, callback=None, help=summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Loads the command that `args` call, then goes on as usual."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """The command of this name, its module imported."""
    module, summary = COMMANDS[name]
    command = typer.main.get_command(import_module(module).commands)
    command.name = name
    command.help = command.help or summary
    return command


def _epilog() -> str:
    codes = "\n".join(f"  {code.value:<4} {meaning}" for code, meaning in MEANINGS.items())
    return (
        "\b\nThe database of a command: --url or EVERBEAT_DATABASE_URL ('embedded' keeps one in ./.everbeat),\n"
        "or that of an app: --app module:app. The schema: --schema or EVERBEAT_SCHEMA.\n"
        "A worker has those of its app. demo and bench heed --url alone and use the embedded server without it.\n"
        "Data is written to stdout, all else to stderr. NO_COLOR is respected; EVERBEAT_DEBUG=1 shows tracebacks.\n"
        "\n"
        f"\b\nExit codes:\n{codes}"
    )


application = typer.Typer(
    cls=LazyGroup,
    epilog=_epilog(),
    no_args_is_help=True,
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@application.callback(
    help="everbeat: a PostgreSQL task queue that notices dead workers and finishes their work."
)
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with one of `ExitCode`."""
    correct_inherited()
    with guarded_streams():
        _run(arguments)


def _run(arguments: Sequence[str] | None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    command = typer.main.get_command(application)
    try:
        # Whoever wants documents gets the parser's own errors as one, too: it then raises them instead of printing.
        code = command.main(args=given, prog_name="everbeat", standalone_mode=not as_json)
    except EverbeatError as error:
        if wants_traceback():
            raise
        show_failure(error, as_json=as_json)
        sys.exit(exit_code_of(error))
    except typer.Abort:
        sys.exit(ExitCode.INTERRUPTED)
    except _USAGE_ERROR as problem:
        show_failure(wrong_usage(problem), as_json=True)
        sys.exit(ExitCode.USAGE)
    sys.exit(code)
